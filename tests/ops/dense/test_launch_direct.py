"""Limits of transport "direct", and the number of programs that its kernels are launched with."""

import pytest
import torch

from tdkernels.ops.common.tile_config import LARGE, Tiles
from tdkernels.ops.dense import launch_direct
from tdkernels.ops.dense.gemm_ar import launch_direct as of_gemm_ar
from tdkernels.runtime import gpu
from tests.ops.dense.specialized_support import pretend_hopper

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    pretend_hopper(monkeypatch)
    monkeypatch.setattr(gpu, "resident_programs", lambda *_: 132)


def test_more_ranks_than_descriptors():
    launch_direct.check_ranks("gemm_ar", 8)
    with pytest.raises(ValueError, match='gemm_ar: config: transport "direct" supports at most 8 ranks, .* has 9'):
        launch_direct.check_ranks("gemm_ar", 9)


@pytest.mark.parametrize("tiles, n, k, dtype, ranks, expected", [
    (LARGE, 4096, 1792, torch.bfloat16, 8, True), (LARGE, 4096, 1792, torch.float16, 2, True),
    (LARGE, 4096, 1792, torch.float32, 8, False), (LARGE, 4096, 1792, torch.bfloat16, 9, False),
    (LARGE, 4096, 1791, torch.bfloat16, 8, False), (LARGE, 4100, 1792, torch.bfloat16, 8, False),
    (Tiles(128, 128), 4096, 1792, torch.bfloat16, 8, False),
], ids=str)
def test_suits_large_tiles_that_tma_sends(tiles, n, k, dtype, ranks, expected, hopper):
    assert launch_direct.suits(tiles, n, k, dtype, GPU, ranks) == expected


# 1024 tiles are eight rounds of 128 programs.
@pytest.mark.parametrize("pieces, num_comm, expected", [
    (1024, 0, 128), (1024, 4, 128), (1024, 8, 124), (1024, 200, 1), (100, 0, 100), (100, 16, 100), (133, 0, 67),
])
def test_programs_that_multiply(pieces, num_comm, expected, hopper):
    assert of_gemm_ar._programs(LARGE, pieces, num_comm, GPU, torch.bfloat16) == (expected, 132)
