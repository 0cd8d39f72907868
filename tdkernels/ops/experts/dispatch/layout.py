"""What a rank knows of a routing: an int32 tensor of tables, written by ``ep_route_kernel`` and read by all others.

    counts     [W, COLUMNS]  of each rank's routing: rows for each expert (E), tokens for each rank, each token counted
                             once (W), ids that are none (1), tokens (1)
    rows       [E]  where our rows for an expert begin among the rows of the rank that has it
    ours       [W]  where our tokens begin in the staging memory of a rank
    theirs     [W]  where a rank's tokens begin in our staging memory
    parts      [W]  where a rank's parts of our tokens begin in our staging memory, on their way back
    their      [W]  where our parts of a rank's tokens begin in its staging memory
    facts      [8]  see ``Fact``
    experts    [T, K]  the expert of each choice of our tokens, -1 for none
    places     [T, K]  its row on the expert's rank; at first within the tile of tokens that it was counted in
    sent       [T, W]  which of our tokens for a rank each one is, or -1; at first within its tile
    tiles      [tiles, COLUMNS]  ``counts`` of all tiles before each

Tokens of a rank for itself are not staged and not counted in ``ours`` to ``their``, which in a group on several nodes
are other tables of as many words (``multinode.layout``).

And of what has come, int32 too: where each chunk of each source begins and how many tokens it has, [W, MAX_CHUNKS, 2],
and the rows of each staged token, [slots, K].
"""

import enum

import triton.language as tl

from tdkernels import lang as td
from tdkernels.rounding import cdiv, next_power_of_2

_TILE_IDS = 64  # ids that a counting program compares with each other


class Fact(enum.IntEnum):
    """The numbers at the end of the tables."""

    VALID = 0  # 1: all is well; 0: ids are wrong or rows do not fit, as all ranks know; -1: a peer did not come
    ROWS = 1  # that this rank receives, its own included
    MOST_ROWS = 2  # that any rank receives
    MOST_STAGED = 3  # tokens that any rank has to stage, going or coming back
    BAD_RANK = 4  # a rank with wrong ids, or -1
    MOST_TOKENS = 5  # of any rank
    MOST_HERE = 6  # of MOST_STAGED, across nodes: from or for ranks of the same node
    MOST_PASSED = 7  # of MOST_STAGED, across nodes: that any rank sends to other nodes or passes on from them


SUMMARY_WORDS = tl.constexpr(8)
VALID, ROWS = tl.constexpr(int(Fact.VALID)), tl.constexpr(int(Fact.ROWS))
MOST_ROWS, MOST_STAGED = tl.constexpr(int(Fact.MOST_ROWS)), tl.constexpr(int(Fact.MOST_STAGED))
BAD_RANK, MOST_TOKENS = tl.constexpr(int(Fact.BAD_RANK)), tl.constexpr(int(Fact.MOST_TOKENS))
MOST_HERE, MOST_PASSED = tl.constexpr(int(Fact.MOST_HERE)), tl.constexpr(int(Fact.MOST_PASSED))

MAX_CHUNKS = tl.constexpr(1024)  # of one rank: so many signals are kept for it


def summary_begin(num_experts, world_size):
    """Where in the tables the facts are."""
    return world_size * (num_experts + world_size + 2) + num_experts + 4 * world_size


def length(shape, tiles):
    """Words of the tables of a RoutingShape whose tokens are counted in so many tiles."""
    columns = shape.num_experts + shape.world_size + 2
    of_tokens = shape.tokens * (2 * shape.choices + shape.world_size)
    return summary_begin(shape.num_experts, shape.world_size) + SUMMARY_WORDS.value + of_tokens + tiles * columns


def tile_ids(k):
    """Ids of a program that counts, at most."""
    return max(_TILE_IDS, next_power_of_2(k))


def tile_tokens(k):
    """Tokens of a program that counts."""
    return tile_ids(k) // k


def num_tiles(tokens, k):
    """Programs that count."""
    return max(cdiv(tokens, tile_tokens(k)), 1)


def table_constants(shape):
    """Compile-time constants about the tables of a RoutingShape, the same for every kernel."""
    return {"K": shape.choices, "EXPERTS": shape.num_experts, "RANKS": shape.world_size}


def came_length(world_size, slots, k):
    """Words of what is kept of what has come."""
    return 2 * world_size * MAX_CHUNKS.value + slots * k


@td.jit
def whole_items(items, ITEM: tl.constexpr, ALIGNED: tl.constexpr):
    """How many items a row has, int32, which the compiler knows to be whole words of 16 bytes if they are ALIGNED."""
    items = tl.cast(items, tl.int32)
    if ALIGNED:
        WHOLE: tl.constexpr = 128 // ITEM.primitive_bitwidth
        items = items // WHOLE * WHOLE
    return items


# ---- in a kernel: where a table begins ----


@td.jit
def counts_of(tables, source, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return tables + source * (EXPERTS + RANKS + 2)


@td.jit
def rows_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return tables + RANKS * (EXPERTS + RANKS + 2)


@td.jit
def send_offsets_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return rows_at(tables, EXPERTS, RANKS) + EXPERTS


@td.jit
def recv_offsets_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return send_offsets_at(tables, EXPERTS, RANKS) + RANKS


@td.jit
def parts_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return send_offsets_at(tables, EXPERTS, RANKS) + 2 * RANKS


@td.jit
def peer_offset_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return send_offsets_at(tables, EXPERTS, RANKS) + 3 * RANKS


@td.jit
def summary_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return send_offsets_at(tables, EXPERTS, RANKS) + 4 * RANKS


@td.jit
def experts_at(tables, token, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Of a token, as all that follow."""
    return summary_at(tables, EXPERTS, RANKS) + SUMMARY_WORDS + tl.cast(token, tl.int64) * K


@td.jit
def places_at(tables, token, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return experts_at(tables, token, K, EXPERTS, RANKS) + tl.cast(num_tokens, tl.int64) * K


@td.jit
def sent_at(tables, token, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    first = experts_at(tables, 0, K, EXPERTS, RANKS) + tl.cast(num_tokens, tl.int64) * (2 * K)
    return first + tl.cast(token, tl.int64) * RANKS


@td.jit
def tiles_at(tables, tile, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    first = sent_at(tables, num_tokens, num_tokens, K, EXPERTS, RANKS)
    return first + tl.cast(tile, tl.int64) * (EXPERTS + RANKS + 2)


# ---- what has come ----


@td.jit
def chunk_at(came, source, chunk):
    """Where a chunk of a source begins among its tokens; the word behind says how many there are."""
    return came + 2 * (source * MAX_CHUNKS + chunk)


@td.jit
def slot_at(came, slot, K: tl.constexpr, RANKS: tl.constexpr):
    """The rows of a staged token."""
    return came + 2 * RANKS * MAX_CHUNKS + tl.cast(slot, tl.int64) * K


# ---- chunks: what is sent under one signal ----


@td.jit
def tokens_of(tables, source, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """How many tokens a rank has."""
    return tl.load(counts_of(tables, source, EXPERTS, RANKS) + EXPERTS + RANKS + 1)


@td.jit
def chunk_of(num_tokens, chunk_tokens):
    """(tokens of a chunk, chunks) of a rank with so many tokens; at least one, so that everybody hears of everybody."""
    size = tl.maximum(tl.cast(chunk_tokens, tl.int32), (num_tokens + MAX_CHUNKS - 1) // MAX_CHUNKS)
    return size, tl.maximum((num_tokens + size - 1) // size, 1)


@td.jit
def chunks_at_most(num_tokens, chunk_tokens):
    """No rank with so many tokens, or fewer, has more chunks."""
    chunk_tokens = tl.cast(chunk_tokens, tl.int32)
    return tl.minimum(tl.maximum((num_tokens + chunk_tokens - 1) // chunk_tokens, 1), MAX_CHUNKS)
