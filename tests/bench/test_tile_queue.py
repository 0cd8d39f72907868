"""The model of the tile queue of ag_gemm: its order is that of the kernel, and it predicts the recorded rows."""

import pytest

from bench.dense import tile_queue
from bench.dense.tile_queue import BLOCK_M, BLOCK_N, PROGRAMS, Schedule
from tests.ops.dense.test_ag_gemm_order import order


@pytest.mark.parametrize("tiles_m, tiles_n, ranks, chunk_tiles, group_m", [
    (3, 2, 3, 2, 2), (4, 3, 2, 1, 3), (2, 1, 4, 2, 8),
])
def test_order_of_the_kernel(tiles_m, tiles_n, ranks, chunk_tiles, group_m):
    schedule = Schedule(tiles_m * BLOCK_M, tiles_n * BLOCK_N, 64, ranks, chunk_tiles, group_m)
    tiles = order(0, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
    expected = [(-source % ranks, row // chunk_tiles, column) for source, row, column in tiles]
    assert schedule.places() == expected and len(expected) == schedule.tiles


def test_time_without_waits():
    """Whole waves of tiles, and the last one in halves."""
    tiles = 2 * PROGRAMS
    schedule = Schedule(tiles * BLOCK_M // 2, BLOCK_N, 4096, 2)
    tile = 2 * BLOCK_M * BLOCK_N * 4096 / tile_queue._SM_FLOPS + tile_queue._TILE_S
    assert schedule.seconds(1e18, tiles) == pytest.approx(tile_queue._START_S + 2 * tile)
    half = schedule.items(tiles - 1)[-2:]
    assert half == [(1, half[0][1], tile_queue._HALF)] * 2


def test_time_of_a_slow_link():
    schedule = Schedule(1024, 512, 8192, 8)
    sent = 7 * 1024 * 8192 * 2 / 1e9
    assert sent < schedule.seconds(1e9) < sent * 1.05


def test_recorded_rows(capsys):
    """The rows are from several GPUs, and some of earlier numbers of halves. Most are newer than the model."""
    tile_queue.main()
    lines = capsys.readouterr().out.splitlines()
    ratios = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert len(ratios) >= 24 and all(0.93 < ratio < 1.08 for ratio in ratios), ratios
    assert sum(line.startswith("8 H200, ") for line in lines) == 8
