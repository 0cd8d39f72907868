"""Benchmark of group_gemm: shapes, methods, checks, rows and command."""

import json
import math

import pytest

import tdkernels
from bench import run as bench_run
from bench.core import measure, points
from bench.experts import grouped_gemm
from tdkernels.__main__ import main
from tests.bench.fake_pool import FakePool
from tests.support.ranks import on_ranks

SHAPE = grouped_gemm.Shape(7, 16, 24, 3, "swiglu")
PLAN = measure.Plan(rounds=1, burst_ms=0, overrides=({"tiles": {"block_n": 16}}, {"nope": 1}))
CHANGED, UNKNOWN = 'c1 {"tiles": {"block_n": 16}}', 'c2 {"nope": 1}'


def test_shapes_by_name_and_by_size():
    assert grouped_gemm.parse_shapes(None) == grouped_gemm.SHAPES
    named, sized = grouped_gemm.parse_shapes("mixtral-tp8,64x32x16x4")
    assert (str(named), named.activation) == ("4096x3584x4096x8", "swiglu") and str(sized) == "64x32x16x4"
    assert [case.direction for case in grouped_gemm.cases(["group_gemm"], [sized], "skewed", True)] == [
        "forward", "dx", "dw",
    ]
    assert [str(case) for case in grouped_gemm.cases(["group_gemm"], [named], "skewed", False)] == [
        "group_gemm forward 4096x3584x4096x8 mixtral-tp8 skewed"
    ]


def measure_case(direction, routing):
    found = grouped_gemm.measure(grouped_gemm.Case(SHAPE, routing, direction), PLAN)
    splits = [grouped_gemm.Case(SHAPE, routing, direction).inputs(seed).splits.tolist() for seed in range(2)]
    return found, splits


@pytest.mark.parametrize("direction, routing", [("forward", "skewed"), ("dx", "balanced"), ("dw", "skewed")])
def test_all_methods_are_checked_and_timed(direction, routing):
    found, splits = on_ranks(1, measure_case, direction, routing)[0]
    assert all(sum(counts) == SHAPE.rows for counts in splits) and splits[0] != splits[1]
    overridden = [CHANGED, UNKNOWN] if direction == "forward" else []
    assert [name for name, *_ in found] == [*grouped_gemm.PEERS, "tdkernels", *overridden]
    assert [name for name, _, times in found if times.get("absent")] == overridden[1:]
    rows = grouped_gemm.rows(grouped_gemm.Case(SHAPE, routing, direction), found, None)
    by_method = {row["method"]: row for row in rows}
    row, best = by_method["tdkernels"], min(by_method[peer]["ms"] for peer in grouped_gemm.PEERS)
    assert math.isclose(row["speedup"], best / row["ms"])
    assert math.isclose(row["tflops"] * row["ms"], 2 * 7 * 16 * 24 / 1e9)
    assert (row["activation"] == "swiglu") == (direction == "forward")
    assert json.loads(json.dumps(rows)) == rows


def measure_wrong_method():
    original, grouped_gemm.ours = grouped_gemm.ours, lambda *arguments: 1.1 * original(*arguments)
    try:
        grouped_gemm.measure(grouped_gemm.Case(SHAPE, "balanced", "dx"), PLAN)
    except RuntimeError as error:
        return str(error)
    finally:
        grouped_gemm.ours = original


def test_wrong_results_are_not_timed():
    assert on_ranks(1, measure_wrong_method)[0].startswith("tdkernels: wrong: relative errors")


@pytest.mark.parametrize("gpus", [0, 1])
def test_group_gemm_needs_one_gpu(gpus, monkeypatch, capsys, tmp_path):
    pool = FakePool(lambda *_: [("torch-grouped", False, {"ms": 2.0}), ("tdkernels", False, {"ms": 1.0})])
    monkeypatch.setattr(bench_run, "RankPool", pool)
    monkeypatch.setattr(bench_run.torch.cuda, "device_count", lambda: gpus)
    assert main(["bench", "group_gemm", "--backward", "--shapes", "tp-moe", "--out", str(tmp_path)]) == 0
    assert pool.ranks == 1
    out = capsys.readouterr().out
    assert out.startswith("Rehearsal on 1 CPU rank,") == (gpus == 0)
    written = [json.loads(line) for path in tmp_path.glob("testingx1/group_gemm.jsonl") for line in path.open()]
    assert [row["pass"] for row in written] == ["forward"] * 2 * gpus + ["dx"] * 2 * gpus + ["dw"] * 2 * gpus
    assert {row["speedup"] for row in written if row["method"] == "tdkernels"} == ({2.0} if gpus else set())
    assert points.read(tmp_path) == [], "these rows are not points of dense operators"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["group_gemm", "ag_gemm"], "group_gemm runs on one GPU and cannot be combined"),
        (["group_gemm", "--shapes", "8x8x8"], "--shapes of group_gemm: '8x8x8' is neither RxNxKxE nor one of tp-moe"),
        (["group_gemm", "--routing", "even"], "--routing must be balanced or skewed"),
    ],
)
def test_bench_rejects_invalid_arguments(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_operator_exists_in_the_library():
    assert set(grouped_gemm.OPERATORS) <= set(tdkernels.__all__)
