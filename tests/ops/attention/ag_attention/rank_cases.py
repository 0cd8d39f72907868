"""Test bodies for the interaction of ranks in ag_attention. Every rank runs them; see test_ag_attention.py.

Determinism, disagreement between ranks, and peers that are late or missing.
"""

import random
import time
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import AgAttentionConfig, PeerTimeoutError, PlanMismatchError
from tdkernels.ops.attention.ag_attention import launch as ag_attention_launch
from tdkernels.ops.attention.ag_attention import launch_dq as ag_attention_launch_dq
from tdkernels.ops.attention.ag_attention import pipelined
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.collectives.async_reduce_scatter import AsyncReduceScatter
from tests.ops.attention.ag_attention.cases import CONFIGS, PIPELINED
from tests.ops.attention.ag_attention.oracle import FP16, FP32, NAMES, Sharded, enlarge
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# Only a few kinds of calls, since a GPU compiles kernels for each.
KINDS = [
    (enlarge(dict(rows=21, batch=2, heads=2, kv_heads=1, dv=24, sharding="zigzag", seed=1)), "default"),
    (enlarge(dict(rows=40, heads=2, kv_heads=2, dtype=FP16, seed=2)), "small blocks"),
    (enlarge(dict(rows=17, heads=1, kv_heads=1, d=33, dtype=FP32, causal=False, seed=3)), "large chunks"),
    (enlarge(dict(rows=19, heads=2, kv_heads=1, sharding="zigzag", seed=4)), "flash"),  # dlse needs the fused backward
]


def is_deterministic(kinds, calls, seed):
    """Check that every call returns the same bits, with random delays and memory filled with NaN in between."""
    shared_rng, rank_rng = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    cases = []
    for spec, config in kinds:
        case = Sharded(**spec)
        cases.append((case, CONFIGS[config], case.run(config=CONFIGS[config])))
        case.check(cases[-1][2])
    with poisoned_outputs():
        for _ in range(calls):
            case, config, expected = shared_rng.choice(cases)
            if shared_rng.random() < 0.4:
                poison()
            time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.02)]))
            case.require()
            o, lse = case.call(config=config)
            time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.02)]))
            case.backward(o, lse)
            if shared_rng.random() < 0.4:
                poison()  # outputs must not alias the workspace
            tdkernels.synchronize()
            for name, result in {"o": o.detach(), "lse": lse.detach(), **case.gradients()}.items():
                assert torch.equal(result, expected[name]), f"{name} of {case.title}"


def runs_ahead_of_peers(calls, sharding, config):
    """Check back-to-back calls with fresh data while ranks run ahead of each other."""
    config, lse = CONFIGS[config], config not in PIPELINED
    cases = [Sharded(**enlarge(dict(rows=20, heads=1)), sharding=sharding, lse=lse, seed=seed) for seed in range(calls)]
    cases[0].run(config=config)
    for case in cases:
        case.require()
    with in_any_order(seed=calls):
        outputs = [case.call(config=config) for case in cases]
        for case, (o, lse) in zip(cases, outputs, strict=True):
            case.backward(o, lse)
    for case, (o, lse) in zip(cases, outputs, strict=True):
        case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})


def waits_for_a_slow_rank(config):
    for slow in range(dist.get_world_size()):
        case = Sharded(**enlarge(dict(rows=18)), sharding="zigzag", lse=config not in PIPELINED, seed=slow)
        case.require()
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        o, lse = case.call(config=CONFIGS[config])
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        case.backward(o, lse)
        case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})


BASE = dict(rows=8, heads=2, kv_heads=1)
# name: (changes on rank 1 of three, its call options, the field named in the error, its value there, and elsewhere)
DISAGREEMENTS = {
    "positions": (dict(rows=9), {}, "S/W", 9, 8),
    "no positions": (dict(rows=0), {}, "S/W", 0, 8),
    "batch": (dict(batch=2), {}, "B", 2, 1),
    "heads": (dict(heads=4), {}, "Hq", 4, 2),
    "heads of keys": (dict(kv_heads=2), {}, "Hkv", 2, 1),
    "width": (dict(d=24), {"scale": 0.25}, "D", 24, 16),
    "width of values": (dict(dv=24), {}, "Dv", 24, 16),
    "dtype": (dict(dtype=FP32), {}, "dtype", '"torch.float32"', '"torch.bfloat16"'),
    "mask": (dict(causal=False), {}, "causal", "false", "true"),
    "sharding": (dict(sharding="zigzag"), {}, "sharding", '"zigzag"', '"contiguous"'),
    "scale": (dict(scale=1.0), {}, "scale", 1.0, 0.25),
    "chunks": ({}, {"config": AgAttentionConfig(chunk_rows=32)}, "config", "chunk_rows=32", "left to autotune (off)"),
    "method": ({}, {"config": CONFIGS["torch"]}, "config", "method=torch", "left to autotune (off)"),
}


def reports_disagreement(name):
    """Check that every rank raises an error which names the field, and that the group stays usable."""
    changes, options, field, odd_value, usual_value = DISAGREEMENTS[name]
    odd = dist.get_rank() == 1
    with a_group() as group:
        usual = Sharded(**BASE, group=group)
        case = Sharded(**BASE | (changes if odd else {}), group=group)
        error = failure_of(case.call, **(options if odd else {}))
        assert type(error) is ValueError, repr(error)
        for text in (
            "ag_attention: the ranks disagree", f"{field} is ", f"{usual_value}", "on ranks 0, 2", f"{odd_value}"
        ):
            assert text in str(error), f"{text} in {error}"
        assert "on rank 1" in str(error), str(error)
        with torch.no_grad():
            usual.check({"o": usual.call()[0]})
        del group, case, usual


# Changes of rank 1's call to one that is also cached.
CACHED = {"positions": dict(rows=12), "sharding": dict(sharding="zigzag"), "mask": dict(causal=False)}


def detects_mismatch_of_cached_plans(name):
    """Check that different cached calls fail. No consensus check runs for them; only the signals can detect it."""
    with a_group() as group:
        cases = [Sharded(**BASE, group=group), Sharded(**BASE | CACHED[name], group=group)]
        for case in cases * 2:
            case.check({"o": case.call()[0]})
        dist.barrier()
        case = cases[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.call)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        second_error = failure_of(case.call)
        assert second_error is not None
        del group, case, cases


# name: (module, function at which rank 1 leaves, whether in the backward, config)
MISSED = {
    "keys": (ag_attention_launch, "launch", False, "default"),
    "queries": (ag_attention_launch_dq, "launch_dkv", True, "default"),
    "keys by parts": (pipelined, "forward", False, "flash"),
    "sums by parts": (AsyncReduceScatter, "send", True, "flash"),
}


def loses_rank_1(leave, step, timeout_s):
    """Check that the other ranks raise, in this and all later calls, if rank 1 exits before it sends keys or queries.

    They must raise even if a causal mask makes rank 1's data unnecessary: rank 0 needs no key of rank 1.
    """
    module, name, backward, config = MISSED[step]
    case, config = Sharded(**BASE, lse=config not in PIPELINED), CONFIGS[config]
    case.check(case.run(config=config))
    case.require(NAMES if backward else ())
    o = case.call(config=config)[0] if backward else None
    tdkernels.set_timeout(timeout_s)
    tdkernels.synchronize()
    dist.barrier()

    def call():
        if o is None:
            case.call(config=config)
        else:
            o.backward(case.do)

    if dist.get_rank() == 1:
        setattr(module, name, lambda *args, **kwargs: leave())
        call()
    start = time.monotonic()
    error = failure_of(call)
    assert time.monotonic() - start < timeout_s + 5.0
    assert failure_of(case.call) is not None
    raise error


def sends_no_gradients_after_timeout(timeout_s):
    """Check that rank 0, which misses rank 1's keys, does not send gradients computed from stale ones. GPUs only."""
    case = Sharded(**enlarge(dict(rows=64, causal=False)), lse=False)
    config = CONFIGS["flash"]
    case.check(case.run(config=config))
    case.require()
    o, _ = case.call(config=config)
    tdkernels.synchronize()
    dist.barrier()
    # Rank 1 waits longer, so it would see a signal that rank 0 sends after its own timeout.
    sends_none = mock.patch.object(AsyncAllGather, "copy") if dist.get_rank() == 1 else nullcontext()
    with timeout(timeout_s * (1 + 2 * dist.get_rank())), sends_none:
        error = failure_of(o.backward, case.do)
    assert isinstance(error, PeerTimeoutError), repr(error)
