"""Run the partitions of the warp-specialized kernel of gemm_rs on the CPU, with stand-ins for Gluon, in random order.

The source of ``specialized/partitions.py`` runs unchanged. Each partition is a thread. One thread runs at a time, and a
seed selects which one continues after each operation on shared memory. TMA copies are made by threads of their own, as
late as the seed likes; a product reads its operands when it is waited for. Buffers hold names of their contents instead
of numbers, which are checked when they are read. A store must be fenced before TMA reads it.

A partition is one thread here, so barriers among the warps of a partition are not checked.
"""

import ast
import random
import threading
from pathlib import Path
from types import SimpleNamespace

from tdkernels.ops.dense.gemm_rs.config import SPECIALIZED_TILE
from tdkernels.ops.dense.gemm_rs.specialized import layout, partitions

BLOCK_M, BLOCK_N, BLOCK_K = SPECIALIZED_TILE
_CONSTANTS = [
    "BLOCK_K", "BLOCK_M", "BLOCK_N", "FREE", "FULL", "HALF_M", "HALF_N", "NO_ITEM", "OUT_FREE", "OUT_FULL", "SENDS",
    "STAGES",
]


class Stuck(AssertionError):
    """All threads wait."""


class Schedule:
    """Run threads one at a time, in an order that depends on a seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.turn = threading.Condition()
        self.waiting, self.running, self.errors, self.speeds = {}, None, [], {}

    def start(self, functions):
        """Run functions to their end. Raise the first error, or Stuck."""
        threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in functions.items()]
        self.waiting = {name: lambda: True for name in functions}
        # Some threads are slow: threads of equal speed would hardly ever overtake each other.
        self.speeds = {name: self.random.choice([1, 0.1, 0.01]) for name in functions}
        for thread in threads:
            thread.start()
        with self.turn:
            self._next()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def until(self, condition=lambda: True):
        """Let other threads run. Return when it is this thread's turn and ``condition()`` is true."""
        name = threading.current_thread().name
        with self.turn:
            self.waiting[name] = condition
            self._next()
            self._await(name)

    def _run(self, name, function):
        threading.current_thread().name = name
        try:
            with self.turn:
                self._await(name)
            function()
        except BaseException as error:
            self.errors.append(error)
        with self.turn:
            self._next()

    def _await(self, name):
        self.turn.wait_for(lambda: self.running == name or self.errors)
        if self.errors:
            raise Stuck("another thread failed")
        del self.waiting[name]

    def _next(self):
        ready = [name for name, condition in self.waiting.items() if condition()]
        self.running = self.random.choices(ready, [self.speeds[name] for name in ready])[0] if ready else None
        if self.waiting and not ready:
            self.errors.append(Stuck(f"all wait: {sorted(self.waiting)}"))
        if not ready or self.errors:
            self.running = None
        self.turn.notify_all()


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

    def permute(self, order):
        return self

    def _reinterpret(self, *form):
        return self

    def store(self, value):
        self.value, self.fenced = value, False


class Run:
    """One program with all work items of one launch."""

    def __init__(self, seed, items, steps, ranks, source=None):
        self.schedule, self.items, self.steps, self.ranks = Schedule(seed), items, steps, ranks
        stages = layout.STAGES.value
        self.bars = [Barrier(1) for _ in range(stages)] + [Barrier(2) for _ in range(stages)] + [Barrier(2), Barrier(1)]
        assert (layout.FULL.value, layout.FREE.value) == (0, stages) and layout.OUT_FREE.value == 2 * stages + 1
        cells = lambda count, num_bytes=0: [Cell(num_bytes) for _ in range(count)]  # noqa: E731
        halves, weights = cells(2 * stages, BLOCK_M // 2 * BLOCK_K * 2), cells(stages, BLOCK_N * BLOCK_K * 2)
        self.memory = tuple(map(_indexed, (halves, weights, cells(2), cells(stages), cells(1))))
        self.memory[2].dtype = "bf16"
        self.next_item, self.loads, self.stores, self.sent = 0, [], [], []
        self.unread, self.unfinished = 0, 0  # TMA stores
        self.closed = False
        self.code = self._code(source or Path(partitions.__file__).read_text())

    def __call__(self):
        """Run it, and check what was sent: each tile of each item, in four parts, before its signal."""
        code, bars = self.code, _indexed(self.bars)
        problem = (self.items * BLOCK_M, BLOCK_N, self.steps, 1, 0)

        def load():
            operands = "x", "weight"
            code["load_partition"](None, operands, self.memory, bars, self.items, problem, 0, self.ranks, False)

        def multiply(which):
            code["multiply_partition"](self.memory, bars, self.steps, which, False)

        form = {"dtype": "bf16", "block_type": SimpleNamespace(shape=None), "layout": None}
        descs = [SimpleNamespace(step=step, **form) for step in range(self.ranks)]

        def send():
            code["send_partition"](None, self.memory, bars, descs, 100, 0, 7, 0, self.ranks)
            self.closed = True

        engines = {"loads": lambda: self._engine(self.loads), "stores": lambda: self._engine(self.stores)}
        self.schedule.start({
            "load": load, "multiply 0": lambda: multiply(0), "multiply 1": lambda: multiply(1), "send": send, **engines,
        })
        tiles = [entry for entry in self.sent if entry[0] == "tile"]
        assert len(tiles) == 4 * self.items and len(set(tiles)) == len(tiles)
        assert [entry[1] for entry in self.sent if entry[0] == "signal"] == list(range(self.items))

    # ---- stand-ins ----

    def _code(self, source):
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
        gl = SimpleNamespace(
            constexpr=int, static_range=range, maximum=max, float32="fp32", zeros=lambda *_: [],
            NVMMADistributedLayout=lambda *_: None,
        )
        names = {
            "gl": gl, "gluon": SimpleNamespace(jit=lambda function: function),
            "mbarrier": SimpleNamespace(wait=self._wait, arrive=self._arrive, expect=self._expect),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._load, async_copy_shared_to_global=self._store,
                store_wait=self._store_wait,
            ),
            "warpgroup_mma": self._multiply, "warpgroup_mma_wait": self._products,
            "fence_async_shared": self._fence, "await_tma_stores": self._stores_done,
            "request_by_warp": lambda ctx, queue: None, "item_of_warp": self._item, "notify_from_warp": self._signal,
            "signal_at": lambda ctx, half, slot: slot, "ONE_WARP": 1, "FOUR_WARPS": 4,
            "swizzle": lambda tile, tiles_m, tiles_n, group: (tile, 0),
            "row_in_segments": lambda row, owner, ranks, segment: row * ranks + owner * BLOCK_M,
            "write_item": self._write, "read_item": self._read,
        }
        names |= {name: getattr(layout, name).value for name in _CONSTANTS}
        exec(compile(tree, partitions.__file__, "exec"), names)
        names["_halves"] = lambda acc: ((*acc, "left half"), (*acc, "right half"))
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
        if pred:
            bar.arrive()

    def _fence(self):
        part = int(threading.current_thread().name[-1])  # a partition that multiplies fences its own stores
        self.memory[2][part].fenced = True
        self.schedule.until()

    def _expect(self, bar, num_bytes):
        self.schedule.until()
        bar.arrive(num_bytes)

    def _load(self, desc, at, bar, cell):
        def arrive():
            cell.value = (desc, *at)
            bar.complete(cell.num_bytes)

        self.loads.append(arrive)
        self.schedule.until()

    def _store(self, desc, at, cell):
        self.unread, self.unfinished = self.unread + 1, self.unfinished + 1
        _, row, col = at
        part, side = row % BLOCK_M // (BLOCK_M // 2), col // (BLOCK_N // 2)
        item = row // BLOCK_M * self.ranks + desc.step

        def read():
            assert cell.fenced, "TMA reads a store that is not fenced"
            assert cell.value == (item, part, ("left half", "right half")[side]), (cell.value, item, part, side)
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

    def _signal(self, ctx, slot, owner, value):
        item = slot * self.ranks + (owner - 1) % self.ranks
        assert sum(entry[:2] == ("tile", item) for entry in self.sent) == 4, f"the signal of {item} comes too early"
        self.sent.append(("signal", item))

    def _item(self, answer):
        self.next_item += 1
        return self.next_item - 1

    def _write(self, cell, item, layout):
        self.schedule.until()
        cell.value = item

    def _read(self, cell, layout):
        self.schedule.until()
        assert cell.value is not None, "read before it was written"
        return cell.value

    def _multiply(self, x, weight, acc, use_acc, is_async):
        return [*(acc if use_acc else ()), (x, weight)]

    def _products(self, left, deps):
        """Read the operands of all products but the last ``left`` ones, as late as possible."""
        (acc,) = deps
        self.schedule.until()
        done = [_read_product(*each) if isinstance(each[0], Cell) else each for each in acc[: len(acc) - left]]
        acc = done + acc[len(acc) - left :]
        return acc if left else _Sum(acc, self)


class _Sum(tuple):
    """A tile: (work item, part). Checks that its products are those of all steps of one item and part."""

    def __new__(cls, products, run):
        row = products[0][0]
        part, item = row % BLOCK_M // (BLOCK_M // 2), row // BLOCK_M
        owner, tile = item % run.ranks, item // run.ranks
        item = tile * run.ranks + (owner - 1) % run.ranks
        assert products == [(row, step, 0, step) for step in range(run.steps)], products
        return super().__new__(cls, (item, part))

    def to(self, dtype):
        return self


def _read_product(x, weight):
    (_, row, k), (_, col, weight_k) = x.value, weight.value
    assert k % BLOCK_K == weight_k % BLOCK_K == 0
    return row, k // BLOCK_K, col, weight_k // BLOCK_K


class _indexed(list):  # noqa: N801
    def index(self, number):
        return self[number]
