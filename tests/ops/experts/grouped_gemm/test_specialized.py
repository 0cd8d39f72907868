"""The warp-specialized kernel of group_gemm, on Hopper; its config on other devices."""

from types import SimpleNamespace

import pytest
import torch

from tdkernels import GroupGemmConfig, Tiles
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common.tile_config import LARGE, default_tiles
from tdkernels.ops.experts.grouped_gemm import launch
from tdkernels.ops.experts.grouped_gemm.config import default_config
from tdkernels.runtime import gpu
from tests.ops.dense.specialized_support import ON_HOPPER, on_hopper
from tests.ops.experts.grouped_gemm import specialized_cases as cases
from tests.ops.experts.grouped_gemm.test_grouped_gemm import computes_forward_only
from tests.support.ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(272, 72), (512, 1024), (16, 8), (784, 200)]  # N, K


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_values(dtype, activation):
    on_ranks(1, cases.computes, dtype, activation, SHAPES)


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("activation, w_is_kn", [(None, False), (None, True), ("swiglu", False)])
def test_bits_of_the_plain_kernel(dtype, activation, w_is_kn):
    shapes = [(264, 64), (1032, 448), (520, 1024)] if w_is_kn else SHAPES
    on_ranks(1, cases.has_the_bits_of_the_plain_kernel, dtype, activation, w_is_kn, shapes)


@on_hopper
@pytest.mark.parametrize("splits", [[1], [300], [7, 0, 20], [64], [0, 1]], ids=str)
def test_few_groups(splits):
    on_ranks(1, cases.has_the_bits_for_few_groups, splits)


@on_hopper
def test_default():
    on_ranks(1, cases.is_the_default)


@on_hopper
def test_graph():
    on_ranks(1, cases.replays_in_a_graph)


@on_hopper
def test_two_streams():
    on_ranks(1, cases.runs_on_two_streams)


@on_hopper
@pytest.mark.parametrize("splits", [[200, 100, 3], [-5, 70, 0, 71], [1 << 40, 1], [0, 0]], ids=str)
def test_invalid_splits(splits):
    on_ranks(1, cases.cuts_off_splits, splits)


def every_second(w):
    return w[::2]


def short_rows(w):
    return w[:5, :, :72].transpose(1, 2).contiguous().transpose(1, 2)  # stored as [K, N], and K % 64 > 0


def odd_columns(w):
    return w[:5, :317].contiguous()


@on_hopper
@pytest.mark.parametrize("make", [every_second, short_rows, odd_columns])
def test_unsupported_weights(make):
    on_ranks(1, cases.falls_back, make)


@pytest.mark.skipif(ON_HOPPER, reason="for other devices")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_other_devices(dtype):
    config = GroupGemmConfig(tiles=Tiles(128, 256, 64, num_warps=1, num_stages=1), warp_specialize=True)
    on_ranks(1, computes_forward_only, dtype, [([37, 0, 70, 1], 48, 72)], None, config)


@pytest.fixture
def fake_hopper(monkeypatch):
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    return torch.device("cuda", 0)


@pytest.mark.parametrize("rows, n, k, groups, dtype, specialized", [
    (32768, 3072, 4096, 128, BF16, True), (32768, 3072, 4096, 128, FP32, False), (4096, 3584, 4096, 8, FP16, True),
    (2048, 2048, 1024, 16, BF16, False), (2304, 2048, 1024, 16, BF16, True),  # 128 and 256 tiles
    (8192, 3072, 4096, 128, BF16, True), (128, 3072, 4096, 128, BF16, True),  # 64 rows and 1 row of a group
    (12, 3072, 4096, 128, BF16, True), (11, 3072, 4096, 128, BF16, False),  # 144 and 132 tiles
    (8192, 128, 4096, 256, BF16, False), (32768, 3080, 4096, 128, BF16, False),  # narrow; N % 16 > 0
])
def test_default_config(fake_hopper, rows, n, k, groups, dtype, specialized):
    config = default_config(rows, n, k, groups, dtype, fake_hopper)
    assert config.warp_specialize == specialized
    assert config.tiles == (LARGE if specialized else default_tiles(rows // groups, n, dtype, fake_hopper))


@pytest.mark.parametrize("config, is_supported, specialized", [
    (None, True, True), (GroupGemmConfig(warp_specialize=True), True, True), (GroupGemmConfig(), True, False),
    (None, False, False), (GroupGemmConfig(warp_specialize=True), False, False),
])
def test_tiles_for_few_rows(fake_hopper, monkeypatch, config, is_supported, specialized):
    """The portable kernel gets smaller tiles than the specialized one, also if that does not support the operands."""
    monkeypatch.setattr(launch, "memory_layout", lambda *_: None)
    monkeypatch.setattr(launch, "_specializes", lambda *_: is_supported)
    x, w = SimpleNamespace(shape=(512, 2048), dtype=BF16, device=fake_hopper), SimpleNamespace(shape=(32, 3072, 2048))
    found = launch.config_for(x, w, config)
    assert found.warp_specialize == specialized and found.tiles.block_m == (128 if specialized else 64)


@pytest.mark.parametrize("layout, k, specialized", [
    ("none", 2056, True), ("swiglu", 2048, True), ("swiglu_interleaved", 2048, False), ("kn", 2048, True),
    ("kn", 2056, False), ("dw", 2048, True),
])
def test_candidates_of_the_tuner(fake_hopper, monkeypatch, layout, k, specialized):
    """The default and the candidates have ``warp_specialize`` only for problems that the kernel supports."""
    monkeypatch.setattr(gpu, "has_tma", lambda device: True)
    tuned = tunable("group_gemm")
    problem = Problem("group_gemm", "NVIDIA Testing", 1, 1, "bfloat16", layout, (32768, 3072, k, 32))
    assert tuned.default(problem, fake_hopper).warp_specialize == specialized
    assert any(config.warp_specialize for config in tuned.space(problem, fake_hopper)) == specialized
    for flag in (False, True):
        assert tuned.completed(GroupGemmConfig(warp_specialize=flag), problem, fake_hopper).warp_specialize == flag


@pytest.mark.parametrize("layout, k, experts, specialized", [
    ("none", 2048, 32, True), ("swiglu", 2048, 32, True), ("swiglu_interleaved", 2048, 32, False),
    ("kn", 2056, 32, False), ("none", 2048, 2048, False),  # more experts than a warp has registers for
])
def test_tiles_of_the_tuner_for_few_rows(fake_hopper, monkeypatch, layout, k, experts, specialized):
    monkeypatch.setattr(gpu, "has_tma", lambda device: True)
    tuned = tunable("group_gemm")
    problem = Problem("group_gemm", "NVIDIA Testing", 1, 1, "bfloat16", layout, (16 * experts, 3072, k, experts))
    default = tuned.default(problem, fake_hopper)
    portable, asked = (
        tuned.completed(GroupGemmConfig(warp_specialize=flag), problem, fake_hopper) for flag in (False, True)
    )
    assert default.warp_specialize == specialized
    assert default.tiles.block_m == asked.tiles.block_m == (128 if specialized else 64)
    assert not portable.warp_specialize and asked.warp_specialize and portable.tiles.block_m == 64
