"""Interleave work items of another kind with the tiles of a work list."""

import triton.language as tl

from tdkernels import lang as td


@td.jit
def split_piece(piece, tiles, others, lead):
    """Return (whether work item ``piece`` is one of the ``others``, its index among the items of its kind).

    The list has ``tiles`` tiles with ``others`` items interleaved. The first ``lead`` items are tiles, if there are
    enough. If there are more others than tiles, the others come first. Interleaving them in proportion makes tp_moe 2
    to 5 % slower, because a single copy between GEMM tiles exposes its own latency.
    """
    lead = tl.minimum(lead, tiles)
    period = tl.maximum((tiles - lead + others) // tl.maximum(others, 1), 1)
    within = tl.maximum(piece - lead, 0)
    turn = within // period
    is_other = (piece >= lead) & (within % period == period - 1) & (turn < others)
    before = tl.where(piece >= lead, tl.minimum(turn, others), 0)
    return is_other, tl.where(is_other, turn, piece - before)
