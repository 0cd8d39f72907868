"""ep_dispatch and ep_combine: the two all-to-all operators of expert parallelism.

    ep_dispatch   x [T, H], topk_ids [T, k] on each rank  ->  rows [R, H], grouped by the rank's E / W experts
    ep_combine    outputs of the experts [R, H]  ->  y [T, H], the weighted sum of each token's k rows

T may differ between ranks and may be 0. An entry of topk_ids is an assignment of its token to an expert.

Dispatch. ``ep_route_kernel`` counts the rows, exchanges the counts (4 bytes per expert) and computes the offsets.
``ep_dispatch_kernel`` sends each token once to every rank that has an expert of it; the receiver copies it to its rows.
For few tokens ``ep_direct_kernel`` does both in one launch. In a combine, ``ep_combine_kernel`` sums a token's rows on
the ranks of its experts and sends these sums back; the token's rank adds them up, in fp32 and in rank order. Tokens are
sent in chunks with one signal each, so receiving overlaps sending. ``EpConfig(method="torch")`` uses torch's
collectives instead (``torch_backend``).

Backward. The backward of ep_dispatch is an unweighted combine, which also returns the gradients of the weights. The
backward of ep_combine is a dispatch of dy: a row receives dy times its weight, and the gradient of a weight is the dot
product of dy with its row. A second combine, of these numbers alone, sends them back. The offsets of the forward are
used again: nothing is counted or exchanged a second time.

Example:
    recv, handle = tdkernels.ep_dispatch(x, topk_ids, topk_weights, num_experts=64)
    y = tdkernels.ep_combine(experts(recv.x, recv.splits), handle)
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import check_config
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.ops.experts.dispatch.route import plan_route, refuse_too_many, route
from tdkernels.ops.experts.dispatch.token_buckets import choose_config, problem_tokens
from tdkernels.ops.experts.dispatch.validation import (
    check_again,
    check_combine,
    check_dispatch,
    check_invariant_combine,
    check_most_tokens,
)
from tdkernels.runtime import autograd, call_cache
from tdkernels.runtime.autograd import reject_second_derivatives
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    from tdkernels.ops.experts.dispatch.routing import Routing


class EpTokens(NamedTuple):
    """The rows that a rank has received.

    Attributes:
        x: [R, H], grouped by local expert, then by source rank, then in the order of the source. If max_tokens is given
            or follows from max_tokens_per_rank, R is max_tokens, and only the first sum(splits) rows are written.
        splits: Number of rows of each local expert, [E / W] int32 on the device.
        topk_weights: Weight of each row's assignment, [R] fp32, or None.
        scales: Scales of each row, [R] or [R, S], or None.
    """

    x: torch.Tensor
    splits: torch.Tensor
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None


def _version(tensor):
    """Return the version counter of a tensor, which torch increments when it writes. Inference tensors have none."""
    return None if tensor is None or tensor.is_inference() else tensor._version


class EpHandle:
    """The routing of a dispatch, for ``ep_combine`` and for another ``ep_dispatch`` with the same destinations."""

    def __init__(self, routing: "Routing", topk_weights: torch.Tensor | None) -> None:
        self._routing = routing
        self._topk_weights = topk_weights  # [T, k] as passed to ep_dispatch, or None
        self._row_weights: torch.Tensor | None = None  # the same weights by rows
        self._versions = _version(topk_weights), None

    def keep_row_weights(self, row_weights: torch.Tensor) -> None:
        """Store the weights [R] received with the tokens. A combine uses them unless weights are changed in place."""
        self._row_weights, self._versions = row_weights, (self._versions[0], _version(row_weights))

    def known_row_weights(self) -> torch.Tensor | None:
        """Return the weights of ``keep_row_weights``, or None if weights were changed in place since."""
        now = _version(self._topk_weights), _version(self._row_weights)
        return self._row_weights if now == self._versions else None

    @property
    def num_experts(self) -> int:
        """The number E of experts on all ranks."""
        return self._routing.shape.num_experts

    def __repr__(self) -> str:
        routing, shape = self._routing, self._routing.shape
        return (
            f"EpHandle({shape.tokens} tokens, {shape.choices} of {shape.num_experts} experts each, "
            f"{routing.rows} rows here, {shape.world_size} ranks)"
        )


@torch.no_grad()
def ep_dispatch_ref(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None = None, *, num_experts: int,
    group: GroupLike = None,
) -> tuple[EpTokens, tuple]:
    """Compute ``ep_dispatch`` with torch and torch.distributed, without gradients. It is the specification for tests.

    Returns:
        (recv, state): The EpTokens, and the state for ``ep_combine_ref``.
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
    """Compute ``ep_combine`` with torch, without gradients. Sums are in fp32, in the order of a token's assignments."""
    group = resolve_group(group)
    by_expert, order, sent, received, (tokens, k), weights = state
    weights = weights if topk_weights is None else topk_weights
    theirs = torch.empty_like(rows)
    theirs[order] = rows
    choices = rows.new_zeros(tokens * k, rows.shape[1])
    choices[by_expert] = _all_to_all(theirs, received, sent, group)
    choices = choices.view(tokens, k, rows.shape[1]).to(torch.promote_types(rows.dtype, torch.float32))
    if weights is not None:  # the weight of a dropped assignment may be NaN
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
    """Return the gradients of the rows and of topk_weights; the latter is None unless ``wants_weights``."""
    as_sent = None if weights is None else weights.to(torch.float32).contiguous()
    d_rows, dots = routing.dispatch_gradient(dy, rows, as_sent, wants_weights)
    if not wants_weights:
        return d_rows, None
    _, d_weights = routing.combine(dy.new_empty(routing.rows, 0), row_numbers=dots)
    return d_rows, d_weights.to(weights.dtype)


def handle_of(
    request: DispatchRequest, topk_weights: torch.Tensor | None, scales: torch.Tensor | None, allow_torch: bool = True
) -> EpHandle:
    """Check the arguments of a dispatch and return its EpHandle. ``allow_torch``: see ``route``.

    The ids of the request may be the EpHandle of an earlier dispatch, whose routing is then used.
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
    """Send each token to the ranks of its experts. Rank r has experts r * E / W to (r + 1) * E / W - 1.

    Args:
        x: [T, H] in bf16, fp16, fp32, float8_e4m3fn or float8_e5m2. T may differ between ranks and may be 0.
        topk_ids: Experts of each token, [T, k] int32 or int64. An id of -1 drops the assignment. Or the EpHandle of an
            earlier dispatch, to use its routing again without counting.
        topk_weights: Weights [T, k] of a floating-point dtype, sent with the tokens and used by ep_combine, or None.
        num_experts: Number of experts E, divisible by W.
        scales: Scales [T] or [T, S] of an x that is already quantized. They are sent unchanged.
        quantize: None or "fp8". With "fp8" tokens are sent as float8_e4m3fn with an fp32 scale per 128 channels, the
            largest magnitude / 448: recv.scales [R, ceil(H / 128)], x ≈ recv.x * scale. It has no gradient.
        max_tokens: Upper bound of the rows that any rank receives, and of the tokens that any rank stages, each counted
            once per peer. The output then has max_tokens rows, of which sum(recv.splits) are written, and the host does
            not wait. If None, the host waits for the exact number of rows.
        max_tokens_per_rank: Upper bound B of T on all ranks, the same on all of them. The host does not wait then, and
            few tokens are sent in one launch, without counting first (EpConfig.direct_tokens). max_tokens may be
            omitted; it is then W * B * min(k, E / W), which suffices if the experts of a token are distinct.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: EpConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune), or the
            default config if the group is on several nodes.

    Returns:
        (recv, handle): The received rows, see EpTokens, and the EpHandle for ep_combine.

    Gradient:
        dx is the sum of the gradients of the token's rows, in fp32. dtopk_weights is the gradient of recv.topk_weights.

    Raises:
        TypeError, ValueError: If operands are invalid. Nothing has been launched.
        ValueError: On every rank: if the ranks disagree, if an id is out of range, or if there are more rows than
            max_tokens or more tokens than max_tokens_per_rank. No token arrives then. On a GPU with either bound it is
            raised by tdkernels.synchronize(), or by a later call, which makes the group unusable. A rank with too many
            tokens raises at once. Then a first combine or backward with the handle may raise on the other ranks.
        PeerTimeoutError: If a peer does not make the call in time.

    Contract:
        Collective over ``group``. The host synchronizes unless max_tokens or max_tokens_per_rank is given. With one of
        them the call can be captured in a CUDA graph after one call outside. EpConfig(method="torch") always
        synchronizes and cannot be captured. The caller owns the output.

    Source:
        One copy of a token per rank, and the handle: DeepEP (https://github.com/deepseek-ai/DeepEP).
    """
    _reject_quantize_gradient(x, quantize)
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


def _reject_quantize_gradient(x, quantize):
    if quantize is not None and torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
        raise ValueError('ep_dispatch: quantize="fp8" has no gradient, and x requires one: detach it, or no_grad')


def row_weights_of(handle: EpHandle, topk_weights: torch.Tensor | None, config: EpConfig) -> torch.Tensor | None:
    """Return the weights of a combine by rows, [R], or None if the combine does not need them by rows."""
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
    """Send the outputs of the experts back to the ranks of their tokens and compute the weighted sums.

    Args:
        expert_out: [R, H] in bf16, fp16 or fp32, one row for each row of recv.x. H may differ from the dispatch.
        handle: The EpHandle of the ep_dispatch that sent the tokens.
        topk_weights: Weights [T, k] of a floating-point dtype. None uses the weights of ep_dispatch, or 1 if it had
            none. If the experts have applied recv.topk_weights already, use a handle without weights or pass ones.
            Weights changed in place since the dispatch, on all ranks, are used with their current values, except in
            inference mode, where such a change is not detected.
        group: The group of the ep_dispatch.
        config: EpConfig, the same on all ranks. None uses the config passed to ep_dispatch, or else selects the best
            known config.

    Returns:
        y [T, H] in the dtype of expert_out, the sum over the token's assignments that are not dropped, in fp32. With
        config.combine "per_rank" the assignments on each other rank are summed first, this sum is rounded to the dtype
        and sent, and the sums are added in rank order; this rank's own assignments are added one by one at its turn.
        With "per_expert" all assignments are added in order.

    Gradient:
        dexpert_out is weight * dy of the row's token. dtopk_weights is the dot product of dy with the row.

    Raises:
        TypeError, ValueError: If operands are invalid. Nothing has been launched.
        PeerTimeoutError: If a peer does not make the call in time.

    Contract:
        Collective over ``group``. The host does not synchronize. The call can be captured in a CUDA graph if the
        dispatch had max_tokens or max_tokens_per_rank and did not use torch's collectives. The caller owns the output.

    Source:
        DeepEP (https://github.com/deepseek-ai/DeepEP).
    """
    topk_weights, config = checked_combine(expert_out, handle, topk_weights, group, config)
    row_weights = row_weights_of(handle, topk_weights, config)
    routing = handle._routing
    if autograd.may_be_differentiated((expert_out, topk_weights)):
        return _Combine.apply(expert_out, topk_weights, routing, row_weights, config)
    return routing.combine(expert_out, weights=topk_weights, row_weights=row_weights, config=config)[0]


def checked_combine(
    expert_out: torch.Tensor, handle: EpHandle, topk_weights: torch.Tensor | None, group: GroupLike,
    config: EpConfig | None,
) -> tuple[torch.Tensor | None, EpConfig]:
    """Check the arguments of a combine and return the weights [T, k], or None, and the config that it uses."""
    if not isinstance(handle, EpHandle):
        raise TypeError(f"ep_combine: handle must be the EpHandle of an ep_dispatch, not {type(handle).__name__}")
    routing, group = handle._routing, resolve_group(group)
    if group is not routing.group:
        raise ValueError("ep_combine: the handle is of another group than the call")
    # The properties of a routing that decide how a combine runs. The number of staged tokens differs from call to call.
    tokens = problem_tokens(routing.shape, routing.staged)
    of_routing = routing.shape, routing.rows, tokens, routing.config, routing.config_is_given, routing.method
    settings = *of_routing, routing.splits.device, config, get_mode()
    known, key = call_cache.lookup("ep_combine", group, (expert_out, topk_weights), settings)
    if known is None:
        check_combine(expert_out, routing, topk_weights)
        check_config("ep_combine", config, EpConfig, expert_out)
        _check_method(routing, config)
        known = config or routing.config
        if config is None and not routing.config_is_given and routing.method == "fused":
            with routing.part_of_call():
                known = choose_config("ep_combine", routing.shape, routing.staged, group, expert_out)
        check_invariant_combine(known, group)
        call_cache.insert(group, key, known)
    return handle._topk_weights if topk_weights is None else topk_weights, known


def _check_method(routing, config):
    """Raise ValueError if a combine's config names another method than its dispatch used, unless that was selected."""
    told = routing.method == "fused" or routing.config_is_given
    if config is not None and config.method != routing.method and told:
        raise ValueError(
            f'ep_combine: config has method "{config.method}", but the dispatch of the handle went by '
            f'"{routing.method}"'
        )
