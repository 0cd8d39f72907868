"""Tuning tp_moe and its halves, and calls that take what was tuned: forward and backward, by our kernels or torch's."""

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
from tests.autotune.test_selection import counted, tables_in, tune_by_hand
from tests.ops.experts.tp_moe.oracle import BF16, FP32, Sliced
from tests.support.aot import recorded_launches
from tests.support.moe_oracle import NAMES
from tests.support.ranks import a_group, device, on_ranks

TILES = Tiles(32, 32, 32, num_warps=4, num_stages=2)
TUNED = MoeTpConfig(tiles=TILES, num_comm_sms=1, chunk_rows=16, stages=2)
EXPLICIT = MoeTpConfig(tiles=TILES, num_comm_sms=1, chunk_rows=32, stages=1)
TORCH = MoeTpConfig(method="torch")
# Tokens, H and I or N and K, experts and choices of the whole problem. In fp32 so many that errors are those of sums:
# with a few elements plain torch happens to be exact on some CPUs.
PROBLEMS = [
    ("tp_moe", (16, 96, 64, 2, 1), "swiglu", FP32),
    ("moe_ag_gemm", (8, 12, 16, 2, 1), "swiglu_interleaved", BF16),
    ("moe_gemm_rs", (8, 12, 6, 2, 1), "nk", BF16),
    ("moe_ag_gemm", (8, 32, 16, 3, 2), "kn", BF16),
    ("moe_gemm_rs", (8, 16, 32, 3, 2), "kn", BF16),
]
OPERATORS = ["tp_moe", "moe_ag_gemm", "moe_gemm_rs"]
GRADIENTS = [("moe_ag_gemm", "kn"), ("moe_gemm_rs", "kn")]


def is_tuned(folder, *problem):
    operator, shape, layout, dtype = problem
    with cache_in(folder / f"rank{dist.get_rank()}"):
        return expert_support.tunes(operator, shape, layout, TUNED, dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem[0]}-{problem[2]}")
def test_all_ranks_find_the_same(tmp_path, problem):
    first, second = on_ranks(2, is_tuned, tmp_path, *problem)
    assert first == second


def refuses_what_is_wrong(operator):
    """A gradient's candidate is right in all that it leaves, or out."""
    group, op = dist.group.WORLD, tunable(operator)
    problem = problem_of(operator, (8, 16, 16, 3, 2), "kn", "bfloat16")
    operands = op.operands(problem, device(), torch.Generator(device()).manual_seed(1 + dist.get_rank()))
    reference = Reference(op, problem, operands, group)
    for config in (TUNED, TORCH):
        made = op.run(op.prepared(operands, problem, group, config), problem, group, config)
        tdkernels.synchronize()
        reference.check(op.comparable(made, problem))
        for part in made[:3] if operator == "moe_ag_gemm" else [made]:
            right = part.clone()
            part.mul_(1.25)
            with pytest.raises(ArithmeticError, match="wrong: errors"):
                reference.check(op.comparable(made, problem))
            part.copy_(right)


@pytest.mark.parametrize("operator", ["moe_ag_gemm", "moe_gemm_rs"])
def test_what_is_wrong_in_a_gradient(operator):
    on_ranks(2, refuses_what_is_wrong, operator)


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


def test_problems_that_there_are_not():
    on_ranks(2, expert_support.are_refused, BAD)


# ---- what a call takes ----


def launches():
    """Within, the configs that the kernels run with."""
    return expert_support.recorded(
        (tp_moe_launch_ag_gemm, "launch", lambda args, options: args[3]),
        (tp_moe_launch_gemm_rs, "launch", lambda args, options: args[4]),
    )


def a_layer(group, **changes):
    return Sliced(**{**dict(tokens=4, k=1, experts=2, width=12, hidden=3, dtype=FP32, group=group), **changes})


def halves(layer, **options):
    """A layer by its halves, each called alone."""
    x, ids, weights, w_gate_up, w_down = layer.operands()
    h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation="swiglu", group=layer.group, **options)
    return tdkernels.moe_gemm_rs(h, routing, weights, w_down, group=layer.group, **options)


def entries(config, other=None, width=12, hidden=3, dtype="float32"):
    """For the sizes of ``a_layer``."""
    problems = {
        "tp_moe": (8, width, 2 * hidden, 2, 1), "moe_ag_gemm": (8, 4 * hidden, width, 2, 1),
        "moe_gemm_rs": (8, width, 2 * hidden, 2, 1),
    }
    configs = {"moe_gemm_rs": other or config}
    return [entry_of(configs.get(operator, config), operator, shape, "swiglu" if operator != "moe_gemm_rs" else None,
                     dtype=dtype) for operator, shape in problems.items()]


def take_the_entry(folder):
    """Forward in the tuned config, backward in the default, of which nothing is known; later calls ask nobody; an
    explicit config wins."""
    rows = MoeTpConfig(tiles=Tiles(32, 64, 32, num_warps=4, num_stages=2), chunk_rows=16)
    with a_group() as group, tables_in(folder):
        tune_by_hand(*entries(TUNED, rows))
        layer, state = a_layer(group), group_state(group)
        with launches() as ran:
            layer.check(layer.run())
        assert ran[:2] == [("launch", TUNED)] * 2 and len(ran) == 4
        default = tunable("moe_ag_gemm").default(problem_of("moe_ag_gemm", (8, 12, 12, 2, 1)), layer.ids.device)
        assert {config for _, config in ran[2:]} == {default}
        with launches() as ran:
            layer.check({"y": halves(layer).detach()})
        assert [config for _, config in ran] == [TUNED, rows]
        assert {(problem.operator, choice.source) for (problem, _), choice in state.choices.items()
                if problem.operator in OPERATORS and problem.layout != "kn"
                } == {(operator, "cache") for operator in OPERATORS}
        with launches() as ran, counted(state, "exchange") as exchanges, counted(selection, "look_up") as lookups:
            layer.check({"y": layer.call().detach()})
            assert (exchanges, lookups) == ([0], [0])
        known = dict(state.choices)
        with launches() as ran:
            for y in (layer.call(config=EXPLICIT), halves(layer, config=EXPLICIT)):
                layer.check({"y": y.detach()})
        assert [config for _, config in ran] == [EXPLICIT] * 4 and state.choices == known
        asked = explain("moe_ag_gemm", *(layer.operands()[i] for i in (0, 1, 3)), layout="swiglu", group=group)
        assert (asked.source, asked.config) == ("cache", TUNED)
        del group, layer, state, y


def test_a_call_takes_what_was_tuned(tmp_path):
    on_ranks(2, take_the_entry, tmp_path)


def take_torch(folder):
    """Its gradients are torch's, too. Of sizes and a type that torch's product takes on a GPU."""
    with a_group() as group, tables_in(folder):
        wide = {"width": 16, "hidden": 8, "dtype": BF16}
        tune_by_hand(*entries(TORCH, width=16, hidden=8, dtype="bfloat16"))
        for layer, call in ((a_layer(group, **wide), None), (a_layer(group, seed=1, **wide), halves)):
            layer.require()
            with launches() as ran:
                y = layer.call() if call is None else call(layer)
                y.backward(layer.dy)
            layer.check({"y": y.detach(), **layer.gradients()})
            assert not ran
        with launches() as ran:  # of another layout nothing is known
            layer = a_layer(group, activation="swiglu_interleaved", **wide)
            layer.check({"y": layer.call().detach()})
        assert len(ran) == 2
        text = str(explain("tp_moe", *a_layer(group, **wide).operands(), group=group))
        assert "tp_moe 8x16x16x2x1 bfloat16 swiglu on 2 x" in text and "  config      method=torch" in text
        assert "  runs        torch collective and grouped matmul" in text
        del group, layer, y


def test_a_call_takes_torchs_sequence(tmp_path):
    on_ranks(2, take_torch, tmp_path)


# Of gradients' products. Chunks and stages are the routing's, whatever these say.
OF_DH = MoeTpConfig(tiles=Tiles(32, 64, 32, num_warps=4, num_stages=2), num_comm_sms=3, chunk_rows=48, stages=5)
OF_DX = MoeTpConfig(tiles=Tiles(64, 32, 32, num_warps=4, num_stages=2), chunk_rows=64, stages=1)
# Of a type and sizes that torch's product takes on a GPU.
WIDE = {"width": 16, "hidden": 8, "dtype": BF16}


def of_gradients(of_dh, of_dx, tokens=8):
    """Entries for the gradients of ``a_layer`` with WIDE, of so many tokens of all ranks."""
    return (
        entry_of(of_dh, "moe_ag_gemm", (tokens, 16, 16, 2, 1), "kn", dtype="bfloat16"),
        entry_of(of_dx, "moe_gemm_rs", (tokens, 16, 32, 2, 1), "kn", dtype="bfloat16"),
    )


def compiled(layer, config=None):
    """A layer as torch.compile has it called."""
    group, text = layer.group.group_name, as_argument(config)
    return tp_moe_compiled(*layer.operands(), layer.activation, group, text)


CALLS = {"tp_moe": Sliced.call, "halves": halves, "compiled": compiled}


def trained(layer, call, wanted=NAMES, **options):
    """The configs of the kernels that ran; y and the gradients that are wanted are right."""
    layer.require(wanted)
    with launches() as ran:
        y = call(layer, **options)
        y.backward(layer.dy)
    results = {"y": y.detach(), **layer.gradients()}
    assert results.keys() == {"y", *(f"d{name}" for name in wanted)}
    layer.check(results)
    return [config for _, config in ran]


def go_backward(folder, call):
    """Gradients run as was tuned for them; later calls ask nobody; an explicit config is that of the gradients, too."""
    call = CALLS[call]
    with a_group() as group, tables_in(folder, user=f"rank{dist.get_rank()}"):
        tune_by_hand(*entries(TUNED, width=16, hidden=8, dtype="bfloat16"), *of_gradients(OF_DH, OF_DX))  # on rank 0
        layer, state = a_layer(group, **WIDE), group_state(group)
        with counted(selection, "look_up") as lookups:
            assert trained(layer, call) == [TUNED, TUNED, OF_DH, OF_DX]
        assert (lookups[0] > 0) == (dist.get_rank() == 0)
        sources = {
            problem.operator: choice.source for (problem, _), choice in state.choices.items() if problem.layout == "kn"
        }
        assert sources == {"moe_ag_gemm": "cache", "moe_gemm_rs": "cache"}
        known = dict(state.choices)
        with counted(state, "exchange") as exchanges, counted(selection, "look_up") as lookups:
            assert trained(layer, call) == [TUNED, TUNED, OF_DH, OF_DX]
            assert (exchanges, lookups) == ([0], [0])
        assert trained(layer, call, config=EXPLICIT) == [EXPLICIT] * 4 and state.choices == known
        for name, expected in (
            ("x", [OF_DH, OF_DX]), ("topk_weights", [OF_DH]), ("w_gate_up", [OF_DH]), ("w_down", [OF_DH]),
        ):
            assert trained(layer, call, wanted=(name,))[2:] == expected, name
        with autotune.mode("off"):
            ran = trained(a_layer(group, **WIDE), call)
            assert len(ran) == 4 and not {TUNED, OF_DH, OF_DX} & set(ran[2:])
        del group, layer, state


@pytest.mark.parametrize("call", CALLS)
def test_gradients_take_what_was_tuned(tmp_path, call):
    on_ranks(2, go_backward, tmp_path, call)


def go_backward_by_the_routing(folder):
    """Three chunks and as many stages, as the forward has made them, by entries that say otherwise."""
    forward = MoeTpConfig(tiles=TILES, num_comm_sms=1, chunk_rows=16, stages=3)
    with a_group() as group, tables_in(folder):
        entry = entry_of(forward, "tp_moe", (80, 16, 16, 2, 1), dtype="bfloat16")
        tune_by_hand(entry, *of_gradients(OF_DH, OF_DX, tokens=80))
        layer = a_layer(group, tokens=40, **WIDE)
        assert trained(layer, Sliced.call) == [forward, forward, OF_DH, OF_DX]
        del group, layer


def test_gradients_keep_chunks_and_stages_of_the_forward(tmp_path):
    on_ranks(2, go_backward_by_the_routing, tmp_path)


def go_backward_by_torch(folder, which):
    """By torch for one gradient alone, whose other products are ours; of nothing else is anything known."""
    with a_group() as group, tables_in(folder):
        tune_by_hand(*of_gradients(*((TORCH, OF_DX) if which == "dh" else (OF_DH, TORCH))))
        for call in CALLS.values():
            layer = a_layer(group, **WIDE)
            forward, ran = trained(layer, call)[:2], trained(layer, call)
            assert ran == [*forward, OF_DX if which == "dh" else OF_DH]
            assert {config.method for config in forward} == {"fused"}
        del group, layer


@pytest.mark.parametrize("which", ["dh", "dx"])
def test_one_gradient_by_torch(tmp_path, which):
    on_ranks(2, go_backward_by_torch, tmp_path, which)


def go_backward_unevenly():
    """Ranks whose gradients are of other operators: named, on both."""
    with a_group() as group, autotune.mode("cached"):
        layer = a_layer(group, **WIDE)
        x, ids, weights, w_gate_up, w_down = layer.operands()
        h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation="swiglu", group=group)
        back = (w_gate_up, w_down)[group.rank()].transpose(1, 2)
        operator = ("moe_gemm_rs", "moe_ag_gemm")[group.rank()]
        with pytest.raises(ValueError, match="moe_gemm_rs.*moe_ag_gemm"):
            steps.config_of_gradient(operator, back, routing, None)
        del group, layer, routing


def test_gradients_that_differ():
    on_ranks(2, go_backward_unevenly)


@contextlib.contextmanager
def nested_tuning():
    """What is tuned within: (the operator, in how many others' tuning)."""
    found, depth, real = [], [0], tuner.tune_problem

    def tune_problem(tunable, *args, **options):
        found.append((tunable.name, depth[0]))
        depth[0] += 1
        try:
            return real(tunable, *args, **options)
        finally:
            depth[0] -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "tune_problem", tune_problem)
        yield found


def tune_in_a_call(folder):
    """In the mode "on", and only what the call is of: not what it calls in its turn, but for that itself."""
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(a_group())
        stack.enter_context(tables_in(folder, mode="on"))
        for operator in (*OPERATORS, "all_gather"):
            stack.enter_context(expert_support.space(operator))
        tuned = stack.enter_context(nested_tuning())
        layer = a_layer(group)
        layer.check({"y": layer.call().detach()})
        assert tuned == [("tp_moe", 0), ("all_gather", 0)]  # that of the weights
        found = {problem.operator: choice.source for (problem, _), choice in group_state(group).choices.items()}
        assert found["tp_moe"] == "cache" and "moe_ag_gemm" not in found
        del group, layer


def test_the_mode_on(tmp_path):
    on_ranks(2, tune_in_a_call, tmp_path)


def tune_in_a_backward(folder):
    """Each gradient when it is first asked for, and the gradients that were under way are right."""
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(a_group())
        stack.enter_context(tables_in(folder, mode="on"))
        for operator in (*OPERATORS, "all_gather", "reduce_scatter"):
            stack.enter_context(expert_support.space(operator))
        tune_by_hand(*entries(TUNED))
        tuned = stack.enter_context(nested_tuning())
        for call, expected in ((Sliced.call, ["moe_ag_gemm", "moe_gemm_rs"]), (halves, [])):
            tuned.clear()
            trained(a_layer(group), call)
            assert [name for name, depth in tuned if name in OPERATORS and not depth] == expected
        found = {(problem.operator, problem.layout): choice.source
                 for (problem, _), choice in group_state(group).choices.items()}
        assert found["moe_ag_gemm", "kn"] == found["moe_gemm_rs", "kn"] == "cache"
        del group


def test_the_mode_on_in_a_backward(tmp_path):
    on_ranks(2, tune_in_a_backward, tmp_path)


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
def test_explained_by_shapes(operator, shapes, options, shape, layout):
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
def test_shapes_that_do_not_fit(operator, shapes, message):
    with pytest.raises(ValueError, match=message):
        explain(operator, *shapes, world_size=2)


def test_what_cannot_run_is_no_candidate():
    with expert_support.an_h200():
        problem = Problem("tp_moe", "NVIDIA H200", 2, 2, "bfloat16", "swiglu", (64, 4096, 28, 8, 2))
        op = tunable("tp_moe")
        assert "multiple of 16 bytes" in op.illegal(TORCH, problem, expert_support.GPU)
        assert op.illegal(op.default(problem, expert_support.GPU), problem, expert_support.GPU) is None
        of_halves = Problem("tp_moe", "NVIDIA H200", 2, 2, "float16", "swiglu", (64, 4096, 256, 8, 2))
        assert "needs bfloat16" in op.illegal(TORCH, of_halves, expert_support.GPU)


# Of GEMMs like M x N x K; of a layer those are M x I x H.
SIZES = [(2, 64, 64, 64, 4, 2), (8, 8192, 14336, 4096, 8, 2), (4, 512, 2048, 7168, 256, 8), (3, 96, 312, 48, 5, 5)]


@pytest.mark.parametrize("operator, layout", [*((name, tunable(name).layouts[0]) for name in OPERATORS), *GRADIENTS])
def test_estimates(operator, layout):
    swap = operator != "moe_ag_gemm"
    sizes = [(ranks, layout, m, k if swap else n, n if swap else k, *rest) for ranks, m, n, k, *rest in SIZES]
    with expert_support.an_h200():
        expert_support.estimates_are_sensible(operator, sizes)


def test_more_stages_pay_where_experts_have_many_rows():
    """Of few rows each, reading the weights again is what takes time."""
    with expert_support.an_h200():
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
def test_what_is_compiled_ahead_is_what_a_call_launches(operator, layout):
    shape = 64, 128, 64, 4, 2
    problem = Problem(operator, "cpu", 2, 2, "bfloat16", layout, shape)
    op, config = tunable(operator), MoeTpConfig(tiles=Tiles(64, 64, 64))
    first, second = tp_moe_launch_ag_gemm, tp_moe_launch_gemm_rs
    with pytest.MonkeyPatch.context() as patch, recorded_launches(first) as rows, recorded_launches(second) as sums:
        patch.setattr(gpu, "has_tma", lambda device: True)
        operands = op.operands(problem, torch.device("cpu"), torch.Generator())
        x, *_, weights, w = operands if operator != "tp_moe" else (operands[0], *operands[2:4])
        routing = op._unrouted(problem, config, x.device)
        activation = None if layout in ("nk", "kn", "none") else layout
        gradients = tp_moe_launch_ag_gemm.Gradients(operands[1], torch.ones(64, 2)) if layout == "kn" else None
        if operator != "moe_gemm_rs":
            first.launch(x, w, routing, config, activation, gradients=gradients)
        if operator != "moe_ag_gemm":
            down, of_choices = operands[-1], None if layout == "kn" else torch.ones(64, 2)
            second.launch(x.new_empty(128, down.shape[2]), down, routing, of_choices, config)
        launched = [*rows, *sums]
        rows.clear(), sums.clear()
        op.compile([tensor.to("meta") for tensor in operands], problem, config)
        compiled = [*rows, *sums]
    assert len(launched) == len(compiled) == (2 if operator == "tp_moe" else 1)
    for one, other in zip(launched, compiled, strict=True):
        expert_support.same_code(one, other)
