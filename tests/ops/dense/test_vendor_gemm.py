"""When the pipelined form of a backward is used, and how it divides rows."""

import pytest
import torch

from tdkernels.ops.dense.vendor_gemm import cut, host_s_of_backward, is_worth_its_launches, product_of, rows_of


def worth_of_ag_gemm(ranks, m, n, k):
    """Return whether the backward of ag_gemm for M x N x K in 16 bits is pipelined."""
    wire_bytes = 2 * (ranks - 1) * m // ranks * k * 2
    return is_worth_its_launches(4 * m * n * k / ranks, wire_bytes, host_s_of_backward(ranks))


def test_more_ranks_need_larger_calls():
    """Whether calls are pipelined that the GPU finishes before, or after, the host could launch them (H200)."""
    assert worth_of_ag_gemm(2, 8192, 6144, 4096)  # 0.76 ms at the rates of the estimate
    assert not worth_of_ag_gemm(4, 8192, 6144, 4096)  # 0.58 ms
    assert not worth_of_ag_gemm(8, 8192, 6144, 4096)  # 0.49 ms
    assert worth_of_ag_gemm(8, 8192, 10240, 8192)  # 1.08 ms
    assert is_worth_its_launches(0.0, 10**6, least_s=0.0)


def test_autocast_casts_no_operand():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = product_of(x, weight)
    assert torch.equal(y, x @ weight.t())


@pytest.mark.parametrize("rows, pieces, expected", [
    (64, 4, [(0, 16), (16, 16), (32, 16), (48, 16)]), (20, 2, [(0, 16), (16, 4)]), (5, 4, [(0, 5)]),
])
def test_cut(rows, pieces, expected):
    assert cut(rows, pieces) == expected


def test_all_rows_are_the_matrix_itself():
    matrix = torch.arange(12.0).view(4, 3)
    assert rows_of(matrix, 0, 4) is matrix
    assert torch.equal(rows_of(matrix, 1, 2), matrix[1:3])
