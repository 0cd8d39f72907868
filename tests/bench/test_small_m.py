"""Benchmark of the default configs for few rows: rehearsal on a CPU, configs on a simulated H200, and its summary."""

import pytest
import torch

from bench.core import points
from bench.core.row_files import append
from bench.dense import small_m
from tdkernels.autotune.problem import Problem
from tdkernels.launch import RankPool
from tdkernels.ops.common.scaling import LAYOUTS
from tdkernels.runtime import gpu
from tdkernels.solo import enter_solo_mode
from tests.ops.dense.specialized_support import pretend_hopper


def test_cases_are_measured():
    cases = [
        small_m.Case(operator, small_m._REHEARSAL, layout, 2, None, 1)
        for operator in small_m.LAYERS for layout in ("nk", "scaled", "scaled by block")
    ]
    with RankPool(1, "cpu") as pool:
        pool.run(enter_solo_mode, 2, None, True)
        tables = [small_m.rows(case, pool.run(small_m.measure, case, 0)[0]) for case in cases]
    for case, table in zip(cases, tables, strict=True):
        methods = ["default"] if case.layout == "scaled by block" else ["gemm", "default"]  # torch has no blocks there
        assert [row["method"] for row in table] == methods, case
        assert all(row["absent"] is None and row["ms"] > 0 for row in table)
        assert small_m._summary(table).endswith(" ms")


@pytest.fixture
def h200(monkeypatch):
    pretend_hopper(monkeypatch)
    monkeypatch.setattr(gpu, "shared_memory_bytes", lambda device: 227 << 10)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("layout", ["nk", *LAYOUTS])
@pytest.mark.parametrize("operator", small_m.LAYERS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_configs_contain_the_default(operator, layout, ranks, h200, monkeypatch):
    """From 65 rows on, where tiles are compared, the default is one of the other configs."""
    monkeypatch.setattr(Problem, "on", lambda device, *fields: Problem(
        fields[0], "NVIDIA Testing", *fields[4:], str(fields[2]).removeprefix("torch."), fields[3], fields[1]
    ))
    for rows in (96, 256, 768, 2048):
        n, k = small_m.LAYERS[operator][0]
        case = small_m.Case(operator, (rows, n, k), layout, ranks, None, 1)
        found = small_m.configs(case.problem(h200), h200)
        default = found.pop("default")
        assert default in found.values() or operator == "gemm_ar" and getattr(default, "transport", "") == "forward"
        assert "specialized" in found and any(name.startswith("one_shot") for name in found) == (rows < 1024)


def _row(method, ms, m=128, operator="gemm_rs"):
    return {"op": operator, "layout": "nk", "ranks": 4, "m": m, "n": 64, "k": 64, "method": method, "ms": ms,
            "absent": None if ms else "error"}


def test_rows_are_no_points_of_other_tables(tmp_path):
    case = small_m.Case("gemm_rs", (128, 64, 64), "nk", 4, 390.0, 1)
    (row,) = small_m.rows(case, [("default", {"ms": 1.0}, None)])
    assert row["wire_ms"] > 0 and row["gemm_ms"] is None
    append([{**row, "gpu": "NVIDIA Testing", "num_gpus": 1, "date": "2026"}], tmp_path, "small_m")
    assert (tmp_path / "testingx1" / "small_m.jsonl").exists() and points.read(tmp_path) == []


def test_comparison():
    of_one = [_row("gemm", 1.0), _row("default", 3.0), _row("direct", 2.0), _row("specialized", None)]
    other = [_row("default", 2.0, 256), _row("direct", 3.0, 256)]
    without = [_row("default", None, operator="ag_gemm"), _row("specialized", 1.0, operator="ag_gemm")]
    assert small_m.comparison(of_one + other + without) == [
        "gemm_rs nk, 4 ranks: default over the fastest 1.225, at most 1.50 (2 cases)"
    ]
    assert small_m._summary(of_one) == "GEMM 1.0000, default 3.0000 (1.50), direct 2.0000 ms"
    assert small_m._summary(without) == "default: error"
