"""Two ranks exchange a vector: python notify_and_wait.py"""

import torch
import torch.distributed as dist
import triton.language as tl

from tdkernels import lang as td
from tdkernels.launch import rank_device, run_ranks
from tdkernels.symm import get_workspace, resolve_group


@td.jit
def exchange_kernel(ctx, plan, x_ptr, y_ptr, N: tl.constexpr):
    me = td.rank(ctx)
    peer = 1 - me
    _, half, signal = td.call(ctx, plan)  # the number of this call, and which half of the workspace it uses
    arrived = td.signal_at(ctx, half, 0)
    if td.is_void_for_all(signal) == 0:  # after a failure nothing is stored at peers
        td.put(td.data_at(ctx, half, peer), x_ptr.to(tl.int64), N * 4)
        td.notify(ctx, arrived, peer, signal)  # waiter: the same line below, on the peer
    seen = td.wait_plan(ctx, arrived, signal, peer)  # producer: the line above, on the peer
    slot = td.consume_token(td.data_at(ctx, half, me), seen)  # no load through it moves before the wait
    offsets = tl.arange(0, N)
    tl.store(y_ptr + offsets, tl.load(slot.to(tl.pointer_type(tl.float32)) + offsets))
    td.finish(ctx)


def exchange(x, group=None):
    """Return the x of the other rank of two; fp32 [N], N a power of two of at least 4."""
    y = torch.empty_like(x)
    workspace = get_workspace(resolve_group(group), x.device, "exchange")
    plan = workspace.prepare("exchange", {"N": x.numel()}, half_bytes=x.nbytes, half_signals=1)
    workspace.before_launch()
    exchange_kernel[(1,)](workspace.ctx, plan, x, y, N=x.numel())
    workspace.after_launch()
    return y


def main():
    x = torch.arange(4.0, device=rank_device()) + 10 * dist.get_rank()
    return exchange(x).tolist()


if __name__ == "__main__":
    print(run_ranks(2, main))
