"""Measurement primitives that run on the ranks: correctness checks, interleaved timing and the link rate.

Times measured minutes apart are not comparable, because clocks and the power limit change them by several per cent.
All methods of a shape are therefore interleaved: in each round, each method runs one burst of calls, in the order of
``order``. The time of a rank is its median over the rounds, and the reported time is the maximum over the ranks.
"""

import functools
import os
import statistics
import subprocess

import torch
import torch.distributed as dist

from tdkernels.autotune import timing
from tdkernels.autotune.order import balanced_orders
from tdkernels.autotune.timing import synchronize
from tdkernels.launch import rank_device
from tdkernels.symm import resolve_group
from tdkernels.symm.group import group_state

# NVLink multicast is off in all measurements. Ranks inherit these variables from the process that starts them.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

_LEAD_MS = 40.0  # approximate length of the untimed calls before a burst, in which the clock adapts to the method


def measurement(measure):
    """Decorate the function that measures a case on the ranks: disable gradients, and empty torch's cache afterwards.

    Symmetric memory is not allocated by torch's allocator and needs the freed memory.
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
    """Return the device, driver and library versions that are stored in each row."""
    import triton

    on_gpu = rank_device().type == "cuda"
    gpu = torch.cuda.get_device_name() if on_gpu else "cpu"
    nodes = group_state(resolve_group(None)).topology.num_nodes
    return {
        # The name distinguishes rows of simulated nodes from rows of one node.
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
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output.splitlines()[0].strip() if output.strip() else "unknown"


# ---- reductions over the ranks ----


def _all_reduce(values, op):
    """Reduce each value over all ranks."""
    values = torch.tensor(values, dtype=torch.float64, device=rank_device())
    dist.all_reduce(values, op=op)
    return values.tolist()


def slowest(values):
    """Return the maximum of each value over all ranks."""
    return _all_reduce(values, dist.ReduceOp.MAX)


# ---- correctness checks ----


def failure_reason(call, inputs):
    """Make one call. Return None if it succeeds on all ranks, else the error of this rank or of another rank."""
    reason = None
    try:
        call(inputs)
        synchronize(rank_device())
    except Exception as err:
        reason = f"{type(err).__name__}: {err}".splitlines()[0][:200]
    failed = slowest([reason is not None])[0]
    return reason or ("failed on another rank" if failed else None)


def errors(outputs, exact):
    """Return ``relative_errors``, the maximum over the ranks."""
    return slowest(relative_errors(outputs, exact))


def relative_errors(outputs, exact):
    """Return the relative Frobenius error of each output of this rank; infinite for NaN or another shape."""
    found = []
    for output, expected in zip(_as_tuple(outputs), _as_tuple(exact), strict=True):
        same_shape = output.shape == expected.shape
        error = ((output - expected).norm() / expected.norm()).item() if same_shape else float("inf")
        found.append(error if error == error else float("inf"))
    return found


def mismatch_reason(call, references):
    """Compare a call with its references. Return None if its errors are at most twice the errors of plain torch.

    Args:
        references: [(inputs, exact outputs, errors of plain torch)].
    """
    for inputs, exact, allowed in references:
        got = errors(call(inputs), exact)
        if any(error > 2 * plain for error, plain in zip(got, allowed, strict=True)):
            return f"wrong: relative errors {got}, torch + NCCL has {allowed}"
    return None


def drop_wrong(calls, names, references):
    """Remove the calls of ``names`` that fail or have a wrong result. Return {name: reason}.

    Args:
        calls: {name: call}, changed in place.
        references: as for ``mismatch_reason``.
    """
    reasons = {}
    for name in names:
        reason = failure_reason(calls[name], references[0][0]) or mismatch_reason(calls[name], references)
        if reason is not None:
            reasons[name] = reason
            del calls[name]
    return reasons


def _as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


# ---- memory ----


def peak_bytes(call):
    """Return the memory that torch allocates during one call, the maximum over the ranks; None on CPUs.

    ``call`` has no arguments.
    """
    if rank_device().type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(slowest([torch.cuda.max_memory_allocated() - before])[0])


# ---- timing ----


def time_methods(methods, input_sets, rounds, burst_ms):
    """Time methods, interleaved in a balanced order. Return {name: {"ms", "host_ms", "burst"}}.

    "ms" is the device time of a call, "host_ms" the host time of its launch, "burst" the number of calls in a burst.

    Args:
        methods: {name: call}. call(inputs) makes one call; bursts cycle through ``input_sets``. A graphs.Captured
            replays its own inputs.
        burst_ms: approximate length of a burst; 0 means one call.
    """
    bursts = {name: _calls_for(call, input_sets, burst_ms) for name, call in methods.items()}
    times = {name: [] for name in methods}
    for names in balanced_orders(list(methods), rounds):
        for name in names:
            times[name].append(_burst(methods[name], input_sets, *bursts[name]))
    found = {}
    for name, call in methods.items():
        device_ms, host_ms = slowest([statistics.median(column) for column in zip(*times[name], strict=True)])
        calls = getattr(call, "calls", 1)  # calls per replay of a graph
        found[name] = {"ms": device_ms / calls, "host_ms": host_ms / calls, "burst": bursts[name][0] * calls}
    return found


def _calls_for(call, input_sets, burst_ms):
    """Return (calls of a burst, untimed calls before it), the same on all ranks.

    A burst is one call if ``burst_ms`` is 0 or a call is longer.
    """
    lead = timing.lead_calls(rank_device())
    if not burst_ms:
        return 1, lead
    _burst(call, input_sets, 1, lead)  # the first call may include one-time work
    if slowest(_burst(call, input_sets, 1, lead))[0] > 4 * burst_ms:
        return 1, lead
    estimate_ms = slowest(_burst(call, input_sets, 3, lead))[0]
    return max(3, min(200, round(burst_ms / estimate_ms))), max(lead, min(400, round(_LEAD_MS / estimate_ms)))


def _burst(call, input_sets, calls, lead):
    """Return (device ms, host ms) per call, after ``lead`` untimed calls."""
    return timing.burst(call, input_sets, calls, rank_device(), lead=lead)


def link_rate():
    """Return GB/s per direction of the slowest GPU, by copy engines in a bidirectional ring; None without GPUs."""
    rate = timing.slowest_link(rank_device(), resolve_group())
    return None if rate is None else rate / 1e9
