"""Store tiles from shared memory with TMA, in a partition of one warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.gluon_memory import reinterpret, tma_store
from tdkernels.ops.common.specialized.layout import HALF_M


@gluon.jit
def store_part(desc, out, part: gl.constexpr, plane, row, col):
    """Start to store a quarter of a tile, ``out`` number ``part``. Descriptor and place as in ``store_half``."""
    shaped = reinterpret(out.index(part), desc.dtype, desc.block_type.shape, desc.layout)
    tma_store(desc, [plane, row, col], shaped)


@gluon.jit
def store_half(desc, out, plane, row, col):
    """Start to store half a tile, which is in ``out``, at (plane, row, col) of a descriptor for [1, HALF_M, HALF_N]."""
    for part in gl.static_range(2):
        store_part(desc, out, part, plane, row + part * HALF_M, col)
