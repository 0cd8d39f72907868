"""GEMMs of torch (the vendor library) for pipelined methods, which multiply some of the rows at a time."""

import torch

from tdkernels.ops.common.scaling import Scales, scaled_linear
from tdkernels.rounding import cdiv

# Host time of the pipelined form of a backward, and its part for each peer. On 8 H200, ag_gemm took 0.42 to 1.0 ms and
# gemm_rs 0.55 to 1.1, because some CPUs were half as fast as others. On 4 H200 ag_gemm took 0.63 to 0.94.
_HOST_S = {"ag_gemm": (0.55e-3, 0.02e-3), "gemm_rs": (0.3e-3, 0.095e-3), "column_linear": (0.3e-3, 0.095e-3)}
_FLOPS, _LINK = 750e12, 330e9  # rates of an H200, per second


def cut(rows: int, pieces: int) -> list[tuple[int, int]]:
    """Split ``rows`` into chunks; return (first row, number of rows) of each.

    All chunks but the last have the same size. With few rows there may be fewer than ``pieces``. Chunks begin at
    multiples of 8 rows, so that each of them is aligned for copies by programs.
    """
    size = cdiv(rows, 8 * pieces) * 8
    return [(first, min(size, rows - first)) for first in range(0, rows, size)]


def rows_of(matrix: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return ``count`` rows of a matrix; the matrix itself if these are all, which saves the host a slice."""
    return matrix if count == matrix.shape[0] else matrix[first : first + count]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Compute out = x @ weight.T + bias for 2-D operands."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def product_of(
    x: torch.Tensor, weight: torch.Tensor, scales: Scales | None = None, first_row: int = 0
) -> torch.Tensor:
    """Return x @ weight.T. For scaled operands, x are the rows of the scaled x from ``first_row`` on."""
    if scales is not None:
        return scaled_linear(x, weight, None, scales.of_rows(first_row, x.shape[0]))
    # Under autocast, torch.mm without ``out`` would cast the operands.
    return torch.mm(x, weight.t(), out=x.new_empty(x.shape[0], weight.shape[0]))


def host_s_of_backward(operator: str, ranks: int) -> float:
    """Return about how long the host takes to launch the pipelined form of a backward, in seconds."""
    of_call, of_peer = _HOST_S[operator]
    return of_call + (ranks - 1) * of_peer


def is_worth_its_launches(flops: float, wire_bytes: int, least_s: float) -> bool:
    """Return whether a call is so large that the pipelined form is faster. The result is equal on all ranks.

    Args:
        flops: Floating-point operations of a rank.
        wire_bytes: Bytes that a rank receives.
        least_s: The least time that a GPU must take, in seconds.
    """
    return flops / _FLOPS + wire_bytes / _LINK >= least_s


def gemm_over_transfers(flops: float, wire_bytes: int) -> float:
    """Return how many times as long as the transfers a GEMM takes. The arguments are as above."""
    return flops / _FLOPS / (wire_bytes / _LINK)
