"""Benchmarks of expert parallelism: cases, methods, checks, rows, command, tables and plots."""

import importlib.util
import json
import math

import pytest
import torch
import torch.distributed as dist

import tdkernels
from bench import run as bench_run
from bench.core import harness, measure, points
from bench.experts import dispatch, dispatch_methods, dispatch_peers, dispatch_plots, dispatch_report
from bench.report import main as report
from tdkernels.__main__ import main
from tests.support.ranks import device, on_ranks

LAYER = (128, 4, 2)


def case_of(operator, tokens=3, ranks=2, payload="bf16", routing="balanced", layer=LAYER):
    return dispatch.Case(operator, tokens, ranks, *layer, payload, routing)


# ---- cases ----


def test_cases_of_a_run():
    found = list(dispatch.cases(dispatch.OPERATORS, None, 4, dispatch.LAYER, dispatch.PAYLOADS, "balanced"))
    assert {case.tokens for case in found} == {1, 8, 32, 128, 512, 2048, 4096, 8192} and found[0].tokens == 8192
    assert [str(case) for case in found if case.tokens == 128] == [
        "ep_dispatch bf16 128 tokens", "ep_dispatch fp8 128 tokens", "ep_dispatch fp8-given 128 tokens",
        "ep_combine 128 tokens", "ep_latency fp8 128 tokens", "all_to_all 128 tokens",
    ]
    assert {case.tokens for case in found if case.operator == "ep_latency"} == {1, 8, 32, 128}
    skewed = dispatch.cases(["ep_dispatch", "ep_latency"], [512], 4, dispatch.LAYER, ["bf16"], "skewed")
    assert [str(case) for case in skewed] == ["ep_dispatch bf16 512 tokens skewed", "ep_latency bf16 512 tokens skewed"]


def test_why_not_names_the_reason():
    assert case_of("ep_dispatch").why_not() is None
    assert "E = 4 is not divisible by 3" in case_of("ep_dispatch", ranks=3).why_not()
    assert "k = 3 is more than E = 2" in case_of("ep_dispatch", layer=(128, 2, 3)).why_not()
    assert "H = 64 is not divisible by 128" in case_of("ep_dispatch", layer=(64, 8, 3)).why_not()


def test_bytes_of_a_row():
    rows = {case: case_of(*case, layer=dispatch.LAYER).row_bytes for case in [("ep_combine",), ("ep_dispatch",)]}
    assert set(rows.values()) == {14336}
    assert case_of("ep_dispatch", payload="fp8", layer=dispatch.LAYER).row_bytes == 7168 + 4 * 56
    assert case_of("ep_latency", payload="fp8", layer=dispatch.LAYER).row_bytes == 7168 + 4 * 56 + 14336


def test_traffic_per_rank_and_per_assignment():
    dest = torch.tensor([[[0, 1, 1], [1, 1, 1]], [[0, 0, 0], [0, 1, 0]]])  # [ranks, tokens, choices]
    # From 0 to 1: 2 tokens, 5 assignments; from 1 to 0: 2 tokens, 5 assignments.
    assert dispatch.traffic(dest, 0) == (6, 6, 2, 5)
    alone = torch.tensor([[[0, 0]], [[0, 1]], [[0, 2]]])
    assert dispatch.traffic(alone, 1) == (1, 4, 2, 2), "the receiving rank is the busiest"
    assert dispatch.traffic(1 - dest[:, :1].clamp(max=1), 1)[1] >= 3


def test_capacity_is_the_worst_case_for_few_tokens():
    few, many = (case_of("ep_dispatch", tokens, 4, layer=dispatch.LAYER) for tokens in (128, 4096))
    assert dispatch.capacity(few, 5) == 4 * 128 * 8 and dispatch.capacity(many, 5) == 2 * 4096 * 8
    assert dispatch.capacity(many, 70000) == 70000, "the capacity also holds a skewed routing"
    assert dispatch.capacity(case_of("all_to_all", 4, 2, layer=(128, 2, 1)), 5) == 8


# ---- measuring ----

PLAN = measure.Plan(rounds=1, burst_ms=0, peers=dispatch.PEERS, overrides=({"combine": "per_expert"}, {"nope": 1}))


def measure_case(*arguments):
    return dispatch.measure(case_of(*arguments), PLAN)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ep_dispatch", 2, 2, "fp8", "skewed"),
        ("ep_combine", 2, 2),
        ("ep_latency", 2, 2, "fp8-given"),
        ("all_to_all", 3, 2, "bf16", "balanced", (128, 2, 1)),
    ],
)
def test_all_methods_are_checked_and_timed(arguments):
    found = on_ranks(2, measure_case, *arguments)[0]
    times = {name: entry for name, graph, entry in found if not graph}
    operator = arguments[0]
    expected = {"sequence", "tdkernels", 'tdkernels c1 {"combine": "per_expert"}'}
    expected |= {"sequence-known-splits"} if operator != "ep_combine" else set()
    expected |= {"tdkernels-max-tokens"} if operator in ("ep_dispatch", "all_to_all") else set()
    expected |= {"tdkernels-again"} if operator == "ep_dispatch" else set()
    expected |= {"tdkernels-direct"} if operator != "ep_combine" else set()
    assert {name for name, entry in times.items() if entry.get("ms")} == expected
    absent = {"ep_dispatch": set(dispatch.PEERS), "ep_combine": {"deepep"}}.get(operator, set())
    assert {name for name, entry in times.items() if entry.get("absent")} == {*absent, 'tdkernels c2 {"nope": 1}'}
    rows = dispatch.rows(case_of(*arguments), found, 400.0)
    by_method = {row["method"]: row for row in rows}
    row, sequence = by_method["tdkernels"], by_method["sequence"]
    assert math.isclose(row["speedup"], sequence["ms"] / row["ms"])
    assert math.isclose(row["floor_ms"], row["wire_bytes"] / 400e6) and row["config"]["combine"] == "per_rank"
    assert 0 < row["wire_bytes"] <= row["wire_bytes_per_expert"] and row["max_tokens"] >= row["most_rows"] > 0
    assert operator != "ep_latency" or row["p99_ms"] >= row["ms"]
    assert json.loads(json.dumps(rows)) == rows


def find_wrong_results():
    """Return the verdicts on correct rows, on rows in the wrong order, and on an ep_dispatch with doubled rows."""
    case, s = case_of("ep_dispatch", 8), None
    s = case.inputs(0)
    dispatch_methods.add_known_sizes(case, s)
    references = dispatch._references(case, [s])
    correct = dispatch_methods.sequences(case, [s])["sequence"]

    def shifted(s):
        rows, scales, splits, weights = correct.call(s)
        return rows.roll(1, 0), scales, splits, weights

    verdicts = [dispatch._mismatch_reason(correct.plain, call, references) for call in (correct.call, shifted)]
    tdkernels.ep_dispatch, original = (lambda *a, **k: _doubled(original(*a, **k))), tdkernels.ep_dispatch
    try:
        dispatch.measure(case, PLAN)
    except RuntimeError as error:
        verdicts.append(str(error))
    finally:
        tdkernels.ep_dispatch = original
    return verdicts


def _doubled(outputs):
    recv, handle = outputs
    return recv._replace(x=recv.x * 2), handle


def test_wrong_results_are_not_timed():
    correct, shifted, doubled = on_ranks(2, find_wrong_results)[0]
    assert correct is None and "wrong: relative errors" in shifted
    assert doubled.startswith("tdkernels: wrong: relative errors")


def check_inputs():
    x = torch.randn(4, 256, dtype=torch.bfloat16, device=device())
    x[1] = 0
    codes, scales = dispatch_methods.quantized(x)
    error = (dispatch_methods.dequantized(codes, scales) - x.float()).abs().amax()
    all_ids = [case_of("ep_dispatch", 16, routing=routing).ids_of_all(3) for routing in dispatch.ROUTINGS]
    distinct = all(len(set(token)) == 2 for ids in all_ids for token in ids.flatten(0, 1).tolist())
    return scales.shape, error.item(), distinct, harness.slowest([dist.get_rank()]), all_ids[0].tolist()


def test_routing_is_equal_on_all_ranks():
    first, second = on_ranks(2, check_inputs)
    assert first[0] == (4, 2) and first[1] < 0.2 and first[2] and first[4] == second[4]


def find_absent_peer():
    def fails_on_one(case, room, sets):
        if dist.get_rank() == 1:
            raise dispatch_peers.Absent("not here")

    original = dispatch_peers.PEERS["deepep"]
    dispatch_peers.PEERS["deepep"] = dispatch_peers.Peer(("ep_combine",), fails_on_one)
    try:
        case = case_of("ep_combine")
        sets = dispatch._input_sets(case)
        capacity = dispatch.capacity(case, sets[0].most_rows)
        return dispatch._methods(case, measure.Plan(1, 0, peers=("deepep",)), capacity, sets)[1]
    finally:
        dispatch_peers.PEERS["deepep"] = original


def test_ranks_agree_on_absent_peers():
    assert on_ranks(2, find_absent_peer) == [{"deepep": "failed on another rank"}, {"deepep": "not here"}]


# ---- the command ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ep_dispatch", "--moe", "8x8"], "--moe must be HxExk such as 7168x256x8"),
        (["ep_dispatch", "--payload", "int4"], "--payload must be some of bf16, fp8, fp8-given"),
        (["ep_dispatch", "--routing", "even"], "--routing must be balanced or skewed"),
        (["ep_dispatch", "--seconds", "0"], "--seconds must be more than 0"),
        (["ep_dispatch", "--tokens", "few"], "--tokens must be whole numbers"),
        (["ep_dispatch", "--peers", "flux"], "torch-vdev-2d, deepep"),
    ],
)
def test_bench_rejects_invalid_arguments(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


class NoPool:
    """A RankPool that describes the machine and measures nothing."""

    usable = True

    def run(self, fn, *arguments):
        assert fn in (harness.machine, harness.link_rate), "no case may be measured"
        return [{"gpu": "testing", "num_gpus": 2} if fn is harness.machine else None]


def test_deadline_skips_the_remaining_cases(capsys):
    cases = [case_of("ep_combine"), case_of("ep_dispatch")]
    assert bench_run._measure_all(NoPool(), cases, PLAN, None, deadline=0.0) == ([], [])
    assert "time limit reached: 2 of 2 cases are skipped, from ep_combine 3 tokens on" in capsys.readouterr().out


# ---- the report ----

MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 4, "driver": "1.2", "torch": "2.99", "triton": "3.99", "nccl": "2.0",
           "multicast": "off", "git": "0123456789abcdef"}


def run_of(operator, tokens, ms, date="2026-01-02", graph=False, **fields):
    case = case_of(operator, tokens, 4, layer=dispatch.LAYER, **fields)
    summary = {"wire_bytes": 4e6, "wire_bytes_per_expert": 8e6, "most_rows": 9, "max_tokens": 16}
    found = [
        (name, graph, {**summary, **({"ms": time} if time else {"absent": "why"})}) for name, time in ms.items()
    ]
    for _, _, times in found:
        times["p99_ms"] = 2 * times["ms"] if operator == "ep_latency" else None
    return [{**row, **MACHINE, "date": date} for row in dispatch.rows(case, found, link_gbps=400.0)]


def line(text, heading, start):
    part = text[text.index(heading) :]
    found = next(row for row in part.splitlines() if row.startswith(f"| {start} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.fixture
def folder(tmp_path):
    times = {"sequence": 0.1, "tdkernels": 0.05, "tdkernels-max-tokens": 0.04, "deepep": None, "tdkernels c1 {}": 0.001}
    rows = run_of("ep_dispatch", 128, times, payload="fp8")
    rows += run_of("ep_dispatch", 128, {"sequence": 9.0, "tdkernels": 9.0}, date="2026-01-01", payload="fp8")
    rows += run_of("ep_dispatch", 512, {**times, "tdkernels": 0.2}, payload="fp8")
    graph = {"sequence": None, "sequence-known-splits": 0.08, "tdkernels": None, "tdkernels-max-tokens": 0.02}
    rows += run_of("ep_dispatch", 128, graph, graph=True, payload="fp8")
    rows += run_of("ep_latency", 8, {"sequence": 0.3}) + run_of("ep_latency", 8, {"tdkernels": 0.1}, graph=True)
    path = tmp_path / "results" / "testingx4" / "ep.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "results"


def test_tables_show_the_newest_runs(folder):
    assert points.read(folder) == [] and points.read_collectives(folder) == []
    text = dispatch_report.text(points.read_ep(folder), lambda figure: f"![]({figure.file})\n")
    # 4 MB at 400 GB/s take 10 us.
    eager = "### ep_dispatch, fp8, 4 x NVIDIA Testing"
    assert line(text, eager, 128) == ["128", "100.0", "–", "50.0", "40.0", "10.0", "2.00", "0.20"]
    assert line(text, eager, 512)[-2:] == ["0.50 ▼", "0.05"] and "c1" not in text
    graph = line(text, "### ep_dispatch, fp8, in a CUDA graph", 128)
    assert graph == ["128", "–", "80.0", "–", "20.0", "10.0", "4.00", "0.50"]
    latency = line(text, "### ep_latency, bf16, dispatch + combine", 8)
    assert latency[:3] == ["8", "300.0 / 600.0", "100.0 / 200.0"]
    assert dispatch_report.text([], str) == ""


def test_report_has_the_section_and_its_plots(folder):
    assert report.main(folder, folder) == 0
    text = (folder / "tables" / "dispatch.md").read_text()
    for figure in dispatch_plots.figures(dispatch_report.newest_runs(points.read_ep(folder))):
        assert f"(../plots/{figure.file})" in text
        if importlib.util.find_spec("matplotlib"):
            assert (folder / "plots" / figure.file).stat().st_size > 5000, "the plot is empty"
    assert "(../plots/ep-testingx4.png)" in text and "(../plots/ep-testingx4-graph.png)" in text
