"""Benchmark of quantize_fp8 and of linear layers in fp8: a rehearsal on a CPU rank, its rows, command and tables."""

import json

import pytest
import torch

import tdkernels
from bench.core import points, rank_program
from bench.dense import quantize, quantize_methods, quantize_report
from bench.dense.quantize_methods import Linear, Quantize
from bench.report import main as report
from bench.report import rows as all_rows
from tests.bench.fake_pool import FakePool
from tests.support.ranks import on_ranks

PLAN = quantize.Plan(rounds=1, compiled=False)
MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 1, "torch": "2.99", "triton": "3.99", "git": "0123456789"}


def measure_all(cases):
    return [quantize.rows(case, quantize.measure(case, PLAN)) for case in cases]


def test_all_kinds_of_scales_are_measured():
    tables = on_ranks(1, measure_all, quantize.cases(["quantize_fp8"], "cpu"))[0]
    assert len(tables) == 10 and len({table[0]["shape"] for table in tables}) == 10
    for table in tables:
        by_method = {row["method"]: row for row in table}
        assert {*by_method} == {"tdkernels", "torch", "copy", "torch.compile"}
        assert by_method["torch.compile"]["absent"] and by_method["tdkernels"]["share"] > 0
        assert 0.02 < by_method["tdkernels"]["error"] < 0.03 and by_method["copy"]["error"] is None
        assert json.loads(json.dumps(table)) == table


@pytest.mark.parametrize("backward", [False, True])
def test_linear_layers_are_measured(backward):
    (table,) = on_ranks(1, measure_all, [Linear(16, 32, 48, backward)])[0]
    assert all(row["ms"] and row["error"] is not None for row in table)
    more = {"rowwise, dweight", "tensorwise, dweight"} if backward else {"gemm rowwise", "gemm tensorwise"}
    assert {row["method"] for row in table} == {"torch", "bf16", "rowwise", "tensorwise", *more}
    flops = 2 * 16 * 32 * 48 * (3 if backward else 1)
    assert all(row["tflops"] == pytest.approx(flops / row["ms"] / 1e9) for row in table)


def measure_wrong(case):
    original = tdkernels.quantize_fp8

    def wrong(*arguments, **options):
        codes, scale = original(*arguments, **options)
        return codes, 1.05 * scale

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tdkernels, "quantize_fp8", wrong)
        with pytest.raises(RuntimeError) as error:
            quantize.measure(case, PLAN)
    return str(error.value)


def test_wrong_results_are_not_timed():
    error = on_ranks(1, measure_wrong, Quantize(32, 64, "row", False, False, False))[0]
    assert error.startswith("tdkernels: wrong: relative error 0.05"), error


def test_bytes_of_one_pass():
    scales = {("row", False): 256, ("tensor", False): 1, ("block", False): 256 * 3, ("block", True): 2 * 3}
    for (scaling, weight), number in scales.items():
        case = Quantize(256, 384, scaling, weight, False, False)
        assert case.bytes == 3 * 256 * 384 + 4 * number
    assert Quantize(256, 384, "row", False, False, True).bytes == 3 * 256 * 384 + 4 * 384


def test_plain_torch_is_one_graph(monkeypatch):
    """torch.compile of the reference, which is measured on GPUs, has no graph break."""
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compile_eagerly(fn, backend="eager", **options))
    monkeypatch.setattr(quantize_methods, "rank_device", lambda: torch.device("cpu"))
    for case in quantize.cases(["quantize_fp8"], "cpu"):
        methods, absent = quantize_methods.of(case, compiled=True)
        method = methods["torch.compile"]
        assert method.errors(case.inputs(0))[0] < method.limits[0] and not absent


compile_eagerly = torch.compile


def measured(case, plan):
    if isinstance(case, Linear):
        times = {"torch": 6.0, "bf16": 6.0, "rowwise": 4.0, "tensorwise": 3.0, "gemm rowwise": 2.0}
    else:
        times = {"tdkernels": 0.25, "torch": 4.0, "torch.compile": 0.5, "copy": 0.2}
    return [(name, graph, {"ms": ms, "host_ms": ms}) for graph in (False, True) for name, ms in times.items()]


def test_command_and_tables(monkeypatch, tmp_path, capsys):
    pool = FakePool(measured, MACHINE)
    monkeypatch.setattr(rank_program, "RankPool", pool)
    monkeypatch.setattr(quantize, "pick_device", lambda *_: "cuda")
    out = ["--out", str(tmp_path)]
    assert quantize.main(["--shapes", "64x128", "--no-compile", "--rounds", "3", *out]) == 0
    assert len(pool.calls) == 12 and {plan for _, plan in pool.calls} == {quantize.Plan(3, False)}
    assert "64x128 block, weight, transposed: tdkernels 0.2500, torch 4.0000" in capsys.readouterr().out
    assert quantize.main(["--seconds", "0", *out]) == 0 and pool.calls == []
    rows = points.read_quantize(tmp_path)
    assert len(rows) == 2 * (10 * 4 + 2 * 5) and points.read(tmp_path) == []
    text = quantize_report.text(rows)
    assert "### quantize_fp8, in CUDA graphs, NVIDIA Testing" in text and "### linear, NVIDIA Testing" in text
    assert "| 64x128 | block, weight | transpose | 4.000 | 0.500 | 0.200 | 0.250 | 2.00 | 0 | 0.80 |" in text
    assert "| 8192x28672x8192 | forward | 6.000 | 6.000 | 2.000 | 4.000 | 3.000 | 2.00 |" in text
    assert text.partition("\n")[2].strip() in report.pages(all_rows.Rows(quantize=rows))["tables/scaled.md"]
    assert quantize_report.text([]) == ""


def test_default_cases_and_invalid_sizes(capsys):
    cases = quantize.cases(quantize.OPERATORS, "cuda")
    assert [type(case) for case in cases[:2]] == [Linear] * 2 and len(cases) == 2 + 3 * 10
    with pytest.raises(SystemExit):
        quantize.main(["--shapes", "64x0"])
    assert "'64x0' is not ROWSxK" in capsys.readouterr().err
