"""Routing kernels of tp_moe: assign rows of the grouped GEMM to top-k assignments, and order its tiles.

A token has k top-k assignments ("choices"). Assignment ``token * k + j`` refers to token ``token`` of the gathered
tokens, which are in rank order. Tokens are sent in chunks. The turn of a chunk is its position in the order of arrival
at this rank: first this rank's chunks, then the first chunk of the rank before this one, the first chunk of the rank
before that, and so on around the ranks, then their second chunks. The rows of an expert are in this order, so its first
tiles need only chunks that arrive early.

Turns are grouped into a few overlap stages. The first stage has this rank's tokens; the other stages share the tokens
of the peers. A tile belongs to the stage of the last turn that it needs. Tiles are computed stage by stage, and expert
by expert within a stage. With more stages tiles wait less, but each stage reads the weights of the experts again, which
pays only if a stage has some hundred rows per expert. ``moe_gemm_rs`` finishes tokens in the reverse order of stages.

There are four launches. ``moe_pack_kernel`` writes this rank's ids, and the routing weights if they are known, to a
message, which is all-gathered. ``moe_count_kernel`` counts the rows of experts. ``moe_place_kernel`` has one program
per expert, which scans all ids in order of their turns. ``moe_order_kernel`` sorts the tiles.
"""

import triton.language as tl

from tdkernels import lang as td

NOTE_BAD_IDS = tl.constexpr(1)

# int32 words per tile in the table: expert, first row, number of rows, and one unused. From word BY_EXPERT on, the same
# words of the tile that has this index in the order of experts.
TILE_WORDS, BY_EXPERT = tl.constexpr(8), tl.constexpr(4)
MAX_STAGES = tl.constexpr(8)


@td.jit
def chunk_at_turn(turn, me, ranks, num_chunks):
    """Return (source rank, chunk index at the source) for a turn."""
    others = tl.maximum(ranks - 1, 1)
    past = turn - num_chunks
    source = tl.where(past < 0, me, (me + ranks - 1 - past % others) % ranks)
    return source, tl.where(past < 0, turn, past // others)


@td.jit
def first_turn_of(stage, stages, ranks, num_chunks):
    """Return the first turn of a stage. For ``stage == stages`` it is the number of turns."""
    others = num_chunks * (ranks - 1)
    shares = tl.maximum(stages - 1, 1)
    first = num_chunks + ((stage - 1) * others + shares - 1) // shares
    first = tl.where(stage == 0, 0, first)
    return tl.where(stage == stages, num_chunks + others, first)


@td.jit
def stage_of_turn(turn, stages, ranks, num_chunks):
    """Return the stage of a turn."""
    past = turn - num_chunks
    stage = 1 + past * (stages - 1) // tl.maximum(num_chunks * (ranks - 1), 1)
    return tl.where((past < 0) | (stages == 1), 0, stage)


@td.jit
def _stage_of(choice, choices, chunk_choices, shard_choices, me, ranks, num_chunks, stages):
    """Return the stage in which the token of an assignment arrives at this rank."""
    source = choice // shard_choices
    step = (me + ranks - source) % ranks
    past = choice % shard_choices // chunk_choices * (ranks - 1) + step - 1
    return stage_of_turn(tl.where(step == 0, 0, num_chunks + past), stages, ranks, num_chunks)


@td.jit(do_not_specialize=["num_ids", "num_scales", "num_experts"])
def moe_pack_kernel(
    ids_ptr, weights_ptr, scale_ptr, message_ptr, num_ids, num_scales, num_experts, BLOCK: tl.constexpr,
):
    """Write the ids of this rank's assignments to a message, int32, and after them their routing weights and the scales
    of its tokens, in fp32.

    Ids that are out of range remain so. weights_ptr: None for a message of ids alone. scale_ptr: None for a message
    without scales
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = offs < num_ids
    ids = tl.load(ids_ptr + offs, mask=there, other=0)
    tl.store(message_ptr + offs, tl.minimum(tl.maximum(ids, -2), num_experts).to(tl.int32), mask=there)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + offs, mask=there, other=0.0).to(tl.float32)
        tl.store(message_ptr + num_ids + offs, weights.to(tl.int32, bitcast=True), mask=there)
    if scale_ptr is not None:
        scales = tl.load(scale_ptr + offs, mask=offs < num_scales, other=0.0)
        tl.store(message_ptr + 2 * num_ids + offs, scales.to(tl.int32, bitcast=True), mask=offs < num_scales)


@td.jit(do_not_specialize=["num_rows", "choices", "M_shard", "words", "columns"])
def moe_scales_kernel(
    messages_ptr, choices_ptr, out_ptr, num_rows, choices, M_shard, words, columns, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Store the scales of the token of each row, fp32 [num_rows, columns], from messages of ``words`` words."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.load(choices_ptr + rows, mask=rows < num_rows, other=0) // choices
    source = token // M_shard
    at = source * words + 2 * M_shard * choices + (token - source * M_shard) * columns
    for first in range(0, columns, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        there = (rows < num_rows)[:, None] & (column < columns)[None, :]
        scales = tl.load(messages_ptr + at[:, None] + column[None, :], mask=there, other=0)
        out = out_ptr + rows[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(out, scales.to(tl.float32, bitcast=True), mask=there)


@td.jit(do_not_specialize=["of_rank", "words", "num_experts", "call"])
def moe_count_kernel(
    ctx, messages_ptr, ids_ptr, weights_ptr, splits_ptr, of_rank, words, num_experts, call, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the assignments splits[e] of each expert, one program per expert. Report ids that are out of range.

    An id of -1 is valid. The programs also copy the parts of the messages, if pointers for them are given.

    messages_ptr: the messages of all ranks, see ``moe_pack_kernel``
    ids_ptr, weights_ptr: int32 and fp32 [assignments of all ranks], or None
    of_rank, words: number of assignments of a rank, and of words of a message
    RANKS, BLOCK: ranks whose ids are read at a time, and ids of each
    """
    expert, ranks = tl.program_id(0), td.num_ranks(ctx)
    count = tl.full((RANKS, BLOCK), 0, tl.int32)
    bad = tl.full((RANKS, BLOCK), 0, tl.int32)
    copier = 0  # the expert whose program copies the next block
    for first_rank in range(0, ranks, RANKS):
        sources = first_rank + tl.arange(0, RANKS)
        for first in range(0, of_rank, BLOCK):
            within = first + tl.arange(0, BLOCK)
            there = (sources < ranks)[:, None] & (within < of_rank)[None, :]
            at = messages_ptr + (sources * words)[:, None] + within[None, :]
            ids = tl.load(at, mask=there, other=-1)
            count += (ids == expert).to(tl.int32)
            bad += ((ids < -1) | (ids >= num_experts)).to(tl.int32)
            if ids_ptr is not None:
                if copier == expert:
                    offs = (sources * of_rank)[:, None] + within[None, :]
                    tl.store(ids_ptr + offs, ids, mask=there)
                    if weights_ptr is not None:
                        weights = tl.load(at + of_rank, mask=there, other=0)
                        tl.store(weights_ptr + offs, weights.to(tl.float32, bitcast=True), mask=there)
            copier = tl.where(copier + 1 == num_experts, 0, copier + 1)
    tl.store(splits_ptr + expert, td.sum_of(td.sum_of(count, 1), 0))
    if expert == 0:
        wrong = td.sum_of(td.sum_of(bad, 1), 0)
        td.report_if(ctx, wrong > 0, NOTE_BAD_IDS, wrong, wrong, wrong, call)


@td.jit(do_not_specialize=["num_experts", "choices", "chunk_rows", "M_shard", "tile_rows", "stages"])
def moe_place_kernel(
    ctx, ids_ptr, splits_ptr, choices_ptr, rows_ptr, stages_ptr,
    num_experts, choices, chunk_rows, M_shard, tile_rows, stages,
    EXPERTS: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, BLOCK_TILES: tl.constexpr,
):
    """Compute the assignment of each row, the row of each assignment (or -1), and the stage of each tile.

    Rows past the last one of the last expert, one per dropped assignment, get assignment 0. Tiles are in the order of
    their experts. There is one program per expert; one more handles the assignments without an expert.

    ALIGNED: whether the number of assignments of a rank is a multiple of 4
    PIECES, PIECE: pieces of chunks that are scanned at a time, and assignments of each. With ALIGNED a warp scans a
        piece of 128 on its own, so that only the sums of pieces are exchanged between warps.
    """
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(splits_ptr + experts, mask=experts < num_experts, other=0)
    before = experts < expert
    begin = td.sum_of(tl.where(before, counts, 0), 0)
    end = begin + td.sum_of(tl.where(experts == expert, counts, 0), 0)
    shard_choices, chunk_choices = M_shard * choices, chunk_rows // 16 * 16 * choices
    if ALIGNED:
        shard_choices = shard_choices // 4 * 4  # so that the compiler knows it, and a thread loads four ids at once
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    row = begin
    pieces = (chunk_choices + PIECE - 1) // PIECE  # of a chunk
    for first in range(0, ranks * num_chunks * pieces, PIECES):  # in order of turns
        piece = first + tl.arange(0, PIECES)
        turn, offs = piece // pieces, (piece % pieces * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
        source, chunk = chunk_at_turn(turn, me, ranks, num_chunks)
        within = (chunk * chunk_choices)[:, None] + offs
        # The last chunk of a rank may have fewer assignments.
        there = (turn < ranks * num_chunks)[:, None] & (offs < chunk_choices) & (within < shard_choices)
        choice = (source * shard_choices)[:, None] + within
        ids = tl.load(ids_ptr + choice, mask=there, other=-1)
        if expert == num_experts:
            tl.store(rows_ptr + choice, -1, mask=there & ((ids < 0) | (ids >= num_experts)))
        else:
            mine = (there & (ids == expert)).to(tl.int32)
            of_piece = td.sum_of(mine, 1)
            first_row = row + td.running_sum(of_piece, 0) - of_piece
            at = first_row[:, None] + td.running_sum(mine, 1) - 1
            tl.store(choices_ptr + at, choice, mask=mine > 0)
            tl.store(rows_ptr + choice, at, mask=mine > 0)
            row += td.sum_of(of_piece, 0)
    if expert == num_experts:
        for start in range(begin, ranks * shard_choices, PIECE):
            unused = start + tl.arange(0, PIECE)
            tl.store(choices_ptr + unused, 0, mask=unused < ranks * shard_choices)
    tl.debug_barrier()  # the loop below reads values that other threads have stored
    tiles = (counts + tile_rows - 1) // tile_rows
    first_tile = td.sum_of(tl.where(before, tiles, 0), 0)
    own_tiles = (end - begin + tile_rows - 1) // tile_rows
    for start in range(0, own_tiles, BLOCK_TILES):
        tile = start + tl.arange(0, BLOCK_TILES)
        last_row = tl.minimum(begin + (tile + 1) * tile_rows, end) - 1
        needed = tl.load(choices_ptr + last_row, mask=tile < own_tiles, other=0)
        stage = _stage_of(needed, choices, chunk_choices, shard_choices, me, ranks, num_chunks, stages)
        tl.store(stages_ptr + first_tile + tile, stage, mask=tile < own_tiles)


@td.jit
def _store_tiles(words, expert, row, count, mask):
    tl.store(words, expert, mask=mask)
    tl.store(words + 1, row, mask=mask)
    tl.store(words + 2, count, mask=mask)


@td.jit(do_not_specialize=["num_experts", "tile_rows"])
def moe_order_kernel(
    splits_ptr, stages_ptr, table_ptr, begins_ptr, num_experts, tile_rows,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Write the tiles into a table with TILE_WORDS words per tile, sorted by stage and sorted by expert.

    Each program handles BLOCK tiles. begins[s] is the number of tiles in stages before s.
    """
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(splits_ptr + experts, mask=experts < num_experts, other=0)
    of_expert = (counts + tile_rows - 1) // tile_rows
    ends = td.running_sum(of_expert, 0)
    tiles = td.max_of(ends, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stage = tl.load(stages_ptr + tile, mask=tile < tiles, other=0)
    place = tl.full((BLOCK,), 0, tl.int32)
    stages = tl.arange(0, 2 * MAX_STAGES)
    begins = tl.full((2 * MAX_STAGES,), 0, tl.int32)
    for first in range(0, tiles, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        there = (other < tiles)[None, :]
        others = tl.load(stages_ptr + other, mask=other < tiles, other=0)[None, :]
        earlier = (others < stage[:, None]) | (others == stage[:, None]) & (other[None, :] < tile[:, None])
        place += td.sum_of((earlier & there).to(tl.int32), 1)
        begins += td.sum_of(((others < stages[:, None]) & there).to(tl.int32), 1)
    if tl.program_id(0) == 0:
        tl.store(begins_ptr + stages, begins)
    # The index of a tile's expert is the number of experts whose tiles end before it.
    is_before = (ends[None, :] <= tile[:, None]) & (experts < num_experts)[None, :]
    expert = td.sum_of(is_before.to(tl.int32), 1)
    begin = td.sum_of(tl.where(is_before, counts[None, :], 0), 1)
    within = (tile - td.sum_of(tl.where(is_before, of_expert[None, :], 0), 1)) * tile_rows
    rows = td.sum_of(tl.where(experts[None, :] == expert[:, None], counts[None, :], 0), 1)
    count = tl.minimum(rows - within, tile_rows)
    _store_tiles(table_ptr + place * TILE_WORDS, expert, begin + within, count, tile < tiles)
    _store_tiles(table_ptr + tile * TILE_WORDS + BY_EXPERT, expert, begin + within, count, tile < tiles)
