"""group_gemm of scaled fp8 operands, against the dequantized computation in fp64."""

import math
from unittest import mock

import pytest
import torch

import tdkernels
from tdkernels import GroupGemmConfig, Tiles
from tdkernels.ops.experts.grouped_gemm import launch, layout
from tests.ops.dense import cases as dense
from tests.ops.experts.grouped_gemm.scaled_cases import E4M3, E5M2, ScaledGrouped
from tests.ops.experts.grouped_gemm.test_grouped_gemm import ACTIVATIONS, W_LAYOUTS
from tests.support.ranks import DEVICE, device, on_ranks
from tests.support.subset import THOROUGH, pairs

SCALINGS = [
    ("tensor", "tensor"), ("tensor", "expert"), ("tensor", "row"), ("row", "tensor"), ("row", "expert"), ("row", "row"),
    ("block", "block"),
]
# (splits, n, k): groups that begin inside a tile, are empty, or are the only one; n and k that end inside a block of
# scales. With "swiglu" the rows of up begin inside a block of scales; with n = 320 each of their tiles is in one block,
# otherwise tiles cross the end of a block.
PROBLEMS = [
    ([37, 0, 30, 1], 48, 272), ([0, 17, 0], 272, 144), ([5, 0, 3], 320, 144), ([9, 4], 144, 80), ([5, 3], 2, 16),
    ([0, 0, 0], 8, 16),
]
CONFIGS = {
    "small tiles": GroupGemmConfig(tiles=Tiles(16, 16, 32, 1, 1, 1)),
    "wide tiles": GroupGemmConfig(tiles=Tiles(32, 256, 64, 8, 8, 2)),
    "high tiles": GroupGemmConfig(tiles=Tiles(128, 32, 128, 4, 4, 2)),
}
if DEVICE == "cpu":
    CONFIGS["torch"] = GroupGemmConfig(method="torch")

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)


def computes(problems, scaling=("row", "row"), activation=None, config=None, fast=False, **options):
    """Check the output of each problem, twice: the second call comes from the cache."""
    for seed, (splits, n, k) in enumerate(problems):
        problem = ScaledGrouped(splits, n, k, scaling, activation, seed=seed, **options)
        for _ in range(2):
            output = problem.call(config=config, use_fast_accum=fast)
            problem.check(output)
            output.fill_(math.nan)


@each_activation
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_scalings(scaling, activation):
    on_ranks(1, computes, PROBLEMS, scaling, activation, spare=3)


@pytest.mark.parametrize(
    "config, scaling, activation", pairs(list(CONFIGS), ["row", "block"], ACTIVATIONS, everything=THOROUGH), ids=str
)
def test_configs(config, scaling, activation):
    on_ranks(1, computes, PROBLEMS[:3], (scaling, scaling), activation, CONFIGS[config], fast=True)


@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(out_dtype, dtypes):
    on_ranks(1, computes, PROBLEMS[:2], ("block", "block"), "swiglu", dtypes=dtypes, out_dtype=out_dtype)


def outputs_are_bf16_by_default():
    problem = ScaledGrouped([5, 3], 16, 32)
    problem.check(problem.call(out_dtype=None))


def test_default_output_dtype():
    on_ranks(1, outputs_are_bf16_by_default)


# ---- shapes and layouts of the operands ----


def computes_with_scales(change):
    """Check that scales of another shape or layout give the same bits."""
    for scaling in (("tensor", "tensor"), ("row", "expert"), ("row", "row"), ("block", "block")):
        problem = ScaledGrouped([9, 0, 4], 136, 272, scaling)
        expected = problem.call()
        problem.check(expected)
        problem.scale_x, problem.scale_w = change(problem.scale_x, problem.scale_w)
        for _ in range(2):
            assert torch.equal(problem.call().view(torch.int16), expected.view(torch.int16)), scaling


def reshaped(scale_x, scale_w):
    """Return the same scales in other supported shapes."""
    if scale_x.numel() == 1:
        return scale_x.view(()), scale_w.view(1)
    return scale_x, scale_w.view(-1, 1, 1) if scale_w.dim() == 1 else scale_w


def strided(*scales):
    return [torch.stack([scale, torch.full_like(scale, math.nan)], -1)[..., 0] for scale in scales]


@pytest.mark.parametrize("change", [reshaped, strided])
def test_scale_shapes_and_layouts(change):
    on_ranks(1, computes_with_scales, change)


def computes_with_layouts(operand, layout, activation):
    problem = ScaledGrouped([3, 0, 8], 48, 64, ("block", "block"), activation)
    original = getattr(problem, operand)
    layouts = W_LAYOUTS if operand == "w" else dense.LAYOUTS
    changed = layouts[layout](original) if operand == "w" else layouts[layout](original, math.nan)
    setattr(problem, operand, changed)
    for _ in range(2):
        problem.check(problem.call())


@pytest.mark.parametrize("activation", [None, "swiglu"], ids=str)
@pytest.mark.parametrize(
    "operand, layout", [("w", layout) for layout in W_LAYOUTS] + [("x", layout) for layout in dense.LAYOUTS]
)
def test_layouts(operand, layout, activation):
    on_ranks(1, computes_with_layouts, operand, layout, activation)


def test_column_major_weights_are_copied():
    """Tensor cores read fp8 operands along K only."""
    w = torch.zeros(3, 64, 32, dtype=E4M3).transpose(1, 2)
    copy, plane, row, is_kn = layout.weight_layout(w)
    assert (plane, row, is_kn) == (32 * 64, 64, False) and copy.is_contiguous()


# ---- rows and values ----


def leaves_other_rows_untouched(scaling, activation):
    problem = ScaledGrouped([5, 0, 11], 24, 144, scaling, activation, spare=40)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors with NaN
    try:
        output = problem.call()
    finally:
        torch.use_deterministic_algorithms(False)
    problem.check(output)
    assert output[problem.used :].isnan().all()


@each_activation
@pytest.mark.parametrize("scaling", [("row", "row"), ("block", "block")], ids=str)
def test_unused_rows_are_neither_read_nor_written(scaling, activation):
    on_ranks(1, leaves_other_rows_untouched, scaling, activation)


def clamps_splits():
    for splits, rows in [([3, 100, 7], 20), ([3, -5, 4], 9), ([6, 6], 0)]:
        problem = ScaledGrouped(splits, 16, 32, ("block", "block"), rows=rows)
        problem.check(problem.call())


def test_splits_are_clamped():
    on_ranks(1, clamps_splits)


def handles_special_values(scaling):
    """Check rows and weights of zeros, whose scale is 0, and a NaN, which affects the elements under its scale."""

    def change(x, w):
        x[1], w[0, 2] = 0.0, 0.0
        x[3, 0] = w[2, 5, 7] = math.nan

    problem = ScaledGrouped([6, 0, 5], 24, 272, scaling, change=change)
    output = problem.call()[: problem.used].cpu().double()
    assert torch.equal(output.isnan(), problem.expected.isnan())
    assert output.isnan().sum() == 24 + 5 * (24 if scaling[1] == "block" else 1)
    finite = ~output.isnan()
    problem.expected, problem.error = problem.expected.where(finite, 0.0), problem.error.where(finite, 0.0)
    problem.check(output.where(finite, 0.0).to(problem.out_dtype))
    assert (output[1] == 0).all() and (output[:3, 2] == 0).all()


@pytest.mark.parametrize("scaling", [("row", "row"), ("block", "block")], ids=str)
def test_special_values(scaling):
    on_ranks(1, handles_special_values, scaling)


# ---- autograd and torch.compile ----


def rejects_gradients():
    problem = ScaledGrouped([6, 5], 16, 32)
    for name in ("scale_x", "scale_w"):
        scale = getattr(problem, name)
        setattr(problem, name, scale.clone().requires_grad_())
        with pytest.raises(RuntimeError, match="group_gemm: operands with scales have no gradient; detach"):
            problem.call()
        with torch.no_grad():
            output = problem.call()
        assert not output.requires_grad
        problem.check(output)
        setattr(problem, name, scale)


def test_gradients_are_rejected():
    on_ranks(1, rejects_gradients)


def _expert_layer(x, w, splits, scale_x, scale_w):
    scales = {"scale_x": scale_x, "scale_w": scale_w}
    return tdkernels.group_gemm(x, w, splits, activation="swiglu", out_dtype=torch.float32, **scales) * 2


def compiled_equals_eager():
    torch._dynamo.reset()
    # On the CPU inductor needs a C++ compiler and much time. aot_eager traces the operator into the same graph.
    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(_expert_layer, fullgraph=True, backend=backend)
    for splits in ([3, 0, 2], [4, 1, 3]):  # the second number of rows was not traced
        problem = ScaledGrouped(splits, 12, 144, ("block", "block"))
        arguments = problem.x, problem.w, problem.splits, problem.scale_x, problem.scale_w
        assert torch.equal(compiled(*arguments), _expert_layer(*arguments))


def test_fullgraph():
    on_ranks(1, compiled_equals_eager)


def passes_opcheck():
    """Check the fake implementation with opcheck, whose check of the schema does not support fp8."""
    for kind, activation in (("row", ""), ("block", "swiglu")):
        problem = ScaledGrouped([3, 2], 12, 144, (kind, kind))
        operands = problem.x, problem.w, problem.splits, problem.scale_x, problem.scale_w
        torch.library.opcheck(
            torch.ops.tdkernels.group_gemm_scaled.default, (*operands, kind, activation, torch.float32, False, ""),
            test_utils="test_faketensor",
        )


def test_opcheck():
    on_ranks(1, passes_opcheck)


# ---- invalid calls ----

_X, _W = torch.zeros(5, 144).to(E4M3), torch.zeros(3, 130, 144).to(E4M3)
_ROWS, _ROWS_OF_W = torch.ones(5, 1), torch.ones(3, 130, 1)
_BLOCKS, _BLOCKS_OF_W = torch.ones(5, 2), torch.ones(3, 2, 2)
INVALID_CALLS = {
    "no scales": ({"scale_x": None, "scale_w": None}, TypeError, r"x \[5, 144\] is torch.float8_e4m3fn; pass sc"),
    "only scale_x": ({"scale_w": None}, TypeError, "scale_x needs scale_w"),
    "only scale_w": ({"scale_x": None}, TypeError, "scale_w needs scale_x"),
    "out_dtype without scales": (
        {"x": _X.float(), "w": _W.float(), "scale_x": None, "scale_w": None, "out_dtype": torch.float32}, TypeError,
        "out_dtype is for float8 operands",
    ),
    "use_fast_accum without scales": (
        {"x": _X.float(), "w": _W.float(), "scale_x": None, "scale_w": None, "use_fast_accum": True}, TypeError,
        "use_fast_accum is for float8 operands",
    ),
    "x in bf16": ({"x": _X.bfloat16()}, TypeError, "x is torch.bfloat16; with scales float8_e4m3fn and float8_e5m2"),
    "w in bf16": ({"w": _W.bfloat16()}, TypeError, "w is torch.bfloat16; with scales float8_e4m3fn and float8_e5m2"),
    "x is not a tensor": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, not list"),
    "scale_x is not a tensor": ({"scale_x": 1.0}, TypeError, "scale_x must be a torch.Tensor, not float"),
    "scale_w in bf16": ({"scale_w": _ROWS_OF_W.bfloat16()}, TypeError, "scale_w is torch.bfloat16; float32 is supp"),
    "scale_x on another device": ({"scale_x": _ROWS.to("meta")}, ValueError, "but scale_x is on meta"),
    "scale_x of another length": (
        {"scale_x": torch.ones(4, 1)}, ValueError,
        r"scale_x \[4, 1\] must have one element, the shape \[5, 1\] \(row-wise\) or \[5, 2\] .* for x \[5, 144\]",
    ),
    "scale_x of one dimension": ({"scale_x": torch.ones(5)}, ValueError, r"scale_x \[5\] must have one element"),
    "scale_w of another N": (
        {"scale_w": torch.ones(3, 129, 1)}, ValueError,
        r"scale_w \[3, 129, 1\] must have one element, the shape \[3\] .*, \[3, 130, 1\] \(row-wise\) or \[3, 2, 2\] "
        r"\(block-wise\) for w \[3, 130, 144\]",
    ),
    "scale_w of another E": ({"scale_w": torch.ones(2)}, ValueError, r"scale_w \[2\] must have one element"),
    "scale_x by block, scale_w by row": (
        {"scale_x": _BLOCKS}, ValueError, r"scale_x \[5, 2\] and scale_w \[3, 130, 1\] must both be block-wise, or nei",
    ),
    "scale_x by row, scale_w by block": ({"scale_w": _BLOCKS_OF_W}, ValueError, "must both be block-wise, or neither"),
    "scale_x of one element, scale_w by block": (
        {"scale_x": torch.ones(1), "scale_w": _BLOCKS_OF_W}, ValueError, "must both be block-wise, or neither",
    ),
    "K of no multiple of 16": (
        {"x": _X[:, :40], "w": _W[:, :, :40]}, ValueError, r"K, the last dimension of x \[5, 40\], must be a multiple",
    ),
    "another K": ({"x": _X[:, :128]}, ValueError, r"x \[5, 128\] and of w \[3, 130, 144\] must be the same K"),
    "w of two dimensions": ({"w": _W[0]}, ValueError, r"w must have 3 dimensions .*\[130, 144\]"),
    "too few splits": ({"splits": torch.zeros(2, dtype=torch.int32)}, ValueError, r"splits must be \[E\] with "),
    "an odd N": (
        {"w": _W[:, :129], "scale_w": torch.ones(3), "activation": "swiglu"}, ValueError, r"w .* must have an even N",
    ),
    "out_dtype in int8": ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8; bfloat16, float16 and"),
    "use_fast_accum of 1": ({"use_fast_accum": 1}, TypeError, "use_fast_accum must be True or False, not 1"),
    "another config": ({"config": {"tiles": None}}, TypeError, "config must be a GroupGemmConfig or None, not dict"),
    "block_k of 16": (
        {"config": GroupGemmConfig(tiles=Tiles(16, 16, 16, 1, 1, 1))}, ValueError, "block_k must be at least 32 for",
    ),
    "block_k of 256": (
        {"scale_x": _BLOCKS, "scale_w": _BLOCKS_OF_W, "config": GroupGemmConfig(tiles=Tiles(16, 16, 256, 1, 1, 1))},
        ValueError, "config cannot run: block_k must be at most 128 with block-wise scales, not 256",
    ),
    "block_n of 512": (
        {"scale_x": _BLOCKS, "scale_w": _BLOCKS_OF_W, "config": GroupGemmConfig(tiles=Tiles(16, 512, 32, 1, 1, 1))},
        ValueError, "config cannot run: block_n must be at most 256 with block-wise scales, not 512",
    ),
}


def rejects_invalid_call(case):
    changes, error, message = INVALID_CALLS[case]

    def to_device(value):
        return value.to(device()) if isinstance(value, torch.Tensor) and value.device.type != "meta" else value

    given = {"x": _X, "w": _W, "splits": torch.zeros(3, dtype=torch.int32), "scale_x": _ROWS, "scale_w": _ROWS_OF_W}
    arguments = {name: to_device(value) for name, value in {**given, **changes}.items()}
    with mock.patch.object(launch, "product") as product, pytest.raises(error, match=f"group_gemm: .*{message}"):
        tdkernels.group_gemm(**arguments)
    assert not product.called


@pytest.mark.parametrize("case", INVALID_CALLS)
def test_invalid_calls(case):
    on_ranks(1, rejects_invalid_call, case)


# ---- on GPUs ----


@pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")
@each_activation
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("scaling", ["row", "block"])
def test_many_tiles(scaling, fast, activation):
    problems = [([700, 0, 1300, 1, 64, 500, 128, 300], 1536, 1040)]
    on_ranks(1, computes, problems, (scaling, scaling), activation, fast=fast, spare=7)
