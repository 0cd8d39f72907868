"""all_to_all: an all-to-all of rows whose splits are on the device and may differ between ranks.

    x [T, H], sorted by destination, splits [W] on each rank  ->  out [R, H], in the order of the source ranks

With splits [E] there are E / W splits for each rank, one per expert. The operator is a dispatch with one assignment per
row (``op``) and with the output grouped by source rank. For few rows and with max_tokens_per_rank it is a single launch
(``ep_direct_kernel``). The backward is a combine.

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
    """Compute ``all_to_all`` with torch and torch.distributed, without gradients. It is the specification for tests.

    Returns:
        (out, out_splits): See ``all_to_all``.
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
    """Return (the split of each row [T, 1], an int32 scalar that is 1 if splits are negative or do not add up to T)."""
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
    """Send each rank its rows of x. The rows for rank r are the r-th block of x.

    Args:
        x: [T, H] in bf16, fp16, fp32, float8_e4m3fn or float8_e5m2, sorted by destination. T may differ between ranks
            and may be 0.
        splits: Number of rows for each rank, [W] int32 or int64 on the device of x. Or [E], the number of rows for each
            of the E / W experts of each rank. They must not be negative, and their sum must be T.
        scales: Scales [T] or [T, S], sent unchanged with the rows, or None.
        max_tokens: Upper bound of the rows that any rank receives, and of the rows that any rank sends to others. The
            output then has max_tokens rows, of which sum(out_splits) are written, and the host does not wait. If None,
            the host waits for the exact number of rows.
        max_tokens_per_rank: Upper bound B of T on all ranks, the same on all of them. The host does not wait then, and
            few rows are sent in one launch, without counting first (EpConfig.direct_tokens). max_tokens may be omitted;
            it is then W * B.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: EpConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune), or the
            default config if the group is on several nodes.

    Returns:
        (out, out_splits, out_scales): The rows [R, H] by source rank, in the order of the source. The number of rows
        from each rank, [W] int32, or [W, E / W] from each rank for each local expert. The scales [R] or [R, S], or
        None.

    Gradient:
        dx is dout, sent back to the ranks of x.

    Raises:
        TypeError, ValueError: If operands are invalid. Nothing has been launched.
        ValueError: On every rank: if the ranks disagree, if splits are negative or do not add up on any rank, or if
            there are more rows than max_tokens or max_tokens_per_rank. No row arrives then. On a GPU with either bound
            it is raised by tdkernels.synchronize(), or by a later call, which makes the group unusable. A rank with too
            many rows raises at once. Then a first backward may raise on the other ranks.
        PeerTimeoutError: If a peer does not make the call in time.

    Contract:
        Collective over ``group``. The host synchronizes unless max_tokens or max_tokens_per_rank is given. With one of
        them the call can be captured in a CUDA graph after one call outside. The caller owns the output.

    Source:
        Splits on the device as in torch.ops.symm_mem.all_to_all_vdev.
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
