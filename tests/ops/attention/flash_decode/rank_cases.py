"""What holds between the ranks of flash_decode, as functions that every rank runs.

test_flash_decode_ranks.py asks: the same bits whenever, memory used again, disagreement, and peers that come late or
never.
"""

import random
import time

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import FlashDecodeConfig, PeerTimeoutError, PlanMismatchError
from tests.ops.attention.flash_decode.cases import config_of
from tests.ops.attention.flash_decode.oracle import FP16, FP32, Decode, gives_memory_back, many
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# Few kinds of calls, since a GPU compiles each.
KINDS = [
    (many(dict(batch=3, heads=4, kv_heads=2, dim=16, keys=20, seed=1)), "default"),
    (many(dict(batch=1, heads=3, kv_heads=1, dim=32, keys=40, dtype=FP16, tokens=2, window=50, lens="full", seed=2)),
     "small blocks"),
    (many(dict(batch=2, heads=2, kv_heads=2, dim=16, keys=9, page=4, lens="not first", seed=3)), "default"),
]


@gives_memory_back
def repeats(kinds, calls, seed, backward=True):
    """The same bits in every call, between which ranks wait at random and all memory is filled with NaNs."""
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    cases = []
    for spec, config in kinds:
        case = Decode(**spec)
        wanted = ("q", "k_cache", "v_cache") if backward else ()
        cases.append((case, config_of(config), wanted, case.run(wanted, config=config_of(config))))
        case.check(cases[-1][3])
    with poisoned_outputs():
        for _ in range(calls):
            case, config, wanted, expected = of_all.choice(cases)
            if of_all.random() < 0.3:
                poison()
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            results = case.run(wanted, config=config)
            if of_all.random() < 0.3:
                poison()  # what we got is ours and does not change with the workspace
            tdkernels.synchronize()
            for name, result in results.items():
                assert torch.equal(result, expected[name]), f"{name} of {case.title}"


def outruns_its_peers(calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other.

    A rank without keys, as the first is here, has nothing to wait for but its peers.
    """
    spec = many(dict(batch=2, heads=2, kv_heads=1, dim=16, keys=5, lens="not first"), rows=16)
    cases = [Decode(**spec, seed=seed) for seed in range(calls)]
    cases[0].run()
    for case in cases:
        case.require()
    with in_any_order(seed=calls):
        outputs = [case.call(return_lse=True) for case in cases]
        for case, of_case in zip(cases, outputs, strict=True):
            torch.autograd.backward(of_case, [case.do, case.dlse])
    for case, (o, lse) in zip(cases, outputs, strict=True):
        case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})


def waits_for_a_slow_rank():
    for slow in range(dist.get_world_size()):
        case = Decode(**many(USUAL), seed=slow)
        case.require()
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        o = case.call()
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        o.backward(case.do)
        case.dlse = torch.zeros_like(case.dlse)
        case.check({"o": o.detach(), **case.gradients()})


def grows():
    """Longer and shorter, wider and narrower, in the same workspace."""
    for turn in range(2):
        for number, changes in enumerate([{}, {"batch": 4}, {"heads": 8}, {"dim": 80}, {"tokens": 3}, {"keys": 33}]):
            case = Decode(**USUAL | changes, seed=10 * turn + number)
            results = {"o": case.call()}
            poison()
            case.check(results)


# ---- ranks that do not agree ----

USUAL = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6)
# What rank 1 of three does otherwise, and the field that says so, with its value there and elsewhere.
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


def disagrees(what):
    """Everybody is told, and the group is as good as before."""
    changes, fields, field, there, elsewhere = DISAGREEMENTS[what]
    odd = dist.get_rank() == 1
    with a_group() as group:
        case, usual = Decode(**USUAL | (changes if odd else {}), group=group), Decode(**USUAL, group=group)
        error = failure_of(case.call, **({"config": FlashDecodeConfig(**fields)} if odd and fields else {}))
        assert type(error) is ValueError, repr(error)
        words = ("flash_decode: the ranks disagree", f"{field} is ", elsewhere, "on ranks 0, 2", there, "on rank 1")
        for word in words:
            assert word in str(error), f"{word} in {error}"
        usual.check({"o": usual.call()})
        del group, case, usual


def takes_rooms_that_differ():
    """How much room a rank has is its own business."""
    case = Decode(**USUAL, lens="full")
    if dist.get_rank() == 1:
        case.k_cache, case.v_cache = (
            torch.cat([cache, torch.full_like(cache, torch.nan)], 1) for cache in (case.k_cache, case.v_cache)
        )
    case.check({"o": case.call()})


# Another way to call than the usual one, which rank 1 takes; both are known.
KNOWN = {
    "batch": dict(batch=3), "heads": dict(heads=8), "tokens": dict(tokens=2), "scale": dict(scale=0.5),
    "window": dict(window=3), "blocks": dict(config="small blocks"),
}


def is_not_fooled_by_a_known_plan(what):
    """Both calls have been made before, so nobody asks the others; only the signals can tell."""
    changes = dict(KNOWN[what])
    config = config_of(changes.pop("config", "default"))
    with a_group() as group:
        ways = [(Decode(**USUAL, group=group), None), (Decode(**USUAL | changes, group=group), config)]
        for case, config in ways * 2:
            case.check({"o": case.call(config=config)})
        dist.barrier()
        case, config = ways[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.call, config=config)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        again = failure_of(case.call, config=config)
        assert again is not None
        del group, case, ways


# ---- ranks that do not come ----


def loses_rank_1(leave, timeout_s):
    """Rank 1 is gone before it has attended to its keys; the others say so, now and whenever asked again."""
    case = Decode(**USUAL)
    for _ in range(2):
        case.check({"o": case.call()})
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        leave()
    start = time.monotonic()
    error = failure_of(case.call)
    assert time.monotonic() - start < timeout_s + 5.0
    again = failure_of(case.call)
    assert again is not None
    raise error


def comes_when_rank_0_has_given_up():
    """Rank 1 is late. Rank 0 has long sent what its own keys gave, which is right for everybody."""
    rank = dist.get_rank()
    with a_group() as group:
        case = Decode(**USUAL, group=group)
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
                answer = "right"
            except PeerTimeoutError as error:
                answer = f"missed {error.peer}"
                error.__traceback__ = None
        del group, case
    return answer
