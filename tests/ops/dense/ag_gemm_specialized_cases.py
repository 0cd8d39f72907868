"""Test bodies for the warp-specialized kernel of ag_gemm. Every rank runs them; see test_ag_gemm_specialized.py."""

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import AgGemmConfig, Tiles
from tdkernels.ops.dense.ag_gemm import launch, launch_specialized
from tdkernels.ops.dense.ag_gemm.config import has_tiles_across
from tests.ops.dense import cases, specialized_support
from tests.support.dense_oracle import Case
from tests.support.ranks import device

PLAIN = {"transport": "push", "tiles": Tiles(128, 256, 64, num_stages=4), "num_comm_sms": 6}
CONFIG = {**PLAIN, "warp_specialize": True}


@contextlib.contextmanager
def specialized(expected=True):
    """Count the launches of each kernel in a ``with`` block, and check that only the expected one was prepared."""
    specialized_support.forget_launches(("ag_gemm", 2), ("gather", 1))
    prepared = []
    with pytest.MonkeyPatch.context() as patch:
        def prepare(*args, original=launch_specialized.prepare):
            prepared.append(True)
            return original(*args)

        def arguments(*args, original=launch._arguments):
            prepared.append(False)
            return original(*args)

        patch.setattr(launch_specialized, "prepare", prepare)
        patch.setattr(launch, "_arguments", arguments)
        yield
    assert set(prepared) == {expected}, prepared


def computes(dtype, shapes, bias, transport):
    """Check output and gradients."""
    config = {**CONFIG, "transport": transport}
    with specialized():
        cases.computes("ag_gemm", dtype, shapes, bias=bias, **config)


def computes_with_a_transposed_weight(dtype):
    case = Case("ag_gemm", dtype, 130, 528, 200)
    case.weight = cases.transposed(case.weight.detach(), torch.nan).requires_grad_()
    with specialized():
        case.check(case.run(config=AgGemmConfig(**CONFIG)))


def computes_the_backward_of_gemm_rs(dtype, n):
    """Check a backward that keeps the gathered rows, with the layout [K, N] of the weight."""
    case = Case("gemm_rs", dtype, 1024, n, 1280)
    with specialized():
        case.check(case.run())


def keeps_the_gathered_rows(rows, n, k, chunk_tiles, repeats):
    """Check the output and the gathered rows of calls whose chunks have several signals, with late ranks."""
    delays = random.Random(dist.get_rank())
    config, plain = (AgGemmConfig(**{**one, "chunk_tiles": chunk_tiles}) for one in (CONFIG, PLAIN))
    assert launch_specialized.num_slices(k, config) > 1
    weight = _random(n, k)
    for number in range(repeats):
        x = _random(rows, k)
        time.sleep(delays.uniform(0, 0.01))
        y, full = tdkernels.ag_gemm(x, weight, return_gathered=True, config=config)
        _, shards = tdkernels.ag_gemm_ref(x, weight, return_gathered=True)
        assert torch.equal(full, shards) and torch.equal(y, tdkernels.ag_gemm(x, weight, config=plain)), number
    tdkernels.synchronize()


def _random(*shape):
    return torch.randn(*shape, device=device(), dtype=torch.bfloat16)


def computes_several_weights(dim, return_gathered, transport, k=200, shape=(3, 128)):
    """Check a list of weights, each with a bias, compared with the plain kernel."""
    config, plain = ({**one, "transport": transport} for one in (CONFIG, PLAIN))
    x = _random(*shape, k)
    weights, biases = [_random(n, k) for n in (272, 784, 16)], [_random(n) for n in (272, 784, 16)]
    call = lambda config: tdkernels.ag_gemm(  # noqa: E731
        x, weights, biases, dim=dim, return_gathered=return_gathered, config=AgGemmConfig(**config)
    )
    for _ in range(3):
        x.normal_()
        with specialized() if _ == 0 else contextlib.nullcontext():
            found = call(config)
        expected = call(plain)
        if return_gathered:
            found, expected = [*found[0], found[1]], [*expected[0], expected[1]]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# The last ones have whole tiles and halves: more tiles than programs.
_SHAPES = [(384, 528, 320), (100, 272, 72), (8, 16, 8), (1024, 1040, 640), (1152, 4624, 136), (2048, 3088, 2120)]
# Tiles have rows of several shards of two to four ranks.
_SHAPES_ACROSS = [(40, 528, 320), (144, 272, 72), (8, 16, 1096), (48, 4624, 2120), (136, 1040, 2056), (272, 784, 200)]


def has_tiles_across_shards(repeats, by_turns=False):
    """``has_the_bits_of_the_plain_kernel`` for tiles with rows of several shards."""
    ranks = dist.get_world_size()
    assert all(has_tiles_across(rows, ranks) for rows, *_ in _SHAPES_ACROSS)
    has_the_bits_of_the_plain_kernel(repeats, by_turns, _SHAPES_ACROSS)


def has_the_bits_of_the_plain_kernel(repeats, by_turns=False, shapes=_SHAPES):
    """Check many calls with random operands and poisoned memory.

    ``by_turns``: for each shape, one of the ranks runs the kernel that is not specialized, also in later calls, which
    reuse the launch.
    """
    ranks, me = dist.get_world_size(), dist.get_rank()
    delays = random.Random(me)
    for number in range(repeats):
        rows, n, k = shapes[number % len(shapes)]
        x, weight = _random(rows, k), _random(n, k)
        bias = _random(n) if number % 3 else None  # differs between ranks
        poison = [torch.full((ranks * rows, n), torch.nan, device=device(), dtype=torch.bfloat16) for _ in range(2)]
        del poison
        config = {"num_comm_sms": [1, 6, 17][number // 6 % 3], "chunk_tiles": 1 + number // 6 % 2}
        time.sleep(delays.uniform(0, 0.002))
        with pytest.MonkeyPatch.context() as patch:
            if by_turns and number % ranks == me:
                patch.setattr(launch_specialized, "supports", lambda *_: False)
            first = number < len(shapes) and not by_turns
            with specialized() if first else contextlib.nullcontext():
                y = tdkernels.ag_gemm(x, weight, bias, config=AgGemmConfig(**{**CONFIG, **config}))
        plain = tdkernels.ag_gemm(x, weight, bias, config=AgGemmConfig(**{**PLAIN, **config}))
        assert torch.equal(y, plain), f"call {number}, rows={rows} n={n} k={k}"
    tdkernels.synchronize()


def replays_in_a_graph(rows=256):
    """Check replays of a CUDA graph of three calls with new operands."""
    x, weight = _random(rows, 448), _random(528, 448)
    call = lambda config: tdkernels.ag_gemm(x, weight, config=AgGemmConfig(**config))  # noqa: E731
    with specialized():
        call(CONFIG)
    specialized_support.replays_in_a_graph(x.normal_, lambda: call(CONFIG), lambda: call(PLAIN))


def falls_back(n, k, dtype):
    """Check operands that the kernel does not support."""
    with specialized(expected=False):
        cases.computes("ag_gemm", dtype, [(37, n, k)], **CONFIG)


def computes_with_an_unaligned_weight_on_a_rank():
    """Check a group in which one rank cannot run the kernel, because TMA cannot load its weight."""
    case = Case("ag_gemm", torch.bfloat16, 140, 272, 2056)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last:
        case.weight = cases.misaligned(case.weight.detach(), torch.nan).requires_grad_()
    for _ in range(3):
        with specialized(not is_last) if _ == 0 else contextlib.nullcontext():
            case.check(case.run(config=AgGemmConfig(**CONFIG)))


def falls_back_for_short_segments():
    """Check dim=1 with segments that end within a tile."""
    x, weight = _random(2, 200, 2056), _random(272, 2056)
    calls = [tdkernels.ag_gemm(x, weight, dim=1, config=AgGemmConfig(**config)) for config in (CONFIG, PLAIN)]
    assert torch.equal(*calls)
