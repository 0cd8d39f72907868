"""Run the partitions of the kernels that load, multiply and store tiles; see ``specialized_protocol``."""

from types import SimpleNamespace

import numpy as np

from tdkernels.ops.experts.tp_moe.launch_specialized import packed
from tdkernels.ops.experts.tp_moe.specialized import tiles
from tests.ops.dense.specialized_protocol import BLOCK_K, BLOCK_M, BLOCK_N, HALF_M, HALF_N, indexed
from tests.ops.dense.specialized_runs import BLOCK, GroupGemmRun
from tests.ops.experts.tp_moe.specialized_protocol import (
    AG_GEMM_SOURCE,
    ARITHMETIC,
    GEMM_RS_SOURCE,
    MAX_STAGES,
    SIGNAL,
    TILE_WORDS,
    FastSchedule,
    Pointer,
    slice_of,
    without_types,
)


class MoeRun(GroupGemmRun):
    """A program of a kernel that loads, multiplies and stores tiles of the table. Other programs have some of them.

    A work item is known by the number that is passed on. In buffers its rows begin at row ``number * BLOCK_M``, and its
    columns at column 0, as in ``GroupGemmRun``.
    """

    partitions = (tiles,)

    def __init__(self, seed, num_tiles, tiles_n, steps, activation, source, promotes):
        self.tiles_n = tiles_n
        super().__init__(seed, num_tiles * tiles_n, steps, activation, source, promotes)
        self.schedule = FastSchedule(seed)
        choose = self.schedule.random
        some = BLOCK_M, BLOCK_M, HALF_M, HALF_M + 1
        counts = [choose.choice([*some, choose.randint(1, BLOCK_M)]) for _ in range(num_tiles)]
        # An expert has the rows after those of the one before.
        self.table = [(expert, 5 + sum(counts[:expert]), counts[expert]) for expert in range(num_tiles)]
        choose.shuffle(self.table)
        self.ends = [self.table[number // tiles_n][2] for number in range(self.items)]
        self.stages = sorted(choose.randrange(MAX_STAGES) for _ in range(num_tiles))
        width = HALF_N if self.is_pair else BLOCK_N
        self.n = tiles_n * width - choose.choice([0, 8, HALF_N - 8, width - 8])
        self.half_of_row = {
            row + HALF_M * part: (tile, part)
            for tile, (_, row, count) in enumerate(self.table) for part in range(1 + (count > HALF_M))
        }
        self.taken, self.fetched, self.loading, self.storing = [], [], None, None
        self.begin_item = self.code["begin_item"]
        self.code["begin_item"] = self._begin_item

    def __call__(self):
        super().__call__()
        assert len(self.taken) == len(self.fetched)
        self.check_marks(lambda item: ["stores"], self.copies_x, self.taken)

    def quarters(self, item):
        return super().quarters(item) if item in self.taken else []

    def threads(self):
        form = {"dtype": "bf16", "block_type": BLOCK, "layout": None}
        x, y, pre = (SimpleNamespace(name=name, **form) for name in ("x", "y", "pre"))
        table = Pointer([word for entry in self.table for word in (*entry, *[-1] * (TILE_WORDS - 3))])
        begins = Pointer([sum(stage < each for stage in self.stages) for each in range(2 * MAX_STAGES)])
        tiles = table, begins, self.tiles_n, self.schedule.random.choice([1, 2, 8])
        shared = self.memory, indexed(self.bars)

        def load():
            self.load(x, *shared, tiles)

        def store():
            self.store(*shared, ("y", y), ("pre", pre), tiles, self.n)
            self.closed = True

        return super().threads() | {"load": load, "store": store}

    def load(self, x, memory, bars, tiles):
        raise NotImplementedError

    def store(self, memory, bars, y, pre, tiles, n):
        raise NotImplementedError

    def _code(self, source):
        code = super()._code(without_types(source))
        vars(code["gl"]).update(ARITHMETIC, SliceLayout=lambda *_: None)
        return code

    def names(self):
        names = super().names() | {
            "tl": SimpleNamespace(**ARITHMETIC), "MAX_STAGES": MAX_STAGES, "TILE_WORDS": TILE_WORDS,
            "add_release_by_warps": self._release, "request_by_warp": self._request,
            "partition_barrier": lambda: self.schedule.until(),
        }
        return names

    def _request(self, ctx, queue):
        assert queue == 0, "the other queue has pushes or sums"

    def _item(self, answer):
        """Return the next work item. Other programs may have fetched some."""
        self.next_item += self.schedule.random.choice([1, 1, 1, 2])
        if self.next_item <= self.items:
            self.fetched.append(self.next_item - 1)
        return self.next_item - 1

    def _begin_item(self, memory, bars, item, place, turn, layout=1):
        number = item // 2
        assert item % 2 == (self.ends[number] <= HALF_M) and place == self.place_of_item(number)
        assert number not in self.taken, "a tile is computed twice"
        self.taken.append(number)
        self.loading = number
        self.begin_item(memory, bars, item, place, turn, layout)

    def place_of_item(self, item):
        expert, row, _ = self.table[item // self.tiles_n]
        return row, item % self.tiles_n, expert

    def _load(self, desc, at, bar, cell, pred=True):
        number = self.loading
        row, column, expert = self.place_of_item(number)
        if desc == "weight":
            col, k = at
            first = 2 * expert * self.n + column * HALF_N if self.is_pair else expert * self.n + column * BLOCK_N
            firsts = first, first + (self.n if self.is_pair else HALF_N)
            assert col in firsts, "loads columns of another tile"
            side = firsts.index(col)
            at = side * HALF_N, k
        else:
            plane, first, k = at
            assert plane == 0 and first in (row, row + HALF_M), "loads rows of another tile"
            at = 0, number * BLOCK_M + first - row, k
        super()._load(desc, at, bar, cell, pred)

    def _number_and_side(self, name, tile, col):
        """Return (work item, which of its blocks of columns this is) of an output."""
        if not self.is_pair:
            column, side = divmod(col // HALF_N, 2)
        elif name == "y":
            column, side = col // HALF_N, 2
        else:
            side, column = col // self.n, col % self.n // HALF_N
        self.storing = tile * self.tiles_n + column
        return self.storing, side

    def place_of_output(self, desc, row):
        return row // BLOCK_M, row % BLOCK_M // HALF_M

    def _store(self, desc, at, cell):
        plane, row, col = at
        tile, part = self.half_of_row.get(row, (None, 0))
        assert plane == 0 and tile is not None and self.table[tile][2] == BLOCK_M, "TMA stores rows of another tile"
        number, side = self._number_and_side(desc.name, tile, col)
        # TMA stores no columns past those of the output.
        assert side != 0 or desc.name == "y" or col + HALF_N <= self.n, "TMA stores columns of the other plane"
        super()._store(desc, (0, number * BLOCK_M + part * HALF_M, side * HALF_N), cell)

    def _store_rows(self, cell, ptr, row, col, end, width, N):  # noqa: N803
        """Threads store the rows before ``end`` and the columns before N."""
        self.schedule.until()
        ends = {row + count: tile for tile, (_, row, count) in enumerate(self.table)}
        assert end in ends, "stores rows of another tile"
        number, side = self._number_and_side(ptr, ends[end], col)
        _, first, count = self.table[ends[end]]
        assert row in (first, first + HALF_M) and width == self.n * (2 if ptr == "pre" else 1)
        assert N == self.n * (1 + side if ptr == "pre" else 1)
        part = (row - first) // HALF_M
        if row < end:
            assert cell.value == (number, part, side), (cell.value, number, part, side)
            self.sent.append(("tile", number, part, side))

    def _release(self, word, warps):
        raise NotImplementedError


_SIZES = (*"abcdef", MAX_STAGES)  # the partition uses only the number of stages


class MoeAgGemmRun(MoeRun):
    """A program of ``moe_ag_gemm_specialized_kernel``. The tokens of the stages arrive in random order.

    The rows of a tile are known by (the tile's first row, number of its rows, which half of them).
    """

    copies_x = True

    def __init__(self, seed, num_tiles, tiles_n, steps, activation, source=None, promotes=False):
        self.arrived, self.awaited = set(), 0  # stages; the number of those that the partition has waited for
        self.unfinished_copies = set()
        super().__init__(seed, num_tiles, tiles_n, steps, activation, source or AG_GEMM_SOURCE, promotes)
        self.memory[0].dtype, self.memory[0].shape = SimpleNamespace(primitive_bitwidth=16), (8, HALF_M, BLOCK_K)
        self.k = steps * BLOCK_K - self.schedule.random.choice([0, 8, BLOCK_K - 8])

    def threads(self):
        def arrive():
            stages = list(range(MAX_STAGES))
            self.schedule.random.shuffle(stages)
            for stage in stages:
                self.schedule.until()
                self.arrived.add(stage)

        return super().threads() | {"tokens": arrive}

    def names(self):
        return super().names() | {
            "await_tokens": self._await_tokens, "_pointers": self._pointers, "_layout": lambda bits: None,
            "_assignments": lambda ptr, row, count, me, sizes, choices: ((row, count, 0), (row, count, 1)),
            "async_load": self._copy_rows, "async_copy": SimpleNamespace(mbarrier_arrive=self._arrive_after_copies),
            "request_by_warps": lambda ctx, queue, warps: self._request(ctx, queue), "item_of_warps": self._item,
            "ARRIVALS": 2, "VECTOR": 2, "_WARPS": 2, "ALL_PEERS": -2,
        }

    def load(self, x, memory, bars, tiles):
        waits = "half", SIGNAL, _SIZES, "me"
        self.x = x
        self.code["gather_partition"](
            None, ("places", "choices"), "weight", memory, bars, tiles, (self.n, self.k), self.steps, waits,
            self.trace, 2, self.is_pair, False,
        )
        assert self.awaited == MAX_STAGES, "tokens of stages without tiles are not awaited"

    def store(self, memory, bars, y, pre, tiles, n):
        self.code["store_partition"](
            memory, bars, y, pre, tiles, n, None, 1, self.trace, self.is_pair, self.activation == "keep", False
        )

    def _await_tokens(self, ctx, stage, ready, waits):
        assert waits == ("half", SIGNAL, _SIZES, "me")
        self.schedule.until(lambda: self.arrived >= set(range(ready, stage + 1)))
        self.awaited = max(ready, stage + 1)
        return self.awaited

    def _pointers(self, assignments, places, sizes, me, dtype, choices):
        assert (places, sizes, me, choices) == ("places", _SIZES, "me", 2)
        return _Rows(*assignments)

    def _copy_rows(self, cell, rows, mask):
        """Copy rows as late as the seed likes."""
        number = self.loading
        tile = number // self.tiles_n
        _, row, count = self.table[tile]
        assert (rows.row, rows.count) == (row, count), "loads rows of another tile"
        assert rows.part == 0 or count > HALF_M, "loads rows of no expert"
        assert self.arrived >= set(range(self.stages[tile] + 1)), "rows are loaded before they arrive"
        assert (mask == (rows.k + np.arange(BLOCK_K) < self.k)).all(), "loads columns of no row"
        copy = object()
        self.unfinished_copies.add(copy)

        def finish():
            cell.value = (self.x, 0, number * BLOCK_M + rows.part * HALF_M, rows.k)
            cell.unfenced_for = {0, 1}
            self.unfinished_copies.discard(copy)

        self.loads.append(finish)
        self.schedule.until()

    def _arrive_after_copies(self, bar, increment_count):
        """Arrive when all copies so far are finished."""
        assert not increment_count
        copies = set(self.unfinished_copies)

        def arrive():
            if copies & self.unfinished_copies:
                self.loads.append(arrive)
            else:
                bar.arrive()

        self.loads.append(arrive)
        self.schedule.until()


class _Rows:
    """Pointers to half of the rows of a tile, from column ``k`` on."""

    def __init__(self, row, count, part, k=0):
        self.row, self.count, self.part, self.k = row, count, part, k

    def __add__(self, k):
        return _Rows(self.row, self.count, self.part, self.k + k)


class MoeGemmRsRun(MoeRun):
    """A program of ``moe_gemm_rs_specialized_kernel``."""

    def __init__(self, seed, num_tiles, tiles_n, steps, slices, source=None, promotes=False):
        """Create a run. ``slices`` are (first units, tile columns of a unit)."""
        self.firsts, self.unit = slices
        self.slices = num_tiles, packed(self.firsts), self.unit
        self.counted = []
        super().__init__(seed, num_tiles, tiles_n, steps, None, source or GEMM_RS_SOURCE, promotes)

    def __call__(self):
        super().__call__()
        assert sorted(self.counted) == sorted(self.taken)

    def load(self, x, memory, bars, tiles):
        problem = self.n, None
        self.code["_load"](
            None, (x, "weight"), memory, bars, tiles, problem, SIGNAL, self.steps, self.slices, self.trace, False
        )

    def store(self, memory, bars, y, pre, tiles, n):
        self.code["store_partition"](memory, bars, y, y, tiles, n, 0, self.slices, self.trace, False, False, True)

    def _release(self, word, warps):
        assert warps == 1 and word == slice_of(self.storing % self.tiles_n, self.firsts, self.unit)
        assert {entry[1:] for entry in self.sent} >= set(self.quarters(self.storing)), "a tile is counted too early"
        assert self.storing not in self.counted, "a tile is counted twice"
        self.counted.append(self.storing)
        self.schedule.until()
