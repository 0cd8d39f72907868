"""Benchmarks of host time and of torch's fused operators: rehearsals on CPU ranks, and tables from synthetic rows."""

import pytest
import torch

from bench.dense import host
from bench.dense import scaled as scaled_program
from bench.dense import torch_operators as operators_of_torch
from bench.report import host as host_report
from bench.report import scaled, torch_operators
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.launch import RankPool
from tdkernels.ops.common.scaling import LAYOUTS
from tdkernels.runtime import gpu
from tdkernels.solo import enter_solo_mode
from tests.ops.dense.specialized_support import pretend_hopper


def test_host_time_table():
    """Only the newest rows of each machine are shown; unmeasured values are "–"."""
    place = {"what": "host", "gpu": "Testing", "num_gpus": 2, "git": "0123456789"}
    old = {"op": "ag_gemm", "method": "sequence", "host_us": 1.0, "call_us": 2.0, "date": "2026-01-01", **place}
    new = [{**old, "method": method, "host_us": us, "call_us": 2 * us, "date": "2026-01-02"}
           for method, us in (("sequence", 10.4), ("ours", 20.0))]
    lines = host_report.text([old, *new]).splitlines()
    assert "2 x Testing, 2026-01-02, revision 0123456." in lines
    assert lines[-1] == "| ag_gemm | 10 / 21 | – | 20 / 40 |"
    assert host_report.text([]) == ""


def test_old_method_torch_of_flash_decode_is_marked():
    row = {"what": "host", "gpu": "Testing", "num_gpus": 2, "git": "0123456789", "date": "2026-01-02",
           "op": "flash_decode", "method": "ours by torch", "host_us": 3.0, "call_us": 4.0}
    assert host_report.text([row]).splitlines()[-1] == "| flash_decode | – | 3 / 4 † | – |"
    row["method"] = host_report.TORCH_METHODS["flash_decode"]
    assert host_report.text([row]).splitlines()[-1] == "| flash_decode | – | 3 / 4 | – |"


def test_host_time_table_of_modules():
    """A module has a line with and without gradients, compared with the operator that it calls."""
    times = {"operator": 40.0, "module": 42.5, "operator, gradients": 60.0, "module, gradients": 64.0}
    rows = [{"what": "host", "op": "RowParallelLinear", "method": method, "host_us": us, "call_us": 2 * us,
             "peak_bytes": 2**20, "gpu": "Testing", "num_gpus": 2, "git": "0123456789", "date": "2026-01-02"}
            for method, us in times.items()]
    lines = host_report.text(rows).splitlines()
    assert lines[-2:] == [
        "| RowParallelLinear | no | 40.0 | 42.5 | 2.5 | 1.00 / 1.00 |",
        "| RowParallelLinear | yes | 60.0 | 64.0 | 4.0 | 1.00 / 1.00 |",
    ]


def test_table_of_torch_operators():
    """The newest row of each method counts; a tuned call names its kernel."""
    row = {"what": "torch_operators", "op": "gather", "m": 8, "k": 4, "n": [2, 1], "method": "torch", "ms": 2.0,
           "kernel": None, "gpu": "Testing", "num_gpus": 2, "git": "0123456789", "date": "2026-01-02T10"}
    rows = [{**row, "ms": 9.0}, row, {**row, "method": "tdkernels", "ms": 1.0},
            {**row, "method": "tuned", "ms": 1.0, "kernel": "tdkernels"}, {**row, "op": "scatter"},
            {**row, "op": "scatter", "method": "tdkernels", "ms": 4.0}]
    lines = torch_operators.text(rows).splitlines()
    assert lines[-2] == "| 8 x 4: 2, 1 | gather | 2.000 | 1.000 | 2.00 | 1.000 (tdkernels) |"
    assert lines[-1] == "| 8 x 4: 2, 1 | scatter | 2.000 | 4.000 | 0.50 ▼ | – |"
    assert torch_operators.text([]) == ""


def test_host_times_of_calls_are_measured():
    with RankPool(2, "cpu") as pool:
        table = pool.run(host.measure)[0]
    found = {(operator, method) for operator, method, *_ in table}
    assert found >= {(operator, method) for operator in ("ag_gemm", "all_reduce") for method in host_report._METHODS}
    assert found >= {("flash_decode", method) for method in ("ours by torch flash", "ours")}
    assert all(0 < launched <= done for _, _, launched, done, _ in table)
    assert found >= {("RowParallelLinear", method) for method in ("operator", "module, gradients")}


def test_torch_operators_are_measured():
    with RankPool(2, "cpu") as pool:
        table = pool.run(operators_of_torch.measure, operators_of_torch.REHEARSAL[0], 1, False)[0]
    assert [(operator, method) for operator, method, *_ in table] == [
        (operator, "tdkernels") for operator in ("gather", "gather and A", "scatter")
    ]
    assert all(0 < host_ms <= ms and kernel is None for _, _, ms, host_ms, kernel in table)


def test_table_of_scaled_operators():
    """The fastest config is compared with the longer of GEMM and wire; absent methods are "–"."""
    config = {"method": "parts", "pieces": 2}
    row = {"what": "scaled", "op": "gemm_rs", "m": 8, "n": 4, "k": 2, "layout": "scaled fast", "ranks": 2,
           "solo": False, "link_gbps": None, "graph": True, "method": "gemm", "ms": 0.5, "gemm_ms": 0.5, "wire_ms": 1.0,
           "over_floor": 0.5, "config": None, "gpu": "Testing", "git": "0123456789", "date": "2026-01-02T10",
           "torch": "2", "triton": "3", "multicast": "off"}
    rows = [row, {**row, "method": "tdkernels", "ms": 1.5, "over_floor": 1.5},
            {**row, "method": "parts 1", "ms": 1.25, "over_floor": 1.25, "config": config},
            {**row, "method": "torch fused", "ms": None, "over_floor": None}]
    lines = scaled.text([{**row, "date": "2026-01-01", "ms": 9.0}, *rows]).splitlines()
    assert "### 2 x Testing, CUDA graphs" in lines
    cells = ["gemm_rs", "8 × 4 × 2", "row, fast", "0.500", "1.000", "–", "–", "–", "1.500", "1.250", "1.25",
             "pipelined, 2 pieces"]
    assert f"| {' | '.join(cells)} |" in lines
    assert lines[-1] == "Fastest over floor, geometric mean (shapes): gemm_rs, row, fast 1.25 (1)."
    assert scaled.text([]) == ""


@pytest.mark.parametrize("operator", scaled_program.SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_default_configs_of_scaled_operators_on_hopper(operator, layout, monkeypatch):
    """The default config and that without warp specialization are measured, and both are legal."""
    pretend_hopper(monkeypatch)
    monkeypatch.setattr(gpu, "shared_memory_bytes", lambda device: 227 << 10)
    monkeypatch.setattr(scaled_program, "rank_device", lambda: torch.device("cuda", 0))
    case = scaled_program.Case(operator, scaled_program.SHAPES[operator][0], layout, 8, None, True, False, False, 1)
    problem = Problem(operator, "NVIDIA H200", 8, 8, "float8_e4m3fn", layout, case.shape)
    configs = scaled_program._defaults(case, problem)
    assert {name: config.warp_specialize for name, config in configs.items()} == {
        "default": True, "default, plain": False,
    }
    for config in configs.values():
        assert tunable(operator).illegal(config, problem, torch.device("cuda", 0)) is None


def test_scaled_operators_are_measured():
    """All methods that a CPU has are measured, and those of tdkernels have the right result."""
    operators = scaled_program.REHEARSAL
    cases = [scaled_program.Case(operator, shapes[0], "scaled by block", 2, None, False, True, True, 1)
             for operator, shapes in operators.items()]
    with RankPool(2, "cpu") as pool:
        tables = [scaled_program._rows(case, pool.run(scaled_program.measure, case, 0)[0]) for case in cases]
    for case, rows in zip(cases, tables, strict=True):
        methods = {row["method"] for row in rows}
        assert methods >= {"gemm, row-wise, fast", "torch", "bf16", "tdkernels", "one_shot 1"}, case
        assert all(row["absent"] is None and row["ms"] > 0 for row in rows)


def test_scaled_operators_are_measured_in_solo_mode():
    cases = [scaled_program.Case(operator, (256, 64, 512), "scaled", 2, None, True, True, True, 1)
             for operator in ("ag_gemm", "gemm_rs")]
    with RankPool(1, "cpu") as pool:
        pool.run(enter_solo_mode, 2)
        tables = [scaled_program._rows(case, pool.run(scaled_program.measure, case, 0)[0]) for case in cases]
    for rows, kinds in zip(tables, ({"push 1", "one_shot 1"}, {"direct 1", "forward 1"}), strict=True):
        assert {row["method"] for row in rows} >= {"gemm", "default", "tdkernels", *kinds}
        assert all(row["absent"] is None and row["ms"] > 0 for row in rows)
