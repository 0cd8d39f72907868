"""Time quantize_fp8 and linear layers in fp8 on one GPU: ``python -m bench.dense.quantize``.

All methods of a case run in turns, eager and in CUDA graphs; forward and backward together are eager only. Methods of
``tdkernels.quantize_fp8``, for each kind of scales, of a bf16 matrix and of its transpose:

    tdkernels         the operator
    torch             the same in plain torch
    torch.compile     the same compiled, on GPUs
    copy              a device-to-device copy that reads and writes together as many bytes as one pass over the operands

Methods of a ColumnParallelLinear without bias on one rank, which has no communication:

    torch             torch.nn.functional.linear in bf16
    bf16              the layer with float8=None
    rowwise, ...      the layer with float8, also with float8_dweight if there is a backward
    gemm rowwise ...  torch._scaled_mm of operands that are quantized already, with fast accumulation; forward only

Calls cycle through inputs that do not fit in the L2 cache together. Every result is compared with fp32 first. Prints
one line per case; rows are appended to a file in ``--out``, if it is given.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import tdkernels
from bench.core import graphs, harness
from bench.core.rank_program import measure_on_ranks
from bench.dense import quantize_methods as methods
from bench.dense.quantize_methods import COMPILED, COPY, TORCH, Linear, Quantize
from tdkernels.launch import pick_device, rank_device

FILE = "quantize_fp8"
SIZES = [(8192, 8192), (8192, 28672), (64, 8192)]
REHEARSAL = [(160, 192)]
# (scaling, one scale per 128 x 128 elements, whether the scale is given)
KINDS = [("row", False, False), ("tensor", False, False), ("block", False, False), ("block", True, False),
         ("tensor", False, True)]
LINEARS = [(8192, 28672, 8192)]  # tokens, N, K
LINEAR_REHEARSAL = [(16, 32, 48)]
OPERATORS = ("linear", "quantize_fp8")
_COLD_BYTES, _MAX_SETS = 256 << 20, 64  # of the inputs that calls cycle through: several times any L2 cache
_BURST_MS = 10.0


@dataclass(frozen=True)
class Plan:
    """Measurement options. ``compiled``: whether torch.compile is measured."""

    rounds: int
    compiled: bool


# ---- on the rank ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case.

    Returns:
        [(method, whether in a CUDA graph, times)]. times is the entry of ``harness.time_methods`` plus "error", or
        {"absent": reason}.
    """
    on_gpu = rank_device().type == "cuda"
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // case.bytes))) if on_gpu else 2
    sets = [case.inputs(seed) for seed in range(count)]
    found, absent = methods.of(case, plan.compiled and on_gpu)
    failed = {(name, False): {"absent": reason} for name, reason in absent.items()}
    calls, errors = {}, {}
    for name, method in found.items():
        reason = harness.failure_reason(method.call, sets[0])
        if reason is None and method.errors is not None:
            errors[name], limit = _error_and_limit(method, sets[:2])
            if errors[name] > limit:
                reason = f"wrong: relative error {errors[name]:.4f}, the limit is {limit}"
        if reason is None:
            calls[name] = method.call
        elif method.is_ours:
            raise RuntimeError(f"{name}: {reason}")
        else:
            failed[name, False] = {"absent": reason}
    timed = {(name, False): call for name, call in calls.items()}
    if on_gpu and not case.backward:
        captured, reasons = graphs.capture_all(calls, sets, None, ())
        timed |= {(name, True): graph for name, graph in captured.items()}
        failed |= {(name, True): {"absent": reason} for name, reason in reasons.items()}
    times = harness.time_methods(timed, sets, plan.rounds, _BURST_MS if on_gpu else 0)
    tdkernels.synchronize()
    return [(*key, {**one, "error": errors.get(key[0])}) for key, one in (times | failed).items()]


def _error_and_limit(method, sets):
    """Return the relative error of a method that is closest to its limit or farthest above it, and this limit."""
    pairs = [pair for s in sets for pair in zip(method.errors(s), method.limits, strict=True)]
    return max(pairs, key=lambda pair: pair[0] / pair[1])


# ---- in the calling process ----


def rows(case, found):
    """Return one row per method.

    "gbps" counts the bytes of one pass. "speedup" is over torch.compile, or over torch for a linear layer. "share" is
    the time of the copy over that of the method.
    """
    ms_of = {(name, graph): times.get("ms") for name, graph, times in found}
    is_linear = isinstance(case, Linear)
    table = []
    for name, graph, times in found:
        ms, base = times.get("ms"), ms_of.get((TORCH if is_linear else COMPILED, graph))
        copy = ms_of.get((COPY, graph))
        table.append({
            "what": case.what, "op": case.operator, "shape": str(case), **asdict(case), "dtype": "bfloat16",
            "method": name, "graph": graph, "absent": times.get("absent"), "ms": ms, "host_ms": times.get("host_ms"),
            "burst": times.get("burst"), "error": times.get("error"),
            "tflops": case.flops / ms / 1e9 if ms and is_linear else None,
            "gbps": case.bytes / ms / 1e6 if ms and not is_linear else None,
            "speedup": base / ms if ms and base else None, "share": copy / ms if ms and copy else None,
        })
    return table


def line(table):
    """Return the times in ms as text: in CUDA graphs, or of eager calls if there are no graphs."""
    graph = any(row["graph"] and row["ms"] for row in table)
    shown = [row for row in table if row["graph"] == graph or row["absent"]]
    times = [
        f"{row['method']} {row['ms']:.4f}" if row["ms"] else f"{row['method']} – ({row['absent']})" for row in shown
    ]
    return f"{', '.join(times)} ms{', in CUDA graphs' * graph}"


def cases(operators, device, sizes=None):
    """Return the cases of a run in their order: layers first, then all kinds of scales by size of the matrix."""
    on_gpu = device == "cuda"
    found = []
    if "linear" in operators:
        sizes_of = LINEARS if on_gpu else LINEAR_REHEARSAL
        found += [Linear(*size, backward) for size in sizes_of for backward in (False, True)]
    if "quantize_fp8" in operators:
        for size in (sizes or SIZES) if on_gpu else REHEARSAL:
            found += [Quantize(*size, *kind, transpose) for transpose in (False, True) for kind in KINDS]
    return found


def _size(text):
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxK")
    return tuple(map(int, sizes))


def main(arguments=None):
    """Measure and print. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=list(OPERATORS), choices=OPERATORS, help="what is measured")
    parser.add_argument("--shapes", nargs="+", type=_size, metavar="ROWSxK", help="sizes of quantized matrices")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="start no further case after this time")
    parser.add_argument("--out", type=Path, help="folder for the rows")
    options = parser.parse_args(arguments)
    device = pick_device("auto", 1)

    def rows_of(pool, case, rounds):
        return rows(case, pool.run(measure, case, Plan(rounds, not options.no_compile))[0])

    chosen = cases(options.ops, device, options.shapes)
    return measure_on_ranks(1, device, chosen, rows_of, line, options, FILE)


if __name__ == "__main__":
    sys.exit(main())
