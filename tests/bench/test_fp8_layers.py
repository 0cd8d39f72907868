"""Benchmark of layers of experts with weights in fp8: a rehearsal on CPU ranks, its rows, command and tables."""

import json

import pytest

import tdkernels
from bench.core import points, rank_program
from bench.experts import ep_moe, fp8_layers, fp8_report, tp_moe
from bench.experts.moe_shapes import EpShape, TpShape
from bench.report import main as report
from bench.report import rows as all_rows
from tests.bench.fake_pool import FakePool
from tests.support.ranks import on_ranks

MACHINE = {
    "gpu": "NVIDIA Testing", "num_gpus": 2, "torch": "2.99", "triton": "3.99", "nccl": "2.99", "git": "0123456789",
    "multicast": "off",
}
TP, EP = tp_moe.Case(TpShape(16, 32, 48, 4, 2), 2), ep_moe.Case(EpShape(48, 16, 4, 2), 8, 2)
KINDS = ("block", "row", "row, fast")
SUFFIX = {"tp_moe": ", portable", "ep_moe": ", sent"}
METHODS = {name: [kind + suffix for kind in KINDS for suffix in ("", more)] for name, more in SUFFIX.items()}


def measure(case):
    return fp8_layers.rows(case, fp8_layers.measure(case, 1))


@pytest.mark.parametrize("case", [TP, EP], ids=lambda case: case.operator)
def test_layers_are_measured(case):
    table = on_ranks(2, measure, case)[0]
    by_method = {row["method"]: row for row in table}
    fp8 = METHODS[case.operator]
    assert {*by_method} == {"sequence", "bf16", *fp8}
    assert all(0.03 < by_method[name]["error"] < 0.09 and by_method[name]["speedup"] > 0 for name in fp8)
    assert by_method["bf16"]["error"] < 0.01 and by_method["bf16"]["speedup"] == 1
    assert json.loads(json.dumps(table)) == table


def measure_wrong(case):
    original = tdkernels.tp_moe

    def wrong(*arguments, **options):
        y = original(*arguments, **options)
        return y * 1.1 if "scale_down" in options else y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tdkernels, "tp_moe", wrong)
        with pytest.raises(RuntimeError) as error:
            fp8_layers.measure(case, 1)
    return str(error.value)


def test_wrong_results_are_not_timed():
    error = on_ranks(2, measure_wrong, TP)[0]
    assert error.startswith("block: wrong: relative error 0.1"), error


def measured(case, rounds):
    times = {"sequence": 3.0, "bf16": 2.0, **{name: 1.0 + len(name) / 100 for name in METHODS[case.operator]}}
    return [(name, graph, {"ms": ms, "host_ms": ms}) for graph in (False, True) for name, ms in times.items()]


def test_command_and_tables(monkeypatch, tmp_path):
    pool = FakePool(measured, MACHINE)
    monkeypatch.setattr(rank_program, "RankPool", pool)
    monkeypatch.setattr(fp8_layers, "pick_device", lambda *_: "cuda")
    out = ["--out", str(tmp_path), "--nproc", "2"]
    sizes = ["--ops", "tp_moe", "--shapes", "2048x1408x2048x64x6"]
    assert fp8_layers.main([*sizes, "--rounds", "3", *out]) == 0
    assert [(str(case.shape), rounds) for case, rounds in pool.calls] == [("2048x1408x2048x64x6", 3)]
    assert fp8_layers.main(["--ops", "ep_moe", "--shapes", "deepseek-v3", "--tokens", "64", "128", *out]) == 0
    assert [case.tokens for case, _ in pool.calls] == [64, 128]
    rows = points.read_fp8_layers(tmp_path)
    text = fp8_report.text(rows)
    assert "### tp_moe, fp8 weights, in CUDA graphs, 2 x NVIDIA Testing" in text
    assert "| 2048 | 1408x2048x64x6 | 3.000 | 2.000 | 1.050 | 1.150 | 1.030 | 1.130 | 1.090 | 1.190 | 1.94 |" in text
    assert "| 64 | 2048x7168x256x8 | 3.000 | 2.000 | 1.050 | 1.110 | 1.030 | 1.090 | 1.090 | 1.150 | 1.94 |" in text
    assert text.partition("\n")[2].strip() in report.pages(all_rows.Rows(fp8_layers=rows))["tables/experts.md"]
    assert fp8_report.text([]) == ""
