"""Helpers of the tuner's tests: problems, custom candidates, and a check that tuning leaves no state behind."""

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
# M, N, K by number of ranks. With three ranks a shard has more than one of the smaller tiles.
SHAPES = {2: (64, 64, 64), 3: (192, 96, 96)}
SHAPE = (48, 48, 48)  # divisible by 2 and by 3 ranks
CALL_LIMIT_S = 1.0


def problem_of(operator, shape, *, layout="nk", world_size=None):
    world_size = world_size or dist.get_world_size()
    return Problem(operator, gpu_name(device()), world_size, world_size, "float32", layout, tuple(shape))


def mapped():
    """Return how many mappings of symmetric buffers this process has; CPU only."""
    return Path("/proc/self/maps").read_text().count("memfd:tdkernels")


@contextlib.contextmanager
def state_unchanged(group):
    """Check that the block leaves the group's state, the timeout and the mapped memory of this process unchanged."""
    cases = [Case(operator, FP32, 5, 3, 7, exact=True, seed=seed) for seed, operator in enumerate(OPERATORS)]

    def run_cases():
        for case in cases:
            case.check({"output": case.call(group=group)})

    def snapshot():
        state = group_state(resolve_group(group))
        buffers = [(name, workspace, workspace.buffer) for name, workspace in state.workspaces.items()]
        return state, buffers, mapped(), get_timeout()

    run_cases()
    before = snapshot()
    yield
    assert snapshot() == before
    run_cases()
    assert snapshot() == before
    del before


def equal_on_ranks(results):
    """Assert that all ranks returned the same result, and return it."""
    assert results == [results[0]] * len(results)
    return results[0]


def config_of(op, number):
    """Return an AG-GEMM config with ``num_comm_sms=number``; configs with different numbers are distinct."""
    return replace(op.default(problem_of("ag_gemm", SHAPE), device()), num_comm_sms=number)


def replace_in(patch, op, name, value):
    """Set an attribute of ``op`` for the duration of ``patch``.

    Before pytest 9.2, ``patch.setattr(op, name, value)`` leaves the method on the instance, where it would hide a
    later patch of the class.
    """
    patch.setitem(vars(op), name, value)


@contextlib.contextmanager
def candidates(*configs, estimates=None, **changes):
    """Restrict the space of AG-GEMM to these configs, in this order; ``changes`` replace further attributes."""
    op = tunable("ag_gemm")
    with pytest.MonkeyPatch.context() as patch:
        replace_in(patch, op, "space", lambda problem, device: list(configs))
        replace_in(patch, op, "estimate_ms", lambda config, *_: (estimates or {}).get(config, 1.0))
        for name, value in changes.items():
            replace_in(patch, op, name, value)
        yield op
