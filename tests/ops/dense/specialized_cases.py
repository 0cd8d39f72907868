"""Test bodies for the warp-specialized kernels of gemm_rs and gemm_ar; see test_specialized.py."""

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import GemmArConfig, GemmRsConfig, Tiles
from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.dense.gemm_ar import launch as gemm_ar_launch
from tdkernels.ops.dense.gemm_rs import launch as gemm_rs_launch
from tdkernels.ops.dense.gemm_rs import launch_specialized
from tests.ops.dense import cases, specialized_support
from tests.support.dense_oracle import Case
from tests.support.ranks import device

PLAIN = {"transport": "direct", "tiles": Tiles(128, 256, 64, num_stages=3)}
CONFIG = {**PLAIN, "warp_specialize": True}
OF_GEMM_AR = {"exchange": "two_shot"}  # a small M would select another
LAUNCHES = {"gemm_rs": gemm_rs_launch, "gemm_ar": gemm_ar_launch}
CONFIGS = {"gemm_rs": GemmRsConfig, "gemm_ar": GemmArConfig}


@contextlib.contextmanager
def specialized(operator="gemm_rs", expected=True):
    """Count the launches of each kernel in a ``with`` block, and check that only the expected one was prepared."""
    specialized_support.forget_launches(("gemm_rs", 2) if operator == "gemm_rs" else ("gemm_ar direct", 2))
    launch, prepared = LAUNCHES[operator], []
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch.launch_specialized, launch.launch_direct):
            def prepare(*args, module=module, original=module.prepare):
                prepared.append(module is launch.launch_specialized)
                return original(*args)

            patch.setattr(module, "prepare", prepare)
        yield
    assert set(prepared) == {expected}, prepared


def fields_of(operator):
    """Return the fields of a config that differ from the default."""
    return CONFIG | (OF_GEMM_AR if operator == "gemm_ar" else {})


def call(operator, x, weight, bias, config):
    return getattr(tdkernels, operator)(x, weight, bias, config=CONFIGS[operator](**config))


def computes(operator, dtype, shapes, bias):
    """Check output and gradients."""
    with specialized(operator):
        cases.computes(operator, dtype, shapes, bias=bias, **fields_of(operator))


def computes_with_a_transposed_weight(operator, dtype):
    case = Case(operator, dtype, 130, 272, 200)
    case.weight = cases.transposed(case.weight.detach(), torch.nan).requires_grad_()
    with specialized(operator):
        case.check(case.run(config=CONFIGS[operator](**CONFIG)))


def computes_rows_of_segments():
    """Check dim=1: the kernel reads rows of x where they are."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator(device()).manual_seed(0)
    x = torch.randn(ranks, 3, 128 * ranks, 192, generator=generator, device=device(), dtype=torch.bfloat16)
    weight = torch.randn(ranks, 272, 192, generator=generator, device=device(), dtype=torch.bfloat16)
    with specialized():
        z = tdkernels.gemm_rs(x[me], weight[me], dim=1, config=GemmRsConfig(**CONFIG))
    plain = tdkernels.gemm_rs(x[me], weight[me], dim=1, config=GemmRsConfig(**PLAIN))
    exact = torch.einsum("rbsk,rnk->bsn", x.double(), weight.double()).chunk(ranks, 1)[me]
    assert torch.equal(z, plain) and (z - exact).norm() < 1e-2 * exact.norm()


_SHAPES = [(384, 528, 320), (100, 272, 72), (8, 16, 8), (1024, 1040, 640)]
# The last tile row of a shard has at most 64 rows.
_SHAPES_IN_PAIRS = [(48, 528, 320), (144, 272, 72), (192, 1040, 640), (33, 16, 8), (320, 784, 2056), (64, 4624, 136)]


def sends_halves_of_tiles_to_two_ranks(repeats, by_turns=False):
    """``has_the_bits_of_the_plain_kernel`` for tiles whose halves belong to two ranks."""
    ranks = dist.get_world_size()
    for rows, n, k in _SHAPES_IN_PAIRS:
        x = torch.empty(rows * ranks, k, device=device(), dtype=torch.bfloat16)
        assert launch_specialized._is_in_pairs(x, n, ranks, LARGE)
    has_the_bits_of_the_plain_kernel("gemm_rs", repeats, by_turns, _SHAPES_IN_PAIRS)


def has_the_bits_of_the_plain_kernel(operator, repeats, by_turns=False, shapes=_SHAPES):
    """Check many calls with random operands and poisoned memory.

    ``by_turns``: for each shape, one of the ranks runs the kernel that is not specialized, also in later calls, which
    reuse the launch.
    """
    ranks, me = dist.get_world_size(), dist.get_rank()
    delays = random.Random(me)
    for number in range(repeats):
        rows, n, k = shapes[number % len(shapes)]
        rows_of_x = rows * ranks if operator == "gemm_rs" else rows
        x = torch.randn(rows_of_x, k, device=device(), dtype=torch.bfloat16)
        weight = torch.randn(n, k, device=device(), dtype=torch.bfloat16)
        bias = torch.randn(n, device=device(), dtype=torch.bfloat16) if number % 3 else None  # differs between ranks
        poison = [torch.full((rows, n), torch.nan, device=device(), dtype=torch.bfloat16) for _ in range(2)]
        del poison
        time.sleep(delays.uniform(0, 0.002))
        with pytest.MonkeyPatch.context() as patch:
            if by_turns and number % ranks == me:
                patch.setattr(LAUNCHES[operator].launch_specialized, "supports", lambda *_: False)
            z = call(operator, x, weight, bias, CONFIG)
        plain = call(operator, x, weight, bias, PLAIN)
        assert torch.equal(z, plain), f"call {number}, rows={rows} n={n} k={k}"
    tdkernels.synchronize()


def replays_in_a_graph(operator, k=448, expected=PLAIN, rows_of_rank=256):
    """Check replays of a CUDA graph of three calls with new operands. ``expected``: config of eager calls."""
    rows = rows_of_rank * dist.get_world_size() if operator == "gemm_rs" else 1000
    x = torch.empty(rows, k, device=device(), dtype=torch.bfloat16)
    weight = torch.randn(528, k, device=device(), dtype=torch.bfloat16)
    run = lambda config: call(operator, x, weight, None, config)  # noqa: E731
    run(CONFIG)
    specialized_support.replays_in_a_graph(x.normal_, lambda: run(CONFIG), lambda: run(expected))


def replays_split_k_in_a_graph(operator):
    """Check replays of calls whose tiles are split along K. The bits are those of eager calls."""
    with specialized_support.chosen_splits() as found, specialized(operator):
        replays_in_a_graph(operator, 4096, CONFIG)
    assert found[0].num_splits > 1


def splits_tiles_along_k(operator, repeats, by_turns=False):
    """Check many calls with random operands and poisoned memory whose last tiles are split along K.

    The last shape has whole tiles, too, more than a wave in all. ``by_turns``: one of the ranks runs the kernel that is
    not specialized.
    """
    ranks, me = dist.get_world_size(), dist.get_rank()
    large = (1152, 2320, 6400) if operator == "gemm_rs" else (2000, 2320, 6400)
    shapes = [(200, 528, 3200), (460, 272, 6400), (600, 528, 4104), (512, 784, 8192), large]
    delays = random.Random(me)
    for number in range(repeats):
        rows, n, k = shapes[number % len(shapes)]
        rows = rows * ranks if operator == "gemm_rs" else rows
        is_plain = by_turns and number % ranks == me
        x = torch.randn(rows, k, device=device(), dtype=torch.bfloat16)
        weight = torch.randn(n, k, device=device(), dtype=torch.bfloat16)
        bias = torch.randn(n, device=device(), dtype=torch.bfloat16) if number % 3 else None
        poison = [torch.full((48 << 20,), torch.nan, device=device(), dtype=torch.bfloat16) for _ in range(2)]
        del poison
        time.sleep(delays.uniform(0, 0.002))
        with specialized_support.chosen_splits() as found, specialized(operator, not is_plain):
            with pytest.MonkeyPatch.context() as patch:
                if is_plain:
                    patch.setattr(LAUNCHES[operator].launch_specialized, "supports", lambda *_: False)
                z, *again = (call(operator, x, weight, bias, CONFIG) for _ in range(3))
        if not is_plain:
            assert len(found) == 1 and found[0].num_splits > 1, found
            assert (found[0].whole_tiles > 0) == ((rows, n, k)[1:] == large[1:]), found
        plain = call(operator, x, weight, bias, PLAIN)
        assert torch.equal(z, again[0]) and torch.equal(z, again[1]), f"call {number}, rows={rows} n={n} k={k}"
        assert (z.float() - plain.float()).norm() < 4e-3 * plain.float().norm()
    tdkernels.synchronize()


def is_not_split_in_the_batch_invariant_mode(operator):
    """Check that no tile is split in the batch-invariant mode, in a call that splits tiles otherwise."""
    x = torch.randn(1024, 4096, device=device(), dtype=torch.bfloat16)
    weight = torch.randn(272, 4096, device=device(), dtype=torch.bfloat16)
    config = fields_of(operator)
    with specialized_support.chosen_splits() as found, specialized(operator):
        call(operator, x, weight, None, config)
        with tdkernels.batch_invariant():
            call(operator, x, weight, None, config)
    assert len(found) == 1 and found[0] is not None


def falls_back(operator, n, k, dtype):
    """Check operands that the kernel does not support."""
    with specialized(operator, expected=False):
        cases.computes(operator, dtype, [(37, n, k)], **fields_of(operator))
