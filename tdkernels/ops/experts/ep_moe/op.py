"""ep_moe: mixture of experts with expert parallelism. Every rank has some of the experts.

    x [T, H], topk_ids [T, k], topk_weights [T, k]  ->  y [T, H]
    y[t] = sum over j of topk_weights[t, j] * expert(topk_ids[t, j])(x[t])
    expert(e)(x) = swiglu(x @ w_gate_up[e].T) @ w_down[e].T

Rank r has experts r * E / W to (r + 1) * E / W - 1. T may differ between ranks and may be 0.

Forward. Three steps run one after the other. ``receive`` sends the tokens to the ranks of their experts
(``ep_dispatch``). The experts are two grouped GEMMs with SwiGLU in between. ``ep_combine`` sends the
results back and computes the weighted sums. The host waits only for the number of rows, and with ``max_tokens`` or
``max_tokens_per_rank`` it does not wait at all.

Backward. The backwards of the three steps run in reverse order. The gradient of y is sent to the experts and the
gradient of x is sent back. Experts and combine are one autograd function, so neither h nor the outputs of the experts
are saved (``experts``).

With ``EpMoeConfig(method="fused")`` the GEMMs overlap the communication, forward and backward, see ``ep_moe_fused``.

For inference, weights may be in fp8 (``steps.fp8_experts``).

Example:
    weights, ids = torch.topk(torch.softmax(x @ router, -1), 8)
    y = tdkernels.ep_moe(x, ids, weights, w_gate_up, w_down, num_experts=64)
"""

import torch

from tdkernels.autotune.invariance import check_invariant, is_batch_invariant, reject_invariant
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.scaling import check_fp8
from tdkernels.ops.common.validation import check_tensor
from tdkernels.ops.experts.dispatch.op import ep_combine, ep_combine_ref, ep_dispatch_ref
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.ops.experts.dispatch.token_buckets import with_capacity
from tdkernels.ops.experts.dispatch.validation import check_dispatch, check_most_tokens
from tdkernels.ops.experts.ep_moe.config import SEQUENCE, EpMoeConfig, choose_config, handle_for, layout_of
from tdkernels.ops.experts.ep_moe.experts import experts_and_combine
from tdkernels.ops.experts.ep_moe.fused import ep_moe_fused, why_not
from tdkernels.ops.experts.ep_moe.steps import fp8_experts, receive, rows_of
from tdkernels.ops.experts.ep_moe.torch_op import ep_moe_compiled
from tdkernels.ops.experts.grouped_gemm.fp8_weights import (
    check_fast_accum,
    check_fp8_experts,
    check_fp8_scale,
    check_fp8_tiles,
    check_scales_given,
    reject_fp8_gradients,
)
from tdkernels.ops.experts.grouped_gemm.op import group_gemm_ref
from tdkernels.ops.experts.grouped_gemm.swiglu import ACTIVATIONS
from tdkernels.ops.experts.grouped_gemm.validation import check_activation, check_experts, check_method
from tdkernels.runtime import autograd, call_cache
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.whole_call import whole_call


@torch.no_grad()
def ep_moe_ref(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    *, num_experts: int, activation: str | None = "swiglu", group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``ep_moe`` with torch and torch.distributed. It is the specification for tests."""
    group = resolve_group(group)
    recv, state = ep_dispatch_ref(x, topk_ids, topk_weights, num_experts=num_experts, group=group)
    hidden = group_gemm_ref(recv.x, w_gate_up, recv.splits, activation=activation)
    return ep_combine_ref(group_gemm_ref(hidden, w_down, recv.splits), state, group=group)


# ---- checks ----


def _check(request, topk_weights, w_gate_up, w_down, scales, use_fast_accum, activation, config):
    """Raise TypeError or ValueError if arguments are invalid on this rank, naming the argument and its shape."""
    operator, x, num_experts, world_size = request.operator, request.x, request.num_experts, request.group.size()
    check_fast_accum(operator, use_fast_accum, scales)
    if scales is None:
        check_experts(operator, x, w_gate_up, "w_gate_up")
    else:
        check_scales_given(operator, scales)
        check_fp8_experts(operator, x, w_gate_up, scales[0], "w_gate_up", "scale_gate_up")
    for name, tensor in (("topk_weights", topk_weights), ("w_down", w_down)):
        check_tensor(operator, name, tensor, None, x)
    check_dispatch(request, topk_weights, None)
    check_most_tokens(operator, request.max_tokens_per_rank, request.ids.shape[1], world_size)
    if activation is None:
        raise ValueError(f"{operator}: activation must be one of {ACTIVATIONS[1:]}, not None")
    check_activation(operator, activation, w_gate_up, "w_gate_up")
    if scales is None and w_down.dtype != x.dtype:
        raise TypeError(f"{operator}: x is {x.dtype} but w_down is {w_down.dtype}")
    mine = num_experts // world_size
    if w_gate_up.shape[0] != mine:
        raise ValueError(
            f"{operator}: w_gate_up must have the {mine} experts of this rank (of {num_experts}, on {world_size} "
            f"ranks), its shape is {list(w_gate_up.shape)}"
        )
    expected = [mine, x.shape[1], w_gate_up.shape[1] // 2]
    if list(w_down.shape) != expected:
        raise ValueError(
            f"{operator}: w_down must be [E / W, H, I] = {expected} for x {list(x.shape)} and w_gate_up "
            f"{list(w_gate_up.shape)}, its shape is {list(w_down.shape)}"
        )
    check_config(operator, config, EpMoeConfig, x)
    if scales is not None:
        check_fp8(operator, "w_down", w_down)
        check_fp8_scale(operator, x, w_down, scales[1], "w_down", "scale_down")
        gemm = config and config.gemm
        if gemm is not None:
            reason = gemm.illegal(w_gate_up.device, w_gate_up.dtype)
            if reason is not None:
                raise ValueError(f"{operator}: config cannot run: gemm: {reason}")
            check_fp8_tiles(operator, gemm.tiles, (w_gate_up, w_down), scales, "gemm: ")
    check_invariant(operator, config)
    if config is not None and scales is None:
        for name, weight in ("w_gate_up", w_gate_up), ("w_down", w_down):
            check_method(operator, config.parts(x)[1], weight, name)
    if config is not None and config.method == "fused":
        reason = "it cannot multiply weights in float8" if scales else why_not(request.group, request.quantize)
        if reason is not None:
            raise ValueError(f'{operator}: config cannot run: method "fused" does not support this call: {reason}')


# ---- public function ----


def ep_moe(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    *, num_experts: int, activation: str | None = "swiglu", quantize: str | None = None, max_tokens: int | None = None,
    max_tokens_per_rank: int | None = None, scale_gate_up: torch.Tensor | None = None,
    scale_down: torch.Tensor | None = None, use_fast_accum: bool = False, group: GroupLike = None,
    config: EpMoeConfig | None = None,
) -> torch.Tensor:
    """Apply a mixture of experts whose experts are divided between the ranks.

    Rank r has experts r * E / W to (r + 1) * E / W - 1.

    Args:
        x: This rank's tokens [T, H] in bf16, fp16 or fp32. T may differ between ranks and may be 0.
        topk_ids: Experts of each token, [T, k] int32 or int64. An id of -1 drops the assignment.
        topk_weights: Routing weight of each assignment, [T, k], of a floating-point dtype.
        w_gate_up: First weights of this rank's experts, [E / W, 2 * I, H], in the layout of torch.nn.Linear and the
            dtype of x, or in float8 with ``scale_gate_up``.
        w_down: Second weights of this rank's experts, [E / W, H, I], in the dtype of x, or in float8 with
            ``scale_down``.
        num_experts: Number of experts E, divisible by W.
        activation: "swiglu" or "swiglu_interleaved". With "swiglu" the first I rows of an expert in w_gate_up are the
            gate, the others are up. With "swiglu_interleaved" gate and up rows alternate.
        quantize: None or "fp8". With "fp8" tokens are sent as float8_e4m3fn with an fp32 scale per 128 channels, and
            converted back to the dtype of x for the GEMMs. Weights in float8 with block-wise scales multiply them as
            they are. Then x has no gradient; all other operands have one.
        max_tokens: As in ``ep_dispatch``: upper bound of the rows that any rank receives or stages. The host does not
            wait then. With method "fused" it must also be at least T * k on every rank.
        max_tokens_per_rank: As in ``ep_dispatch``: upper bound B of T on all ranks, the same on all of them. With few
            tokens dispatch is then a single launch. max_tokens may be omitted; it is then W * B * min(k, E / W). Method
            "fused" allocates symmetric memory for that many rows and for B * k assignments, which is a lot if the bound
            is large.
        scale_gate_up: For weights in float8: the scale of w_gate_up in fp32. Block-wise, [E / W, ceil(2 * I / 128),
            ceil(H / 128)]: one for each 128 x 128 elements. Row-wise, [E / W, 2 * I, 1], or [E / W]: one for each
            expert. H and I must be multiples of 16. Rows are quantized before each GEMM, in blocks of 1 x 128 for
            block-wise scales and otherwise with one scale per row, so float8 weights are for inference.
        scale_down: The scale of w_down: [E / W, ceil(H / 128), ceil(I / 128)], [E / W, H, 1] or [E / W].
        use_fast_accum: For weights in float8 with row-wise scales: whether tensor cores accumulate all of K with their
            reduced precision, as in ``group_gemm``. Block-wise products are always added in fp32.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: EpMoeConfig. None selects the best known config (see tdkernels.autotune). A config of the whole layer
            is looked up if the host waits for the number of rows. It is also looked up if max_tokens_per_rank is given,
            and max_tokens, if given too, is at least B * k and B * (W - 1). Otherwise, or if none is tuned, it is the
            sequence, whose parts select their own configs. Weights in float8 always use the sequence.

    Returns:
        y [T, H] in the dtype of x. GEMMs accumulate in fp32 and round their results to the dtype of x. The sum over the
        assignments of a token is computed as in ``ep_combine``. It is 0 if all assignments of a token are dropped.

    Gradient:
        Of x, topk_weights, w_gate_up and w_down. The gradients of the weights are complete: they include the tokens of
        all ranks, and are zero for an expert without tokens. The backward is collective, also for ranks without tokens.
        The product of dy and w_down is rounded to the dtype of x before it is multiplied by the routing weight, so in
        fp16 it can overflow where the weighted product does not. With weights in float8 there is no gradient.

    Raises:
        TypeError, ValueError: If operands are invalid; the message has their shapes. Nothing has been launched.
        ValueError: On every rank, as in ``ep_dispatch``: if the ranks disagree, if an id is out of range, or if there
            are more rows than max_tokens or more tokens than max_tokens_per_rank.
        PeerTimeoutError: If a peer does not make the call in time.
        RuntimeError: In a backward with create_graph=True; if an operand requires a gradient and weights are in float8.

    Contract:
        Collective over ``group``. The host synchronizes unless max_tokens or max_tokens_per_rank is given. With one of
        them the call can be captured in a CUDA graph after one call outside. The caller owns the output.

    Source:
        The sequence of ep_dispatch, group_gemm and ep_combine, as in DeepEP (https://github.com/deepseek-ai/DeepEP).
    """
    group = resolve_group(group)
    scales = None if scale_gate_up is None and scale_down is None else (scale_gate_up, scale_down)
    operands = x, topk_ids, topk_weights, w_gate_up, w_down
    limits = max_tokens, max_tokens_per_rank
    has_capacity = max_tokens is not None or max_tokens_per_rank is not None
    if has_capacity and scales is None and torch.compiler.is_compiling():
        return _in_graph(operands, num_experts, activation, quantize, limits, use_fast_accum, group, config)
    return _ep_moe(operands, scales, num_experts, activation, quantize, limits, use_fast_accum, group, config)


def _in_graph(operands, num_experts, activation, quantize, limits, use_fast_accum, group, config):
    """Execute ``ep_moe`` as an operator in a graph of torch.compile."""
    x, topk_ids, topk_weights, w_gate_up, w_down = operands
    x, w_gate_up, w_down = autograd.apply_autocast(x, w_gate_up, w_down)
    request = DispatchRequest("ep_moe", group, x, topk_ids, num_experts, None, quantize, *limits)
    # The discovery of the nodes cannot be traced. In batch-invariant mode the steps make it when they run.
    _check(request, topk_weights, w_gate_up, w_down, None, use_fast_accum, activation, config)
    _reject_gradient_of_codes(quantize, x)
    settings = num_experts, activation, quantize, with_capacity(request.shape).max_tokens, limits[1]
    texts = map(as_argument, (config or SEQUENCE).parts(x))
    return ep_moe_compiled(
        x, topk_ids, topk_weights, w_gate_up, w_down, *settings, group.group_name, *texts  # type: ignore[arg-type]
    )


@outside_graphs
def _ep_moe(operands, scales, num_experts, activation, quantize, limits, use_fast_accum, group, config):
    """Execute ``ep_moe`` outside graphs. ``limits`` are (max_tokens, max_tokens_per_rank)."""
    x, topk_ids, topk_weights, w_gate_up, w_down = operands
    if scales is None:
        x, w_gate_up, w_down = autograd.apply_autocast(x, w_gate_up, w_down)
    else:
        (x,) = autograd.apply_autocast(x)
    layer = x, topk_ids, topk_weights, w_gate_up, w_down
    known, key = call_cache.lookup(
        "ep_moe", group, (*layer, *(scales or (None, None))),
        (num_experts, activation, quantize, *limits, use_fast_accum, config),
    )
    request = DispatchRequest("ep_moe", group, x, topk_ids, num_experts, None, quantize, *limits)
    if known is None:
        _check(request, topk_weights, w_gate_up, w_down, scales, use_fast_accum, activation, config)
        if is_batch_invariant() and spans_nodes(group):
            reject_invariant("ep_moe", "a group on several nodes")
        max_tokens, layout = with_capacity(request.shape).max_tokens, None
        # Weights in fp8 and the batch-invariant mode always use the sequence.
        if config is None and scales is None and not is_batch_invariant():
            layout = layout_of(quantize, max_tokens, limits[1], topk_ids.shape[1], group)
        known = max_tokens, layout
        call_cache.insert(group, key, known)
    max_tokens, layout = known
    if scales is not None:
        reject_fp8_gradients("ep_moe", *layer, *scales)
    else:
        _reject_gradient_of_codes(quantize, x)
    request = request._replace(max_tokens=max_tokens)
    return _run(request, topk_weights, w_gate_up, w_down, scales, use_fast_accum, activation, config, layout)


def _reject_gradient_of_codes(quantize, x):
    if quantize is not None and torch.is_grad_enabled() and x.requires_grad:
        raise ValueError('ep_moe: quantize="fp8" has no gradient, and x requires one: detach it, or no_grad')


@whole_call
def _run(request, topk_weights, w_gate_up, w_down, scales, use_fast_accum, activation, config, layout):
    x, ids, group, counted = request.x, request.ids, request.group, None
    if config is None:
        config = SEQUENCE
        if layout is not None:
            config, counted = choose_config(layout, request, w_down)
    if config.method == "fused":
        return ep_moe_fused(request, topk_weights, w_gate_up, w_down, activation, config, counted)
    if counted is not None:
        ids = handle_for(config, counted, request)
    ep, gemm = config.parts(x if scales is None else w_gate_up)
    recv, handle = receive(
        x, ids, topk_weights, request.num_experts, request.quantize, request.max_tokens, request.max_tokens_per_rank,
        group, ep,
    )
    if scales is None:
        rows = rows_of(recv, x.dtype)
        return experts_and_combine(recv, handle, rows, topk_weights, w_gate_up, w_down, activation, gemm)
    made = fp8_experts(recv, w_gate_up, w_down, scales, use_fast_accum, activation, x.dtype, gemm)
    return ep_combine(made, handle, group=group)
