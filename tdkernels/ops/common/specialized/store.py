"""Store tiles from shared memory with TMA, in a partition of one warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tdkernels.ops.common.specialized.layout import HALF_M


@gluon.jit
def store_half(desc, out, plane, row, col):
    """Start to store half a tile, which is in ``out``, at (plane, row, col) of a descriptor for [1, HALF_M, HALF_N]."""
    for part in gl.static_range(2):
        shaped = out.index(part)._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
        tma.async_copy_shared_to_global(desc, [plane, row + part * HALF_M, col], shaped)
