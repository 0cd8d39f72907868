"""Benchmark of group_gemm with scaled fp8 operands: shapes, methods, checks, rows and table."""

import json
import math

import pytest
import torch

from bench import run as bench_run
from bench.core import measure, points
from bench.experts import grouped_gemm, grouped_gemm_report
from bench.experts import scaled_grouped_gemm as program
from bench.report import main as report
from bench.report import rows as all_rows
from tdkernels.__main__ import main
from tests.bench.fake_pool import FakePool
from tests.support.ranks import on_ranks

CASE = program.Case(grouped_gemm.Shape(7, 32, 32, 3, "swiglu", fp8=True), "skewed")
PLAN = measure.Plan(rounds=1, burst_ms=0, overrides=({"tiles": {"block_n": 16}}, {"nope": 1}))
CHANGED, UNKNOWN = 'c1 {"tiles": {"block_n": 16}}', 'c2 {"nope": 1}'


def test_shapes_with_scales_are_selected_by_group_and_by_prefix():
    assert grouped_gemm.parse_shapes("fp8") == grouped_gemm.FP8_SHAPES
    assert len(set(grouped_gemm.FP8_SHAPES)) == 7 and all(shape.fp8 for shape in grouped_gemm.FP8_SHAPES)
    assert all(shape.k % 512 == 0 for shape in grouped_gemm.FP8_SHAPES), "torch._scaled_mm by blocks needs it"
    shapes = grouped_gemm.parse_shapes("fp8:tp-moe,tp-moe,fp8:64x32x16x4,fp8:tp-moe")
    assert [(str(shape), shape.fp8) for shape in shapes] == [
        ("32768x1024x8192x32", True), ("32768x1024x8192x32", False), ("64x32x16x4", True),
    ]
    assert [case.shape for case in program.cases(["group_gemm"], shapes, "balanced")] == [shapes[0], shapes[2]]
    assert {case.shape for case in grouped_gemm.cases(["group_gemm"], shapes, "balanced", True)} == {shapes[1]}
    assert program.cases([], shapes, "balanced") == []
    assert [shape.fp8 for shape in grouped_gemm.rehearsal(shapes)] == [False, True]
    assert [shape.fp8 for shape in grouped_gemm.rehearsal(shapes[:1])] == [True]
    for word in ("fp8:nope", "fp16:tp-moe", "deepseek-decode"):
        with pytest.raises(ValueError, match=f"'{word}' is neither RxNxKxE nor one of tp-moe"):
            grouped_gemm.parse_shapes(word)


def test_all_methods_are_checked_and_timed():
    found = on_ranks(1, program.measure, CASE, PLAN)[0]
    by_method = {row["method"]: row for row in program.rows(CASE, found, None)}
    ours = [f"tdkernels {layout}" for layout in program.LAYOUTS]
    measured = {"bf16", "dense row", "dense row fast", *ours, *(f"{name} {CHANGED}" for name in ours)}
    absent = {"torch row", "torch row fast", "torch block", "dense block", *(f"{name} {UNKNOWN}" for name in ours)}
    assert {name for name, row in by_method.items() if row["ms"]} == measured
    assert {name for name, row in by_method.items() if row["absent"]} == absent
    assert "no block-wise scales" in by_method["torch block"]["absent"]
    assert all(0 < by_method[name]["error"] < 4e-3 for name in measured)
    row, changed = by_method["tdkernels row fast"], by_method[f"tdkernels row fast {CHANGED}"]
    assert (row["layout"], changed["layout"], by_method["bf16"]["layout"]) == ("row fast", "row fast", None)
    assert math.isclose(row["over_bf16"], by_method["bf16"]["ms"] / row["ms"])
    assert math.isclose(row["efficiency"], by_method["dense row fast"]["ms"] / row["ms"])
    assert math.isclose(row["tflops"] * row["ms"], 2 * 7 * 32 * 32 / 1e9)
    assert changed["config"]["tiles"]["block_n"] == 16 != row["config"]["tiles"]["block_n"]
    assert json.loads(json.dumps([*by_method.values()])) == [*by_method.values()]


def fake_torch_grouped(x, w, scale_x, scale_w, offs, out_dtype, use_fast_accum):
    """Multiply as torch._scaled_grouped_mm does on a GPU. Check the shapes that it needs; be wrong if not fast."""
    assert scale_x.shape == x.shape[:1] and scale_w.shape == (w.shape[0], w.shape[2]) and w.stride(1) == 1
    experts = torch.bucketize(torch.arange(x.shape[0]), offs, right=True)
    y = torch.stack([row.float() @ w[expert].float() for row, expert in zip(x, experts, strict=True)])
    y = y * scale_x[:, None] * scale_w[experts]
    return (y if use_fast_accum else 1.1 * y).to(out_dtype)


def measure_with_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_grouped_mm", fake_torch_grouped)
        return program.measure(CASE, measure.Plan(1, 0))


def test_torch_grouped_gemm_gets_its_operands_and_is_checked():
    rows = {row["method"]: row for row in program.rows(CASE, on_ranks(1, measure_with_torch)[0], None)}
    assert rows["torch row fast"]["ms"] and rows["torch row"]["absent"].startswith("wrong: relative error 0.")
    ours = rows["tdkernels row fast"]
    assert math.isclose(ours["speedup"], rows["torch row fast"]["ms"] / ours["ms"])
    assert rows["tdkernels row"]["speedup"] is None


def measure_wrong_method():
    original = program._ours
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_ours", lambda *given: lambda s: 1.1 * original(*given)(s))
        with pytest.raises(RuntimeError) as error:
            program.measure(CASE, measure.Plan(1, 0))
    return str(error.value)


def test_wrong_results_are_not_timed():
    assert on_ranks(1, measure_wrong_method)[0].startswith("tdkernels row: wrong: relative error 0.1")


FOUND = [(f"{kind} {layout}".strip(), graph, {"ms": ms / (1 + graph)})
         for graph in (False, True) for kind, layout, ms in (
             ("bf16", "", 4.0), ("torch", "row", 3.0), ("dense", "row", 1.0), ("tdkernels", "row", 2.0),
             ("dense", "block", 1.5), ("tdkernels", "block", 5.0))]
FOUND += [("torch block", False, {"absent": "no scales"}), ('tdkernels row c1 {"tiles": {}}', False, {"ms": 0.1})]


@pytest.mark.parametrize("gpus", [0, 1])
def test_command_and_table(gpus, monkeypatch, tmp_path):
    machine = {"gpu": "NVIDIA Testing", "num_gpus": 1, "torch": "2.99", "triton": "3.99"}
    pool = FakePool(lambda *_: FOUND, machine)
    monkeypatch.setattr(bench_run, "RankPool", pool)
    monkeypatch.setattr(bench_run.torch.cuda, "device_count", lambda: gpus)
    assert main(["bench", "group_gemm", "--shapes", "fp8:mixtral-tp8", "--out", str(tmp_path)]) == 0
    assert pool.ranks == 1
    rows = points.read_scaled_experts(tmp_path)
    assert len(rows) == len(FOUND) * gpus and points.read(tmp_path) == points.read_layers(tmp_path) == []
    text = grouped_gemm_report.scaled_text(rows)
    if not gpus:
        assert text == ""
        return
    eager, graphs = text.split("### group_gemm, fp8, in CUDA graphs, 1 x NVIDIA Testing")
    assert "| bf16 | torch grouped | dense | ours | TFLOP/s | x torch | x bf16 | x dense | config |" in eager
    start = "| 4096x3584x4096x8 | mixtral-tp8 | swiglu |"
    assert f"{start} row | 4.000 | 3.000 | 1.000 | 2.000 | 60 | 1.50 | 2.00 | 0.50 | – |" in eager
    assert f"{start} block | 4.000 | – | 1.500 | 5.000 | 24 | – | 0.80 ▼ | 0.30 | – |" in eager
    assert "row fast |" not in eager and f"{start} row | 2.000 | 1.500 | 0.500 | 1.000 |" in graphs
    assert text.partition("\n")[2].strip() in report.pages(all_rows.Rows(scaled_experts=rows))["tables/experts.md"]
