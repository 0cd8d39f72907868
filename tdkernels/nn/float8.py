"""Linear layers in float8: the GEMMs of ColumnParallelLinear and RowParallelLinear with dynamically scaled operands.

    recipe          scales                              x, weight    dy
    "rowwise"       one per row of each operand         e4m3         e4m3
    "tensorwise"    one per operand                     e4m3         e5m2

    layer     sequence_parallel    y                  dx                 gathered for dweight
    column    yes                  ag_gemm, scaled    gemm_rs, scaled    x
    column    no                   local              gemm_ar, scaled    -
    row       yes                  gemm_rs, scaled    ag_gemm, scaled    dy
    row       no                   gemm_ar, scaled    local              -

With ``float8_dweight`` and tensor-wise scales the codes are gathered, for dy those that ag_gemm has gathered anyway.
Otherwise the tensor is gathered in its own dtype, because it is quantized along the other dimension, or not at all.

The rows of an operand lie along the contraction: dx = dy @ weight has a scale for each row of weight.T, and dweight =
dy.T @ x has one for each row of dy.T and x.T. A tensor-wise scale belongs to this rank's tensor. Only if the tensor is
gathered do all ranks use one scale, that of the gathered tensor: they all-gather their scales and take the maximum. So
the gathered codes have one scale in dweight, too.

Source: the recipes are those of torchao.float8, https://github.com/pytorch/ao.
"""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.nn.float8_ops import LAYERS, LOCAL, RECIPES
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.scaling import CODE_MULTIPLE
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.gemm_ar.config import GemmArConfig
from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig
from tdkernels.ops.dense.weight_gradient import as_list, check_main_grad, returned_gradient
from tdkernels.runtime import autograd

if TYPE_CHECKING:
    import torch.distributed as dist


def check_float8(module: str, float8: Any, float8_dweight: Any, sizes: dict[str, int]) -> None:
    """Raise an error unless ``float8`` is None or a recipe, and GEMMs in float8 support ``sizes``: {name: size}."""
    if type(float8_dweight) is not bool:
        raise TypeError(f"{module}: float8_dweight must be True or False, not {float8_dweight!r}")
    if float8 is None:
        if float8_dweight:
            raise ValueError(f"{module}: float8_dweight=True needs float8, which is None")
        return
    if float8 not in RECIPES:
        raise ValueError(f"{module}: float8 must be None, {' or '.join(map(repr, RECIPES))}, not {float8!r}")
    for name, size in sizes.items():
        if size % CODE_MULTIPLE:
            raise ValueError(f"{module}: {name} {size} must be a multiple of {CODE_MULTIPLE} with float8={float8!r}")


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer, recipe, dim, float8_dweight, group, config, main_grads):
        keeps_codes = float8_dweight and recipe == "tensorwise"
        op = torch.ops.tdkernels.float8_column_linear if layer == "column" else torch.ops.tdkernels.float8_row_linear
        y, codes, *scales = op(x, weight, bias, recipe, dim, keeps_codes, group, config)
        ctx.save_for_backward(codes if keeps_codes else x, weight, *scales)
        ctx.layer, ctx.main_grads = layer, main_grads
        ctx.settings = recipe, dim, float8_dweight, group, config
        return y

    @staticmethod
    def backward(ctx, dy):
        is_column = ctx.layer == "column"
        autograd.reject_second_derivatives(LAYERS[ctx.layer])
        x, weight, *scales = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = needs = ctx.needs_input_grad[:3]
        ops = torch.ops.tdkernels
        op = ops.float8_column_linear_backward if is_column else ops.float8_row_linear_backward
        dx, dweight, dbias = op(dy, x, weight, *scales, ctx.main_grads, *needs, *ctx.settings)
        if need_dweight:
            dweight = returned_gradient(dweight, weight, len(ctx.main_grads) > 0)
        gradients = dx if need_dx else None, dweight if need_dweight else None, dbias if need_dbias else None
        return *gradients, *[None] * 7


def float8_linear(
    layer: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, recipe: str, float8_dweight: bool,
    dim: int | None, main_grad: torch.Tensor | None, group: "dist.ProcessGroup", config: Any,
) -> torch.Tensor:
    """Compute y of a ColumnParallelLinear or RowParallelLinear in float8, with its gradients.

    Args:
        layer: "column" or "row".
        x: Input of the layer, in bf16, fp16 or fp32, the dtype of y. Autocast converts it, and so the bias.
        weight: This rank's part. It may have another dtype than x, because it is quantized.
        bias: As for the layer, or None.
        recipe: "rowwise" or "tensorwise".
        float8_dweight: Whether the gradient of the weight is computed in float8, too.
        dim: The dimension that is gathered or scattered with sequence parallelism, otherwise None.
        main_grad: As for ``ag_gemm``.
        group: The resolved group.
        config: As for the layer.
    """
    name = LAYERS[layer]
    validation.check_tensor(name, "x", x, validation.DTYPES, memory=False)
    validation.check_device(name, "x", x)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    validation.check_tensor(name, "weight", weight, validation.DTYPES, like=x, memory=False)
    validation.check_shapes(name, x, weight, bias)
    check_main_grad(name, weight, main_grad)
    if main_grad is not None and main_grad.dtype not in (torch.float32, x.dtype):
        raise TypeError(f"{name}: main_grad is {main_grad.dtype}; with float8 it must be float32 or as x, {x.dtype}")
    config_class = GemmArConfig if dim is None else AgGemmConfig if layer == "column" else GemmRsConfig
    if config is not None and not isinstance(config, config_class):
        raise TypeError(f"{name}: config must be {config_class.__name__} or None, not {type(config).__name__}")
    check_config(name, config, config_class, x.new_empty(0, dtype=torch.float8_e4m3fn))  # before the first collective
    bias = None if bias is None else bias.to(x.dtype)
    place = LOCAL if dim is None else dim
    settings = recipe, place, float8_dweight, group.group_name, as_argument(config), as_list(main_grad)
    return _Float8Linear.apply(x, weight, bias, layer, *settings)
