"""Which tiles the warp-specialized kernels of gemm_rs and gemm_ar divide along K, on any machine."""

import itertools

import pytest
import torch

import tdkernels
from tdkernels import GemmRsConfig, Tiles
from tdkernels.ops.common.specialized import division
from tdkernels.ops.common.specialized.division import Division, divide
from tdkernels.runtime import gpu
from tests.ops.dense.specialized_support import pretend_hopper


@pytest.mark.parametrize("tiles, steps, expected", [
    (320, 200, Division(264, 56, 2)),  # 2048 x 5120 x 25600 on 2 ranks
    (160, 160, Division(132, 28, 4)),  # 2048 x 2560 x 20480 on 2 ranks
    (256, 224, None),  # the last wave is nearly full
    (264, 224, None),  # there are whole waves only
    (2112 + 16, 200, None),  # the last wave is a small part of the launch
    (320, 50, None),  # a tile takes little time
    (1, 1000, Division(0, 1, 8)),
])
def test_divisions(tiles, steps, expected):
    assert divide(tiles, steps, 132) == expected


def test_divisions_fit():
    found, config = 0, GemmRsConfig(tiles=Tiles(128, 256, 64), warp_specialize=True)
    for tiles, steps, programs in itertools.product(range(1, 700, 7), (16, 33, 64, 200, 448), (78, 132)):
        one = divide(tiles, steps, programs)
        if one is None:
            continue
        found += 1
        assert one.whole % programs == 0 and one.whole + one.divided == tiles and one.parts >= 2
        assert one.divided * one.parts <= programs, "the parts take more than one wave"
        assert steps // one.parts >= 16
        assert 2 * one.further_items <= division.num_flags(config)
    assert found > 100


def test_other_kernels_need_no_flags():
    assert division.num_flags(GemmRsConfig(tiles=Tiles(128, 256, 64))) == 0
    assert division.num_flags(GemmRsConfig(tiles=Tiles(128, 128, 64), warp_specialize=True)) == 0


@pytest.mark.parametrize("dtype, k", [(torch.bfloat16, 12800), (torch.float8_e4m3fn, 25600)], ids=str)
def test_arguments_of_a_launch(monkeypatch, dtype, k):
    pretend_hopper(monkeypatch)
    x = torch.empty(2048, k, dtype=dtype, device="meta")
    sums, found, first_flag = division.divided(x, 320, 7)
    assert found == Division(264, 56, 2) and first_flag == 7
    assert sums.shape == (56, 128, 256) and sums.dtype == torch.float32
    monkeypatch.setattr(gpu, "spare_sms", 1)  # as in solo mode
    assert division.divided(x, 320, 0).division == Division(262, 58, 2)
    with tdkernels.batch_invariant():  # the division depends on the number of rows
        assert division.divided(x, 320, 0) == division.NOT_DIVIDED
