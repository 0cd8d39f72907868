"""Time torch's fused operators with torch's kernels and with tdkernels: ``python -m bench.dense.torch_operators``.

torch's asynchronous tensor parallelism calls torch.ops.symm_mem.fused_all_gather_matmul, with and without the gathered
A, and fused_matmul_reduce_scatter. torch's kernels and those of ``tdkernels.integrations.symm_mem`` run in turns. With
``--tune`` the operators then run in the tuning mode "on", which selects one of the two. Prints one line per call and
appends rows to a file in ``--out``.
"""

import argparse
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as torch_symm_mem

from bench.core import harness
from bench.core.row_files import append
from bench.run import revision
from tdkernels import autotune
from tdkernels.integrations import symm_mem
from tdkernels.launch import RankPool, pick_device, rank_device

# (M, K, N of each weight on two ranks): q, k, v and gate, up of Llama 70B and 8B on 8 ranks, and one large weight
SHAPES = (
    (8192, 8192, (1024, 128, 128)), (8192, 8192, (3584, 3584)), (8192, 4096, (2048, 512, 512)),
    (2048, 4096, (1792, 1792)), (8192, 8192, (3584,)),
)
REHEARSAL = ((16, 32, (8, 8)),)
TORCH, OURS, TUNED = "torch", "tdkernels", "tuned"  # method names as stored in rows
_BURST_MS = 15.0


def _calls(shape):
    """Return {operator: {method: call}}. The product of the scatter has the width of the first weight.

    torch's kernels are called directly, because tdkernels is installed in their place. On a CPU torch has none.
    """
    (m, k, widths), name = shape, dist.group.WORLD.group_name
    ops, device = torch.ops.symm_mem, rank_device()

    def draw(*sizes):
        return torch.randn(sizes, dtype=torch.bfloat16, device=device)

    A, Bs = draw(m // dist.get_world_size(), k), [draw(n, k).t() for n in widths]
    partial, B = draw(m, widths[0]), draw(k, widths[0]).t()
    gather, scatter = (A, Bs, 0, name), (partial, B, "sum", 0, name)
    calls = {
        "gather": (ops.fused_all_gather_matmul, torch_symm_mem._fused_all_gather_matmul, gather, {"return_A": False}),
        "gather and A": (
            ops.fused_all_gather_matmul, torch_symm_mem._fused_all_gather_matmul, gather, {"return_A": True},
        ),
        "scatter": (ops.fused_matmul_reduce_scatter, torch_symm_mem._fused_matmul_reduce_scatter, scatter, {}),
    }
    return {operator: _methods(device, *call) for operator, call in calls.items()}


def _methods(device, ours, by_torch, args, options):
    methods = {OURS: lambda _inputs: ours(*args, **options)}
    return methods | {TORCH: lambda _inputs: by_torch(*args, **options)} if device.type == "cuda" else methods


@torch.no_grad()
def measure(shape, rounds, tune):
    """Return [(operator, method, ms, host ms, kernel)]. kernel is what the tuning mode selected, else None."""
    torch_symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    burst_ms = _BURST_MS if rank_device().type == "cuda" else 0
    # On a CPU plain torch would be selected, and this is a rehearsal of the kernels.
    with symm_mem.installed(), autotune.mode("cached" if burst_ms else "off"):
        calls = _calls(shape)
        found = _times({(op, method): call for op, methods in calls.items() for method, call in methods.items()},
                       rounds, burst_ms)
        if not tune:
            return found
        with autotune.mode("on"):
            for methods in calls.values():
                methods[OURS](None)
        chosen = {operator: _kernel(methods[OURS]) for operator, methods in calls.items()}
        tuned = _times({(operator, TUNED): methods[OURS] for operator, methods in calls.items()}, rounds, burst_ms)
    return found + [(*row[:-1], chosen[row[0]]) for row in tuned]


def _times(calls, rounds, burst_ms):
    times = harness.time_methods(calls, [None], rounds, burst_ms)
    return [(*key, one["ms"], one["host_ms"], None) for key, one in times.items()]


def _kernel(call):
    """Return which kernel a call runs."""
    before = sum(counts["tdkernels"] for counts in symm_mem.counts().values())
    call(None)
    return OURS if sum(counts["tdkernels"] for counts in symm_mem.counts().values()) > before else TORCH


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="number of ranks; default: all GPUs, at least 2")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="measure the first shapes only")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tune", action="store_true", help="select a kernel in the tuning mode, too; takes minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    ranks = options.nproc or (torch.cuda.device_count() if torch.cuda.device_count() > 1 else 2)
    device = pick_device("auto", ranks)
    shapes = SHAPES[: options.shapes] if device == "cuda" else REHEARSAL
    with RankPool(ranks, device) as pool:
        machine = pool.run(harness.machine)[0]
        for shape in shapes:
            table = pool.run(measure, shape, options.rounds if device == "cuda" else 1, options.tune)[0]
            stamp = {"git": revision(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
            m, k, widths = shape
            fields = {"what": "torch_operators", "m": m, "k": k, "n": widths, "rounds": options.rounds}
            names = "op", "method", "ms", "host_ms", "kernel"
            rows = [{**dict(zip(names, values)), **fields, **machine, **stamp} for values in table]
            for row in rows:
                print(f"{m}x{k} {widths} {row['op']:13} {row['method']:10} {row['ms']:8.4f} ms {row['kernel'] or ''}")
            if device == "cuda":
                append(rows, options.out, "torch_operators")
    if device == "cpu":
        print("CPU ranks interpret the kernels: these times are meaningless and are not written.")


if __name__ == "__main__":
    main()
