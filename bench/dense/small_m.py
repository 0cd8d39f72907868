"""Time the default configs for small M, and the configs that they are selected from, in solo mode on one GPU.

    python -m bench.dense.small_m --solo 4 [--link 390] [--operators gemm_rs] [--rows 128 512] [--layouts nk scaled]

The upper bounds of M and the times of tiles in ``default_config`` of the operators and in ``small_m_gemm`` were fitted
to such measurements on an H200. The candidates are those of Hopper. For each case:

    gemm           torch's GEMM of a rank's operands alone, where it does not dequantize them
    default        the heuristic config
    one_shot TILE  "one_shot" with each tile that its heuristic compares
    push TILE      ag_gemm: the kernel without warp specialization, with small and medium tiles
    direct TILE    gemm_rs and gemm_ar: the same with transport "direct"
    specialized    the warp-specialized kernel. For ag_gemm: with chunks of two tiles, and with one chunk

Calls are in CUDA graphs. The benchmark does not check results. In solo mode, "one_shot" of gemm_rs and gemm_ar with
random operands may give wrong ones. Rows are written to DIR/<gpu>x1/small_m.jsonl, for which there is no table. At the
end the benchmark prints the time of the default over that of the fastest config.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import tdkernels
from bench.core import graphs, harness
from bench.core.each_case import measure_all
from bench.core.row_files import append
from bench.dense.problems import ProblemCase, gemm_operands, operator_call
from bench.dense.solo import FLOOR_GBPS
from bench.run import revision
from tdkernels.autotune.tunable import tunable
from tdkernels.launch import RankPool, pick_device, rank_device
from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.scaled_problem import is_scaled, scales_of, torch_dequantizes
from tdkernels.ops.common.scaling import LAYOUTS, scaled_linear
from tdkernels.ops.common.tile_config import LARGE, MEDIUM, Tiles, specialized_tiles
from tdkernels.ops.dense.ag_gemm import config as ag_gemm_config
from tdkernels.ops.dense.launch_direct import DIRECT_LARGE, DIRECT_MEDIUM, DIRECT_SMALL
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu
from tdkernels.solo import enter_solo_mode, why_not_solo

# (N, K) of the column-parallel and of the row-parallel layers of Llama 3.1 8B and 70B, and of Qwen3 32B.
_COLUMN_LAYERS = (10240, 8192), (28672, 4096), (51200, 5120), (57344, 8192)
_ROW_LAYERS = (8192, 8192), (4096, 14336), (5120, 25600), (8192, 28672)
LAYERS = {"ag_gemm": _COLUMN_LAYERS, "gemm_rs": _ROW_LAYERS, "gemm_ar": _ROW_LAYERS}
_ROWS = 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1008, 1536, 2048
_REHEARSAL = (16, 256, 512)  # M, N, K; a slot of solo mode has at least 4 KiB
_SMALL = Tiles(64, 128, 64, num_warps=4, num_stages=5)
_CALLS = 40  # per graph; see bench.dense.solo
_COLD_BYTES, _MOST_SETS = 256 << 20, 32  # of the operands of all calls, so that they do not fit in the L2 cache


@dataclass(frozen=True)
class Case(ProblemCase):
    """One measurement.

    Attributes:
        link_gbps: Rate of the modelled link, or None for one that is infinitely fast.
        rounds: Rounds of bursts.
    """

    link_gbps: float | None
    rounds: int


# ---- configs ----


def configs(problem, device):
    """Return {name: config}: the default and the candidates that it is selected from, without illegal ones."""
    tuned = tunable(problem.operator)
    found = {"default": tuned.default(problem, device)}
    if device.type == "cuda":
        found |= _one_shot(tuned, problem, device) | _with_many_tiles(tuned, problem, device)
    return {name: one for name, one in found.items() if tuned.illegal(one, problem, device) is None}


def _name(tiles):
    return f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}, {tiles.num_warps} warps, {tiles.num_stages} stages"


def _one_shot(tuned, problem, device):
    """Return the configs of "one_shot", for up to 1023 rows."""
    rows, dtype = problem.shape[0], problem.torch_dtype
    if rows > 1023:
        return {}
    _, n, k = tuned.operand_sizes(problem)
    exchanging = 0 if problem.operator == "ag_gemm" else problem.world_size
    field = {"exchange" if problem.operator == "gemm_ar" else "transport": "one_shot"}
    found = {}
    for tiles in small_m_gemm.compared_tiles(rows, dtype, device, exchanging, problem.layout):
        split = small_m_gemm.default_split(tiles, rows, n, k, gpu.num_sms(device))
        found[f"one_shot {_name(tiles)}"] = tuned.config_class(tiles=tiles, split_k=split, **field)
    return found


def _with_many_tiles(tuned, problem, device):
    """Return the configs of the kernels whose tiles overlap with the wire."""
    dtype, config_class = problem.torch_dtype, tuned.config_class
    if problem.operator == "ag_gemm":
        specialized = ag_gemm_config.specialized_config(dtype, device)
        specialized = replace(specialized, tiles=specialized_tiles(LARGE, dtype))
        chunk = cdiv(problem.shape[0] // problem.world_size, LARGE.block_m)
        found = {"specialized": specialized, "specialized, one chunk": replace(specialized, chunk_tiles=max(chunk, 1))}
        num_comm = ag_gemm_config.num_pushing(problem.world_size)
        for tiles in (_SMALL, MEDIUM):
            tiles = tuned.plain_tiles(tiles, problem, device)
            found[f"push {_name(tiles)}"] = config_class(tiles=tiles, num_comm_sms=num_comm)
        return found
    tiles = specialized_tiles(DIRECT_LARGE, dtype)
    found = {"specialized": config_class(tiles=tiles, transport="direct", warp_specialize=True)}
    for tiles in (DIRECT_SMALL, DIRECT_MEDIUM):
        tiles = tuned.plain_tiles(tiles, problem, device)
        found[f"direct {_name(tiles)}"] = config_class(tiles=tiles, transport="direct")
    return found


# ---- on the rank ----


def _gemm(problem):
    """Return call(operands) of torch's GEMM of a rank alone, on the operands of ``gemm_operands``."""
    if not is_scaled(problem):
        return lambda operands: torch.nn.functional.linear(*operands)
    return lambda operands: scaled_linear(*operands[:2], None, scales_of(problem, *operands[2:]))


def _operands(problem, device):
    """Return operands of several calls, with at least _COLD_BYTES in all or in _MOST_SETS calls."""
    tuned = tunable(problem.operator)
    draw = lambda seed: tuned.operands(problem, device, torch.Generator(device).manual_seed(seed))  # noqa: E731
    first = draw(0)
    count = cdiv(_COLD_BYTES, sum(one.nbytes for one in first)) if device.type == "cuda" else 2
    return [first] + [draw(seed) for seed in range(1, max(2, min(_MOST_SETS, count)))]


@harness.measurement
def measure(case, burst_ms):
    """Return [(method, times or absence, config)]."""
    device = rank_device()
    problem = case.problem(device)
    sets = _operands(problem, device)
    of_gemm = [gemm_operands(problem, one) for one in sets]
    given, calls, found = configs(problem, device), {}, []
    if not torch_dequantizes(problem, *tunable(problem.operator).operand_sizes(problem)[1:], device):
        calls["gemm"] = _gemm(problem)
    call = operator_call(problem)
    calls |= {name: lambda one, config=config: call(one, config) for name, config in given.items()}
    for name in list(calls):
        if (reason := harness.failure_reason(calls[name], (of_gemm if name == "gemm" else sets)[0])) is not None:
            found.append((name, {"absent": reason}, given.get(name)))
            del calls[name]
    if device.type == "cuda":
        captured = {}
        for name, call in calls.items():
            of_call, absent = graphs.capture_all({name: call}, of_gemm if name == "gemm" else sets, None, (), _CALLS)
            captured |= of_call
            found += [(name, {"absent": reason}, given.get(name)) for name, reason in absent.items()]
        calls = captured
    elif "gemm" in calls:
        calls["gemm"] = lambda _, call=calls["gemm"]: call(of_gemm[0])
    times = harness.time_methods(calls, sets, case.rounds, burst_ms)
    tdkernels.synchronize()
    return found + [(name, one, given.get(name)) for name, one in times.items()]


# ---- in the calling process ----


def rows(case, found):
    """Return one row per method."""
    problem = case.problem(torch.device("cpu"))
    wire_ms = tunable(case.operator).floors(problem).wire_bytes / (case.link_gbps or FLOOR_GBPS) / 1e6
    gemm_ms = {name: one.get("ms") for name, one, _ in found}.get("gemm")
    m, n, k = case.shape
    return [
        {
            "what": "small_m", "op": case.operator, "m": m, "n": n, "k": k, "layout": case.layout, "ranks": case.ranks,
            "link_gbps": case.link_gbps, "method": name, "absent": one.get("absent"), "ms": one.get("ms"),
            "gemm_ms": gemm_ms, "wire_ms": wire_ms,
            "config": None if config is None else json.loads(json.dumps(vars(config), default=vars)),
        }
        for name, one, config in found
    ]


def _fastest(table):
    """Return the row of the fastest config of a case, or None."""
    timed = [row for row in table if row["ms"] is not None and row["method"] != "gemm"]
    return min(timed, key=lambda row: row["ms"], default=None)


def _summary(table):
    best, ms = _fastest(table), {row["method"]: row["ms"] for row in table}
    if best is None or ms["default"] is None:
        return "; ".join(f"{row['method']}: {row['absent']}" for row in table if row["absent"])
    gemm = "" if ms.get("gemm") is None else f"GEMM {ms['gemm']:.4f}, "
    return f"{gemm}default {ms['default']:.4f} ({ms['default'] / best['ms']:.2f}), {best['method']} {best['ms']:.4f} ms"


def comparison(table):
    """Return lines with the time of the default over that of the fastest config, for each operator and layout."""
    of_case, ratios = defaultdict(list), defaultdict(list)
    for row in table:
        of_case[tuple(row[name] for name in ("op", "layout", "ranks", "m", "n", "k"))].append(row)
    for (operator, layout, ranks, *_), found in of_case.items():
        best, default = _fastest(found), {row["method"]: row["ms"] for row in found}.get("default")
        if default is not None:
            ratios[operator, layout, ranks].append(default / best["ms"])
    return [
        f"{operator} {layout}, {ranks} ranks: default over the fastest {statistics.geometric_mean(of_kind):.3f}, "
        f"at most {max(of_kind):.2f} ({len(of_kind)} cases)"
        for (operator, layout, ranks), of_kind in ratios.items()
    ]


def _options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solo", type=int, required=True, help="number of ranks, W")
    parser.add_argument("--link", type=float, help="GB/s of the modelled link; default: infinite")
    parser.add_argument("--operators", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--layouts", nargs="+", default=["nk", *LAYOUTS], choices=["nk", *LAYOUTS])
    parser.add_argument("--rows", type=int, nargs="+", help="M of the whole problem")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst-ms", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, help="start no case after this time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    return parser.parse_args()


def _cases(options, on_gpu):
    """Return the cases whose sizes the ranks divide, with increasing M.

    A workspace keeps its largest number of signals, whose words must fit in a slot.
    """
    rounds = options.rounds if on_gpu else 1
    for operator in options.operators:
        tuned, sizes = tunable(operator), sorted(options.rows or _ROWS)
        shapes = [(m, n, k) for m in sizes for n, k in LAYERS[operator]] if on_gpu else [_REHEARSAL]
        for shape in shapes:
            for layout in options.layouts:
                case = Case(operator, shape, layout, options.solo, options.link, rounds)
                if (reason := tuned.why_not(case.problem(torch.device("cpu")))) is None:
                    yield case
                else:
                    print(f"{case}: {reason}")


def main():
    options, begun = _options(), time.monotonic()
    if (reason := why_not_solo(options.operators, options.solo, options.link)) is not None:
        raise SystemExit(reason)
    device = pick_device("auto", 1)
    on_gpu = device == "cuda"
    keep = (lambda table: append(table, options.out, "small_m")) if on_gpu else None
    deadline = begun + options.seconds if options.seconds else None
    with RankPool(1, device, timeout_s=300.0) as pool:
        common = {**pool.run(harness.machine)[0], "git": revision()}
        pool.run(enter_solo_mode, options.solo, options.link and options.link * 1e9, True)

        def rows_of(case):
            return rows(case, pool.run(measure, case, options.burst_ms if on_gpu else 0)[0])

        table, _ = measure_all(pool, list(_cases(options, on_gpu)), rows_of, common, keep, _summary, deadline)
    print("\n".join(comparison(table)))
    if not on_gpu:
        print("CPU ranks interpret the kernels: these times are meaningless and are not written.")


if __name__ == "__main__":
    main()
