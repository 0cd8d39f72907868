"""Memory layout of the inter-node tables and of the relayed-token map, in addition to ``dispatch.layout``.

There are N nodes of L ranks. Rank r has local rank r % L on node r // L. A rail is the N ranks with the same local
rank. Tokens cross the network along a rail only: the rank of the source's rail on the destination node relays them to
its node peers in a dispatch, and sends the node's sums back in a combine. Below, "our" means "of this rank", and a
relayed token is a token from another node that this rank relays.

The offset tables of ``dispatch.layout`` have another meaning. They refer to the staging memory of a node, in which node
peers store tokens for each other, also relayed tokens. In the first two, entry m * L + l is for rank A, which is on our
rail on node m, and rank B, which has local rank l on our node:

    send offsets  [W]  dispatch: first slot of the tokens of A in the staging memory of B
    parts         [W]  combine: first slot of the results of B for tokens of A, in our staging memory
    recv offsets  [W]  dispatch: first slot of the tokens of each rank in our staging memory
    peer offsets  [W]  combine: first slot of our results for tokens of each rank, in the staging memory of the rank of
                       its rail on our node

Tokens of our own rail are not staged there. They are in the memory that the network writes. The inter-node tables are
another int32 tensor. In order:

    crossing   [W, N]  number of tokens of each rank for each other node, each token counted once; 0 for its own node
    going      [N]  index of our first token for a node among all tokens that we send to other nodes
    landing    [N]  index of that token among all tokens relayed by the rank of our rail on that node
    passing    [N]  index of the first token from the rank of our rail on a node among all tokens that we relay
    home       [N]  index of that token among all tokens that the rank of our rail sends to other nodes
    numbers    [T, N]  index n of each token among our tokens for a node; or -1 - n if it is not for the node, where n
                       is the number of earlier tokens for the node
    listed     [N, T]  token of each such index
    tiles      [tiles, N]  for each tile, the sum of ``crossing`` of all tiles before it

The relayed-token map is another int32 tensor, [2 * K + L] for each relayed token: for its assignments the local ranks
on our node and the rows there, -1 for none; and its index among its source's tokens for each rank of our node, or -1.
"""

import triton.language as tl

from tdkernels import lang as td


def length(num_nodes: int, world_size: int, tokens: int, tiles: int) -> int:
    """Return the int32 words of the inter-node tables."""
    return num_nodes * (world_size + 4 + 2 * tokens + tiles)


def relayed_length(slots: int, local: int, k: int) -> int:
    """Return the int32 words of the relayed-token map."""
    return slots * (2 * k + local)


# Device functions that return the address of an entry of a table.


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
def relayed_at(relayed, number, K: tl.constexpr, LOCAL: tl.constexpr):
    """Return the address of a relayed token in the relayed-token map."""
    return relayed + tl.cast(number, tl.int64) * (2 * K + LOCAL)


@td.jit
def tokens_across(tables, source, node, valid, RANKS: tl.constexpr, NODES: tl.constexpr):
    """Return the tokens that a rank sends to another node: 0 if the routing is not valid, as slots may not suffice."""
    return tl.where(valid > 0, tl.load(crossing_of(tables, source, node, RANKS, NODES)), 0)
