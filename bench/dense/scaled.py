"""Time the dense operators with scaled fp8 operands: ``python -m bench.dense.scaled``.

All methods of a case run in turns, in CUDA graphs or with ``--eager``:

    gemm           torch._scaled_mm of one rank's operands, without communication, where torch has it. Also "gemm,
                   row-wise, fast", the fastest form of the library
    torch          collective and torch._scaled_mm in sequence, the baseline that is also a config
    torch fused    torch's fused operator (torch.ops.symm_mem), without multicast
    bf16           the operator of tdkernels with bf16 operands of the same size
    tdkernels      the operator with scaled operands, with the selected config
    default        the operator with the heuristic config; also "default, plain", without warp specialization
    parts          the pipelined form, which multiplies with torch._scaled_mm
    push 1, ...    the operator with the best configs of each kind by the cost model

``--solo W`` measures one rank of W on one GPU (see ``bench.dense.solo``). Rows are appended to a file in ``--out``.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as torch_symm_mem

import tdkernels
from bench.core import graphs, harness
from bench.core.each_case import measure_all
from bench.core.row_files import append
from bench.dense.problems import ProblemCase, gemm_operands, operator_call
from bench.dense.solo import has_equal_tiles, make_tiles_equal
from bench.run import revision
from tdkernels.autotune.hardware import hardware
from tdkernels.autotune.tunable import tunable
from tdkernels.launch import RankPool, pick_device, rank_device
from tdkernels.ops.common.scaled_problem import scales_of
from tdkernels.ops.common.scaling import LAYOUTS, dequantize, multiplies_blocks, scaled_linear
from tdkernels.solo import enter_solo_mode

SHAPES = {
    "ag_gemm": ((8192, 28672, 4096), (8192, 57344, 8192), (8192, 10240, 8192), (2048, 57344, 8192), (64, 57344, 8192)),
    "gemm_rs": ((8192, 4096, 14336), (8192, 8192, 28672), (8192, 8192, 8192), (2048, 8192, 28672), (64, 8192, 28672)),
    "gemm_ar": ((8192, 8192, 28672), (2048, 8192, 28672), (64, 8192, 28672), (16, 8192, 8192)),
}
REHEARSAL = {"ag_gemm": ((32, 64, 128),), "gemm_rs": ((32, 64, 128),), "gemm_ar": ((32, 64, 128),)}
FLOOR_GBPS = 390.0  # as in bench.dense.solo
_BEST = 2  # configs of each kind that are timed, by the cost model
_SOLO_CALLS, _CALLS = 40, 8  # per graph
# In solo mode scales that are gathered by a launch of their own have no peers.
_SOLO_KINDS = {"ag_gemm": ("push", "one_shot"), "gemm_rs": ("direct", "forward"), "gemm_ar": ("direct",)}


@dataclass(frozen=True)
class Case(ProblemCase):
    """One measurement.

    Attributes:
        link_gbps: Rate of the modelled link in solo mode, or None.
        solo: Whether one GPU acts as one of W ranks.
        eager: Whether calls are timed without CUDA graphs.
        configs: Whether configs of each kind are timed.
        rounds: Rounds of bursts.
    """

    link_gbps: float | None
    solo: bool
    eager: bool
    configs: bool
    rounds: int


def _operands(case, problem, generator):
    """Return (x, weight, scale_x, scale_w) of a rank. In solo mode all tiles of gemm_ar are equal, as in ``solo``."""
    operands = tunable(case.operator).operands(problem, rank_device(), generator)
    if case.solo and case.operator == "gemm_ar":
        x, weight, scale_x, scale_w = operands
        of_rows = [x.view(torch.uint8), weight.view(torch.uint8), scale_x]
        if case.layout == "scaled by block":
            scale_w[1:] = scale_w[:1]
        else:
            of_rows.append(scale_w)
        make_tiles_equal(*case.shape[:2], of_rows)
    return operands


def _gemm(problem):
    """Return call(operands): the GEMM of a rank alone, with all rows of x."""

    def call(operands, kind=None, fast=None):
        x, weight, scale_x, scale_w = gemm_operands(problem, operands)
        scales = scales_of(problem, scale_x, scale_w)
        if kind == "row-wise":
            ones = scale_x.new_ones(x.shape[0], 1), scale_w.new_ones(weight.shape[0], 1)
            scales = scales._replace(x=ones[0], weight=ones[1], kind="row", use_fast_accum=fast)
        return x, weight, scales

    return call


def _torch_fused(case, operands):
    """Return a call of torch's fused operator, or None where it has none."""
    x, weight, scale_x, scale_w = operands
    name, fast = dist.group.WORLD.group_name, case.layout == "scaled fast"
    if case.layout == "scaled by block" or case.operator == "gemm_ar" or rank_device().type == "cpu":
        return None
    scale_b = scale_w.t()
    if case.operator == "ag_gemm":
        return lambda _: torch_symm_mem._fused_all_gather_scaled_matmul(
            x, [weight.t()], scale_x, [scale_b], 0, name, [None], [None], [torch.bfloat16], [fast]
        )[1][0]
    return lambda _: torch_symm_mem._fused_scaled_matmul_reduce_scatter(
        x, weight.t(), scale_x, scale_b, "sum", 0, 0, name, [x.shape[0], weight.shape[0]], None, None, torch.bfloat16,
        fast,
    )


def _bf16(case, operands):
    """Return a call of the operator with bf16 operands."""
    x, weight, scale_x, scale_w = operands
    wide = [dequantize(*one).bfloat16() for one in ((x, scale_x), (weight, scale_w))]
    return lambda _: getattr(tdkernels, case.operator)(*wide)


def _exact(case, problem, operands):
    """Return the output in fp32 from dequantized operands, or its first rows.

    In solo mode the peers are mirror images of this rank. Only this rank's rows of ag_gemm are computed, because the
    scales of mirror images do not arrive.
    """
    x, weight, scale_x, scale_w = operands
    full = dequantize(x, scale_x), dequantize(weight, scale_w)
    if not case.solo:
        return getattr(tunable(case.operator).op, f"{case.operator}_ref")(*full)
    if case.operator == "ag_gemm":
        return full[0] @ full[1].t()
    product = full[0] @ full[1].t()
    return case.ranks * product if case.operator == "gemm_ar" else product.unflatten(0, (case.ranks, -1)).sum(0)


def _defaults(case, problem):
    """Return {name: config}: the heuristic config, that without warp specialization, and the pipelined form."""
    tuned = tunable(case.operator)
    default = tuned.default(problem, rank_device())
    configs = {"default": default}
    if getattr(default, "warp_specialize", False):
        tiles = tuned.plain_tiles(default.tiles, problem, rank_device())
        configs["default, plain"] = replace(default, tiles=tiles, warp_specialize=False)
    if hasattr(default, "pieces") and not case.solo:
        configs["parts"] = tuned.config_class(method="parts")
    return configs


def _configs(case, problem):
    """Return {name: config}: the best of each kind by the cost model."""
    device, tuned = rank_device(), tunable(case.operator)
    rates = hardware(device, problem.torch_dtype)
    kinds = {}
    for config in sorted(tuned.space(problem, device), key=lambda config: tuned.estimate_ms(config, problem, rates)):
        kind = config.method
        if kind == "fused":
            kind = config.transport
            if getattr(config, "exchange", None) == "one_shot":
                kind = "one_shot"
        allowed = not case.solo or kind in _SOLO_KINDS[case.operator]
        if allowed and kind != "torch" and tuned.illegal(config, problem, device) is None:
            kinds.setdefault(kind, []).append(config)
    return {f"{kind} {i}": config for kind, found in kinds.items() for i, config in enumerate(found[:_BEST], 1)}


def _methods(case, problem, sets):
    """Return ({name: call}, {name: config}, names that are not checked)."""
    operator, gemm = operator_call(problem), _gemm(problem)
    mm = [gemm(one) for one in sets[:1]][0]
    row = gemm(sets[0], "row-wise", True)
    calls = {"gemm, row-wise, fast": lambda _: scaled_linear(row[0], row[1], None, row[2])}
    if case.layout != "scaled by block" or multiplies_blocks(mm[0].shape[0], mm[0].shape[1], mm[0].device):
        calls["gemm"] = lambda _: scaled_linear(mm[0], mm[1], None, mm[2])
    unchecked = list(calls)
    configs = _defaults(case, problem) | (_configs(case, problem) if case.configs else {})
    calls |= {name: lambda one, config=config: operator(one, config) for name, config in configs.items()}
    calls["tdkernels"] = operator
    if not case.solo:
        plain = tunable(case.operator).plain()
        calls["torch"] = lambda one: operator(one, plain)
        if (fused := _torch_fused(case, sets[0])) is not None:
            torch_symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
            calls["torch fused"] = fused
        calls["bf16"] = _bf16(case, sets[0])
        unchecked += ["bf16", "torch fused"]
    return calls, configs, unchecked


@harness.measurement
def measure(case, burst_ms):
    """Return [(method, times or absence, config, relative error)]."""
    device = rank_device()
    problem = case.problem(device)
    sets = [_operands(case, problem, torch.Generator(device).manual_seed(2 * dist.get_rank() + i)) for i in range(2)]
    exact = [_exact(case, problem, one) for one in sets]
    calls, configs, unchecked = _methods(case, problem, sets)
    found, errors = [], {}
    limit = {"scaled fast": 2e-2, "scaled": 4e-3, "scaled by block": 4e-3}[case.layout]
    for name in list(calls):
        reason = harness.failure_reason(calls[name], sets[0])
        if reason is None and name not in unchecked:
            pairs = zip(sets, exact, strict=True)
            errors[name] = max(harness.errors(calls[name](one)[: len(right)], right)[0] for one, right in pairs)
            if errors[name] > limit:
                reason = f"wrong: relative error {errors[name]:.4f}, the limit is {limit}"
        if reason is not None:
            found.append((name, {"absent": reason}, configs.get(name), None))
            del calls[name]
    exact.clear()
    if device.type == "cuda" and not case.eager:
        calls, absent = graphs.capture_all(calls, sets, None, (), _SOLO_CALLS if case.solo else _CALLS)
        found += [(name, {"absent": reason}, configs.get(name), None) for name, reason in absent.items()]
    times = harness.time_methods(calls, sets, case.rounds, burst_ms)
    tdkernels.synchronize()
    return found + [(name, one, configs.get(name), errors.get(name)) for name, one in times.items()]


def _rows(case, found):
    """Return one row per method."""
    tuned = tunable(case.operator)
    problem = case.problem(torch.device("cpu"))
    wire_ms = tuned.floors(problem).wire_bytes / (case.link_gbps or FLOOR_GBPS) / 1e6
    by_name = {name: one.get("ms") for name, one, _, _ in found}
    gemm_ms = by_name.get("gemm") or by_name.get("gemm, row-wise, fast")
    m, n, k = case.shape
    rows = []
    for name, one, config, error in found:
        ms = one.get("ms")
        floor = max(gemm_ms, wire_ms) if gemm_ms is not None else None
        rows.append({
            "what": "scaled", "op": case.operator, "m": m, "n": n, "k": k, "layout": case.layout, "ranks": case.ranks,
            "solo": case.solo, "link_gbps": case.link_gbps, "graph": not case.eager, "method": name,
            "absent": one.get("absent"), "ms": ms, "host_ms": one.get("host_ms"), "burst": one.get("burst"),
            "error": error, "gemm_ms": gemm_ms, "wire_ms": wire_ms,
            "over_floor": ms / floor if ms is not None and floor else None,
            "config": None if config is None else json.loads(json.dumps(vars(config), default=vars)),
        })
    return rows


def _summary(rows):
    parts = [f"{row['method']} {row['ms']:.4f}" if row["ms"] else f"{row['method']} ({row['absent']})" for row in rows]
    return f"wire {rows[0]['wire_ms']:.4f}; " + ", ".join(parts)


def _options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="number of ranks; default: all GPUs, at least 2")
    parser.add_argument("--solo", type=int, help="measure one rank of this number of ranks on one GPU")
    parser.add_argument("--link", type=float, help="GB/s of the modelled link in solo mode; default: infinite")
    parser.add_argument("--operators", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--shapes", nargs="+", help="M x N x K, such as 8192x4096x14336")
    parser.add_argument("--configs", action="store_true", help="time the best configs of each kind, too")
    parser.add_argument("--eager", action="store_true", help="time calls without CUDA graphs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst-ms", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, help="start no case after this time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    return parser.parse_args()


def _cases(options, ranks, device):
    given = [tuple(map(int, shape.split("x"))) for shape in options.shapes or ()]
    for operator in options.operators:
        for shape in given or (SHAPES if device == "cuda" else REHEARSAL)[operator]:
            if options.solo and operator == "gemm_ar" and not has_equal_tiles(*shape[:2]):
                continue
            for layout in options.layouts:
                yield Case(
                    operator, shape, layout, ranks, options.link, options.solo is not None, options.eager,
                    options.configs, options.rounds if device == "cuda" else 1,
                )


def main():
    options, begun = _options(), time.monotonic()
    ranks = options.solo or options.nproc or max(torch.cuda.device_count(), 2)
    device = pick_device("auto", 1 if options.solo else ranks)
    on_gpu = device == "cuda"
    keep = (lambda rows: append(rows, options.out, "scaled")) if on_gpu else None
    deadline = begun + options.seconds if options.seconds else None
    with RankPool(1 if options.solo else ranks, device, timeout_s=300.0) as pool:
        common = {**pool.run(harness.machine)[0], "git": revision()}
        if options.solo:
            pool.run(enter_solo_mode, options.solo, options.link and options.link * 1e9)

        def rows_of(case):
            return _rows(case, pool.run(measure, case, options.burst_ms if on_gpu else 0)[0])

        measure_all(pool, list(_cases(options, ranks, device)), rows_of, common, keep, _summary, deadline)
    if not on_gpu:
        print("CPU ranks interpret the kernels: these times are meaningless and are not written.")


if __name__ == "__main__":
    main()
