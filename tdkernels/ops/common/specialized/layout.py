"""Sizes, barriers and shared memory of the warp-specialized kernels.

Barriers of shared memory are of the kind "mbarrier":

    FULL      one per stage: the operands of a step have arrived
    FREE      one per stage: both partitions that multiply have read them
    OUT_FULL  both partitions that multiply have stored their rows of half a tile in ``out``, or have no rows
    OUT_FREE  ``out`` has been read

A tile leaves in two halves, columns 0 to HALF_N - 1 first, or in other blocks of HALF_N columns that ``PASS`` of
``multiply_partition`` makes of it. A kernel can have work items that are half a tile, with odd numbers: its first or
last HALF_N columns (HALF_COLUMNS), or its first HALF_M rows (HALF_ROWS).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tdkernels.ops.common.tile_config import SPECIALIZED_TILE, STEP_BYTES

BLOCK_M, BLOCK_N = gl.constexpr(SPECIALIZED_TILE[0]), gl.constexpr(SPECIALIZED_TILE[1])
STEP_BYTES = gl.constexpr(STEP_BYTES)  # of a row of an operand, in a step of K
HALF_M, HALF_N = gl.constexpr(BLOCK_M.value // 2), gl.constexpr(BLOCK_N.value // 2)
HALF_SIZE = gl.constexpr(HALF_M.value * HALF_N.value)  # elements of HALF_M rows of half a tile
STAGES = gl.constexpr(4)  # steps of K in flight
# Steps of a tile that start before the kept half of the previous tile is passed on; at most STAGES.
EARLY_STEPS = gl.constexpr(2)
# Warps of the partitions after the first one, which has four, and registers of a thread. The first two partitions
# multiply. The others form a warp group, whose threads have equally many registers. An SM has 65536 registers.
WARPS, REGISTERS = gl.constexpr([4, 2, 1, 1]), gl.constexpr([192, 120, 120, 120])
PROMOTE_REGISTERS = gl.constexpr([216, 72, 72, 72])  # with a second accumulator

FULL, FREE, OUT_FULL, OUT_FREE = gl.constexpr(0), gl.constexpr(4), gl.constexpr(8), gl.constexpr(9)
NUM_BARRIERS = gl.constexpr(16)  # a power of two
# Words of each stage for a work item: its number, and its place in three numbers, whose meaning depends on the kernel.
# With split-K also its first step of K, its number of steps, and the split, see ``split_of``. If the number of steps
# depends on the work item, also this number and that of the elements of K of the last step that are multiplied.
ITEM_WORDS = gl.constexpr(8)
NO_ITEM = gl.constexpr(-1)  # instead of a work item: there are no more
HALF_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N.value, 16]))  # of half a tile in fp32
FP8_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N.value, 32]))  # of a product in fp8
NO_HALVES, HALF_COLUMNS, HALF_ROWS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # work items with odd numbers

ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def make_barriers(ARRIVALS: gl.constexpr = 1):
    """Return the initialized barriers. ARRIVALS: number of arrivals at FULL, apart from bytes of TMA"""
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(FULL + stage), count=ARRIVALS)
        mbarrier.init(bars.index(FREE + stage), count=2)
    mbarrier.init(bars.index(OUT_FULL), count=2)
    mbarrier.init(bars.index(OUT_FREE), count=1)
    fence_async_shared()
    return bars


@gluon.jit
def make_memory(
    dtype: gl.constexpr, w_dtype: gl.constexpr, W_IS_KN: gl.constexpr, out_dtype: gl.constexpr,
    COPIES_X: gl.constexpr = False, X_IS_KM: gl.constexpr = False,
):
    """Return the tuple ``memory`` of all partitions, for dtypes of x and the weight of one size and a 16-bit output.

    x       [2 * STAGES, HALF_M, BLOCK_K]: the rows of each partition that multiplies
    weight  [STAGES, BLOCK_N, BLOCK_K], or [STAGES, BLOCK_K, BLOCK_N] if W_IS_KN
    out     [2, HALF_M, HALF_N]: half a tile that is being sent or stored
    items   [ITEM_WORDS * STAGES, 1]: the work item that begins with a stage, and its place
    sent    [1, 1]: the work item of ``out``
    COPIES_X: whether threads copy the rows of x, instead of TMA
    X_IS_KM: whether a block of x is stored as [BLOCK_K, HALF_M]
    """
    BLOCK_K: gl.constexpr = STEP_BYTES * 8 // dtype.primitive_bitwidth
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=dtype.primitive_bitwidth, rank=2)
    of_x: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, rank=2, transposed=X_IS_KM)
    of_out: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF_M, BLOCK_K], of_x)
    if W_IS_KN:
        w = gl.allocate_shared_memory(w_dtype, [STAGES, BLOCK_K, BLOCK_N], swizzled)
    else:
        w = gl.allocate_shared_memory(w_dtype, [STAGES, BLOCK_N, BLOCK_K], swizzled)
    out = gl.allocate_shared_memory(out_dtype, [2, HALF_M, HALF_N], of_out)
    items = gl.allocate_shared_memory(gl.int32, [ITEM_WORDS * STAGES, 1], plain)
    sent = gl.allocate_shared_memory(gl.int32, [1, 1], plain)
    return x, w, out, items, sent, COPIES_X


@gluon.jit
def await_operands(memory, bars, turn):
    """Wait until the operands of step ``turn`` have arrived, and return its stage."""
    stage = turn % STAGES
    mbarrier.wait(bars.index(FULL + stage), (turn // STAGES) & 1)
    if memory[5]:
        fence_async_shared()  # the tensor cores read through another proxy than the threads that wrote
    return stage


@gluon.jit
def write_item(word, item, layout: gl.constexpr):
    """Store the number of a work item in shared memory."""
    word.store(gl.full([1], item, gl.int32, layout))


@gluon.jit
def read_item(word, layout: gl.constexpr):
    """Return the number of a work item in shared memory."""
    return gl.max(word.load(layout), 0)


@gluon.jit
def item_word(memory, stage, number: gl.constexpr):
    """Return a word of a stage: 0 is the work item, 1 to 3 its place, and 4 to 6 its range of K."""
    return memory[3].index(ITEM_WORDS * stage + number)
