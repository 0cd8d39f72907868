"""Sizes, barriers and layouts of ``latent_kernel``, and the function that rescales an output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.attention.flash_decode.config import LATENT_BLOCK, LATENT_DV, LATENT_ROWS

ROWS, BLOCK, BUFFERS = gl.constexpr(LATENT_ROWS), gl.constexpr(LATENT_BLOCK), gl.constexpr(4)
LATENT, ROTARY, HALF = gl.constexpr(LATENT_DV), gl.constexpr(64), gl.constexpr(256)
PAIR = gl.constexpr(2 * LATENT_BLOCK)  # keys of a pair of blocks
PAIRS = gl.constexpr(2)  # of buffers
CONSUMER_REGISTERS = gl.constexpr(240)  # per thread of a warp group; the loading warps keep the rest
# With an fp8 cache the other warps also convert keys, so they need more. The rotary columns of the queries are in
# shared memory then. With 232 registers, 8 sequences of 32K keys took 194 us instead of 189; with these columns in
# registers, 196 (224) and 198 (232). H200.
FP8_CONSUMER_REGISTERS = gl.constexpr(224)
FP8_SCALED = gl.constexpr(2)  # value of FP8 for an fp8 cache with scales; 1: without, 0: another cache
LAZY = gl.constexpr(8.0)  # log2 of the largest weight: maxima change only beyond it

# Barriers, by index. Those of the buffers come first: BUFFERS of each kind.
KEYS_A, KEYS_B, FREE_A, FREE_B = gl.constexpr(0), gl.constexpr(4), gl.constexpr(8), gl.constexpr(12)
READY, TAKEN = gl.constexpr(16), gl.constexpr(18)  # weights of left and right
QUERY, QUERY_FREE, SUMS = gl.constexpr(20), gl.constexpr(21), gl.constexpr(22)
# With an fp8 cache: queries and keys have arrived, but are not converted yet.
QUERY_RAW, RAW_A, RAW_B = gl.constexpr(23), gl.constexpr(24), gl.constexpr(28)
NUM_BARRIERS = gl.constexpr(32)  # a power of two
# Vectors in shared memory, one number per row: factors of the output and maxima, each from left and right; both sums.
FACTOR, MAXIMUM, SUM = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4)
NUM_VECTORS = gl.constexpr(8)


# ---- layouts ----


@gluon.constexpr_function
def scores_layout():
    """Layout of [ROWS, BLOCK] scores of a warp group."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK.value, 16])


@gluon.constexpr_function
def output_layout():
    """Layout of the [ROWS, HALF] output of a warp group."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 16])


@gluon.constexpr_function
def _rescale_code(count):
    """Return PTX that multiplies ``count`` elements by the two factors of a thread, unless all are 1.

    Of the elements of a thread, 0 and 1 are in one row, 2 and 3 in another, and so on. So factors 0 and 2 decide.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        "{ .reg .pred one, all; "
        f"setp.eq.f32 one, ${2 * count}, 0f3F800000; setp.eq.and.f32 one, ${2 * count + 2}, 0f3F800000, one; "
        f"vote.sync.all.pred all, one, 0xffffffff; @all bra DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _rescale_operands(count):
    """Return the constraints of ``_rescale_code``: outputs, the elements in the same registers, factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale(o, factors):
    """Return o [ROWS, HALF] * factors [ROWS]. A warp whose factors are all 1 skips the products."""
    layout: gl.constexpr = o.type.layout
    factors = gl.convert_layout(factors, gl.SliceLayout(1, layout))
    _, factors = gl.broadcast(o, factors[:, None])
    return gl.inline_asm_elementwise(
        _rescale_code(64), _rescale_operands(64), [o, factors], dtype=gl.float32, is_pure=True, pack=64
    )
