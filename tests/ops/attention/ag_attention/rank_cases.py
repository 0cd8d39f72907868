"""What holds between the ranks of an ag_attention, as functions that every rank runs.

test_ag_attention.py asks: the same bits each time, disagreement, and peers that come late or never.
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
from tests.ops.attention.ag_attention.cases import BY_PARTS, CONFIGS
from tests.ops.attention.ag_attention.oracle import FP16, FP32, NAMES, Sharded, many
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# Few kinds of calls, since a GPU compiles each.
KINDS = [
    (many(dict(rows=21, batch=2, heads=2, kv_heads=1, dv=24, sharding="zigzag", seed=1)), "default"),
    (many(dict(rows=40, heads=2, kv_heads=2, dtype=FP16, seed=2)), "small blocks"),
    (many(dict(rows=17, heads=1, kv_heads=1, d=33, dtype=FP32, causal=False, seed=3)), "large chunks"),
    (many(dict(rows=19, heads=2, kv_heads=1, sharding="zigzag", seed=4)), "flash"),  # the gradient of lse is ours
]


def repeats(kinds, calls, seed):
    """The same bits in every call, between which ranks wait at random and all memory is filled with NaNs."""
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    cases = []
    for spec, config in kinds:
        case = Sharded(**spec)
        cases.append((case, CONFIGS[config], case.run(config=CONFIGS[config])))
        case.check(cases[-1][2])
    with poisoned_outputs():
        for _ in range(calls):
            case, config, expected = of_all.choice(cases)
            if of_all.random() < 0.4:
                poison()
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            case.require()
            o, lse = case.call(config=config)
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            case.backward(o, lse)
            if of_all.random() < 0.4:
                poison()  # what we got is ours and does not change with the workspace
            tdkernels.synchronize()
            for name, result in {"o": o.detach(), "lse": lse.detach(), **case.gradients()}.items():
                assert torch.equal(result, expected[name]), f"{name} of {case.title}"


def outruns_its_peers(calls, sharding, config):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other."""
    config, lse = CONFIGS[config], config not in BY_PARTS
    cases = [Sharded(**many(dict(rows=20, heads=1)), sharding=sharding, lse=lse, seed=seed) for seed in range(calls)]
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
        case = Sharded(**many(dict(rows=18)), sharding="zigzag", lse=config not in BY_PARTS, seed=slow)
        case.require()
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        o, lse = case.call(config=CONFIGS[config])
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        case.backward(o, lse)
        case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})


USUAL = dict(rows=8, heads=2, kv_heads=1)
# What rank 1 of three does otherwise, and the field that says so, with its value there and elsewhere.
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


def disagrees(what):
    """Everybody is told, and the group is as good as before."""
    changes, options, field, there, elsewhere = DISAGREEMENTS[what]
    odd = dist.get_rank() == 1
    with a_group() as group:
        usual = Sharded(**USUAL, group=group)
        case = Sharded(**USUAL | (changes if odd else {}), group=group)
        error = failure_of(case.call, **(options if odd else {}))
        assert type(error) is ValueError, repr(error)
        for words in ("ag_attention: the ranks disagree", f"{field} is ", f"{elsewhere}", "on ranks 0, 2", f"{there}"):
            assert words in str(error), f"{words} in {error}"
        assert "on rank 1" in str(error), str(error)
        with torch.no_grad():
            usual.check({"o": usual.call()[0]})
        del group, case, usual


# Another way to call than the usual one, which rank 1 takes; both are known.
KNOWN = {"positions": dict(rows=12), "sharding": dict(sharding="zigzag"), "mask": dict(causal=False)}


def is_not_fooled_by_a_known_plan(what):
    """Both calls have been made before, so nobody asks the others; only the signals can tell."""
    with a_group() as group:
        ways = [Sharded(**USUAL, group=group), Sharded(**USUAL | KNOWN[what], group=group)]
        for case in ways * 2:
            case.check({"o": case.call()[0]})
        dist.barrier()
        case = ways[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.call)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        again = failure_of(case.call)
        assert again is not None
        del group, case, ways


# What rank 1 does not come to, whether backward, and in which config.
LOST = {
    "keys": (ag_attention_launch, "launch", False, "default"),
    "queries": (ag_attention_launch_dq, "launch_dkv", True, "default"),
    "keys by parts": (pipelined, "forward", False, "flash"),
    "sums by parts": (AsyncReduceScatter, "send", True, "flash"),
}


def loses_rank_1(leave, when, timeout_s):
    """Rank 1 is gone before its keys, or its queries, are sent; the others say so, now and whenever asked again.

    Causal, rank 0 needs no key of rank 1, and no rank needs rank 0's queries but those before it: it has to say so yet.
    """
    module, name, backward, config = LOST[when]
    case, config = Sharded(**USUAL, lse=config not in BY_PARTS), CONFIGS[config]
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


def announces_no_sums_of_what_has_not_come(timeout_s):
    """Rank 1's keys never come; what rank 0 makes of what is in their place is no result for rank 1. GPUs only."""
    case = Sharded(**many(dict(rows=64, causal=False)), lse=False)
    config = CONFIGS["flash"]
    case.check(case.run(config=config))
    case.require()
    o, _ = case.call(config=config)
    tdkernels.synchronize()
    dist.barrier()
    # Rank 1 has the patience to see what rank 0 announces after its own wait has ended.
    sends_none = mock.patch.object(AsyncAllGather, "copy") if dist.get_rank() == 1 else nullcontext()
    with timeout(timeout_s * (1 + 2 * dist.get_rank())), sends_none:
        error = failure_of(o.backward, case.do)
    assert isinstance(error, PeerTimeoutError), repr(error)
