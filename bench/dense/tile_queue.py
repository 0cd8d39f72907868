"""Model of the warp-specialized ag_gemm: programs that fetch tiles from a queue and wait for rows.

`python -m bench.dense.tile_queue` compares it with the recorded rows of solo mode on H200, and of 8 H200. Use it to try
an order of tiles, a size of chunks or a number of halves without a GPU.
"""

import heapq
import json
from dataclasses import dataclass

from bench.core.points import read_solo
from bench.dense.modelled import RESULTS
from tdkernels.ops.common.tile_config import SPECIALIZED_TILE
from tdkernels.ops.dense.ag_gemm.config import NUM_COMM_SPECIALIZED
from tdkernels.ops.dense.ag_gemm.launch_specialized import SLICE_K, is_bound_by_link, whole_tiles
from tdkernels.rounding import cdiv

BLOCK_M, BLOCK_N = SPECIALIZED_TILE
PROGRAMS = 131  # solo mode leaves one SM to the relay
# Least number of programs that push in the compared rows. Fewer may be slower than the link.
_PUSHING = NUM_COMM_SPECIALIZED
_RATE_OF_EIGHT = 320e9  # bytes per second that each of 8 H200 receives from the others, fitted to all rows
# Fitted to 8192 x 28672 x 4096 on H200.
_SM_FLOPS = 5.0e12  # of an SM, while all of them multiply
_HALF = 0.53  # time of half a tile / time of a tile
_TILE_S, _START_S, _SIGNAL_S = 1.5e-6, 3e-6, 2.5e-6  # for each tile, of a launch, from the arrival of data to its use


@dataclass(frozen=True)
class Schedule:
    """One of ``ranks`` ranks: x [rows, k], a weight [n, k], chunks of ``chunk_tiles`` tile rows, groups of ``group_m``.
    """

    rows: int
    n: int
    k: int
    ranks: int
    chunk_tiles: int = 2
    group_m: int = 8

    @property
    def tiles_m(self) -> int:
        return cdiv(self.rows, BLOCK_M)

    @property
    def tiles(self) -> int:
        return self.ranks * self.tiles_m * cdiv(self.n, BLOCK_N)

    def arrivals(self, link_rate: float) -> dict[tuple[int, int, int], float]:
        """Return when each slice of a chunk arrives: {(position of the source, chunk, slice): seconds}."""
        found, now = {}, _SIGNAL_S
        for chunk in range(cdiv(self.tiles_m, self.chunk_tiles)):
            rows = min(self.chunk_tiles * BLOCK_M, self.rows - chunk * self.chunk_tiles * BLOCK_M)
            for number in range(cdiv(self.k, SLICE_K)):
                for source in range(1, self.ranks):
                    now += 2 * rows * min(SLICE_K, self.k - number * SLICE_K) / link_rate
                    found[source, chunk, number] = now
        return found

    def places(self) -> list[tuple[int, int, int]]:
        """Return (position of the source, chunk, tile column) of all tiles in the order of ``tile_by_arrival``."""
        own = [(0, row) for row in range(self.tiles_m)]
        peers = sorted(
            ((source, row) for source in range(1, self.ranks) for row in range(self.tiles_m)),
            key=lambda place: (place[1] // self.chunk_tiles, place),
        )
        found = []
        for rows in (own, peers):
            for first in range(0, len(rows), self.group_m):
                group = rows[first : first + self.group_m]
                columns = range(cdiv(self.n, BLOCK_N))
                found += [(source, row // self.chunk_tiles, column) for column in columns for source, row in group]
        return found

    def items(self, whole: int) -> list[tuple[int, int, float]]:
        """Return (position of the source, chunk, time / time of a tile) of all work items, ``whole`` of them tiles."""
        found = []
        for number, (source, chunk, column) in enumerate(self.places()):
            is_narrow = column * BLOCK_N + BLOCK_N // 2 >= self.n  # the second half has no columns
            if number < whole:
                found.append((source, chunk, _HALF if is_narrow else 1.0))
            else:
                found += [(source, chunk, _HALF)] * (1 if is_narrow else 2)
        return found

    def seconds(self, link_rate: float, whole: int | None = None) -> float:
        """Predict the time of a call. ``whole``: the number of tiles that are not halved; None: as in the launcher."""
        if whole is None:
            whole = whole_tiles(self.tiles, PROGRAMS, is_bound_by_link(self.n, self.ranks))
        slices = cdiv(self.k, SLICE_K)
        tile_s = 2 * BLOCK_M * BLOCK_N * self.k / _SM_FLOPS
        arrivals = self.arrivals(link_rate)
        free = [_START_S] * PROGRAMS
        for source, chunk, share in self.items(whole):
            now = heapq.heappop(free)
            for number in range(slices):
                now = max(now, arrivals.get((source, chunk, number), 0.0)) + share * tile_s / slices
            heapq.heappush(free, now + share * _TILE_S)
        return max(free)


def main() -> None:
    """Print a line for each shape of at least a wave of tiles with a row of the specialized kernel on H200."""
    _compare_solo()
    _compare_real()


def _compare_solo():
    newest = {}
    for row in sorted(read_solo(RESULTS), key=lambda row: row["date"]):
        if row["op"] != "ag_gemm" or row["gpu"] != "NVIDIA H200":
            continue
        config = row["config"] or {}
        if config.get("warp_specialize") and config["num_comm_sms"] >= _PUSHING:
            newest[row["ranks"], row["shape"], config["chunk_tiles"]] = row
    for (ranks, _, _), row in sorted(newest.items()):
        _compare(row, ranks, 1e9 * row["link_gbps"], "solo mode")


def _compare_real():
    rows = map(json.loads, (RESULTS / "h200x8" / "ag_gemm_specialized.jsonl").read_text().splitlines())
    for row in rows:
        config = row["config"] or {}
        if row["graph"] and "{" in row["method"] and (config["num_comm_sms"], config["chunk_tiles"]) == (_PUSHING, 2):
            _compare(row, 8, _RATE_OF_EIGHT, "8 H200")


def _compare(row, ranks, link_rate, where):
    chunk_tiles = row["config"]["chunk_tiles"]
    schedule = Schedule(row["m"] // ranks, row["n"] // ranks, row["k"], ranks, chunk_tiles)
    if schedule.tiles < PROGRAMS:  # the rate of an SM is that while all of them multiply
        return
    predicted = 1e3 * schedule.seconds(link_rate)
    what = f"{where}, {ranks} ranks, {row['shape']}, chunks of {chunk_tiles}"
    print(f"{what}: {predicted:.3f} ms, measured / predicted {row['ms'] / predicted:.2f}")


if __name__ == "__main__":
    main()
