"""The warp-specialized kernel of group_gemm with scaled fp8 operands, on Hopper."""

from types import SimpleNamespace

import pytest
import torch

from tdkernels import GroupGemmConfig
from tdkernels.ops.common.scaling import Scales
from tdkernels.ops.experts.grouped_gemm import launch
from tdkernels.runtime import gpu
from tests.ops.dense.specialized_support import on_hopper
from tests.ops.experts.grouped_gemm import scaled_specialized_cases as cases
from tests.ops.experts.grouped_gemm.scaled_cases import E4M3, E5M2
from tests.support.ranks import on_ranks

BF16, FP16 = torch.bfloat16, torch.float16
# N, K: columns that end inside a tile and inside a block of scales, K inside a step.
SHAPES = [(272, 144), (512, 1024), (16, 16), (784, 400), (256, 2048)]
WHOLE_BLOCKS = [(256, 144), (512, 1024), (768, 400)]  # of gate and of up
SCALINGS = [("row", "row"), ("tensor", "tensor"), ("row", "expert"), ("tensor", "row"), ("row", "tensor")]


@on_hopper
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_bits_of_the_plain_kernel(scaling, fast, activation):
    on_ranks(1, cases.has_the_bits_of_the_plain_kernel, scaling, activation, fast, SHAPES)


@on_hopper
@pytest.mark.parametrize("activation, shapes", [(None, SHAPES), ("swiglu", WHOLE_BLOCKS)])
def test_blocks(activation, shapes):
    on_ranks(1, cases.has_the_bits_of_the_plain_kernel, ("block", "block"), activation, False, shapes)


@on_hopper
@pytest.mark.parametrize("scaling, dtypes, out_dtype", [
    (("row", "row"), (E5M2, E5M2), FP16), (("block", "block"), (E5M2, E5M2), FP16),
    (("row", "row"), (E5M2, E4M3), BF16), (("block", "block"), (E4M3, E5M2), BF16),
])
def test_dtypes(scaling, dtypes, out_dtype):
    on_ranks(
        1, cases.has_the_bits_of_the_plain_kernel, scaling, None, False, SHAPES[:2], dtypes=dtypes, out_dtype=out_dtype
    )


@on_hopper
@pytest.mark.parametrize("scaling, activation, n, options", [
    (("block", "block"), "swiglu", 320, {}), (("row", "row"), "swiglu_interleaved", 512, {}),
    (("row", "row"), None, 520 + 4, {}), (("row", "row"), None, 512, {"out_dtype": torch.float32}),
])
def test_unsupported_operands(scaling, activation, n, options):
    on_ranks(
        1, cases.has_the_bits_of_the_plain_kernel, scaling, activation, False, [(n, 144)], expected=False, **options
    )


@on_hopper
@pytest.mark.parametrize("scaling, fast", [("row", True), ("row", False), ("block", False)])
def test_repeats(scaling, fast):
    on_ranks(1, cases.repeats, (scaling, scaling), fast)


@on_hopper
@pytest.mark.parametrize("scaling, options, specialized", [
    ("row", {}, True), ("block", {}, True), ("row", {"out_dtype": torch.float32}, False),
])
def test_default(scaling, options, specialized):
    on_ranks(1, cases.selects_by_default, (scaling, scaling), specialized, **options)


@pytest.mark.parametrize("is_supported", [True, False])
@pytest.mark.parametrize("config", [None, GroupGemmConfig(warp_specialize=True), GroupGemmConfig()], ids=str)
@pytest.mark.parametrize("kind, fast", [("row", True), ("row", False), ("block", False)])
@pytest.mark.parametrize("rows", [8192, 2048], ids=["many rows", "few rows"])
def test_config_without_tiles(monkeypatch, rows, kind, fast, config, is_supported):
    """The tile of the warp-specialized kernel is selected only if that kernel runs."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(launch, "_specializes", lambda *_: is_supported)
    monkeypatch.setattr(launch, "memory_layout", lambda w, activation: None)
    experts = 8 if rows == 8192 else 64
    x = SimpleNamespace(shape=(rows, 512), dtype=E4M3, device=torch.device("cuda", 0))
    scales = Scales(None, None, kind, BF16, fast)
    found = launch.config_for(x, SimpleNamespace(shape=(experts, 1024, 512)), config, None, scales)
    expected = is_supported and (config is None or config.warp_specialize)
    portable = (64, 128) if rows == 2048 else (128, 256 if fast else 128)
    assert found.warp_specialize is expected and found.tiles.block_k == 128
    assert (found.tiles.block_m, found.tiles.block_n) == ((128, 256) if expected else portable)


@on_hopper
@pytest.mark.parametrize("scaling", ["row", "block"])
def test_graph(scaling):
    on_ranks(1, cases.replays_in_a_graph, (scaling, scaling))
