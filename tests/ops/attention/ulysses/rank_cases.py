"""What holds between the ranks of the Ulysses projections, as functions that every rank runs.

test_ulysses_ranks.py asks: the same bits whenever, memory used again, disagreement, and peers that come late or never.
"""

import functools
import itertools
import os
import random
import signal
import time

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError, UlyssesConfig
from tests.ops.attention.ulysses.cases import BF16, CONFIGS, FLAT, FP16, FP32, OPERATORS, Projection
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# Few kinds of calls, since a GPU compiles each.
KINDS = [
    (("ulysses_qkv", BF16, 20, 24, 40, 1), "pulled at once"),
    (("ulysses_out", BF16, 20, 32, 24, 2), "pulled at once"),
    (("ulysses_qkv", FP32, 19, 9, 7, 2), "pushed"),
    (("ulysses_out", FP32, 19, 9, 7, 1), "pushed"),
]


def repeats(kinds, calls, seed):
    """The same bits in every call, of data that changes, while ranks wait at random and all memory is poisoned."""
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    known = []
    for number, (kind, config) in enumerate(kinds * 2):
        case = Projection(*kind, seed=number)
        known.append((case, CONFIGS[config], case.run(config=CONFIGS[config])))
        case.check(known[-1][2])
    with poisoned_outputs():
        for _ in range(calls):
            case, config, expected = of_all.choice(known)
            if of_all.random() < 0.3:
                poison()
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            case.require()
            output = case.call(config=config)
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            output.backward(case.dy)
            if of_all.random() < 0.3:
                poison()  # what we got is ours and does not change with the workspace
            tdkernels.synchronize()
            for name, result in {"output": output.detach(), **case.gradients()}.items():
                assert torch.equal(result, expected[name]), f"{name} of {case.title}"


def outruns_its_peers(operator, config, positions, calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other."""
    cases = [Projection(operator, FP32, positions, 9, 7, exact=True, seed=seed) for seed in range(calls)]
    config = CONFIGS[config]
    Projection(operator, FP32, positions, 9, 7).run(config=config)
    with in_any_order(seed=calls):
        outputs = [case.call(config=config) for case in cases]
        for case, output in zip(cases, outputs, strict=True):
            output.backward(case.dy)
    for case, output in zip(cases, outputs, strict=True):
        case.check({"output": output.detach(), **case.gradients()})


def waits_for_a_slow_rank(config):
    for operator, slow in itertools.product(OPERATORS, range(dist.get_world_size())):
        case = Projection(operator, FP32, 9, 7, 5, exact=True, seed=slow)
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        output = case.call(config=CONFIGS[config])
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        output.backward(case.dy)
        case.check({"output": output.detach(), **case.gradients()})


def computes_in_a_subgroup():
    """Of the last two ranks; the first does something else."""
    with a_group([1, 2]) as group:
        if dist.get_rank() == 0:
            return
        for operator in OPERATORS:
            case = Projection(operator, FP32, 9, 7, 5, group=group)
            case.check(case.run())
        del case, group


# ---- ranks that do not agree ----

USUAL = dict(dtype=FP32, positions=6, k=8, n=4)
# What rank 1 of three does otherwise; the field that says so, by operator; its values there and elsewhere.
DISAGREEMENTS = {
    "sequences": (dict(batch=1), ("B", "B"), 1, 2),
    "positions": (dict(positions=7), ("S/W", "S"), (7, 21), (6, 18)),
    "no positions": (dict(positions=0), ("S/W", "S"), 0, (6, 18)),
    "k": (dict(k=7), ("K", "K/W"), 7, 8),
    "n": (dict(n=5), ("N", "N"), (15, 5), (12, 4)),
    "dtype": (dict(dtype=FP16), ("dtype", "dtype"), '"torch.float16"', '"torch.float32"'),
    "method": (dict(config="torch"), ("config", "config"), "method=torch", "left to autotune (off)"),
    "chunks": (dict(config="pushed"), ("config", "config"), "chunk_tiles=2", "left to autotune (off)"),
}


def disagrees(what):
    """Everybody is told, and the group is as good as before."""
    changes, fields, there, elsewhere = DISAGREEMENTS[what]
    changes = dict(changes)
    config = CONFIGS[changes.pop("config", "default")]
    odd = dist.get_rank() == 1
    with a_group() as group:
        for number, operator in enumerate(OPERATORS):
            words = [value[number] if isinstance(value, tuple) else value for value in (there, elsewhere)]
            usual = Projection(operator, **USUAL, exact=True, group=group)
            case = Projection(operator, **USUAL | changes, group=group) if odd else usual
            error = failure_of(case.call, config=config if odd else None)
            assert type(error) is ValueError, repr(error)
            parts = [f"{operator}: the ranks disagree", f"{fields[number]} is ", "on ranks 0, 2", "on rank 1"]
            assert all(f"{part}" in str(error) for part in parts + words), f"{parts + words} in {error}"
            usual.check(usual.run())
        del group, usual, case


# Another way to call than the usual one, which rank 1 takes; both are known.
KNOWN = {
    "positions": dict(positions=40),
    "sequences": dict(batch=1),
    "n": dict(n=5),
    "transport": dict(config=UlyssesConfig(tiles=FLAT, transport="push")),
}


def is_not_fooled_by_a_known_plan(operator, what):
    """Both calls have been made before, so nobody asks the others; only the signals can tell."""
    changes = dict(KNOWN[what])
    configs = [UlyssesConfig(tiles=FLAT), changes.pop("config", UlyssesConfig(tiles=FLAT))]
    with a_group() as group:
        cases = [Projection(operator, **USUAL | change, exact=True, group=group) for change in ({}, changes)]
        for case, config in [*zip(cases, configs)] * 2:
            case.check({"output": case.call(config=config).detach()})
        dist.barrier()
        number = int(dist.get_rank() == 1)
        with timeout(1.0):
            error = failure_of(cases[number].call, config=configs[number])
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        again = failure_of(cases[number].call, config=configs[number])
        assert type(again) is type(error), repr(again)
        del group, cases, case


# ---- ranks that do not come ----


# What rank 1 does not come to.
LOST = [*OPERATORS, "ulysses_qkv backward"]


def loses_rank_1(ways, timeout_s):
    """The others say so: of each call, on groups of their own, and whenever asked again."""
    calls = []
    for way in ways:
        case = Projection(way.split()[0], **USUAL, exact=True, group=dist.new_group())
        output = case.call()
        calls.append(functools.partial(output.backward, case.dy, retain_graph=True) if "backward" in way else case.call)
        for _ in range(2):
            case.check(case.run())
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for call in calls:
        start = time.monotonic()
        errors.append(failure_of(call))
        assert time.monotonic() - start < timeout_s + 5.0
    again = failure_of(calls[0])
    assert str(again) == str(errors[0])
    return errors
