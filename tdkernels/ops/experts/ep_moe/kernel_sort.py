"""Sort a rank's top-k assignments by expert, for the sends of ``ep_dispatch_gemm_kernel``.

The rows of an expert from one rank are contiguous, in the order of the rank's tokens (``ep_route_kernel``). So any part
of the sorted list that belongs to one expert is a block of rows at the expert's rank. A send needs only the block's
first row, not a lookup per row.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.dispatch.layout import counts_of, experts_at, places_at, tiles_at


@td.jit
def first_of_expert(counts, expert, EXPERTS: tl.constexpr):
    """Return the index of an expert's first assignment in the list. ``counts`` are this rank's counts by expert."""
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    before = tl.load(counts + experts, mask=(experts < EXPERTS) & (experts < expert), other=0)
    return td.sum_of(before, 0)


@td.jit(do_not_specialize=["me", "num_tokens"])
def ep_order_kernel(
    tables, order_ptr, me, num_tokens,
    K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store order [T * K]: the assignments ``token * K + j`` of rank ``me``, sorted by expert.

    It uses the places that ``ep_route_kernel`` left in the tables.
    """
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
