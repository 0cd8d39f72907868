"""tp_moe: tensor-parallel experts. Every rank has a slice of every expert, and tokens are sharded between the ranks.

    moe_ag_gemm   x [M / W, H], topk_ids [M / W, k], w [E, N / W, H]  ->  h [M * k, N / W], grouped by expert
    moe_gemm_rs   h [M * k, I / W], w [E, H, I / W]                   ->  y [M / W, H], weighted sums by token
    tp_moe        moe_ag_gemm with SwiGLU (gate-up), then moe_gemm_rs (down)

Forward. Expert ids are gathered and sorted on the device (``kernel_route``), once for both operators and their
backwards. In ``moe_ag_gemm_kernel`` some programs push this rank's tokens to all peers, while others compute tiles of
tokens that have arrived, in a few overlap stages. ``moe_gemm_rs_kernel`` processes the stages in reverse order: tiles
with tokens of other ranks come first. While later tiles are computed, it sums the weighted rows of each finished token
and sends the sum to the token's rank. That rank adds the sums of all ranks in fp32 and in rank order.

Backward. Only shards are saved.

    operator      dgrad                                                      wgrad
    moe_gemm_rs   a moe_ag_gemm of dy; then one kernel computes dh, the      grouped GEMM of the gathered rows of dy and
                  weighted h and dtopk_weights                               the weighted h
    moe_ag_gemm   dx by a moe_gemm_rs of the gradient of SwiGLU's input;     grouped GEMM with the gathered rows of x
                  x is gathered concurrently, on the side stream

In tp_moe with an activation, h is not saved. ``weighted_gradients_kernel`` computes it again from the input of SwiGLU,
and computes the gradient of that input instead of dh.

Each dgrad selects its own config, under the layout "kn". Chunks and stages are given by the routing of the forward.

Example:
    y = tdkernels.tp_moe(x, topk_ids, topk_weights, w_gate_up, w_down)
"""

import torch

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops.experts.grouped_gemm.fp8_weights import check_fast_accum, reject_fp8_gradients
from tdkernels.ops.experts.grouped_gemm.launch import swiglu_backward
from tdkernels.ops.experts.grouped_gemm.op import group_gemm_ref
from tdkernels.ops.experts.tp_moe.config import MoeTpConfig
from tdkernels.ops.experts.tp_moe.fp8 import down_stage, fp8_configs, gate_up_stage
from tdkernels.ops.experts.tp_moe.routing import MoeRouting
from tdkernels.ops.experts.tp_moe.steps import (
    choose_configs,
    down_backward,
    first_fields,
    first_forward,
    gate_up_backward,
    layer_backward,
    routing_of,
    second_forward,
    tp_moe_configs,
)
from tdkernels.ops.experts.tp_moe.torch_op import INVARIANT, tp_moe_compiled
from tdkernels.ops.experts.tp_moe.validation import check_ag_gemm, check_gemm_rs, check_tp_moe
from tdkernels.runtime import autograd, call_cache
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.whole_call import whole_call

# ---- references with plain torch.distributed ----


def _sort_by_expert(topk_ids, experts, group):
    """Return (assignments of all ranks sorted by expert, rows per expert, mask [M, k] of assignments not dropped)."""
    ids = all_gather_rows(topk_ids, group)
    kept, ids = ids >= 0, ids.flatten().long()
    order = torch.argsort(torch.where(ids < 0, experts, ids), stable=True)[: int(kept.sum())]
    return order, torch.bincount(ids[order], minlength=experts), kept


@torch.no_grad()
def moe_ag_gemm_ref(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, *, activation: str | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``moe_ag_gemm`` with torch.distributed. It is the specification for tests.

    Only the order of rows differs: h [M * k, ·] is in the order of gathered tokens and their top-k assignments, and
    zero for dropped assignments.
    """
    group = resolve_group(group)
    order, splits, kept = _sort_by_expert(topk_ids, w.shape[0], group)
    rows = all_gather_rows(x, group)[order // topk_ids.shape[1]]
    made = group_gemm_ref(rows, w, splits, activation=activation)
    return made.new_zeros(kept.numel(), made.shape[1]).index_copy(0, order, made)


@torch.no_grad()
def moe_gemm_rs_ref(
    h: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w: torch.Tensor, *, group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``moe_gemm_rs`` with torch.distributed. It is the specification for tests.

    Rows of h are in the order of gathered tokens and their top-k assignments. Products are weighted and summed over the
    assignments of a token in fp32.
    """
    group = resolve_group(group)
    order, splits, kept = _sort_by_expert(topk_ids, w.shape[0], group)
    weights = all_gather_rows(topk_weights, group).where(kept, 0.0)
    out = group_gemm_ref(h[order], w, splits)
    choices = out.new_zeros(kept.numel(), out.shape[1], dtype=torch.promote_types(out.dtype, torch.float32))
    choices[order] = out.to(choices.dtype)
    partial = (choices.view(*kept.shape, out.shape[1]) * weights.to(choices.dtype).unsqueeze(-1)).sum(1)
    return reduce_scatter_rows(partial.to(out.dtype), group)


@torch.no_grad()
def tp_moe_ref(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    *, activation: str | None = "swiglu", group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``tp_moe`` with torch.distributed. It is the specification for tests."""
    group = resolve_group(group)
    h = moe_ag_gemm_ref(x, topk_ids, w_gate_up, activation=activation, group=group)
    return moe_gemm_rs_ref(h, topk_ids, topk_weights, w_down, group=group)


# ---- autograd ----


class _AgGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, routing, activation, config, of_backward):
        h, pre = first_forward(x, w, routing, activation, config, keep=True)
        ctx.save_for_backward(x, w, pre)
        ctx.routing, ctx.activation, ctx.config = routing, activation, of_backward
        return h

    @staticmethod
    def backward(ctx, dh):
        autograd.reject_second_derivatives("moe_ag_gemm")
        x, w, pre = ctx.saved_tensors
        need = ctx.needs_input_grad[:2]
        dpre = swiglu_backward(dh, pre, ctx.routing.splits, ctx.activation) if ctx.activation else dh
        return *gate_up_backward(dpre, x, w, ctx.routing, ctx.config, *need), *[None] * 4


class _GemmRs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, topk_weights, routing, config, of_backward):
        y, weights = second_forward(h, w, topk_weights, routing, config)
        ctx.save_for_backward(h, w, weights)
        ctx.routing, ctx.config, ctx.weights_dtype = routing, of_backward, topk_weights.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("moe_gemm_rs")
        h, w, weights = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        gradients = down_backward(dy, h, w, weights, ctx.routing, None, ctx.config, *need[1:])
        dh, dw, dweights = (dx if needed else None for dx, needed in zip(gradients, need, strict=True))
        autograd.clear_unwritten_rows(dh, ctx.routing.splits)
        return dh, dw, None if dweights is None else dweights.to(ctx.weights_dtype), None, None, None


class _Layer(torch.autograd.Function):
    """Both stages.

    If there is an activation, its input is saved, and the backward computes h from it. It is half as wide to save h, so
    h is saved if the gate-up stage needs no gradient.
    """

    @staticmethod
    def forward(ctx, x, topk_weights, w_gate_up, w_down, routing, activation, configs):
        of_pre = activation if ctx.needs_input_grad[0] or ctx.needs_input_grad[2] else None
        h, pre = first_forward(x, w_gate_up, routing, activation, configs.first, keep=of_pre is not None)
        y, weights = second_forward(h, w_down, topk_weights, routing, configs.second)
        ctx.save_for_backward(x, pre if of_pre else h, weights, w_gate_up, w_down)
        ctx.call, ctx.weights_dtype = (routing, of_pre, configs.backward), topk_weights.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("tp_moe")
        dx, dtopk, *dw = layer_backward(dy, *ctx.saved_tensors, *ctx.call, ctx.needs_input_grad[:4])
        return dx, None if dtopk is None else dtopk.to(ctx.weights_dtype), *dw, *[None] * 3


# ---- public functions ----


@outside_graphs
@whole_call
def moe_ag_gemm(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, *, activation: str | None = None, group: GroupLike = None,
    config: MoeTpConfig | None = None,
) -> tuple[torch.Tensor, MoeRouting]:
    """All-gather tokens, and multiply each of them by the weights of its experts while they arrive.

    Args:
        x: This rank's tokens [M / W, H] in bf16, fp16 or fp32. The number of rows must be the same on every rank.
        topk_ids: Experts of each token, [M / W, k] int32 or int64. An id of -1 drops the assignment.
        w: This rank's rows of the weight of every expert, [E, N / W, H], in the dtype of x.
        activation: None, "swiglu" or "swiglu_interleaved", as in ``group_gemm``. With an activation, w has gate rows
            and up rows.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: MoeTpConfig, the same on all ranks, also used for the gradients. None selects the best known config
            (see tdkernels.autotune); if the group spans several nodes, it is method "torch". Each GEMM of the backward
            then selects its own config, unless method "torch" was selected for the forward: it is used for the
            backward too.

    Returns:
        (h, routing). h is [M * k, N / W], or half as wide with an activation. It has one row per top-k assignment of
        all ranks' tokens, grouped by expert. Rows past the rows of the last expert, as many as there are dropped
        assignments, are not written. ``routing`` is a MoeRouting, which maps rows to assignments; pass it to
        ``moe_gemm_rs``.

    Gradient:
        dx is summed over ranks and assignments in fp32. dw is summed over the tokens of all ranks.

    Raises:
        TypeError, ValueError: If operands are invalid. Nothing has been launched.
        ValueError: On every rank, if the ranks disagree or if an id is out of range. On a GPU, the error for ids is
            raised by ``tdkernels.synchronize()`` or by a later call, and the group cannot be used afterwards.
        PeerTimeoutError: If a peer does not make the call in time.

    Contract:
        Collective over ``group``. No host synchronization. Can be captured in a CUDA graph after one call outside. The
        caller owns the output.

    Source:
        Tiles of an expert ordered by the arrival of their tokens: FLUX (https://arxiv.org/abs/2406.06858).
    """
    x, w = autograd.apply_autocast(x, w)
    group = resolve_group(group)
    settings = activation, config, get_mode()
    configs, key = call_cache.lookup("moe_ag_gemm", group, (x, topk_ids, w), settings)
    if configs is None:
        check_ag_gemm("moe_ag_gemm", x, topk_ids, w, activation, config)
        (tokens, choices), ranks = topk_ids.shape, group.size()
        sizes = ranks * tokens, ranks * w.shape[1], w.shape[2], w.shape[0], choices
        fields = first_fields(x, topk_ids, w, activation)
        configs = choose_configs("moe_ag_gemm", config, sizes, activation or "none", w, group, fields, first=w)
        call_cache.insert(group, key, configs)
    routing = routing_of("moe_ag_gemm", topk_ids, w, group, configs.first)
    if not x.shape[0]:
        return _empty_output(w.shape[1] // (2 if activation else 1), x, w), routing
    if not autograd.may_be_differentiated([x, w]):
        return first_forward(x, w, routing, activation, configs.first, keep=False)[0], routing
    return _AgGemm.apply(x, w, routing, activation, configs.first, configs.backward), routing


@outside_graphs
@whole_call
def moe_gemm_rs(
    h: torch.Tensor, routing: MoeRouting, topk_weights: torch.Tensor, w: torch.Tensor, *, group: GroupLike = None,
    config: MoeTpConfig | None = None,
) -> torch.Tensor:
    """Multiply rows by the weights of their experts, and reduce-scatter the weighted sum of each token.

    Args:
        h: Rows [M * k, I / W] in bf16, fp16 or fp32, in the order of the output of ``moe_ag_gemm``.
        routing: MoeRouting that ``moe_ag_gemm`` returned.
        topk_weights: Routing weights of this rank's tokens, [M / W, k], of a floating-point dtype.
        w: This rank's columns of the weight of every expert, [E, N, I / W], in the dtype of h.
        group: The group of ``moe_ag_gemm``.
        config: As in ``moe_ag_gemm``. Only the method and the tiles are used; chunks and stages are given by the
            routing.

    Returns:
        y [M / W, N] in the dtype of h. Each rank sums the weighted rows of a token in fp32, in the order of its top-k
        assignments. Then the sums of the ranks are added in fp32, in rank order. Sums of other ranks are rounded to
        the dtype of h when they are sent.

    Gradient:
        dh, dw and dtopk_weights. All are complete. The product of dy and w is rounded as in ``tp_moe``.

    Raises:
        TypeError, ValueError: If operands are invalid. Nothing has been launched.
        ValueError: On every rank, if the ranks disagree.
        PeerTimeoutError: If a peer does not make the call in time.

    Contract:
        As for ``moe_ag_gemm``.

    Source:
        Top-k sum and reduce-scatter overlapped with the GEMM: FLUX (https://arxiv.org/abs/2406.06858).
    """
    if not isinstance(routing, MoeRouting):
        raise TypeError(f"moe_gemm_rs: routing must be the MoeRouting of a moe_ag_gemm, not {type(routing).__name__}")
    if resolve_group(group) is not routing.group:
        raise ValueError("moe_gemm_rs: the routing belongs to another group than the call")
    h, w = autograd.apply_autocast(h, w)
    check_gemm_rs("moe_gemm_rs", h, routing, topk_weights, w, config)
    tokens, choices, ranks = routing.tokens, routing.num_choices, routing.world_size
    sizes = ranks * tokens, w.shape[1], ranks * w.shape[2], w.shape[0], choices
    fields = {"M/W": tokens, "w": tuple(w.shape), "dtype": str(h.dtype)}
    # Select configs before the weights are gathered. Otherwise ranks with different selections would deadlock.
    configs = choose_configs("moe_gemm_rs", config, sizes, "nk", w, routing.group, fields, second=w)
    if not tokens:
        return _empty_output(w.shape[1], h, topk_weights, w)
    if not autograd.may_be_differentiated([h, topk_weights, w]):
        return second_forward(h, w, topk_weights, routing, configs.second)[0]
    return _GemmRs.apply(h, w, topk_weights, routing, configs.second, configs.backward)


@whole_call
def tp_moe(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    *, activation: str | None = "swiglu", scale_gate_up: torch.Tensor | None = None,
    scale_down: torch.Tensor | None = None, use_fast_accum: bool = False, group: GroupLike = None,
    config: MoeTpConfig | None = None,
) -> torch.Tensor:
    """Apply a layer of tensor-parallel experts: ``moe_ag_gemm``, then ``moe_gemm_rs``.

    Args:
        x: This rank's tokens [M / W, H] in bf16, fp16 or fp32. The number of rows must be the same on every rank.
        topk_ids: Experts of each token, [M / W, k] int32 or int64. An id of -1 drops the assignment.
        topk_weights: Routing weights, [M / W, k], of a floating-point dtype.
        w_gate_up: This rank's slice of the first weight of every expert, [E, 2 * I / W, H], in the dtype of x. With
            activation "swiglu" the gate rows come first, then the up rows; with "swiglu_interleaved" they alternate.
            With activation None it is [E, I / W, H]. In float8 with ``scale_gate_up``.
        w_down: This rank's columns of the second weight of every expert, [E, H, I / W], in the dtype of x, or in float8
            with ``scale_down``.
        activation: "swiglu", "swiglu_interleaved" or None.
        scale_gate_up: For weights in float8: the scale of w_gate_up [E, N, H] in fp32. Block-wise, [E, ceil(N / 128),
            ceil(H / 128)]: one for each 128 x 128 elements. Row-wise, [E, N, 1], or [E]: one for each expert. H and
            I / W must be multiples of 16. x is quantized before it is sent, and the input of w_down before its GEMM, in
            blocks of 1 x 128 for block-wise scales and otherwise with one scale per row, so float8 weights are for
            inference.
        scale_down: The scale of w_down: [E, ceil(H / 128), ceil(I / W / 128)], [E, H, 1] or [E].
        use_fast_accum: For weights in float8 with row-wise scales: whether tensor cores accumulate all of K with their
            reduced precision, as in ``group_gemm``. Block-wise products are always added in fp32.
        group: As in ``moe_ag_gemm``.
        config: As in ``moe_ag_gemm``. With weights in float8 None is the default config, which is not tuned, and method
            "torch" uses torch's collectives only.

    Returns:
        y [M / W, H] in the dtype of x, accumulated in fp32 as in ``moe_gemm_rs``.

    Gradient:
        dx, dtopk_weights, dw_gate_up and dw_down. Each is complete and has the shape of its operand. The product of dy
        and w_down is rounded to the dtype of x before it is multiplied by the routing weight, so in fp16 it can
        overflow where the weighted product does not. With weights in float8 there is no gradient.

    Raises:
        TypeError, ValueError, PeerTimeoutError: As ``moe_ag_gemm`` and ``moe_gemm_rs``.
        RuntimeError: If an operand requires a gradient and weights are in float8.

    Contract:
        As for ``moe_ag_gemm``.
    """
    group = resolve_group(group)
    if scale_gate_up is not None or scale_down is not None:
        scales = scale_gate_up, scale_down
        operands = x, topk_ids, topk_weights, w_gate_up, w_down
        return _fp8_tp_moe(*operands, scales, use_fast_accum, activation, group, config)
    x, w_gate_up, w_down = autograd.apply_autocast(x, w_gate_up, w_down)
    operands = x, topk_ids, topk_weights, w_gate_up, w_down
    configs, key = call_cache.lookup("tp_moe", group, operands, (activation, use_fast_accum, config, get_mode()))
    if configs is None:
        check_fast_accum("tp_moe", use_fast_accum, None)
        check_tp_moe(*operands, activation, config)
    if torch.compiler.is_compiling():
        text = as_argument(config) + (INVARIANT if is_batch_invariant() else "")
        call = topk_ids, topk_weights, w_gate_up, w_down, activation, group.group_name, text
        return tp_moe_compiled(x, *call)
    if configs is None:
        configs = tp_moe_configs(x, topk_ids, w_gate_up, w_down, activation, group, config)
        call_cache.insert(group, key, configs)
    routing = routing_of("tp_moe", topk_ids, w_gate_up, group, configs.first, topk_weights)
    if not x.shape[0]:
        return _empty_output(w_down.shape[1], x, topk_weights, w_gate_up, w_down)
    if autograd.may_be_differentiated([x, topk_weights, w_gate_up, w_down]):
        return _Layer.apply(x, topk_weights, w_gate_up, w_down, routing, activation, configs)
    h, _ = first_forward(x, w_gate_up, routing, activation, configs.first, keep=False)
    return second_forward(h, w_down, topk_weights, routing, configs.second)[0]


@outside_graphs
def _fp8_tp_moe(x, topk_ids, topk_weights, w_gate_up, w_down, scales, use_fast_accum, activation, group, config):
    """Execute ``tp_moe`` with weights in fp8."""
    (x,) = autograd.apply_autocast(x)
    operands = x, topk_ids, topk_weights, w_gate_up, w_down
    configs, key = call_cache.lookup("tp_moe", group, (*operands, *scales), (activation, use_fast_accum, config))
    if configs is None:
        check_fast_accum("tp_moe", use_fast_accum, scales)
        check_tp_moe(*operands, activation, config, scales)
        configs = fp8_configs(x, topk_ids, w_gate_up, w_down, scales, use_fast_accum, activation, group, config)
        call_cache.insert(group, key, configs)
    reject_fp8_gradients("tp_moe", *operands, *scales)
    if not x.shape[0]:
        return x.new_empty(0, w_down.shape[1])
    h, routing = gate_up_stage(
        x, topk_ids, topk_weights, w_gate_up, scales[0], use_fast_accum, activation, group, configs.first
    )
    return down_stage(h, w_down, scales[1], use_fast_accum, topk_weights, routing, configs.second)


def _empty_output(width, *operands):
    """Return an output without rows that depends on the operands, so that they get gradients of zero."""
    return sum(operand[:0].sum().to(operands[0].dtype) for operand in operands).expand(0, width)
