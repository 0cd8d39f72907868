"""Rows to the ranks that they are for: an all-to-all whose splits are on the device and differ between ranks.

    x [T, H], sorted by destination, splits [W] on each rank  ->  out [R, H], in the order of the ranks they come from

Splits [E], E / W for each rank, tell the experts of a rank apart. It is a dispatch of one choice a token
(``op``), whose rows are laid out by their source; of few rows, with max_tokens_per_rank, it is one launch
(``ep_direct_kernel``). The backward is the same way back.

Example:
    out, out_splits, _ = tdkernels.all_to_all(x, splits)
    back, _, _ = tdkernels.all_to_all(out, out_splits)   # x again
"""

import torch

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import check_config
from tdkernels.ops.common.validation import INTEGERS, check_tensor
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.device_errors import Splits
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.ops.experts.dispatch.route import plan_route, refuse_too_many, route
from tdkernels.ops.experts.dispatch.validation import check_most_tokens, check_num_experts, check_payload
from tdkernels.runtime import call_cache
from tdkernels.runtime.autograd import reject_second_derivatives
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.whole_call import whole_call

_NAME = "all_to_all"


@torch.no_grad()
def all_to_all_ref(
    x: torch.Tensor, splits: torch.Tensor, *, group: GroupLike = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange rows in plain torch, without gradients: the specification of ``all_to_all``.

    Returns:
        (out, out_splits)
    """
    group = resolve_group(group)
    world_size = torch.distributed.get_world_size(group)
    counts = splits.long().view(world_size, -1)
    out_splits = torch.empty_like(counts)
    torch.distributed.all_to_all_single(out_splits, counts, group=group)
    sent, received = counts.sum(1).tolist(), out_splits.sum(1).tolist()
    out = x.new_empty(sum(received), x.shape[1])
    torch.distributed.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out, (out_splits.int() if counts.shape[1] > 1 else out_splits.flatten().int())


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scales, routing):
        ctx.routing = routing
        out, out_scales, _ = routing.dispatch(x, scales=scales)
        codes = [out] if out.dtype.itemsize == 1 else []
        ctx.mark_non_differentiable(*codes, *([] if out_scales is None else [out_scales]))
        return out, out_scales

    @staticmethod
    def backward(ctx, dout, _):
        reject_second_derivatives(_NAME)
        return ctx.routing.combine(dout)[0], None, None


def _experts_of_rows(splits, rows):
    """([T, 1] the number of each row's split, a scalar that is not 0 if the splits do not add up)."""
    ends = splits.cumsum(0)
    numbers = torch.arange(rows, device=splits.device, dtype=ends.dtype)
    ids = torch.searchsorted(ends, numbers, right=True).unsqueeze(1)
    total = ends[-1] if len(ends) else 0
    return ids, ((splits < 0).any() | (total != rows)).to(torch.int32)


def _check(x, splits, scales, max_tokens, max_tokens_per_rank, config, world_size):
    check_payload(_NAME, x, scales, max_tokens)
    check_tensor(_NAME, "splits", splits, None, x)
    if splits.dtype not in INTEGERS:
        raise TypeError(f"{_NAME}: splits is {splits.dtype}; int32 and int64 are supported")
    if splits.dim() != 1 or splits.shape[0] == 0:
        raise ValueError(f"{_NAME}: splits must be [W] or [E], its shape is {list(splits.shape)}")
    if splits.shape[0] % world_size:
        raise ValueError(
            f"{_NAME}: splits {list(splits.shape)} must be divisible by the group's {world_size} ranks"
        )
    check_num_experts(_NAME, splits.shape[0], world_size)
    check_most_tokens(_NAME, max_tokens_per_rank, 1, world_size)
    check_config(_NAME, config, EpConfig, x)


@outside_graphs
@whole_call
def all_to_all(
    x: torch.Tensor, splits: torch.Tensor, *, scales: torch.Tensor | None = None, max_tokens: int | None = None,
    max_tokens_per_rank: int | None = None, group: GroupLike = None, config: EpConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Send each rank its rows of x; rank r's come r-th.

    Args:
        x: [T, H] bf16, fp16, fp32, float8_e4m3fn or float8_e5m2, sorted by destination; T may differ between ranks and
            be 0
        splits: [W] int32 or int64 on the device of x, rows for each rank; or [E], for each of the E / W experts of each
            rank; not negative, their sum is T
        scales: [T] or [T, S], sent along as they are, or None
        max_tokens: how many rows any rank may receive or send to others. The output then has so many rows, of which
            sum(out_splits) are written, and the host does not wait. None: as many rows as come
        max_tokens_per_rank: a bound on the T of every rank, the same on all. Then few rows are sent in one launch,
            before anything is counted (EpConfig.direct_tokens); max_tokens is, if not given, W * max_tokens_per_rank,
            and the host does not wait
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: EpConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune (in a group on
            several nodes the default)

    Returns:
        (out, out_splits, out_scales): [R, H] in the order of the sources, and of each as it was there; [W] int32 rows
        from each rank, or [W, E / W] from each for each of our experts; [R] or [R, S] or None

    Gradient:
        dx = the rows of dout sent back

    Raises:
        TypeError or ValueError: for operands that do not fit, before anything is launched
        ValueError: on every rank when the ranks disagree, for splits that do not add up on any rank, and for more rows
            than max_tokens or max_tokens_per_rank, of which then none arrives (on a GPU with either of these at
            tdkernels.synchronize(), or at a later call, which breaks the group; on a rank with too many rows at once as
            well)
        PeerTimeoutError

    Contract:
        collective over group; host sync: unless max_tokens or max_tokens_per_rank is given; CUDA graph: with either,
        after one call outside; the caller owns the output

    Source:
        splits on the device, as torch.ops.symm_mem.all_to_all_vdev has them
    """
    group = resolve_group(group)
    settings = max_tokens, max_tokens_per_rank, config, get_mode()
    plan, key = call_cache.lookup(_NAME, group, (x, splits, scales), settings)
    if plan is None:
        _check(x, splits, scales, max_tokens, max_tokens_per_rank, config, group.size())
    ids, error_code = _experts_of_rows(splits, len(x))
    request = DispatchRequest(
        _NAME, group, x, ids, len(splits), config, None, max_tokens, max_tokens_per_rank, True, error_code,
        Splits(splits, len(x)),
    )
    if plan is None:
        if request.has_too_many_tokens:
            refuse_too_many(request, None, scales)
        plan = plan_route(request)
        call_cache.insert(group, key, plan)
    routing = route(plan, request)
    out, out_scales = _AllToAll.apply(x, scales, routing)
    out_splits = routing.splits
    return out, (out_splits.flatten() if splits.shape[0] == group.size() else out_splits), out_scales
