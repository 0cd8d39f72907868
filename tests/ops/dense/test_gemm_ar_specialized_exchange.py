"""Work items of the warp-specialized kernel of gemm_ar, on the CPU and in random order, and its default config."""

import pytest
import torch

from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.dense.gemm_ar import config as gemm_ar_config
from tdkernels.rounding import cdiv
from tests.ops.dense.gemm_ar_exchange import BLOCK_M, BLOCK_N, PARTS, SOURCE, SPLIT, ExchangeRun, compiled
from tests.ops.dense.specialized_support import pretend_hopper
from tests.support.mutants import check_found
from tests.support.subset import THOROUGH

SEEDS = 50 if THOROUGH else 8


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("bundles, delay", [(1, 0), (1, 1), (5, 0), (5, 1), (5, 4), (5, 5), (9, 3)])
def test_each_part_is_added_and_received_once_and_in_order(ranks, bundles, delay):
    work_of, me = compiled()["_work_of"], 1
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
@pytest.mark.parametrize("m, n", [(8, 4), (9, 5), (45, 21), (64, 32)])
def test_each_owner_gets_each_of_its_tiles_once(ranks, m, n):
    code, problem = compiled(), (m, n, 3, 8)
    tiles = cdiv(m, BLOCK_M) * cdiv(n, BLOCK_N)
    bundles = cdiv(tiles, ranks)
    for me in range(ranks):
        found = {}
        for item in range(bundles * ranks):
            slot = (me + 1 + item % ranks) % ranks, item // ranks  # the owner, and the bundle
            assert slot not in found
            found[slot] = code["place_of_item"](item, problem, me, ranks)
        for tile in range(tiles):
            assert found[tile % ranks, tile // ranks] == code["place_of"](tile, problem)
        assert all(row < m and col < n for row, col in found.values())


@pytest.mark.parametrize("m, n", [(8, 4), (13, 7), (30, 10), (40, 16)])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_exchange_in_any_order(ranks, m, n, delay):
    for seed in range(SEEDS):
        ExchangeRun(seed, ranks, m, n, delay, 1 + seed % 3)()


MUTANTS = {
    "partials are read before they arrive": (
        "    wait_for_ranks(ctx, signal_at(ctx, half, bundle), per_source, signal, WARPS)\n", "",
    ),
    "the signals of another bundle are awaited": (
        "signal_at(ctx, half, bundle), per_source", "signal_at(ctx, half, max(bundle - 1, 0)), per_source",
    ),
    "sums are read before they arrive": (
        "    wait_for_rank(ctx, signal_at(ctx, half, slot), signal, owner, WARPS)\n", "",
    ),
    "a signal is set by the first part": ("flag_at(ctx, bundle), SPLIT, WARPS", "flag_at(ctx, bundle), 1, WARPS"),
    "sums are stored in the slots of partials": (
        "slot = me * per_source + bundles + bundle", "slot = me * per_source + bundle",
    ),
    "a tile is received from another owner": (
        "owner = gl.where(adds, me, (me + 1 + number // PARTS) % RANKS)",
        "owner = gl.where(adds, me, (me + 1 + number % PARTS) % RANKS)",
    ),
    "tiles are received before they are added": (
        "    taken = gl.where(both, period, ", "    taken = gl.where(both, (period + 2) % (bundles - delay), ",
    ),
    "the first parts are added by all items": (
        "part = gl.where(rest < 0, item % SPLIT, number)", "part = gl.where(rest < 0, 0, number)",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_errors_are_found(mutant):
    check_found(lambda seed, source: ExchangeRun(seed, 3, 30, 10, 1, 1 + seed % 3, source), SOURCE, MUTANTS[mutant])


@pytest.fixture
def hopper(monkeypatch):
    pretend_hopper(monkeypatch)


@pytest.mark.parametrize("rows, n, k, world_size, transport, specialized", [
    (8192, 8192, 3584, 8, "direct", True), (8192, 8192, 3584, 2, "direct", True),
    (8192, 8200, 3584, 8, "forward", False), (8192, 8200, 3584, 2, "direct", False),
    (8192, 8192, 3584, 16, "forward", False), (64, 8192, 3584, 8, "direct", False),
])
def test_default_config(hopper, rows, n, k, world_size, transport, specialized):
    device = torch.device("cuda", 0)
    config = gemm_ar_config.default_config(rows, n, k, torch.bfloat16, device, world_size)
    assert (config.transport, config.warp_specialize) == (transport, specialized)
    if specialized:
        assert config.tiles.block_n == LARGE.block_n
