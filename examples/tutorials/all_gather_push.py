"""An all-gather in which each rank pushes its shard, in chunks: python all_gather_push.py"""

import torch
import torch.distributed as dist
import triton.language as tl

from tdkernels import lang as td
from tdkernels.launch import rank_device, run_ranks
from tdkernels.symm import get_workspace, resolve_group


@td.jit
def all_gather_kernel(ctx, plan, x_ptr, y_ptr, N: tl.constexpr, CHUNK: tl.constexpr):
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    _, half, signal = td.call(ctx, plan)
    chunks = N // CHUNK
    pid = tl.program_id(0)
    rank, chunk = pid // chunks % ranks, pid % chunks
    begin = chunk * CHUNK
    if pid < ranks * chunks:  # producers come first: a program waits only for programs with smaller ids
        if td.is_void_for_all(signal) == 0:
            td.put(td.data_at(ctx, half, rank) + (me * N + begin) * 4, x_ptr.to(tl.int64) + begin * 4, CHUNK * 4)
            td.notify(ctx, td.signal_at(ctx, half, me * chunks + chunk), rank, signal)  # waiter: rank's copy of it
    else:  # copy a chunk of another rank out of the workspace, which the call after the next will overwrite
        seen = td.wait_plan(ctx, td.signal_at(ctx, half, rank * chunks + chunk), signal, rank)  # producer: its put
        slot = td.consume_token(td.data_at(ctx, half, me) + (rank * N + begin) * 4, seen)
        offsets = tl.arange(0, CHUNK)
        tl.store(y_ptr + rank * N + begin + offsets, tl.load(slot.to(tl.pointer_type(tl.float32)) + offsets))
    td.finish(ctx)


def all_gather(x, chunk=64, group=None):
    """Return the shards of all ranks, [W, N].

    x: fp32 [N], N a multiple of ``chunk``, which is a power of two of at least 4.
    """
    workspace = get_workspace(resolve_group(group), x.device, "push")
    ranks, chunks = workspace.world_size, x.numel() // chunk
    y = x.new_empty(ranks, x.numel())
    fields = {"N": x.numel(), "chunk": chunk}  # what all ranks must agree on
    plan = workspace.prepare("push", fields, half_bytes=y.nbytes, half_signals=ranks * chunks)
    workspace.before_launch()
    all_gather_kernel[(2 * ranks * chunks,)](workspace.ctx, plan, x, y, N=x.numel(), CHUNK=chunk)
    workspace.after_launch()
    return y


def main():
    x = torch.arange(256.0, device=rank_device()) * (1 + dist.get_rank())
    expected = torch.stack([torch.arange(256.0) * (1 + rank) for rank in range(dist.get_world_size())])
    return all(torch.equal(all_gather(x).cpu(), expected) for _ in range(3))


if __name__ == "__main__":
    print(run_ranks(3, main))
