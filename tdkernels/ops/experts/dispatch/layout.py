"""Memory layout of the routing tables and of the received-slot map.

The tables are one int32 tensor. ``ep_route_kernel`` writes it and all other kernels read it. In order:

    counts        [W, COLUMNS]  totals of each rank: rows for each expert (E), tokens for each rank, each token counted
                                once (W), number of invalid ids (1), number of tokens (1)
    rows          [E]  first row of this rank's rows for an expert, among the rows of the expert's rank
    send offsets  [W]  first slot of this rank's tokens in the staging memory of a rank
    recv offsets  [W]  first slot of a rank's tokens in this rank's staging memory
    parts         [W]  combine: first slot of a rank's results for this rank's tokens, in this rank's staging memory
    peer offsets  [W]  combine: first slot of this rank's results for a rank's tokens, in that rank's staging memory
    summary       [8]  see ``Fact``
    experts       [T, K]  expert of each assignment of this rank's tokens, -1 if dropped
    places        [T, K]  row of each assignment on the expert's rank; before the first dispatch, its number among the
                          rows of its tile
    sent          [T, W]  index of each token among this rank's tokens for a rank, or -1; before the first dispatch, the
                          index within its tile
    tiles         [tiles, COLUMNS]  for each tile, the sum of ``counts`` of all tiles before it

A tile is the tokens that one program counts. Tokens that a rank sends to itself are not staged, and the four offset
tables do not count them. If the group is on several nodes, the offset tables have the same size and another meaning
(``multinode.layout``).

The received-slot map is an int32 tensor too: the first token and the number of tokens of each chunk of each source,
[W, MAX_CHUNKS, 2], and the rows of each staged token, [slots, K].
"""

import enum
from typing import TYPE_CHECKING

import triton.language as tl

from tdkernels import lang as td
from tdkernels.rounding import cdiv, next_power_of_2

if TYPE_CHECKING:
    from tdkernels.ops.experts.dispatch.request import RoutingShape

_TILE_IDS = 64  # a counting program compares so many ids with each other


class Fact(enum.IntEnum):
    """Index of a number in the summary of the routing tables."""

    VALID = 0  # 1: valid; 0: all ranks know that ids are invalid or rows do not fit; -1: a peer was missing
    ROWS = 1  # rows that this rank receives, from itself too
    MOST_ROWS = 2  # maximum of ROWS over all ranks
    MOST_STAGED = 3  # maximum number of tokens that a rank stages, in a dispatch or a combine
    BAD_RANK = 4  # the first rank with invalid ids, or -1
    MOST_TOKENS = 5  # maximum number of tokens of a rank
    MOST_HERE = 6  # several nodes: the part of MOST_STAGED from or for ranks on the same node
    MOST_PASSED = 7  # several nodes: the part of MOST_STAGED that a rank sends to other nodes or relays from them


SUMMARY_WORDS = tl.constexpr(8)
VALID, ROWS = tl.constexpr(int(Fact.VALID)), tl.constexpr(int(Fact.ROWS))
MOST_ROWS, MOST_STAGED = tl.constexpr(int(Fact.MOST_ROWS)), tl.constexpr(int(Fact.MOST_STAGED))
BAD_RANK, MOST_TOKENS = tl.constexpr(int(Fact.BAD_RANK)), tl.constexpr(int(Fact.MOST_TOKENS))
MOST_HERE, MOST_PASSED = tl.constexpr(int(Fact.MOST_HERE)), tl.constexpr(int(Fact.MOST_PASSED))

MAX_CHUNKS = tl.constexpr(1024)  # maximum number of chunks of a rank, which has one signal for each


def summary_begin(num_experts: int, world_size: int) -> int:
    """Return the offset of the summary in the tables."""
    return world_size * (num_experts + world_size + 2) + num_experts + 4 * world_size


def length(shape: "RoutingShape", tiles: int) -> int:
    """Return the int32 words of the tables for tokens that are counted in ``tiles`` tiles."""
    columns = shape.num_experts + shape.world_size + 2
    of_tokens = shape.tokens * (2 * shape.choices + shape.world_size)
    return summary_begin(shape.num_experts, shape.world_size) + SUMMARY_WORDS.value + of_tokens + tiles * columns


def tile_ids(k: int) -> int:
    """Return the maximum number of ids in a tile."""
    return max(_TILE_IDS, next_power_of_2(k))


def tile_tokens(k: int) -> int:
    """Return the number of tokens in a tile."""
    return tile_ids(k) // k


def num_tiles(tokens: int, k: int) -> int:
    """Return the number of tiles, and of programs that count."""
    return max(cdiv(tokens, tile_tokens(k)), 1)


def table_constants(shape: "RoutingShape") -> dict[str, int]:
    """Return the constexpr arguments for the tables, which every kernel has."""
    return {"K": shape.choices, "EXPERTS": shape.num_experts, "RANKS": shape.world_size}


def received_length(world_size: int, slots: int, k: int) -> int:
    """Return the int32 words of the received-slot map."""
    return 2 * world_size * MAX_CHUNKS.value + slots * k


@td.jit
def whole_items(items, ITEM: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the items of a row as int32. If ALIGNED, the compiler learns that a row is a multiple of 16 bytes."""
    items = tl.cast(items, tl.int32)
    if ALIGNED:
        WHOLE: tl.constexpr = 128 // ITEM.primitive_bitwidth
        items = items // WHOLE * WHOLE
    return items


# Device functions that return the address of a table, or of a row of a table.


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
    """Return the address of the experts of a token. The functions below take a token or a tile in the same way."""
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


# Device functions for the received-slot map.


@td.jit
def chunk_at(received, source, chunk):
    """Return the address of a chunk's entry: the first token among the source's tokens, then the number of tokens."""
    return received + 2 * (source * MAX_CHUNKS + chunk)


@td.jit
def slot_at(received, slot, K: tl.constexpr, RANKS: tl.constexpr):
    """Return the address of the rows of a staged token."""
    return received + 2 * RANKS * MAX_CHUNKS + tl.cast(slot, tl.int64) * K


# Device functions for chunks: consecutive tokens that are sent with one signal.


@td.jit
def tokens_of(tables, source, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Return the number of tokens of a rank."""
    return tl.load(counts_of(tables, source, EXPERTS, RANKS) + EXPERTS + RANKS + 1)


@td.jit
def chunk_of(num_tokens, chunk_tokens):
    """Return (tokens per chunk, number of chunks) of a rank. A rank without tokens has one chunk, so it signals too."""
    size = tl.maximum(tl.cast(chunk_tokens, tl.int32), (num_tokens + MAX_CHUNKS - 1) // MAX_CHUNKS)
    return size, tl.maximum((num_tokens + size - 1) // size, 1)


@td.jit
def chunks_at_most(num_tokens, chunk_tokens):
    """Return an upper bound of the chunks of a rank with at most ``num_tokens`` tokens."""
    chunk_tokens = tl.cast(chunk_tokens, tl.int32)
    return tl.minimum(tl.maximum((num_tokens + chunk_tokens - 1) // chunk_tokens, 1), MAX_CHUNKS)
