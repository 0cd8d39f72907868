"""Run the partitions of the warp-specialized kernels on the CPU, with stand-ins for Gluon, in random order.

The source of the partitions runs unchanged. Each partition is a thread. One thread runs at a time, and a seed selects
which one continues after each operation on shared memory. TMA copies are made by threads of their own, as late as the
seed likes; a product reads its operands when it is waited for. Buffers hold names of their contents instead of numbers,
which are checked when they are read. What a thread stores must be fenced before TMA or the tensor cores read it.

A partition is one thread here, so barriers among the warps of a partition are not checked.
"""

import ast
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

from tdkernels.ops.common.specialized import layout, load, multiply, output, promote, split_k, store
from tdkernels.ops.common.tile_config import SPECIALIZED_TILE, STEP_BYTES
from tests.support.thread_schedule import Schedule

(BLOCK_M, BLOCK_N), BLOCK_K = SPECIALIZED_TILE, STEP_BYTES // 2  # of operands in 16 bits
HALF_M, HALF_N = BLOCK_M // 2, BLOCK_N // 2
_CONSTANTS = [
    "BLOCK_M", "BLOCK_N", "EARLY_STEPS", "FREE", "FULL", "HALF_COLUMNS", "HALF_M", "HALF_N", "HALF_ROWS", "HALF_SIZE",
    "NO_HALVES", "NO_ITEM", "OUT_FREE", "OUT_FULL", "STAGES", "STEP_BYTES",
]


def functions_of(module, *names):
    """Return the source of functions of a module, without their decorators."""
    source = Path(module.__file__).read_text()
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return "\n".join(ast.get_source_segment(source, found[name]) for name in names) + "\n"


def source_of(*partitions):
    """Return the source of all functions that the partitions of a kernel run. Later modules replace functions."""
    modules = load, output, promote, split_k, multiply, store, *partitions
    return "\n".join([functions_of(layout, "await_operands"), *(Path(each.__file__).read_text() for each in modules)])


class Barrier:
    """An mbarrier."""

    def __init__(self, count):
        self.count, self.left, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, num_bytes=0):
        assert self.left > 0, "more arrivals than the barrier counts"
        self.left -= 1
        self.bytes += num_bytes
        self.complete()

    def complete(self, num_bytes=0):
        self.bytes -= num_bytes
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1


class Cell:
    """A buffer in shared memory, which holds the name of its content."""

    dtype = "bf16"

    def __init__(self, num_bytes=0):
        self.value, self.num_bytes, self.fenced = None, num_bytes, True
        self.unfenced_for = set()  # partitions that multiply, and have not fenced what threads copied here

    def permute(self, order):
        return self

    def store(self, value):
        self.value, self.fenced = value, False


class Weight:
    """The weight of a stage: two buffers."""

    def __init__(self):
        self.halves = [Cell(HALF_N * BLOCK_K * 2) for _ in range(2)]

    def permute(self, order):
        return self

    def slice(self, first, size, dim):
        assert first % HALF_N == 0 and size == HALF_N and dim in (0, 1)
        return self.halves[first // HALF_N]


class Run:
    """One program with all work items of one launch.

    Subclasses have the partitions of one kernel. Work item ``item`` computes columns of tile ``item``.

    ``promotes``: whether each step is added to a second accumulator, with scales of the step
    """

    partitions = ()  # modules; later ones replace functions of earlier ones
    last_wave = 0, 0, 1  # as for ``split_of``, with split-K
    promotes = False
    copies_x = False  # whether threads copy the rows of x

    def __init__(self, seed, items, steps, source=None):
        self.schedule, self.items, self.steps = Schedule(seed), items, steps
        stages = layout.STAGES.value
        arrivals = 2 if self.copies_x else 1
        self.bars = [Barrier(count) for count in (arrivals, 2) for _ in range(stages)] + [Barrier(2), Barrier(1)]
        assert (layout.FULL.value, layout.FREE.value) == (0, stages) and layout.OUT_FREE.value == 2 * stages + 1
        cells = lambda count, num_bytes=0: [Cell(num_bytes) for _ in range(count)]  # noqa: E731
        rows, weights = cells(2 * stages, HALF_M * BLOCK_K * 2), [Weight() for _ in range(stages)]
        buffers = rows, weights, cells(2), cells(layout.ITEM_WORDS.value * stages), cells(1)
        self.memory = *map(indexed, buffers), self.copies_x
        self.memory[2].dtype = "bf16"
        self.next_item, self.loads, self.stores, self.sent = 0, [], [], []
        self.unread, self.unfinished = 0, 0  # TMA stores
        self.closed = False
        # Every other run is traced: {piece: kinds}.
        self.trace, self.marks = "trace" if seed % 2 else None, {}
        self.code = self._code(source or source_of(*self.partitions))

    def __call__(self):
        """Run it, and check that each tile of each item left in quarters."""
        engines = {"loads": lambda: self._engine(self.loads), "stores": lambda: self._engine(self.stores)}
        self.schedule.start({**self.threads(), **engines})
        found = [entry[1:] for entry in self.sent if entry[0] == "tile"]
        assert sorted(found) == sorted(quarter for item in range(self.items) for quarter in self.quarters(item))

    def check_marks(self, of_output, may_wait=False, items=None):
        """Check that a trace has all work items, with their kinds in order.

        of_output: item -> kinds after the main loop
        may_wait: whether items may wait for their operands
        items: work items of this program; None for all
        """
        items = list(range(self.items)) if items is None else sorted(items)
        assert sorted(self.marks) == (items if self.trace else [])
        for item, kinds in self.marks.items():
            assert kinds[0] == "starts" and kinds[-1] == "ends"
            waits = ["waits"] if may_wait and "waits" in kinds else []
            assert kinds[1:-1] == [*waits, "multiplies", *of_output(item)], kinds

    # ---- what differs between the kernels ----

    def threads(self):
        """Return {name: function} for the partitions, except the engines of TMA."""
        raise NotImplementedError

    def sides(self, item):
        """Return the halves of its tile that a work item computes."""
        return 0, 1

    def quarters(self, item):
        """Return what leaves for a work item: (item, half of the rows, half of the columns)."""
        return [(item, part, side) for part in range(2) for side in self.sides(item)]

    def names(self):
        """Return stand-ins for functions that only one kernel uses."""
        return {}

    def place(self, desc, plane, row):
        """Return (work item, half of the rows) for the first row of operands."""
        raise NotImplementedError

    def place_of_output(self, desc, row):
        """Return (work item, half of the rows) for the first row of an output."""
        raise NotImplementedError

    def side_of_output(self, desc, col):
        """Return the half of its columns for the first column of an output."""
        return col // HALF_N

    def place_of_item(self, item):
        """Return the three numbers that the partition that loads passes on with a work item."""
        raise NotImplementedError

    def multiply(self, which, half, pass_on="pass_halves", passes=2, splits=None):
        """Run a partition that multiplies.

        half: the name of what items with odd numbers are
        pass_on, passes: the name of the function that passes on a tile, and the number of halves that it passes on
        splits: as for ``store_split``
        """
        half, pass_tile = getattr(layout, half).value, self.code[pass_on]
        self.code["multiply_partition"](
            self.memory, indexed(self.bars), self.steps, None, which, half, False, self._epilogue, pass_tile, passes,
            self._prepare, self.promotes, self._scales_of_step if self.promotes else None,
            splits is not None, splits,
        )

    # ---- stand-ins ----

    def _code(self, source):
        source = source.replace(" memory[0].dtype.primitive_bitwidth", " 16")
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
        gl = SimpleNamespace(
            constexpr=int, static_range=range, maximum=max, minimum=min, max=lambda values, dim: max(values),
            float32="fp32", zeros=lambda *_: (), convert_layout=lambda values, *_, **__: values,
            where=lambda condition, one, other: one if condition else other, NVMMADistributedLayout=lambda *_: None,
        )
        words = layout.ITEM_WORDS.value
        names = {
            "gl": gl,
            "gluon": SimpleNamespace(jit=lambda function: function, constexpr_function=lambda function: function),
            "mbarrier": SimpleNamespace(wait=self._wait, arrive=self._arrive, expect=self._expect),
            "tma": SimpleNamespace(store_wait=self._store_wait),
            "tma_load": self._load, "tma_store": self._store, "reinterpret": lambda cell, *form: cell,
            "warpgroup_mma": self._multiply, "warpgroup_mma_wait": self._products,
            "fence_async_shared": self._fence, "await_tma_stores": self._stores_done,
            "request_by_warp": lambda ctx, queue: None, "item_of_warp": self._item, "ONE_WARP": 1, "FOUR_WARPS": 4,
            "HALF_LAYOUT": None, "FP8_LAYOUT": None, "mark_by_warps": self._mark,
            "item_word": lambda memory, stage, number: memory[3][words * stage + number],
            "write_item": self._write, "read_item": self._read,
        }
        names |= {name: getattr(layout, name).value for name in _CONSTANTS}
        exec(compile(tree, self.partitions[-1].__file__, "exec"), names)
        names["halves_of"] = lambda acc: (acc.half(0), acc.half(1))
        names["_add"] = self._add
        names.update(self.names())
        return names

    def _engine(self, queue):
        while True:
            self.schedule.until(lambda: queue or self.closed)
            if not queue:
                return
            queue.pop(self.schedule.random.randrange(len(queue)))()

    def _wait(self, bar, parity):
        self.schedule.until(lambda: bar.phase % 2 != parity)

    def _arrive(self, bar, count=1, pred=True):
        self.schedule.until()
        for _ in range(count if pred else 0):
            bar.arrive()

    def _fence(self):
        """Fence the stores of the partition that runs, and what it has seen of the copies of others."""
        part = int(threading.current_thread().name[-1])  # it multiplies
        self.memory[2][part].fenced = True
        for cell in self.memory[0]:
            cell.unfenced_for.discard(part)
        self.schedule.until()

    def _expect(self, bar, num_bytes, pred=True):
        self.schedule.until()
        if pred:
            bar.arrive(num_bytes)

    def _load(self, desc, at, bar, cell, pred=True):
        def arrive():
            cell.value = (desc, *at)
            bar.complete(cell.num_bytes)

        if pred:
            self.loads.append(arrive)
        self.schedule.until()

    def _store(self, desc, at, cell):
        self.unread, self.unfinished = self.unread + 1, self.unfinished + 1
        _, row, col = at
        item, part = self.place_of_output(desc, row)
        side = self.side_of_output(desc, col)

        def read():
            assert cell.fenced, "TMA reads a store that is not fenced"
            assert cell.value == (item, part, side), (cell.value, item, part, side)
            self.unread -= 1
            self.stores.append(finish)

        def finish():
            self.sent.append(("tile", item, part, side))
            self.unfinished -= 1

        self.stores.append(read)
        self.schedule.until()

    def _store_wait(self, pending):
        self.schedule.until(lambda: self.unread == 0)

    def _stores_done(self):
        self.schedule.until(lambda: self.unfinished == 0)

    def _item(self, answer):
        self.next_item += 1
        return self.next_item - 1

    def _check_reset(self, counter, number, total):
        """There is one program, so its last number is the one after those of the work items."""
        assert number == total == self.next_item - 1

    def _mark(self, trace, kind, warps, peer=-1):
        if trace[0] is not None:
            self.marks.setdefault(trace[1], []).append(kind)

    def _write(self, cell, item, layout):
        self.schedule.until()
        cell.value = item

    def _read(self, cell, layout):
        self.schedule.until()
        assert cell.value is not None, "read before it was written"
        return cell.value

    def _multiply(self, x, weight, acc, use_acc, is_async):
        assert int(threading.current_thread().name[-1]) not in x.unfenced_for, "operands are not fenced"
        return [*(acc if use_acc else ()), (x, weight)]

    def _products(self, left, deps):
        """Read the operands of all products but the last ``left`` ones, as late as possible."""
        (acc,) = deps
        self.schedule.until()
        done = [_read_product(*each) if isinstance(each[0], Cell) else each for each in acc[: len(acc) - left]]
        acc = done + acc[len(acc) - left :]
        return acc if left or self.promotes else self._sum(acc)

    def _scales_of_step(self, place, step, which, epilogue):
        """Return names of the scales of the rows and of both halves of the columns."""
        self.schedule.until()
        return (step, which), (step, 0), (step, 1)

    def _add(self, total, product, of_rows, of_columns, factors):
        """Add the product of a step, whose scales must be those of the step and of its columns."""
        ((place, step, first, width, weight_step),) = product
        _, part = self.place(*place)
        side = first // HALF_N if len(self.sides_of(place)) == 2 else 0  # an item of one half has it first
        assert (of_rows, of_columns) == ((step, part), (step, side)), (of_rows, of_columns, product)
        return (*total, *product)

    def sides_of(self, place):
        """Return the halves of the columns that the work item at a place computes."""
        return self.sides(self.place(*place)[0])

    def _prepare(self, place, which, epilogue):
        self.schedule.until()
        return place

    def _epilogue(self, half, place, which, side, prepared):
        """Return the half. Its place, which PREPARE got, too, must be that of its work item."""
        half = half if isinstance(half, _Tile) else self._sum(sorted(half, key=lambda product: product[1]))
        assert place == prepared[1] == self.place_of_item(half.item), (place, prepared, half.item)
        return half

    def _sum(self, products):
        """Return the tile with these products, which are those of a split of one item and half of its rows.

        If it promotes, the products are those of all steps and of one half of the columns.
        """
        (desc, plane, row), _, first, width, _ = products[0]
        item, part = self.place(desc, plane, row)
        steps = [product[1] for product in products]
        assert steps in ([list(range(self.steps))] if self.promotes else self.splits_of(item)), (item, steps)
        assert list(products) == [((desc, plane, row), step, first, width, step) for step in steps], products
        sides = tuple(range(first // HALF_N, (first + width) // HALF_N))
        found = [sides] if not self.promotes else [(side,) for side in self.sides(item)]
        assert sides in found and (self.promotes or sides == tuple(self.sides(item))), (item, sides)
        return _Tile(item, part, sides, steps)

    def splits_of(self, item):
        """Return the steps of K of each split of a tile."""
        whole_tiles, _, num_splits = self.last_wave
        count = num_splits if item >= whole_tiles else 1
        cuts = [self.steps * split // count for split in range(count + 1)]
        return [list(range(*ends)) for ends in itertools.pairwise(cuts)]


class _Tile:
    """Columns of half of the rows of a tile. In shared memory, one half of its columns is its name."""

    def __init__(self, item, part, sides, steps):
        self.item, self.part, self.sides, self.steps = item, part, sides, steps

    def half(self, side):
        return _Tile(self.item, self.part, (self.sides[side],), self.steps)

    def __add__(self, other):
        """Return the sum with another split."""
        assert (self.item, self.part, self.sides) == (other.item, other.part, other.sides)
        return _Tile(self.item, self.part, self.sides, self.steps + other.steps)

    def to(self, dtype):
        (side,) = self.sides
        assert sorted(self.steps) == list(range(len(self.steps))), "steps of K are missing, or added twice"
        return self.item, self.part, side


def _read_product(x, weight):
    """Return (place of the rows, step, first column, columns, step of the weight)."""
    parts = weight.halves if isinstance(weight, Weight) else [weight]
    assert all(operand.value is not None for operand in (x, *parts)), "operands are read before they have been loaded"
    desc, plane, row, k = x.value
    (_, col, weight_k), *others = [part.value for part in parts]
    assert others in ([], [("weight", col + HALF_N, weight_k)]), (col, others)
    assert k % BLOCK_K == weight_k % BLOCK_K == 0
    return (desc, plane, row), k // BLOCK_K, col, HALF_N * len(parts), weight_k // BLOCK_K


class indexed(list):  # noqa: N801
    def index(self, number):
        return self[number]
