"""What a rank knows of a routing: an int32 tensor of tables, written by ``ep_route_kernel`` and read by all others.

    counts     [W, COLUMNS]  of each rank's routing: rows for each expert (E), tokens for each rank, each token counted
                             once (W), ids that are none (1), tokens (1)
    rows       [E]  where our rows for an expert begin among the rows of the rank that has it
    ours       [W]  where our tokens begin in the staging memory of a rank
    theirs     [W]  where a rank's tokens begin in our staging memory
    parts      [W]  where a rank's parts of our tokens begin in our staging memory, on their way back
    their      [W]  where our parts of a rank's tokens begin in its staging memory
    facts      [8]  see ``Fact``

Tokens of a rank for itself are not staged and not counted in ``ours`` to ``their``.
"""

import enum

import triton.language as tl

from tdkernels import lang as td


class Fact(enum.IntEnum):
    """The numbers at the end of the tables."""

    GOES = 0  # 1: all is well; 0: ids are wrong or rows do not fit, as all ranks know; -1: a peer did not come
    ROWS = 1  # that this rank receives, its own included
    MOST_ROWS = 2  # that any rank receives
    MOST_STAGED = 3  # tokens that any rank has to stage, going or coming back
    BAD_RANK = 4  # a rank with wrong ids, or -1
    MOST_TOKENS = 5  # of any rank


NUM_FACTS = 8
GOES, ROWS = tl.constexpr(int(Fact.GOES)), tl.constexpr(int(Fact.ROWS))
MOST_ROWS, MOST_STAGED = tl.constexpr(int(Fact.MOST_ROWS)), tl.constexpr(int(Fact.MOST_STAGED))
BAD_RANK, MOST_TOKENS = tl.constexpr(int(Fact.BAD_RANK)), tl.constexpr(int(Fact.MOST_TOKENS))

MAX_CHUNKS = tl.constexpr(512)  # of one rank: so many signals are kept for it


def sizes(num_experts, world_size):
    """The tables' names and sizes, in the order in which they follow each other."""
    return {
        "counts": world_size * (num_experts + world_size + 2),
        "rows": num_experts, "ours": world_size, "theirs": world_size, "parts": world_size, "their": world_size,
        "facts": NUM_FACTS,
    }  # fmt: skip


def length(num_experts, world_size):
    return sum(sizes(num_experts, world_size).values())


# ---- in a kernel: where a table begins ----


@td.jit
def counts_of(tables, source, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return tables + source * (EXPERTS + RANKS + 2)


@td.jit
def rows_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return tables + RANKS * (EXPERTS + RANKS + 2)


@td.jit
def ours_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return rows_at(tables, EXPERTS, RANKS) + EXPERTS


@td.jit
def theirs_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return ours_at(tables, EXPERTS, RANKS) + RANKS


@td.jit
def parts_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return ours_at(tables, EXPERTS, RANKS) + 2 * RANKS


@td.jit
def their_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return ours_at(tables, EXPERTS, RANKS) + 3 * RANKS


@td.jit
def facts_at(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    return ours_at(tables, EXPERTS, RANKS) + 4 * RANKS


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
