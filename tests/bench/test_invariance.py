"""The benchmark of the batch-invariant mode: a rehearsal on CPU ranks, its rows, command and page."""

import json

import pytest
import torch

import tdkernels
from bench.core import points, rank_program
from bench.reliability import invariance, invariance_cases, invariance_report
from bench.reliability.invariance_cases import BASELINE, DEFAULT, INVARIANT, OPERATORS, Case
from bench.report import main as report
from bench.report import rows as all_rows
from bench.report import test_record
from tests.bench.fake_pool import FakePool
from tests.support.ranks import on_ranks


def times(ms, **more):
    return {"ms": ms, "host_ms": ms, **more}


def small(operator, ranks):
    return next(case for case in invariance_cases.rehearsal(ranks) if case.operator == operator)


def test_cases():
    several, one = invariance_cases.cases(2), invariance_cases.cases(1)
    assert {case.operator for case in several} | {"column_linear"} == {*OPERATORS} and len(several) == 15
    assert {case.operator for case in one} == {"column_linear", "group_gemm", "flash_decode"}
    assert len({str(case) for case in several}) == len(several) and len({str(case) for case in one}) == len(one)
    assert {case.shape for case in several if case.operator == "gemm_rs"} == {"16x8192x28672", "4096x8192x28672"}
    for ranks, found in ((1, one), (2, several)):
        assert {case.operator for case in invariance_cases.rehearsal(ranks)} == {case.operator for case in found}
    for ranks in (2, 3, 4, 8):
        found = invariance_cases.rehearsal(ranks) + (invariance_cases.cases(ranks) if ranks != 3 else [])
        problems = [case.problem for case in found if hasattr(case.problem, "why_not")]
        assert [problem.why_not() for problem in problems] == [None] * len(problems)


def modes_of_calls(case):
    """Return {method: whether the mode is on during the call}, called with the mode off and on."""
    seen, found = [], []

    def call(self, s):
        seen.append(tdkernels.symm.shared_settings.is_batch_invariant())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "call", call)
        for outside in (False, True):
            with tdkernels.batch_invariant(outside):
                calls = case.methods()
                for name in (DEFAULT, INVARIANT):
                    calls[name](None)
                found.append(seen[:])
                seen.clear()
    return found


def test_methods_set_the_mode():
    assert modes_of_calls(small("all_reduce", 2)) == [[False, True]] * 2
    assert BASELINE in small("gemm_rs", 2).methods() and BASELINE not in small("all_reduce", 2).methods()


@pytest.mark.parametrize("operator", ["gemm_rs", "all_reduce_rms_norm", "column_linear"])
def test_methods_are_checked_and_timed(operator, tmp_path):
    ranks = 1 if operator == "column_linear" else 2
    case = small(operator, ranks)
    table = invariance.rows(case, on_ranks(ranks, invariance.measure, case, 1)[0])
    by_name = {row["method"]: row for row in table}
    baseline = {"torch"} if operator == "gemm_rs" else set()
    assert {*by_name} == {"default", "invariant", "invariant to ranks"} | baseline
    assert all(row["us"] > 0 for row in table)
    assert {name: row["max_ranks"] for name, row in by_name.items() if row["max_ranks"]} == {"invariant to ranks": 2}
    assert by_name["default"]["ratio"] == 1.0
    assert by_name["invariant"]["ratio"] == by_name["invariant"]["us"] / by_name["default"]["us"]
    if operator == "gemm_rs":
        assert by_name["invariant"]["config"]["transport"] == "direct" and by_name["torch"]["config"] is None
    else:
        assert (by_name["invariant"]["config"] is None) == (operator == "column_linear")
    assert invariance.line(table).startswith("default ") and "; ratio " in invariance.line(table)
    folder = tmp_path / "testx2"
    folder.mkdir()
    (folder / "invariance.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    assert points.read(tmp_path) == [] and points.read_invariance(tmp_path) == table


def measure_wrong():
    """Measure with a call that is wrong in the mode: every element is 3 % too large."""
    right = Case.call

    def call(self, s):
        y = right(self, s)
        return y * 1.03 if tdkernels.symm.shared_settings.is_batch_invariant() else y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "call", call)
        invariance.measure(small("column_linear", 1), 1)


def test_wrong_results_are_not_timed():
    with pytest.raises(Exception, match="invariant: wrong"):
        on_ranks(2, measure_wrong)


def test_rows_and_line():
    found = [("default", True, times(0.02, config={"split_k": 4})), ("invariant", True, times(0.03)),
             ("default", False, times(0.1)), ("invariant", False, times(0.1)), ("torch", True, {"absent": "no memory"})]
    table = invariance.rows(small("gemm_ar", 2), found)
    assert [row["ratio"] for row in table] == [1.0, pytest.approx(1.5), 1.0, 1.0, None]
    assert table[0]["config"] == {"split_k": 4} and table[4]["ms"] is None and table[1]["us"] == 30.0
    expected = "default 20.0, invariant 30.0, torch – (no memory) us, in CUDA graphs; ratio 1.50"
    assert invariance.line(table) == expected
    assert invariance.line(table[2:4]) == "default 100.0, invariant 100.0 us; ratio 1.00"


def measured(case, *_):
    return [("default", True, times(0.02)), ("invariant", True, times(0.04))]


@pytest.fixture
def pool(monkeypatch):
    fake = FakePool(measured)
    monkeypatch.setattr(rank_program, "RankPool", fake)
    return fake


@pytest.fixture
def command(monkeypatch, pool, tmp_path):
    def run(gpus, *arguments):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(invariance, "pick_device", lambda asked, ranks: "cuda" if gpus else "cpu")
        return invariance.main([*arguments, "--out", str(tmp_path)])

    return run


def test_command(command, pool, tmp_path, capsys):
    assert command(2, "--ops", "all_reduce", "gemm_ar") == 0 and pool.ranks == 2
    assert [str(case) for case in pool.cases] == [
        "gemm_ar 16x8192x8192 llama-70b o", "gemm_ar 4096x8192x8192 llama-70b o",
        "all_reduce 16x8192", "all_reduce 1024x8192",
    ]
    text = "gemm_ar 16x8192x8192 llama-70b o: default 20.0, invariant 40.0 us, in CUDA graphs; ratio 2.00"
    assert capsys.readouterr().out.splitlines()[0] == text
    written = points.read_invariance(tmp_path)
    assert len(written) == 8 and {"git", "date", "rounds", "gpu"} <= {*written[0]}
    assert (tmp_path / "testingx2" / "invariance.jsonl").exists()
    assert command(1) == 0 and pool.cases == invariance_cases.cases(1)
    assert command(2, "--seconds", "0") == 0 and pool.cases == [], "the time is over"
    before = points.read_invariance(tmp_path)
    assert command(0) == 0 and pool.cases == invariance_cases.rehearsal(2)
    assert points.read_invariance(tmp_path) == before, "a rehearsal writes nothing"
    with pytest.raises(SystemExit):
        command(1, "--ops", "all_reduce")
    assert "--ops: all_reduce cannot be measured on 1 rank\n" in capsys.readouterr().err


def test_rows_have_a_page():
    def run(number, ranks=2, graph=True, date="2026-01-01", **ms):
        case = invariance_cases.cases(ranks)[number]
        machine = {"gpu": "NVIDIA Testing", "num_gpus": ranks, "torch": "2.99", "triton": "3.99", "git": "0123456789"}
        found = [(name, graph, times(time)) for name, time in ms.items()]
        return [{**row, **machine, "date": date} for row in invariance.rows(case, found)]

    rows = run(6, default=0.01, invariant=0.008) + run(0, date="2025-12-31", default=9.0, invariant=1.0)
    rows += run(0, default=0.02, invariant=0.05, torch=0.03) + run(0, graph=False, default=0.1, invariant=0.2)
    rows += run(0, ranks=1, default=0.1, invariant=0.3)
    rows += run(2, graph=False, default=0.1, invariant=0.2, **{"invariant to ranks": 0.25})
    text = invariance_report.text(rows)
    one, in_graphs = text.split("### In CUDA graphs, 2 x NVIDIA Testing")
    in_graphs, eager = in_graphs.split("### Eager, 2 x NVIDIA Testing")
    assert "### In CUDA graphs, 1 x NVIDIA Testing" in one and "unfused |" not in one + eager
    assert "| `column_linear` | 16x8192x8192 | llama-70b o | 100.0 | 300.0 | 3.00 |" in one
    assert "| operator | shape |  | default | invariant | ratio | unfused |" in in_graphs
    dense = "| `ag_gemm` | 16x57344x8192 | llama-70b gate-up | 20.0 | 50.0 | 2.50 | 30.0 |"
    reduced = "| `all_reduce` | 16x8192 |  | 10.0 | 8.0 | 0.80 | – |"
    assert f"{dense}\n{reduced}" in in_graphs, "the newest run; dense operators come first"
    assert "| operator | shape |  | default | invariant | ratio | max_ranks=8 |" in eager
    assert "max_ranks=8 |" not in in_graphs, "rows without the method"
    assert "| `ag_gemm` | 16x57344x8192 | llama-70b gate-up | 100.0 | 200.0 | 2.00 | – |" in eager
    assert "| `gemm_rs` | 16x8192x28672 | llama-70b down | 100.0 | 200.0 | 2.00 | 250.0 |" in eager
    assert "2026-01-01, revision 0123456; torch 2.99, triton 3.99." in in_graphs
    pages = report.pages(all_rows.Rows(invariance=rows))
    assert text.partition("\n")[2].strip() in pages["tables/invariance.md"]
    assert "- [Batch-invariant mode](tables/invariance.md)" in pages["README.md"]
    assert "| batch-invariant mode | B | B |" in test_record._matrix(all_rows.Rows(invariance=rows))
    assert invariance_report.text([]) == ""
