"""A first kernel that talks to peers: every rank gets the sum of all ranks' x. Run it: python first_kernel.py"""

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
    call = td.epoch(ctx) + 1  # this is call number 1, 2, … on the workspace
    half = (call % 2).to(tl.int32)
    pid = tl.program_id(0)
    if pid < td.num_ranks(ctx):  # program p copies our x into the slot that rank p keeps for us
        td.put(td.data_at(ctx, half, pid) + me * N * 4, x_ptr.to(tl.int64), N * 4)
        td.notify(ctx, td.signal_at(ctx, half, me), pid, call)  # waiter: rank p's last program
    else:  # the last program adds up what has come, in rank order
        total = tl.full((N,), 0.0, tl.float32)
        for source in range(td.num_ranks(ctx)):
            seen = td.wait(ctx, td.signal_at(ctx, half, source), call, source)  # producer: source's program `me`
            slot = td.consume_token(td.data_at(ctx, half, me) + source * N * 4, seen)
            total += tl.load(slot.to(tl.pointer_type(tl.float32)) + tl.arange(0, N))
        tl.store(y_ptr + tl.arange(0, N), total)
    td.finish(ctx)


def all_sum(x, group=None):
    """The sum of all ranks' x: fp32 [N], contiguous, N a power of two from 4 to some thousands."""
    y = torch.empty_like(x)
    workspace = get_workspace(resolve_group(group), x.device, "all_sum")
    ranks = workspace.world_size
    workspace.prepare("all_sum", {"N": x.numel()}, half_bytes=ranks * x.nbytes, half_signals=ranks)
    workspace.before_launch()
    all_sum_kernel[(ranks + 1,)](workspace.ctx, x, y, N=x.numel())
    workspace.after_launch()
    return y


def three_calls():
    x = torch.arange(4.0, device=rank_device()) + 10 * dist.get_rank()
    return [all_sum(x * call).tolist() for call in (1, 2, 3)]  # as many as you like: nothing is ever reset


def last_rank_stays_away():
    if dist.get_rank() == dist.get_world_size() - 1:
        return "made no fourth call"
    tdkernels.set_timeout(5.0)
    try:
        all_sum(torch.ones(4, device=rank_device()))
        tdkernels.synchronize()  # on a GPU the kernel is still waiting; on the CPU the call itself has raised
    except tdkernels.PeerTimeoutError as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":  # needed: each rank imports this file, and must not start ranks in turn
    with RankPool(3) as pool:
        for rank, sums in enumerate(pool.run(three_calls)):
            print(f"rank {rank}:", *sums)
        for rank, text in enumerate(pool.run(last_rank_stays_away)):
            print(f"rank {rank}: {text}")
