"""Test bodies for the warp-specialized kernel of group_gemm; see test_specialized.py."""

import contextlib

import pytest
import torch

import tdkernels
from tdkernels import GroupGemmConfig, Tiles
from tdkernels.ops.experts.grouped_gemm import launch, launch_specialized, launch_weights
from tdkernels.runtime import kernel_launch, local_workspace
from tests.ops.dense import specialized_support
from tests.ops.experts.grouped_gemm.oracle import Grouped
from tests.support.ranks import device

PLAIN = GroupGemmConfig(tiles=Tiles(128, 256, 64))
CONFIG = GroupGemmConfig(tiles=Tiles(128, 256, 64), warp_specialize=True)
# Groups that end at half a tile, one row before and after it, and at a tile; empty ones; one row; more than two tiles.
SPLITS = [64, 65, 63, 0, 128, 129, 127, 0, 0, 1, 300, 7]


@contextlib.contextmanager
def specialized(expected=True, launcher=launch_specialized, name="supports"):
    """Check that the launches of a ``with`` block, all of which are prepared there, are of the expected kernel.

    launcher, name: the function that says whether a launch is of the warp-specialized kernel
    """
    kernel_launch._local_workspace_of_stream.cache_clear()
    found, original = [], getattr(launcher, name)
    with pytest.MonkeyPatch.context() as patch:
        def supports(*args):
            found.append(original(*args))
            return found[-1]

        patch.setattr(launcher, name, supports)
        yield
    assert found and set(found) == {expected}, found


def operands(dtype, splits, n, k, w_is_kn=False, seed=0):
    """Return x with NaN in rows without a group, a weight and splits."""
    generator = torch.Generator(device()).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device(), dtype=dtype)

    used, experts = sum(splits), len(splits)
    x = draw(used + 5, k)
    x[used:] = torch.nan
    w = draw(experts, k, n).transpose(1, 2) if w_is_kn else draw(experts, n, k)
    return x, w, torch.tensor(splits, dtype=torch.int32, device=device())


def computes(dtype, activation, shapes):
    for n, k in shapes:
        problem = Grouped(dtype, SPLITS, n, k, activation, spare=3)
        with specialized(), torch.no_grad():
            problem.check({"output": problem.call(config=CONFIG)})


def has_the_bits_of_the_plain_kernel(dtype, activation, w_is_kn, shapes):
    for repeat, (n, k) in enumerate(2 * shapes):
        splits = SPLITS[repeat:] + SPLITS[:repeat]
        x, w, counts = operands(dtype, splits, n, k, w_is_kn, repeat)
        with specialized():
            found = launch.product(x, w, counts, activation, activation is not None, CONFIG)
        expected = launch.product(x, w, counts, activation, activation is not None, PLAIN)
        for one, other in zip(found, expected, strict=True):
            assert one is other is None or torch.equal(one[: sum(splits)], other[: sum(splits)]), (n, k)


def has_the_bits_for_few_groups(splits):
    """Check groups with few rows, or one group, for a weight that is a part of another one."""
    x, wide, counts = operands(torch.bfloat16, splits, 272, 512)
    w, x = wide[..., 128:384], x[:, 128:384].contiguous()
    with specialized():
        y = launch.product(x, w, counts, config=CONFIG)[0]
    expected = launch.product(x, w, counts, config=PLAIN)[0]
    assert torch.equal(y[: sum(splits)], expected[: sum(splits)])


def is_the_default():
    """Check output and gradients of a call without a config: the kernel computes y and dx."""
    problem = Grouped(torch.bfloat16, [1030, 0, 1200, 1090], 2048, 2064, spare=2)
    with specialized():
        problem.check(problem.run())


def replays_in_a_graph():
    """Check replays of a CUDA graph of three calls with new rows and splits."""
    x, w, splits = operands(torch.bfloat16, SPLITS, 528, 448)
    call = lambda config: launch.product(x, w, splits, config=config)[0][: sum(SPLITS)]  # noqa: E731

    def renew():
        x.normal_()
        splits.copy_(splits.roll(1))

    call(CONFIG)
    specialized_support.replays_in_a_graph(renew, lambda: call(CONFIG), lambda: call(PLAIN))


def runs_on_two_streams():
    """Check calls with one cached launch on two streams at the same time: each has its own work queue.

    The replays of a graph on one of the streams also have their own.
    """
    x, w, splits = operands(torch.bfloat16, 4 * SPLITS, 1040, 448)
    used, expected = 4 * sum(SPLITS), tdkernels.group_gemm(x, w, splits, config=PLAIN)
    rows, dy = x.clone(), torch.zeros_like(expected)
    rows[used:] = 0
    dy[:used] = expected[:used]
    gradient = lambda config: launch_weights.weight_gradient(dy, rows, splits, len(splits), config)  # noqa: E731
    of_weight = gradient(PLAIN)
    for _ in range(2):  # after two calls the launch is in the call cache, which does not depend on the stream
        tdkernels.group_gemm(x, w, splits, config=CONFIG)
        gradient(CONFIG)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = tdkernels.group_gemm(x, w, splits, config=CONFIG)
        replayed_gradient = gradient(CONFIG)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found, found_gradients = [], []
    for turn in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                if turn < 10 or stream is streams[0]:
                    found.append(tdkernels.group_gemm(x, w, splits, config=CONFIG))
                    found_gradients.append(gradient(CONFIG))
                else:
                    replayed.fill_(torch.nan)
                    replayed_gradient.fill_(torch.nan)
                    graph.replay()
                    found.append(replayed.clone())
                    found_gradients.append(replayed_gradient.clone())
    torch.cuda.synchronize()
    assert all(torch.equal(result[:used], expected[:used]) for result in found)
    for result in found_gradients:  # another order of the sums
        assert (result - of_weight).float().norm() < 1e-2 * of_weight.float().norm()
    for slab in (local_workspace._slabs[x.device][0], *local_workspace._full):
        assert not slab.any(), "a launch has not reset its work queue"


def cuts_off_splits(splits):
    """Check splits that are negative, or have more rows than x."""
    x, w, _ = operands(torch.bfloat16, [140], 272, 128)
    w = w.repeat(len(splits), 1, 1)
    counts = torch.tensor(splits, dtype=torch.int64, device=device())
    found, expected = (launch.product(x, w, counts, config=config)[0] for config in (CONFIG, PLAIN))
    used = min(sum(max(split, 0) for split in splits), 140)
    assert torch.equal(found[:used], expected[:used])


def falls_back(make):
    """Check a weight [5, N, K] that the kernel does not support; ``make`` takes random elements [10, 320, 128]."""
    w = make(torch.randn(10, 320, 128, device=device(), dtype=torch.bfloat16))
    splits = torch.tensor([70, 0, 80, 3, 128], dtype=torch.int32, device=device())
    x = torch.randn(281, w.shape[2], device=device(), dtype=w.dtype)
    with specialized(expected=False):
        y = launch.product(x, w, splits, config=CONFIG)[0]
    assert torch.equal(y, launch.product(x, w, splits, config=PLAIN)[0])
