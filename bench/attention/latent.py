"""Time flash_decode with latent caches (MLA): ``python -m bench.attention.latent``.

q [B, H, 576], one cache [B, S, 1, 576] in bf16, values in its first 512 columns; eager and in CUDA graphs. With
``--fp8``, these columns are e4m3, and the other ones are a cache of their own in bf16. Methods:

    split             FlashDecodeConfig(method="split") with blocks of 32 keys, 4 warps and 2 stages
    fused             method "fused" with its heuristic config
    fused, 64 rows    method "fused" with tiles of 64 query rows; one rank, at least 64 query rows
    tdkernels         the selected config
    copy              a device-to-device copy that reads and writes together as many bytes as the cache has; one rank
    gemm              one cuBLAS GEMM, 2048 x 2048 x K, with as many floating-point operations as the call; one rank

The floor is the larger of copy and gemm. If the call has less work than a GEMM of 2048 x 2048 x 2048, this GEMM is
measured and its time is scaled by the number of floating-point operations. With several ranks, S is the number of keys
per rank. Calls cycle through caches that do not fit in the L2 cache together. All results of two caches are compared
with plain torch in fp32 first. Prints one line per shape; rows are appended to a file in ``--out``, if it is given.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tdkernels
from bench.attention import latent_methods as methods
from bench.attention.latent_methods import COPY, FLOORS, GEMM, SELECTED, SPLIT, Shape
from bench.core import graphs, harness
from bench.core.rank_program import measure_on_ranks
from tdkernels.launch import pick_device, rank_device

FILE = "flash_decode_latent"
SHAPES = [
    Shape(1, 128, 65536), Shape(32, 128, 4096), Shape(8, 128, 32768), Shape(128, 128, 1151), Shape(1, 128, 8192),
    Shape(128, 16, 4096), Shape(4, 64, 16384), Shape(1, 16, 65536), Shape(2, 128, 32768, queries=2),
]
REHEARSAL = [
    Shape(2, 64, 40, dim=72, dim_v=64), Shape(1, 16, 33, dim=72, dim_v=64),
    Shape(1, 16, 24, queries=2, dim=72, dim_v=64),
]
_COLD_BYTES, _MAX_SETS = 256 << 20, 64  # of the caches that calls cycle through: several times any L2 cache
_BURST_MS = 15.0


# ---- on the ranks ----


@harness.measurement
def measure(shape, rounds):
    """Check and time all methods.

    Returns:
        [(method, whether in a CUDA graph, times)]. times is the entry of ``harness.time_methods`` plus "config", and
        for the GEMM "sizes"; or {"absent": reason, "config"} for a method that cannot run.
    """
    on_gpu = rank_device().type == "cuda"
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // shape.bytes))) if on_gpu else 2
    sets = [methods.inputs(shape, seed) for seed in range(count)]
    configs = methods.configs(shape, sets[0])
    more = {name: {"config": dataclasses.asdict(config)} for name, config in configs.items()}
    calls, references = methods.calls(configs, configs), methods.references(sets[:2])
    failed = {}
    for name in list(calls):
        if (reason := _reason_for_absence(name, calls[name], references)) is not None:
            failed[name, False] = failed[name, True] = {"absent": reason}
            del calls[name]
    if dist.get_world_size() == 1:
        floors, sizes = methods.floors(shape)
        calls, more = calls | floors, more | {GEMM: {"sizes": list(sizes)}}
    captured, absent = graphs.capture_all(calls, sets, references, FLOORS) if on_gpu else ({}, {})
    failed |= {(name, True): {"absent": reason} for name, reason in absent.items()}
    timed = {(name, False): call for name, call in calls.items()}
    timed |= {(name, True): call for name, call in captured.items()}
    found = harness.time_methods(timed, sets, rounds, _BURST_MS if on_gpu else 0)
    tdkernels.synchronize()
    return [(*key, {**times, **more.get(key[0], {})}) for key, times in (found | failed).items()]


def _reason_for_absence(name, call, references):
    """Return why a method cannot run, or None.

    Raises:
        RuntimeError: if a method is wrong, or if a call with the selected config fails.
    """
    reason = harness.failure_reason(call, references[0][0])
    wrong = None if reason else harness.mismatch_reason(call, references)
    if wrong or (reason and name == SELECTED):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason


# ---- in the calling process ----


def rows(shape, found):
    """Return one row per method.

    "gbps" counts the bytes of the cache, each once. "share" is the floor over the time. Times of both floors are the
    smaller of those with and without a graph, so that launches on the host do not raise the floor.
    """
    floor_ms, floor = _floor(shape, found)
    fields = {"what": "latent", "op": "flash_decode", "shape": str(shape), **dataclasses.asdict(shape)}
    fields |= {"dtype": str(methods.DTYPE).removeprefix("torch."), "floor_ms": floor_ms, "floor": floor}
    table = []
    for name, graph, times in found:
        ms, sizes = times.get("ms"), times.get("sizes")
        flops = 2 * sizes[0] * sizes[1] * sizes[2] if sizes else shape.flops
        table.append({
            **fields, "method": name, "graph": graph, "absent": times.get("absent"), "ms": ms,
            "us": ms * 1e3 if ms else None, "host_ms": times.get("host_ms"),
            "tflops": flops / ms / 1e9 if ms and name != COPY else None,
            "gbps": shape.bytes / ms / 1e6 if ms and name != GEMM else None,
            "share": floor_ms / ms if ms and floor_ms and name not in FLOORS else None,
            "config": times.get("config"), "gemm": sizes,
        })
    return table


def _floor(shape, found):
    """Return (ms, name) of the larger floor, or (None, None) if they were not measured."""
    ms = {}
    for name, _, times in found:
        if name in FLOORS and times.get("ms"):
            sizes = times.get("sizes")
            scale = shape.flops / (2 * sizes[0] * sizes[1] * sizes[2]) if sizes else 1.0
            ms[name] = min(ms.get(name, float("inf")), scale * times["ms"])
    return max((value, name) for name, value in ms.items()) if len(ms) == len(FLOORS) else (None, None)


def line(table):
    """Return the times in microseconds as text: of calls in CUDA graphs, or of eager calls if there are no graphs."""
    graph = any(row["graph"] and row["ms"] for row in table)
    shown = {row["method"]: row for row in table if row["graph"] == graph and row["method"] not in FLOORS}
    times = [
        f"{name} {row['us']:.1f}" if row["us"] else f"{name} – ({row['absent']})" for name, row in shown.items()
    ]
    if table[0]["floor_ms"]:
        times.insert(0, f"floor {table[0]['floor_ms'] * 1e3:.1f} ({table[0]['floor']})")
    text = f"{', '.join(times)} us{', in CUDA graphs' * graph}"
    split = shown.get(SPLIT)
    if split is None or not split["ms"]:
        return text
    share = f", floor / time {split['share']:.2f}" if split["share"] else ""
    return f"{text}; split: {split['tflops']:.0f} TFLOP/s, {split['gbps']:.0f} GB/s{share}"


def _options(arguments):
    """Return (options, number of ranks, device, shapes)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="number of ranks; default: all GPUs, 2 without GPUs")
    parser.add_argument("--shapes", nargs="+", metavar="BxHxS[xTq]", help="sequences x heads x keys x query tokens")
    parser.add_argument("--page", type=int, default=0, help="keys per block of paged caches; default: dense caches")
    parser.add_argument("--fp8", action="store_true", help="caches in fp8, with rotary columns in bf16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, help="start no further shape after this time")
    parser.add_argument("--out", type=Path, help="folder for the rows")
    options = parser.parse_args(arguments)
    if options.page < 0:
        parser.error(f"--page must not be negative, it is {options.page}")
    ranks = options.nproc or torch.cuda.device_count() or 2
    device = pick_device("auto", ranks)
    try:
        shapes = [methods.parse_shape(text) for text in options.shapes] if options.shapes else SHAPES
    except ValueError as error:
        parser.error(f"--shapes: {error}")
    if options.shapes and ranks > 1 and any(shape.queries > 1 for shape in shapes):
        parser.error("--shapes: several query tokens are measured on one rank only")
    shapes = [shape for shape in (REHEARSAL if device == "cpu" else shapes) if ranks == 1 or shape.queries == 1]
    return options, ranks, device, [
        dataclasses.replace(shape, page=options.page, fp8=options.fp8) for shape in shapes
    ]


def main(arguments=None):
    """Measure and print. Return the exit code."""
    options, ranks, device, shapes = _options(arguments)
    rows_of = lambda pool, shape, rounds: rows(shape, pool.run(measure, shape, rounds)[0])  # noqa: E731
    return measure_on_ranks(ranks, device, shapes, rows_of, line, options, FILE)


if __name__ == "__main__":
    sys.exit(main())
