"""What a rank of a group on several nodes knows of a routing beyond ``dispatch.layout``.

N nodes of L ranks; rank r is number r % L on node r // L. A rank's rail are the ranks of its number, one on each node.
What crosses from a node to another goes along a rail: the rank there passes on what it gets, or takes what it sends
back, for its node. Four tables of W words stand in the place of those of ``dispatch.layout``, in a node's staging
memory, which holds what node peers send each other, whatever node it comes from. Of them two are for the m-th rank of
our rail and the l-th of our node, at m * L + l:

    ours       where the tokens of that rank of our rail begin in the staging memory of that rank of our node
    parts      where the latter's parts of the former's tokens begin in ours, on their way back
    theirs     where the tokens of any rank begin in our staging memory
    their      where our parts of any rank's tokens begin in that of the rank of its rail on our node

Tokens of our own rail are not staged there, but where what comes from the network arrives. In another int32 tensor:

    crossing   [W, N]  how many tokens of each rank are for each other node, each token counted once; 0 for its own
    going      [N]  where our tokens for a node begin among all that we send to other nodes
    landing    [N]  where they begin among all that the rank of our rail there passes on
    passing    [N]  where the tokens of the rank of our rail on a node begin among all that we pass on
    home       [N]  where they begin among all that it sends to other nodes
    numbers    [T, N]  which of our tokens for a node each one is; or ~n if it is not for it, and n are before it
    listed     [N, T]  the token of each such number
    tiles      [tiles, N]  ``crossing`` of all tiles before each

And of each token that we pass on, [2 * K + L]: the numbers on our node of its choices' ranks, -1 for none, its rows
there, -1 for none, and which of the tokens for each rank of our node it is, or -1.
"""

import triton.language as tl

from tdkernels import lang as td


def length(num_nodes, world_size, tokens, tiles):
    """Words of the tables."""
    return num_nodes * (world_size + 4 + 2 * tokens + tiles)


def passed_length(slots, local, k):
    """Words of what is kept of the tokens that are passed on."""
    return slots * (2 * k + local)


@td.jit
def crossing_of(tables, source, node, RANKS: tl.constexpr, NODES: tl.constexpr):
    return tables + source * NODES + node


@td.jit
def going_at(tables, node, RANKS: tl.constexpr, NODES: tl.constexpr):
    return tables + RANKS * NODES + node


@td.jit
def landing_at(tables, node, RANKS: tl.constexpr, NODES: tl.constexpr):
    return going_at(tables, node, RANKS, NODES) + NODES


@td.jit
def passing_at(tables, node, RANKS: tl.constexpr, NODES: tl.constexpr):
    return going_at(tables, node, RANKS, NODES) + 2 * NODES


@td.jit
def home_at(tables, node, RANKS: tl.constexpr, NODES: tl.constexpr):
    return going_at(tables, node, RANKS, NODES) + 3 * NODES


@td.jit
def number_at(tables, token, node, RANKS: tl.constexpr, NODES: tl.constexpr):
    return going_at(tables, node, RANKS, NODES) + NODES * (4 + tl.cast(token, tl.int64))


@td.jit
def listed_at(tables, node, number, num_tokens, RANKS: tl.constexpr, NODES: tl.constexpr):
    first = number_at(tables, num_tokens, 0, RANKS, NODES)
    return first + tl.cast(node, tl.int64) * num_tokens + number


@td.jit
def tile_at(tables, tile, num_tokens, RANKS: tl.constexpr, NODES: tl.constexpr):
    return listed_at(tables, NODES, 0, num_tokens, RANKS, NODES) + tl.cast(tile, tl.int64) * NODES


@td.jit
def passed_at(passed, number, K: tl.constexpr, LOCAL: tl.constexpr):
    """What is kept of a token that we pass on."""
    return passed + tl.cast(number, tl.int64) * (2 * K + LOCAL)


@td.jit
def tokens_across(tables, source, node, goes, RANKS: tl.constexpr, NODES: tl.constexpr):
    """How many tokens a rank sends to another node: none if nothing ``goes``, for then there may be no room."""
    return tl.where(goes > 0, tl.load(crossing_of(tables, source, node, RANKS, NODES)), 0)
