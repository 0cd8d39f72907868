"""Time wire compression: ``python -m bench.dense.wire``.

Methods of ag_gemm and gemm_rs, bf16, in turns and in CUDA graphs (``--eager`` without):

    tdkernels    the uncompressed operator, with the selected config
    pipelined    the uncompressed operator, method "parts"
    wire         ``wire="fp8"``, with 1, 2 and 4 pieces
    gemm         torch's GEMM of one rank, without communication

Methods of all_reduce: "tdkernels" with the selected config, "two_shot", and "wire", ``quantize="fp8"``. Prints one line
per case, with the relative error of "wire". Rows are appended to a file in ``--out``, if it is given.
"""

import argparse
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from bench.core import graphs, harness
from bench.core.row_files import append
from bench.run import revision
from tdkernels.launch import RankPool, pick_device, rank_device
from tdkernels.ops.collectives.config import default_config

# (M, N, K); for all_reduce M rows of N elements. From a large GEMM per byte to a small one.
SHAPES = {
    "ag_gemm": ((8192, 28672, 4096), (8192, 10240, 8192), (8192, 2048, 8192), (2048, 10240, 8192)),
    "gemm_rs": ((8192, 4096, 14336), (8192, 8192, 8192), (8192, 8192, 2048), (2048, 8192, 8192)),
    "all_reduce": ((8192, 8192, 0), (2048, 8192, 0), (256, 8192, 0), (64, 8192, 0)),
}
REHEARSAL = {"ag_gemm": ((32, 64, 128),), "gemm_rs": ((32, 64, 128),), "all_reduce": ((32, 64, 0),)}
CONFIGS = {"ag_gemm": tdkernels.AgGemmConfig, "gemm_rs": tdkernels.GemmRsConfig}
_PIECES = 1, 2, 4
_BURST_MS = 15.0


def _draw(*shape):
    return torch.randn(shape, dtype=torch.bfloat16, device=rank_device())


def _all_reduce_calls(shape):
    """Return {method: call} and the exact result."""
    x = _draw(*shape[:2])
    config = default_config("all_reduce", x.nbytes, dist.get_world_size(), x.device, "two_shot")
    calls = {
        "tdkernels": lambda _: tdkernels.all_reduce(x), "two_shot": lambda _: tdkernels.all_reduce(x, config=config),
        "wire": lambda _: tdkernels.all_reduce(x, quantize="fp8"),
    }
    return calls, tdkernels.all_reduce(x.float())


def _gemm_calls(operator, shape):
    """Return {method: call} and the exact result."""
    (m, n, k), ranks = shape, dist.get_world_size()
    gathers = operator == "ag_gemm"
    x = _draw(m // ranks, k) if gathers else _draw(m, k // ranks)
    weight = _draw(n // ranks, k) if gathers else _draw(n, k // ranks)
    full = _draw(m, k) if gathers else x
    op, ref = getattr(tdkernels, operator), getattr(tdkernels, f"{operator}_ref")

    def wire(pieces):
        config = CONFIGS[operator](method="parts", pieces=pieces)
        return lambda _: op(x, weight, wire="fp8", config=config)

    calls = {
        "tdkernels": lambda _: op(x, weight),
        "pipelined": lambda _: op(x, weight, config=CONFIGS[operator](method="parts")),
        **{f"wire {pieces}": wire(pieces) for pieces in _PIECES},
        "gemm": lambda _: F.linear(full, weight),
    }
    return calls, ref(x.float(), weight.float())


@torch.no_grad()
def measure(operator, shape, rounds, eager):
    """Return ({method: ms, or the reason why there is none}, relative error of the compressed call)."""
    calls, exact = _all_reduce_calls(shape) if operator == "all_reduce" else _gemm_calls(operator, shape)
    output = next(call for name, call in calls.items() if name.startswith("wire"))(None)
    error = ((output.float() - exact).norm() / exact.norm()).item()
    absent = {}
    on_gpu = rank_device().type == "cuda"
    if on_gpu and not eager:
        calls, absent = graphs.capture_all(calls, [None], None, ())
    times = harness.time_methods(calls, [None], rounds, _BURST_MS if on_gpu else 0)
    tdkernels.synchronize()
    return {**{name: one["ms"] for name, one in times.items()}, **absent}, error


def _line(operator, shape, found, error):
    columns = [f"{name} {ms:.4f}" if type(ms) is float else f"{name} ({ms})" for name, ms in found.items()]
    return f"{operator} {'x'.join(map(str, shape))}: {', '.join(columns)} ms; error {error:.4f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="number of ranks; default: all GPUs, at least 2")
    parser.add_argument("--operators", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--out", type=Path, help="folder for the rows")
    options = parser.parse_args()
    ranks = options.nproc or max(torch.cuda.device_count(), 2)
    device = pick_device("auto", ranks)
    shapes, rounds = (SHAPES, options.rounds) if device == "cuda" else (REHEARSAL, 1)
    rows = []
    with RankPool(ranks, device) as pool:
        machine = pool.run(harness.machine)[0]
        for operator, shape in [(name, shape) for name in options.operators for shape in shapes[name]]:
            found, error = pool.run(measure, operator, shape, rounds, options.eager)[0]
            print(_line(operator, shape, found, error), flush=True)
            stamp = {"git": revision(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
            fields = {"what": "wire", "op": operator, "shape": shape, "graph": not options.eager, "error": error}
            rows += [{**fields, "method": name, "ms": ms, **machine, **stamp} for name, ms in found.items()]
    if device == "cpu":
        print("CPU ranks interpret the kernels: these times are meaningless and are not written.")
    elif options.out is not None:
        append(rows, options.out, "wire")


if __name__ == "__main__":
    main()
