"""AG-GEMM from scratch, compared with the library's: python ag_gemm.py"""

import torch
import torch.distributed as dist
import triton.language as tl

import tdkernels
from tdkernels import lang as td
from tdkernels.launch import rank_device, run_ranks
from tdkernels.symm import get_workspace, resolve_group


@td.jit
def push_shard(ctx, half, signal, x_ptr, peer, num_bytes):
    """Store our shard in the slot that a peer keeps for us, and signal it."""
    me = td.rank(ctx)
    if td.is_void_for_all(signal) == 0:
        td.put(td.data_at(ctx, half, peer) + me * num_bytes, x_ptr.to(tl.int64), num_bytes)
        td.notify(ctx, td.signal_at(ctx, half, me), peer, signal)  # waiter: the peer's tiles of our rows


@td.jit
def tile(a_ptr, weight_ptr, y_ptr, row, column, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y[row : row + BM, column : column + BN], of BM rows that begin at a_ptr."""
    rows, columns, k = tl.arange(0, BM), column + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for begin in range(0, K, BK):
        a = tl.load(a_ptr + rows[:, None] * K + begin + k[None, :])
        b = tl.load(weight_ptr + columns[None, :] * K + begin + k[:, None])
        acc = td.dot(a, b, acc, "ieee")
    y = y_ptr + (row + rows[:, None]) * N + columns[None, :]
    tl.store(y, td.from_float32(acc, y_ptr.dtype.element_ty))


@td.jit
def ag_gemm_kernel(
    ctx, plan, x_ptr, weight_ptr, y_ptr, rows, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    _, half, signal = td.call(ctx, plan)
    shard_bytes = rows * K * 2
    pid = tl.program_id(0)
    if pid < ranks - 1:  # the first programs push our shard, to the next rank first
        push_shard(ctx, half, signal, x_ptr, (me + 1 + pid) % ranks, shard_bytes)
    else:  # the others compute a tile each: own rows first, then the rows of the rank before us, which come first
        columns, blocks = N // BN, rows // BM
        number = pid - (ranks - 1)
        source = (me + ranks - number // (columns * blocks)) % ranks
        block, column = number // columns % blocks, number % columns
        begin = x_ptr.to(tl.int64)
        if source != me:
            seen = td.wait_plan(ctx, td.signal_at(ctx, half, source), signal, source)  # producer: source's push_shard
            begin = td.consume_token(td.data_at(ctx, half, me) + source * shard_bytes, seen)
        a_ptr = td.pointer_to(begin, x_ptr.dtype.element_ty) + block * BM * K
        tile(a_ptr, weight_ptr, y_ptr, source * rows + block * BM, column * BN, N, K, BM, BN, BK)
    td.finish(ctx)


def ag_gemm(x, weight, group=None, block=(16, 16, 16)):
    """Return all_gather(x) @ weight.T; x bf16 [M / W, K], weight [N / W, K], sizes multiples of the block's."""
    workspace = get_workspace(resolve_group(group), x.device, "tutorial")
    (rows, k), n, ranks = x.shape, weight.shape[0], workspace.world_size
    y = x.new_empty(ranks * rows, n)
    fields = {"rows": rows, "N": n, "K": k, "block": str(block)}
    plan = workspace.prepare("tutorial", fields, half_bytes=ranks * x.nbytes, half_signals=ranks)
    programs = ranks - 1 + ranks * (rows // block[0]) * (n // block[1])
    workspace.before_launch()
    ag_gemm_kernel[(programs,)](
        workspace.ctx, plan, x, weight, y, rows, n, k, BM=block[0], BN=block[1], BK=block[2]
    )
    workspace.after_launch()
    return y


def main():
    torch.manual_seed(dist.get_rank())
    x, weight = (torch.randn(32, 64, device=rank_device()).bfloat16() for _ in range(2))
    ours, theirs = ag_gemm(x, weight), tdkernels.ag_gemm(x, weight)
    return list(ours.shape), torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    print(run_ranks(3, main))
