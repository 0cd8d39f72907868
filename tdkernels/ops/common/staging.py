"""Partial tiles that wait in this rank's own memory until a piece of work forwards them to the rank that sums them."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import to_fragment_layout

COPY_WORDS = 4096  # of 8 bytes, that a program moves at a time


@td.jit
def stage_tile(ctx, dst_ptr, staged, acc, epoch, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a product in register order, in the dtype of ``dst_ptr``, and raise flag number ``staged``."""
    partial = to_fragment_layout(td.from_float32(acc, dst_ptr.dtype.element_ty), BLOCK_M, BLOCK_N)
    tl.store(dst_ptr + tl.arange(0, BLOCK_M * BLOCK_N), partial)
    # waiter: the program of this rank that forwards the item, or the one that sums the tile
    td.store_release(td.flag_at(ctx, staged), epoch, SCOPE="gpu")


@td.jit
def copy_out_staged(
    ctx, src, dst, staged, count, owner, signal_ptr, signal, epoch,
    TILE_BYTES: tl.constexpr, COPY_WORDS: tl.constexpr, trace,
):
    """Copy ``count`` finished tiles to their owner and raise its signal; returns ``td.fetch_work_item``'s answer.

    Flag number ``staged`` and those after it say that a tile is there; src and dst are addresses.
    """
    me = td.rank(ctx)
    td.mark(trace, "waits", me)
    for i in range(count):
        # producer: the program of this rank that computed the tile
        td.wait(ctx, td.flag_at(ctx, staged + i), epoch, me, SCOPE="gpu")
    td.mark(trace, "pushes", owner)
    td.put(dst, src, count * TILE_BYTES, COPY_WORDS)
    answer = td.fetch_work_item(ctx)
    td.notify(ctx, signal_ptr, owner, signal, CHECK_FAILED=True)  # waiter: the owner's programs that sum these tiles
    return answer
