"""Expert parallelism: tokens to the ranks that have their experts, and what the experts make of them back.

    ep_dispatch   x [T, H], topk_ids [T, k] on each rank  ->  rows [R, H], grouped by the rank's experts, E / W of them
    ep_combine    what the experts made of the rows [R, H]  ->  y [T, H], each token's k rows, weighted and added up

T may be another on each rank, and 0. Schedule: ``ep_route_kernel`` counts, exchanges the counts (4 bytes an expert) and
lays everything out; ``ep_dispatch_kernel`` sends each token once to every rank that has an expert of it, where it is
copied to its rows. Of few tokens ``ep_direct_kernel`` does both in one launch. ``ep_combine_kernel`` adds a token's
rows up where the experts are, sends the sum, and adds the sums up at home, in fp32 and in the order of the ranks. Of
each chunk of tokens there is a signal, so receiving overlaps sending. ``EpConfig(method="torch")`` goes by torch's
collectives instead (``torch_backend``).

Backward. That of ep_dispatch is an unweighted combine, which takes the weights' gradients along. That of ep_combine is
a dispatch of dy, by which a row gets dy times its weight and a weight the product of dy with its row; these go back
with a combine of nothing else. Places found once are used again: nothing is counted or exchanged a second time.

Example:
    recv, handle = tdkernels.ep_dispatch(x, topk_ids, topk_weights, num_experts=64)
    y = tdkernels.ep_combine(experts(recv.x, recv.splits), handle)
"""

from typing import NamedTuple

import torch

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import check_config
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.ops.experts.dispatch.route import plan_route, refuse_too_many, route
from tdkernels.ops.experts.dispatch.token_buckets import choose_config
from tdkernels.ops.experts.dispatch.validation import (
    check_again,
    check_combine,
    check_dispatch,
    check_most_tokens,
)
from tdkernels.runtime import autograd, call_cache
from tdkernels.runtime.autograd import reject_second_derivatives
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.whole_call import whole_call


class EpTokens(NamedTuple):
    """What a rank received.

    Attributes:
        x: [R, H], grouped by local expert, within one by source rank, then as there; with max_tokens, or what
            max_tokens_per_rank makes of it, R is that, and the rows that no token has are not written
        splits: [E / W] int32, on the device: rows of each local expert
        topk_weights: [R] fp32, the weight of each row's choice, or None
        scales: [R] or [R, S], or None
    """

    x: torch.Tensor
    splits: torch.Tensor
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None


def _version(tensor):
    """A number that changes with whatever is written to a tensor by torch; those of inference mode have none."""
    return None if tensor is None or tensor.is_inference() else tensor._version


class EpHandle:
    """Which rows the tokens went to. For ``ep_combine``, and for another ``ep_dispatch`` of the same routing."""

    def __init__(self, routing, topk_weights):
        self._routing = routing
        self._topk_weights = topk_weights  # [T, k] as they were given, or None
        self._row_weights = None  # the same by rows
        self._versions = _version(topk_weights), None

    def keep_row_weights(self, row_weights):
        """Weights [R] that have come with the tokens: those of a combine, unless somebody changes any in place."""
        self._row_weights, self._versions = row_weights, (self._versions[0], _version(row_weights))

    def known_row_weights(self):
        """What ``keep_row_weights`` was given, or None if it is out of date."""
        now = _version(self._topk_weights), _version(self._row_weights)
        return self._row_weights if now == self._versions else None

    @property
    def num_experts(self):
        return self._routing.shape.num_experts

    def __repr__(self):
        routing, shape = self._routing, self._routing.shape
        return (
            f"EpHandle({shape.tokens} tokens, {shape.choices} of {shape.num_experts} experts each, "
            f"{routing.rows} rows here, {shape.world_size} ranks)"
        )


# ---- the specification, in plain torch.distributed ----


@torch.no_grad()
def ep_dispatch_ref(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None = None, *, num_experts: int,
    group: GroupLike = None,
) -> tuple[EpTokens, tuple]:
    """Dispatch in plain torch, without gradients: the specification of ``ep_dispatch``.

    Returns:
        (received tokens, state for ``ep_combine_ref``)
    """
    group = resolve_group(group)
    world_size = torch.distributed.get_world_size(group)
    local = num_experts // world_size
    ids = topk_ids.flatten().long()
    by_expert = torch.argsort(torch.where(ids < 0, num_experts, ids), stable=True)[: int((ids >= 0).sum())]
    counts = torch.bincount(ids[by_expert], minlength=num_experts).view(world_size, local)
    their_counts = _all_to_all(counts, [1] * world_size, [1] * world_size, group)
    sent, received = counts.sum(1).tolist(), their_counts.sum(1).tolist()
    rows = _all_to_all(x[by_expert // topk_ids.shape[1]], sent, received, group)
    weights = None
    if topk_weights is not None:
        weights = _all_to_all(topk_weights.flatten()[by_expert].float(), sent, received, group)
    experts = torch.arange(local, device=x.device).repeat(world_size).repeat_interleave(their_counts.flatten())
    order = torch.argsort(experts, stable=True)
    tokens = EpTokens(rows[order], their_counts.sum(0).int(), None if weights is None else weights[order], None)
    return tokens, (by_expert, order, sent, received, topk_ids.shape, topk_weights)


@torch.no_grad()
def ep_combine_ref(
    rows: torch.Tensor, state: tuple, topk_weights: torch.Tensor | None = None, *, group: GroupLike = None,
) -> torch.Tensor:
    """Combine in plain torch, without gradients: the specification of ``ep_combine``.

    The sum is in fp32, in the order of the assignments of a token.
    """
    group = resolve_group(group)
    by_expert, order, sent, received, (tokens, k), weights = state
    weights = weights if topk_weights is None else topk_weights
    theirs = torch.empty_like(rows)
    theirs[order] = rows
    choices = rows.new_zeros(tokens * k, rows.shape[1])
    choices[by_expert] = _all_to_all(theirs, received, sent, group)
    choices = choices.view(tokens, k, rows.shape[1]).to(torch.promote_types(rows.dtype, torch.float32))
    if weights is not None:  # that of a choice of no expert may be anything
        chosen = torch.zeros(tokens * k, dtype=torch.bool, device=rows.device).index_fill(0, by_expert, True)
        choices = choices * weights.to(choices.dtype).where(chosen.view(tokens, k), 0.0)[..., None]
    y = torch.zeros_like(choices[:, 0])
    for j in range(k):
        y += choices[:, j]
    return y.to(rows.dtype)


def _all_to_all(rows, sent, received, group):
    out = rows.new_empty(sum(received), *rows.shape[1:])
    torch.distributed.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


# ---- autograd ----


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, scales, routing, quantize):
        rows, row_scales, row_weights = routing.dispatch(x, scales=scales, weights=weights, quantize=quantize)
        ctx.routing = routing
        ctx.weights_dtype = None if weights is None else weights.dtype
        codes = [rows] if rows.dtype.itemsize == 1 else []
        ctx.mark_non_differentiable(*codes, *([] if row_scales is None else [row_scales]))
        return rows, row_scales, row_weights

    @staticmethod
    def backward(ctx, d_rows, _, d_row_weights):
        reject_second_derivatives("ep_dispatch")
        wants_x, wants_weights = ctx.needs_input_grad[:2]
        if not wants_x:
            d_rows = d_row_weights.new_empty(ctx.routing.rows, 0)
        dx, d_weights = ctx.routing.combine(d_rows, row_numbers=d_row_weights if wants_weights else None)
        d_weights = d_weights.to(ctx.weights_dtype) if wants_weights else None
        return dx if wants_x else None, d_weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, routing, row_weights, config):
        y, _ = routing.combine(rows, weights=weights, row_weights=row_weights, config=config)
        ctx.routing = routing
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        return y

    @staticmethod
    def backward(ctx, dy):
        reject_second_derivatives("ep_combine")
        return *_ep_combine_backward(ctx.routing, dy, *ctx.saved_tensors, ctx.needs_input_grad[1]), None, None, None


@whole_call
def _ep_combine_backward(routing, dy, rows, weights, wants_weights):
    """Return the gradients of the rows and of topk_weights, the latter None if it is not wanted."""
    as_sent = None if weights is None else weights.to(torch.float32).contiguous()
    d_rows, dots = routing.dispatch_gradient(dy, rows, as_sent, wants_weights)
    if not wants_weights:
        return d_rows, None
    _, d_weights = routing.combine(dy.new_empty(routing.rows, 0), row_numbers=dots)
    return d_rows, d_weights.to(weights.dtype)


# ---- the public functions ----


def handle_of(request, topk_weights, scales, allow_torch=True):
    """The EpHandle of a dispatch: of ids that are counted now, or of those of a handle. Raises for invalid arguments.

    Args:
        request: DispatchRequest; its ids may be the EpHandle of an earlier dispatch
        allow_torch: see ``route``
    """
    x, topk_ids, group = request.x, request.ids, request.group
    if isinstance(topk_ids, EpHandle):
        known = topk_ids._routing
        if known.group is not group:
            raise ValueError("ep_dispatch: the handle is of another group than the call")
        check_again(x, known, topk_weights, scales, request.quantize)
        return EpHandle(known, topk_weights)
    bounds = request.max_tokens, request.max_tokens_per_rank
    settings = request.num_experts, request.quantize, *bounds, request.config, get_mode()
    plan, key = call_cache.lookup("ep_dispatch", group, (x, topk_ids, topk_weights, scales), settings)
    if plan is None:
        check_dispatch(request, topk_weights, scales)
        check_most_tokens("ep_dispatch", request.max_tokens_per_rank, topk_ids.shape[1], group.size())
        check_config("ep_dispatch", request.config, EpConfig, x)
        if request.has_too_many_tokens:
            refuse_too_many(request, topk_weights, scales)
        plan = plan_route(request)
        call_cache.insert(group, key, plan)
    return EpHandle(route(plan, request, allow_torch), topk_weights)


@outside_graphs
@whole_call
def ep_dispatch(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
    num_experts: int | None = None, scales: torch.Tensor | None = None, quantize: str | None = None,
    max_tokens: int | None = None,
    max_tokens_per_rank: int | None = None, group: GroupLike = None, config: EpConfig | None = None,
) -> tuple[EpTokens, EpHandle]:
    """Send each token to the ranks that have its experts; rank r has experts r * E / W to (r + 1) * E / W - 1.

    Args:
        x: [T, H] bf16, fp16, fp32, float8_e4m3fn or float8_e5m2; T may differ between ranks and be 0
        topk_ids: [T, k] int32 or int64, the experts of each token, -1 for none (dropped); or the EpHandle of an earlier
            dispatch, to go the same ways again without counting anything
        topk_weights: [T, k] floats, to be sent along and to weigh the sum of ep_combine; or None
        num_experts: E, divisible by W
        scales: [T] or [T, S], sent along as they are, for an x that is quantized already
        quantize: None, or "fp8": x is cast to float8_e4m3fn on its way, with one fp32 scale for 128 channels,
            recv.scales [R, ceil(H / 128)], the largest magnitude / 448; x ≈ recv.x * scale. Has no gradient
        max_tokens: how many rows any rank may receive, and any rank may stage (tokens, once for each peer). The output
            then has so many rows, of which sum(recv.splits) are written, and the host does not wait. None: as many rows
            as come, for which the host waits
        max_tokens_per_rank: a bound on the T of every rank, the same on all. Then few tokens are sent in one launch,
            before anything is counted (EpConfig.direct_tokens); max_tokens is, if not given, what is enough for so many
            tokens, each of different experts: W * max_tokens_per_rank * min(k, E / W), and the host does not wait
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: EpConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune (in a group on
            several nodes the default)

    Returns:
        (recv, handle): EpTokens, see there, and the EpHandle for ep_combine

    Gradient:
        dx = the sum of the token's rows' gradients, in fp32; dtopk_weights = those of recv.topk_weights

    Raises:
        TypeError or ValueError: for operands that do not fit, before anything is launched
        ValueError: on every rank when the ranks disagree, for ids out of range on any rank, and for more rows than
            max_tokens or more tokens than max_tokens_per_rank, of which then none arrives (on a GPU with either of
            these at tdkernels.synchronize(), or at a later call, which breaks the group; on a rank with too many tokens
            at once as well)
        PeerTimeoutError

    Contract:
        collective over group; host sync: unless max_tokens or max_tokens_per_rank is given; CUDA graph: with either,
        after one call outside; by EpConfig(method="torch") always, and never; the caller owns the output

    Source:
        tokens once for a rank and the handle: DeepEP (https://github.com/deepseek-ai/DeepEP)
    """
    _refuse_gradient_of_codes(x, quantize)
    request = DispatchRequest(
        "ep_dispatch", resolve_group(group), x, topk_ids, num_experts, config, quantize, max_tokens,
        max_tokens_per_rank,
    )
    handle = handle_of(request, topk_weights, scales)
    routing, quantizes = handle._routing, quantize is not None
    if autograd.may_be_differentiated((x, topk_weights)):
        rows, row_scales, row_weights = _Dispatch.apply(x, topk_weights, scales, routing, quantizes)
    else:
        rows, row_scales, row_weights = routing.dispatch(x, scales=scales, weights=topk_weights, quantize=quantizes)
    if row_weights is not None:
        handle.keep_row_weights(row_weights.detach())
    return EpTokens(rows, routing.splits, row_weights, row_scales), handle


def _refuse_gradient_of_codes(x, quantize):
    if quantize is not None and torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
        raise ValueError('ep_dispatch: quantize="fp8" has no gradient, and x requires one: detach it, or no_grad')


def row_weights_of(handle, topk_weights, config):
    """The weights of a combine by rows, if they are needed there, or None."""
    routing = handle._routing
    if topk_weights is None or not routing.weighs_rows(config):
        return None
    known = handle.known_row_weights() if topk_weights is handle._topk_weights else None
    if known is not None:
        return known
    nothing = topk_weights.new_empty(routing.shape.tokens, 0, dtype=torch.float32)
    return routing.dispatch(nothing, weights=topk_weights.detach())[2]


@outside_graphs
@whole_call
def ep_combine(
    expert_out: torch.Tensor, handle: EpHandle, topk_weights: torch.Tensor | None = None, *, group: GroupLike = None,
    config: EpConfig | None = None,
) -> torch.Tensor:
    """Bring the experts' rows back to their tokens and add them up, weighted.

    Args:
        expert_out: [R, H] bf16, fp16 or fp32, a row for each of recv.x; H may be another
        handle: of the ep_dispatch that has sent the tokens
        topk_weights: [T, k] floats; None takes those that ep_dispatch was given, or 1 if there were none. Experts that
            have applied recv.topk_weights themselves need a handle without weights, or ones here. Weights that were
            changed in place since then, on all ranks, count as they are now; not in inference mode, where that goes
            unnoticed
        group: as in ep_dispatch, whose group it must be
        config: EpConfig, as in ep_dispatch; None takes that which the dispatch was given, or if it was given none the
            best one known

    Returns:
        y: [T, H], the dtype of expert_out, the sum over the token's choices that were not dropped. In fp32: with
        config.combine "per_rank" over the choices on each other rank, rounded where it crosses, and over ranks in their
        order, this one's choices one by one at its turn; with "per_expert" over the choices in order

    Gradient:
        dexpert_out = weight * dy of the row's token; dtopk_weights = the product of dy with the row

    Raises:
        TypeError or ValueError: for operands that do not fit, before anything is launched
        PeerTimeoutError

    Contract:
        collective over group; host sync: no; CUDA graph: if the dispatch had max_tokens or max_tokens_per_rank, and did
        not go by torch; the caller owns the output

    Source:
        DeepEP (https://github.com/deepseek-ai/DeepEP)
    """
    topk_weights, config = checked_combine(expert_out, handle, topk_weights, group, config)
    row_weights = row_weights_of(handle, topk_weights, config)
    routing = handle._routing
    if autograd.may_be_differentiated((expert_out, topk_weights)):
        return _Combine.apply(expert_out, topk_weights, routing, row_weights, config)
    return routing.combine(expert_out, weights=topk_weights, row_weights=row_weights, config=config)[0]


def checked_combine(expert_out, handle, topk_weights, group, config):
    """(the weights [T, k] that count or None, the config that does) of a combine; raises unless it makes sense."""
    if not isinstance(handle, EpHandle):
        raise TypeError(f"ep_combine: handle must be the EpHandle of an ep_dispatch, not {type(handle).__name__}")
    routing = handle._routing
    group = resolve_group(group)
    if group is not routing.group:
        raise ValueError("ep_combine: the handle is of another group than the call")
    # What decides of a routing how a combine runs.
    of_routing = routing.shape, routing.rows, routing.staged, routing.config, routing.config_is_given, routing.method
    settings = *of_routing, routing.splits.device, config, get_mode()
    known, key = call_cache.lookup("ep_combine", group, (expert_out, topk_weights), settings)
    if known is None:
        check_combine(expert_out, routing, topk_weights)
        check_config("ep_combine", config, EpConfig, expert_out)
        _check_method(routing, config)
        known = config or routing.config
        if config is None and not routing.config_is_given and routing.method == "fused":
            known = choose_config("ep_combine", routing.shape, routing.staged, group, expert_out)
        call_cache.insert(group, key, known)
    return handle._topk_weights if topk_weights is None else topk_weights, known


def _check_method(routing, config):
    """What goes by a handle goes as its dispatch went, which may have been told so, or have chosen it."""
    told = routing.method == "fused" or routing.config_is_given
    if config is not None and config.method != routing.method and told:
        raise ValueError(
            f'ep_combine: config has method "{config.method}", but the dispatch of the handle went by '
            f'"{routing.method}"'
        )
