"""Host launch time of small calls, which bounds their latency outside CUDA graphs: ``python -m bench.dense.host``.

Calls are issued back to back, and two times per call are measured: until the host has launched it, and until the device
has finished it. Each operator runs as torch + NCCL written by hand, as a tdkernels call with method "torch", and with
the tdkernels kernels. The modules of tdkernels.nn run, too, and the operators that they call. Prints one line per
method and appends rows to a file in ``--out``.
"""

import argparse
import functools
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from bench.core import harness
from bench.core.row_files import append
from bench.dense import modules
from bench.report.host import OURS, SEQUENCE, TORCH_METHOD, TORCH_METHODS
from bench.run import revision
from tdkernels import autotune
from tdkernels.autotune.timing import barrier, synchronize
from tdkernels.launch import RankPool, pick_device, rank_device
from tdkernels.ops.common.torch_collectives import all_gather_rows, all_reduce, reduce_scatter_rows

ROWS, K, N, KEYS = 64, 4096, 1536, 1024  # GEMM per rank and cache length; collectives use one row of 512 elements
REHEARSAL = 8, 16, 16, 16
CALLS, WARM_UP, ROUNDS = 60, 30, 12


def _methods():
    """Return {operator: {method: call}}."""
    device, dtype = rank_device(), torch.bfloat16
    rows, k, n, keys = (ROWS, K, N, KEYS) if device.type == "cuda" else REHEARSAL
    ranks = dist.get_world_size()

    def draw(*shape):
        return torch.randn(shape, dtype=dtype, device=device)

    shard, message = draw(-(-rows // ranks), k), draw(1, 512)
    x, weight = draw(ranks * shard.shape[0], k), draw(n, k)
    q, cache = draw(1, 32, 128), draw(1, keys, 8, 128)
    lens = torch.full((1,), keys, dtype=torch.int32, device=device)

    operands = {"ag_gemm": (shard, weight), "gemm_rs": (x, weight), "gemm_ar": (x, weight)}
    operands |= {"all_reduce": (message,), "all_gather": (message,), "flash_decode": (q, cache, cache, lens)}
    sequences = {
        "ag_gemm": lambda: F.linear(all_gather_rows(shard), weight),
        "gemm_rs": lambda: reduce_scatter_rows(F.linear(x, weight)),
        "gemm_ar": lambda: all_reduce(F.linear(x, weight)), "all_reduce": lambda: all_reduce(message.clone()),
        "all_gather": lambda: all_gather_rows(message),
    }
    found = {}
    for operator, args in operands.items():
        call, config_class = getattr(tdkernels, operator), autotune.tunable.tunable(operator).config_class
        torch_method = functools.partial(call, *args, config=config_class(method="torch"))
        baseline = {SEQUENCE: sequences[operator]} if operator in sequences else {}
        name = TORCH_METHODS.get(operator, TORCH_METHOD)
        found[operator] = {**baseline, name: torch_method, OURS: functools.partial(call, *args)}
    return found


@torch.no_grad()
def measure():
    """Return [(operator, method, us until launched, us until finished, bytes)], the maximum over the ranks.

    bytes is the peak of the memory that a call of a module allocates, or None.

    The calls are interleaved in rounds, because a core of a shared machine is sometimes half as fast for seconds.
    """
    device = rank_device()
    on_gpu = device.type == "cuda"
    calls = _by_method(_methods()) | (of_modules := _by_method(modules.methods()))
    times = {key: [] for key in calls}
    with autotune.mode("off"):  # heuristic configs
        for call in calls.values():
            for _ in range(WARM_UP if on_gpu else 1):
                call()
        for _ in range(ROUNDS if on_gpu else 1):
            for key, call in calls.items():
                times[key].append(_time(call, device))
        peaks = {key: harness.peak_bytes(call) for key, call in of_modules.items()}
        tdkernels.synchronize()
    table = []
    for (operator, method), pairs in times.items():
        launched, done = zip(*pairs, strict=True)
        slowest = harness.slowest((min(launched), statistics.median(done)))
        table.append((operator, method, *[round(us, 1) for us in slowest], peaks.get((operator, method))))
    return table


def _by_method(methods):
    """Return {(operator, method): call} of {operator: {method: call}}."""
    return {(operator, method): call for operator, calls in methods.items() for method, call in calls.items()}


def _time(call, device):
    """Return (us until launched, us until finished) per call of a series of calls."""
    calls = CALLS if device.type == "cuda" else 2
    barrier(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    launched = time.perf_counter() - begin
    synchronize(device)
    return launched / calls * 1e6, (time.perf_counter() - begin) / calls * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="number of ranks; default: all GPUs, at least 2")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    ranks = options.nproc or (torch.cuda.device_count() if torch.cuda.device_count() > 1 else 2)
    device = pick_device("auto", ranks)
    with RankPool(ranks, device) as pool:
        machine = pool.run(harness.machine)[0]
        table = pool.run(measure)[0]
    stamp = {"git": revision(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    rows = [{"op": operator, "what": "host", "method": method, "host_us": host, "call_us": call, "peak_bytes": peak,
             **machine, **stamp}
            for operator, method, host, call, peak in table]
    for row in rows:
        print(f"{row['op']:39} {row['method']:19} {row['host_us']:8.1f} us launched {row['call_us']:8.1f} us done")
    if device == "cpu":
        print("CPU ranks interpret the kernels: these times are meaningless and are not written.")
        return
    append(rows, options.out, "host")


if __name__ == "__main__":
    main()
