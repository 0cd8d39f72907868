"""Run an operator on the ranks, with and without recording, and return the events and the clock comparison."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import triton

import tdkernels
from tdkernels.autotune import timing
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.selection import choose
from tdkernels.autotune.tunable import tunable
from tdkernels.launch import rank_device
from tdkernels.ops.common.config import text_of
from tdkernels.runtime import gpu
from tdkernels.runtime.recorder import Recorder, record
from tdkernels.symm import resolve_group
from tdkernels.symm.group import group_state
from tdkernels.trace.clocks import Clocks, SoloClocks

_BURSTS = {"cuda": 3, "cpu": 1}
_CALLS = {"cuda": 10, "cpu": 1}  # for each burst


@torch.no_grad()
def record_operator(
    operator: str, shape: Sequence[int], dtype: torch.dtype, changes: dict | None = None, repetitions: int = 7,
    layout: str | None = None,
) -> dict:
    """Record launches of an operator on random operands, one launch at a time. Collective over all ranks.

    Args:
        operator: Name of the operator.
        shape: Sizes of the whole problem, such as M, N, K.
        dtype: Dtype of the operands.
        changes: Fields of the default config to change. None means the config of a call without one.
        repetitions: Number of recorded launches.
        layout: Layout of the operands; None for the operator's default.

    Returns:
        This rank's recording, for ``timeline.make_trace``. ``events`` and ``times`` have one entry for each repetition.

    Raises:
        ValueError: If the config cannot run.
    """
    device, group = rank_device(), resolve_group()
    world_size = group.size()
    tuned = tunable(operator)
    problem = Problem.on(device, operator, shape, dtype, layout or tuned.default_layout(dtype), world_size, world_size)
    config = _config(problem, device, group, changes)
    sets = [tuned.operands(problem, device, _generator(device, seed)) for seed in (0, 1)]
    sets = [tuned.prepared(operands, problem, group, config) for operands in sets]

    def call(operands):
        return tuned.run(operands, problem, group, config)

    state = group_state(group)
    solo = not state.has_link
    recorder, clocks = Recorder(), SoloClocks(device) if solo else Clocks(group, device)
    untraced_ms = _time(call, sets, device, group)
    state.expect_new_kernels()  # those with a trace
    with record(recorder):
        traced_ms = _time(call, sets, device, group)
    events, times = [], []
    for _ in range(repetitions):
        timing.barrier(device, group)
        call(sets[0])  # warms up the caches and raises the GPU's clock rate
        recorder.clear()
        clocks.meet()
        with record(recorder):
            call(sets[1])
        clocks.compare()  # right after the call, because clocks drift
        tdkernels.synchronize()
        events.append(_events_that_ran(recorder))
        times.append(clocks.times.cpu().numpy())
    ranks = {"world_size": 1, "one_of": world_size} if solo else {"world_size": world_size}
    return {
        "operator": operator, "shape": "x".join(map(str, shape)), "dtype": problem.dtype, "gpu": problem.gpu,
        **ranks, "config": text_of(config), "torch": torch.__version__, "triton": triton.__version__,
        "num_multiprocessors": gpu.num_sms(device) if device.type == "cuda" else 0, "by_warps": recorder.by_warps,
        "untraced_ms": untraced_ms, "traced_ms": traced_ms, "events": events, "times": times,
    }


def _events_that_ran(recorder):
    """Return the events of the work items that ran, as a numpy array."""
    events = recorder.events.cpu().numpy()
    return events if recorder.all_run else events[:, events[..., 0].any(0)]


def _generator(device, seed):
    return torch.Generator(device).manual_seed(seed * dist.get_world_size() + dist.get_rank())


def _config(problem, device, group, changes):
    """Return the config to run, the same on all ranks. It is never one without kernels, such as the torch baseline."""
    tuned = tunable(problem.operator)
    default = tuned.recordable(problem, device)
    if changes is None:
        config = choose(tuned, problem, device, group, {"traced": str(problem)}).config
        return config if tuned.is_recordable(config) else default
    values_of_default = tuned.config_to_dict(default)
    values = {**values_of_default, **changes}
    if "tiles" in changes:
        values["tiles"] = {**values_of_default["tiles"], **changes["tiles"]}
    try:
        config = tuned.config_from_dict(values)
        reason = tuned.illegal(config, problem, device)
    except (TypeError, ValueError) as error:
        reason = str(error)
    if reason is None and not tuned.is_recordable(config):
        reason = "it launches no kernel that can be recorded"
    if reason is not None:
        raise ValueError(f"--config cannot run: {reason}")
    return config


def _time(call, sets, device, group):
    """Return the ms of a call, from the fastest of several bursts. The first burst, which compiles, does not count."""
    calls, count = _CALLS[device.type], _BURSTS[device.type]
    return min([timing.burst(call, sets, calls, device, group)[0] for _ in range(1 + count)][1:])
