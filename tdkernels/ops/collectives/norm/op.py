"""all_reduce_rms_norm and all_reduce_layer_norm: all-reduce, residual addition and norm in one kernel.

    x [..., hidden] on each rank, residual [..., hidden] equal on all ranks
        ->  r = all_reduce(x) + residual        y = norm(r) * weight + bias

This is the end of every tensor-parallel layer. One launch replaces three (``kernel``); during decoding these are bound
by latency. r is the residual of the next layer, and y is the input of its first GEMM, also in fp8.

    exchange      used for      algorithm
    "one_shot"    few rows      every rank receives all x, adds them and normalizes
    "two_shot"    many rows     the owner of a row adds it and sends r to all ranks, which normalize it

r is rounded once, after the residual has been added. y is computed in fp32 from the rounded r.

Backward. y and r are equal on all ranks, and so are their gradients. The gradients need no communication: with dn the
gradient of the norm for dy, dresidual = dx = dn + dr, and those of weight and bias are the usual ones.

Example:
    y, residual = tdkernels.all_reduce_rms_norm(x, residual, weight)
    # instead of all_reduce(x); residual += x; y = F.rms_norm(residual, weight.shape, weight, 1e-6)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.invariance import check_invariant, check_ranks, invariant_ranks, reject_invariant
from tdkernels.autotune.modes import get_mode
from tdkernels.ops.collectives.norm import launch, reference
from tdkernels.ops.collectives.norm.config import AllReduceNormConfig
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config, from_text, with_config
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.norm_launch import Options, output_specs, uninitialized
from tdkernels.ops.common.norm_validation import check_dense, check_norm, check_quantize
from tdkernels.ops.common.tunable_base import select
from tdkernels.ops.common.validation import shape_of
from tdkernels.runtime import autograd, call_cache, torch_op
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch.distributed as dist

# ---- torch.library operators, for torch.compile ----


def _config_for(text, operands, options, group):
    """Return the resolved config of a call: the config given as ``text``, or the selected one if it is empty."""
    if text:
        config = from_text(AllReduceNormConfig, text)
        check_invariant(options.operator, config)
        return config
    if spans_nodes(group):
        reject_invariant(options.operator, "a group on several nodes")
        return AllReduceNormConfig(method="torch")
    tunable = tunables.tunable(options.operator)
    x = operands[0]

    def describe():
        sizes = tunable.sizes_of(x.shape, world_size=group.size())
        return sizes, tunable.layouts[options.quantize is not None], launch.problem_fields(operands, options)

    fixed = options, *(None if operand is None else operand.dtype for operand in operands)
    return select(options.operator, x, group, (x.shape, fixed), describe).config


def _by_torch(operands, options, group):
    return reference.forward(*operands, options.eps, options.is_layer_norm, options.quantize, group)


def _run_by(config, operands, options, group):
    """Run a call with the method of a resolved config; return y, r, with fp8 the scales, and perhaps statistics."""
    if config.method == "fused":
        return launch.launch(operands, options, group, config)
    return _by_torch(operands, options, group)


def run(
    operands: launch.Operands, options: Options, group: "dist.ProcessGroup", config: str
) -> Sequence[torch.Tensor]:
    """Compute y, r, with fp8 the scales, and perhaps the statistics, without gradient.

    Args:
        operands: x, residual, weight and bias, which have been validated.
        options: See ``Options``.
        group: The resolved group.
        config: The config as text, or "" to select one.
    """
    x = operands[0]
    check_ranks(options.operator, group.size())
    if group.size() == 1 and not invariant_ranks():
        return _by_torch(operands, options, group)
    if not x.numel():
        group_state(group).check_consensus_cached(options.operator, launch.problem_fields(operands, options))
        return uninitialized(x, output_specs(x, x.shape, options))
    resolved = _config_for(config, operands, options, group)
    if resolved.method != "fused":
        fields = with_config(launch.problem_fields(operands, options), resolved)
        group_state(group).check_consensus_cached(options.operator, fields)
    return _run_by(resolved, operands, options, group)


def _forward(x, residual, weight, bias, operator, eps, keep, group, config):
    options = Options(operator, eps, None)
    y, r, *stats = run((x, residual, weight, bias), options, torch_op.group_by_name(group), config)
    if not keep:
        return y, r, r.new_empty(0, dtype=torch.float32)
    return y, r, *(stats or (reference.statistics(r, eps, options.is_layer_norm),))


def _fake_forward(x, residual, weight, bias, operator, eps, keep, group, config):
    r = torch.empty_like(x, memory_format=torch.contiguous_format)
    stats = x.new_empty((x.shape[:-1].numel(), 2) if keep else (0,), dtype=torch.float32)
    return torch.empty_like(r), r, stats


def _forward_fp8(x, residual, weight, bias, operator, eps, group, config):
    options = Options(operator, eps, "fp8")
    return tuple(run((x, residual, weight, bias), options, torch_op.group_by_name(group), config)[:3])


def _fake_forward_fp8(x, residual, weight, bias, operator, eps, group, config):
    return tuple(uninitialized(x, output_specs(x, x.shape, Options(operator, eps, "fp8"))[:3]))


_OPERANDS = "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, str operator, float eps"
torch_op.register(
    f"all_reduce_norm({_OPERANDS}, bool keep, str group, str config) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
torch_op.register(
    f"all_reduce_norm_fp8({_OPERANDS}, str group, str config) -> (Tensor, Tensor, Tensor)",
    _forward_fp8,
    _fake_forward_fp8,
)


class _AllReduceNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, operator, eps, group, config):
        y, r, stats = torch.ops.tdkernels.all_reduce_norm(x, residual, weight, bias, operator, eps, True, group, config)
        ctx.save_for_backward(r, weight, stats)
        ctx.operator = operator
        ctx.set_materialize_grads(False)
        return y, r

    @staticmethod
    def backward(ctx, dy, dr):
        autograd.reject_second_derivatives(ctx.operator)
        r, weight, stats = ctx.saved_tensors
        need_x, need_residual, need_weight, need_bias = ctx.needs_input_grad[:4]
        need_r = need_x or need_residual
        dweight = dbias = None
        if dy is not None:
            wanted = need_r, need_weight, need_bias
            is_layer_norm = ctx.operator.endswith("layer_norm")
            of_norm, dweight, dbias = reference.gradients(dy, r, weight, stats, is_layer_norm, wanted)
            if need_r:
                dr = of_norm if dr is None else dr + of_norm
        return dr if need_x else None, dr if need_residual else None, dweight, dbias, None, None, None, None


# ---- calls ----


def _check(operator, x, residual, weight, bias, eps, quantize, config):
    """Raise TypeError or ValueError if the arguments of a call are invalid on this rank."""
    validation.check_tensor(operator, "x", x, validation.DTYPES, memory=False)
    check_dense(operator, "x", x)
    validation.check_device(operator, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{operator}: x must be [..., hidden] with hidden of at least 1, its shape is {shape_of(x)}")
    check_norm(operator, x.shape, x, residual, weight, bias, eps)
    check_quantize(operator, quantize, (x, residual, weight, bias))
    check_config(operator, config, AllReduceNormConfig, x)


def _call(operator, x, residual, weight, bias, eps, quantize, group, config):
    """Run a public operator: fast path, validation, torch.library op."""
    group = resolve_group(group)
    operands = x, residual, weight, bias
    known, key = call_cache.lookup_run(operator, group, operands, (eps, quantize, config, get_mode()))
    if known is not None:
        return tuple(known(group, *operands))
    _check(operator, x, residual, weight, bias, eps, quantize, config)
    eps, text = float(eps), as_argument(config)
    if quantize:
        outputs = torch.ops.tdkernels.all_reduce_norm_fp8(*operands, operator, eps, group.group_name, text)
    elif autograd.may_be_differentiated(operands):
        outputs = _AllReduceNorm.apply(*operands, operator, eps, group.group_name, text)
    else:
        op = torch.ops.tdkernels.all_reduce_norm
        outputs = op(*operands, operator, eps, False, group.group_name, text)[:2]
    # The launch returns codes as uint8, in the shape of x.
    views = [output.dtype if output.dtype.itemsize == 1 else output.shape for output in outputs]
    _keep(key, group, operands, Options(operator, eps, quantize), config, views)
    return tuple(outputs)


def _keep(key, group, operands, options, config, views):
    """Insert a call into the call cache; ``views`` as for ``CachedCall``."""
    if not call_cache.is_current(group, key) or group.size() == 1 or not operands[0].numel():
        return
    config = _config_for(as_argument(config), operands, options, group)
    run = lambda group, *of: _run_by(config, of, options, group)[: len(views)]  # noqa: E731
    bind = lambda group, *of: launch.bind(of, options, group, config)  # noqa: E731
    call_cache.insert(group, key, call_cache.CachedCall(run, bind if config.method == "fused" else None, views))


# ---- public functions ----


def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6, *,
    bias: torch.Tensor | None = None, quantize: str | None = None, group: GroupLike = None,
    config: AllReduceNormConfig | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sum x over the ranks, add the residual, and apply RMSNorm, in one kernel.

    Args:
        x: This rank's part of the sum, [..., hidden] in bf16, fp16 or fp32, with the same shape on all ranks.
        residual: [..., hidden] in the dtype of x, equal on all ranks, or None for no residual.
        weight: [hidden] in the dtype of x or fp32, equal on all ranks.
        eps: Added to the mean of the squares.
        bias: [hidden] in the dtype of weight, equal on all ranks, added to the normalized rows; or None.
        quantize: None, or "fp8" to return y as e4m3 codes with one scale per row, as ``quantize_fp8`` does. The codes
            are in the e4m3 format that the device multiplies: float8_e4m3fnuz on AMD's gfx942, else float8_e4m3fn.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: AllReduceNormConfig, the same on all ranks. None selects the best known config (see
            tdkernels.autotune).

    Returns:
        (y, r), or (codes, r, scale) with ``quantize``; new tensors, bitwise equal on all ranks. r [..., hidden] is the
        sum over the ranks plus the residual, added in fp32 in rank order and rounded once to the dtype of x. y
        [..., hidden] is r / sqrt(mean(r**2) + eps) * weight + bias, computed in fp32 from the rounded r, in the dtype
        of x. scale is fp32 [..., 1]. If the selected method is "torch", torch's all-reduce sums in its own order, and
        the sum is also rounded before the residual is added.

    Gradient:
        For x and the residual: the gradient of r plus the gradient of the norm. For weight and bias: as for
        ``torch.nn.functional.rms_norm``. The gradients of y and r must be equal on all ranks, as y and r are. No
        communication. With ``quantize`` there is no gradient.

    Raises:
        TypeError, ValueError: If an argument is invalid. Errors name the argument and its shape. Nothing has been
            launched.
        ValueError: On every rank, if the ranks disagree on shapes, dtypes, eps, quantize or config.
        ValueError: In the batch-invariant mode with ``max_ranks``, as for ``all_reduce``.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        RuntimeError: In a backward with ``create_graph=True``; with ``quantize``, if an operand needs a gradient.

    Contract:
        Collective over ``group``. No host synchronization, except in the first call with a shape, which runs a
        consensus check and allocates. Can be captured in a CUDA graph after one call outside. The caller owns the
        outputs. On several nodes only method "torch" exists.

    Source:
        The fusion: TensorRT-LLM's all-reduce with RMSNorm. One-shot and two-shot exchanges: TensorRT-LLM's custom
        all-reduce.

    Example:
        >>> y, residual = tdkernels.all_reduce_rms_norm(x, residual, norm.weight, norm.eps)
    """
    return _call("all_reduce_rms_norm", x, residual, weight, bias, eps, quantize, group, config)


def all_reduce_layer_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None = None,
    eps: float = 1e-5, *, quantize: str | None = None, group: GroupLike = None,
    config: AllReduceNormConfig | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sum x over the ranks, add the residual, and apply LayerNorm, in one kernel.

    Args:
        x: As for ``all_reduce_rms_norm``.
        residual: As for ``all_reduce_rms_norm``.
        weight: As for ``all_reduce_rms_norm``.
        bias: As for ``all_reduce_rms_norm``.
        eps: Added to the variance.
        quantize: As for ``all_reduce_rms_norm``.
        group: As for ``all_reduce_rms_norm``.
        config: As for ``all_reduce_rms_norm``.

    Returns:
        (y, r), or (codes, r, scale) with ``quantize``, as for ``all_reduce_rms_norm``, with
        y = (r - mean(r)) / sqrt(var(r) + eps) * weight + bias. var is the biased variance.

    Gradient:
        As for ``all_reduce_rms_norm``, with ``torch.nn.functional.layer_norm``.

    Raises:
        TypeError, ValueError, PeerTimeoutError, RuntimeError: As for ``all_reduce_rms_norm``.

    Contract:
        As for ``all_reduce_rms_norm``.

    Source:
        As for ``all_reduce_rms_norm``.
    """
    return _call("all_reduce_layer_norm", x, residual, weight, bias, eps, quantize, group, config)
