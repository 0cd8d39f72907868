"""Time the end of a tensor-parallel layer during decoding: ``python -m bench.dense.norm``.

A row-parallel GEMM, all-reduce, residual addition and RMSNorm, bf16, eager and in CUDA graphs. Methods:

    torch             torch's GEMM, NCCL's all-reduce, an addition, torch's norm
    torch compiled    the same, with addition and norm in one kernel of torch.compile
    gemm_ar           ``gemm_ar`` with the selected config, an addition, torch's norm
    gemm_ar compiled  the same, with addition and norm in one kernel of torch.compile
    fused             ``gemm_ar_rms_norm``, method "fused" with the heuristic config
    fused, 8 warps    the same with 8 warps, which keep rows of up to 8192 elements in registers
    separate          ``gemm_ar_rms_norm``, method "separate"
    tdkernels         ``gemm_ar_rms_norm`` with the selected config
    gemm alone        torch's GEMM of one rank; gemm_ar alone: without addition and norm. Both are floors.

Calls cycle through weights that do not fit in the L2 cache together. The results of whole methods are checked first.
Prints one line per shape; rows are appended to a file in ``--out``, if it is given.
"""

import argparse
import dataclasses
import functools
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from bench.core import graphs, harness
from bench.core.row_files import append
from bench.run import revision
from tdkernels import GemmArNormConfig
from tdkernels.launch import RankPool, pick_device, rank_device
from tdkernels.ops.common.torch_collectives import all_reduce
from tdkernels.ops.dense.gemm_ar_norm.config import fused_config

OPERATOR = "gemm_ar_rms_norm"
LAYERS = {
    "llama-8b o": (4096, 4096), "llama-8b down": (4096, 14336), "llama-70b o": (8192, 8192),
    "llama-70b down": (8192, 28672),
}
ROWS = 1, 2, 4, 8, 16, 32, 64
SHAPES = [(m, *layer) for layer in LAYERS.values() for m in ROWS]
REHEARSAL = [(1, 64, 64), (5, 48, 32)]
BASELINE, FLOORS = "torch", ("gemm alone", "gemm_ar alone")
_EPS = 1e-5
_COLD_BYTES, _MAX_SETS = 256 << 20, 64  # of the weights that calls cycle through: several times any L2 cache
_BURST_MS = 15.0


# ---- on the ranks ----


def _inputs(shape, seed):
    """Return x and weight of this rank, and residual and norm_weight, which are equal on all ranks."""
    m, n, k = shape
    ranks = dist.get_world_size()
    own = torch.Generator(rank_device()).manual_seed(seed * ranks + dist.get_rank())
    shared = torch.Generator(rank_device()).manual_seed(seed)

    def draw(generator, *size):
        return torch.randn(size, generator=generator, dtype=torch.bfloat16, device=rank_device())

    weight = draw(own, n, k // ranks).mul_(k**-0.5)
    return SimpleNamespace(
        x=draw(own, m, k // ranks), weight=weight, residual=draw(shared, m, n), norm_weight=draw(shared, n)
    )


def _add_and_norm(z, residual, norm_weight):
    r = z + residual
    return F.rms_norm(r, norm_weight.shape, norm_weight, _EPS), r


@functools.lru_cache(1)
def _compiled(n):
    """Return ``_add_and_norm`` compiled for rows of ``n`` elements."""
    torch._dynamo.reset()  # otherwise n would become dynamic
    return torch.compile(_add_and_norm)


def _all_reduced(s):
    return all_reduce(F.linear(s.x, s.weight))


def _gemm_ar(s):
    return tdkernels.gemm_ar(s.x, s.weight)


def _after(make_z, function=_add_and_norm):
    """Return a method: ``make_z``, then addition and norm."""
    return lambda s: function(make_z(s), s.residual, s.norm_weight)


def _fused(config):
    return lambda s: tdkernels.gemm_ar_rms_norm(s.x, s.weight, s.residual, s.norm_weight, _EPS, config=config)


def _default(shape):
    """Return the heuristic config of method "fused", for any number of rows."""
    m, n, k = shape
    return fused_config(m, n, k // dist.get_world_size(), torch.bfloat16, rank_device())


def methods(shape):
    """Return {method: call on inputs}; the compiled methods need GPUs."""
    calls = {BASELINE: _after(_all_reduced), "gemm_ar": _after(_gemm_ar)}
    if rank_device().type == "cuda":
        compiled = _compiled(shape[1])
        calls |= {"torch compiled": _after(_all_reduced, compiled), "gemm_ar compiled": _after(_gemm_ar, compiled)}
    default = _default(shape)
    more_warps = dataclasses.replace(default, tiles=dataclasses.replace(default.tiles, num_warps=8))
    return calls | {
        "fused": _fused(default), "fused, 8 warps": _fused(more_warps),
        "separate": _fused(GemmArNormConfig("separate")), "tdkernels": _fused(None),
        "gemm alone": lambda s: F.linear(s.x, s.weight), "gemm_ar alone": _gemm_ar,
    }


def _references(sets):
    """Return [(inputs, (y, r) in fp32, errors of torch in bf16)]."""
    by_torch, found = _after(_all_reduced), []
    for s in sets:
        exact = by_torch(SimpleNamespace(**{name: tensor.float() for name, tensor in vars(s).items()}))
        found.append((s, exact, harness.errors(by_torch(s), exact)))
    return found


@harness.measurement
def measure(shape, rounds):
    """Check and time all methods. Return ([(method, whether in a CUDA graph, times)], {method: reason for absence})."""
    _, n, k = shape
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // (2 * n * k // dist.get_world_size()))))
    on_gpu = rank_device().type == "cuda"
    sets = [_inputs(shape, seed) for seed in range(count if on_gpu else 2)]
    calls, references = methods(shape), _references(sets[:2])
    for name, call in calls.items():
        reason = None if name in FLOORS else harness.mismatch_reason(call, references)
        if reason is not None:
            raise RuntimeError(f"{name}: {reason}")
    captured, absent = graphs.capture_all(calls, sets, references, FLOORS) if on_gpu else ({}, {})
    timed = {(name, False): call for name, call in calls.items()}
    timed |= {(name, True): call for name, call in captured.items()}
    found = harness.time_methods(timed, sets, rounds, _BURST_MS if on_gpu else 0)
    tdkernels.synchronize()
    return [(*key, times) for key, times in found.items()], absent


# ---- in the calling process ----


def rows(shape, found, absent):
    """Return one row per method."""
    layer = next((name for name, sizes in LAYERS.items() if sizes == shape[1:]), "")
    base = {graph: times["ms"] for method, graph, times in found if method == BASELINE}
    fields = {"what": "gemm_ar_norm", "op": OPERATOR, "name": layer, "dtype": "bfloat16"}
    fields |= dict(zip("mnk", shape, strict=True))
    table = [
        {**fields, "method": method, "graph": graph, "ms": times["ms"], "host_ms": times["host_ms"], "absent": None,
         "speedup": None if method in FLOORS else base[graph] / times["ms"] if graph in base else None}
        for method, graph, times in found
    ]
    return table + [
        {**fields, "method": method, "graph": True, "ms": None, "host_ms": None, "absent": reason, "speedup": None}
        for method, reason in absent.items()
    ]


def line(shape, table, graph):
    """Return the times in microseconds of eager calls, or of those in CUDA graphs, as text."""
    title = f"{'x'.join(map(str, shape))}{', in CUDA graphs' * graph}"
    timed = [row for row in table if row["graph"] == graph]
    times = [f"{row['method']} {row['ms'] * 1e3:.1f}" if row["ms"] else f"{row['method']} –" for row in timed]
    return f"{title}: {', '.join(times)} us" if times else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="number of ranks; default: all GPUs, at least 2")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="numbers of rows M")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="folder for the rows")
    options = parser.parse_args()
    ranks = options.nproc or max(torch.cuda.device_count(), 2)
    device = pick_device("auto", ranks)
    shapes, rounds = [(m, *LAYERS[layer]) for layer in options.layers for m in options.rows], options.rounds
    if device == "cpu":
        shapes, rounds = REHEARSAL, 1
    with RankPool(ranks, device) as pool:
        machine = pool.run(harness.machine)[0]
        for shape in shapes:
            stamp = {"git": revision(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
            table = [{**row, **machine, **stamp} for row in rows(shape, *pool.run(measure, shape, rounds)[0])]
            for graph in (False, True):
                if text := line(shape, table, graph):
                    print(text, flush=True)
            if device != "cpu" and options.out is not None:
                append(table, options.out, "gemm_ar_norm")
    if device == "cpu":
        print("CPU ranks interpret the kernels: these times are meaningless and are not written.")


if __name__ == "__main__":
    main()
