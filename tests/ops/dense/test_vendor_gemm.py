"""When the pipelined form of a backward is used, and how it divides rows."""

from types import SimpleNamespace

import pytest
import torch

from tdkernels import AgGemmConfig, Tiles
from tdkernels.ops.dense import backward
from tdkernels.ops.dense.vendor_gemm import cut, host_s_of_backward, is_worth_its_launches, product_of, rows_of


def is_pipelined(operator, ranks, m, n, k):
    """Return whether the backward of a call with M x N x K in 16 bits is pipelined."""
    if operator == "ag_gemm":
        wire_bytes = 2 * (ranks - 1) * m // ranks * k * 2
    else:
        wire_bytes = (ranks - 1) * m // ranks * n * 2
    return is_worth_its_launches(4 * m * n * k / ranks, wire_bytes, host_s_of_backward(operator, ranks))


@pytest.mark.parametrize("operator, ranks, n, k, expected", [
    ("ag_gemm", 2, 6144, 4096, True),  # 0.76 ms at the rates of the estimate
    ("ag_gemm", 4, 6144, 4096, False),  # 0.58 ms
    ("ag_gemm", 4, 10240, 8192, True),  # 1.53 ms
    ("ag_gemm", 8, 6144, 4096, False),  # 0.49 ms
    ("ag_gemm", 8, 28672, 4096, True),  # 1.00 ms
    ("gemm_rs", 8, 8192, 28672, True),  # 1.64 ms
    ("gemm_rs", 8, 8192, 8192, False),  # 0.72 ms
    ("gemm_rs", 4, 4096, 4096, False),  # 0.34 ms
])
def test_small_calls_are_not_pipelined(operator, ranks, n, k, expected):
    """With 8192 tokens on H200. The GPU finishes a small call before the host could launch the pipelined form."""
    assert is_pipelined(operator, ranks, 8192, n, k) is expected


@pytest.mark.parametrize("choice, expected", [
    (AgGemmConfig(tiles=Tiles(128, 256, 64), warp_specialize=True), False),
    (AgGemmConfig(tiles=Tiles(128, 256, 64), warp_specialize=True, transport="copy_engine"), True),
    (AgGemmConfig(tiles=Tiles(128, 256, 64)), True),
    (AgGemmConfig(method="torch"), True),
    (AgGemmConfig(method="parts"), True),
])
def test_backward_of_gemm_rs_prefers_the_specialized_kernel(choice, expected, monkeypatch):
    monkeypatch.setattr(backward, "spans_nodes", lambda group: False)
    dz, x = torch.empty(2048, 8192, device="meta"), torch.empty(8192, 7168, device="meta")
    group = SimpleNamespace(size=lambda: 4)
    assert backward._gemm_rs_in_parts("", choice, dz, x, True, group) is expected
    assert not backward._gemm_rs_in_parts("", choice, dz, x, False, group)


def test_more_ranks_need_larger_calls():
    two, four, eight = (host_s_of_backward("gemm_rs", ranks) for ranks in (2, 4, 8))
    assert two < four < eight and is_worth_its_launches(0.0, 10**6, least_s=0.0)


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
