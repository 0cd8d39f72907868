"""The partition of ``latent_kernel`` that loads queries and keys with TMA, and the sequence of work.

The work is divided as in ``kernel_split``, into pairs of blocks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tdkernels.lang.gluon_memory import reinterpret, tma_load
from tdkernels.ops.attention.flash_decode.kernel_work import blocks_of_part, end_of_part, num_units
from tdkernels.ops.attention.flash_decode.latent.layout import (
    BLOCK,
    FREE_A,
    FREE_B,
    HALF,
    KEYS_A,
    KEYS_B,
    LATENT,
    PAIR,
    PAIRS,
    QUERY,
    QUERY_FREE,
    RAW_A,
    RAW_B,
    ROTARY,
    ROWS,
)

# Tuples that all partitions use:
#
#     call      q_ptr, lens_ptr, (table_ptr, stride_table, num_pages), scratch_ptr, lse_at, scale, B, capacity,
#               (shares, slots), (k_scale, v_scale)
#     memory    queries left and right, keys left, right and rotary, weights of both warp groups, vectors; with an fp8
#               cache also (keys left and right as bytes, in halves of their buffers), rotary columns of the queries
#     work      entry, block of query rows, first unit of the entry, first unit and end of the program, share
#
# Units are those of ``kernel_work``: pairs of blocks, or chunks of at least CHUNK pairs if CHUNK > 0.

# ---- the sequence of work ----


@gluon.jit
def length_of(lens_ptr, entry, capacity):
    """Return the number of keys of an entry, from 0 to the capacity of the cache."""
    length = gl.load(lens_ptr + entry)
    return gl.minimum(gl.maximum(length, 0), capacity).to(gl.int32)


@gluon.jit
def num_pairs(length):
    """Return the number of pairs of blocks of a sequence, at least 1."""
    return gl.maximum((length + PAIR - 1) // PAIR, 1)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def part_at(call, work, first, pos, entry, length, CHUNK: gl.constexpr):
    """Return (first pair of blocks, end of the pairs, unit after the part, whether it ends the entry, its number)."""
    _, _, _, _, _, _, B, _, division, _ = call
    shares, slots = division
    _, block_r, _, _, end, share = work
    pairs = num_pairs(length)
    units = num_units(pairs, CHUNK)
    stop = end_of_part(pos, first, end, units, CHUNK)
    begin, past = blocks_of_part(pos - first, stop - first, pairs, CHUNK)
    if CHUNK > 0:
        number = (block_r * B + entry) * slots + pos - first
    else:
        number = block_r * (B + shares) + entry + share
    return begin, past, stop, stop == first + units, number


@gluon.jit
def first_part(lens_ptr, B, capacity, shares, tiles_of_entry, BP: gl.constexpr, CHUNK: gl.constexpr):
    """Return (entry, row block, first unit of the entry, begin and end of the units, share) of this program."""
    entries = gl.arange(0, BP, layout=gl.BlockedLayout([1], [32], [4], [0]))
    lengths = gl.load(lens_ptr + entries, mask=entries < B, other=0)
    lengths = gl.minimum(gl.maximum(lengths, 0), capacity).to(gl.int32)
    ends = gl.associative_scan(gl.where(entries < B, num_units(num_pairs(lengths), CHUNK), 0), 0, _plus)
    work = gl.max(ends, 0)
    units_per_share = (work + shares - 1) // shares
    share = gl.program_id(0) // tiles_of_entry
    begin = gl.minimum(share * units_per_share, work)
    entry = gl.sum(gl.where((ends <= begin) & (entries < B), 1, 0), 0)
    first = gl.max(gl.where(ends <= begin, ends, 0), 0)
    return entry, gl.program_id(0) % tiles_of_entry, first, begin, gl.minimum(begin + units_per_share, work), share


# ---- pages ----


@gluon.jit
def _page(table, entry, key, length, PAGE: gl.constexpr):
    """Return the page of a key of an entry, or -1 beyond the length and for a page that is not in the cache."""
    table_ptr, stride_table, num_pages = table
    page = gl.load(table_ptr + entry.to(gl.int64) * stride_table + key // PAGE, mask=key < length, other=-1)
    return gl.where((page >= 0) & (page < num_pages), page, -1).to(gl.int32)


@gluon.jit
def is_there(call, entry, block, length, PAGE: gl.constexpr):
    """Return whether the keys of a block have a page. Called before the wait for the scores, which hides the load."""
    if PAGE:
        return _page(call[2], entry, block * BLOCK, length, PAGE) >= 0
    else:
        return True


@gluon.jit
def clear(values, block, length, PAGE: gl.constexpr):
    """Replace the values of keys beyond the length by zeros, in the last block of a paged sequence.

    Their weights are zero, but the memory may hold NaN. Scores of these keys are masked instead.
    """
    if PAGE:
        there = length - block * BLOCK
        if (there > 0) & (there < BLOCK):
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
            for first in gl.static_range(0, HALF, ROTARY):
                columns = values.slice(first, ROTARY, dim=1)
                columns.store(gl.where((keys < there)[:, None], columns.load(layout), 0.0).to(values.dtype))
            fence_async_shared()


# ---- loading ----


@gluon.jit
def load_a(keys, at, memory, bars, buffer, FP8: gl.constexpr, ROPE_AT: gl.constexpr):
    """Load latent columns 0 to 255 and the rotary columns of a block of keys."""
    latent, rotary, _ = keys
    # The descriptors have three dimensions, the buffers two.
    k_rotary = reinterpret(memory[4].index(buffer), rotary.dtype, rotary.block_type.shape, rotary.layout)
    if FP8:
        barrier = bars.index(RAW_A + buffer)
        k_left = memory[7][0].index(2 * buffer + 1)
    else:
        barrier = bars.index(KEYS_A + buffer)
        k_left = memory[2].index(buffer)
    mbarrier.expect(barrier, BLOCK * (HALF * (1 if FP8 else 2) + ROTARY * 2))
    tma_load(rotary, [at[0], at[1], ROPE_AT], barrier, k_rotary)
    k_left = reinterpret(k_left, latent.dtype, latent.block_type.shape, latent.layout)
    tma_load(latent, [at[0], at[1], 0], barrier, k_left)


@gluon.jit
def load_b(keys, at, memory, bars, buffer, FP8: gl.constexpr):
    """Load latent columns 256 to 511 of a block of keys."""
    latent, _, _ = keys
    if FP8:
        barrier = bars.index(RAW_B + buffer)
        k_right = memory[7][1].index(2 * buffer + 1)
    else:
        barrier = bars.index(KEYS_B + buffer)
        k_right = memory[3].index(buffer)
    mbarrier.expect(barrier, BLOCK * HALF * (1 if FP8 else 2))
    k_right = reinterpret(k_right, latent.dtype, latent.block_type.shape, latent.layout)
    tma_load(latent, [at[0], at[1], HALF], barrier, k_right)


@gluon.jit
def place(call, entry, key, length, PAGE: gl.constexpr):
    """Return the indices of a block that begins at ``key`` in the first two dimensions of the cache.

    Memory beyond the length, which may hold NaN, is not read from a dense cache: its last block begins BLOCK keys
    before the end, possibly before key 0. TMA fills rows outside the tensor with zeros, also those of page -1.
    """
    if PAGE:
        return _page(call[2], entry, key, length, PAGE), key % PAGE
    else:
        return entry, gl.minimum(key, length - BLOCK)


@gluon.jit
def load_queries(keys, memory, barrier, row):
    """Load the latent columns of ROWS queries. With an fp8 cache, the buffers are for the converted ones."""
    queries = keys[2]
    q_left = reinterpret(memory[0], queries.dtype, queries.block_type.shape, queries.layout)
    q_right = reinterpret(memory[1], queries.dtype, queries.block_type.shape, queries.layout)
    mbarrier.expect(barrier, ROWS * LATENT * 2)
    tma_load(queries, [row, 0], barrier, q_left)
    tma_load(queries, [row, HALF], barrier, q_right)


@gluon.jit
def load_partition(
    call, keys, memory, bars, work, TQ: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    ROPE_AT: gl.constexpr,
):
    """Partition that loads queries and keys, unless the cache is fp8."""
    q_ptr, lens_ptr, _, _, _, _, B, capacity, _, _ = call
    entry, block_r, first, pos, end, share = work
    turn = 0  # pairs of blocks so far
    part = 0  # parts so far
    while pos < end:
        length = length_of(lens_ptr, entry, capacity)
        begin, past, stop, ends, number = part_at(call, work, first, pos, entry, length, CHUNK)
        row = entry * (TQ * GROUP) + block_r * ROWS
        mbarrier.wait(bars.index(QUERY_FREE), (part & 1) ^ 1)
        load_queries(keys, memory, bars.index(QUERY), row)
        for pair in range(begin, past):
            phase = ((turn // PAIRS) & 1) ^ 1
            even = (turn % PAIRS) * 2
            odd = even + 1
            even_at = place(call, entry, pair * PAIR, length, PAGE)
            odd_at = place(call, entry, pair * PAIR + BLOCK, length, PAGE)
            # In the order in which the warp groups free the pieces.
            mbarrier.wait(bars.index(FREE_A + even), phase)
            load_a(keys, even_at, memory, bars, even, False, ROPE_AT)
            mbarrier.wait(bars.index(FREE_B + even), phase)
            load_b(keys, even_at, memory, bars, even, False)
            mbarrier.wait(bars.index(FREE_B + odd), phase)
            load_b(keys, odd_at, memory, bars, odd, False)
            mbarrier.wait(bars.index(FREE_A + odd), phase)
            load_a(keys, odd_at, memory, bars, odd, False, ROPE_AT)
            turn += 1
        if ends:
            first = stop
            entry += 1
        pos = stop
        part += 1
