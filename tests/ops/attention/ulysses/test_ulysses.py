"""ulysses_qkv and ulysses_out against the unsharded projection."""

import pytest
import torch

from tests.ops.attention.ulysses import cases
from tests.ops.attention.ulysses.cases import BF16, CONFIGS, FP16, FP32, OPERATORS
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs GPUs, or takes too long without one")

# S / W, K (or K / W) and N / W (or N). Most fp32 specs use exact integers: with so few summands, the summation order of
# plain torch may be more than twice as exact by chance.
SPECS = {
    "odd": dict(dtype=BF16, positions=37, k=51, n=29),
    "one sequence": dict(dtype=FP16, positions=40, k=32, n=48, batch=1),
    "no batch": dict(dtype=FP32, positions=33, k=19, n=21, batch=(), bias=False, exact=True),
    "batches of batches": dict(dtype=BF16, positions=5, k=64, n=16, batch=(3, 2)),
    "aligned": dict(dtype=BF16, positions=64, k=64, n=64, batch=1, bias=False),
    "one position": dict(dtype=FP32, positions=1, k=3, n=2, exact=True),
    "one of everything": dict(dtype=BF16, positions=1, k=1, n=1, batch=(), exact=True),
    "wide": dict(dtype=FP32, positions=3, k=2100, n=5, batch=1, exact=True),
    "no positions": dict(dtype=FP32, positions=0, k=5, n=3),
    "no sequences": dict(dtype=FP32, positions=4, k=5, n=3, batch=0),
}
LARGE = {
    "many tiles": dict(dtype=BF16, positions=1000, k=520, n=392),
    "aligned, many tiles": dict(dtype=BF16, positions=1024, k=512, n=768, batch=1),
    "fp32, many tiles": dict(dtype=FP32, positions=515, k=200, n=131, batch=3),
}

# The interpreter is slow, so CPU ranks run a selection.
ON_CPU = {
    (1, "default"): ["odd", "no positions", "no batch"],
    (1, "torch"): ["one sequence"],
    (2, "default"): ["odd", "one sequence", "no batch", "aligned", "wide", "no positions", "no sequences"],
    (2, "torch"): ["batches of batches", "no positions"],
    (2, "pulled late"): ["odd"],
    (2, "pulled at once"): ["one sequence"],
    (2, "tall tiles"): ["batches of batches"],
    (3, "default"): ["one position", "one of everything"],
    (3, "torch"): ["odd"],
    (3, "pulled at once"): ["batches of batches"],
    (3, "pushed"): ["odd"],
    (3, "chunks longer than a shard"): ["no batch"],
    (4, "pushed"): ["one position"],
}


@pytest.mark.parametrize("world_size, config, spec", [
    (world_size, config, spec) for world_size in (1, 2, 3, 4) for config in CONFIGS for spec in SPECS
    if ON_GPU or spec in ON_CPU.get((world_size, config), ())
])
def test_everything(world_size, config, spec):
    on_ranks(world_size, cases.computes, SPECS[spec], config)


@needs_gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("config", ["default", "pushed"])
@pytest.mark.parametrize("spec", LARGE)
def test_many_tiles(world_size, config, spec):
    on_ranks(world_size, cases.computes, LARGE[spec], config)


def test_layouts():
    on_ranks(2, cases.supports_any_layout)


@pytest.mark.parametrize("world_size", [1, 2])
def test_subsets_of_gradients(world_size):
    on_ranks(world_size, cases.computes_subsets_of_gradients)


def test_autograd():
    on_ranks(2, cases.supports_autograd)


def test_compile():
    on_ranks(2, cases.supports_compile)


@pytest.mark.parametrize("world_size, dtype", [(2, BF16), (3, FP32)])
def test_attention_block(world_size, dtype):
    on_ranks(world_size, cases.matches_unsharded_attention_block, dtype, 11, 2, 8, 24)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, cases.rejects_invalid_arguments)


@pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("config", ["default", "pushed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_cuda_graph(operator, config, world_size):
    on_ranks(world_size, cases.replays_with_new_data, operator, config)
