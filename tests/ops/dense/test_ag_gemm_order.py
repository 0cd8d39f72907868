"""The order in which ag_gemm computes tiles: each tile once, by groups of tile rows, as the chunks arrive."""

import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tdkernels import lang as td
from tdkernels.ops.dense.ag_gemm.kernel import tile_by_arrival


@td.jit
def order_kernel(out_ptr, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles):
    """Store (shard, tile row, tile column) of each tile."""
    for tile in range(0, ranks * tiles_m * tiles_n):
        source, pid_m, pid_n = tile_by_arrival(tile, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
        tl.store(out_ptr + 3 * tile, source)
        tl.store(out_ptr + 3 * tile + 1, pid_m)
        tl.store(out_ptr + 3 * tile + 2, pid_n)


def order(me, ranks, tiles_m, tiles_n, group_m, chunk_tiles):
    out = torch.full((ranks * tiles_m * tiles_n, 3), -1, dtype=torch.int32)
    order_kernel[(1,)](out, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
    return [tuple(tile) for tile in out.tolist()]


SIZE = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), SIZE, SIZE, SIZE, SIZE, st.data())
def test_every_tile_once_and_in_order_of_arrival(ranks, tiles_m, tiles_n, group_m, chunk_tiles, data):
    me = data.draw(st.integers(0, ranks - 1))
    tiles = order(me, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
    every = {(source, m, n) for source in range(ranks) for m in range(tiles_m) for n in range(tiles_n)}
    assert len(tiles) == len(every) and set(tiles) == every
    own = tiles_m * tiles_n
    assert all(source == me for source, _, _ in tiles[:own])

    def arrival(source, row):  # each rank sends a chunk to rank + 1 first
        return row // chunk_tiles, (me - source) % ranks, row

    rows = sorted({(source, row) for source, row, _ in tiles[own:]}, key=lambda tile: arrival(*tile))
    for begin in range(0, len(rows), group_m):
        group = tiles[own + begin * tiles_n :][: len(rows[begin : begin + group_m]) * tiles_n]
        assert {(source, row) for source, row, _ in group} == set(rows[begin : begin + group_m])
        columns = [column for _, _, column in group]
        assert columns == sorted(columns), "each column of the weight is read once per group"
