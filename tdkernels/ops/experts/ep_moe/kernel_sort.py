"""A rank's choices in the order of their experts: which token each row that it sends is, row after row.

An expert's rows from one rank lie one after the other, in the order of the rank's tokens (``ep_route_kernel``). So of a
list of choices by expert any part of one expert's is a block of rows at its rank, and no row has to be looked up.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.dispatch.layout import counts_of, experts_at, places_at, tiles_at


@td.jit
def first_of_expert(counts, expert, EXPERTS: tl.constexpr):
    """Where the choices of an expert begin in the list; ``counts``: this rank's, by expert."""
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    before = tl.load(counts + experts, mask=(experts < EXPERTS) & (experts < expert), other=0)
    return td.sum_of(before, 0)


@td.jit(do_not_specialize=["me", "num_tokens"])
def ep_order_kernel(
    tables, order_ptr, me, num_tokens,
    K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):
    """order [T * K]: choices of rank ``me``, token * K + j, by expert; of places as ``ep_route_kernel`` leaves them."""
    num_tokens = tl.cast(num_tokens, tl.int32)
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = choice < num_tokens * K
    expert = tl.load(experts_at(tables, 0, K, EXPERTS, RANKS) + choice, mask=there, other=-1)
    place = tl.load(places_at(tables, 0, num_tokens, K, EXPERTS, RANKS) + choice, mask=there, other=-1)
    there &= expert >= 0
    tile = tiles_at(tables, choice // K // TILE_TOKENS, num_tokens, K, EXPERTS, RANKS)
    place += tl.load(tile + expert, mask=there, other=0)
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    counts = tl.load(counts_of(tables, me, EXPERTS, RANKS) + experts, mask=experts < EXPERTS, other=0)
    place += td.sum_of(tl.where(experts[None, :] < expert[:, None], counts[None, :], 0), 1)
    tl.store(order_ptr + place, choice, mask=there)
