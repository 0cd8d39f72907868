"""An all-to-all of a few tokens in one launch, with no exchange of counts before: python low_latency_all_to_all.py"""

import torch
import torch.distributed as dist
import triton.language as tl

from tdkernels import lang as td
from tdkernels.launch import rank_device, run_ranks
from tdkernels.symm import get_workspace, resolve_group


@td.jit
def all_to_all_kernel(ctx, plan, x_ptr, counts_ptr, y_ptr, received_ptr, CAPACITY: tl.constexpr, H: tl.constexpr):
    me = td.rank(ctx)
    _, half, signal = td.call(ctx, plan)
    peer = tl.program_id(0)  # one program for each peer: it sends to the peer, then receives from it
    slot_bytes = 16 + CAPACITY * H * 4  # the number of tokens in front, then room for as many as may come
    if td.is_void_for_all(signal) == 0:
        slot = td.data_at(ctx, half, peer) + me * slot_bytes
        count = tl.load(counts_ptr + peer)
        tl.store(slot.to(tl.pointer_type(tl.int32)), count)
        td.put(slot + 16, x_ptr.to(tl.int64) + peer * CAPACITY * H * 4, count * H * 4)  # only the tokens that exist
        td.notify(ctx, td.signal_at(ctx, half, me), peer, signal)  # waiter: below, on the peer
    seen = td.wait_plan(ctx, td.signal_at(ctx, half, peer), signal, peer)  # producer: above, on the peer
    slot = td.consume_token(td.data_at(ctx, half, me) + peer * slot_bytes, seen)
    count = tl.load(slot.to(tl.pointer_type(tl.int32)))
    tl.store(received_ptr + peer, count)
    offsets = tl.arange(0, CAPACITY * H)
    rows = tl.load((slot + 16).to(tl.pointer_type(tl.float32)) + offsets, mask=offsets < count * H)
    tl.store(y_ptr + peer * CAPACITY * H + offsets, rows, mask=offsets < count * H)
    td.finish(ctx)


def all_to_all(x, counts, group=None):
    """Send counts[p] rows of x[p] to each rank p; return (y, received), the same of the rows that came from each rank.

    x: fp32 [W, capacity, H]; capacity · H a power of two, H a multiple of 4. counts: int32 [W], on the device of x.
    """
    ranks, capacity, width = x.shape
    y, received = torch.zeros_like(x), torch.empty_like(counts)
    workspace = get_workspace(resolve_group(group), x.device, "tokens")
    fields = {"capacity": capacity, "H": width}
    plan = workspace.prepare("tokens", fields, half_bytes=ranks * (16 + capacity * width * 4), half_signals=ranks)
    workspace.before_launch()
    all_to_all_kernel[(ranks,)](workspace.ctx, plan, x, counts, y, received, CAPACITY=capacity, H=width)
    workspace.after_launch()
    return y, received


def main():
    me, ranks, device = dist.get_rank(), dist.get_world_size(), rank_device()
    x = 100 * me + torch.arange(ranks * 4 * 8.0, device=device).view(ranks, 4, 8)
    y, received = all_to_all(x, torch.arange(ranks, dtype=torch.int32, device=device))  # p tokens for rank p
    sent = torch.arange(ranks * 4 * 8.0, device=device).view(ranks, 4, 8)[me, :me]
    return received.tolist(), all(torch.equal(y[source, :me], 100 * source + sent) for source in range(ranks))


if __name__ == "__main__":
    print(run_ranks(3, main))
