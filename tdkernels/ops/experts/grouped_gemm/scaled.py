"""group_gemm of scaled fp8 operands: torch.library operator, reference and calls.

An expert e multiplies its rows by w[e], as in ``ops.common.scaling``, where the weight and its scales have one more
dimension:

    scaling         scale of x [R, K]       scale of w [E, N, K]
    tensor-wise     one element             one element, or [E] or [E, 1, 1]: one for each expert
    row-wise        [R, 1]                  [E, N, 1]
    block-wise      [R, ceil(K / 128)]      [E, ceil(N / 128), ceil(K / 128)]

The kernel is that of the unscaled operator. Method "torch" dequantizes the operands to fp32, on CPUs only.
"""

from typing import Any

import torch

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config, from_text
from tdkernels.ops.common.scaling import (
    CODE_MULTIPLE,
    Scales,
    blocks,
    check_fp8,
    checked_out_dtype,
    dequantize,
    invalid_tiles,
    reject_gradients,
)
from tdkernels.ops.common.validation import shape_of
from tdkernels.ops.experts.grouped_gemm import launch
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig, invariant_config
from tdkernels.ops.experts.grouped_gemm.dispatch import explicit_config, product_by_group, swiglu_ref
from tdkernels.ops.experts.grouped_gemm.validation import check_activation, check_expert_shapes, check_splits
from tdkernels.runtime import call_cache
from tdkernels.runtime.torch_op import register

_NO_GRADIENT = "detach them, or call it under torch.no_grad()"


def group_gemm_scaled_ref(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, scales: Scales, activation: str | None = None,
) -> torch.Tensor:
    """Compute group_gemm of scaled operands with plain torch operators. The operands are dequantized to fp32."""
    by_expert = _scales_by_expert(w, scales.weight)
    weights = [dequantize(weight, scale) for weight, scale in zip(w, by_expert, strict=True)]
    with torch.autocast(x.device.type, enabled=False):
        pre = product_by_group(dequantize(x, scales.x), torch.stack(weights), splits)
        return swiglu_ref(pre, activation).to(scales.out_dtype)


def _scales_by_expert(w, scale):
    """Return the scales of the weight of each expert: [1, 1], [N, 1], or block-wise."""
    experts = w.shape[0]
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1).expand(experts, 1, 1)
    return scale.reshape(experts, 1, 1) if scale.numel() == experts else scale


# ---- validation ----


def _kind_of(operator, x, w, scale_x, scale_w):
    """Return "row" or "block"; raise ValueError if the shapes of the scales do not fit the operands."""
    (rows, k), (experts, n) = x.shape, w.shape[:2]
    fits_x = {"row": [(rows, 1)], "block": [(rows, blocks(k))]}
    fits_w = {"row": [(experts, n, 1), (experts,), (experts, 1, 1)], "block": [(experts, blocks(n), blocks(k))]}
    for kind in ("row", "block"):
        fits = [
            kind == "row" and scale.numel() == 1 or tuple(scale.shape) in shapes[kind]
            for scale, shapes in ((scale_x, fits_x), (scale_w, fits_w))
        ]
        if all(fits):
            return kind
    if scale_x.numel() != 1 and tuple(scale_x.shape) not in fits_x["row"] + fits_x["block"]:
        raise ValueError(
            f"{operator}: scale_x {shape_of(scale_x)} must have one element, the shape {list(fits_x['row'][0])} "
            f"(row-wise) or {list(fits_x['block'][0])} (block-wise) for x {shape_of(x)}"
        )
    if scale_w.numel() != 1 and tuple(scale_w.shape) not in fits_w["row"] + fits_w["block"]:
        raise ValueError(
            f"{operator}: scale_w {shape_of(scale_w)} must have one element, the shape [{experts}] (one for each "
            f"expert), {list(fits_w['row'][0])} (row-wise) or {list(fits_w['block'][0])} (block-wise) for w "
            f"{shape_of(w)}"
        )
    raise ValueError(
        f"{operator}: scale_x {shape_of(scale_x)} and scale_w {shape_of(scale_w)} must both be block-wise, or neither"
    )


def checked_scales(
    operator: str, x: Any, w: Any, scale_x: Any, scale_w: Any, out_dtype: Any, use_fast_accum: Any,
) -> Scales:
    """Validate scaled operands of a grouped GEMM, and return their scales.

    Raises:
        TypeError, ValueError: If they are invalid. Errors name the argument and its shape.
        RuntimeError: If autograd would record the call.
    """
    out_dtype = checked_out_dtype(operator, out_dtype, use_fast_accum)
    validation.check_tensor(operator, "x", x)
    validation.check_device(operator, "x", x)
    validation.check_tensor(operator, "w", w, like=x)
    for name, tensor in (("x", x), ("w", w)):
        check_fp8(operator, name, tensor)
    check_expert_shapes(operator, x, w)
    if x.shape[1] % CODE_MULTIPLE:
        raise ValueError(f"{operator}: K, the last dimension of x {shape_of(x)}, must be a multiple of 16 for float8")
    for name, scale in (("scale_x", scale_x), ("scale_w", scale_w)):
        validation.check_tensor(operator, name, scale, (torch.float32,), like=x)
    kind = _kind_of(operator, x, w, scale_x, scale_w)
    reject_gradients(operator, (x, w, scale_x, scale_w), _NO_GRADIENT)
    scale_x = scale_x.reshape(1, 1) if scale_x.numel() == 1 else scale_x
    return Scales(scale_x.contiguous(), scale_w.contiguous(), kind, out_dtype, use_fast_accum)


# ---- torch.library operator, which torch.compile traces ----


def _resolved(x, scales, config):
    """Return the config of a call; None for the default config."""
    config = explicit_config(config)
    if config is None and is_batch_invariant():
        return invariant_config(x.dtype, x.device, scales.layout)
    return config


def _product(x, w, splits, scales, activation, config):
    if config is not None and config.method == "torch":
        return group_gemm_scaled_ref(x, w, splits, scales, activation)
    return launch.product(x, w, splits, activation, False, config, scales)[0]


def _forward(x, w, splits, scale_x, scale_w, scaling, activation, out_dtype, use_fast_accum, config):
    scales = Scales(scale_x, scale_w, scaling, out_dtype, use_fast_accum)
    config = from_text(GroupGemmConfig, config) if config else None
    return _product(x, w, splits, scales, activation or None, _resolved(x, scales, config))


def _fake(x, w, splits, scale_x, scale_w, scaling, activation, out_dtype, use_fast_accum, config):
    return x.new_empty(x.shape[0], w.shape[1] // 2 if activation else w.shape[1], dtype=out_dtype)


register(
    "group_gemm_scaled(Tensor x, Tensor w, Tensor splits, Tensor scale_x, Tensor scale_w, str scaling, str activation,"
    " ScalarType out_dtype, bool use_fast_accum, str config) -> Tensor",
    _forward,
    _fake,
)


# ---- calls ----


def call(
    x: Any, w: Any, splits: Any, activation: Any, scale_x: Any, scale_w: Any, out_dtype: Any, use_fast_accum: Any,
    config: Any,
) -> torch.Tensor:
    """Validate and execute a call of ``group_gemm`` with scaled operands. Arguments are those of the caller."""
    given = x, w, splits, scale_x, scale_w
    settings = activation, out_dtype, use_fast_accum, config
    known, key = call_cache.lookup_run("group_gemm, scaled", None, given, settings, with_rows=(0, 3))
    if known is not None:
        return known(None, *given)
    scales = checked_scales("group_gemm", x, w, scale_x, scale_w, out_dtype, use_fast_accum)
    check_activation("group_gemm", activation, w)
    check_splits(x, w, splits)
    check_config("group_gemm", config, GroupGemmConfig, x)
    reason = None if config is None else invalid_tiles(config.tiles, scales.kind)
    if reason is not None:
        raise ValueError(f"group_gemm: config cannot run: {reason}")
    y = torch.ops.tdkernels.group_gemm_scaled(
        x, w, splits.contiguous(), scales.x, scales.weight, scales.kind, activation or "", scales.out_dtype,
        scales.use_fast_accum, as_argument(config),
    )
    _keep(key, scales, activation, _resolved(x, scales, config))
    return y


def _keep(key, scales, activation, config):
    """Insert a call into the call cache."""
    settings = scales._replace(x=None, weight=None)  # an entry holds no tensor of the call

    def run(_, x, w, splits, scale_x, scale_w):
        given = settings._replace(x=scale_x.contiguous(), weight=scale_w.contiguous())
        return _product(x, w, splits.contiguous(), given, activation, config)

    def bind(_, x, w, splits, scale_x, scale_w):
        return launch.bind_product(x, w, splits, activation, config, settings._replace(x=scale_x, weight=scale_w))

    is_fused = config is None or config.method == "fused"
    call_cache.insert(None, key, call_cache.CachedCall(run, bind if is_fused else None))
