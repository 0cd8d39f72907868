"""Staging of partial tiles in this rank's memory, until a work item copies them to the rank that sums them."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import to_fragment_layout

COPY_WORDS = 4096  # 64-bit words that a program moves at a time


@td.jit
def stage_tile(ctx, dst_ptr, staged, acc, epoch, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store an accumulator in fragment layout, in the dtype of ``dst_ptr``, and set flag number ``staged``."""
    partial = to_fragment_layout(td.from_float32(acc, dst_ptr.dtype.element_ty), BLOCK_M, BLOCK_N)
    tl.store(dst_ptr + tl.arange(0, BLOCK_M * BLOCK_N), partial)
    # waiter: the program of this rank that copies out the tile group, or the one that sums the tile
    td.store_release(td.flag_at(ctx, staged), epoch, SCOPE="gpu")


@td.jit
def copy_out_staged(
    ctx, src, dst, staged, count, owner, signal_ptr, signal, epoch,
    TILE_BYTES: tl.constexpr, COPY_WORDS: tl.constexpr, trace,
):
    """Copy ``count`` staged tiles to their owner and set its signal; return the result of ``td.fetch_work_item``.

    It first waits for the tiles: flag number ``staged + i`` is set when tile i is staged. src and dst are addresses.
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
