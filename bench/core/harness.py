"""What every benchmark needs on its ranks: a check of what is about to be timed, interleaved timing, the link rate.

Times of different minutes do not compare, since clocks and the power limit move them by several per cent. So all
methods of a shape take turns: in each round each of them runs a burst of calls. A rank's time is its median over the
rounds, and the slowest rank's time counts.
"""

import functools
import os
import random
import statistics
import subprocess

import torch
import torch.distributed as dist

from tdkernels.autotune import timing
from tdkernels.autotune.timing import synchronize
from tdkernels.launch import rank_device
from tdkernels.symm import resolve_group
from tdkernels.symm.group import group_state

# NVLink multicast is off in every measurement. Ranks inherit this from the process that imports us and starts them.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")


def measurement(measure):
    """Wrap what measures a case on the ranks: without gradients, and what it allocated is free afterwards.

    Symmetric memory does not come from torch's allocator.
    """

    @functools.wraps(measure)
    @torch.no_grad()
    def measured(case, plan):
        found = measure(case, plan)
        if rank_device().type == "cuda":
            torch.cuda.empty_cache()
        return found

    return measured


def machine():
    """The device, its driver and the versions, as every row says them."""
    import triton

    on_gpu = rank_device().type == "cuda"
    gpu = torch.cuda.get_device_name() if on_gpu else "cpu"
    nodes = group_state(resolve_group(None)).topology.num_nodes
    return {
        # Their rows are told from those of one node wherever a machine is named.
        "gpu": gpu if nodes == 1 else f"{gpu} on {nodes} simulated nodes",
        "num_gpus": dist.get_world_size(),
        "driver": _driver() if on_gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "multicast": "off",
    }


def _driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.splitlines()[0].strip() if answer.strip() else "unknown"


# ---- The ranks agree. ----


def _reduced(values, op):
    """Per entry the largest (MAX) or smallest (MIN) over all ranks."""
    values = torch.tensor(values, dtype=torch.float64, device=rank_device())
    dist.all_reduce(values, op=op)
    return values.tolist()


def slowest(values):
    return _reduced(values, dist.ReduceOp.MAX)


# ---- Checks ----


def why_it_fails(call, inputs):
    """None if one call works on every rank; else what this rank says about it, or that another one failed."""
    reason = None
    try:
        call(inputs)
        synchronize(rank_device())
    except Exception as err:
        reason = f"{type(err).__name__}: {err}".splitlines()[0][:200]
    failed = slowest([reason is not None])[0]
    return reason or ("failed on another rank" if failed else None)


def errors(outputs, exact):
    """Relative Frobenius errors, one an output, of the rank that is furthest off; infinite for NaN."""
    found = []
    for output, wanted in zip(_as_tuple(outputs), _as_tuple(exact), strict=True):
        error = ((output - wanted).norm() / wanted.norm()).item() if output.shape == wanted.shape else float("inf")
        found.append(error if error == error else float("inf"))
    return slowest(found)


def why_it_is_wrong(call, references):
    """None if the call is at most twice as far off as plain torch; references: (inputs, exact outputs, its errors)."""
    for inputs, exact, allowed in references:
        got = errors(call(inputs), exact)
        if any(error > 2 * plain for error, plain in zip(got, allowed, strict=True)):
            return f"wrong: relative errors {got}, those of torch + NCCL {allowed}"
    return None


def _as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


# ---- Times ----


def time_methods(methods, input_sets, rounds, burst_ms):
    """Per name of ``methods``: ms of a call, ms the host takes to launch it, and calls in a burst.

    Args:     methods: {name: call}, where call(inputs) is one call on one of ``input_sets``, which take turns, or a
              graphs.Captured, which has its own
              burst_ms: about how long a burst lasts; 0: one call
    """
    bursts = {name: _calls_for(call, input_sets, burst_ms) for name, call in methods.items()}
    times = {name: [] for name in methods}
    names = list(methods)
    # In another order each round, the same on all ranks: a GPU at its power limit is faster after a method that let it
    # rest, so that in a fixed order each method would owe something to the one before.
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            times[name].append(_burst(methods[name], input_sets, bursts[name]))
    found = {}
    for name in names:
        device_ms, host_ms = slowest([statistics.median(column) for column in zip(*times[name], strict=True)])
        calls = getattr(methods[name], "calls", 1)  # of one replay, if it is a graph
        found[name] = {"ms": device_ms / calls, "host_ms": host_ms / calls, "burst": bursts[name] * calls}
    return found


def _calls_for(call, input_sets, burst_ms):
    """How many calls fill a burst; the same on all ranks. One if a burst has no length, or a call is longer."""
    if not burst_ms:
        return 1
    _burst(call, input_sets, 1)  # a first call may do more than the others
    if slowest(_burst(call, input_sets, 1))[0] > 4 * burst_ms:
        return 1
    estimate_ms = slowest(_burst(call, input_sets, 3))[0]
    return max(3, min(200, round(burst_ms / estimate_ms)))


def _burst(call, input_sets, calls):
    """ms on the device and ms on the host, per call."""
    return timing.burst(call, input_sets, calls, rank_device())


def link_rate():
    """GB/s that the slowest GPU sends while it receives as much, by copy engines round a ring; None without GPUs."""
    rate = timing.slowest_link(rank_device(), resolve_group())
    return None if rate is None else rate / 1e9
