"""A product by torch's GEMM, of a part of the rows at a time, so that other parts can travel meanwhile."""

import torch


def cut(rows, pieces):
    """[(first row, how many)] of the pieces of ``rows``, all but the last of the same size; fewer if rows are few."""
    size = -(-rows // pieces)
    return [(first, min(size, rows - first)) for first in range(0, rows, size)]


def product(x, weight, bias, out):
    """out = x @ weight.T + bias, of 2-D operands."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
