"""Test bodies for the warp-specialized kernel of the weight gradient; see test_weights_specialized.py."""

import functools

import torch

from tdkernels import GroupGemmConfig, Tiles
from tdkernels.ops.experts.grouped_gemm import launch_weights
from tdkernels.rounding import cdiv
from tests.ops.dense import specialized_support
from tests.ops.experts.grouped_gemm import specialized_cases
from tests.ops.experts.grouped_gemm.oracle import Grouped
from tests.ops.experts.grouped_gemm.specialized_cases import SPLITS
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import device

# The portable kernel with the same order of sums: the rows of a group by 16.
PLAIN = GroupGemmConfig(tiles=Tiles(128, 256, 64, num_warps=8, num_stages=3))
CONFIG = GroupGemmConfig(tiles=Tiles(128, 256, 64), warp_specialize=True)

specialized = functools.partial(specialized_cases.specialized, launcher=launch_weights, name="specializes")


def gradient(operands, config):
    dy, x, splits = operands
    with poisoned_outputs():
        return launch_weights.weight_gradient(dy, x, splits, splits.shape[0], config)


def operands(dtype, splits, n, k, seed=0, spare=5):
    """Return dy [R, n] and x [R, k] with NaN in ``spare`` rows without a group, and the splits."""
    generator = torch.Generator(device()).manual_seed(seed)
    used = sum(splits)
    rows = [torch.randn(used + spare, width, generator=generator, device=device()).to(dtype) for width in (n, k)]
    for each in rows:
        each[used:] = torch.nan
    return *rows, torch.tensor(splits, dtype=torch.int32, device=device())


def computes(dtype, shapes):
    """Check values against fp64, and bits against the portable kernel, with the groups in several orders."""
    for repeat, (n, k) in enumerate(2 * shapes):
        splits = SPLITS[repeat:] + SPLITS[:repeat]
        given = operands(dtype, splits, n, k, repeat)
        with specialized():
            found = gradient(given, CONFIG)
        assert torch.equal(found, gradient(given, PLAIN)), (n, k)
        dy, x = (torch.split(rows[: sum(splits)].double(), splits) for rows in given[:2])
        expected = torch.stack([of_dy.T @ of_x for of_dy, of_x in zip(dy, x, strict=True)])
        largest = torch.stack([of_dy.abs().T @ of_x.abs() for of_dy, of_x in zip(dy, x, strict=True)])
        eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        # Tensor cores cut off the terms of a sum of 16 products, at most at 2**-22 of the largest sum so far.
        allowed = eps * (expected.abs() + least) + cdiv(max(splits), 16) * 2**-22 * largest
        assert ((found.double() - expected).abs() <= allowed).all(), (n, k)


def keeps_groups_apart(value):
    """Check that a row with ``value``, NaN or inf, changes the gradient of its own group only."""
    splits = [70, 3, 64, 1, 140, 155]
    dy, x, counts = operands(torch.bfloat16, splits, 136, 264)
    expected, begin = gradient((dy, x, counts), CONFIG), 0
    for group, rows in enumerate(splits):
        for of in (0, 1):
            changed = [dy.clone(), x.clone()]
            changed[of][begin] = value
            found = gradient((*changed, counts), CONFIG)
            others = [other for other in range(len(splits)) if other != group]
            assert torch.equal(found[others], expected[others]) and not found[group].isfinite().any()
        begin += rows


def computes_few_rows(splits):
    given = operands(torch.bfloat16, splits, 272, 520, spare=1)
    with specialized():
        found = gradient(given, CONFIG)
    assert torch.equal(found, gradient(given, PLAIN))


def cuts_off_splits(splits):
    """Check splits that are negative, or have more rows than x."""
    dy, x, _ = operands(torch.bfloat16, [140], 272, 128, spare=0)
    given = dy, x, torch.tensor(splits, dtype=torch.int64, device=device())
    assert torch.equal(gradient(given, CONFIG), gradient(given, PLAIN))


def replays_in_a_graph():
    """Check replays of a CUDA graph of three calls with new rows and splits."""
    given = operands(torch.bfloat16, SPLITS, 528, 448)

    def renew():
        given[0].normal_()
        given[1].normal_()
        given[2].copy_(given[2].roll(1))

    call = lambda config: launch_weights.weight_gradient(*given, len(SPLITS), config)  # noqa: E731
    call(CONFIG)
    specialized_support.replays_in_a_graph(renew, lambda: call(CONFIG), lambda: call(PLAIN))


def falls_back(n, k, dtype):
    given = operands(dtype, [70, 0, 80], n, k)
    with specialized(expected=False):
        found = gradient(given, CONFIG)
    assert torch.equal(found, gradient(given, PLAIN))


def is_the_default():
    """Check output and gradients of a call without a config."""
    problem = Grouped(torch.bfloat16, [1030, 0, 1200, 1090], 2048, 2064, spare=2)
    with specialized():
        problem.check(problem.run())
