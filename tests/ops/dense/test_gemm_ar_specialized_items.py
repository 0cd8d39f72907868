"""Work items of the warp-specialized kernel of gemm_ar, and its default config."""

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch

from tdkernels.ops.common.tile_config import LARGE, SPECIALIZED_TILE
from tdkernels.ops.dense.gemm_ar import config as gemm_ar_config
from tdkernels.ops.dense.gemm_ar.specialized import exchange, places
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

SPLIT, PARTS = 4, 2
BLOCK_M, BLOCK_N = SPECIALIZED_TILE


def functions():
    """Return the functions of the kernel for integers of Python, with tiles in the order of their numbers."""
    found = places.grid_of, places.place_of, places.place_of_item, exchange._work_of
    gl = SimpleNamespace(
        where=lambda condition, one, other: one if condition else other, minimum=min, maximum=max, constexpr=int
    )
    names = {
        "gl": gl, "gluon": SimpleNamespace(jit=lambda function: function), "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N,
        "swizzle": lambda tile, tiles_m, tiles_n, group_m: (tile // tiles_n, tile % tiles_n),
    }
    exec(compile(ast.parse("\n".join(inspect.getsource(each.fn) for each in found)), exchange.__file__, "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("bundles, delay", [(1, 0), (1, 1), (5, 0), (5, 1), (5, 4), (5, 5), (9, 3)])
def test_each_part_is_added_and_received_once_and_in_order(ranks, bundles, delay):
    work_of, me = functions()._work_of, 1
    items = [
        work_of(item, bundles, delay, me, SPLIT, PARTS, ranks)
        for item in range(bundles * (SPLIT + (ranks - 1) * PARTS))
    ]
    peers = [rank for rank in range(ranks) if rank != me]
    every = [(True, bundle, me, part) for bundle in range(bundles) for part in range(SPLIT)]
    every += [(False, bundle, peer, part) for bundle in range(bundles) for peer in peers for part in range(PARTS)]
    assert sorted((bool(adds), *rest) for adds, *rest in items) == sorted(every)
    added = -1  # number of bundles that have been added, less one
    for adds, bundle, _, part in items:
        if adds:
            assert bundle in (added, added + 1)
            added = bundle
        else:
            # Otherwise the ranks could wait for each other: the numbers of items are the same on all of them.
            assert bundle + delay <= added or added == bundles - 1
            assert bundle <= added and part < PARTS


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("m, n", [(128, 256), (129, 257), (700, 1300), (1024, 2048)])
def test_each_owner_gets_each_of_its_tiles_once(ranks, m, n):
    code, problem = functions(), (m, n, 3, 8)
    tiles = cdiv(m, BLOCK_M) * cdiv(n, BLOCK_N)
    bundles = cdiv(tiles, ranks)
    for me in range(ranks):
        found = {}
        for item in range(bundles * ranks):
            slot = (me + 1 + item % ranks) % ranks, item // ranks  # the owner, and the bundle
            assert slot not in found
            found[slot] = code.place_of_item(item, problem, me, ranks)
        for tile in range(tiles):
            assert found[tile % ranks, tile // ranks] == code.place_of(tile, problem)
        assert all(row < m and col < n for row, col in found.values())


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that the operands are on a Hopper GPU."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)


@pytest.mark.parametrize("rows, n, k, world_size, transport, specialized", [
    (8192, 8192, 3584, 8, "direct", True), (8192, 8192, 3584, 2, "direct", True),
    (8192, 8200, 3584, 8, "forward", False), (8192, 8200, 3584, 2, "direct", False),
    (8192, 8192, 3584, 16, "forward", False), (64, 8192, 3584, 8, "forward", False),
])
def test_default_config(hopper, rows, n, k, world_size, transport, specialized):
    device = torch.device("cuda", 0)
    config = gemm_ar_config.default_config(rows, n, k, torch.bfloat16, device, world_size)
    assert (config.transport, config.warp_specialize) == (transport, specialized)
    if specialized:
        assert config.tiles.block_n == LARGE.block_n
