"""The warp-specialized kernels with scaled fp8 operands, on Hopper; on any machine, which operands they support."""

from dataclasses import replace

import pytest
import torch

from tdkernels import AgGemmConfig, Tiles
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common.scaling import LAYOUTS, Scales
from tdkernels.ops.common.specialized import launch
from tdkernels.ops.dense.ag_gemm import launch_specialized
from tdkernels.runtime import gpu
from tests.ops.dense import scaled_specialized_cases as cases
from tests.ops.dense.specialized_support import on_hopper
from tests.support.ranks import on_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16 = torch.bfloat16, torch.float16
CONFIG = AgGemmConfig(tiles=Tiles(128, 256, 128), warp_specialize=True)
each_operator = pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs"])


@on_hopper
@each_operator
@pytest.mark.parametrize("world_size, scaling, dtype, out_dtype", [
    (2, ("row", "row"), E4M3, BF16), (4, ("row", "tensor"), E4M3, BF16), (3, ("tensor", "row"), E5M2, FP16),
    (2, ("tensor", "tensor"), E4M3, FP16),
])
def test_bits_of_the_plain_kernel(operator, world_size, scaling, dtype, out_dtype):
    on_ranks(world_size, cases.has_the_bits_of_the_plain_kernel, operator, scaling, dtype, out_dtype, 24)


@on_hopper
def test_larger_chunks():
    on_ranks(
        3, cases.has_the_bits_of_the_plain_kernel, "ag_gemm", ("row", "row"), E4M3, BF16, 12, chunk_tiles=2,
        num_comm_sms=17,
    )


@on_hopper
@each_operator
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_different_kernels(operator, world_size):
    on_ranks(
        world_size, cases.has_the_bits_of_the_plain_kernel, operator, ("row", "row"), E4M3, BF16, 24, by_turns=True
    )


@on_hopper
@each_operator
def test_graph(operator):
    on_ranks(2, cases.replays_in_a_graph, operator)


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that the operands are on a Hopper GPU."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(launch, "tma_fits", lambda x, weight: True)


X, WEIGHT = torch.empty(256, 320, dtype=E4M3), torch.empty(528, 320, dtype=E4M3)
SCALES = Scales(torch.empty(256, 1), torch.empty(528, 1), "row", BF16, True)


@pytest.mark.parametrize("expected, x, weight, config, scales", [
    (True, X, WEIGHT, CONFIG, SCALES),
    (True, X, WEIGHT, CONFIG, SCALES._replace(x=torch.empty(1, 1), out_dtype=FP16)),
    (True, X.to(E5M2), WEIGHT.to(E5M2), CONFIG, SCALES),
    (True, X.bfloat16(), WEIGHT.bfloat16(), replace(CONFIG, tiles=Tiles(128, 256, 64)), None),
    (False, X.bfloat16(), WEIGHT.bfloat16(), CONFIG, None),
    (False, X, WEIGHT, replace(CONFIG, tiles=Tiles(128, 256, 64)), SCALES),
    (False, X, WEIGHT, replace(CONFIG, warp_specialize=False), SCALES),
    (False, X, WEIGHT.to(E5M2), CONFIG, SCALES),
    (False, X, WEIGHT.t().contiguous().t(), CONFIG, SCALES),
    (False, X, WEIGHT[:520], CONFIG, SCALES),
    (False, X, WEIGHT, CONFIG, SCALES._replace(kind="block")),
    (False, X, WEIGHT, CONFIG, SCALES._replace(use_fast_accum=False)),
    (False, X, WEIGHT, CONFIG, SCALES._replace(out_dtype=torch.float32)),
])
def test_supported_operands(hopper, expected, x, weight, config, scales):
    assert launch.supports(x, weight, config, scales) is expected


def test_copy_engine_is_not_supported(hopper):
    found = [
        launch_specialized.supports(X, [WEIGHT], replace(CONFIG, transport=transport), 256, scales=SCALES)
        for transport in ("push", "copy_engine")
    ]
    assert found == [True, False]


@each_operator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, k", [(28672, 4096), (28680, 4096)])
def test_default_config(hopper, operator, layout, n, k):
    """Only calls with fast accumulation that the kernels support are specialized by default."""
    device = torch.device("cuda", 0)
    shape = (8192, 4 * n, k) if operator == "ag_gemm" else (8192, n, 4 * k)
    problem = Problem(operator, "NVIDIA H200", 4, 4, "float8_e4m3fn", layout, shape)
    config = tunable(operator).default(problem, device)
    expected = layout == "scaled fast" and (n, k) == (28672, 4096)
    assert config.warp_specialize is expected
    if expected:
        tiles = config.tiles
        assert operator == "gemm_rs" or config.num_comm_sms == 96
        assert (tiles.block_m, tiles.block_n, tiles.block_k) == (128, 256, 128) and launch.is_enabled(config)


def test_chunks_have_slices():
    assert [launch_specialized.num_slices(k, CONFIG) for k in (1024, 1040, 8192)] == [1, 2, 8]


@each_operator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_space_has_the_specialized_tile(hopper, operator, layout):
    device = torch.device("cuda", 0)
    problem = Problem(operator, "NVIDIA H200", 4, 4, "float8_e4m3fn", layout, (8192, 28672, 8192))
    space = tunable(operator).space(problem, device)
    specialized = [config for config in space if config.warp_specialize]
    assert all(launch.is_enabled(config) for config in specialized)
    assert bool(specialized) == (layout == "scaled fast")
