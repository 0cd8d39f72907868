"""The warp-specialized kernels of tp_moe, on Hopper; their config on other devices."""

from types import SimpleNamespace

import pytest
import torch

from tdkernels import MoeTpConfig
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common.scaling import layout_of
from tdkernels.ops.common.tile_config import LARGE, default_tiles, specialized_tiles
from tdkernels.ops.experts.grouped_gemm.layout import weight_layout
from tdkernels.ops.experts.tp_moe import fp8, launch_specialized, steps
from tdkernels.ops.experts.tp_moe.config import default_config
from tdkernels.runtime import gpu
from tests.ops.dense.specialized_support import ON_HOPPER, on_hopper
from tests.ops.experts.tp_moe import specialized_cases as specialized
from tests.ops.experts.tp_moe.oracle import FP16
from tests.support.ranks import on_ranks

# k: assignments per token; width: H; hidden: channels of a rank. The tokens are those of a rank.
SPECS = {
    "groups of all sizes": dict(tokens=333, k=2, experts=5, width=264, hidden=136),
    "wide": dict(tokens=200, k=3, experts=4, width=1032, hidden=520, dtype=FP16, seed=1),
    "not activated": dict(tokens=70, k=1, experts=3, width=512, hidden=256, activation=None, seed=2),
    "short": dict(tokens=300, k=2, experts=4, width=64, hidden=64, ids="distinct", seed=3),
    "all to one": dict(tokens=150, k=1, experts=4, width=128, hidden=72, ids="one", seed=4),
    "two of 40 experts": dict(tokens=40, k=2, experts=40, width=128, hidden=64, ids="few", seed=5),
    "all dropped": dict(tokens=30, k=2, experts=2, width=128, hidden=64, ids="none", seed=6),
    "few tokens": dict(tokens=1, k=2, experts=2, width=256, hidden=64, seed=7),
}


@on_hopper
@pytest.mark.parametrize("world_size, stages", [(1, 1), (2, 1), (2, 2), (3, 4), (4, 8)])
@pytest.mark.parametrize("spec", SPECS)
def test_forward_and_gradients(world_size, stages, spec):
    on_ranks(world_size, specialized.computes, SPECS[spec], stages)


@on_hopper
@pytest.mark.parametrize("world_size, stages", [(1, 1), (2, 2), (3, 4), (4, 0)])
@pytest.mark.parametrize("spec", SPECS)
def test_bits_of_the_portable_kernels(world_size, stages, spec):
    on_ranks(world_size, specialized.has_the_bits_of_the_portable_kernels, SPECS[spec], stages)


@on_hopper
@pytest.mark.parametrize("spec", ["groups of all sizes", "wide", "all to one"])
def test_ranks_with_different_kernels(spec):
    on_ranks(3, specialized.works_with_portable_kernels_on_other_ranks, SPECS[spec], 3)


@on_hopper
@pytest.mark.parametrize("world_size, stages", [(1, 1), (2, 2), (4, 4)])
@pytest.mark.parametrize("changes", [
    dict(tokens=260, width=512, hidden=256), dict(tokens=77, width=272, hidden=128, activation=None),
    dict(tokens=260, width=512, hidden=144, scalings=("row", "row")),
    dict(tokens=77, width=272, hidden=128, activation=None, scalings=("expert", "row")),
], ids=["swiglu", "not activated", "swiglu, row", "not activated, by expert and row"])
def test_bits_in_fp8(world_size, stages, changes):
    on_ranks(world_size, specialized.has_the_bits_in_fp8, stages=stages, **changes)


@on_hopper
@pytest.mark.parametrize("changes", [dict(hidden=132), dict(activation="swiglu_interleaved")], ids=str)
def test_unsupported_operands(changes):
    on_ranks(2, specialized.falls_back, SPECS["groups of all sizes"] | changes)


@on_hopper
def test_graph():
    on_ranks(2, specialized.replays_in_a_graph, SPECS["wide"])


@on_hopper
@pytest.mark.parametrize("world_size", [1, 2])
def test_graph_of_forward_and_backward(world_size):
    spec = dict(tokens=333, k=2, experts=5, width=576, hidden=192)
    on_ranks(world_size, specialized.replays_a_step_in_a_graph, spec)


@on_hopper
@pytest.mark.parametrize("tokens, experts", [(1024, 4), (32, 20)])
@pytest.mark.parametrize("config, expected", [
    (None, True), (MoeTpConfig(warp_specialize=True), True), (MoeTpConfig(), False),
])
def test_config_without_tiles(config, expected, tokens, experts):
    spec = dict(tokens=tokens, k=2, experts=experts, width=2048, hidden=1024)
    on_ranks(2, specialized.selects_kernels, spec, config, expected)


@on_hopper
@pytest.mark.parametrize("hidden, expected", [(256, True), (192, False)])
def test_config_without_tiles_in_fp8(hidden, expected):
    """Gate and up must start at a block of 128 rows."""
    on_ranks(2, specialized.selects_tiles_in_fp8, expected, width=512, hidden=hidden, experts=4)


@pytest.mark.skipif(ON_HOPPER, reason="for other devices")
def test_other_devices():
    on_ranks(2, specialized.computes_on_other_devices, dict(tokens=20, k=2, experts=4, width=24, hidden=8))


def test_most_ranks(monkeypatch):
    """A thread of the two warps that add waits for each rank, so there can be 64."""
    monkeypatch.setattr(launch_specialized, "supports", lambda *_: True)
    h, w = SimpleNamespace(shape=(1024, 64)), SimpleNamespace(shape=(8, 512, 64))
    found = [launch_specialized.supports_gemm_rs(h, w, ranks, None) for ranks in (1, 64, 65, 128)]
    assert found == [True, True, False, False]


@pytest.mark.parametrize("rows, supported", [((1 << 34) // 8192 - 1, True), ((1 << 34) // 8192, False)])
def test_most_rows(monkeypatch, rows, supported):
    """The offset of each row, in units of 8 columns, is an int32."""
    monkeypatch.setattr(launch_specialized, "supports", lambda *_: True)
    h, w = SimpleNamespace(shape=(rows, 64)), SimpleNamespace(shape=(8, 8192, 64))
    assert launch_specialized.supports_gemm_rs(h, w, 1, None) == supported


@pytest.fixture
def fake_hopper(monkeypatch):
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    return torch.device("cuda", 0)


@pytest.mark.parametrize("hidden, of_rank, gradients", [
    (4096, 1792, (True, True)), (4104, 1792, (False, True)), (4096, 1800, (True, False)), (4104, 1800, (False, False)),
])
def test_weights_of_the_backward(monkeypatch, hidden, of_rank, gradients):
    """The GEMMs of the backward read the weights as [K, N], which are supported if K is a multiple of a step."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "has_tma", lambda device: True)

    def is_supported(weight, activation=None):
        x, w = torch.empty(16, weight.shape[2], dtype=weight.dtype, device="meta"), weight_layout(weight, activation)[0]
        return launch_specialized.supports(x, w, activation, specialized.CONFIG)

    shapes = (8, 2 * of_rank, hidden), (8, hidden, of_rank)
    gate_up, down = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    assert is_supported(gate_up, "swiglu") and is_supported(down)
    assert (is_supported(down.transpose(1, 2)), is_supported(gate_up.transpose(1, 2))) == gradients


@pytest.mark.parametrize("tokens, choices, experts, n, k, dtype, specialized", [
    (8192, 2, 8, 4096, 1792, torch.bfloat16, True), (8192, 2, 8, 4096, 1792, torch.float32, False),
    (2048, 2, 8, 512, 1024, torch.float16, False),  # 64 tiles
    (512, 2, 8, 3584, 4096, torch.bfloat16, True), (106, 1, 106, 256, 1024, torch.bfloat16, True),  # 112 and 106
    (105, 1, 105, 256, 1024, torch.bfloat16, False),
    (128, 2, 64, 4096, 1792, torch.bfloat16, True), (8192, 2, 8, 4104, 1792, torch.bfloat16, False),
])
def test_default_config(fake_hopper, tokens, choices, experts, n, k, dtype, specialized):
    config = default_config(tokens, choices, experts, n, k, dtype, fake_hopper)
    assert config.warp_specialize == specialized
    assert config.tiles == (LARGE if specialized else default_tiles(tokens * choices // experts, n, dtype, fake_hopper))


@pytest.mark.parametrize("config", [None, MoeTpConfig(warp_specialize=True), MoeTpConfig(stages=2)])
@pytest.mark.parametrize("shape, activation, is_kn, supported", [
    ((64, 4096, 1792), "swiglu", False, True), ((64, 4096, 1792), None, True, True),
    ((64, 4096, 1792), "swiglu_interleaved", False, False), ((64, 4104, 1792), None, False, False),
    ((64, 4096, 1800), None, True, False), ((64, 4096, 1800), None, False, True),
])
def test_completed_config(fake_hopper, config, shape, activation, is_kn, supported):
    """Groups of 4 rows have large tiles only if the kernel is specialized."""
    w = SimpleNamespace(shape=shape, dtype=torch.bfloat16, device=fake_hopper)
    found = steps._complete(config, 128, 2, w, activation, is_kn)
    specialized = supported and (config is None or config.warp_specialize)
    assert found.warp_specialize == specialized and found.stages == (config or found).stages
    assert found.tiles == (LARGE if specialized else default_tiles(4, shape[1], w.dtype, fake_hopper))


@pytest.mark.parametrize("scaling, changes, specialized", [
    ("block", {}, True), ("row", {}, True), ("row", dict(config=MoeTpConfig(warp_specialize=True)), True),
    ("row", dict(config=MoeTpConfig(stages=2)), False), ("row", dict(activation="swiglu_interleaved"), False),
    ("row", dict(n=3968), True), ("block", dict(n=3968), False),  # a plane has 15.5 blocks
    ("block", dict(n=3968, activation=None), True), ("row", dict(n=4104), False), ("row", dict(k=1800), False),
    ("row", dict(tokens=2048, n=512), False),  # 64 tiles
])
@pytest.mark.parametrize("fast", [False, True], ids=["", "fast"])
def test_default_config_in_fp8(fake_hopper, scaling, changes, specialized, fast):
    arguments = dict(tokens=8192, n=4096, k=1792, activation="swiglu", config=None) | changes
    tokens, n, k, activation, config = arguments.values()
    w = SimpleNamespace(shape=(8, n, k), dtype=torch.float8_e4m3fn, device=fake_hopper)
    found = fp8._complete(config, tokens, 2, w, layout_of(scaling, fast), activation)
    assert found.warp_specialize == specialized
    assert not specialized or found.tiles == specialized_tiles(LARGE, w.dtype)
    assert config is None or found.stages == config.stages


@pytest.mark.parametrize("hidden, specialized", [(8192, True), (8200, False)])
def test_default_of_the_tuner_for_few_rows(fake_hopper, hidden, specialized):
    """With H = 8200 only the first GEMM is supported. Then the tiles are those of the portable kernel."""
    problem = Problem("tp_moe", "NVIDIA Testing", 2, 2, "bfloat16", "swiglu", (64, hidden, 4096, 64, 2))
    config = tunable("tp_moe").default(problem, fake_hopper)
    assert config.warp_specialize == specialized
    assert config.tiles == (LARGE if specialized else default_tiles(2, 4096, torch.bfloat16, fake_hopper))


@pytest.mark.parametrize("operator, layout, hidden, specialized", [
    ("tp_moe", "swiglu", 8192, True), ("tp_moe", "swiglu_interleaved", 8192, False), ("moe_gemm_rs", "kn", 8192, True),
    ("moe_gemm_rs", "kn", 8200, False), ("moe_ag_gemm", "kn", 8192, True), ("moe_ag_gemm", "none", 8192, True),
])
def test_candidates_of_the_tuner(fake_hopper, monkeypatch, operator, layout, hidden, specialized):
    """The default and candidates have ``warp_specialize`` only for problems that the kernels support."""
    monkeypatch.setattr(gpu, "has_tma", lambda device: True)
    problem = Problem(operator, "NVIDIA Testing", 2, 2, "bfloat16", layout, (8192, 4096, hidden, 8, 2))
    assert tunable(operator).default(problem, fake_hopper).warp_specialize == specialized
    space = tunable(operator).space(problem, fake_hopper)
    assert any(config.warp_specialize for config in space) == specialized
    assert len({tunable(operator).compiled(config) for config in space if config.tiles == LARGE}) == 1 + specialized
