"""Which row of a grouped product each choice of an expert gets, and which tile is computed when: found on the device.

A token has k choices; choice number ``token * k + j`` is of the gathered tokens, rank by rank. Tokens travel in
chunks, each of which has a turn, by the order in which they come to this rank: turn 0 is all of our own, then comes the
first chunk of the rank before ours, the first of the one before that, and so on round the ranks, then their second
chunks. Within an expert rows lie in this order, so that its first tiles need nothing but what comes first; and tiles
are computed in the order of the last turn that they need, whichever expert they are of. Backwards, it is the order in
which tokens are done with.

Three launches: ``moe_count_kernel`` counts, ``moe_place_kernel`` has a program for each expert, which goes through all
ids in order, and ``moe_order_kernel`` sorts the tiles.
"""

import triton.language as tl

from tdkernels import lang as td

NOTE_BAD_IDS = tl.constexpr(1)

# What a tile is, int32 words of the table: its expert, first row, number of rows, the last chunk that it needs.
TILE_WORDS = tl.constexpr(4)
# In the facts: the number of tiles; then for each chunk how many tiles need it or a later one, and how many it last.
TILES = tl.constexpr(0)


@td.jit
def chunk_at_turn(turn, me, ranks):
    """(source, number of the chunk there) of what comes at a turn from 1 on."""
    others = tl.maximum(ranks - 1, 1)
    return (me + ranks - 1 - (turn - 1) % others) % ranks, (turn - 1) // others


@td.jit
def _turn_of(choice, choices, chunk_choices, shard_choices, me, ranks):
    """When what a choice is of comes here."""
    source = choice // shard_choices
    step = (me + ranks - source) % ranks
    chunk = choice % shard_choices // chunk_choices
    return tl.where(step == 0, 0, 1 + chunk * (ranks - 1) + step - 1)


@td.jit(do_not_specialize=["num_ids", "num_experts"])
def moe_count_kernel(ctx, ids_ptr, splits_ptr, num_ids, num_experts, BLOCK: tl.constexpr):
    """splits[e] = how many choices are of expert e; a program for each. Notes ids that are none, but for -1."""
    expert = tl.program_id(0)
    count = tl.full((BLOCK,), 0, tl.int32)
    bad = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, num_ids, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + offs, mask=offs < num_ids, other=-1)
        count += (ids == expert).to(tl.int32)
        bad += ((ids < -1) | (ids >= num_experts)).to(tl.int32)
    tl.store(splits_ptr + expert, td.sum_of(count, 0))
    if expert == 0:
        wrong = td.sum_of(bad, 0)
        td.note_if(ctx, wrong > 0, NOTE_BAD_IDS, wrong, wrong, wrong)


@td.jit(do_not_specialize=["num_experts", "choices", "chunk_rows", "M_shard", "slot_rows", "tile_rows"])
def moe_place_kernel(
    ctx, ids_ptr, splits_ptr, choices_ptr, slots_ptr, rows_ptr, turns_ptr,
    num_experts, choices, chunk_rows, M_shard, slot_rows, tile_rows,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """For each row its choice and where its token lies; for each choice its row or -1; for each tile its last turn.

    slots: rows of [W * slot_rows], what a gather leaves. The last program takes the choices that are of no expert.
    """
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(splits_ptr + experts, mask=experts < num_experts, other=0)
    before = experts < expert
    begin = td.sum_of(tl.where(before, counts, 0), 0)
    end = begin + td.sum_of(tl.where(experts == expert, counts, 0), 0)
    shard_choices, chunk_choices = M_shard * choices, chunk_rows * choices
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    row = begin
    for turn in range(0, 1 + (ranks - 1) * num_chunks):
        source, chunk = chunk_at_turn(turn, me, ranks)
        first = tl.where(turn == 0, 0, chunk * chunk_choices)
        last = tl.where(turn == 0, shard_choices, tl.minimum(first + chunk_choices, shard_choices))
        source = tl.where(turn == 0, me, source)
        for start in range(first, last, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + source * shard_choices + offs, mask=offs < last, other=-1)
            choice = source * shard_choices + offs
            if expert == num_experts:
                tl.store(rows_ptr + choice, -1, mask=(offs < last) & ((ids < 0) | (ids >= num_experts)))
            else:
                mine = (ids == expert) & (offs < last)
                at = row + td.running_sum(mine.to(tl.int32), 0) - 1
                tl.store(choices_ptr + at, choice, mask=mine)
                tl.store(slots_ptr + at, source * slot_rows + offs // choices, mask=mine)
                tl.store(rows_ptr + choice, at, mask=mine)
                row += td.sum_of(mine.to(tl.int32), 0)
    tl.debug_barrier()  # what follows reads what other threads have stored
    tiles = (counts + tile_rows - 1) // tile_rows
    first_tile = td.sum_of(tl.where(before, tiles, 0), 0)
    own_tiles = (end - begin + tile_rows - 1) // tile_rows
    for start in range(0, own_tiles, BLOCK_TILES):
        tile = start + tl.arange(0, BLOCK_TILES)
        last_row = tl.minimum(begin + (tile + 1) * tile_rows, end) - 1
        choice = tl.load(choices_ptr + last_row, mask=tile < own_tiles, other=0)
        last_turn = _turn_of(choice, choices, chunk_choices, shard_choices, me, ranks)
        tl.store(turns_ptr + first_tile + tile, last_turn, mask=tile < own_tiles)


@td.jit(do_not_specialize=["num_experts", "num_turns", "tile_rows"])
def moe_order_kernel(
    splits_ptr, turns_ptr, table_ptr, facts_ptr, num_experts, num_turns, tile_rows,
    EXPERTS: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Tiles in the order of the turns that they need, as TILE_WORDS each; a program has BLOCK of them."""
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(splits_ptr + experts, mask=experts < num_experts, other=0)
    ends = td.running_sum((counts + tile_rows - 1) // tile_rows, 0)
    tiles = td.max_of(ends, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    turn = tl.load(turns_ptr + tile, mask=tile < tiles, other=0)
    place = tl.full((BLOCK,), 0, tl.int32)
    turns = tl.arange(0, TURNS)
    of_turn = tl.full((TURNS,), 0, tl.int32)
    not_before = tl.full((TURNS,), 0, tl.int32)
    for first in range(0, tiles, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        there = other < tiles
        others = tl.load(turns_ptr + other, mask=there, other=0)
        earlier = (others[None, :] < turn[:, None]) | (others[None, :] == turn[:, None]) & (
            other[None, :] < tile[:, None]
        )
        place += td.sum_of((earlier & there[None, :]).to(tl.int32), 1)
        if tl.program_id(0) == 0:
            of_turn += td.sum_of(((others[None, :] == turns[:, None]) & there[None, :]).to(tl.int32), 1)
            not_before += td.sum_of(((others[None, :] >= turns[:, None]) & there[None, :]).to(tl.int32), 1)
    if tl.program_id(0) == 0:
        tl.store(facts_ptr + TILES, tiles)
        tl.store(facts_ptr + 1 + turns, not_before, mask=turns < num_turns)
        tl.store(facts_ptr + 1 + num_turns + turns, of_turn, mask=turns < num_turns)
    # Which expert's: as many as end before it.
    is_before = (ends[None, :] <= tile[:, None]) & (experts < num_experts)[None, :]
    expert = td.sum_of(is_before.to(tl.int32), 1)
    begin = td.sum_of(tl.where(is_before, counts[None, :], 0), 1)
    first_tile = td.sum_of(tl.where(is_before, ((counts + tile_rows - 1) // tile_rows)[None, :], 0), 1)
    own_rows = td.sum_of(tl.where(experts[None, :] == expert[:, None], counts[None, :], 0), 1)
    within = (tile - first_tile) * tile_rows
    words = table_ptr + place * TILE_WORDS
    tl.store(words, expert, mask=tile < tiles)
    tl.store(words + 1, begin + within, mask=tile < tiles)
    tl.store(words + 2, tl.minimum(own_rows - within, tile_rows), mask=tile < tiles)
    tl.store(words + 3, turn, mask=tile < tiles)
