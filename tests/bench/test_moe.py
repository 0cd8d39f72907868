"""Benchmarks of MoE layers (tp_moe, ep_moe): shapes, methods, checks, rows, command and report."""

import json
import math

import pytest
import torch

import tdkernels
from bench.core import measure, multi_method, points
from bench.experts import (
    ep_moe,
    ep_moe_methods,
    grouped_gemm,
    grouped_gemm_report,
    moe_report,
    moe_shapes,
    permute_baseline,
    solo,
    solo_report,
    tp_moe,
    tp_moe_methods,
)
from bench.experts.moe_shapes import EpShape, TpShape
from bench.experts.tp_moe_methods import in_fp32
from bench.report import main as report
from tdkernels.__main__ import main
from tdkernels.launch import RankPool
from tdkernels.solo import enter_solo_mode
from tests.support.ranks import on_ranks

TP = TpShape(8, 16, 16, 3, 2, "tiny")
EP = EpShape(16, 8, 4, 2, "tiny")
PLAN = measure.Plan(rounds=1, burst_ms=0, overrides=({"nope": 1},))
NAMES = {"grouped", "collective", "sequence", "tdkernels"}
UNKNOWN = 'tdkernels c1 {"nope": 1}'


def tp_case(shape=TP, ranks=2, **fields):
    return tp_moe.Case(shape, ranks, **fields)


def ep_case(shape=EP, tokens=3, ranks=2, **fields):
    return ep_moe.Case(shape, tokens, ranks, **fields)


# ---- shapes ----


def test_shapes_by_name_and_by_size():
    tp, ep = moe_shapes.parse(None, ["tp_moe"])
    assert tp == moe_shapes.TP_SHAPES and ep == []
    expected = {
        (8192, 8192, 8192, 32, 4), (8192, 8192, 8192, 8, 2), (2048, 1408, 2048, 60, 4), (2048, 14336, 4096, 8, 2),
        (2048, 16384, 6144, 8, 2), (2048, 1408, 2048, 64, 6),
    }
    assert {(s.tokens, s.inner, s.hidden, s.experts, s.choices) for s in tp} == expected
    tp, ep = moe_shapes.parse("mixtral-8x7b,8x16x32x4x2", ["tp_moe"])
    assert [str(shape) for shape in tp] == ["2048x14336x4096x8x2", "8x16x32x4x2"]
    tp, ep = moe_shapes.parse("deepseek-v3,8x16x32x4x2,4096x2048x256x6", ["tp_moe", "ep_moe"])
    assert [str(shape) for shape in (*tp, *ep)] == ["8x16x32x4x2", "7168x2048x256x8", "4096x2048x256x6"]
    assert [case.tokens for case in ep_moe.cases(["ep_moe"], ep[:1], None, 2, "balanced", False)] == [4096, 1024, 128]


def test_why_not_names_the_reason():
    assert tp_case().why_not() is None
    assert "8 tokens are not divisible by 3" in tp_case(ranks=3).why_not()
    assert "I / W = 24 / 2 and H = 16 must be multiples of 8" in tp_case(TpShape(4, 24, 16, 2, 1)).why_not()
    assert "k = 3 is more than E = 2" in tp_case(TpShape(4, 16, 16, 2, 3)).why_not()


def test_flops_and_wire_bytes_of_a_pass():
    case = tp_case(TpShape(8, 32, 16, 4, 2), 4)
    down = 2 * 16 * 8 * 16
    parts = (*tp_moe_methods.FORWARDS, tp_moe_methods.BOTH)
    assert [case.flops(part) / down for part in parts] == [2, 1, 3, 9]
    shards = 8 * 16 * 2 * 3 / 4
    assert [case.wire_bytes(part) / shards for part in parts] == [1, 1, 2, 4]


def test_experts_are_reduced_to_fit_in_memory():
    deepseek = ep_case(moe_shapes.EP_SHAPES[1], 128, backward=True)
    assert deepseek.weight_bytes == 128 * 3 * 2048 * 7168 * 2
    assert deepseek.fit_memory(140e9) == deepseek and deepseek.fit_memory(80e9).experts == 128
    assert ep_case(moe_shapes.EP_SHAPES[1], 128).fit_memory(80e9).experts == 256, "all experts fit without gradients"
    assert ep_case(EpShape(16384, 16384, 256, 8), 128).fit_memory(1e12).experts == 64, "weights are limited to 60 GB"
    assert ep_case(ranks=4).fit_memory(1).experts == 4, "at least one expert per rank"


# ---- measuring ----


def measure_tp():
    return tp_moe.measure(tp_case(backward=True), PLAN)


def test_every_pass_of_tp_moe_is_checked_and_timed():
    found = on_ranks(2, measure_tp)[0]
    case = tp_case(backward=True)
    timed = {(part, name) for (part, name), _, times in found if times.get("ms")}
    assert timed == {(part, name) for part in case.parts for name in NAMES}
    assert {key for key, _, times in found if times.get("absent")} == {(part, UNKNOWN) for part in case.parts}
    rows = tp_moe.rows(case, found, 400.0)
    assert json.loads(json.dumps(rows)) == rows and {row["pass"] for row in rows} == set(case.parts)
    for part in case.parts:
        by_method = {row["method"]: row for row in rows if row["pass"] == part}
        row, floor = by_method["tdkernels"], max(by_method["grouped"]["ms"], case.wire_bytes(part) / 400e6)
        assert math.isclose(row["speedup"], by_method["sequence"]["ms"] / row["ms"])
        assert math.isclose(row["efficiency"], floor / row["ms"]) and row["config"]["method"] == "fused"


def measure_ep():
    # With 3 tokens the errors of a gradient differ from those of plain torch by more than a factor of 2 by chance.
    return ep_moe.measure(ep_case(tokens=16, backward=True), PLAN)


def test_all_kernels_are_measured_in_solo_mode():
    """Each config has the right result, and is compared with the longer of the GEMM and the wire."""
    case = solo.Case(solo._REHEARSAL, 2, 1e-3, (0, 2), 1)
    with RankPool(1, "cpu") as pool:
        pool.run(enter_solo_mode, 2)
        table = solo.rows(case, pool.run(solo.measure, case, 0)[0])
    methods = ["group_gemm", "portable 0", "portable 2"]  # the others need Hopper
    assert [(row["pass"], row["method"]) for row in table] == [(one, name) for one in solo.KERNELS for name in methods]
    wire_ms = 512 * 32 * 2 / 1e-3 / 1e6  # tokens of the peer
    for row in table:
        assert row["absent"] is None and row["wire_ms"] == pytest.approx(wire_ms)
        assert row["over_floor"] == pytest.approx(row["ms"] / max(row["gemm_ms"], wire_ms))
        json.dumps(row)


def _solo_row(method, time, kernel="ag_gemm", shape="8x4x2x2x1"):
    return {
        "gpu": "GPU", "ranks": 8, "link_gbps": 320.0, "pass": kernel, "shape": shape, "method": method, "ms": time,
        "gemm_ms": 0.5, "wire_ms": 0.25, "over_floor": time and time / 0.5, "date": "2026-11-28", "git": "1234567890",
        "torch": "2", "triton": "3",
    }


def test_report_of_solo_mode():
    """Each line has the fastest number of stages of each kind of kernel. A kind may be absent."""
    rows = [_solo_row(*each) for each in [
        ("torch", 0.5), ("portable 0", 1.0), ("portable 2", 0.75), ("specialized 0", 0.625), ("specialized 2", None),
    ]]
    text = solo_report.text([*rows, _solo_row("portable 0", 0.875, "gemm_rs"), _solo_row("torch", 0.5, "gemm_rs")])
    assert "| moe_ag_gemm | 8x4x2x2x1 | 0.500 | 0.250 | 0.750 | 0.625 | 1.25 |" in text
    assert "| moe_gemm_rs | 8x4x2x2x1 | 0.500 | 0.250 | 0.875 | – | 1.75 |" in text
    assert "moe_ag_gemm 1.25 (1 shapes), moe_gemm_rs 1.75 (1 shapes)" in text and "revision 1234567;" in text
    assert solo_report.text([]) == ""


def test_every_pass_of_ep_moe_is_checked_and_timed():
    found = on_ranks(2, measure_ep)[0]
    case = ep_case(backward=True)
    names = {*NAMES, "parts", "tdkernels-max-tokens", "tdkernels-overlapped"}
    timed = {(part, name) for (part, name), _, times in found if times.get("ms")}
    assert timed == {(part, name) for part in case.parts for name in names}
    rows = ep_moe.rows(case, found, 400.0)
    assert json.loads(json.dumps(rows)) == rows and {row["pass"] for row in rows} == set(case.parts)
    crossing = found[0][2]["crossing"]
    for part in case.parts:
        by_method = {row["method"]: row for row in rows if row["pass"] == part}
        row = by_method["tdkernels-max-tokens"]
        assert row["wire_bytes"] == crossing * 16 * 2 * (2 if part == "forward" else 4)
        assert math.isclose(row["speedup"], by_method["sequence"]["ms"] / row["ms"])
        assert row["experts"] == row["experts_of_model"] == 4 and row["max_tokens"] >= row["most_rows"] > 0


def compare_baselines():
    """Compare the torch baselines with the references; return the verdicts on them and on a wrong method."""
    case = tp_case(TpShape(16, 32, 32, 4, 2))
    sets = tp_moe._input_sets(case)
    s, add_up = sets[0], permute_baseline.sum_elementwise
    with torch.no_grad():
        exact = in_fp32(s)
        expected = tdkernels.tp_moe_ref(exact.x, exact.ids, exact.weights, exact.w_gate_up, exact.w_down)
        sums = (add_up, permute_baseline.sum_by_bmm)
        close = [
            torch.allclose(tp_moe_methods.layer(exact, sum_rows, tp_moe_methods.loop_over_experts), expected, atol=1e-5)
            for sum_rows in sums
        ]
        reference = tp_moe._references("forward", sets[:1], add_up)
        case = ep_case(tokens=9)
        s = in_fp32(case.inputs(0, case.weights()))
        ep_moe_methods.add_known_sizes(s, 4)
        expected = tdkernels.ep_moe_ref(s.x, s.ids, s.weights, s.w_gate_up, s.w_down, num_experts=4)
        y = ep_moe_methods.layer(s, 4, add_up, tp_moe_methods.loop_over_experts)
        close.append(torch.allclose(y, expected, atol=1e-5))
    correct = tp_moe_methods.sequences(add_up)["forward"]
    wrong = tp_moe_methods.Method(lambda s: 1.1 * correct.call(s), correct.plain)
    reason = multi_method.absent_reason("sequence", correct, reference)
    try:
        multi_method.absent_reason("tdkernels", wrong, reference)
    except RuntimeError as error:
        return close, reason, str(error)


def test_baselines_match_the_references_and_wrong_results_are_not_timed():
    close, reason, message = on_ranks(2, compare_baselines)[0]
    assert close == [True] * 3 and reason is None
    assert message.startswith("tdkernels: wrong: relative errors")


# ---- the command ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tp_moe", "ag_gemm"], "cannot be combined with other operators"),
        (["tp_moe", "--shapes", "8x8x8"], "--shapes of tp_moe: '8x8x8' is neither TxIxHxExk nor one of 8k-e32"),
        (["tp_moe", "--tokens", "8"], "--tokens does not apply to tp_moe"),
        (["tp_moe", "--routing", "even"], "--routing must be balanced or skewed"),
    ],
)
def test_bench_rejects_invalid_arguments(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


# ---- the report ----

MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 2, "driver": "1.2", "torch": "2.99", "triton": "3.99", "nccl": "2.0",
           "multicast": "off", "git": "0123456789abcdef"}


def run_of(module, case, date="2026-01-02", graph=False, summary=None, **ms):
    """Return the rows of one run; ``ms`` gives times by pass and method."""
    found = [
        ((part, name), graph, {**(summary or {}), **({"ms": time} if time else {"absent": "why"})})
        for part, times in ms.items() for name, time in times.items()
    ]
    return [{**row, **MACHINE, "date": date} for row in module.rows(case, found, 400.0)]


def line(text, heading, start):
    part = text[text.index(heading) :]
    found = next(row for row in part.splitlines() if row.startswith(f"| {start} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.fixture
def folder(tmp_path):
    times = {"grouped": 1.0, "collective": 0.25, "sequence": 2.0, "tdkernels": 1.25, "tdkernels c1 {}": 0.1}
    mixtral, small = tp_case(moe_shapes.TP_SHAPES[3]), tp_case(TpShape(1024, 16, 8192, 2, 1))
    rows = run_of(tp_moe, mixtral, forward=times, ag_gemm={**times, "tdkernels": 2.5})
    rows += run_of(tp_moe, mixtral, forward={**times, "tdkernels": 9.0}, date="2026-01-01")
    rows += run_of(tp_moe, small, forward={**times, "grouped": 0.01, "tdkernels": None})
    rows += run_of(tp_moe, mixtral, graph=True, forward=times, **{"forward+backward": dict.fromkeys(times)})
    summary = {"experts": 128, "most_rows": 9, "max_tokens": 16, "crossing": 1000}
    deepseek = ep_case(moe_shapes.EP_SHAPES[1], 128)
    ep_times = {**times, "parts": 1.5, "tdkernels": 1.4, "tdkernels-max-tokens": 1.6}
    rows += run_of(ep_moe, deepseek, summary=summary, **{"forward+backward": ep_times})
    case = grouped_gemm.Case(grouped_gemm.SHAPES[1], "skewed", "dx")
    times = {"cublas-loop": 2.0, "torch-grouped": 0.9, "tdkernels": 1.0}
    found = [(name, False, {"ms": time}) for name, time in times.items()]
    tiles = {"block_m": 64, "block_n": 32, "block_k": 16, "num_stages": 3}
    found[-1][2]["config"] = {"method": "fused", "tiles": tiles}
    rows += [{**row, **MACHINE, "num_gpus": 1, "date": "2026-01-02"} for row in grouped_gemm.rows(case, found, None)]
    path = tmp_path / "results" / "testingx2" / "layers.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "results"


def test_tables_show_the_newest_runs(folder):
    text = moe_report.text(points.read_layers(folder))
    # Each GPU receives half of 2048 x 4096 x 2 bytes: 8.4 MB, and sends as much back, at 400 GB/s.
    forward = line(text, "### tp_moe, forward, 2 x NVIDIA Testing", "2048x14336x4096x8x2")
    assert forward == [
        "2048x14336x4096x8x2", "mixtral-8x7b", "1.000", "0.250", "2.000", "1.250", "0.042", "1.60", "0.80",
    ]
    assert line(text, "### tp_moe, forward, in CUDA graphs", "2048x14336x4096x8x2") == forward
    assert "### tp_moe, forward+backward" not in text, "a pass without measurements has no table"
    half = line(text, "### tp_moe, gate-up stage (moe_ag_gemm)", "2048x14336x4096x8x2")
    assert half[-4:] == ["2.500", "0.021", "0.80 ▼", "0.40"]
    missing = line(text, "### tp_moe, forward", "1024x16x8192x2x1")
    assert missing[2:6] == ["0.0100", "0.250", "2.000", "–"] and missing[-2:] == ["–", "–"]
    both = line(text, "### ep_moe, forward+backward", 128)
    assert both == ["128", "1.000", "0.250", "2.000", "1.500", "1.400", "1.600", "0.143", "1.25", "0.94 ▼", "0.62"]
    assert "128 experts (of 256, limited by memory), top-8" in text and "c1" not in text
    assert "2026-01-02, revision 0123456; torch 2.99, triton 3.99, NCCL 2.0; NVLink multicast off; best link" in text
    assert moe_report.text([]) == ""


def test_grouped_gemm_has_a_table(folder):
    text = grouped_gemm_report.text(points.read_layers(folder))
    found = line(text, "### group_gemm, dx, 1 x NVIDIA Testing", "4096x3584x4096x8")
    times = ["2.000", "0.900", "1.000", "120", "0.90 ▼"]
    assert found == ["4096x3584x4096x8", "mixtral-tp8 skewed", "–", *times, "64x32x16, 3 stages"]
    assert "NCCL" not in text and grouped_gemm_report.text([]) == ""


def test_report_has_both_sections(folder):
    assert points.read(folder) == [] and points.read_ep(folder) == []
    assert report.main(folder, folder) == 0
    text = (folder / "tables" / "experts.md").read_text()
    assert "## MoE layers" in text and "## Grouped GEMM" in text
