"""group_gemm, a local operator: forward and all gradients against one GEMM per group."""

import itertools
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels import GroupGemmConfig, Tiles
from tdkernels import lang as td
from tdkernels.ops.experts.grouped_gemm import launch, launch_weights
from tdkernels.ops.experts.grouped_gemm.dispatch import ends_of
from tdkernels.ops.experts.grouped_gemm.layout import weight_layout
from tdkernels.ops.experts.grouped_gemm.tile import rows_of_groups
from tests.ops.dense import cases as dense
from tests.ops.experts.grouped_gemm.oracle import Grouped, counts_within
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import DEVICE, device, on_ranks

BF16, FP16, FP32 = dense.DTYPES
ACTIVATIONS = [None, "swiglu", "swiglu_interleaved"]
# (splits, n, k): groups that begin inside a tile, end at a tile boundary, are empty, or are the only one; n and k with
# TMA (multiples of 8) and without, multiples of a block and not. Each problem has a group with many rows, since for few
# rows a library sums in another order, whose fp32 error is less than half as large.
PROBLEMS = [
    ([37, 0, 70, 1], 48, 51), ([0, 5, 0, 64, 0], 70, 64), ([29], 34, 130), ([3, 1, 30], 64, 40), ([0, 0, 0], 8, 8),
]
# With an activation the interpreter computes the gradient row by row, so these problems have few rows.
ACTIVATION_PROBLEMS = [([9, 0, 20, 1], 48, 51), ([0, 17, 0], 70, 64), ([16], 130, 40), ([0, 0, 0], 8, 8)]
EXACT_PROBLEMS = [
    ([1], 1, 1), ([1, 1], 1, 17), ([0, 1], 17, 1), ([65, 64, 63, 0, 1], 65, 66), ([2, 130], 24, 136), ([70], 64, 128),
]
CONFIGS = {
    "small tiles": GroupGemmConfig(tiles=Tiles(16, 16, 16, 1, 1, 1)),
    "small tiles in groups of two rows": GroupGemmConfig(tiles=Tiles(16, 16, 32, 2, 4, 2)),
    "wide tiles": GroupGemmConfig(tiles=Tiles(32, 256, 16, 8, 8, 2)),
    "high tiles": GroupGemmConfig(tiles=Tiles(128, 32, 64, 4, 4, 2)),
}
TORCH = GroupGemmConfig(method="torch")

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", dense.DTYPES, ids=str)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")


def computes(dtype, problems, activation=None, config=None, **options):
    for seed, (splits, n, k) in enumerate(problems):
        problem = Grouped(dtype, splits, n, k, activation, seed=seed, **options)
        results = problem.run(config=config)
        assert set(results) == {"output", "dx", "dw"}
        problem.check(results)


def computes_forward_only(dtype, problems, activation, config):
    """Check the forward only, since the config does not apply to gradients."""
    for splits, n, k in problems:
        problem = Grouped(dtype, splits, n, k, activation)
        with torch.no_grad():
            problem.check({"output": problem.call(config=config)})


@each_activation
@each_dtype
def test_output_and_gradients(dtype, activation):
    on_ranks(1, computes, dtype, ACTIVATION_PROBLEMS if activation else PROBLEMS, activation, spare=3)


@each_dtype
def test_exact_values(dtype):
    on_ranks(1, computes, dtype, EXACT_PROBLEMS, exact=True)


@each_activation
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config, activation):
    on_ranks(1, computes_forward_only, BF16, [([37, 0, 18, 1], 40, 35), ([20], 34, 64)], activation, CONFIGS[config])


@each_activation
def test_torch(activation):
    on_ranks(1, computes, BF16, [([7, 0, 8, 1], 48, 64)], activation, TORCH, spare=3)


@each_activation
def test_no_rows(activation):
    on_ranks(1, computes, BF16, [([0, 0], 6, 5), ([0], 2, 1)], activation)
    on_ranks(1, computes, BF16, [([0, 0], 16, 8), ([0], 16, 16)], activation, TORCH)


def torch_backend_rejects_misaligned_rows():
    x, w = torch.zeros(3, 8, device=device(), dtype=BF16), torch.zeros(1, 6, 8, device=device(), dtype=BF16)
    with pytest.raises(ValueError, match=r"multiple of 16 bytes; w is \[1, 6, 8\] of torch.bfloat16"):
        tdkernels.group_gemm(x, w, torch.tensor([3], device=device()), config=TORCH)


@pytest.mark.skipif(DEVICE != "cuda", reason="torch's grouped GEMM for GPUs")
def test_torch_rejects_misaligned_rows():
    on_ranks(1, torch_backend_rejects_misaligned_rows)


# ---- splits ----


def leaves_other_rows_untouched(activation, config):
    """Rows that belong to no group stay NaN in the outputs; reading NaN from unwritten memory would be visible, too."""
    problem = Grouped(BF16, [5, 0, 11], 24, 20, activation, spare=40)
    with poisoned_outputs():
        results = problem.run(config=config)
    problem.check(results)
    for name in ("output", "dx"):
        assert results[name][problem.used :].isnan().all(), f"{name} has rows that belong to no group"


@each_activation
@pytest.mark.parametrize("config", [None, CONFIGS["small tiles"]], ids=["default", "small tiles"])
def test_unused_rows_are_neither_read_nor_written(activation, config):
    on_ranks(1, leaves_other_rows_untouched, activation, config)


def clamps_invalid_splits(config):
    for splits, rows in [([3, 100, 7], 20), ([3, -5, 4], 9), ([-1, 50, -2, 2], 10), ([20, 1], 20), ([6, 6], 0)]:
        problem = Grouped(BF16, splits, 16, 8, rows=rows)
        problem.check(problem.run(config=config))
    problem = Grouped(BF16, [3, 100, -7], 16, 8, "swiglu", rows=20)
    problem.check(problem.run(config=config))


@pytest.mark.parametrize("config", [None, TORCH], ids=["default", "torch"])
def test_splits_are_clamped(config):
    on_ranks(1, clamps_invalid_splits, config)


@td.jit
def _rows_kernel(splits_ptr, out_ptr, num_experts, R, EXPERTS: tl.constexpr):
    experts = tl.arange(0, EXPERTS)
    tl.store(out_ptr + experts, rows_of_groups(splits_ptr, num_experts, R, EXPERTS))


def computes_rows_of_groups():
    large = 2**31 - 1
    for splits in (
        [3, 0, 4], [large, large, 5, 6], [large] * 5, [-large - 1, -1, 2, large], [7, 4, 1], [2**40, 5],
        [2**62, 2**62, 2**62, 2**62, 5],
    ):
        for dtype in (torch.int32, torch.int64):
            if dtype == torch.int32 and max(splits) > large:
                continue
            experts = triton.next_power_of_2(len(splits))
            out = torch.full((experts,), -1, dtype=torch.int32, device=device())
            _rows_kernel[(1,)](torch.tensor(splits, dtype=dtype, device=device()), out, len(splits), 10, experts)
            expected = counts_within(splits, 10) + [0] * (experts - len(splits))
            assert out.tolist() == expected, f"{splits} as {dtype}"


def test_rows_of_groups_are_clamped():
    on_ranks(1, computes_rows_of_groups)


def computes_ends_of_groups():
    for splits in ([20, 100, -5, 7], [3, -5, 7], [2**31 - 1] * 3, [0], [4, 0, 4, 4, 1], [2**40, 5], [2**62] * 4 + [5]):
        splits = torch.tensor(splits, dtype=torch.int32 if max(splits) < 2**31 else torch.int64, device=device())
        for rows in (0, 8, 20):
            ends = launch.ends_of_groups(splits, torch.empty(rows, 3, device=device()))
            assert ends.dtype == torch.int32 and ends.tolist() == ends_of(splits, rows).tolist(), (splits, rows)


def test_ends_of_groups():
    on_ranks(1, computes_ends_of_groups)


def test_ends_of_groups_are_clamped():
    """torch's grouped GEMM on a GPU does not check the ends of groups, so they are clamped before the call."""
    assert ends_of(torch.tensor([3, 100, -5, 7]), 20).tolist() == [3, 20, 20, 20]
    assert ends_of(torch.tensor([3, -5, 7], dtype=torch.int32), 20).tolist() == [3, 3, 10]


def takes_splits_in_layout(layout):
    problem = Grouped(FP16, [7] * 3 if layout == "expanded" else [7, 0, 12], 16, 24, "swiglu")
    if layout == "int64":
        problem.splits = problem.splits.long()
    elif layout == "strided":
        problem.splits = torch.stack([problem.splits, problem.splits + 1], 1)[:, 0]
    else:
        problem.splits = torch.tensor([7, 0, 12], dtype=torch.int32, device=device())[:1].expand(3)
    problem.check(problem.run())


@pytest.mark.parametrize("layout", ["int64", "strided", "expanded"])
def test_splits(layout):
    on_ranks(1, takes_splits_in_layout, layout)


# ---- memory layouts: the same values with other strides, and NaN in between ----


def _strided(w, dim):
    """Return ``w`` as every second slice along ``dim`` of a tensor of twice the size."""
    return torch.stack([w, torch.full_like(w, torch.nan)], dim + 1).flatten(dim, dim + 1)[(slice(None),) * dim][
        (slice(None),) * dim + (slice(None, None, 2),)
    ]


W_LAYOUTS = {
    "transposed": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
    "strided rows": lambda w: _strided(w, 1),
    "strided columns": lambda w: _strided(w, 2),
    "strided experts": lambda w: _strided(w, 0),
    "experts as second dimension": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed and strided": lambda w: _strided(_strided(w.transpose(1, 2), 0), 1).transpose(1, 2),
    "misaligned": lambda w: dense.misaligned(w, torch.nan),
}


def computes_with_w(layout, activation):
    for n, k in [(48, 64), (26, 35)][: 1 if activation else 2]:
        problem = Grouped(BF16, [3, 0, 8], n, k, activation)
        w = W_LAYOUTS[layout](problem.w.detach())
        assert torch.equal(w, problem.w)
        problem.w = w.requires_grad_()
        problem.check(problem.run())


@each_activation
@pytest.mark.parametrize("layout", W_LAYOUTS)
def test_layouts_of_w(layout, activation):
    on_ranks(1, computes_with_w, layout, activation)


def computes_with_layout(operand, layout):
    problem = Grouped(BF16, [3, 0, 8], 48, 64, "swiglu", spare=2)
    original = getattr(problem, operand).detach()
    changed = dense.LAYOUTS[layout](original, torch.nan)
    setattr(problem, operand, changed.requires_grad_(operand == "x"))
    problem.check(problem.run())


@pytest.mark.parametrize("layout", dense.LAYOUTS)
@pytest.mark.parametrize("operand", ["x", "dy"])
def test_layouts_of_rows(operand, layout):
    on_ranks(1, computes_with_layout, operand, layout)


@pytest.mark.parametrize(
    "layout, copied",
    [("transposed", ["swiglu"]), ("strided experts", ["swiglu"]), ("strided rows", []), ("contiguous", [])],
)
def test_w_is_copied_only_if_required(layout, copied):
    contiguous = torch.randn(3, 8, 5)
    w = contiguous if layout == "contiguous" else W_LAYOUTS[layout](contiguous)
    for activation in ACTIVATIONS:
        result = weight_layout(w, activation)[0]
        assert (result is not w) == (activation in copied), activation
    back = w.transpose(1, 2)  # the operand of the gradient of x
    assert weight_layout(back)[0] is back


# ---- autograd ----


def computes_only_required_gradients():
    for names in itertools.chain.from_iterable(itertools.combinations(("x", "w"), size) for size in range(3)):
        problem = Grouped(FP32, [6, 0, 5], 10, 13, "swiglu")
        problem.x.requires_grad_("x" in names)
        problem.w.requires_grad_("w" in names)
        with (
            mock.patch.object(launch, "product", wraps=launch.product) as product,
            mock.patch.object(launch_weights, "weight_gradient", wraps=launch_weights.weight_gradient) as gradient,
        ):
            results = problem.run()
        assert set(results) == {"output", *(f"d{name}" for name in names)}
        problem.check(results)
        assert product.call_count == 1 + ("x" in names) and gradient.call_count == ("w" in names)
        saves_pre = product.call_args_list[0].args[4]
        assert saves_pre == bool(names), "the input of SwiGLU is saved only for gradients"


def computes_without_grad():
    for mode in (torch.no_grad, torch.inference_mode):
        problem = Grouped(FP32, [6, 5], 10, 13, "swiglu_interleaved")
        with mode():
            output = problem.call()
        assert not output.requires_grad
        problem.check({"output": output})
        x, w = problem.x.detach(), problem.w.detach()
        assert launch.product(x, w, problem.splits, problem.activation)[1] is None


def uses_an_output_twice():
    problem = Grouped(FP32, [6, 5], 10, 13, "swiglu")
    output = problem.call()
    ((output * problem.dy / 2).sum() + (output * problem.dy / 2).sum()).backward()
    problem.check(problem.gradients())


def goes_backward_twice():
    problem = Grouped(BF16, [6, 5], 10, 13, "swiglu")
    output = problem.call()
    output.backward(problem.dy, retain_graph=True)
    output.backward(problem.dy)
    problem.check({name: gradient / 2 for name, gradient in problem.gradients().items()})


def can_detect_anomalies():
    """Rows that belong to no group do not let ``torch.autograd.detect_anomaly`` report NaN."""
    for activation in (None, "swiglu"):
        problem = Grouped(FP32, [6, 0, 5], 10, 13, activation, spare=20)
        with poisoned_outputs(), torch.autograd.detect_anomaly():
            results = problem.run()
        problem.check(results)
        assert not results["dx"][problem.used :].any()


def takes_an_expanded_gradient():
    """``output.sum().backward()`` passes a gradient with strides of zero."""
    problem = Grouped(FP32, [6, 5], 10, 13, exact=True)
    problem.dy = torch.ones_like(problem.dy)
    expected = problem.run()
    problem.dy = torch.ones((), device=device()).expand(problem.dy.shape)
    for name, result in problem.run().items():
        assert torch.equal(result, expected[name]), name


def recomputes_in_a_checkpoint():
    problem = Grouped(BF16, [6, 5], 10, 13, "swiglu")
    output = checkpoint(problem.call, use_reentrant=False)
    output.backward(problem.dy)
    problem.check({"output": output, **problem.gradients()})


def follows_autocast():
    """With fp32 parameters under autocast, the call computes in bf16 and the gradients are in fp32."""
    problem = Grouped(BF16, [6, 15], 26, 35, "swiglu")
    problem.x, problem.w = (t.detach().float().requires_grad_() for t in (problem.x, problem.w))
    with torch.autocast(device().type, BF16):
        output = problem.call()
    assert output.dtype == BF16
    output.backward(problem.dy)
    gradients = problem.gradients()
    assert {gradient.dtype for gradient in gradients.values()} == {FP32}
    problem.check({"output": output, **{name: gradient.bfloat16() for name, gradient in gradients.items()}})


def rejects_second_derivatives():
    for activation in ACTIVATIONS:
        problem = Grouped(FP32, [6, 5], 10, 13, activation)
        output = problem.call()
        with pytest.raises(RuntimeError, match="group_gemm: second derivatives"):
            torch.autograd.grad(output, problem.x, problem.dy, create_graph=True)


def rejects_forward_mode():
    problem = Grouped(FP32, [6, 5], 10, 13)
    x, w = problem.x.detach(), problem.w.detach()
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="jvp"):
            tdkernels.group_gemm(forward_ad.make_dual(x, torch.ones_like(x)), w, problem.splits)


@pytest.mark.parametrize(
    "what",
    [
        computes_only_required_gradients, computes_without_grad, uses_an_output_twice, goes_backward_twice,
        takes_an_expanded_gradient, can_detect_anomalies, recomputes_in_a_checkpoint, follows_autocast,
        rejects_second_derivatives, rejects_forward_mode,
    ],
    ids=lambda f: f.__name__,
)
def test_autograd(what):
    on_ranks(1, what)


# ---- torch.compile ----


def _expert_layer(x, w, down, splits):
    h = tdkernels.group_gemm(x, w, splits, activation="swiglu_interleaved")
    return tdkernels.group_gemm(h, down, splits, config=CONFIGS["wide tiles"])


def compiled_equals_eager():
    torch._dynamo.reset()
    # On the CPU inductor needs a C++ compiler and much time. aot_eager traces the operator into the same graph.
    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(_expert_layer, fullgraph=True, backend=backend)
    for splits in ([3, 0, 2], [4, 1, 3]):  # the second number of rows was not traced
        problem = Grouped(FP32, splits, 12, 7)
        down = torch.randn(3, 5, 6, device=device(), requires_grad=True)
        found = []
        for function in (compiled, _expert_layer):
            output = function(problem.x, problem.w, down, problem.splits)
            found.append([output.detach(), *torch.autograd.grad(output.square().sum(), [problem.x, problem.w, down])])
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_fullgraph():
    on_ranks(1, compiled_equals_eager)


def passes_opcheck():
    """Check schema and fake implementation with opcheck, with and without an activation."""
    for activation in ("", "swiglu"):
        problem = Grouped(FP32, [3, 2], 12, 7, activation or None)
        x, w = problem.x.detach(), problem.w.detach()
        pre = torch.randn(5, 12 if activation else 0, device=device())
        calls = {
            "group_gemm": (x, w, problem.splits, activation, True, ""),
            "group_gemm_backward": (problem.dy, x, w, problem.splits, pre, activation, not activation, True),
        }
        for name, arguments in calls.items():
            torch.library.opcheck(
                getattr(torch.ops.tdkernels, name).default, arguments, test_utils=("test_schema", "test_faketensor")
            )


def test_opcheck():
    on_ranks(1, passes_opcheck)


# ---- invalid calls ----

_X, _W, _SPLITS = torch.zeros(5, 7), torch.zeros(3, 4, 7), torch.zeros(3, dtype=torch.int32)
INVALID_CALLS = {
    "x is not a tensor": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, not list"),
    "w is not a tensor": ({"w": None}, TypeError, "w must be a torch.Tensor, not NoneType"),
    "splits are not a tensor": ({"splits": [1, 2, 3]}, TypeError, "splits must be a torch.Tensor, not list"),
    "x in fp64": ({"x": _X.double()}, TypeError, "x is torch.float64; bfloat16, float16 and float32"),
    "w in int8": ({"w": _W.to(torch.int8)}, TypeError, "w is torch.int8"),
    "two dtypes": ({"w": _W.half()}, TypeError, "x is torch.float32 but w is torch.float16"),
    "splits in fp32": ({"splits": torch.zeros(3)}, TypeError, "splits is torch.float32; int32 and int64"),
    "splits in int16": ({"splits": _SPLITS.short()}, TypeError, "splits is torch.int16"),
    "w on another device": ({"w": _W.to("meta")}, ValueError, "but w is on meta"),
    "splits on another device": ({"splits": _SPLITS.to("meta")}, ValueError, "but splits is on meta"),
    "unsupported device": (
        {"x": _X.to("meta"), "w": _W.to("meta"), "splits": _SPLITS.to("meta")}, ValueError, "x is on meta; cpu and cu",
    ),
    "x of one dimension": ({"x": _X[0]}, ValueError, r"x must have 2 dimensions .*\[7\]"),
    "x of three dimensions": ({"x": _X[None]}, ValueError, r"x must have 2 dimensions .*\[1, 5, 7\]"),
    "w of two dimensions": ({"w": _W[0]}, ValueError, r"w must have 3 dimensions .*\[4, 7\]"),
    "another K": ({"x": torch.zeros(5, 8)}, ValueError, r"x \[5, 8\] and of w \[3, 4, 7\] must be the same K"),
    "no experts": ({"w": _W[:0], "splits": _SPLITS[:0]}, ValueError, r"w \[0, 4, 7\] has an empty dimension"),
    "N of 0": ({"w": _W[:, :0]}, ValueError, r"w \[3, 0, 7\] has an empty dimension"),
    "K of 0": ({"x": _X[:, :0], "w": _W[:, :, :0]}, ValueError, r"w \[3, 4, 0\] has an empty dimension"),
    "splits of two dimensions": ({"splits": _SPLITS[None]}, ValueError, r"splits must be \[E\] .*\[1, 3\]"),
    "too few splits": ({"splits": _SPLITS[:2]}, ValueError, r"splits must be \[E\] with the E = 3 of w, .*\[2\]"),
    "another activation": ({"activation": "gelu"}, ValueError, "activation must be one of .*not 'gelu'"),
    "an odd N": (
        {"w": torch.zeros(3, 5, 7), "activation": "swiglu"}, ValueError, r"w \[3, 5, 7\] must have an even N for swi",
    ),
    "another config": ({"config": {"tiles": None}}, TypeError, "config must be a GroupGemmConfig or None, not dict"),
    "another method": ({"config": GroupGemmConfig(method="loop")}, ValueError, 'method must be "fused" or "torch"'),
    "bad tile": ({"config": GroupGemmConfig(tiles=Tiles(block_m=48))}, ValueError, "block_m must be a power of two"),
}


def rejects_invalid_call(changes, error, message):
    def to_device(value):
        return value.to(device()) if isinstance(value, torch.Tensor) and value.device.type != "meta" else value

    arguments = {name: to_device(value) for name, value in {"x": _X, "w": _W, "splits": _SPLITS, **changes}.items()}
    with mock.patch.object(launch, "product") as product, pytest.raises(error, match=f"group_gemm: .*{message}"):
        tdkernels.group_gemm(**arguments)
    assert not product.called


@pytest.mark.parametrize("case", INVALID_CALLS)
def test_invalid_calls(case):
    on_ranks(1, rejects_invalid_call, *INVALID_CALLS[case])


@needs_gpu
def test_torch_rejects_unsupported_dtypes():
    message = 'method "torch" needs bfloat16 and sm_90 or sm_100'
    on_ranks(1, rejects_invalid_call, {"config": TORCH}, ValueError, message)


# ---- on GPUs ----

LARGE = [([700, 0, 1300, 1, 64, 500, 128, 300], 1536, 1024)]


@needs_gpu
@each_activation
def test_many_tiles(activation):
    on_ranks(1, computes, BF16, LARGE, activation, spare=7)


@needs_gpu
def test_torch_many_tiles():
    on_ranks(1, computes, BF16, LARGE, None, TORCH, spare=7)


def replays_with_other_splits():
    problems = [Grouped(BF16, [200, 0, 100], 256, 320, "swiglu", seed=seed) for seed in range(3)]
    problems[1:] = [Grouped(BF16, splits, 256, 320, "swiglu", spare=300 - sum(splits), seed=seed)
                    for seed, splits in ((1, [1, 250, 49]), (2, [0, 0, 130]))]
    first, operands = problems[0], ("x", "w", "splits", "dy")
    first.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = first.run()
    for problem in problems:
        with torch.no_grad():
            for name in operands:
                getattr(first, name).copy_(getattr(problem, name))
        graph.replay()
        problem.check(results)


@needs_gpu
def test_graph_reads_current_splits():
    on_ranks(1, replays_with_other_splits)
