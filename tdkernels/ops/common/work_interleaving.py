"""Work of another kind between the tiles of a work list."""

import triton.language as tl

from tdkernels import lang as td


@td.jit
def split_piece(piece, tiles, others, lead):
    """(whether it is one of the others, its number among its kind) of a piece of ``tiles`` with others strewn in.

    The first ``lead`` pieces, if there are as many tiles, are tiles. Where others are more than tiles they come first,
    together: strewn in proportion they make a tp_moe 2 to 5 % slower, for a copy alone among products waits for itself.
    """
    lead = tl.minimum(lead, tiles)
    period = tl.maximum((tiles - lead + others) // tl.maximum(others, 1), 1)
    within = tl.maximum(piece - lead, 0)
    turn = within // period
    is_other = (piece >= lead) & (within % period == period - 1) & (turn < others)
    before = tl.where(piece >= lead, tl.minimum(turn, others), 0)
    return is_other, tl.where(is_other, turn, piece - before)
