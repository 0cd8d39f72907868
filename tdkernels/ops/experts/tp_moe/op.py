"""Tensor-parallel experts: every rank has a slice of every expert, and tokens are sharded between the operators.

    moe_ag_gemm   x [M / W, H], topk_ids [M / W, k], w [E, N / W, H]  ->  h [M * k, N / W], grouped by expert
    moe_gemm_rs   h [M * k, I / W], w [E, H, I / W]                   ->  y [M / W, H], each token's k rows, weighted
    tp_moe        both, with SwiGLU between them

Schedule. Ids are gathered and sorted on the device (``kernel_route``), once for both halves and their backwards. In
``moe_ag_gemm_kernel`` some programs push our tokens to all peers while others compute tiles of tokens that have come,
by stages. ``moe_gemm_rs_kernel`` goes the other way: tiles of other ranks' tokens come first, and while later ones are
computed the choices of finished tokens are added up and sent to the rank that has the token, where they are added to
those of the other ranks, in fp32 and in the order of ranks.

Backward. The gradient of h is a moe_ag_gemm of dy, which leaves what the gradients of the choices' weights and of w are
made of; that of x is a moe_gemm_rs, beside which x is gathered for that of w. Each is looked up by itself, under the
layout "kn", and goes by the chunks and stages of the forward's routing. Only shards are saved.

Example:
    y = tdkernels.tp_moe(x, topk_ids, topk_weights, w_gate_up, w_down)
"""

import torch

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops.experts.grouped_gemm.op import group_gemm_ref
from tdkernels.ops.experts.tp_moe.config import MoeTpConfig
from tdkernels.ops.experts.tp_moe.routing import MoeRouting
from tdkernels.ops.experts.tp_moe.steps import (
    choose_configs,
    down_backward,
    first_fields,
    first_forward,
    gate_up_backward,
    routing_of,
    second_forward,
    tp_moe_configs,
)
from tdkernels.ops.experts.tp_moe.torch_op import tp_moe_compiled
from tdkernels.ops.experts.tp_moe.validation import check_ag_gemm, check_gemm_rs, check_tp_moe
from tdkernels.runtime import autograd, call_cache
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.whole_call import whole_call

# ---- the specification, in plain torch.distributed ----


def _by_expert(topk_ids, experts, group):
    """(the choices of all ranks' tokens by expert; how many each has; [M, k] which are of one, and not dropped)"""
    ids = all_gather_rows(topk_ids, group)
    kept, ids = ids >= 0, ids.flatten().long()
    order = torch.argsort(torch.where(ids < 0, experts, ids), stable=True)[: int(kept.sum())]
    return order, torch.bincount(ids[order], minlength=experts), kept


@torch.no_grad()
def moe_ag_gemm_ref(x, topk_ids, w, *, activation=None, group=None):
    """The specification of ``moe_ag_gemm``, but for the order: h by choice, 0 for those that are dropped."""
    group = resolve_group(group)
    order, splits, kept = _by_expert(topk_ids, w.shape[0], group)
    rows = all_gather_rows(x, group)[order // topk_ids.shape[1]]
    made = group_gemm_ref(rows, w, splits, activation=activation)
    return made.new_zeros(kept.numel(), made.shape[1]).index_copy(0, order, made)


@torch.no_grad()
def moe_gemm_rs_ref(h, topk_ids, topk_weights, w, *, group=None):
    """The specification of ``moe_gemm_rs``, of h by choice: rows multiplied, weighted, added up in fp32 by token."""
    group = resolve_group(group)
    order, splits, kept = _by_expert(topk_ids, w.shape[0], group)
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
    """The specification of ``tp_moe``."""
    group = resolve_group(group)
    h = moe_ag_gemm_ref(x, topk_ids, w_gate_up, activation=activation, group=group)
    return moe_gemm_rs_ref(h, topk_ids, topk_weights, w_down, group=group)


# ---- the gradient ----


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
        return *gate_up_backward(dh, x, w, pre, ctx.routing, ctx.activation, ctx.config, *need), *[None] * 4


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
        gradients = down_backward(dy, h, w, weights, ctx.routing, ctx.config, *need[1:])
        dh, dw, dweights = (dx if needed else None for dx, needed in zip(gradients, need, strict=True))
        return dh, dw, None if dweights is None else dweights.to(ctx.weights_dtype), None, None, None


# ---- the public functions ----


def _first_half(operator, x, topk_ids, w, activation, group, configs):
    """(h, routing), of checked operands and configs as ``choose_configs`` gives them."""
    routing = routing_of(operator, topk_ids, w, group, configs.first)
    if not x.shape[0]:
        return _nothing(w.shape[1] // (2 if activation else 1), x, w), routing
    if not autograd.may_be_differentiated([x, w]):
        return first_forward(x, w, routing, activation, configs.first, keep=False)[0], routing
    return _AgGemm.apply(x, w, routing, activation, configs.first, configs.backward), routing


def _second_half(h, topk_weights, w, routing, configs):
    """y, of checked operands."""
    if not autograd.may_be_differentiated([h, topk_weights, w]):
        return second_forward(h, w, topk_weights, routing, configs.second)[0]
    return _GemmRs.apply(h, w, topk_weights, routing, configs.second, configs.backward)


@outside_graphs
@whole_call
def moe_ag_gemm(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, *, activation: str | None = None, group: GroupLike = None,
    config: MoeTpConfig | None = None,
) -> tuple[torch.Tensor, MoeRouting]:
    """Gather tokens while multiplying each of them by the weights of its experts.

    Args:
        x: [M / W, H] bf16, fp16 or fp32, as many rows on every rank
        topk_ids: [M / W, k] int32 or int64, the experts of each token, -1 for none (dropped)
        w: [E, N / W, H], this rank's rows of every expert's weight; same dtype
        activation: None, "swiglu" or "swiglu_interleaved", as for group_gemm: w has gate rows and up rows
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: MoeTpConfig, the same on all ranks, for the gradients too; None takes the best one known, see
            tdkernels.autotune (in a group on several nodes torch's sequence), and for each gradient's product the one
            that is known for that, or torch where it is best forwards

    Returns:
        (h, routing): h [M * k, N / W], or half as wide with an activation, a row for each choice of all ranks' tokens,
        grouped by expert; rows past the last expert's, where choices were dropped, are not written. MoeRouting says
        which row is whose, for moe_gemm_rs

    Gradient:
        dx, the sum over ranks and choices in fp32; dw, over the tokens of all ranks

    Raises:
        TypeError or ValueError: for operands that do not fit, before anything is launched
        ValueError: on every rank when the ranks disagree, and for ids that are none (on a GPU at
            tdkernels.synchronize(), or at a later call, which breaks the group)
        PeerTimeoutError

    Contract:
        collective over group; host sync: no; CUDA graph: yes, after one call outside; the caller owns the output

    Source:
        tiles ordered by arrival within an expert: FLUX (https://arxiv.org/abs/2406.06858)
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
    return _first_half("moe_ag_gemm", x, topk_ids, w, activation, group, configs)


@outside_graphs
@whole_call
def moe_gemm_rs(
    h: torch.Tensor, routing: MoeRouting, topk_weights: torch.Tensor, w: torch.Tensor, *, group: GroupLike = None,
    config: MoeTpConfig | None = None,
) -> torch.Tensor:
    """Multiply rows by the weights of their experts, and bring each token's sum back to its rank.

    Args:
        h: [M * k, I / W] bf16, fp16 or fp32, rows as moe_ag_gemm has given them
        routing: its MoeRouting
        topk_weights: [M / W, k] floats, of this rank's tokens
        w: [E, N, I / W], this rank's columns of every expert's weight; same dtype
        group, config: as for moe_ag_gemm

    Returns:
        y: [M / W, N], dtype of h: over a token's choices in their order, weighted, in fp32, then over ranks in theirs;
        what another rank adds is rounded where it crosses

    Gradient:
        dh; dw; dtopk_weights, complete

    Raises:
        TypeError or ValueError: for operands that do not fit, before anything is launched
        ValueError: on every rank when the ranks disagree
        PeerTimeoutError

    Contract:
        as for moe_ag_gemm

    Source:
        top-k sum and reduce-scatter behind the product: FLUX (https://arxiv.org/abs/2406.06858)
    """
    if not isinstance(routing, MoeRouting):
        raise TypeError(f"moe_gemm_rs: routing must be the MoeRouting of a moe_ag_gemm, not {type(routing).__name__}")
    if resolve_group(group) is not routing.group:
        raise ValueError("moe_gemm_rs: the routing is of another group than the call")
    h, w = autograd.apply_autocast(h, w)
    check_gemm_rs("moe_gemm_rs", h, routing, topk_weights, w, config)
    tokens, choices, ranks = routing.tokens, routing.num_choices, routing.world_size
    sizes = ranks * tokens, w.shape[1], ranks * w.shape[2], w.shape[0], choices
    fields = {"M/W": tokens, "w": tuple(w.shape), "dtype": str(h.dtype)}
    # Before the weights are gathered, or ranks that run otherwise would wait for each other.
    configs = choose_configs("moe_gemm_rs", config, sizes, "nk", w, routing.group, fields, second=w)
    if not tokens:
        return _nothing(w.shape[1], h, topk_weights, w)
    return _second_half(h, topk_weights, w, routing, configs)


@whole_call
def tp_moe(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    *, activation: str | None = "swiglu", group: GroupLike = None, config: MoeTpConfig | None = None,
) -> torch.Tensor:
    """A layer of experts, each of which is sliced between the ranks: moe_ag_gemm, then moe_gemm_rs.

    Args:
        x: [M / W, H] bf16, fp16 or fp32, as many rows on every rank
        topk_ids: [M / W, k] int32 or int64, the experts of each token, -1 for none (dropped)
        topk_weights: [M / W, k] floats
        w_gate_up: [E, 2 * I / W, H], of every expert this rank's rows for the gate, then those for up ("swiglu"; by
            turns with "swiglu_interleaved"); [E, I / W, H] with activation None; same dtype
        w_down: [E, H, I / W], this rank's columns
        group, config: as for moe_ag_gemm

    Returns:
        y: [M / W, H], dtype of x, accumulated in fp32; see moe_gemm_rs

    Gradient:
        dx, dtopk_weights, dw_gate_up and dw_down, each complete and of the shape of its operand

    Raises:
        as moe_ag_gemm and moe_gemm_rs

    Contract:
        as for moe_ag_gemm
    """
    x, w_gate_up, w_down = autograd.apply_autocast(x, w_gate_up, w_down)
    group = resolve_group(group)
    operands = x, topk_ids, topk_weights, w_gate_up, w_down
    configs, key = call_cache.lookup("tp_moe", group, operands, (activation, config, get_mode()))
    if configs is None:
        check_tp_moe(*operands, activation, config)
    if torch.compiler.is_compiling():
        call = topk_ids, topk_weights, w_gate_up, w_down, activation, group.group_name, as_argument(config)
        return tp_moe_compiled(x, *call)
    if configs is None:
        configs = tp_moe_configs(x, topk_ids, w_gate_up, w_down, activation, group, config)
        call_cache.insert(group, key, configs)
    h, routing = _first_half("tp_moe", x, topk_ids, w_gate_up, activation, group, configs)
    if not x.shape[0]:
        return _nothing(w_down.shape[1], h, topk_weights, w_down)
    return _second_half(h, topk_weights, w_down, routing, configs)


def _nothing(width, *operands):
    """The output of no tokens at all, through which gradients of zero flow."""
    return sum(operand[:0].sum().to(operands[0].dtype) for operand in operands).expand(0, width)
