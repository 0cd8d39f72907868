"""Store finished tiles of ``flash_decode_kernel``, and merge the parts of tiles that several programs share."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import NO_PEER
from tdkernels.ops.attention.flash_decode.kernel_merge import (
    LARGE_PART,
    LARGE_PARTS_OF_GROUP,
    MOST_LARGE_PARTS,
    MOST_PARTS,
    PARTS_OF_GROUP,
    merge_group,
    merge_parts,
    parts_at_a_time,
    rows_at_a_time,
    store_output,
    store_parts,
)
from tdkernels.ops.attention.flash_decode.kernel_multinode import give_to_owner

# place: (entry, head, block of query rows, tile); outputs: (o_ptr, lse_ptr, lse2_ptr) of the call.


@td.jit
def give(
    ctx, half, signal, o, lse, rows, place, tiles, heads, outputs,
    RANKS: tl.constexpr, TILE: tl.constexpr, NODES: tl.constexpr,
):
    """Store rows of a tile that is complete on this rank: in the buffers of the ranks, or, on a single rank, as output.

    With NODES > 1 they are stored only at the rank of this node that merges the tile.
    """
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    entry, head, block_r, tile = place
    o_ptr, lse_ptr, lse2_ptr = outputs
    if NODES > 1:
        give_to_owner(ctx, half, signal, o, lse, rows, tile, tiles, RANKS, NODES, RP, DVP)
    elif RANKS > 1:
        store_parts(ctx, half, signal, o, lse, rows, tile, tiles, RANKS, RP, DVP)
    else:
        row = tl.where(rows < RP, block_r * RP + rows, TILE.queries * TILE.group)
        store_output(o_ptr, lse_ptr, lse2_ptr, o, lse, entry, head, row, heads, TILE)


@td.jit
def join_part(
    ctx, half, signal, o, lse, place, tiles, heads, outputs, scratch, part, sharer, share, finished, turn,
    RANKS: tl.constexpr, TILE: tl.constexpr, NUMBERS: tl.constexpr, NODES: tl.constexpr, trace,
):
    """Store a part of a tile in scratch memory. The program that stores the last part merges all of them.

    scratch: (o of parts, lse of parts, flags)
    part: (the tile's first position in the work sequence, its number of positions)
    sharer: the number of this part among shares of ``share`` positions each: of this program, or of a chunk
    finished: (number of tiles that this program has finished, the last of them)

    Returns ``finished``, updated if this program merged the tile.
    """
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    PART: tl.constexpr = RP * DVP
    LARGE: tl.constexpr = PART >= LARGE_PART
    MOST: tl.constexpr = MOST_LARGE_PARTS if LARGE else MOST_PARTS
    GROUP: tl.constexpr = LARGE_PARTS_OF_GROUP if LARGE else PARTS_OF_GROUP
    STEP: tl.constexpr = parts_at_a_time(DVP, NUMBERS)
    ROWS: tl.constexpr = rows_at_a_time(RP, DVP, STEP, NUMBERS)
    ROWS_OF_GROUP: tl.constexpr = rows_at_a_time(RP, DVP, GROUP, NUMBERS)
    scratch_ptr, part_lse_ptr, flags = scratch
    first, tile_units = part
    count, last = finished
    tile = place[3]
    rows_m = tl.arange(0, TILE.block_m)
    # The shares of a tile are consecutive, so tile + share is unique among all parts.
    number = (tile + sharer).to(tl.int64)
    at = number * PART + rows_m[:, None] * DVP + tl.arange(0, DVP)[None, :]
    tl.store(scratch_ptr + at, o, mask=(rows_m < RP)[:, None])
    tl.store(part_lse_ptr + number * RP + rows_m, lse, mask=rows_m < RP)
    first_sharer = first // share
    parts = (first + tile_units - 1) // share - first_sharer + 1
    first_number = (tile + first_sharer).to(tl.int64)
    apart = tl.full((), 1, tl.int64)
    here = parts > 0
    if parts > MOST:
        td.mark(trace, "joins", NO_PEER, turn + 2)
        here = merge_group(
            scratch_ptr, part_lse_ptr, flags + tiles + tile, number, first_number, parts, ROWS_OF_GROUP, RP, DVP, GROUP
        )
        parts = (parts + GROUP - 1) // GROUP
        apart += GROUP - 1
    if here:
        here = td.is_last_arriver(flags + tile, parts)
    if here:
        count += 1
        last = tile
        td.mark(trace, "joins", NO_PEER, turn + 3)
        for from_row in range(0, RP, ROWS):
            rows = from_row + tl.arange(0, ROWS)
            merged, merged_lse = merge_parts(
                scratch_ptr + first_number * PART, part_lse_ptr + first_number * RP, apart * PART, apart * RP,
                parts, rows, DVP, STEP,
            )
            give(
                ctx, half, signal, merged, merged_lse, rows, place, tiles, heads, outputs,
                RANKS, TILE, NODES,
            )
    return count, last
