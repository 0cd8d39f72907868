"""Split-K of the warp-specialized kernels of gemm_rs and gemm_ar: which tiles are split, on any machine."""

import itertools

import pytest
import torch

import tdkernels
from tdkernels import GemmRsConfig, Tiles
from tdkernels.ops.common.specialized import launch_split_k
from tdkernels.ops.common.specialized.launch_split_k import LastWave, choose
from tdkernels.runtime import gpu
from tests.ops.dense.specialized_support import pretend_hopper


@pytest.mark.parametrize("tiles, steps, expected", [
    (320, 200, LastWave(264, 56, 2)),  # 2048 x 5120 x 25600 on 2 ranks
    (160, 160, LastWave(132, 28, 4)),  # 2048 x 2560 x 20480 on 2 ranks
    (256, 224, None),  # the last wave is nearly full
    (264, 224, None),  # there are whole waves only
    (2112 + 16, 200, None),  # the last wave is a small part of the launch
    (320, 50, None),  # a tile takes little time
    (1, 1000, LastWave(0, 1, 8)),
])
def test_last_wave(tiles, steps, expected):
    assert choose(tiles, steps, 132) == expected


def test_splits_fit_into_a_wave():
    found, config = 0, GemmRsConfig(tiles=Tiles(128, 256, 64), warp_specialize=True)
    for tiles, steps, programs in itertools.product(range(1, 700, 7), (16, 33, 64, 200, 448), (78, 132)):
        one = choose(tiles, steps, programs)
        if one is None:
            continue
        found += 1
        assert one.whole_tiles % programs == 0 and one.whole_tiles + one.split_tiles == tiles and one.num_splits >= 2
        assert one.split_tiles * one.num_splits <= programs
        assert steps // one.num_splits >= 16
        assert 2 * one.further_items <= launch_split_k.num_flags(config)
    assert found > 100


def test_other_kernels_need_no_flags():
    assert launch_split_k.num_flags(GemmRsConfig(tiles=Tiles(128, 256, 64))) == 0
    assert launch_split_k.num_flags(GemmRsConfig(tiles=Tiles(128, 128, 64), warp_specialize=True)) == 0


@pytest.mark.parametrize("dtype, k", [(torch.bfloat16, 12800), (torch.float8_e4m3fn, 25600)], ids=str)
def test_arguments_of_a_launch(monkeypatch, dtype, k):
    pretend_hopper(monkeypatch)
    x = torch.empty(2048, k, dtype=dtype, device="meta")
    sums, found, first_flag = launch_split_k.splits_of(x, 320, 7)
    assert found == LastWave(264, 56, 2) and first_flag == 7
    assert sums.shape == (56, 128, 256) and sums.dtype == torch.float32
    monkeypatch.setattr(gpu, "spare_sms", 1)  # as in solo mode
    assert launch_split_k.splits_of(x, 320, 0).last_wave == LastWave(262, 58, 2)
    with tdkernels.batch_invariant():  # the last wave depends on the number of rows
        assert launch_split_k.splits_of(x, 320, 0) == launch_split_k.NO_SPLITS
