"""Run the exchange of ``gemm_ar_specialized_kernel`` on the CPU, on all ranks, with NumPy instead of Gluon.

The source of the work items runs unchanged, apart from conversions of types, with small tiles. Each partition is a
thread; a seed selects which one continues after each access to memory, and how many programs of a rank have started.
The memory of each rank is an array, in which an element has one address. See ``specialized_protocol``.
"""

import ast
import re
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tdkernels.ops.dense.direct_specialized import add
from tdkernels.ops.dense.gemm_ar.specialized import exchange, kernel, places
from tdkernels.rounding import cdiv
from tests.support.thread_schedule import Schedule

BLOCK_M, BLOCK_N, SPLIT, PARTS, ROWS = 8, 4, 4, 2, 1
SIGNAL, HALF = 7, 1
STRIDE = 1 << 20  # distance between the addresses of the memory of two ranks
TILE = BLOCK_M * BLOCK_N
SOURCE = "\n".join(
    re.sub(r"\.to\((?:gl\.\w+|dtype)\)", "", Path(module.__file__).read_text())
    for module in (places, add, exchange, kernel)
)


class _Vector(np.ndarray):
    """An array with the layout that Gluon's tensors have."""

    type = SimpleNamespace(layout=None)


class _Output:
    """A pointer to elements of z or of the bias."""

    dtype = SimpleNamespace(element_ty=SimpleNamespace(primitive_bitwidth=8))  # one address for each element

    def __init__(self, values, offsets=0):
        self.values, self.offsets = values, offsets

    def __add__(self, offsets):
        return _Output(self.values, self.offsets + offsets)


def compiled(source=SOURCE, **names):
    """Run the source of the modules with stand-ins. Return its names."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    gl = SimpleNamespace(
        constexpr=int, static_range=range, minimum=min, maximum=max,
        where=lambda condition, one, other: one if condition else other,
        arange=lambda first, end, layout: np.arange(first, end).view(_Vector), SliceLayout=lambda *_: None,
        BlockedLayout=lambda *_: None, zeros=lambda shape, dtype, layout: np.zeros(shape), float32=None,
        load=names.pop("load", None), store=names.pop("store", None),
    )
    stand_ins = {
        "gl": gl, "gluon": SimpleNamespace(jit=lambda function: function),
        "gluon_jit": lambda **_: lambda function: function, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N,
        "swizzle": lambda tile, tiles_m, tiles_n, group_m: (tile // tiles_n, tile % tiles_n),
        "pointer_to": lambda address, dtype: address,
    }
    found = {**stand_ins, **names}
    exec(compile(tree, "<exchange>", "exec"), found)
    found.update(names, _RECEIVED_ROWS=2)  # functions and a constant of the modules
    return found


class ExchangeRun:
    """All ranks of one launch, with an output [m, n]."""

    def __init__(self, seed, ranks, m, n, delay, programs, source=SOURCE):
        self.schedule, self.ranks, self.programs = Schedule(seed), ranks, programs
        random = self.schedule.random
        self.problem = m, n, 3, 8
        self.tiles = cdiv(m, BLOCK_M) * cdiv(n, BLOCK_N)
        self.bundles = cdiv(self.tiles, ranks)
        self.delay = min(delay, self.bundles)
        values = np.random.default_rng(seed)
        self.partials = values.integers(-99, 99, (ranks, self.bundles * ranks, BLOCK_M, BLOCK_N)).astype(float)
        self.bias = values.integers(-99, 99, n).astype(float)
        self.memory = [np.full(2 * self.bundles * ranks * TILE, np.nan) for _ in range(ranks)]
        self.z = [np.full((m, n), np.nan) for _ in range(ranks)]
        self.signals, self.flags = [set() for _ in range(ranks)], [Counter() for _ in range(ranks)]
        self.items, self.left = [0] * ranks, [list(range(self.bundles * ranks)) for _ in range(ranks)]
        self.marks = {}  # {(rank, piece of a trace): kinds}
        self.is_portable = [rank > 0 and random.random() < 0.2 for rank in range(ranks)]
        self.code = compiled(
            source, load=self._load, store=self._store, data_at=self._data_at,
            signal_at=lambda ctx, half, number: number, flag_at=lambda ctx, number: number,
            wait_for_ranks=self._wait_for_ranks, wait_for_rank=self._wait_for_rank,
            is_last_arriver_of_warps=self._is_last, notify_all_by_warps=self._notify_all, multiply_tiles=self._multiply,
            request_by_warps=self._request, item_of_warps=lambda answer: answer, mark_by_warps=self._mark, ALL_PEERS=-2,
        )

    def __call__(self):
        threads = {}
        for rank in range(self.ranks):
            threads[f"tiles of {rank}"] = partial(self._send_tiles, rank)
            if self.is_portable[rank]:
                threads[f"portable kernel of {rank}"] = partial(self._exchange_all, rank)
            else:
                threads |= self._partitions(rank)
        self.schedule.start(threads)
        for rank in range(self.ranks):
            assert np.array_equal(self.z[rank], self._expected()), f"z of rank {rank}"
            assert not any(self.flags[rank].values()), "a flag is not reset"
            if not self.is_portable[rank]:
                self._check_marks(rank)

    def _check_marks(self, rank):
        """Check that a trace would have all work items, with their kinds in order."""
        first = self.bundles * self.ranks
        for item in range(self.bundles * (SPLIT + (self.ranks - 1) * PARTS)):
            work = self.marks[rank, first + item]
            assert work in (["starts", "ends"], *(["starts", "waits", kind, "ends"] for kind in ("sums", "receives")))

    def _partitions(self, rank):
        """Return {name: function} for the partitions of the programs of a rank that have started."""
        num_items = self.bundles * (SPLIT + (self.ranks - 1) * PARTS)
        tensors = _Output(self.z[rank]), _Output(self.bias)
        call = rank, self.problem, *tensors, num_items, self.delay, HALF, SIGNAL, rank, rank
        constants = ROWS, SPLIT, PARTS, self.ranks, True
        found = {}
        for program in range(self.schedule.random.randint(1, self.programs)):
            for which in range(2):
                found[f"multiply {which} of {program}, {rank}"] = partial(
                    self.code["_multiply_and_exchange"], call, rank, None, 3, None, None, which, False, "", False,
                    False, *constants,
                )
            found[f"exchange of {program}, {rank}"] = partial(self.code["exchange_partition"], call, *constants, 2)
        return found

    def _expected(self):
        m, n, *_ = self.problem
        columns = cdiv(n, BLOCK_N)
        wide = np.zeros((cdiv(m, BLOCK_M) * BLOCK_M, columns * BLOCK_N))
        for tile in range(self.tiles):
            row, col = tile // columns * BLOCK_M, tile % columns * BLOCK_N
            wide[row : row + BLOCK_M, col : col + BLOCK_N] = self.partials[:, tile].sum(0)
        return wide[:m, :n] + self.bias

    def _send_tiles(self, rank):
        """Store the tiles at their owners, some of them at the same time, and set their signals."""
        left = self.left[rank]
        while left:
            item = left.pop(self.schedule.random.randrange(min(len(left), 2 * self.programs)))
            owner, bundle = (rank + 1 + item % self.ranks) % self.ranks, item // self.ranks
            slot = rank * 2 * self.bundles + bundle
            self.schedule.until()
            tile = self.partials[rank, bundle * self.ranks + owner]
            self.memory[owner][slot * TILE : (slot + 1) * TILE] = tile.ravel()
            self.schedule.until()
            self.signals[owner].add(slot)

    def _exchange_all(self, rank):
        """Do the work of the portable kernel: first add this rank's tiles, then receive those of the peers."""
        columns, per_source = cdiv(self.problem[1], BLOCK_N), 2 * self.bundles
        for owner in sorted(range(self.ranks), key=lambda each: each != rank):
            for tile in range(owner, self.tiles, self.ranks):
                bundle = tile // self.ranks
                slot = owner * per_source + self.bundles + bundle
                if owner == rank:
                    awaited = {source * per_source + bundle for source in range(self.ranks)}
                    self.schedule.until(lambda awaited=awaited: awaited <= self.signals[rank])
                    col = tile % columns * BLOCK_N
                    bias = np.resize(self.bias[col : col + BLOCK_N], BLOCK_N)
                    total = self.partials[:, tile].sum(0) + bias
                    for peer in range(self.ranks):
                        self.schedule.until()
                        if peer != rank:
                            self.memory[peer][slot * TILE : (slot + 1) * TILE] = total.ravel()
                            self.signals[peer].add(slot)
                else:
                    self.schedule.until(lambda slot=slot: slot in self.signals[rank])
                    total = self.memory[rank][slot * TILE : (slot + 1) * TILE].reshape(BLOCK_M, BLOCK_N)
                row, col = tile // columns * BLOCK_M, tile % columns * BLOCK_N
                part = self.z[rank][row : row + BLOCK_M, col : col + BLOCK_N]
                part[:] = total[: part.shape[0], : part.shape[1]]

    # ---- stand-ins ----

    def _multiply(self, ctx, *_):
        """Return when there are no tiles to begin."""
        self.schedule.until(lambda: len(self.left[ctx]) < 2 * self.programs)

    def _request(self, ctx, queue, warps):
        assert queue == 1
        self.schedule.until()
        self.items[ctx] += 1
        return self.items[ctx] - 1

    def _mark(self, trace, kind, warps, peer=-1):
        self.marks.setdefault(trace, []).append(kind)

    def _data_at(self, ctx, half, peer):
        assert half == HALF
        return peer * STRIDE

    def _load(self, pointer, mask=True, other=None, eviction_policy=""):
        self.schedule.until()
        if isinstance(pointer, _Output):
            offsets, mask = np.broadcast_arrays(pointer.offsets, mask)
            return np.where(mask, pointer.values[np.where(mask, offsets, 0)], other)
        (rank,) = {*(pointer // STRIDE).ravel().tolist()}
        found = self.memory[rank][pointer % STRIDE]
        assert not np.isnan(found).any(), "data is read before it arrives"
        return found

    def _store(self, pointer, values, mask=True):
        self.schedule.until()
        if isinstance(pointer, _Output):
            offsets, values, mask = np.broadcast_arrays(pointer.offsets, values, mask)
            assert np.isnan(pointer.values.flat[offsets[mask]]).all(), "an element is stored twice"
            pointer.values.flat[offsets[mask]] = values[mask]
            return
        (rank,) = {*(pointer // STRIDE).ravel().tolist()}
        assert np.isnan(self.memory[rank][pointer % STRIDE]).all(), "a sum is stored twice, or in a partial"
        self.memory[rank][pointer % STRIDE] = values

    def _wait_for_ranks(self, ctx, first, stride, expected, warps):
        assert expected == SIGNAL
        signals = {first + stride * source for source in range(self.ranks)}
        self.schedule.until(lambda: signals <= self.signals[ctx])

    def _wait_for_rank(self, ctx, number, expected, owner, warps):
        assert expected == SIGNAL and number // (2 * self.bundles) == owner != ctx
        self.schedule.until(lambda: number in self.signals[ctx])

    def _is_last(self, flag, count, warps):
        rank = int(self.schedule.running.split(", ")[1])
        self.schedule.until()
        self.flags[rank][flag] += 1
        is_last = self.flags[rank][flag] == count
        if is_last:
            self.flags[rank][flag] = 0
        self.schedule.until()
        return is_last

    def _notify_all(self, ctx, number, value, warps):
        assert value == SIGNAL
        for peer in range(self.ranks):
            if peer != ctx:
                self.schedule.until()
                sums = self.memory[peer][number * TILE : (number + 1) * TILE]
                assert not np.isnan(sums).any(), "a signal comes before its sums"
                assert number not in self.signals[peer], "a signal is set twice"
                self.signals[peer].add(number)
