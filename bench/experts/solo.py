"""Solo mode: time the kernels of tp_moe as one of W ranks on one GPU, and the grouped GEMMs alone for comparison.

    python -m bench.experts.solo --solo 8 [--link 320] [--shapes mixtral-8x7b,TxIxHxExk] [--stages 1 3] [--out DIR]

"gradient" is the GEMM of the backward with dy: moe_ag_gemm with the transposed weight of the down stage. With the
warp-specialized kernel it includes the copy of the gathered dy to its rows, which the portable kernel makes itself.

The peers are mirror images of this rank, with the same ids. The routing is computed beforehand, so its launches are not
timed. Times are of calls in CUDA graphs. Rows are written to DIR/<gpu>x1/solo_moe.jsonl. The floor is the larger of two
times: the fastest grouped GEMM alone, and the received bytes over the rate of the link (without --link: 390 GB/s).
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.core import graphs, harness
from bench.core.each_case import measure_all
from bench.core.row_files import append
from bench.dense.solo import FLOOR_GBPS
from bench.experts import tp_moe
from bench.experts.moe_shapes import TP_SHAPES, TpShape, parse
from bench.experts.tp_moe_methods import grouped, loop_over_experts
from bench.run import revision
from tdkernels import MoeTpConfig
from tdkernels.launch import RankPool, pick_device, rank_device
from tdkernels.ops.experts.grouped_gemm import launch as grouped_gemm
from tdkernels.ops.experts.grouped_gemm.dispatch import swiglu_ref
from tdkernels.ops.experts.tp_moe import launch_ag_gemm, launch_gemm_rs
from tdkernels.ops.experts.tp_moe.steps import product_of_gradients, routing_of
from tdkernels.solo import enter_solo_mode
from tdkernels.symm.group import resolve_group

KERNELS = ("ag_gemm", "gemm_rs", "gradient")
_CALLS = 16  # per graph; see bench.dense.solo
_REHEARSAL = TpShape(1024, 64, 32, 3, 2, "rehearsal")  # a slot of solo mode has at least 4 KiB, also that of the ids


@dataclass(frozen=True)
class Case:
    """The kernels of a layer on one of ``ranks`` ranks.

    Attributes:
        shape: The shape of the layer.
        ranks: Number of ranks, W.
        link_gbps: Rate of the modelled link, or None for a link that is infinitely fast.
        stages: Numbers of overlap stages; 0 selects the number by the cost model.
        rounds: Number of rounds of measurements.
    """

    shape: TpShape
    ranks: int
    link_gbps: float | None
    stages: tuple[int, ...]
    rounds: int

    def __str__(self):
        return f"solo {self.ranks} tp_moe {self.shape} {self.shape.name}"

    @property
    def layer(self):
        """The case of ``bench.experts.tp_moe`` with the same operands."""
        return tp_moe.Case(self.shape, self.ranks)


# ---- on the rank ----


@harness.measurement
def measure(case, burst_ms):
    """Check and time the kernels. Return [(kernel, method, times or absence, config)]."""
    sets, config_of = _inputs(case), _configs(case)
    found = []
    for kernel in KERNELS:
        calls = {"torch": _torch_gemm(kernel), "group_gemm": _group_gemm(kernel)}
        calls |= {name: _ours(kernel, config) for name, config in config_of.items()}
        references = [(s, *_reference(kernel, s, case.ranks)) for s in sets[:2]]
        absent = harness.drop_wrong(calls, list(config_of), references)
        if rank_device().type == "cuda":
            calls, not_captured = graphs.capture_all(calls, sets, references, ("torch", "group_gemm"), _CALLS)
            absent |= not_captured
        else:
            del calls["torch"]  # torch's grouped GEMM needs a GPU
        times = harness.time_methods(calls, sets, case.rounds, burst_ms)
        found += [(kernel, name, measured, config_of.get(name)) for name, measured in times.items()]
        found += [(kernel, name, {"absent": reason}, config_of.get(name)) for name, reason in absent.items()]
    return found


def _configs(case):
    """Return {name: config} of the portable and the warp-specialized kernels."""
    layer = case.layer
    sizes = case.shape.tokens, case.shape.choices, case.shape.experts, 2 * layer.inner, case.shape.hidden
    sizes += tp_moe.DTYPE, rank_device()
    default = tp_moe.tp_moe_config.default_config(*sizes)
    kinds = {}
    for kind, flag in (("portable", False), ("specialized", True)):
        asked = replace(default, tiles=None, warp_specialize=flag)
        config = tp_moe.tp_moe_config.completed(asked, *sizes, activation="swiglu")
        if config.warp_specialize == flag:
            kinds[kind] = config
    return {
        f"{kind} {stages}": replace(config, stages=stages) for kind, config in kinds.items() for stages in case.stages
    }


def _inputs(case):
    """Return sets of operands with the rows of all tokens, and the routing for each config."""
    layer = case.layer
    count = 2 if rank_device().type == "cuda" else 1  # so that no call finds its weights in the L2 cache
    sets = [layer.inputs(seed, layer.weights(seed)) for seed in range(count)]
    for s in sets:
        s.routings = {}
        for config in _configs(case).values():
            key = config.stages, config.tiles.block_m
            if key not in s.routings:
                s.routings[key] = routing_of("tp_moe", s.ids, s.w_gate_up, resolve_group(), config)
        routing = s.routing = next(iter(s.routings.values()))
        s.all_weights = s.weights.repeat(case.ranks, 1)
        tokens = torch.div(routing.choices, case.shape.choices, rounding_mode="floor")
        s.rows, s.dy_rows = (of.repeat(case.ranks, 1)[tokens] for of in (s.x, s.dy))
        s.ends = routing.splits.cumsum(0, dtype=torch.int32)
        s.h = swiglu_ref(loop_over_experts(s.rows, s.w_gate_up, s.ends), "swiglu")
    return sets


def _ours(kernel, config):
    def gate_up(s):
        routing = s.routings[config.stages, config.tiles.block_m]
        return launch_ag_gemm.launch(s.x, s.w_gate_up, routing, config, "swiglu").y

    def down(s):
        routing = s.routings[config.stages, config.tiles.block_m]
        return launch_gemm_rs.launch(s.h, s.w_down, routing, s.all_weights, config)

    def gradient(s):
        routing = s.routings[config.stages, config.tiles.block_m]
        return product_of_gradients(s.dy, s.w_down.transpose(1, 2), routing, config)[0]

    return {"ag_gemm": gate_up, "gemm_rs": down, "gradient": gradient}[kernel]


def _operands(kernel, s):
    """Return (rows, weight) of the grouped GEMM alone."""
    return {
        "ag_gemm": (s.rows, s.w_gate_up), "gemm_rs": (s.h, s.w_down), "gradient": (s.dy_rows, s.w_down.transpose(1, 2)),
    }[kernel]


def _torch_gemm(kernel):
    """Return torch's grouped GEMM alone. It includes no SwiGLU."""
    return lambda s: grouped(*_operands(kernel, s), s.ends)


def _group_gemm(kernel):
    """Return our grouped GEMM alone, with its heuristic config."""
    activation = "swiglu" if kernel == "ag_gemm" else None
    return lambda s: grouped_gemm.product(*_operands(kernel, s), s.routing.splits, activation)[0]


def _reference(kernel, s, ranks):
    """Return (exact result in fp32, errors of the same computation in the dtype of the operands)."""
    exact = _torch_result(kernel, s, ranks, torch.float32)
    return exact, harness.errors(_torch_result(kernel, s, ranks, s.x.dtype), exact)


def _torch_result(kernel, s, ranks, dtype):
    """Return the result of a loop over experts in ``dtype``. For gemm_rs it is W times the sums of this rank."""
    rows, weight = (operand.to(dtype) for operand in _operands(kernel, s))
    out = loop_over_experts(rows, weight, s.ends)
    if kernel == "gemm_rs":
        return ranks * _own_sums(out, s)
    return swiglu_ref(out, "swiglu") if kernel == "ag_gemm" else out


def _own_sums(rows, s):
    """Return the weighted sums of this rank's tokens. Each peer sends the same."""
    own = s.routing.rows[: s.x.shape[0]]
    return (rows[own].float() * s.weights.unsqueeze(-1)).sum(1).to(rows.dtype)


# ---- in the calling process ----


def rows(case, found):
    """Return a row for each kernel and method."""
    table, shape = [], case.shape
    wire_ms = case.layer.wire_bytes("ag_gemm") / (case.link_gbps or FLOOR_GBPS) / 1e6
    for kernel in KERNELS:
        of_kernel = [each for each in found if each[0] == kernel]
        gemm_ms = min(times["ms"] for _, name, times, _ in of_kernel if name in ("torch", "group_gemm"))
        for _, name, times, config in of_kernel:
            ms = times.get("ms")
            table.append({
                "what": "solo_moe", "op": "tp_moe", "pass": kernel, "shape": str(shape), "name": shape.name,
                "dtype": str(tp_moe.DTYPE).removeprefix("torch."), "ranks": case.ranks, "link_gbps": case.link_gbps,
                "method": name, "graph": True, "absent": times.get("absent"), "ms": ms, "burst": times.get("burst"),
                "gemm_ms": gemm_ms, "wire_ms": wire_ms,
                "over_floor": ms / max(gemm_ms, wire_ms) if ms is not None else None,
                "config": _as_dict(config),
            })
    return table


def _as_dict(config: MoeTpConfig | None):
    return None if config is None else {**vars(config), "tiles": vars(config.tiles)}


def _summary(table):
    parts = [f"{row['pass']} {row['method']} {row['ms']:.4f} ({row['over_floor']:.2f})" for row in table if row["ms"]]
    return f"{', '.join(parts)} ms (× floor); wire {table[0]['wire_ms']:.4f}"


def _options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solo", type=int, default=8, help="number of ranks, W")
    parser.add_argument("--link", type=float, help="GB/s of the modelled link; default: infinite")
    parser.add_argument("--shapes", help="names or sizes, see `tdkernels bench tp_moe`")
    parser.add_argument("--stages", type=int, nargs="+", default=[0], help="overlap stages; 0: by the cost model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst-ms", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, help="start no case after this time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    return parser.parse_args()


def main():
    options, begun = _options(), time.monotonic()
    device = pick_device("auto", 1)
    on_gpu = device == "cuda"
    shapes = parse(options.shapes, ["tp_moe"])[0] if options.shapes else TP_SHAPES if on_gpu else [_REHEARSAL]
    cases = [
        Case(shape, options.solo, options.link, tuple(options.stages), options.rounds if on_gpu else 1)
        for shape in shapes
    ]
    keep = (lambda table: append(table, options.out, "solo_moe")) if on_gpu else None
    with RankPool(1, device, timeout_s=300.0) as pool:
        common = {**pool.run(harness.machine)[0], "git": revision()}
        pool.run(enter_solo_mode, options.solo, options.link and options.link * 1e9)

        def rows_of(case):
            return rows(case, pool.run(measure, case, options.burst_ms if on_gpu else 0)[0])

        deadline = begun + options.seconds if options.seconds else None
        measure_all(pool, cases, rows_of, common, keep, _summary, deadline)
    if not on_gpu:
        print("CPU ranks interpret the kernels: these times are meaningless and are not written.")


if __name__ == "__main__":
    main()
