"""Sum a vector over all ranks, in one kernel that communicates. Run it: python first_kernel.py"""

import torch
import torch.distributed as dist
import triton.language as tl

import tdkernels
from tdkernels import lang as td
from tdkernels.launch import RankPool, rank_device
from tdkernels.symm import get_workspace, resolve_group


@td.jit
def all_sum_kernel(ctx, x_ptr, y_ptr, N: tl.constexpr):
    me = td.rank(ctx)
    call = td.epoch(ctx) + 1  # number of this call on the workspace: 1, 2, ...
    half = (call % 2).to(tl.int32)  # half of the double buffer that this call uses
    pid = tl.program_id(0)
    if pid < td.num_ranks(ctx):  # program p copies x to slot `me` in the buffer of rank p
        td.put(td.data_at(ctx, half, pid) + me * N * 4, x_ptr.to(tl.int64), N * 4)
        td.notify(ctx, td.signal_at(ctx, half, me), pid, call)  # waiter: the last program of rank p
    else:  # the last program adds the vectors of all ranks, in rank order
        total = tl.full((N,), 0.0, tl.float32)
        for source in range(td.num_ranks(ctx)):
            seen = td.wait(ctx, td.signal_at(ctx, half, source), call, source)  # producer: program `me` of the source
            slot = td.consume_token(td.data_at(ctx, half, me) + source * N * 4, seen)
            total += tl.load(slot.to(tl.pointer_type(tl.float32)) + tl.arange(0, N))
        tl.store(y_ptr + tl.arange(0, N), total)
    td.finish(ctx)


def all_sum(x, group=None):
    """Return the sum of x over all ranks. x: fp32 [N], contiguous, N a power of two from 4 to a few thousand."""
    y = torch.empty_like(x)
    workspace = get_workspace(resolve_group(group), x.device, "all_sum")
    ranks = workspace.world_size
    workspace.prepare("all_sum", {"N": x.numel()}, half_bytes=ranks * x.nbytes, half_signals=ranks)
    workspace.before_launch()
    all_sum_kernel[(ranks + 1,)](workspace.ctx, x, y, N=x.numel())
    workspace.after_launch()
    return y


def make_three_calls():
    x = torch.arange(4.0, device=rank_device()) + 10 * dist.get_rank()
    return [all_sum(x * call).tolist() for call in (1, 2, 3)]  # signals are not reset between calls


def make_fourth_call_except_on_last_rank():
    if dist.get_rank() == dist.get_world_size() - 1:
        return "skipped the fourth call"
    tdkernels.set_timeout(5.0)
    try:
        all_sum(torch.ones(4, device=rank_device()))
        tdkernels.synchronize()  # needed on a GPU, where the kernel is still waiting; on the CPU all_sum raises
    except tdkernels.PeerTimeoutError as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":  # required: each rank imports this file and must not start ranks itself
    with RankPool(3) as pool:
        for rank, sums in enumerate(pool.run(make_three_calls)):
            print(f"rank {rank}:", *sums)
        for rank, text in enumerate(pool.run(make_fourth_call_except_on_last_rank)):
            print(f"rank {rank}: {text}")
