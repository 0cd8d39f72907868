"""The benchmarks of layers of experts: shapes, what is measured and checked, rows, the command."""

import json
import math

import pytest
import torch

import tdkernels
from bench import ep_moe, ep_moe_methods, measure, moe_shapes, parts, permutes, points, tp_moe, tp_moe_methods
from bench.moe_shapes import EpShape, TpShape
from bench.tp_moe_methods import in_fp32
from tdkernels.__main__ import main
from tests.ranks import on_ranks

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
    field = {
        (8192, 8192, 8192, 32, 4), (8192, 8192, 8192, 8, 2), (2048, 1408, 2048, 60, 4), (2048, 14336, 4096, 8, 2),
        (2048, 16384, 6144, 8, 2), (2048, 1408, 2048, 64, 6),
    }  # fmt: skip
    assert {(s.tokens, s.inner, s.hidden, s.experts, s.choices) for s in tp} == field
    tp, ep = moe_shapes.parse("mixtral-8x7b,8x16x32x4x2", ["tp_moe"])
    assert [str(shape) for shape in tp] == ["2048x14336x4096x8x2", "8x16x32x4x2"]
    tp, ep = moe_shapes.parse("deepseek-v3,8x16x32x4x2,4096x2048x256x6", ["tp_moe", "ep_moe"])
    assert [str(shape) for shape in (*tp, *ep)] == ["8x16x32x4x2", "7168x2048x256x8", "4096x2048x256x6"]
    assert [case.tokens for case in ep_moe.cases(["ep_moe"], ep[:1], None, 2, "balanced", False)] == [4096, 1024, 128]


def test_what_cannot_be_measured_says_why():
    assert tp_case().why_not() is None
    assert "8 tokens are not divisible by 3" in tp_case(ranks=3).why_not()
    assert "I / W = 24 / 2 and H = 16 must be multiples of 8" in tp_case(TpShape(4, 24, 16, 2, 1)).why_not()
    assert "k = 3 is more than E = 2" in tp_case(TpShape(4, 16, 16, 2, 3)).why_not()


def test_what_a_part_computes_and_sends():
    case = tp_case(TpShape(8, 32, 16, 4, 2), 4)
    down = 2 * 16 * 8 * 16
    parts = (*tp_moe_methods.FORWARDS, tp_moe_methods.BOTH)
    assert [case.flops(part) / down for part in parts] == [2, 1, 3, 9]
    shards = 8 * 16 * 2 * 3 / 4
    assert [case.wire_bytes(part) / shards for part in parts] == [1, 1, 2, 4]


def test_experts_that_have_no_room_are_left_out():
    deepseek = ep_case(moe_shapes.EP_SHAPES[1], 128, backward=True)
    assert deepseek.weight_bytes == 128 * 3 * 2048 * 7168 * 2
    assert deepseek.in_room(140e9) == deepseek and deepseek.in_room(80e9).experts == 128
    assert ep_case(moe_shapes.EP_SHAPES[1], 128).in_room(80e9).experts == 256, "without gradients there is room"
    assert ep_case(EpShape(16384, 16384, 256, 8), 128).in_room(1e12).experts == 64, "60 GB at most"
    assert ep_case(ranks=4).in_room(1).experts == 4, "a rank has one at least"


# ---- measuring ----


def measures_tp():
    return tp_moe.measure(tp_case(backward=True), PLAN)


def test_every_part_of_tp_moe_is_checked_and_timed():
    found = on_ranks(2, measures_tp)[0]
    case = tp_case(backward=True)
    timed = {(part, name) for (part, name), _, times in found if times.get("ms")}
    assert timed == {(part, name) for part in case.parts for name in NAMES}
    assert {key for key, _, times in found if times.get("absent")} == {(part, UNKNOWN) for part in case.parts}
    rows = tp_moe.rows(case, found, 400.0)
    assert json.loads(json.dumps(rows)) == rows and {row["pass"] for row in rows} == set(case.parts)
    for part in case.parts:
        by_method = {row["method"]: row for row in rows if row["pass"] == part}
        ours, floor = by_method["tdkernels"], max(by_method["grouped"]["ms"], case.wire_bytes(part) / 400e6)
        assert math.isclose(ours["speedup"], by_method["sequence"]["ms"] / ours["ms"])
        assert math.isclose(ours["efficiency"], floor / ours["ms"]) and ours["config"]["method"] == "fused"


def measures_ep():
    return ep_moe.measure(ep_case(backward=True), PLAN)


def test_every_part_of_ep_moe_is_checked_and_timed():
    found = on_ranks(2, measures_ep)[0]
    case = ep_case(backward=True)
    names = {*NAMES, "parts", "tdkernels-max-tokens"}
    timed = {(part, name) for (part, name), _, times in found if times.get("ms")}
    assert timed == {(part, name) for part in case.parts for name in names}
    rows = ep_moe.rows(case, found, 400.0)
    assert json.loads(json.dumps(rows)) == rows and {row["pass"] for row in rows} == set(case.parts)
    crossing = found[0][2]["crossing"]
    for part in case.parts:
        by_method = {row["method"]: row for row in rows if row["pass"] == part}
        ours = by_method["tdkernels-max-tokens"]
        assert ours["wire_bytes"] == crossing * 16 * 2 * (2 if part == "forward" else 4)
        assert math.isclose(ours["speedup"], by_method["sequence"]["ms"] / ours["ms"])
        assert ours["experts"] == ours["experts_of_model"] == 4 and ours["max_tokens"] >= ours["most_rows"] > 0


def compares():
    """Sequences against the specifications, and what is said of ours that is off."""
    case = tp_case(TpShape(16, 32, 32, 4, 2))
    sets = tp_moe._input_sets(case)
    s, add_up = sets[0], permutes.sum_by_terms
    with torch.no_grad():
        exact = in_fp32(s)
        wanted = tdkernels.tp_moe_ref(exact.x, exact.ids, exact.weights, exact.w_gate_up, exact.w_down)
        sums = (add_up, permutes.sum_by_product)
        close = [
            torch.allclose(tp_moe_methods.layer(exact, way, tp_moe_methods.one_by_one), wanted, atol=1e-5)
            for way in sums
        ]
        reference = tp_moe._references("forward", sets[:1], add_up)
        case = ep_case(tokens=9)
        s = in_fp32(case.inputs(0, case.weights()))
        ep_moe_methods.add_known(s, 4)
        wanted = tdkernels.ep_moe_ref(s.x, s.ids, s.weights, s.w_gate_up, s.w_down, num_experts=4)
        close.append(torch.allclose(ep_moe_methods.layer(s, 4, add_up, tp_moe_methods.one_by_one), wanted, atol=1e-5))
    right = tp_moe_methods.sequences(add_up)["forward"]
    off = tp_moe_methods.Method(lambda s: 1.1 * right.call(s), right.plain)
    reason = parts.why_absent("sequence", right, reference)
    try:
        parts.why_absent("tdkernels", off, reference)
    except RuntimeError as error:
        return close, reason, str(error)


def test_sequences_are_the_layers_and_what_is_wrong_is_not_timed():
    close, reason, message = on_ranks(2, compares)[0]
    assert close == [True] * 3 and reason is None
    assert message.startswith("tdkernels: wrong: relative errors")


# ---- the command ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tp_moe", "ag_gemm"], "not measured beside others"),
        (["tp_moe", "--shapes", "8x8x8"], "--shapes of tp_moe: '8x8x8' is neither TxIxHxExk nor one of 8k-e32"),
        (["tp_moe", "--routing", "even"], "--routing must be balanced or skewed"),
    ],
)
def test_bench_refuses_what_makes_no_sense(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_report_of_dense_operators_leaves_them_out(tmp_path):
    path = tmp_path / "testingx2" / "tp_moe.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"what": "tp_moe"}) + "\n")
    assert points.read(tmp_path) == []
