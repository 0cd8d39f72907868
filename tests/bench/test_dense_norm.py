"""The benchmark of gemm_ar_rms_norm: a rehearsal on CPU ranks, and its rows."""

import json

import pytest

from bench.core import points
from bench.dense import norm, norm_report
from bench.report import main as report
from bench.report import rows as all_rows
from tdkernels.launch import RankPool


def test_methods_are_checked_and_timed(tmp_path):
    with RankPool(2, "cpu") as pool:
        tables = {shape: norm.rows(shape, *pool.run(norm.measure, shape, 1)[0]) for shape in norm.REHEARSAL}
    for shape, table in tables.items():
        expected = {"torch", "gemm_ar", "fused", "fused, 8 warps", "separate", "tdkernels", *norm.FLOORS}
        assert {row["method"] for row in table} == expected and all(row["ms"] > 0 for row in table)
        assert all((row["speedup"] is None) == (row["method"] in norm.FLOORS) for row in table)
        assert {(row["m"], row["n"], row["k"]) for row in table} == {shape}
        assert norm.line(shape, table, False).startswith(f"{'x'.join(map(str, shape))}: torch ")
        assert norm.line(shape, table, True) == ""
    folder = tmp_path / "testx2"
    folder.mkdir()
    (folder / "gemm_ar_norm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    assert points.read(tmp_path) == []  # they are not rows of a dense operator with GEMM and collective


def test_rows_of_graphs():
    times = {"ms": 0.02, "host_ms": 0.01}
    found = [("torch", False, times), ("torch", True, times), ("fused", True, {"ms": 0.01, "host_ms": 0.01})]
    table = norm.rows((4, 8192, 28672), found, {"separate": "not captured"})
    assert {row["name"] for row in table} == {"llama-70b down"} and table[2]["speedup"] == pytest.approx(2.0)
    assert table[3]["absent"] == "not captured" and table[3]["ms"] is None
    text = norm.line((4, 8192, 28672), table, True)
    assert text == "4x8192x28672, in CUDA graphs: torch 20.0, fused 10.0, separate – us"


def test_rows_have_a_table_on_the_page_of_dense_operators():
    def run(m, date="2026-01-01", graph=True, **ms):
        found = [(name.replace("_", " "), graph, {"ms": time, "host_ms": time}) for name, time in ms.items()]
        machine = {"gpu": "NVIDIA Testing", "num_gpus": 2, "torch": "2.99", "nccl": "2.0", "git": "0123456789abcdef"}
        return [{**row, **machine, "date": date} for row in norm.rows((m, 8192, 8192), found, {})]

    rows = run(1, "2025-12-31", torch=1.0, fused=0.001)
    rows += run(1, torch=0.03, torch_compiled=0.02, fused=0.025, gemm_alone=0.01) + run(4, torch=0.03, fused=0.02)
    text = norm_report.text(rows + run(1, graph=False, torch=0.2, torch_compiled=0.3, fused=0.1))
    eager, in_graphs = text.split("### gemm_ar_rms_norm, in CUDA graphs, 2 x NVIDIA Testing")
    first = "| 1x8192x8192 | llama-70b o |"
    assert f"{first} 30.0 | 20.0 | – | – | 25.0 | – | – | 10.0 | – | 0.80 ▼ |" in in_graphs, "the newest run"
    assert "| 4x8192x8192 | llama-70b o | 30.0 | – | – | – | 20.0 | – | – | – | – | 1.50 |" in in_graphs
    assert f"{first} 200.0 | 300.0 | – | – | 100.0 | – | – | – | – | 2.00 |" in eager, "the faster of torch"
    assert "2026-01-01, revision 0123456; torch 2.99, NCCL 2.0." in in_graphs
    assert norm_report.text(rows).partition("\n")[2].strip() in report.pages(
        all_rows.Rows(gemm_ar_norms=rows)
    )["tables/dense.md"]


def test_wrong_results_are_not_timed():
    """A method that omits the residual is an error, not a time."""
    with RankPool(2, "cpu") as pool, pytest.raises(Exception, match="fused: wrong"):
        pool.run(measure_without_residual)


def measure_without_residual():
    with pytest.MonkeyPatch.context() as patch:
        made = norm.methods
        patch.setattr(
            norm, "methods",
            lambda shape: made(shape) | {"fused": lambda s: made(shape)["fused"](_without_residual(s))},
        )
        norm.measure((2, 32, 32), 1)


def _without_residual(s):
    return norm.SimpleNamespace(**vars(s) | {"residual": None})
