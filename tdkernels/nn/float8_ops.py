"""Forward and backward of the linear layers in float8, as torch.library operators; see ``nn.float8``."""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tdkernels.autotune.invariance import reject_max_ranks, without_invariance
from tdkernels.ops.collectives import op as _collectives  # noqa: F401  registers torch.ops.tdkernels.all_gather
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.common.config import from_text
from tdkernels.ops.common.scaling import CODE_MULTIPLE, Scales, check_scaled_operands, scaled_linear
from tdkernels.ops.dense.ag_gemm.op import AgGemmConfig, ag_gemm
from tdkernels.ops.dense.backward import ag_gemm_backward, gathered_weight_gradient, gemm_rs_backward
from tdkernels.ops.dense.gemm_ar.op import GemmArConfig, gemm_ar
from tdkernels.ops.dense.gemm_rs.op import GemmRsConfig, gemm_rs
from tdkernels.ops.dense.layout import by_rank, gathered, scattered, segment_rows_of
from tdkernels.ops.dense.local import linear_of_scaled
from tdkernels.ops.dense.weight_gradient import weight_gradient
from tdkernels.ops.quantize.op import quantize_fp8
from tdkernels.rounding import round_up
from tdkernels.runtime import gpu, torch_op
from tdkernels.runtime.torch_op import group_by_name
from tdkernels.symm.whole_call import whole_call

RECIPES = {"rowwise": "row", "tensorwise": "tensor"}  # recipe: scaling of quantize_fp8
LAYERS = {"column": "ColumnParallelLinear", "row": "RowParallelLinear"}
LOCAL = -1  # the argument ``dim`` without sequence parallelism


# ---- operands ----


class _Formats(NamedTuple):
    """How the operands of a layer are quantized.

    Attributes:
        scaling: "row" or "tensor".
        x: Format of x and of the weight.
        dy: Format of dy.
    """

    scaling: str
    x: torch.dtype
    dy: torch.dtype


def _formats(recipe, device):
    fnuz = device.type == "cuda" and gpu.multiplies_fnuz(device)
    e4m3 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    e5m2 = torch.float8_e5m2fnuz if fnuz else torch.float8_e5m2
    return _Formats(RECIPES[recipe], e4m3, e5m2 if recipe == "tensorwise" else e4m3)


def _quantize(x, scaling, dtype, group=None):
    """Return (codes, scale) of x [..., K]. With ``group`` a tensor-wise scale is that of the x of all ranks."""
    if scaling == "row" or group is None or group.size() == 1:
        return quantize_fp8(x, scaling, dtype=dtype)
    own = torch.ops.tdkernels.tensor_scale_fp8(x, dtype)
    scale = torch.ops.tdkernels.all_gather(own, group.group_name, "").amax(0, keepdim=True)
    return quantize_fp8(x, scaling, dtype=dtype, scale=scale)


def _quantize_transposed(x, scaling, dtype, scale):
    """Return (codes, scale) of x.T for x [rows, K]; ``scale`` is the tensor-wise scale of x."""
    return quantize_fp8(x, scaling, dtype=dtype, transpose=True, scale=scale if scaling == "tensor" else None)


def _rows(x):
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _as_bytes(codes):
    """Return codes as uint8, because not all functions of torch take float8; other tensors as they are."""
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes


def _by_rank(x, dim, world_size):
    """Return the rows of a gathered x [..., K], those of rank 0 first."""
    rows = _rows(x)
    if dim != 1 or not rows.shape[0]:
        return rows
    return by_rank(_as_bytes(rows), segment_rows_of(x, dim, world_size), world_size).view(x.dtype)


def _all_gather(rows, group):
    """All-gather rows in any dtype."""
    if group.size() == 1:
        return rows
    return torch.ops.tdkernels.all_gather(_as_bytes(rows), group.group_name, "").view(rows.dtype)


def _local_linear(layer, codes, weight, bias, scale_x, scale_w, out_dtype, use_fast_accum):
    """Return x @ weight.T + bias for scaled operands, without communication."""
    scales = check_scaled_operands(layer, codes, weight, bias, scale_x, scale_w, out_dtype, use_fast_accum)
    y = linear_of_scaled(_rows(codes), weight, bias, scales)
    return y.view(*codes.shape[:-1], weight.shape[0])


def _config_of(config_class, config):
    """Return the config given as text, None if it is empty."""
    return from_text(config_class, config) if config else None


def _is_by_torch(config):
    return "method=torch" in config.split()


def _config_of_dx(config_class, config):
    """Return the config of the operator that computes dx: method "torch" if the forward has it, otherwise None."""
    return config_class(method="torch") if _is_by_torch(config) else None


def _without_autocast(function):
    """Decorate the body of an op whose first argument is a tensor.

    On CPUs autocast would round the operands of the dequantized GEMM.
    """

    @functools.wraps(function)
    def call(x, *args):
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return call


# ---- forward ----


def _forward(layer):
    """Return the body of the op of a layer: (y, codes of x or an empty tensor, scale of x, scale of the weight)."""

    @_without_autocast
    @whole_call
    def forward(x, weight, bias, recipe, dim, keeps_codes, group, config):
        if recipe == "tensorwise":  # the scale is that of the rank's part of the weight
            reject_max_ranks(LAYERS[layer], 'float8="tensorwise"')
        group = group_by_name(group)
        form = _formats(recipe, x.device)
        is_gathered = layer == "column" and dim != LOCAL
        codes, scale_x = _quantize(x, form.scaling, form.x, group if is_gathered else None)
        weight_codes, scale_w = _quantize(weight, form.scaling, form.x)
        operands = codes, weight_codes, bias
        options = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": x.dtype, "use_fast_accum": True}
        if layer == "column" and dim == LOCAL:
            y = _local_linear(LAYERS[layer], *operands, *options.values())
        elif layer == "column":
            y = ag_gemm(*operands, dim=dim, group=group, config=_config_of(AgGemmConfig, config), **options)
        elif dim == LOCAL:
            y = gemm_ar(*operands, group=group, config=_config_of(GemmArConfig, config), **options)
        else:
            y = gemm_rs(*operands, dim=dim, group=group, config=_config_of(GemmRsConfig, config), **options)
        keeps_scales = form.scaling == "tensor"
        return (
            y, codes if keeps_codes else codes.new_empty(0), scale_x if keeps_scales else scale_x.new_empty(0),
            scale_w if keeps_scales else scale_w.new_empty(0),
        )

    return forward


def _fake(layer):
    def fake(x, weight, bias, recipe, dim, keeps_codes, group, config):
        lead, ranks = [*x.shape[:-1]], torch_op.world_size_by_name(group)
        if dim != LOCAL:
            lead = (gathered if layer == "column" else scattered)(x.shape, dim, ranks)
        form = _formats(recipe, x.device)
        codes = x.new_empty(x.shape if keeps_codes else (0,), dtype=form.x)
        shape = (1, 1) if form.scaling == "tensor" else (0,)
        scales = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
        return x.new_empty(*lead, weight.shape[0]), codes, *scales

    return fake


# ---- backward ----


def _float8_dweight(left, right, form, scale_dy, scale_x, main_grads, dtype):
    """Return left.T @ right in float8, [N, K] in ``dtype``, or add it to ``main_grads``.

    Args:
        left: [M, N], the gradient of y, or with tensor-wise scales its codes.
        right: [M, K], the input of the layer, or with tensor-wise scales its codes.
        form: Formats of the layer.
        scale_dy: Tensor-wise scale of left.
        scale_x: Tensor-wise scale of right.
        main_grads: As for ``weight_gradient``.
        dtype: dtype of the gradient.
    """
    operands = []
    padding = round_up(left.shape[0], CODE_MULTIPLE) - left.shape[0]
    for x, form_of_x, scale in ((left, form.dy, scale_dy), (right, form.x, scale_x)):
        if form.scaling == "tensor":
            operands.append((F.pad(_as_bytes(x), (0, 0, 0, padding)).t().contiguous().view(form_of_x), scale))
        else:
            operands.append(quantize_fp8(F.pad(x, (0, 0, 0, padding)), dtype=form_of_x, transpose=True))
    (left, scale_l), (right, scale_r) = operands
    out_dtype = main_grads[0].dtype if main_grads else dtype
    product = scaled_linear(left, right, None, Scales(scale_l, scale_r, "row", out_dtype, False))
    if not main_grads:
        return product
    main_grads[0].add_(product)
    return product.new_empty(0)


def _bias_gradient(dy):
    return _rows(dy).sum(0, dtype=torch.float32)


def _column_dx(codes, scale_dy, weight, scale_w, form, out_dtype, dim, group, config):
    """Return dx of a ColumnParallelLinear: the sum over the ranks of dy @ weight."""
    back, scale_back = _quantize_transposed(weight, form.scaling, form.x, scale_w)
    options = {"scale_x": scale_dy, "scale_w": scale_back, "out_dtype": out_dtype, "group": group}
    if dim == LOCAL:
        return gemm_ar(codes, back, config=_config_of(GemmArConfig, config), **options)
    return gemm_rs(codes, back, dim=dim, config=_config_of_dx(GemmRsConfig, config), **options)


@_without_autocast
@without_invariance
@whole_call
def _column_backward(
    dy, x, weight, scale_x, scale_w, main_grads, need_dx, need_dweight, need_dbias, recipe, dim, float8_dweight,
    group_name, config,
):
    group = group_by_name(group_name)
    form = _formats(recipe, x.device)
    uses_codes = float8_dweight and form.scaling == "tensor"
    dx, dweight, dbias = dy.new_empty(0), weight.new_empty(0), dy.new_empty(0)
    codes, scale_dy = _quantize(dy, form.scaling, form.dy) if need_dx or uses_codes else (None, None)
    gather = None
    if need_dx and need_dweight and not float8_dweight and dim != LOCAL and group.size() > 1:
        if x.numel() and not _is_by_torch(config):  # x is gathered while dx is computed and sent
            gather = AsyncAllGather.start("ColumnParallelLinear backward", _rows(x), group)
    if need_dx:
        dx = _column_dx(codes, scale_dy, weight, scale_w, form, dy.dtype, dim, group, config)
    if need_dweight and float8_dweight:
        left, right = codes if uses_codes else dy, _rows(x)
        if dim != LOCAL:
            left, right = _by_rank(left, dim, group.size()), _all_gather(right, group)
        dweight = _float8_dweight(_rows(left), right, form, scale_dy, scale_x, main_grads, weight.dtype)
    elif gather is not None:
        rows = _by_rank(dy, dim, group.size())
        dweight = gathered_weight_gradient(
            gather, rows, gathered_on_left=False, overlapped=True, main_grads=main_grads
        )
        gather.close()
    elif need_dweight and dim == LOCAL:
        dweight = weight_gradient(_rows(dy), _rows(x), main_grads)
    elif need_dweight:
        rows = _by_rank(dy, dim, group.size())
        _, dweight = ag_gemm_backward(rows, _rows(x), weight, main_grads, False, True, group_name, config)
    if need_dbias:
        dbias = _bias_gradient(dy).to(dy.dtype)
    return dx, dweight.to(weight.dtype), dbias


def _row_dx(codes, scale_dy, weight, scale_w, form, out_dtype, dim, group, config, keeps_gathered):
    """Return (dx, codes of the gathered dy or None) of a RowParallelLinear: dx = all_gather(dy) @ weight."""
    back, scale_back = _quantize_transposed(weight, form.scaling, form.x, scale_w)
    if dim == LOCAL:
        return _local_linear(LAYERS["row"], codes, back, None, scale_dy, scale_back, out_dtype, False), None
    dx = ag_gemm(
        codes, back, dim=dim, return_gathered=keeps_gathered, scale_x=scale_dy, scale_w=scale_back,
        out_dtype=out_dtype, group=group, config=_config_of_dx(AgGemmConfig, config),
    )
    return dx if keeps_gathered else (dx, None)


@_without_autocast
@without_invariance
@whole_call
def _row_backward(
    dy, x, weight, scale_x, scale_w, main_grads, need_dx, need_dweight, need_dbias, recipe, dim, float8_dweight,
    group_name, config,
):
    group = group_by_name(group_name)
    form = _formats(recipe, x.device)
    uses_codes = float8_dweight and form.scaling == "tensor"
    dx, dweight, dbias = dy.new_empty(0), weight.new_empty(0), dy.new_empty(0)
    codes = scale_dy = full = None
    if need_dx or uses_codes:
        codes, scale_dy = _quantize(dy, form.scaling, form.dy, None if dim == LOCAL else group)
    if need_dx:
        keeps = need_dweight and uses_codes and dim != LOCAL
        dx, full = _row_dx(codes, scale_dy, weight, scale_w, form, dy.dtype, dim, group, config, keeps)
    if need_dweight and float8_dweight:
        left, right = _rows(codes if uses_codes else dy), _rows(x)
        if dim != LOCAL:
            left = _all_gather(left, group) if full is None else _by_rank(full, dim, group.size())
            right = _by_rank(x, dim, group.size())
        dweight = _float8_dweight(left, right, form, scale_dy, scale_x, main_grads, weight.dtype)
    if dim == LOCAL:
        if need_dweight and not float8_dweight:
            dweight = weight_gradient(_rows(dy), _rows(x), main_grads)
        dbias = _bias_gradient(dy).to(dy.dtype) if need_dbias else dbias
    elif float8_dweight:
        if need_dbias:
            dbias = torch.ops.tdkernels.all_reduce(_bias_gradient(dy), group_name, "").to(dy.dtype)
    elif need_dweight or need_dbias:
        rows, needs = _by_rank(x, dim, group.size()), (False, need_dweight, need_dbias)
        _, dweight, dbias = gemm_rs_backward(_rows(dy), rows, weight, main_grads, *needs, group_name, config)
    return dx, dweight.to(weight.dtype), dbias


def _fake_backward(
    dy, x, weight, scale_x, scale_w, main_grads, need_dx, need_dweight, need_dbias, recipe, dim, float8_dweight,
    group_name, config,
):
    need_dweight = need_dweight and not main_grads
    return (
        dy.new_empty(x.shape if need_dx else (0,)), weight.new_empty(weight.shape if need_dweight else (0,)),
        dy.new_empty(weight.shape[:1] if need_dbias else (0,)),
    )


for _layer, _backward in (("column", _column_backward), ("row", _row_backward)):
    torch_op.register(
        f"float8_{_layer}_linear(Tensor x, Tensor weight, Tensor? bias, str recipe, int dim, bool keeps_codes,"
        " str group, str config) -> (Tensor, Tensor, Tensor, Tensor)",
        _forward(_layer),
        _fake(_layer),
    )
    torch_op.register(
        f"float8_{_layer}_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor scale_x, Tensor scale_w,"
        " Tensor(a!)[] main_grads, bool need_dx, bool need_dweight, bool need_dbias, str recipe, int dim,"
        " bool float8_dweight, str group, str config) -> (Tensor, Tensor, Tensor)",
        _backward,
        _fake_backward,
    )
