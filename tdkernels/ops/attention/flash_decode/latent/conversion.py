"""An fp8 cache in ``latent_kernel``: the partition that loads and converts keys to fp16, and the conversion of queries.

e4m3 keys are exact in fp16. The scale of the keys is a factor of the latent columns of the queries, because it does not
apply to the rotary columns. So scores are sums of two products, as for other caches.

Keys are converted in place. A piece, [BLOCK, 256] elements, arrives in the second half of its buffer. All of it is read
before any of it is overwritten.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tdkernels.lang.gluon_memory import reinterpret
from tdkernels.ops.attention.flash_decode.latent.layout import (
    BLOCK,
    FP8_SCALED,
    FREE_A,
    FREE_B,
    KEYS_A,
    KEYS_B,
    LATENT,
    PAIR,
    PAIRS,
    QUERY,
    QUERY_FREE,
    QUERY_RAW,
    RAW_A,
    RAW_B,
    ROTARY,
    ROWS,
)
from tdkernels.ops.attention.flash_decode.latent.loading import (
    length_of,
    load_a,
    load_b,
    load_queries,
    part_at,
    place,
)

# Pieces of a pair in the order in which they are loaded and converted: columns 0 to 255 of the even block (A), 256 to
# 511 (B), B of the odd block, A of the odd block. A piece is loaded when the one _AHEAD places before it has been
# converted. More would never end: the buffer of A of the even block is free when the warp group "left" has started the
# scores of the next even block.
_AHEAD = gl.constexpr(3)


@gluon.jit
def rotary_query(q_ptr, row, rows, layout: gl.constexpr):
    """Return the rotary columns of the queries in a layout."""
    rows_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = LATENT + gl.arange(0, ROTARY, layout=gl.SliceLayout(0, layout))
    offsets = (row + rows_m).to(gl.int64)[:, None] * (LATENT + ROTARY) + columns[None, :]
    return gl.load(q_ptr + offsets, mask=(rows_m < rows)[:, None], other=0.0)


@gluon.jit
def convert_query(call, memory, bars, row, rows, part, RIGHT: gl.constexpr, FP8: gl.constexpr):
    """Convert columns 0 to 255 of the queries to fp16, or columns 256 to 511, times the scale of the keys, in place.

    Both warp groups that compute call this, because they wait for the queries and have more registers. The left one
    also stores the rotary columns.
    """
    dtype: gl.constexpr = call[0].dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    if RIGHT:
        mbarrier.wait(bars.index(QUERY_RAW), part & 1)
    else:
        rotary = rotary_query(call[0], row, rows, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
        mbarrier.wait(bars.index(QUERY_RAW), part & 1)  # the queries arrive after the last read of those before
        memory[8].store(rotary)
    if FP8 == FP8_SCALED or dtype != gl.float16:
        q = memory[RIGHT]
        given = reinterpret(q, dtype, q.shape, q.layout).load(layout)
        if FP8 == FP8_SCALED:
            given = given.to(gl.float32) * call[9][0]
        q.store(given.to(gl.float16))
    fence_async_shared()
    mbarrier.arrive(bars.index(QUERY), count=1)


@gluon.jit
def _convert(memory, bars, turn, PIECE: gl.constexpr):
    """Convert a piece of pair ``turn`` when it has arrived."""
    buffer = (turn % PAIRS) * 2 + PIECE // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    IS_A: gl.constexpr = PIECE % 3 == 0
    raw = memory[7][0 if IS_A else 1].index(2 * buffer + 1)
    values = memory[2 if IS_A else 3].index(buffer)
    mbarrier.wait(bars.index((RAW_A if IS_A else RAW_B) + buffer), (turn // PAIRS) & 1)
    values.store(raw.load(layout).to(gl.float8e4nv, bitcast=True).to(gl.float16))
    fence_async_shared()
    mbarrier.arrive(bars.index((KEYS_A if IS_A else KEYS_B) + buffer), count=1)


@gluon.jit
def _places(call, entry, pair, length, PAGE: gl.constexpr):
    """Return the places of both blocks of a pair."""
    even = place(call, entry, pair * PAIR, length, PAGE)
    odd = place(call, entry, pair * PAIR + BLOCK, length, PAGE)
    return even[0], even[1], odd[0], odd[1]


@gluon.jit
def _load(keys, at, memory, bars, turn, PIECE: gl.constexpr, ROPE_AT: gl.constexpr):
    """Load a piece of pair ``turn`` into its buffer when that is free. ``at`` are the places of the pair."""
    buffer = (turn % PAIRS) * 2 + PIECE // 2
    phase = ((turn // PAIRS) & 1) ^ 1
    where = (at[2], at[3]) if PIECE // 2 else (at[0], at[1])
    if PIECE % 3 == 0:
        mbarrier.wait(bars.index(FREE_A + buffer), phase)
        load_a(keys, where, memory, bars, buffer, True, ROPE_AT)
    else:
        mbarrier.wait(bars.index(FREE_B + buffer), phase)
        load_b(keys, where, memory, bars, buffer, True)


@gluon.jit
def convert_partition(
    call, keys, memory, bars, work, TQ: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    ROPE_AT: gl.constexpr,
):
    """Partition that loads queries and keys, and converts the keys."""
    entry, block_r, first, pos, end, _ = work
    turn = 0  # pairs of blocks so far
    part = 0  # parts so far
    while pos < end:
        length = length_of(call[1], entry, call[7])
        begin, past, stop, ends, number = part_at(call, work, first, pos, entry, length, CHUNK)
        at = _places(call, entry, begin, length, PAGE)
        for piece in gl.static_range(_AHEAD):
            _load(keys, at, memory, bars, turn, piece, ROPE_AT)
        mbarrier.wait(bars.index(QUERY_FREE), (part & 1) ^ 1)
        load_queries(keys, memory, bars.index(QUERY_RAW), entry * (TQ * GROUP) + block_r * ROWS)
        for pair in range(begin, past):
            after = _places(call, entry, pair + 1, length, PAGE)
            for piece in gl.static_range(4):
                _convert(memory, bars, turn, piece)
                if piece == 0:
                    _load(keys, at, memory, bars, turn, _AHEAD, ROPE_AT)
                elif pair + 1 < past:
                    _load(keys, after, memory, bars, turn + 1, piece - 1, ROPE_AT)
            at = after
            turn += 1
        if ends:
            first = stop
            entry += 1
        pos = stop
        part += 1
