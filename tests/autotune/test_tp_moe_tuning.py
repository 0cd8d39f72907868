"""Tuning tp_moe, moe_ag_gemm and moe_gemm_rs, and calls that use the tuned configs, in forward and backward."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import MoeTpConfig, Tiles, autotune, explain
from tdkernels.autotune import selection, tuner
from tdkernels.autotune.accuracy import Reference
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common.config import as_argument
from tdkernels.ops.experts.tp_moe import launch_ag_gemm as tp_moe_launch_ag_gemm
from tdkernels.ops.experts.tp_moe import launch_gemm_rs as tp_moe_launch_gemm_rs
from tdkernels.ops.experts.tp_moe import steps
from tdkernels.ops.experts.tp_moe.torch_op import tp_moe_compiled
from tdkernels.runtime import gpu
from tdkernels.symm.group import group_state
from tests.autotune import expert_support
from tests.autotune.entries import cache_in
from tests.autotune.expert_support import entry_of, problem_of
from tests.autotune.selection_support import count_calls, store_entries, tables_in
from tests.ops.experts.tp_moe.oracle import BF16, FP32, Sliced
from tests.support.aot import recorded_launches
from tests.support.moe_oracle import NAMES
from tests.support.ranks import a_group, device, on_ranks

TILES = Tiles(32, 32, 32, num_warps=4, num_stages=2)
TUNED = MoeTpConfig(tiles=TILES, num_comm_sms=1, chunk_rows=16, stages=2)
EXPLICIT = MoeTpConfig(tiles=TILES, num_comm_sms=1, chunk_rows=32, stages=1)
TORCH = MoeTpConfig(method="torch")
# Tokens, H and I or N and K, experts, top-k of the whole problem. The fp32 sizes are larger so that sums are inexact:
# with few elements plain torch happens to be exact on some CPUs.
PROBLEMS = [
    ("tp_moe", (16, 96, 64, 2, 1), "swiglu", FP32),
    ("moe_ag_gemm", (8, 12, 16, 2, 1), "swiglu_interleaved", BF16),
    ("moe_gemm_rs", (8, 12, 6, 2, 1), "nk", BF16),
    ("moe_ag_gemm", (8, 32, 16, 3, 2), "kn", BF16),
    ("moe_gemm_rs", (8, 16, 32, 3, 2), "kn", BF16),
]
OPERATORS = ["tp_moe", "moe_ag_gemm", "moe_gemm_rs"]
GRADIENTS = [("moe_ag_gemm", "kn"), ("moe_gemm_rs", "kn")]


def tune_problem(folder, *problem):
    operator, shape, layout, dtype = problem
    with cache_in(folder / f"rank{dist.get_rank()}"):
        return expert_support.check_tune(operator, shape, layout, TUNED, dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem[0]}-{problem[2]}")
def test_all_ranks_find_the_same_entry(tmp_path, problem):
    first, second = on_ranks(2, tune_problem, tmp_path, *problem)
    assert first == second


def check_reference(operator):
    """Check that the reference rejects a candidate for a gradient if its output is wrong."""
    group, op = dist.group.WORLD, tunable(operator)
    problem = problem_of(operator, (8, 16, 16, 3, 2), "kn", "bfloat16")
    operands = op.operands(problem, device(), torch.Generator(device()).manual_seed(1 + dist.get_rank()))
    reference = Reference(op, problem, operands, group)
    for config in (TUNED, TORCH):
        outputs = op.run(op.prepared(operands, problem, group, config), problem, group, config)
        tdkernels.synchronize()
        reference.check(op.comparable(outputs, problem))
        for output in outputs[:1] if operator == "moe_ag_gemm" else [outputs]:
            correct = output.clone()
            output.mul_(1.25)
            with pytest.raises(ArithmeticError, match="wrong: errors"):
                reference.check(op.comparable(outputs, problem))
            output.copy_(correct)


@pytest.mark.parametrize("operator", ["moe_ag_gemm", "moe_gemm_rs"])
def test_wrong_output_of_a_gradient_is_rejected(operator):
    on_ranks(2, check_reference, operator)


BAD = [
    (("tp_moe", 7, 12, 6, 3, 2), {}, "tp_moe: M = 7 is not divisible by 2 ranks"),
    (("tp_moe", 8, 12, 5, 3, 2), {}, "tp_moe: INTERMEDIATE = 5 is not divisible by 2 ranks"),
    (("tp_moe", 8, 12, 6, 3), {}, "5 positive sizes, M x HIDDEN x INTERMEDIATE x EXPERTS x CHOICES, not (8, 12, 6, 3)"),
    (("tp_moe", 8, 12, 6, 3, 4), {}, "tp_moe: a token has at most EXPERTS = 3 choices, not 4"),
    (("tp_moe", 8, 12, 6, 3, 2), {"layout": "gelu"}, "layout must be one of swiglu, swiglu_interleaved, none, not 'ge"),
    (("tp_moe", 8, 12, 6, 3, 2), {"dtype": torch.float64}, "dtype must be one of"),
    (("moe_ag_gemm", 8, 15, 16, 3, 2), {}, "moe_ag_gemm: N = 15 is not divisible by 2 ranks"),
    (("moe_ag_gemm", 8, 14, 16, 3, 2), {"layout": "swiglu"}, "a rank's rows of gate and up must be even, not 7"),
    (("moe_gemm_rs", 8, 12, 7, 3, 2), {}, "moe_gemm_rs: K = 7 is not divisible by 2 ranks"),
    (("moe_gemm_rs", 8, 0, 6, 3, 2), {}, "5 positive sizes"),
    (("moe_gemm_rs", 8, 12, 6, 3, 2), {"layout": "swiglu"}, "layout must be one of nk, kn, not 'swiglu'"),
    (("moe_gemm_rs", 8, 12, 7, 3, 2), {"layout": "kn"}, "moe_gemm_rs: K = 7 is not divisible by 2 ranks"),
    (("moe_ag_gemm", 8, 15, 16, 3, 2), {"layout": "kn"}, "moe_ag_gemm: N = 15 is not divisible by 2 ranks"),
    (("moe_ag_gemm", 8, 14, 16, 3, 2), {"layout": "nk"}, "layout must be one of none, swiglu, swiglu_interleaved, kn,"),
    (("tp_moe", 8, 12, 6, 3, 2), {"layout": "kn"}, "layout must be one of swiglu, swiglu_interleaved, none, not 'kn'"),
]


def test_bad_problems_are_rejected():
    on_ranks(2, expert_support.check_rejected, BAD)


# ---- calls use tuned configs ----


def launched_configs():
    """Record the configs that the kernels run with."""
    return expert_support.record_configs(
        (tp_moe_launch_ag_gemm, "launch", lambda args, options: args[3]),
        (tp_moe_launch_gemm_rs, "launch", lambda args, options: args[4]),
    )


def make_layer(group, **changes):
    return Sliced(**{**dict(tokens=4, k=1, experts=2, width=12, hidden=3, dtype=FP32, group=group), **changes})


def call_stages(layer, **options):
    """Compute a layer with moe_ag_gemm and moe_gemm_rs."""
    x, ids, weights, w_gate_up, w_down = layer.operands()
    h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation="swiglu", group=layer.group, **options)
    return tdkernels.moe_gemm_rs(h, routing, weights, w_down, group=layer.group, **options)


def entries(config, other=None, width=12, hidden=3, dtype="float32"):
    """Return entries for the sizes of ``make_layer``; ``other`` is the config of moe_gemm_rs."""
    problems = {
        "tp_moe": (8, width, 2 * hidden, 2, 1), "moe_ag_gemm": (8, 4 * hidden, width, 2, 1),
        "moe_gemm_rs": (8, width, 2 * hidden, 2, 1),
    }
    configs = {"moe_gemm_rs": other or config}
    return [entry_of(configs.get(operator, config), operator, shape, "swiglu" if operator != "moe_gemm_rs" else None,
                     dtype=dtype) for operator, shape in problems.items()]


def check_tuned_configs(folder):
    """Check that the forward uses the tuned config, the backward the default, and that an explicit config wins.

    Repeated calls select without communication.
    """
    stage_config = MoeTpConfig(tiles=Tiles(32, 64, 32, num_warps=4, num_stages=2), chunk_rows=16)
    with a_group() as group, tables_in(folder):
        store_entries(*entries(TUNED, stage_config))
        layer, state = make_layer(group), group_state(group)
        with launched_configs() as ran:
            layer.check(layer.run())
        assert ran[:2] == [("launch", TUNED)] * 2 and len(ran) == 4
        default = tunable("moe_ag_gemm").default(problem_of("moe_ag_gemm", (8, 12, 12, 2, 1)), layer.ids.device)
        assert {config for _, config in ran[2:]} == {default}
        with launched_configs() as ran:
            layer.check({"y": call_stages(layer).detach()})
        assert [config for _, config in ran] == [TUNED, stage_config]
        assert {(problem.operator, choice.source) for (problem, _), choice in state.choices.items()
                if problem.operator in OPERATORS and problem.layout != "kn"
                } == {(operator, "cache") for operator in OPERATORS}
        with (
            launched_configs(), count_calls(state, "exchange") as exchanges,
            count_calls(selection, "look_up") as lookups,
        ):
            layer.check({"y": layer.call().detach()})
            assert (exchanges, lookups) == ([0], [0])
        previous = dict(state.choices)
        with launched_configs() as ran:
            for y in (layer.call(config=EXPLICIT), call_stages(layer, config=EXPLICIT)):
                layer.check({"y": y.detach()})
        assert [config for _, config in ran] == [EXPLICIT] * 4 and state.choices == previous
        result = explain("moe_ag_gemm", *(layer.operands()[i] for i in (0, 1, 3)), layout="swiglu", group=group)
        assert (result.source, result.config) == ("cache", TUNED)
        del group, layer, state, y


def test_call_uses_tuned_config(tmp_path):
    on_ranks(2, check_tuned_configs, tmp_path)


def check_torch_config(folder):
    """Check that no kernel runs in forward and backward; sizes and dtype suit torch's grouped GEMM on a GPU."""
    with a_group() as group, tables_in(folder):
        wide = {"width": 16, "hidden": 8, "dtype": BF16}
        store_entries(*entries(TORCH, width=16, hidden=8, dtype="bfloat16"))
        for layer, call in ((make_layer(group, **wide), None), (make_layer(group, seed=1, **wide), call_stages)):
            layer.require()
            with launched_configs() as ran:
                y = layer.call() if call is None else call(layer)
                y.backward(layer.dy)
            layer.check({"y": y.detach(), **layer.gradients()})
            assert not ran
        with launched_configs() as ran:  # another layout has no entries
            layer = make_layer(group, activation="swiglu_interleaved", **wide)
            layer.check({"y": layer.call().detach()})
        assert len(ran) == 2
        text = str(explain("tp_moe", *make_layer(group, **wide).operands(), group=group))
        assert "tp_moe 8x16x16x2x1 bfloat16 swiglu on 2 x" in text and "  config      method=torch" in text
        assert "  runs        torch collective and grouped matmul" in text
        del group, layer, y


def test_call_uses_the_torch_backend(tmp_path):
    on_ranks(2, check_torch_config, tmp_path)


# Configs of the GEMMs of gradients. Their chunks and stages are ignored: the routing determines both.
DH_CONFIG = MoeTpConfig(tiles=Tiles(32, 64, 32, num_warps=4, num_stages=2), num_comm_sms=3, chunk_rows=48, stages=5)
DX_CONFIG = MoeTpConfig(tiles=Tiles(64, 32, 32, num_warps=4, num_stages=2), chunk_rows=64, stages=1)
# Sizes and dtype that torch's grouped GEMM supports on a GPU.
WIDE = {"width": 16, "hidden": 8, "dtype": BF16}


def gradient_entries(dh_config, dx_config, tokens=8):
    """Return entries for the gradients of ``make_layer`` with WIDE; ``tokens`` counts the tokens of all ranks."""
    return (
        entry_of(dh_config, "moe_ag_gemm", (tokens, 16, 16, 2, 1), "kn", dtype="bfloat16"),
        entry_of(dx_config, "moe_gemm_rs", (tokens, 16, 32, 2, 1), "kn", dtype="bfloat16"),
    )


def call_compiled_op(layer, config=None):
    """Call a layer through the custom operator that torch.compile uses."""
    group, text = layer.group.group_name, as_argument(config)
    return tp_moe_compiled(*layer.operands(), layer.activation, group, text)


CALLS = {"tp_moe": Sliced.call, "stages": call_stages, "compiled": call_compiled_op}


def check_training(layer, call, names=NAMES, **options):
    """Check y and the gradients of the operands in ``names``; return the configs of the kernels that ran."""
    layer.require(names)
    with launched_configs() as ran:
        y = call(layer, **options)
        y.backward(layer.dy)
    results = {"y": y.detach(), **layer.gradients()}
    assert results.keys() == {"y", *(f"d{name}" for name in names)}
    layer.check(results)
    return [config for _, config in ran]


def check_backward(folder, call):
    """Check that gradients use their own entries, and that an explicit config also applies to gradients.

    Repeated calls select without communication.
    """
    call = CALLS[call]
    with a_group() as group, tables_in(folder, user=f"rank{dist.get_rank()}"):
        forward_entries = entries(TUNED, width=16, hidden=8, dtype="bfloat16")
        store_entries(*forward_entries, *gradient_entries(DH_CONFIG, DX_CONFIG))  # in the cache of rank 0 only
        layer, state = make_layer(group, **WIDE), group_state(group)
        with count_calls(selection, "look_up") as lookups:
            assert check_training(layer, call) == [TUNED, TUNED, DH_CONFIG, DX_CONFIG]
        assert (lookups[0] > 0) == (dist.get_rank() == 0)
        sources = {
            problem.operator: choice.source for (problem, _), choice in state.choices.items() if problem.layout == "kn"
        }
        assert sources == {"moe_ag_gemm": "cache", "moe_gemm_rs": "cache"}
        previous = dict(state.choices)
        with count_calls(state, "exchange") as exchanges, count_calls(selection, "look_up") as lookups:
            assert check_training(layer, call) == [TUNED, TUNED, DH_CONFIG, DX_CONFIG]
            assert (exchanges, lookups) == ([0], [0])
        assert check_training(layer, call, config=EXPLICIT) == [EXPLICIT] * 4 and state.choices == previous
        for name, expected in (
            ("x", [DH_CONFIG, DX_CONFIG]), ("topk_weights", [DH_CONFIG]), ("w_gate_up", [DH_CONFIG]),
            ("w_down", [DH_CONFIG]),
        ):
            assert check_training(layer, call, names=(name,))[2:] == expected, name
        with autotune.mode("off"):
            ran = check_training(make_layer(group, **WIDE), call)
            assert len(ran) == 4 and not {TUNED, DH_CONFIG, DX_CONFIG} & set(ran[2:])
        del group, layer, state


@pytest.mark.parametrize("call", CALLS)
def test_gradients_use_tuned_configs(tmp_path, call):
    on_ranks(2, check_backward, tmp_path, call)


def check_backward_chunks(folder):
    """Check that a backward keeps the 3 chunks and 3 stages of the forward if its entries have other values."""
    forward = MoeTpConfig(tiles=TILES, num_comm_sms=1, chunk_rows=16, stages=3)
    with a_group() as group, tables_in(folder):
        entry = entry_of(forward, "tp_moe", (80, 16, 16, 2, 1), dtype="bfloat16")
        store_entries(entry, *gradient_entries(DH_CONFIG, DX_CONFIG, tokens=80))
        layer = make_layer(group, tokens=40, **WIDE)
        assert check_training(layer, Sliced.call) == [forward, forward, DH_CONFIG, DX_CONFIG]
        del group, layer


def test_gradients_keep_chunks_and_stages_of_the_forward(tmp_path):
    on_ranks(2, check_backward_chunks, tmp_path)


def check_one_gradient_by_torch(folder, which):
    """Check that one gradient runs the torch backend and the other its kernel; the forward has no entries."""
    with a_group() as group, tables_in(folder):
        store_entries(*gradient_entries(*((TORCH, DX_CONFIG) if which == "dh" else (DH_CONFIG, TORCH))))
        for call in CALLS.values():
            layer = make_layer(group, **WIDE)
            forward, ran = check_training(layer, call)[:2], check_training(layer, call)
            assert ran == [*forward, DX_CONFIG if which == "dh" else DH_CONFIG]
            assert {config.method for config in forward} == {"fused"}
        del group, layer


@pytest.mark.parametrize("which", ["dh", "dx"])
def test_one_gradient_by_torch(tmp_path, which):
    on_ranks(2, check_one_gradient_by_torch, tmp_path, which)


def check_gradient_mismatch():
    """Check that both ranks report it if they compute gradients with different operators."""
    with a_group() as group, autotune.mode("cached"):
        layer = make_layer(group, **WIDE)
        x, ids, weights, w_gate_up, w_down = layer.operands()
        h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation="swiglu", group=group)
        back = (w_gate_up, w_down)[group.rank()].transpose(1, 2)
        operator = ("moe_gemm_rs", "moe_ag_gemm")[group.rank()]
        with pytest.raises(ValueError, match="moe_gemm_rs.*moe_ag_gemm"):
            steps.config_of_gradient(operator, back, routing, None)
        del group, layer, routing


def test_mismatched_gradients_are_reported():
    on_ranks(2, check_gradient_mismatch)


@contextlib.contextmanager
def nested_tuning():
    """Record the tuning runs as (operator, nesting depth)."""
    tuned, depth, real = [], [0], tuner.tune_problem

    def tune_problem(tunable, *args, **options):
        tuned.append((tunable.name, depth[0]))
        depth[0] += 1
        try:
            return real(tunable, *args, **options)
        finally:
            depth[0] -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "tune_problem", tune_problem)
        yield tuned


def check_mode_on(folder):
    """Check that mode "on" tunes the called operator, and not the operators that it calls internally."""
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(a_group())
        stack.enter_context(tables_in(folder, mode="on"))
        for operator in OPERATORS:
            stack.enter_context(expert_support.restrict_space(operator))
        tuned = stack.enter_context(nested_tuning())
        layer = make_layer(group)
        layer.check({"y": layer.call().detach()})
        assert tuned == [("tp_moe", 0)]  # the all-gather of ids and routing weights is one of integers: it is not tuned
        sources = {problem.operator: choice.source for (problem, _), choice in group_state(group).choices.items()}
        assert sources["tp_moe"] == "cache" and "moe_ag_gemm" not in sources
        del group, layer


def test_mode_on(tmp_path):
    on_ranks(2, check_mode_on, tmp_path)


def check_mode_on_in_a_backward(folder):
    """Check that mode "on" tunes each gradient at its first use, and that the gradients are correct meanwhile."""
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(a_group())
        stack.enter_context(tables_in(folder, mode="on"))
        for operator in (*OPERATORS, "all_gather", "reduce_scatter"):
            stack.enter_context(expert_support.restrict_space(operator))
        store_entries(*entries(TUNED))
        tuned = stack.enter_context(nested_tuning())
        for call, expected in ((Sliced.call, ["moe_ag_gemm", "moe_gemm_rs"]), (call_stages, [])):
            tuned.clear()
            check_training(make_layer(group), call)
            assert [name for name, depth in tuned if name in OPERATORS and not depth] == expected
        sources = {(problem.operator, problem.layout): choice.source
                   for (problem, _), choice in group_state(group).choices.items()}
        assert sources["moe_ag_gemm", "kn"] == sources["moe_gemm_rs", "kn"] == "cache"
        del group


def test_mode_on_in_a_backward(tmp_path):
    on_ranks(2, check_mode_on_in_a_backward, tmp_path)


# ---- without ranks ----


@pytest.mark.parametrize(
    "operator, shapes, options, shape, layout",
    [
        ("moe_ag_gemm", ((4, 12), (4, 2), (3, 8, 12)), {}, (8, 16, 12, 3, 2), "none"),
        ("moe_ag_gemm", ((4, 12), (4, 2), (3, 8, 12)), {"layout": "swiglu"}, (8, 16, 12, 3, 2), "swiglu"),
        ("moe_gemm_rs", ((16, 6), None, (4, 2), (3, 12, 6)), {}, (8, 12, 12, 3, 2), "nk"),
        ("moe_ag_gemm", ((4, 12), (4, 2), (3, 6, 12)), {"layout": "kn"}, (8, 12, 12, 3, 2), "kn"),
        ("moe_gemm_rs", ((16, 8), None, (4, 2), (3, 12, 8)), {"layout": "kn"}, (8, 12, 16, 3, 2), "kn"),
        ("tp_moe", ((4, 12), (4, 2), (4, 2), (3, 8, 12), (3, 12, 4)), {}, (8, 12, 8, 3, 2), "swiglu"),
        ("tp_moe", ((4, 12), (4, 2), (4, 2), (3, 4, 12), (3, 12, 4)), {}, (8, 12, 8, 3, 2), "none"),
    ],
)
def test_explain_infers_sizes_from_shapes(operator, shapes, options, shape, layout):
    result = explain(operator, *shapes, world_size=2, **options)
    assert (result.problem.shape, result.problem.layout, result.source) == (shape, layout, "default")
    assert result.problem == explain(operator, *shape, layout=layout, world_size=2).problem
    tensors = [None if shape is None else torch.empty(shape) for shape in shapes]
    assert explain(getattr(tdkernels, operator), *tensors, world_size=2, **options).problem.shape == shape
    assert result.config.tiles is not None


@pytest.mark.parametrize(
    "operator, shapes, message",
    [
        ("moe_ag_gemm", ((4, 12), (4, 2)), "the operands are x, topk_ids, w, not"),
        ("moe_ag_gemm", ((4, 12), (4, 2), (3, 8, 11)), "do not fit"),
        ("moe_gemm_rs", ((15, 6), (4, 2), (3, 12, 6)), "do not fit"),
        ("tp_moe", ((4, 12), (4, 2), (4, 2), (3, 9, 12), (3, 12, 4)), "do not fit"),
        ("tp_moe", ((4, 12), (4, 2), (4, 2), (3, 8, 12)), "the operands are x, topk_ids, topk_weights, w_gate_up"),
    ],
)
def test_explain_rejects_mismatched_shapes(operator, shapes, message):
    with pytest.raises(ValueError, match=message):
        explain(operator, *shapes, world_size=2)


def test_torch_config_is_illegal_if_torch_does_not_support_it():
    with expert_support.fake_h200():
        problem = Problem("tp_moe", "NVIDIA H200", 2, 2, "bfloat16", "swiglu", (64, 4096, 28, 8, 2))
        op = tunable("tp_moe")
        assert "multiple of 16 bytes" in op.illegal(TORCH, problem, expert_support.GPU)
        assert op.illegal(op.default(problem, expert_support.GPU), problem, expert_support.GPU) is None
        fp16_problem = Problem("tp_moe", "NVIDIA H200", 2, 2, "float16", "swiglu", (64, 4096, 256, 8, 2))
        assert "needs bfloat16" in op.illegal(TORCH, fp16_problem, expert_support.GPU)


# (ranks, M, N, K, experts, top-k) of a GEMM; for a layer M x N x K is M x I x H.
SIZES = [(2, 64, 64, 64, 4, 2), (8, 8192, 14336, 4096, 8, 2), (4, 512, 2048, 7168, 256, 8), (3, 96, 312, 48, 5, 5)]


@pytest.mark.parametrize("operator, layout", [*((name, tunable(name).layouts[0]) for name in OPERATORS), *GRADIENTS])
def test_estimates(operator, layout):
    swap = operator != "moe_ag_gemm"
    sizes = [(ranks, layout, m, k if swap else n, n if swap else k, *rest) for ranks, m, n, k, *rest in SIZES]
    with expert_support.fake_h200():
        expert_support.check_estimates(operator, sizes)


def test_more_stages_are_faster_for_many_rows_per_expert():
    """With few rows per expert, each stage is bound by reading the weights again."""
    with expert_support.fake_h200():
        op, default = tunable("moe_ag_gemm"), MoeTpConfig(tiles=Tiles(), chunk_rows=128)
        best = {}
        for tokens in (64, 32768):
            problem = Problem("moe_ag_gemm", "NVIDIA H200", 8, 8, "bfloat16", "swiglu", (tokens, 28672, 4096, 8, 2))
            times = {
                stages: op.estimate_ms(
                    MoeTpConfig("fused", default.tiles, 16, 128, stages), problem, expert_support.H200
                )
                for stages in (1, 2, 4)
            }
            best[tokens] = min(times, key=times.get)
        assert best[64] == 1 < best[32768]


@pytest.mark.parametrize("operator, layout", [
    ("tp_moe", "none"), ("moe_ag_gemm", "swiglu_interleaved"), ("moe_gemm_rs", "nk"), *GRADIENTS,
])
def test_call_launches_the_precompiled_kernels(operator, layout):
    shape = 64, 128, 64, 4, 2
    problem = Problem(operator, "cpu", 2, 2, "bfloat16", layout, shape)
    op, config = tunable(operator), MoeTpConfig(tiles=Tiles(64, 64, 64))
    first, second = tp_moe_launch_ag_gemm, tp_moe_launch_gemm_rs
    with pytest.MonkeyPatch.context() as patch, recorded_launches(first) as gate_up, recorded_launches(second) as down:
        patch.setattr(gpu, "has_tma", lambda device: True)
        operands = op.operands(problem, torch.device("cpu"), torch.Generator())
        x, *_, weights, w = operands if operator != "tp_moe" else (operands[0], *operands[2:4])
        routing = op._unrouted(problem, config, x.device)
        activation = None if layout in ("nk", "kn", "none") else layout
        if operator != "moe_gemm_rs":
            first.launch(x, w, routing, config, activation)
        if operator != "moe_ag_gemm":
            w_down, topk_weights = operands[-1], None if layout == "kn" else torch.ones(64, 2)
            second.launch(x.new_empty(128, w_down.shape[2]), w_down, routing, topk_weights, config)
        launched = [*gate_up, *down]
        gate_up.clear(), down.clear()
        op.compile([tensor.to("meta") for tensor in operands], problem, config)
        compiled = [*gate_up, *down]
    assert len(launched) == len(compiled) == (2 if operator == "tp_moe" else 1)
    for one, other in zip(launched, compiled, strict=True):
        expert_support.assert_same_code(one, other)
