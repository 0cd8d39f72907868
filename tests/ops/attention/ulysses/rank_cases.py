"""Test bodies for the interaction of ranks in the Ulysses projections. Every rank runs them; see test_ulysses_ranks.py.

Determinism, reuse of the workspace, disagreement between ranks, and peers that are late or missing.
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

# Only a few kinds of calls, since a GPU compiles kernels for each.
KINDS = [
    (("ulysses_qkv", BF16, 20, 24, 40, 1), "pulled at once"),
    (("ulysses_out", BF16, 20, 32, 24, 2), "pulled at once"),
    (("ulysses_qkv", FP32, 19, 9, 7, 2), "pushed"),
    (("ulysses_out", FP32, 19, 9, 7, 1), "pushed"),
]


def is_deterministic(kinds, calls, seed):
    """Check that calls return the same bits for the same data, with random delays and poisoned memory in between."""
    shared_rng, rank_rng = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    computed = []
    for number, (kind, config) in enumerate(kinds * 2):
        case = Projection(*kind, seed=number)
        computed.append((case, CONFIGS[config], case.run(config=CONFIGS[config])))
        case.check(computed[-1][2])
    with poisoned_outputs():
        for _ in range(calls):
            case, config, expected = shared_rng.choice(computed)
            if shared_rng.random() < 0.3:
                poison()
            time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.02)]))
            case.require()
            output = case.call(config=config)
            time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.02)]))
            output.backward(case.dy)
            if shared_rng.random() < 0.3:
                poison()  # outputs must not alias the workspace
            tdkernels.synchronize()
            for name, result in {"output": output.detach(), **case.gradients()}.items():
                assert torch.equal(result, expected[name]), f"{name} of {case.title}"


def runs_ahead_of_peers(operator, config, positions, calls):
    """Check back-to-back calls with fresh data while ranks run ahead of each other."""
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
    """Check a subgroup of the last two ranks; the first rank does not take part."""
    with a_group([1, 2]) as group:
        if dist.get_rank() == 0:
            return
        for operator in OPERATORS:
            case = Projection(operator, FP32, 9, 7, 5, group=group)
            case.check(case.run())
        del case, group


# ---- disagreement between ranks ----

BASE = dict(dtype=FP32, positions=6, k=8, n=4)
# name: (changes on rank 1 of three, the field named in the error by operator, its value there, and elsewhere)
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


def reports_disagreement(name):
    """Check that every rank raises an error which names the field, and that the group stays usable."""
    changes, fields, odd_value, usual_value = DISAGREEMENTS[name]
    changes = dict(changes)
    config = CONFIGS[changes.pop("config", "default")]
    odd = dist.get_rank() == 1
    with a_group() as group:
        for number, operator in enumerate(OPERATORS):
            values = [value[number] if isinstance(value, tuple) else value for value in (odd_value, usual_value)]
            usual = Projection(operator, **BASE, exact=True, group=group)
            case = Projection(operator, **BASE | changes, group=group) if odd else usual
            error = failure_of(case.call, config=config if odd else None)
            assert type(error) is ValueError, repr(error)
            fragments = [f"{operator}: the ranks disagree", f"{fields[number]} is ", "on ranks 0, 2", "on rank 1"]
            assert all(f"{part}" in str(error) for part in fragments + values), f"{fragments + values} in {error}"
            usual.check(usual.run())
        del group, usual, case


# Changes of rank 1's call to one that is also cached.
CACHED = {
    "positions": dict(positions=40),
    "sequences": dict(batch=1),
    "n": dict(n=5),
    "transport": dict(config=UlyssesConfig(tiles=FLAT, transport="push")),
}


def detects_mismatch_of_cached_plans(operator, name):
    """Check that different cached calls fail. No consensus check runs for them; only the signals can detect it."""
    changes = dict(CACHED[name])
    configs = [UlyssesConfig(tiles=FLAT), changes.pop("config", UlyssesConfig(tiles=FLAT))]
    with a_group() as group:
        cases = [Projection(operator, **BASE | change, exact=True, group=group) for change in ({}, changes)]
        for case, config in [*zip(cases, configs)] * 2:
            case.check({"output": case.call(config=config).detach()})
        dist.barrier()
        number = int(dist.get_rank() == 1)
        with timeout(1.0):
            error = failure_of(cases[number].call, config=configs[number])
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        second_error = failure_of(cases[number].call, config=configs[number])
        assert type(second_error) is type(error), repr(second_error)
        del group, cases, case


# ---- missing ranks ----


# The calls that rank 1 misses.
MISSED = [*OPERATORS, "ulysses_qkv backward"]


def loses_rank_1(missed_calls, timeout_s):
    """Kill rank 1; return the errors of the other ranks, one for each call. Each call has its own group."""
    calls = []
    for missed in missed_calls:
        case = Projection(missed.split()[0], **BASE, exact=True, group=dist.new_group())
        output = case.call()
        calls.append(
            functools.partial(output.backward, case.dy, retain_graph=True) if "backward" in missed else case.call
        )
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
    second_error = failure_of(calls[0])
    assert str(second_error) == str(errors[0])
    return errors
