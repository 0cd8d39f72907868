"""An operator from scratch: RMSNorm of a shard and the all-gather of the result, in one kernel, with gradients."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import tdkernels.ops.collectives.op  # noqa: F401 - registers torch.ops.tdkernels.reduce_scatter
from tdkernels import lang as td
from tdkernels.runtime import autograd, torch_op
from tdkernels.symm import get_workspace, resolve_group

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_all_gather_ref(x, weight, eps=1e-6, group=None):
    """Compute ``norm_all_gather`` with torch and torch.distributed; no gradient."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    shards = [torch.empty_like(normed) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(shards, normed, group=group)
    return torch.cat(shards)


# ---- kernel ----


@td.jit
def normalize_row(x_ptr, weight_ptr, row, H, eps, BLOCK: tl.constexpr):
    """Return a normalized row of x, in the dtype of x, and the mask of its columns."""
    columns = tl.arange(0, BLOCK)
    mask = columns < H
    x = tl.load(x_ptr + row.to(tl.int64) * H + columns, mask, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(td.sum_of(x * x, 0) / H + eps)
    return td.from_float32(x * scale * weight, x_ptr.dtype.element_ty), columns, mask


@td.jit
def send_row(ctx, half, signal, x_ptr, weight_ptr, y_ptr, row, rows, H, eps, BLOCK: tl.constexpr):
    """Normalize a row of x and store it in y and at all peers."""
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    dtype = x_ptr.dtype.element_ty
    normed, columns, mask = normalize_row(x_ptr, weight_ptr, row, H, eps, BLOCK)
    begin = (me * rows + row).to(tl.int64) * H
    tl.store(y_ptr + begin + columns, normed, mask)
    if td.is_void_for_all(signal) == 0:  # after a failure a launch stores nothing at a peer
        for step in range(1, ranks):
            peer = (me + step) % ranks
            tl.store(td.pointer_to(td.data_at(ctx, half, peer), dtype) + begin + columns, normed, mask)
            td.notify(ctx, td.signal_at(ctx, half, me * rows + row), peer, signal)  # waiter: the peer's copy_row


@td.jit
def copy_row(ctx, half, signal, y_ptr, source, row, rows, H, BLOCK: tl.constexpr):
    """Wait for a row of a peer and copy it from the symmetric memory to y."""
    index = source * rows + row
    seen = td.wait_plan(ctx, td.signal_at(ctx, half, index), signal, source)  # producer: send_row of the source
    staged = td.pointer_to(td.consume_token(td.data_at(ctx, half, td.rank(ctx)), seen), y_ptr.dtype.element_ty)
    columns = tl.arange(0, BLOCK)
    begin = index.to(tl.int64) * H
    tl.store(y_ptr + begin + columns, tl.load(staged + begin + columns, columns < H), columns < H)


@td.jit
def norm_all_gather_kernel(ctx, plan, x_ptr, weight_ptr, y_ptr, rows, H, eps, BLOCK: tl.constexpr):
    _, half, signal = td.call(ctx, plan)
    pid = tl.program_id(0)
    if pid < rows:  # producers have the smaller program ids, so a waiting program never blocks them
        send_row(ctx, half, signal, x_ptr, weight_ptr, y_ptr, pid, rows, H, eps, BLOCK)
    else:
        ranks, number = td.num_ranks(ctx), pid - rows
        source = (td.rank(ctx) + ranks - 1 - number // rows) % ranks  # the rank before this one sends here first
        copy_row(ctx, half, signal, y_ptr, source, number % rows, rows, H, BLOCK)
    td.finish(ctx)


# ---- launch ----


def _launch(x, weight, eps, group):
    """Launch the kernel and return y; the operands are valid."""
    x, weight = x.contiguous(), weight.contiguous()
    group = torch_op.group_by_name(group)
    workspace = get_workspace(group, x.device, "norm_all_gather")
    (rows, hidden), ranks = x.shape, workspace.world_size
    y = x.new_empty(ranks * rows, hidden)
    fields = {"x": str(list(x.shape)), "dtype": str(x.dtype), "eps": eps}  # equal on all ranks, or all raise
    plan = workspace.prepare("norm_all_gather", fields, half_bytes=y.nbytes, half_signals=ranks * rows)
    workspace.before_launch()
    norm_all_gather_kernel[(ranks * rows,)](
        workspace.ctx, plan, x, weight, y, rows, hidden, eps, BLOCK=triton.next_power_of_2(hidden)
    )
    workspace.after_launch()
    return y


def _fake(x, weight, eps, group):
    """Return an output without data, for torch.compile."""
    return x.new_empty(torch_op.world_size_by_name(group) * x.shape[0], x.shape[1])


torch_op.register("norm_all_gather(Tensor x, Tensor weight, float eps, str group) -> Tensor", _launch, _fake)


# ---- gradient ----


class _NormAllGather(torch.autograd.Function):
    """Save the shard of x, not the gathered rows. The backward of the all-gather is the library's reduce_scatter."""

    @staticmethod
    def forward(ctx, x, weight, eps, group):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.group = eps, group
        return torch.ops.tdkernels.norm_all_gather(x, weight, eps, group)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("norm_all_gather")
        x, weight = ctx.saved_tensors
        dnormed = torch.ops.tdkernels.reduce_scatter(dy, ctx.group, "").float()
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + ctx.eps)
        normed, scaled = x.float() * scale, dnormed * weight.float()
        dx = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dnormed * normed).sum(0).to(weight.dtype), None, None


# ---- public function ----


def norm_all_gather(x, weight, eps=1e-6, group=None):
    """Normalize the rows of x and all-gather them: y = all_gather(rms_norm(x) * weight).

    Args:
        x: [R, H], fp32, bf16 or fp16; the same shape on all ranks.
        weight: [H], the same dtype; equal on all ranks.
        eps: added to the mean of squares.
        group: process group or one-dimensional DeviceMesh; None is the default group.

    Returns:
        [W * R, H], in rank order, equal on all ranks.

    Raises:
        TypeError: if a dtype is not supported.
        ValueError: if a shape is wrong, or differs between the ranks.

    Gradient: dx of this rank's rows. dweight covers this rank's rows only: all-reduce it, as for every weight that is
    replicated while rows are sharded.
    """
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        raise TypeError(f"norm_all_gather: x and weight must share one of {_DTYPES}, not {x.dtype} and {weight.dtype}")
    if x.dim() != 2 or not x.numel():
        raise ValueError(f"norm_all_gather: x must be [R, H] and not empty, not {list(x.shape)}")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"norm_all_gather: weight {list(weight.shape)} must be [H] for x {list(x.shape)}")
    return _NormAllGather.apply(x, weight, eps, resolve_group(group).group_name)
