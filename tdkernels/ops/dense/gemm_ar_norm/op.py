"""gemm_ar_rms_norm and gemm_ar_layer_norm: GEMM, all-reduce, residual addition and norm.

    x [M, K / W], weight [N, K / W] on each rank, residual [M, N] equal on all ranks
        ->  r = all_reduce(x @ weight.T) + bias + residual        y = norm(r) * norm_weight + norm_bias

This is the row-parallel linear layer at the end of an attention or MLP block, with everything up to the input of the
next block. The methods:

    method        used for         launches
    "fused"       small M          one: programs that multiply send their tiles to all ranks, other programs add rows,
                                   add the residual and normalize (``kernel``)
    "separate"    larger M         two: torch's GEMM, then the kernel of ``all_reduce_rms_norm``
    "torch"       the baseline     four: torch's GEMM, all-reduce, addition, norm

Partials are rounded to the dtype of x, added in fp32 in rank order, and rounded once more as r, after bias and residual
have been added.

Backward. The outputs are equal on all ranks, and so are their gradients. With dz the gradient of r, including that of
the norm, no communication is needed:

    dx = dz @ weight        dweight = dz.T @ x        dbias = dz.sum(0)        dresidual = dz

Example:
    y, residual = tdkernels.gemm_ar_rms_norm(x, weight, residual, norm.weight, norm.eps)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.invariance import invariant_ranks, reject_invariant
from tdkernels.autotune.modes import get_mode
from tdkernels.ops.collectives.norm import op as norm
from tdkernels.ops.collectives.norm import reference as norm_reference
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config, with_config
from tdkernels.ops.common.gemm_tunable import call_of, explicit_config
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.norm_launch import Options, output_specs, uninitialized
from tdkernels.ops.common.norm_validation import check_norm, check_quantize
from tdkernels.ops.common.tunable_base import select
from tdkernels.ops.dense.gemm_ar_norm import launch, reference
from tdkernels.ops.dense.gemm_ar_norm.config import GemmArNormConfig, completed
from tdkernels.ops.dense.local import linear
from tdkernels.ops.dense.weight_gradient import as_list, check_main_grad, local_weight_gradient
from tdkernels.runtime import autograd, call_cache, gpu, torch_op
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch.distributed as dist

_NORMS = {"gemm_ar_rms_norm": "all_reduce_rms_norm", "gemm_ar_layer_norm": "all_reduce_layer_norm"}


# ---- torch.library operators, for torch.compile ----


def _config_for(text, operands, options, group):
    """Return the resolved config of a call: the config given as ``text``, or the selected one if it is empty."""
    x, weight = operands[:2]
    if text:
        return completed(explicit_config(options.operator, text), x.shape[0], *weight.shape, x.dtype, x.device)
    if spans_nodes(group):
        reject_invariant(options.operator, "a group on several nodes")
        return GemmArNormConfig(method="torch")
    tunable = tunables.tunable(options.operator)

    def describe():
        sizes = tunable.sizes_of(x.shape, weight.shape, world_size=group.size())
        layout = tunable.layouts[options.quantize is not None]
        return sizes, layout, launch.problem_fields(operands, options)

    kinds = tuple(None if operand is None else operand.dtype for operand in operands)
    return select(options.operator, x, group, (*call_of(x, weight), options, kinds), describe).config


def run_by(
    config: GemmArNormConfig, operands: launch.Operands, options: Options, group: "dist.ProcessGroup"
) -> Sequence[torch.Tensor]:
    """Run a call with the method of a resolved config; return y, r, with fp8 the scales, and perhaps statistics."""
    if config.method == "fused":
        return launch.launch(operands, options, group, config)
    if config.method == "torch":
        return reference.forward(*operands, options.eps, options.is_layer_norm, options.quantize, group)
    x, weight, bias, residual, norm_weight, norm_bias = operands
    partial = reference.partial_product(x, weight, bias, group)
    of_norm = Options(_NORMS[options.operator], options.eps, options.quantize)
    return norm.run((partial, residual, norm_weight, norm_bias), of_norm, group, "")


def _run_alone(operands, options, group):
    """Run a call in a group of one rank; return y, r, and with fp8 the scales."""
    x, weight, bias, residual, norm_weight, norm_bias = operands
    rest = residual, norm_weight, norm_bias, options.eps, options.is_layer_norm, options.quantize, group
    return norm_reference.forward(linear(x, weight, bias), *rest)


def _run(operands, options, group, config):
    """Run a call inside the torch.library op, with a group given by name and a config given as text."""
    group = torch_op.group_by_name(group)
    x, weight = operands[:2]
    if group.size() == 1 and not invariant_ranks():
        if config:
            explicit_config(options.operator, config)
        return _run_alone(operands, options, group)
    if not x.shape[0]:
        group_state(group).check_consensus_cached(options.operator, launch.problem_fields(operands, options))
        return uninitialized(x, output_specs(x, (0, weight.shape[0]), options))
    config = _config_for(config, operands, options, group)
    if config.method != "fused":
        fields = with_config(launch.problem_fields(operands, options), config)
        group_state(group).check_consensus_cached(options.operator, fields)
    return run_by(config, operands, options, group)


def _forward(x, weight, bias, residual, norm_weight, norm_bias, operator, eps, keep, group, config):
    options = Options(operator, eps, None)
    y, r, *stats = _run((x, weight, bias, residual, norm_weight, norm_bias), options, group, config)
    if not keep:
        return y, r, r.new_empty(0, dtype=torch.float32)
    return y, r, *(stats or (norm_reference.statistics(r, eps, options.is_layer_norm),))


def _fake_forward(x, weight, bias, residual, norm_weight, norm_bias, operator, eps, keep, group, config):
    shape = x.shape[0], weight.shape[0]
    y, r, stats = uninitialized(x, output_specs(x, shape, Options(operator, eps, None)))
    return y, r, stats if keep else stats.new_empty(0)


def _forward_fp8(x, weight, bias, residual, norm_weight, norm_bias, operator, eps, group, config):
    operands = x, weight, bias, residual, norm_weight, norm_bias
    return tuple(_run(operands, Options(operator, eps, "fp8"), group, config)[:3])


def _fake_forward_fp8(x, weight, bias, residual, norm_weight, norm_bias, operator, eps, group, config):
    shape = x.shape[0], weight.shape[0]
    return tuple(uninitialized(x, output_specs(x, shape, Options(operator, eps, "fp8"))[:3]))


_OPERANDS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor norm_weight, Tensor? norm_bias, str operator, "
    "float eps"
)
torch_op.register(
    f"gemm_ar_norm({_OPERANDS}, bool keep, str group, str config) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
torch_op.register(
    f"gemm_ar_norm_fp8({_OPERANDS}, str group, str config) -> (Tensor, Tensor, Tensor)",
    _forward_fp8,
    _fake_forward_fp8,
)


class _GemmArNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, norm_weight, norm_bias, operator, eps, group, config, main_grads):
        y, r, stats = torch.ops.tdkernels.gemm_ar_norm(
            x, weight, bias, residual, norm_weight, norm_bias, operator, eps, True, group, config
        )
        ctx.save_for_backward(x, weight, r, norm_weight, stats)
        ctx.operator, ctx.main_grads = operator, main_grads
        ctx.set_materialize_grads(False)
        return y, r

    @staticmethod
    def backward(ctx, dy, dr):
        autograd.reject_second_derivatives(ctx.operator)
        x, weight, r, norm_weight, stats = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual, need_norm_weight, need_norm_bias = ctx.needs_input_grad[:6]
        need_r = need_x or need_weight or need_bias or need_residual
        dnorm_weight = dnorm_bias = dx = dweight = dbias = None
        dz = dr
        if dy is not None:
            wanted, is_layer_norm = (need_r, need_norm_weight, need_norm_bias), ctx.operator.endswith("layer_norm")
            of_norm, dnorm_weight, dnorm_bias = norm_reference.gradients(
                dy, r, norm_weight, stats, is_layer_norm, wanted
            )
            if need_r:
                dz = of_norm if dz is None else dz + of_norm
        if dz is not None:
            dx = dz @ weight if need_x else None
            dweight = local_weight_gradient(dz, x, weight, ctx.main_grads) if need_weight else None
            dbias = dz.sum(0, dtype=torch.float32).to(dz.dtype) if need_bias else None
        return dx, dweight, dbias, dz if need_residual else None, dnorm_weight, dnorm_bias, *[None] * 5


# ---- calls ----


def _check(operator, operands, eps, quantize, config, main_grad):
    """Raise TypeError or ValueError if the arguments of a call are invalid on this rank."""
    x, weight, bias, residual, norm_weight, norm_bias = operands
    validation.check_operands(operator, x, weight, bias)
    check_main_grad(operator, weight, main_grad)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    names = {"residual": "residual", "weight": "norm_weight", "bias": "norm_bias"}
    check_norm(operator, shape, x, residual, norm_weight, norm_bias, eps, names)
    check_quantize(operator, quantize, operands)
    check_config(operator, config, GemmArNormConfig, x)


def _call(operator, operands, eps, quantize, main_grad, group, config):
    """Run a public operator: fast path, validation, torch.library op."""
    group = resolve_group(group)
    known, key = call_cache.lookup_run(operator, group, operands, (eps, quantize, config, get_mode()))
    if known is not None:
        return tuple(known(group, *operands))
    operands = *autograd.apply_autocast(*operands[:3]), *operands[3:]  # as torch.nn.functional.linear
    _check(operator, operands, eps, quantize, config, main_grad)
    x, weight, bias, residual, norm_weight, norm_bias = operands
    shape = *x.shape[:-1], weight.shape[0]
    rows = x.shape[:-1].numel()
    x = x.reshape(rows, x.shape[-1])
    residual = None if residual is None else residual.reshape(rows, weight.shape[0])
    flat = x, weight, bias, residual, norm_weight, norm_bias
    call = *flat, operator, float(eps)
    more = group.group_name, as_argument(config)
    if quantize:
        outputs = torch.ops.tdkernels.gemm_ar_norm_fp8(*call, *more)
    elif autograd.may_be_differentiated(flat):
        outputs = _GemmArNorm.apply(*call, *more, as_list(main_grad))
    else:
        outputs = torch.ops.tdkernels.gemm_ar_norm(*call, False, *more)[:2]
    shapes = [shape, shape, (*shape[:-1], 1)][: len(outputs)]
    _keep(key, group, flat, Options(operator, float(eps), quantize), config, shapes)
    return tuple(output.view(shape) for output, shape in zip(outputs, shapes, strict=True))


def _keep(key, group, flat, options, config, shapes):
    """Insert a call into the call cache; ``flat``: the operands, with x and residual as matrices."""
    if not call_cache.is_current(group, key) or group.size() == 1 or not flat[0].shape[0]:
        return
    config = _config_for(as_argument(config), flat, options, group)
    x_shape, z_shape, shapes = flat[0].shape, (flat[0].shape[0], flat[1].shape[0]), [*map(torch.Size, shapes)]

    def flattened(x, weight, bias, residual, *others):
        residual = None if residual is None else residual.reshape(z_shape)
        return x.reshape(x_shape), weight, bias, residual, *others

    def run(group, *operands):
        outputs = run_by(config, flattened(*operands), options, group)
        return [output.view(shape) for output, shape in zip(outputs, shapes)]  # without the statistics

    def bind(group, *operands):
        given = flattened(*operands)
        copied = any(a is not None and a.data_ptr() != b.data_ptr() for a, b in zip(given, operands, strict=True))
        return None if copied else launch.bind(given, options, group, config)

    views = list(shapes)
    can_bind = config.method == "fused"
    if options.quantize:  # a launch returns codes as uint8, in the shape of r as a matrix
        views[0], can_bind = gpu.e4m3_dtype(flat[0].device), can_bind and shapes[0] == torch.Size(z_shape)
    call_cache.insert(group, key, call_cache.CachedCall(run, bind if can_bind else None, views))


# ---- public functions ----


def gemm_ar_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, eps: float = 1e-6,
    *, bias: torch.Tensor | None = None, norm_bias: torch.Tensor | None = None, quantize: str | None = None,
    main_grad: torch.Tensor | None = None, group: GroupLike = None, config: GemmArNormConfig | None = None,
) -> tuple[torch.Tensor, ...]:
    """Multiply x by ``weight.T``, all-reduce the product, add the residual, and apply RMSNorm.

    Args:
        x: This rank's columns, [M, K / W] in bf16, fp16 or fp32. Further leading dimensions are flattened and restored:
            [B, S, K / W] gives [B, S, N].
        weight: This rank's columns of the full weight, [N, K / W] as in torch.nn.Linear, in the dtype of x.
        residual: [M, N] in the dtype of x, equal on all ranks, with the leading dimensions of x; or None.
        norm_weight: [N] in the dtype of x or fp32, equal on all ranks.
        eps: Added to the mean of the squares.
        bias: [N] in the dtype of x, the bias of the linear layer, equal on all ranks, or None. It is added once.
        norm_bias: [N] in the dtype of norm_weight, equal on all ranks, added to the normalized rows; or None.
        quantize: None, or "fp8" to return y as e4m3 codes with one scale per row, as ``all_reduce_rms_norm`` does.
        main_grad: As for ``gemm_ar``.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: GemmArNormConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune).

    Returns:
        (y, r), or (codes, r, scale) with ``quantize``; new tensors [M, N], bitwise equal on all ranks unless the
        selected method is "torch". r is the sum over the ranks plus bias and residual, added in fp32 in rank order and
        rounded once to the dtype of x. y is r / sqrt(mean(r**2) + eps) * norm_weight + norm_bias, computed in fp32 from
        the rounded r, in the dtype of x. scale is fp32 [M, 1]. With method "separate", rank 0 adds the bias to its
        partial before it is rounded.

    Gradient:
        With dz the gradient of r plus the gradient of the norm: dx = dz @ weight, dweight = dz.T @ x, dbias =
        dz.sum(0), dresidual = dz; for norm_weight and norm_bias as for ``torch.nn.functional.rms_norm``. The gradients
        of y and r must be equal on all ranks, as y and r are. With ``quantize`` there is no gradient.

    Raises:
        TypeError, ValueError: If an argument is invalid. Errors name the argument and its shape. Nothing has been
            launched.
        ValueError: On every rank, if the ranks disagree on shapes, dtypes, eps, quantize or config.
        ValueError: In the batch-invariant mode with ``max_ranks``, as for ``gemm_ar``.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        RuntimeError: In a backward with ``create_graph=True``; with ``quantize``, if an operand needs a gradient.

    Contract:
        Collective over ``group``. No host synchronization, except in the first call with a shape, which runs a
        consensus check and allocates. Can be captured in a CUDA graph after one call outside. The caller owns the
        outputs. On several nodes only method "torch" exists.

    Source:
        The fusion of all-reduce and norm: TensorRT-LLM. Overlap by signals: Triton-distributed
        (https://arxiv.org/abs/2504.19442).

    Example:
        >>> y, residual = tdkernels.gemm_ar_rms_norm(x, proj.weight, residual, norm.weight, norm.eps)
    """
    operands = x, weight, bias, residual, norm_weight, norm_bias
    return _call("gemm_ar_rms_norm", operands, eps, quantize, main_grad, group, config)


def gemm_ar_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None = None, eps: float = 1e-5, *, bias: torch.Tensor | None = None,
    quantize: str | None = None, main_grad: torch.Tensor | None = None, group: GroupLike = None,
    config: GemmArNormConfig | None = None,
) -> tuple[torch.Tensor, ...]:
    """Multiply x by ``weight.T``, all-reduce the product, add the residual, and apply LayerNorm.

    Args:
        x: As for ``gemm_ar_rms_norm``.
        weight: As for ``gemm_ar_rms_norm``.
        residual: As for ``gemm_ar_rms_norm``.
        norm_weight: As for ``gemm_ar_rms_norm``.
        norm_bias: As for ``gemm_ar_rms_norm``.
        eps: Added to the variance.
        bias: As for ``gemm_ar_rms_norm``.
        quantize: As for ``gemm_ar_rms_norm``.
        main_grad: As for ``gemm_ar``.
        group: As for ``gemm_ar_rms_norm``.
        config: As for ``gemm_ar_rms_norm``.

    Returns:
        (y, r), or (codes, r, scale) with ``quantize``, as for ``gemm_ar_rms_norm``, with
        y = (r - mean(r)) / sqrt(var(r) + eps) * norm_weight + norm_bias. var is the biased variance.

    Gradient:
        As for ``gemm_ar_rms_norm``, with ``torch.nn.functional.layer_norm``.

    Raises:
        TypeError, ValueError, PeerTimeoutError, RuntimeError: As for ``gemm_ar_rms_norm``.

    Contract:
        As for ``gemm_ar_rms_norm``.

    Source:
        As for ``gemm_ar_rms_norm``.
    """
    operands = x, weight, bias, residual, norm_weight, norm_bias
    return _call("gemm_ar_layer_norm", operands, eps, quantize, main_grad, group, config)
