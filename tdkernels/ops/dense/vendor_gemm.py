"""A product by torch's GEMM, of a part of the rows at a time, so that other parts can travel meanwhile."""

import torch

from tdkernels.rounding import cdiv

# A backward that takes the GPU less, at H200's rates, takes the host longer to launch in parts (2 H200).
_LEAST_S, _FLOPS, _LINK = 0.75e-3, 750e12, 330e9


def cut(rows, pieces):
    """[(first row, how many)] of the pieces of ``rows``, all but the last of the same size; fewer if rows are few.

    Pieces begin at multiples of 8 rows, so that each is aligned for copies by programs.
    """
    size = cdiv(rows, 8 * pieces) * 8
    return [(first, min(size, rows - first)) for first in range(0, rows, size)]


def product(x, weight, bias, out):
    """out = x @ weight.T + bias, of 2-D operands."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def is_worth_its_launches(flops, wire_bytes):
    """Whether a backward is so large that it is faster in parts; the same on all ranks."""
    return flops / _FLOPS + wire_bytes / _LINK >= _LEAST_S
