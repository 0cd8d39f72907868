"""Limits of transport "direct", and the number of programs that its kernels are launched with."""

import pytest
import torch

from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.dense import launch_direct
from tdkernels.ops.dense.gemm_ar import launch_direct as of_gemm_ar
from tdkernels.runtime import gpu
from tests.ops.dense.specialized_support import pretend_hopper

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    pretend_hopper(monkeypatch)
    monkeypatch.setattr(gpu, "resident_programs", lambda *_: 132)
    monkeypatch.setattr(gpu, "shared_memory_bytes", lambda device: 227 << 10)


def test_more_ranks_than_descriptors():
    launch_direct.check_ranks("gemm_ar", 8)
    with pytest.raises(ValueError, match='gemm_ar: config: transport "direct" supports at most 8 ranks, .* has 9'):
        launch_direct.check_ranks("gemm_ar", 9)


@pytest.mark.parametrize("rows, n, k, dtype, ranks, expected", [
    (1024, 4096, 1792, torch.bfloat16, 8, True), (1024, 4096, 1792, torch.float16, 2, True),
    (1024, 4096, 1792, torch.float32, 8, False), (1024, 4096, 1792, torch.bfloat16, 9, False),
    (1024, 4096, 1791, torch.bfloat16, 8, False), (1024, 4100, 1792, torch.bfloat16, 8, False),
    (1024, 128, 1792, torch.bfloat16, 8, False), (64, 4096, 1792, torch.bfloat16, 8, False),
], ids=str)
def test_suits_large_tiles_that_tma_sends(rows, n, k, dtype, ranks, expected, hopper):
    assert launch_direct.suits(rows, n, k, dtype, GPU, ranks) == expected


# A wave has 132 tiles of 128 x 256.
@pytest.mark.parametrize("rows, n, shards, specializes, expected", [
    (128, 2048, 8, True, launch_direct.DIRECT_MEDIUM), (128, 3072, 8, True, launch_direct.DIRECT_LARGE),
    (128, 8192, 8, False, launch_direct.DIRECT_MEDIUM), (256, 8192, 8, False, launch_direct.DIRECT_LARGE),
])
def test_default_tile(rows, n, shards, specializes, expected, hopper):
    assert launch_direct.default_tile(rows, n, 8192, shards, 8, specializes, torch.bfloat16, GPU) == expected
    sent = launch_direct.shared_memory_bytes(expected, GPU, torch.bfloat16)
    assert expected.illegal(GPU, torch.bfloat16, sent) is None


def test_default_tile_for_two_ranks_in_fp8(hopper):
    def tile(ranks, dtype, specializes=True, k=7168):
        return launch_direct.default_tile(128, 2048, k, 1, ranks, specializes, dtype, GPU)

    fp8 = torch.float8_e4m3fn
    assert tile(2, fp8) == launch_direct.DIRECT_LARGE
    others = tile(4, fp8), tile(2, torch.bfloat16), tile(2, fp8, specializes=False), tile(2, fp8, k=4096)
    assert set(others) == {launch_direct.DIRECT_MEDIUM}


# 1024 tiles are eight rounds of 128 programs.
@pytest.mark.parametrize("pieces, num_comm, expected", [
    (1024, 0, 128), (1024, 4, 128), (1024, 8, 124), (1024, 200, 1), (100, 0, 100), (100, 16, 100), (133, 0, 67),
])
def test_programs_that_multiply(pieces, num_comm, expected, hopper):
    assert of_gemm_ar._programs(LARGE, pieces, num_comm, GPU, torch.bfloat16) == (expected, 132)
