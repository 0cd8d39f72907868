"""Test bodies for the interaction of ranks in flash_decode. Every rank runs them; see test_flash_decode_ranks.py.

Determinism, reuse of the workspace, disagreement between ranks, and peers that are late or missing.
"""

import random
import time

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import FlashDecodeConfig, PeerTimeoutError, PlanMismatchError
from tests.ops.attention.flash_decode.cases import config_of
from tests.ops.attention.flash_decode.oracle import FP16, FP32, Decode, enlarge, releases_memory
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# Only a few kinds of calls, since a GPU compiles kernels for each.
KINDS = [
    (enlarge(dict(batch=3, heads=4, kv_heads=2, dim=16, keys=20, seed=1)), "default"),
    (enlarge(dict(batch=1, heads=3, kv_heads=1, dim=32, keys=40, dtype=FP16, tokens=2, window=50, lens="full", seed=2)),
     "small blocks"),
    (enlarge(dict(batch=2, heads=2, kv_heads=2, dim=16, keys=9, page=4, lens="not first", seed=3)), "default"),
]


@releases_memory
def is_deterministic(kinds, calls, seed, backward=True):
    """Check that every call returns the same bits, with random delays and memory filled with NaN in between."""
    shared_rng, rank_rng = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    cases = []
    for spec, config in kinds:
        case = Decode(**spec)
        inputs = ("q", "k_cache", "v_cache") if backward else ()
        cases.append((case, config_of(config), inputs, case.run(inputs, config=config_of(config))))
        case.check(cases[-1][3])
    with poisoned_outputs():
        for _ in range(calls):
            case, config, inputs, expected = shared_rng.choice(cases)
            if shared_rng.random() < 0.3:
                poison()
            time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.02)]))
            results = case.run(inputs, config=config)
            if shared_rng.random() < 0.3:
                poison()  # outputs must not alias the workspace
            tdkernels.synchronize()
            for name, result in results.items():
                assert torch.equal(result, expected[name]), f"{name} of {case.title}"


def runs_ahead_of_peers(calls):
    """Check back-to-back calls with fresh data while ranks run ahead of each other.

    The first rank has no keys, so it computes nothing and runs ahead.
    """
    spec = enlarge(dict(batch=2, heads=2, kv_heads=1, dim=16, keys=5, lens="not first"), rows=16)
    cases = [Decode(**spec, seed=seed) for seed in range(calls)]
    cases[0].run()
    for case in cases:
        case.require()
    with in_any_order(seed=calls):
        outputs = [case.call(return_lse=True) for case in cases]
        for case, case_outputs in zip(cases, outputs, strict=True):
            torch.autograd.backward(case_outputs, [case.do, case.dlse])
    for case, (o, lse) in zip(cases, outputs, strict=True):
        case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})


def waits_for_a_slow_rank():
    for slow in range(dist.get_world_size()):
        case = Decode(**enlarge(BASE), seed=slow)
        case.require()
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        o = case.call()
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        o.backward(case.do)
        case.dlse = torch.zeros_like(case.dlse)
        case.check({"o": o.detach(), **case.gradients()})


def computes_growing_shapes():
    """Check calls of growing and shrinking sizes in the same workspace."""
    for turn in range(2):
        for number, changes in enumerate([{}, {"batch": 4}, {"heads": 8}, {"dim": 80}, {"tokens": 3}, {"keys": 33}]):
            case = Decode(**BASE | changes, seed=10 * turn + number)
            results = {"o": case.call()}
            poison()
            case.check(results)


# ---- disagreement between ranks ----

BASE = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6)
# name: (changes on rank 1 of three, config fields, the field named in the error, its value there, and elsewhere)
DISAGREEMENTS = {
    "batch": (dict(batch=3), {}, "q", "[3, 1, 4, 16]", "[2, 1, 4, 16]"),
    "heads": (dict(heads=6), {}, "q", "[2, 1, 6, 16]", "[2, 1, 4, 16]"),
    "kv heads": (dict(kv_heads=1), {}, "heads", "1", "2"),
    "dim": (dict(dim=32, value_dim=16), {}, "q", "[2, 1, 4, 32]", "[2, 1, 4, 16]"),
    "channels of values": (dict(value_dim=8), {}, "Dv", "8", "16"),
    "tokens": (dict(tokens=2), {}, "q", "[2, 2, 4, 16]", "[2, 1, 4, 16]"),
    "no sequences": (dict(batch=0), {}, "q", "[0, 1, 4, 16]", "[2, 1, 4, 16]"),
    "dtype": (dict(dtype=FP32), {}, "dtype", '"torch.float32"', '"torch.bfloat16"'),
    "scale": (dict(scale=0.5), {}, "scale", "0.5", "0.25"),
    "soft cap": (dict(soft_cap=2.0), {}, "soft_cap", "2.0", ""),
    "window": (dict(window=3), {}, "window", "3", ""),
    "config": ({}, dict(block_n=128), "config", "block_n=128", "left to autotune (off)"),
    "method": ({}, dict(method="torch"), "config", "method=torch", "left to autotune (off)"),
}


def reports_disagreement(name):
    """Check that every rank raises an error which names the field, and that the group stays usable."""
    changes, fields, field, odd_value, usual_value = DISAGREEMENTS[name]
    odd = dist.get_rank() == 1
    with a_group() as group:
        case, usual = Decode(**BASE | (changes if odd else {}), group=group), Decode(**BASE, group=group)
        error = failure_of(case.call, **({"config": FlashDecodeConfig(**fields)} if odd and fields else {}))
        assert type(error) is ValueError, repr(error)
        fragments = (
            "flash_decode: the ranks disagree", f"{field} is ", usual_value, "on ranks 0, 2", odd_value, "on rank 1"
        )
        for fragment in fragments:
            assert fragment in str(error), f"{fragment} in {error}"
        usual.check({"o": usual.call()})
        del group, case, usual


def supports_different_capacities():
    """Check that ranks may have caches of different capacity."""
    case = Decode(**BASE, lens="full")
    if dist.get_rank() == 1:
        case.k_cache, case.v_cache = (
            torch.cat([cache, torch.full_like(cache, torch.nan)], 1) for cache in (case.k_cache, case.v_cache)
        )
    case.check({"o": case.call()})


# Changes of rank 1's call to one that is also cached.
CACHED = {
    "batch": dict(batch=3), "heads": dict(heads=8), "tokens": dict(tokens=2), "scale": dict(scale=0.5),
    "window": dict(window=3), "blocks": dict(config="small blocks"),
}


def detects_mismatch_of_cached_plans(name):
    """Check that different cached calls fail. No consensus check runs for them; only the signals can detect it."""
    changes = dict(CACHED[name])
    config = config_of(changes.pop("config", "default"))
    with a_group() as group:
        calls = [(Decode(**BASE, group=group), None), (Decode(**BASE | changes, group=group), config)]
        for case, config in calls * 2:
            case.check({"o": case.call(config=config)})
        dist.barrier()
        case, config = calls[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.call, config=config)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        second_error = failure_of(case.call, config=config)
        assert second_error is not None
        del group, case, calls


# ---- missing and late ranks ----


def loses_rank_1(leave, timeout_s):
    """Check that the other ranks raise, in this and all later calls, if rank 1 exits before its call."""
    case = Decode(**BASE)
    for _ in range(2):
        case.check({"o": case.call()})
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        leave()
    start = time.monotonic()
    error = failure_of(case.call)
    assert time.monotonic() - start < timeout_s + 5.0
    second_error = failure_of(case.call)
    assert second_error is not None
    raise error


def delays_rank_1():
    """Let rank 1 be late: rank 0 times out, but its partial result was already sent and is valid for its peers."""
    rank = dist.get_rank()
    with a_group() as group:
        case = Decode(**BASE, group=group)
        for _ in range(2):
            expected = case.call()
            case.check({"o": expected})
        dist.barrier()
        with timeout(0.3 if rank == 0 else 2.0):
            time.sleep(0.9 if rank == 1 else 0.0)
            try:
                o = case.call()
                tdkernels.synchronize()
                assert torch.equal(o, expected)
                outcome = "right"
            except PeerTimeoutError as error:
                outcome = f"missed {error.peer}"
                error.__traceback__ = None
        del group, case
    return outcome
