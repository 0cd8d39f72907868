"""Pass on halves of tiles, from the partitions that multiply to the warp that sends or stores them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tdkernels.lang.gluon_signals import FOUR_WARPS
from tdkernels.ops.common.specialized.layout import NO_ITEM, OUT_FREE, OUT_FULL, write_item


@gluon.jit
def pass_on(memory, bars, part, item, number, WHICH: gl.constexpr):
    """Store HALF_M rows of half a tile for the warp that sends or stores it. Return the number of halves so far."""
    _, _, out, _, sent, _ = memory
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    out.index(WHICH).store(part)
    if WHICH == 0:
        write_item(sent.index(0), item, FOUR_WARPS)
    fence_async_shared()
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
    return number + 1


@gluon.jit
def pass_kept(memory, bars, kept, kept_item, number, WHICH: gl.constexpr):
    """Pass on the half of a tile that was kept, if there is one. Return the number of halves so far."""
    if kept_item != NO_ITEM:
        number = pass_on(memory, bars, kept, kept_item, number, WHICH)
    return number


@gluon.jit
def pass_nothing(bars, number):
    """Take part in a half that the other partition passes on. Return the number of halves so far."""
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
    return number + 1


@gluon.jit
def pass_no_item(memory, bars, number, WHICH: gl.constexpr):
    """Pass on that there are no more items.

    Both partitions wait. Otherwise this arrival could count for the half before, in place of the other partition.
    """
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    if WHICH == 0:
        write_item(memory[4].index(0), NO_ITEM, FOUR_WARPS)
    mbarrier.arrive(bars.index(OUT_FULL), count=1)


@gluon.jit
def pass_halves(memory, bars, halves, item, place, number, epilogue, WHICH: gl.constexpr, EPILOGUE: gl.constexpr):
    """Pass on the first half of a tile. Return (number of halves so far, the last half)."""
    dtype: gl.constexpr = memory[2].dtype
    left, right = halves
    number = pass_on(memory, bars, EPILOGUE(left, place, WHICH, 0, epilogue).to(dtype), item, number, WHICH)
    return number, EPILOGUE(right, place, WHICH, 1, epilogue).to(dtype)


@gluon.jit
def no_epilogue(half, place, WHICH: gl.constexpr, side: gl.constexpr, epilogue):
    """Return half a tile as it is."""
    return half
