"""Test bodies for the warp-specialized kernel of group_gemm with fp8 operands; see test_scaled_specialized.py."""

import torch

from tdkernels import GroupGemmConfig, Tiles
from tdkernels.ops.experts.grouped_gemm import launch
from tests.ops.dense import specialized_support
from tests.ops.experts.grouped_gemm.scaled_cases import ScaledGrouped
from tests.ops.experts.grouped_gemm.specialized_cases import SPLITS, specialized

PLAIN = GroupGemmConfig(tiles=Tiles(128, 256, 128, num_stages=3))
CONFIG = GroupGemmConfig(tiles=Tiles(128, 256, 128, num_stages=3), warp_specialize=True)


def has_the_bits_of_the_plain_kernel(scaling, activation, fast, shapes, expected=True, **options):
    """Compare outputs with dequantized operands, and bits with the plain kernel.

    ``expected``: whether the warp-specialized kernel supports the operands
    """
    for repeat, (n, k) in enumerate(shapes):
        splits = SPLITS[repeat:] + SPLITS[:repeat]
        problem = ScaledGrouped(splits, n, k, scaling, activation, spare=5, seed=repeat, **options)
        with specialized(expected):
            output = problem.call(config=CONFIG, use_fast_accum=fast)
        problem.check(output)
        plain = problem.call(config=PLAIN, use_fast_accum=fast)
        assert torch.equal(output[: problem.used], plain[: problem.used]), (n, k)


def repeats(scaling, fast):
    """Compare the bits of many calls with many tiles and poisoned outputs."""
    problem = ScaledGrouped(4 * SPLITS, 1040, 2064, scaling, None)
    plain = problem.call(config=PLAIN, use_fast_accum=fast)
    for _ in range(30):
        poison = torch.full_like(plain, torch.nan)
        del poison
        assert torch.equal(problem.call(config=CONFIG, use_fast_accum=fast), plain)


def selects_by_default(scaling, expected, **options):
    """Check a call without a config. If the kernel is not selected, neither is its tile."""
    problem = ScaledGrouped([1030, 0, 1200, 1090], 2048, 272, scaling, **options)
    config = launch.config_for(problem.x, problem.w, None, None, problem.scales(fast=False))
    assert config.warp_specialize is expected and config.tiles.block_n == (256 if expected else 128)
    with specialized(expected):
        problem.check(problem.call())


def replays_in_a_graph(scaling):
    """Check replays of a CUDA graph with new scales and splits."""
    problem = ScaledGrouped(SPLITS, 528, 448, scaling)
    call = lambda config: problem.call(config=config)[: problem.used]  # noqa: E731

    def renew():
        problem.scale_x.uniform_(0.5, 2.0)
        problem.splits.copy_(problem.splits.roll(1))

    with specialized():
        call(CONFIG)
    specialized_support.replays_in_a_graph(renew, lambda: call(CONFIG), lambda: call(PLAIN))
