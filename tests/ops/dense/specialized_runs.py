"""Programs of each warp-specialized kernel, for ``specialized_protocol``."""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

from tdkernels.ops.dense.ag_gemm.specialized import partitions as ag_gemm_partitions
from tdkernels.ops.dense.direct_specialized import partitions as direct_partitions
from tdkernels.ops.dense.gemm_rs.specialized import places as gemm_rs_places
from tdkernels.ops.experts.grouped_gemm.specialized import partitions as group_gemm_partitions
from tests.ops.dense.specialized_protocol import BLOCK_K, BLOCK_M, BLOCK_N, HALF_M, HALF_N, Run, indexed

BLOCK = SimpleNamespace(shape=(1, HALF_M, BLOCK_K))  # of the descriptors of operands


class GemmRsRun(Run):
    """A program of ``gemm_rs_specialized_kernel``; its work items belong to the ranks in turns."""

    partitions = gemm_rs_places, direct_partitions
    in_order = True  # whether tiles are signalled in order
    place_name, has_pairs = "place_of_item", False

    def __init__(self, seed, items, steps, ranks, source=None, promotes=False):
        self.ranks, self.promotes = ranks, promotes
        super().__init__(seed, items, steps, source)

    def __call__(self):
        super().__call__()
        signals = [entry[1] for entry in self.sent if entry[0] == "signal"]
        assert (signals if self.in_order else sorted(signals)) == list(range(self.items))
        self.check_marks(lambda item: ["stores"] if item % self.ranks == self.ranks - 1 else ["pushes"])

    def threads(self):
        bars, ranks = indexed(self.bars), self.ranks
        problem = (self.rows_of_shard(), BLOCK_N, self.steps, 1, 0)
        form = {"dtype": "bf16", "block_type": BLOCK, "layout": None}
        x, *descs = (SimpleNamespace(step=step, **form) for step in range(-1, ranks))

        def load():
            items = self.items + self.last_wave[1] * (self.last_wave[2] - 1)
            self.code["load_partition"](
                None, (x, "weight"), self.memory, bars, items, problem, 0, self.last_wave, self.trace, self.items,
                ranks, False, self.code[self.place_name], self.last_wave[1] > 0, self.has_pairs,
            )

        def send():
            self.code["send_partition"](
                None, self.memory, bars, descs, 100, 0, 7, 0, self.trace, ranks, self.last_wave[1] > 0, self.has_pairs,
            )
            self.closed = True

        splits = (7, None, 5, 9, self.last_wave[2], self.trace, self.items) if self.last_wave[1] else None
        return {
            "load": load, "send": send, "multiply 0": lambda: self.multiply(0, "NO_HALVES", splits=splits),
            "multiply 1": lambda: self.multiply(1, "NO_HALVES", splits=splits),
        }

    def rows_of_shard(self):
        return self.items * BLOCK_M

    def names(self):
        return {
            "notify_from_warp": self._signal, "signal_at": lambda ctx, half, slot: slot,
            "swizzle": lambda tile, tiles_m, tiles_n, group: (tile, 0),
            "row_in_segments": lambda row, owner, ranks, segment: row * ranks + owner * BLOCK_M,
        }

    def place_of_item(self, item):
        tile, step = divmod(item, self.ranks)
        row = (tile * self.ranks + (step + 1) % self.ranks) * BLOCK_M
        return row, 0, row + HALF_M

    def place(self, desc, plane, row):
        tile, owner = row // BLOCK_M // self.ranks, row // BLOCK_M % self.ranks
        return tile * self.ranks + (owner - 1) % self.ranks, row % BLOCK_M // HALF_M

    def place_of_output(self, desc, row):
        return row // BLOCK_M * self.ranks + desc.step, row % BLOCK_M // HALF_M

    def _signal(self, ctx, slot, owner, value, CHECK_FAILED):  # noqa: N803
        assert CHECK_FAILED == (self.last_wave[1] > 0)
        item = slot * self.ranks + (owner - 1) % self.ranks
        assert sum(entry[:2] == ("tile", item) for entry in self.sent) == 4, f"the signal of {item} comes too early"
        self.sent.append(("signal", item))


class PairsRun(GemmRsRun):
    """A program of ``gemm_rs_specialized_kernel`` with PAIRS, for an even number of ranks.

    A shard has ``tile_rows`` whole tile rows, and one of HALF_M rows.
    """

    place_name, has_pairs = "place_of_pair", True

    def __init__(self, seed, tile_rows, steps, ranks, source=None):
        self.tile_rows, self.whole = tile_rows, tile_rows * ranks
        super().__init__(seed, self.whole + ranks // 2, steps, ranks, source)

    def __call__(self):
        Run.__call__(self)
        signals = [entry[1] for entry in self.sent if entry[0] == "signal"]
        assert signals == list(range((self.tile_rows + 1) * self.ranks))
        numbers = [*range(self.whole), *range(self.whole, self.whole + self.ranks, 2)]
        stores = lambda number: number < self.whole and number % self.ranks == self.ranks - 1  # noqa: E731
        self.check_marks(lambda number: ["stores"] if stores(number) else ["pushes"], items=numbers)

    def rows_of_shard(self):
        return self.tile_rows * BLOCK_M + HALF_M

    def _of_number(self, number, half):
        """Return (work item, half of its rows) of half a tile."""
        if number < self.whole:
            return number, half
        assert half == 0, "there are no such rows"
        return self.whole + (number - self.whole) // 2, number % 2

    def place_of_item(self, item):
        if item < self.whole:
            return super().place_of_item(item)
        number = self.whole + 2 * (item - self.whole)
        return (*super().place_of_item(number)[:2], super().place_of_item(number + 1)[0])

    def place(self, desc, plane, row):
        return self._of_number(*super().place(desc, plane, row))

    def place_of_output(self, desc, row):
        return self._of_number(*super().place_of_output(desc, row))

    def _signal(self, ctx, slot, owner, value, CHECK_FAILED):  # noqa: N803
        number = slot * self.ranks + (owner - 1) % self.ranks
        halves = [self._of_number(number, half) for half in range(2 if number < self.whole else 1)]
        sent = [entry[1:3] for entry in self.sent if entry[0] == "tile"]
        assert all(sent.count(half) == 2 for half in halves), f"the signal of {number} comes too early"
        self.sent.append(("signal", number))


class SplitRun(GemmRsRun):
    """Programs of ``gemm_rs_specialized_kernel`` that split the last tiles along K.

    last_wave: (number of split tiles, number of their splits)
    programs: number of programs, which share a queue
    first: the first of these programs
    """

    in_order = False

    def __init__(self, seed, items, steps, ranks, last_wave, programs, source=None, promotes=False, first=None):
        split_tiles, num_splits = last_wave
        self.last_wave = items - split_tiles, split_tiles, num_splits
        super().__init__(seed, items, steps, ranks, source, promotes)
        if first is None:
            self.queue, self.sums, self.flags = itertools.count(), {}, {}
            options = seed, items, steps, ranks, last_wave, 1, source, promotes
            self.programs = [self, *(SplitRun(*options, first=self) for _ in range(programs - 1))]
        else:
            for name in ("schedule", "queue", "sums", "flags", "sent", "marks"):
                setattr(self, name, getattr(first, name))

    def __call__(self):
        super().__call__()
        assert not self.flags and not self.sums, "sums are not added, or their flags not cleared"

    def threads(self):
        found = {}
        for number, run in enumerate(self.programs):
            threads = super(SplitRun, run).threads()
            if run is not self:
                threads |= {"loads": partial(run._engine, run.loads), "stores": partial(run._engine, run.stores)}
            found |= {f"program {number} {name}": function for name, function in threads.items()}
        return found

    def check_marks(self, of_output):
        _, split_tiles, num_splits = self.last_wave
        for number in range(self.items, self.items + split_tiles * (num_splits - 1)):
            assert self.marks.pop(number, None) == (["starts", "multiplies", "ends"] if self.trace else None)
        super().check_marks(of_output)

    def names(self):
        return super().names() | {
            "_pointers": lambda ptr, number, which: _Place(number, which), "flag_at": lambda ctx, number: number,
            "rank": lambda ctx: 0, "raise_by_warps": self._raise, "clear_by_warps": self._clear,
            "wait_for_rank": self._await_flag,
        }

    def _code(self, source):
        code = super()._code(source)
        code["gl"].store, code["gl"].load = self._store_sums, self._load_sums
        return code

    def _item(self, answer):
        return next(self.queue)

    def _await_flag(self, ctx, flag, signal, peer, warps):
        self.schedule.until(lambda: self.flags.get(flag) == signal)

    def _store_sums(self, place, half):
        self.schedule.until()
        self.sums[place] = half

    def _load_sums(self, place):
        self.schedule.until()
        assert place in self.sums, f"{place} has not been stored, or is loaded twice"
        return self.sums.pop(place)

    def _raise(self, flag, signal, warps):
        """Set a flag: a number of sums, and which half of the rows."""
        self.schedule.until()
        assert flag not in self.flags, "a flag is set twice"
        number, which = (flag - 5) // 2, (flag - 5) % 2
        assert all(_Place(number, which, side) in self.sums for side in range(2)), "a flag is set before the sums are"
        self.flags[flag] = signal

    def _clear(self, flag, warps):
        self.schedule.until()
        assert flag in self.flags, "a flag is cleared that is not set"
        del self.flags[flag]


@dataclass(frozen=True)
class _Place:
    """The address of sums: their number, half of the rows, half of the columns."""

    number: int
    which: int
    side: int = 0

    def __add__(self, offset):
        return replace(self, side=offset // (HALF_M * HALF_N))


class AgGemmRun(Run):
    """A program of ``ag_gemm_specialized_kernel``. Rows of all items but every third arrive during the run."""

    partitions = (ag_gemm_partitions,)
    across = 1, 1, 1, 1  # of the kernel

    def __init__(self, seed, items, steps, slice_steps, source=None, promotes=False):
        self.promotes = promotes
        self.slice_steps, self.slices = slice_steps, -(-steps // slice_steps)
        self.arrived = set()
        super().__init__(seed, items, steps, source)
        self.kinds = [self.schedule.random.choice(["whole", "first half", "second half"]) for _ in range(items)]

    def __call__(self):
        super().__call__()
        self.check_marks(lambda item: ["stores"], may_wait=True)

    def sides(self, item):
        return {"whole": (0, 1), "first half": (0,), "second half": (1,)}[self.kinds[item]]

    def threads(self):
        bars = indexed(self.bars)
        form = {"dtype": "bf16", "block_type": BLOCK, "layout": None}
        own, gathered, out = (SimpleNamespace(name=name, **form) for name in ("own", "gathered", "out"))
        weights, order = (None,) * 5, (0, 3, 0, 0, 0, 1, 0)
        is_across = self.across[0] > 1

        def load():
            self.code["load_partition"](
                None, (own, gathered, ("weight",)), self.memory, bars, self.items, order, weights, 1, 7,
                self.items * BLOCK_M, 100, self.steps, self.slice_steps, self.trace, self.across, False, is_across,
            )

        def store():
            of_output = self.items * BLOCK_M, self.trace, is_across
            self.code["store_partition"](self.memory, bars, (out,), order, weights, *of_output)
            self.closed = True

        def arrive():
            slices = [(chunk, cut) for chunk in self.chunks() for cut in range(self.slices)]
            self.schedule.random.shuffle(slices)
            slices.sort(key=self.when)
            for each in slices:
                self.arrived.add(each)
                self.schedule.until()

        return {
            "load": load, "store": store, "arrive": arrive, "multiply 0": lambda: self.multiply(0, "HALF_COLUMNS"),
            "multiply 1": lambda: self.multiply(1, "HALF_COLUMNS"),
        }

    def names(self):
        return {
            "of_weight": lambda which, choices: choices[0], "count_ready_by_warp": self._count_ready,
            "_place_of": self._place_of, "selected": lambda one, other, is_one: one if is_one else other,
            "signal_at": lambda ctx, half, number: number, "wait_plan": self._wait_plan,
        }

    def when(self, piece):
        """Return when a slice of a chunk arrives, compared with others."""
        return 0

    def chunks(self):
        """Return the chunks that arrive: the rows of each item are one."""
        return [item for item in range(self.items) if item % 3]

    def _place_of(self, item, order, weights):
        """Return the place of an item in the shard of rank ``item % 3``. This rank is 0."""
        if not 0 <= item < self.items:
            return item % 3, item, 0, BLOCK_N, 0, True
        return item % 3, item, 0, BLOCK_N, self.sides(item)[0] * HALF_N, len(self.sides(item)) == 2

    def place_of_item(self, item):
        return item * BLOCK_M, self.sides(item)[0] * HALF_N, 4 * (item % 3)

    def _count_ready(self, number, count, signal):
        assert count in (0, self.slices)
        self.schedule.until()
        ready = [self._of_signal(number + cut) in self.arrived for cut in range(count)]
        return self.schedule.random.randint(0, [*ready, False].index(False))  # it need not read all of them

    def _of_signal(self, number):
        """Return the work item and the slice of a signal."""
        number, cut = divmod(number, self.slices)
        return number % 100, cut

    def _wait_plan(self, ctx, number, signal, source, FOR_TMA):  # noqa: N803
        assert FOR_TMA and self._of_signal(number)[0] % 3 == source > 0
        self.schedule.until(lambda: self._of_signal(number) in self.arrived)

    def _scales_of_step(self, place, step, which, epilogue):
        item = place[0] // BLOCK_M
        assert not item % 3 or (item, 0) in self.arrived, "scales are read before they arrive"
        return super()._scales_of_step(place, step, which, epilogue)

    def _load(self, desc, at, bar, cell, pred=True):
        if desc != "weight" and desc.name == "gathered":
            _, row, k = at
            item = row % (self.items * BLOCK_M) // BLOCK_M
            assert (item, k // BLOCK_K // self.slice_steps) in self.arrived, "rows are read before they arrive"
        super()._load(desc, at, bar, cell, pred)

    def place(self, desc, plane, row):
        source, row = divmod(row, self.items * BLOCK_M)
        item, part = row // BLOCK_M, row % BLOCK_M // HALF_M
        assert (desc.name, plane, source) == (("gathered", 1, item % 3) if item % 3 else ("own", 0, 0))
        return item, part

    def place_of_output(self, desc, row):
        return row // BLOCK_M, row % BLOCK_M // HALF_M


class AgGemmAcrossRun(AgGemmRun):
    """A program of ``ag_gemm_specialized_kernel`` whose tiles have rows of several shards, which all arrive."""

    def __init__(self, seed, items, steps, slice_steps, source=None):
        rows, chunk_rows = 96, 32
        self.across = max(-(-items * BLOCK_M // rows), 2), rows, chunk_rows, rows // chunk_rows
        super().__init__(seed, items, steps, slice_steps, source)

    def when(self, piece):
        """Those of the first chunks arrive earlier on average: otherwise tiles would begin when most are there."""
        return piece[0] + self.schedule.random.uniform(0, 6)

    def chunks(self):
        ranks, _, _, num_chunks = self.across
        return list(range(ranks * num_chunks))

    def _place_of(self, item, order, weights):
        """Return the place of an item, which has the tile row of its number."""
        if not 0 <= item < self.items:
            return item, 0, 0, BLOCK_N, 0, True
        return item, 0, 0, BLOCK_N, self.sides(item)[0] * HALF_N, len(self.sides(item)) == 2

    def place_of_item(self, item):
        return item * BLOCK_M, self.sides(item)[0] * HALF_N, 0

    def _count_ready(self, number, count, signal):
        self.schedule.until()
        ready = [divmod(number + cut, self.slices) in self.arrived for cut in range(count)]
        return self.schedule.random.choice([0, [*ready, False].index(False)])  # it need not read any of them

    def _wait_plan(self, ctx, number, signal, source, FOR_TMA):  # noqa: N803
        chunk, cut = divmod(number, self.slices)
        assert FOR_TMA and chunk // self.across[3] == source < self.across[0]
        self.schedule.until(lambda: (chunk, cut) in self.arrived)

    def _load(self, desc, at, bar, cell, pred=True):
        if desc != "weight":
            _, row, k = at
            rows = [r for r in range(row, row + HALF_M) if r < self.across[0] * self.across[1]]
            needed = {(r // self.across[2], k // BLOCK_K // self.slice_steps) for r in rows}
            assert needed <= self.arrived, "rows are read before they arrive"
        Run._load(self, desc, at, bar, cell, pred)

    def place(self, desc, plane, row):
        assert (desc.name, plane) == ("gathered", 1)
        return row // BLOCK_M, row % BLOCK_M // HALF_M


class GroupGemmRun(Run):
    """A program of ``group_gemm_specialized_kernel``. Each tile is a group with as many rows as ``ends`` says.

    With ``activation`` the halves of a tile are the input of SwiGLU, and side 2 is its output. With "keep" the input
    leaves, too.
    """

    partitions = (group_gemm_partitions,)

    def __init__(self, seed, items, steps, activation, source=None, promotes=False):
        self.promotes = promotes
        self.activation, self.is_pair = activation, activation is not None
        super().__init__(seed, items, steps, source)
        self.ends = [self.schedule.random.choice([BLOCK_M, BLOCK_M - 1, HALF_M + 1, HALF_M, 1]) for _ in range(items)]

    def quarters(self, item):
        parts = range(2 if self.ends[item] > HALF_M else 1)
        sides = {None: (0, 1), "swiglu": (2,), "keep": (0, 1, 2)}[self.activation]
        return [(item, part, side) for part in parts for side in sides]

    def threads(self):
        bars = indexed(self.bars)
        form = {"dtype": "bf16", "block_type": BLOCK, "layout": None}
        x, y, pre = (SimpleNamespace(name=name, **form) for name in ("x", "y", "pre"))
        problem = HALF_N if self.is_pair else BLOCK_N, self.steps * BLOCK_K, 1, 1
        splits, pair = [self.items], self.is_pair

        def load():
            operands = x, "weight"
            self.code["load_partition"](operands, self.memory, bars, splits, None, problem, self.steps, 1, pair, False)

        def store():
            outputs = ("y", y), ("pre", pre)
            keeps = self.activation == "keep"
            self.code["store_partition"](self.memory, bars, *outputs, splits, problem, 1, pair, keeps)
            self.closed = True

        def multiply(which):
            how = {None: ("pass_halves", 2), "swiglu": ("pass_swiglu", 1), "keep": ("pass_swiglu_and_input", 3)}
            return lambda: self.multiply(which, "HALF_ROWS", *how[self.activation])

        return {"load": load, "store": store, "multiply 0": multiply(0), "multiply 1": multiply(1)}

    def names(self):
        return {
            "_groups_of": lambda splits, tiles_n, experts: (None, splits), "_place_of": self._place_of,
            "request_number": lambda counter: None, "reset_after": self._check_reset,
            "partition_barrier": self.schedule.until,
            "swiglu": lambda gate, up: _Activated(gate, up), "_store_rows": self._store_rows,
        }

    def _place_of(self, tile, groups, problem):
        # Expert 0, so that the weight of each tile begins at column 0.
        return 0, tile * BLOCK_M, tile * BLOCK_M + self.ends[tile], 0

    def place_of_item(self, item):
        return item * BLOCK_M, 0, 0

    def place(self, desc, plane, row):
        item, part = row // BLOCK_M, row % BLOCK_M // HALF_M
        assert part * HALF_M < self.ends[item], "multiplies rows of no group"
        return item, part

    def _load(self, desc, at, bar, cell, pred=True):
        if desc != "weight":
            _, row, _ = at
            is_needed = row % BLOCK_M < self.ends[row // BLOCK_M]
            assert bool(pred) == is_needed, "loads rows of no group, or not all of a group"
        super()._load(desc, at, bar, cell, pred)

    def place_of_output(self, desc, row):
        item = row // BLOCK_M
        assert self.ends[item] == BLOCK_M, "TMA stores rows of another group"
        return item, row % BLOCK_M // HALF_M

    def side_of_output(self, desc, col):
        return 2 if self.is_pair and desc.name == "y" else col // HALF_N

    def _store_rows(self, cell, ptr, row, col, end, width, N):  # noqa: N803
        """Threads store the rows before ``end``, as ``_store_rows`` of the partitions does."""
        self.schedule.until()
        item, part = row // BLOCK_M, row % BLOCK_M // HALF_M
        assert end == item * BLOCK_M + self.ends[item] and self.ends[item] < BLOCK_M and col < N
        side = 2 if self.is_pair and ptr == "y" else col // HALF_N
        if row < end:
            assert cell.value == (item, part, side), (cell.value, item, part, side)
            self.sent.append(("tile", item, part, side))


class _Activated:
    """The SwiGLU of half of the rows of a tile."""

    def __init__(self, gate, up):
        assert (gate.item, gate.part, gate.sides, up.sides) == (up.item, up.part, (0,), (1,))
        self.gate = gate

    def to(self, dtype):
        return self.gate.item, self.gate.part, 2
