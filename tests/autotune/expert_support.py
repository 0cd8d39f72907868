"""Helpers of the autotune tests for MoE operators: small candidate spaces, entries, and records of launched configs."""

import contextlib
import math
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tdkernels import autotune
from tdkernels.autotune import rounds, table
from tdkernels.autotune.hardware import _MEASURED, Hardware
from tdkernels.autotune.problem import Problem, gpu_name
from tdkernels.autotune.tunable import tunable, versions
from tdkernels.runtime import gpu
from tdkernels.symm.group import group_state
from tests.autotune.support import replace_in
from tests.support.ranks import device
from tests.test_protocol import failure_of

H200 = Hardware(*_MEASURED["NVIDIA H200"], num_sms=132, measured=True)
GPU = torch.device("cuda", 0)


def problem_of(operator, shape, layout=None, dtype="float32", world_size=2):
    layout = layout or tunable(operator).layouts[0]
    return Problem(operator, gpu_name(device()), world_size, world_size, dtype, layout, tuple(shape))


def entry_of(config, *problem, **options):
    problem = problem_of(*problem, **options)
    op = tunable(problem.operator)
    return table.Entry(problem, versions(op), op.config_to_dict(config), 2.0, 3.0, when="2026-01-02")


@contextlib.contextmanager
def restrict_space(operator, *configs):
    """Restrict the operator's space to these configs, besides its default and the torch baseline."""
    with pytest.MonkeyPatch.context() as patch:
        replace_in(patch, tunable(operator), "space", lambda problem, device: list(configs))
        yield


def check_tune(operator, shape, layout, config, dtype, group=None):
    """Tune with one candidate besides the default and a short final; return the values that must agree on all ranks."""
    op = tunable(operator)
    with restrict_space(operator, config), pytest.MonkeyPatch.context() as patch:
        patch.setitem(rounds.FINAL, "cpu", replace(rounds.FINAL["cpu"], repeats=1))
        patch.setitem(rounds.HOST_BOUND, device().type, math.inf)  # so that the fastest candidate wins
        result = autotune.tune(operator, *shape, dtype=dtype, layout=layout, group=group)
    entry = result.entry
    problem = problem_of(operator, shape, layout, str(dtype).removeprefix("torch."), dist.get_world_size(group))
    assert entry.problem == (problem if not op.alone else problem_of(operator, shape, layout, problem.dtype, 1))
    # On a GPU, torch's grouped GEMM does not support all sizes and dtypes.
    plain = op.plain()
    plain = None if plain is None or op.illegal(plain, problem, device()) is not None else plain
    expected = {config, op.default(problem, device())} | ({plain} - {None})
    assert {trial.config for trial in result.trials} == expected
    assert [trial.reason for trial in result.trials] == [None] * len(expected), result.log
    assert op.illegal(op.config_from_dict(entry.config), problem, device()) is None
    final = max(trial.last_round for trial in result.trials)  # trials eliminated earlier were timed at another time
    assert entry.ms == min(trial.ms for trial in result.trials if trial.last_round == final) and entry.local_ms > 0
    assert (entry.plain_ms is None) == (plain is None)
    return [entry.config, entry.ms, entry.plain_ms, entry.default_ms]


def check_rejected(bad):
    """Check that tune rejects each of these problems on every rank, and that the group still works."""
    for arguments, options, message in bad:
        error = failure_of(autotune.tune, *arguments, **options)
        assert type(error) is ValueError and message in str(error), (arguments, error)
    group_state(dist.group.WORLD).barrier("test")


@contextlib.contextmanager
def record_configs(*launches):
    """Record the configs of launches. Each entry of ``launches`` is (module, function name, getter of the config)."""
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name, config_of in launches:
            patch.setattr(module, name, _recording(ran, getattr(module, name), name, config_of))
        yield ran


def _recording(ran, launch, name, config_of):
    def launch_(*args, **options):
        ran.append((name, config_of(args, options)))
        return launch(*args, **options)

    return launch_


# ---- a simulated GPU ----


@contextlib.contextmanager
def fake_h200():
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_properties", lambda index: properties)
        yield


def check_estimates(operator, problems):
    """Check that estimates respect the hardware floors, never improve with a slower link, and grow with the tokens."""
    op, slower = tunable(operator), Hardware(H200.flops, H200.memory, H200.link / 4, H200.num_sms, True)
    for world_size, layout, *shape in problems:
        problem = Problem(operator, "NVIDIA H200", world_size, world_size, "bfloat16", layout, tuple(shape))
        larger = Problem(*astuple(problem)[:-1], (64 * shape[0], *shape[1:]))
        assert op.why_not(problem) is None is op.why_not(larger)
        floors = op.floors(problem)
        floor_ms = max(floors.computation_ms(H200), floors.wire_bytes / H200.link * 1e3)
        plain = [config for config in [op.plain()] if config and op.illegal(config, problem, GPU) is None]
        configs = [*op.space(problem, GPU), op.default(problem, GPU), *plain]
        assert len(set(configs)) > 4
        for config in configs:
            assert op.illegal(config, problem, GPU) is None, config
            estimate = op.estimate_ms(config, problem, H200)
            assert floor_ms <= estimate < 1e6, f"{config} for {problem}: {estimate}, not below {floor_ms}"
            assert estimate <= op.estimate_ms(config, problem, slower), f"{config} for {problem}"
            assert estimate < op.estimate_ms(config, larger, H200), f"{config} for {problem}"
            assert op.config_from_dict(op.config_to_dict(config)) == config


# ---- ahead-of-time compilation ----


def assert_same_code(launched, compiled):
    """Assert that two recorded launches (kernel, args, kwargs) use the same specialization. Sizes may differ.

    ``compiled`` was recorded with tensors on the meta device.
    """
    assert launched[0] is compiled[0] and launched[2] == compiled[2]
    names = [parameter.name for parameter in launched[0].params if parameter.do_not_specialize]
    for parameter, one, other in zip(launched[0].params, launched[1], compiled[1], strict=False):
        assert type(one) is type(other), parameter.name
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, parameter.name
            assert one.data_ptr() % 16 == other.data_ptr() % 16 == 0, parameter.name
        elif isinstance(one, int):
            assert parameter.name in names, parameter.name
        elif one is not None:
            assert (one.base.dtype, one.block_shape) == (other.base.dtype, other.block_shape), parameter.name
