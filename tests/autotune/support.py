"""What the tests of the tuner share: problems, candidates of their own, and what tuning must leave alone."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tdkernels.autotune.problem import Problem, gpu_name
from tdkernels.autotune.tunable import tunable
from tdkernels.symm import get_timeout, resolve_group
from tdkernels.symm.group import group_state
from tests.support.dense_oracle import OPERATORS, Case
from tests.support.ranks import device

FP32 = torch.float32
# M, N, K; with three ranks a shard has more than one tile of the smaller kind.
SHAPES = {2: (64, 64, 64), 3: (192, 96, 96)}
SHAPE = (48, 48, 48)  # for two ranks and for three
CALL_LIMIT_S = 1.0


def problem_of(operator, shape, *, layout="nk", world_size=None):
    world_size = world_size or dist.get_world_size()
    return Problem(operator, gpu_name(device()), world_size, world_size, "float32", layout, tuple(shape))


def mapped():
    """How many parts of symmetric buffers this process has mapped; CPU only."""
    return Path("/proc/self/maps").read_text().count("memfd:tdkernels")


@contextlib.contextmanager
def unharmed(group):
    """What happens within leaves the group's own state, the timeout and the memory of this process as they were."""
    cases = [Case(operator, FP32, 5, 3, 7, exact=True, seed=seed) for seed, operator in enumerate(OPERATORS)]

    def work():
        for case in cases:
            case.check({"output": case.call(group=group)})

    def now():
        state = group_state(resolve_group(group))
        buffers = [(name, workspace, workspace.buffer) for name, workspace in state.workspaces.items()]
        return state, buffers, mapped(), get_timeout()

    work()
    before = now()
    yield
    assert now() == before
    work()
    assert now() == before
    del before


def same_everywhere(results):
    """Ranks agree on the entry and on why a candidate is out."""
    assert results == [results[0]] * len(results)
    return results[0]


def one_of(op, number):
    """A legal config of AG-GEMM, told from others by its number."""
    return replace(op.default(problem_of("ag_gemm", SHAPE), device()), num_comm_sms=number)


def replace_in(patch, op, name, value):
    """As ``patch.setattr(op, name, value)``, which before pytest 9.2 leaves the method behind on op.

    There it would hide what a later test makes of op's class.
    """
    patch.setitem(vars(op), name, value)


@contextlib.contextmanager
def candidates(*configs, estimates=None, **changes):
    """AG-GEMM has just these configs, tried in this order, and other attributes as told."""
    op = tunable("ag_gemm")
    with pytest.MonkeyPatch.context() as patch:
        replace_in(patch, op, "space", lambda problem, device: list(configs))
        replace_in(patch, op, "estimate_ms", lambda config, *_: (estimates or {}).get(config, 1.0))
        for name, value in changes.items():
            replace_in(patch, op, name, value)
        yield op
