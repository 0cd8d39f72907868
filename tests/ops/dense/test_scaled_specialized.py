"""The warp-specialized kernels with scaled fp8 operands, on Hopper; on any machine, which operands they support."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tdkernels import AgGemmConfig, GemmArConfig, GemmRsConfig, Tiles
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common import gemm_tunable, scaled_problem
from tdkernels.ops.common.scaling import LAYOUTS, Scales
from tdkernels.ops.common.specialized import launch
from tdkernels.ops.dense.ag_gemm import launch_specialized
from tdkernels.runtime import gpu
from tests.ops.dense import scaled_specialized_cases as cases
from tests.ops.dense.specialized_support import on_hopper, pretend_hopper
from tests.support.ranks import on_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16 = torch.bfloat16, torch.float16
CONFIG = AgGemmConfig(tiles=Tiles(128, 256, 128), warp_specialize=True)
each_operator = pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs"])
each_kernel = pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs", "gemm_ar"])


@on_hopper
@each_kernel
@pytest.mark.parametrize("world_size, scaling, dtype, out_dtype", [
    (2, ("row", "row"), E4M3, BF16), (4, ("row", "tensor"), E4M3, BF16), (3, ("tensor", "row"), E5M2, FP16),
    (2, ("tensor", "tensor"), E4M3, FP16),
])
def test_bits_of_the_plain_kernel(operator, world_size, scaling, dtype, out_dtype):
    on_ranks(world_size, cases.has_the_bits_of_the_plain_kernel, operator, scaling, dtype, out_dtype, 24)


@on_hopper
@each_kernel
@pytest.mark.parametrize("world_size, scaling, dtype, out_dtype", [
    (2, ("row", "row"), E4M3, BF16), (3, ("tensor", "row"), E5M2, FP16), (2, ("tensor", "tensor"), E4M3, BF16),
    (4, ("block", "block"), E4M3, BF16), (2, ("block", "block"), E5M2, FP16), (3, ("block", "block"), E4M3, BF16),
    (2, ("tensor", "row"), (E5M2, E4M3), BF16), (2, ("block", "block"), (E4M3, E5M2), BF16),
])
def test_bits_without_fast_accumulation(operator, world_size, scaling, dtype, out_dtype):
    """Also with block-wise scales."""
    on_ranks(
        world_size, cases.has_the_bits_of_the_plain_kernel, operator, scaling, dtype, out_dtype, 24, fast=False
    )


@on_hopper
@pytest.mark.parametrize("operator", ["gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("scaling, fast", [("row", True), ("row", False), ("block", False)])
def test_split_k(operator, scaling, fast):
    on_ranks(2, cases.splits_tiles_along_k, operator, (scaling, scaling), E4M3, 12, fast)


@on_hopper
@each_operator
@pytest.mark.parametrize("world_size, scaling, fast, by_turns", [
    (2, ("row", "row"), True, False), (4, ("tensor", "row"), False, False), (3, ("block", "block"), False, False),
    (3, ("row", "tensor"), True, True), (8, ("block", "block"), False, False), (8, ("row", "row"), True, False),
    (4, ("block", "block"), False, True),
])
def test_tiles_with_rows_of_several_shards(operator, world_size, scaling, fast, by_turns):
    on_ranks(world_size, cases.has_shared_tiles, operator, scaling, E4M3, BF16, 21, by_turns=by_turns, fast=fast)


@on_hopper
@each_kernel
@pytest.mark.parametrize("world_size, scaling, fast", [
    (2, "row", True), (2, "row", False), (2, "block", False), (4, "row", True), (8, "row", False), (4, "block", False),
    (8, "block", False),
])
def test_configs_for_few_rows(operator, world_size, scaling, fast):
    on_ranks(world_size, cases.computes_with_configs_for_few_rows, operator, scaling, fast)


@on_hopper
def test_larger_chunks():
    on_ranks(
        3, cases.has_the_bits_of_the_plain_kernel, "ag_gemm", ("row", "row"), E4M3, BF16, 12, chunk_tiles=2,
        num_comm_sms=17,
    )


@on_hopper
@each_kernel
@pytest.mark.parametrize("world_size, scaling", [(2, "row"), (3, "row"), (3, "block")])
def test_ranks_with_different_kernels(operator, world_size, scaling):
    on_ranks(
        world_size, cases.has_the_bits_of_the_plain_kernel, operator, (scaling, scaling), E4M3, BF16, 24,
        by_turns=True, fast=scaling == "row",
    )


@on_hopper
@each_kernel
def test_graph(operator):
    on_ranks(2, cases.replays_in_a_graph, operator)


@pytest.fixture
def hopper(monkeypatch):
    pretend_hopper(monkeypatch)
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
    (True, X, WEIGHT.to(E5M2), CONFIG, SCALES._replace(use_fast_accum=False)),
    (False, X, WEIGHT.to(E5M2), CONFIG, SCALES),
    (False, X, WEIGHT.bfloat16(), CONFIG, SCALES),
    (False, X, WEIGHT.t().contiguous().t(), CONFIG, SCALES),
    (False, X, WEIGHT[:520], CONFIG, SCALES),
    (True, X, WEIGHT, CONFIG, SCALES._replace(kind="block", x=torch.empty(256, 3), weight=torch.empty(5, 3))),
    (True, X, WEIGHT, CONFIG, SCALES._replace(use_fast_accum=False)),
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


@each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, k", [(28672, 4096), (28680, 4096)])
def test_default_config(hopper, monkeypatch, operator, layout, n, k):
    """Calls that the kernels support are specialized by default."""
    monkeypatch.setattr(scaled_problem, "multiplies_blocks", lambda *_: False)
    device = torch.device("cuda", 0)
    shape = (8192, 4 * n, k) if operator == "ag_gemm" else (8192, n, 4 * k)
    problem = Problem(operator, "NVIDIA H200", 4, 4, "float8_e4m3fn", layout, shape)
    config = tunable(operator).default(problem, device)
    expected = (n, k) == (28672, 4096)
    assert config.warp_specialize is expected
    if expected:
        tiles = config.tiles
        assert operator != "ag_gemm" or config.num_comm_sms == 96
        assert (tiles.block_m, tiles.block_n, tiles.block_k) == (128, 256, 128) and launch.is_enabled(config)


@each_operator
@pytest.mark.parametrize("layout, n, specialized", [
    ("scaled", 57344, True), ("scaled fast", 57344, True), ("scaled by block", 57344, False),
    ("scaled by block", 8192, True),
])
def test_large_problems_by_default(hopper, monkeypatch, operator, layout, n, specialized):
    """torch's GEMM is the default for large problems with block-wise scales."""
    monkeypatch.setattr(scaled_problem, "multiplies_blocks", lambda *_: True)
    shape = (8192, n, 8192) if operator == "ag_gemm" else (8192, n // 4, 4 * 8192)
    problem = Problem(operator, "NVIDIA H200", 4, 4, "float8_e4m3fn", layout, shape)
    config = tunable(operator).default(problem, torch.device("cuda", 0))
    assert (config.method, config.warp_specialize) == (("fused", True) if specialized else ("parts", False))


@each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, k", [(8192, 4096), (57344, 8192)])  # of the second, "parts" may be the default
@pytest.mark.parametrize("specializes", [False, True])
def test_tiles_of_a_given_config(hopper, monkeypatch, operator, layout, n, k, specializes):
    """A config without tiles gets those of the kernel that it runs."""
    monkeypatch.setattr(scaled_problem, "multiplies_blocks", lambda *_: True)
    monkeypatch.setattr(gpu, "shared_memory_bytes", lambda device: 232448)
    shape = (8192, n, k) if operator == "ag_gemm" else (8192, n // 4, 4 * k)
    problem, device = Problem(operator, "NVIDIA H200", 4, 4, "float8_e4m3fn", layout, shape), torch.device("cuda", 0)
    given = {
        "ag_gemm": AgGemmConfig(), "gemm_rs": GemmRsConfig(transport="direct"),
        "gemm_ar": GemmArConfig(transport="direct"),
    }[operator]
    config = tunable(operator).completed(replace(given, warp_specialize=specializes), problem, device)
    assert config.tiles.block_n == (256 if specializes or layout == "scaled fast" else 128)
    assert launch.is_enabled(config) or not specializes
    assert tunable(operator).suits(config, problem, device)


def test_defaults_of_the_other_kernel(hopper):
    """Operands that the warp-specialized kernel does not support get the number of programs of the other one."""
    problem = Problem("ag_gemm", "NVIDIA H200", 2, 2, "float8_e4m3fn", "scaled", (2048, 2048, 2048))
    config = tunable("ag_gemm").without_specialization(problem, torch.device("cuda", 0))
    assert (config.method, config.num_comm_sms, config.chunk_tiles) == ("fused", 8, 1)


@each_kernel
def test_outputs_in_fp32(hopper, monkeypatch, operator):
    """They select no tile that only the warp-specialized kernel runs without spilling registers."""
    problem = Problem(operator, "NVIDIA H200", 4, 4, "float8_e4m3fn", "scaled", (2048, 2048, 2048))
    tuned, device = tunable(operator), torch.device("cuda", 0)
    selected = replace(tuned.default(problem, device), warp_specialize=True)
    monkeypatch.setattr(gemm_tunable, "select", lambda *_: SimpleNamespace(config=selected))
    monkeypatch.setattr(gemm_tunable, "problem_of", lambda *_: problem)

    def config_of(**changes):
        group = SimpleNamespace(size=lambda: 4)
        x = SimpleNamespace(shape=(512, 2048), device=device)
        weight = SimpleNamespace(shape=(512, 2048), stride=lambda: (2048, 1))
        return gemm_tunable.config_for(operator, "", x, weight, group, dict, SCALES._replace(**changes))

    assert config_of(use_fast_accum=False) is config_of(out_dtype=torch.float32) is selected
    config = config_of(use_fast_accum=False, out_dtype=torch.float32)
    assert not config.warp_specialize and config.tiles.block_m * config.tiles.block_n <= 128 * 128


def test_chunks_have_slices():
    assert [launch_specialized.num_slices(k, CONFIG) for k in (1024, 1040, 8192)] == [1, 2, 8]


@each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_space_has_the_specialized_tile(hopper, operator, layout):
    device = torch.device("cuda", 0)
    problem = Problem(operator, "NVIDIA H200", 4, 4, "float8_e4m3fn", layout, (8192, 28672, 8192))
    space = tunable(operator).space(problem, device)
    specialized = [config for config in space if config.warp_specialize]
    assert all(launch.is_enabled(config) for config in specialized)
    assert specialized
