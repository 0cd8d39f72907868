"""What runs on the ranks: an operator, not recorded and recorded, and all that is needed to make sense of it."""

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
from tdkernels.trace.clocks import Clocks

_BURSTS = {"cuda": 3, "cpu": 1}
_CALLS = {"cuda": 10, "cpu": 1}  # of a burst


@torch.no_grad()
def record_operator(operator, shape, dtype, changes=None, repetitions=7, layout=None):
    """Runs on every rank: launches of an operator on random operands, recorded one by one. Collective.

    Args:
        shape: sizes of the whole problem, M, N and K of a product
        dtype: a torch.dtype
        changes: fields of the default config to change, as a dict; None takes the config that a call without one would
            run with
        layout: None is the operator's usual one

    Returns:
        dict of what timeline.make_trace takes, of this rank: ``events`` and ``times`` have one entry a repetition

    Raises:
        ValueError: for a config that cannot run
    """
    device, group = rank_device(), resolve_group()
    world_size = group.size()
    tuned = tunable(operator)
    problem = Problem.on(device, operator, shape, dtype, layout or tuned.layouts[0], world_size, world_size)
    config = _config(problem, device, group, changes)
    sets = [tuned.operands(problem, device, _generator(device, seed)) for seed in (0, 1)]
    sets = [tuned.prepared(operands, problem, group, config) for operands in sets]

    def call(operands):
        return tuned.run(operands, problem, group, config)

    recorder, clocks = Recorder(), Clocks(group, device)
    untraced_ms = _time(call, sets, device, group)
    with record(recorder):
        traced_ms = _time(call, sets, device, group)
    events, times = [], []
    for _ in range(repetitions):
        timing.barrier(device, group)
        call(sets[0])  # so that neither the caches nor the clocks of the GPU are found cold
        recorder.clear()
        clocks.meet()
        with record(recorder):
            call(sets[1])
        clocks.compare()  # at once, since clocks drift
        tdkernels.synchronize()
        events.append(_that_ran(recorder))
        times.append(clocks.times.cpu().numpy())
    return {
        "operator": operator, "shape": "x".join(map(str, shape)), "dtype": problem.dtype, "gpu": problem.gpu,
        "world_size": world_size, "config": text_of(config), "torch": torch.__version__, "triton": triton.__version__,
        "num_multiprocessors": gpu.num_sms(device) if device.type == "cuda" else 0,
        "untraced_ms": untraced_ms, "traced_ms": traced_ms, "events": events, "times": times,
    }


def _that_ran(recorder):
    """The events of all pieces that there were, as numpy."""
    events = recorder.events.cpu().numpy()
    return events if recorder.all_run else events[:, events[..., 0].any(0)]


def _generator(device, seed):
    return torch.Generator(device).manual_seed(seed * dist.get_world_size() + dist.get_rank())


def _config(problem, device, group, changes):
    """The config to run, the same on all ranks; never one, like the plain sequence, that has nothing to record."""
    tuned = tunable(problem.operator)
    default = tuned.recordable(problem, device)
    if changes is None:
        config = choose(tuned, problem, device, group, {"traced": str(problem)}).config
        return default if tuned.compiled(config) is None else config
    values_of_default = tuned.config_to_dict(default)
    values = {**values_of_default, **changes}
    if "tiles" in changes:
        values["tiles"] = {**values_of_default["tiles"], **changes["tiles"]}
    try:
        config = tuned.config_from_dict(values)
        reason = tuned.illegal(config, problem, device)
    except (TypeError, ValueError) as error:
        reason = str(error)
    if reason is None and tuned.compiled(config) is None:
        reason = "it launches torch's kernels, of which there is nothing to record"
    if reason is not None:
        raise ValueError(f"--config cannot run: {reason}")
    return config


def _time(call, sets, device, group):
    """ms of one of several calls in a row: the best burst, after one that compiles."""
    calls, count = _CALLS[device.type], _BURSTS[device.type]
    return min([timing.burst(call, sets, calls, device, group)[0] for _ in range(1 + count)][1:])
