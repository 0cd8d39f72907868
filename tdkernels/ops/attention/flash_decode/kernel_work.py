"""The sequence of work of ``flash_decode_kernel``: its units, which are blocks or chunks of keys, and its parts.

With CHUNK = 0 a unit is a block, and programs divide all units equally. With CHUNK > 0 a unit is a chunk of at least
CHUNK blocks, and each chunk of a tile is a part, so the parts depend on the number of blocks of the tile alone.
"""

import triton.language as tl

from tdkernels import lang as td

MAX_CHUNKS = tl.constexpr(64)  # of a tile


@td.jit
def _chunk_blocks(blocks, CHUNK: tl.constexpr):
    """Return the number of blocks per chunk of a tile with ``blocks`` blocks, a function of these alone."""
    return tl.maximum((blocks + MAX_CHUNKS - 1) // MAX_CHUNKS, CHUNK)


@td.jit
def num_units(blocks, CHUNK: tl.constexpr):
    """Return the number of units of work of a tile with ``blocks`` blocks: chunks, or blocks without CHUNK."""
    if CHUNK > 0:
        of_chunk = _chunk_blocks(blocks, CHUNK)
        return (blocks + of_chunk - 1) // of_chunk
    else:
        return blocks


@td.jit
def end_of_part(pos, first, end, units, CHUNK: tl.constexpr):
    """Return the position after the part of a tile that begins at ``pos``: a chunk, or the rest of a share."""
    if CHUNK > 0:
        return pos + 1
    else:
        return tl.minimum(end, first + units)


@td.jit
def blocks_of_part(begin, end, blocks, CHUNK: tl.constexpr):
    """Return (first, last + 1) of the blocks of units ``begin`` to ``end - 1`` of a tile with ``blocks`` blocks."""
    if CHUNK > 0:
        of_chunk = _chunk_blocks(blocks, CHUNK)
        return begin * of_chunk, tl.minimum(end * of_chunk, blocks)
    else:
        return begin, end


@td.jit
def tile_at(pos, ends, units, tiles_of_entry):
    """Return (entry, index of the tile in it, first position of the tile) for position ``pos`` in the work sequence."""
    entries = tl.arange(0, ends.shape[0])
    # Clamp positions beyond the end, which have no work, to the last entry.
    entry = tl.minimum(td.sum_of((ends <= pos).to(tl.int32), 0), ends.shape[0] - 1)
    tile_units = tl.maximum(td.gather_lane(units, entries, entry), 1)
    start = td.gather_lane(ends, entries, entry) - tile_units * tiles_of_entry
    which = (pos - start) // tile_units
    return entry, which, start + which * tile_units


@td.jit
def tile_after(entry, which, first, stop, units, tiles_of_entry, CHUNK: tl.constexpr):
    """Return (entry, index of the tile in it, first position of the tile) after a part that ends before ``stop``.

    With CHUNK it may be the same tile. Otherwise only other programs have more parts of it.
    """
    is_last = which == tiles_of_entry - 1
    next_entry = entry + tl.where(is_last, 1, 0)
    next_which = tl.where(is_last, 0, which + 1)
    if CHUNK > 0:
        ends = stop == first + units
        return tl.where(ends, next_entry, entry), tl.where(ends, next_which, which), first + tl.where(ends, units, 0)
    else:
        return next_entry, next_which, first + units
