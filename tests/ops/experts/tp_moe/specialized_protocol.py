"""Run the partitions of the warp-specialized kernels of tp_moe on the CPU, with stand-ins for Gluon, in random order.

See ``tests.ops.dense.specialized_protocol``. The source of the partitions and of the functions of ``kernel_route`` runs
unchanged. Only some programs of a launch have started, those with the smallest ids.
"""

import ast
import itertools
import re
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tdkernels.ops.common import gemm_tile
from tdkernels.ops.common.specialized import load, multiply, output, promote, push, store
from tdkernels.ops.experts.grouped_gemm.specialized import partitions
from tdkernels.ops.experts.tp_moe import kernel_route
from tdkernels.ops.experts.tp_moe.specialized import add, copy, kernel_ag_gemm, kernel_gemm_rs, tiles
from tdkernels.rounding import cdiv, round_up
from tests.ops.dense.specialized_protocol import BLOCK_M, BLOCK_N, HALF_M, HALF_N, Schedule, indexed
from tests.ops.dense.specialized_runs import BLOCK, GroupGemmRun

SIGNAL, HALF = 7, 1
STRIDE = 1 << 40  # distance between the addresses of the data of two ranks; rank 0 has the first one
ROWS_AT = 1 << 60  # address of the rows of all experts
ROW_OF_CHOICE = 1 << 30  # pointer to the row of each assignment
TOKENS = 16  # of a work item
MAX_STAGES, TILE_WORDS = kernel_route.MAX_STAGES.value, kernel_route.TILE_WORDS.value

# ---- source, and stand-ins for the language ----


class Constexpr(int):
    value = property(int)


class Pointer:
    """A pointer to an element of a list, or pointers to several."""

    def __init__(self, values, offset=0):
        self.values, self.offset = values, offset

    def __add__(self, offset):
        return Pointer(self.values, self.offset + offset)

    def load(self, mask, other):
        """Return the elements where mask is true, otherwise ``other``."""
        offsets, mask = self._at(mask)
        found = np.full(offsets.shape, other, np.asarray(self.values).dtype)
        found[mask] = np.asarray(self.values)[offsets[mask]]
        return found if found.shape else int(found)

    def store(self, values, mask):
        """Store the values where mask is true. No element may have been stored before: it is NaN."""
        offsets, mask = self._at(mask)
        offsets, values = offsets[mask], np.broadcast_to(values, mask.shape)[mask]
        assert np.isnan(self.values[offsets]).all() and len(set(offsets)) == len(offsets), "stores an element twice"
        self.values[offsets] = values

    def _at(self, mask):
        """Return the offsets and the mask, of one shape."""
        offsets, mask = np.broadcast_arrays(self.offset, mask)
        assert ((offsets >= 0) & (offsets < len(self.values)))[mask].all(), "accesses memory outside of a tensor"
        return offsets, mask


def _of_scalars_or_vectors(of_scalars, of_vectors):
    """Return a function of scalars that also takes vectors."""
    return lambda *args: (of_vectors if any(isinstance(each, np.ndarray) for each in args) else of_scalars)(*args)


ARITHMETIC = {
    "minimum": _of_scalars_or_vectors(min, np.minimum), "maximum": _of_scalars_or_vectors(max, np.maximum),
    "where": _of_scalars_or_vectors(lambda condition, one, other: one if condition else other, np.where),
    "min": lambda values, axis: int(values.min(axis)), "max": lambda values, axis: int(values.max(axis)),
    "sum": lambda values, axis: int(values.sum(axis)), "arange": lambda first, end, layout: np.arange(first, end),
    "load": lambda ptr, mask=True, other=0: ptr.load(mask, other),
}


def source_of(*modules):
    """Return the source of modules, one after the other."""
    return "\n".join(Path(module.__file__).read_text() for module in modules)


def functions_of(module, *names):
    """Return the source of functions of a module, without their decorators."""
    source = source_of(module)
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return "\n".join(ast.get_source_segment(source, found[name]) for name in names)


def without_types(source):
    """Return the source without conversions of integers and pointers."""
    return re.sub(r"\.to\([gt]l\.(int32|int64|pointer_type\(gl\.int32\))\)", "", source)


def compiled(source, **names):
    """Run the source of modules with stand-ins. Return its names."""
    tree = ast.parse(without_types(source))
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    names |= {
        "gl": SimpleNamespace(constexpr=Constexpr, static_range=range, **ARITHMETIC),
        "tl": SimpleNamespace(constexpr=Constexpr, **ARITHMETIC),
        "gluon": SimpleNamespace(jit=lambda function: function), "gluon_jit": lambda **_: lambda function: function,
        "MAX_STAGES": Constexpr(MAX_STAGES), "TILE_WORDS": Constexpr(TILE_WORDS), "BLOCK_N": BLOCK_N,
        "BLOCK_TOKENS": TOKENS, "ONE_WARP": None, "ALIGN": 16,
    }
    exec(compile(tree, "<partitions>", "exec"), names)
    return names


ROUTE = functions_of(kernel_route, "chunk_at_turn", "first_turn_of", "stage_of_turn")
SWIZZLE = functions_of(gemm_tile, "swizzle")
COPY_SOURCE = source_of(push, copy, kernel_ag_gemm) + ROUTE
ADD_SOURCE = source_of(add, kernel_gemm_rs) + ROUTE
# Both kernels have a function ``_load``. ``tiles`` replaces functions of ``partitions`` that have the same name.
_TILES = source_of(load, output, promote, multiply, store, partitions, tiles) + SWIZZLE + "\n"
AG_GEMM_SOURCE = _TILES + functions_of(kernel_ag_gemm, "_load")
GEMM_RS_SOURCE = _TILES + functions_of(kernel_gemm_rs, "_load")


class FastSchedule(Schedule):
    """A schedule of many threads. It wakes only the thread that runs next."""

    def start(self, functions):
        lock = threading.RLock()
        self.turn = threading.Condition(lock)
        self.wake = {name: threading.Condition(lock) for name in functions}
        super().start(functions)

    def _await(self, name):
        self.wake[name].wait_for(lambda: self.running == name or self.errors)
        super()._await(name)

    def _next(self):
        super()._next()
        for name in [self.running] if self.running else self.wake:
            self.wake[name].notify()


def _num_warps():
    """Return the number of warps of the partition that runs."""
    return 4 if threading.current_thread().name.startswith("multiply") else 2


# ---- copies of tokens ----


class CopyRun:
    """The partitions of programs of one rank that push and copy tokens, and the waits of those that load.

    Chunks of the peers arrive in random order. In some runs they do not arrive before this rank has pushed its own.
    """

    def __init__(self, seed, ranks, rows, chunk_rows, stages, programs, source=None):
        self.schedule = FastSchedule(seed)
        choose = self.schedule.random
        self.ranks, self.rows, self.chunk_rows, self.stages, self.programs = ranks, rows, chunk_rows, stages, programs
        self.me, self.num_chunks = choose.randrange(ranks), cdiv(rows, chunk_rows)
        self.row_bytes, self.choices = 2048, 2
        self.num_comm = choose.randint(1, programs + 2) if ranks > 1 else 0
        self.peers_wait = choose.random() < 0.5
        self.slot_bytes = round_up(rows, 8) * self.row_bytes
        self.words = Counter()  # of ``done_ptr``, and the queue of pushes
        self.expected = {}  # by ``await_copies``
        self.copied, self.arrived = Counter(), set()
        self.pushed, self.flags, self.signals = Counter(), Counter(), Counter()
        self.code = self._code(source or COPY_SOURCE)
        self.left = [self._tokens_of(stage) for stage in range(stages)]  # that have not been copied, of each stage

    def __call__(self):
        started = self.schedule.random.randint(1, self.programs)
        sizes = (
            self.rows, self.row_bytes, self.slot_bytes, self.chunk_rows, self.num_chunks, self.ranks, self.stages
        )
        places = 0, self._data_at(None, HALF, self.me), ROWS_AT, ROW_OF_CHOICE
        copies, threads = (None, places, sizes, HALF, SIGNAL, 0, self.me), {"peers": self._arrive}
        for program in range(started):
            for which in range(2):
                threads[f"multiply {which} of {program}"] = partial(
                    self.code["_copy_and_multiply"], copies, None, None, 1, None, which, self.choices, False, False,
                    False, "", False,
                )
            threads[f"push of {program}"] = partial(
                self.code["_push_and_copy"], copies, program, self.num_comm, self.choices, 8
            )
            threads[f"load of {program}"] = partial(self._load, (0, sizes, self.me))
        self.schedule.start(threads)
        tokens = {(source, token): 1 for source in range(self.ranks) for token in range(self.rows)}
        is_copied_once = self.copied == tokens
        assert is_copied_once
        assert {stage: self.words[stage] for stage in range(self.stages)} == self.expected
        self._check_pushes()

    def _tokens_of(self, stage):
        first_turn_of = self.code["first_turn_of"]
        first, last = (first_turn_of(each, self.stages, self.ranks, self.num_chunks) for each in (stage, stage + 1))
        found = set()
        for turn in range(first, last):
            source, chunk = self.code["chunk_at_turn"](turn, self.me, self.ranks, self.num_chunks)
            found |= {(source, token) for token in self._tokens_of_chunk(chunk)}
        return found

    def _tokens_of_chunk(self, chunk):
        return range(chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.rows))

    def _code(self, source):
        code = compiled(
            source, rank=lambda ctx: self.me, num_ranks=lambda ctx: self.ranks, data_at=self._data_at,
            signal_at=self._signal_at, flag_at=lambda ctx, index: index, wait=self._wait, wait_plan=self._wait_plan,
            request_number_by_warps=self._request, item_of_warps=lambda answer: answer,
            request_by_warps=lambda ctx, queue: self._request("pushes", 2), add_release_by_warps=self._release,
            notify_if_last_arriver=self._notify, multiply_experts=lambda *_: None,
        )
        code |= {"_copy": self._push, "_copy_item": self._copy}
        return code

    def _data_at(self, ctx, half, rank):
        assert half == HALF
        return (rank + 1) * STRIDE

    def _signal_at(self, ctx, half, number):
        assert half == HALF and 0 <= number < self.ranks * self.num_chunks
        return number

    def _request(self, counter, warps):
        assert warps == _num_warps()
        self.schedule.until()
        self.words[counter] += 1
        return self.words[counter] - 1

    def _release(self, word, warps):
        assert warps == _num_warps() and 0 <= word < self.stages
        self.schedule.until()
        self.words[word] += 1

    def _wait(self, ctx, word, expected, rank, SCOPE, FOR_TMA=False):  # noqa: N803
        assert SCOPE == "gpu" and FOR_TMA and rank == self.me
        assert self.expected.setdefault(word, expected) == expected
        self.schedule.until(lambda: self.words[word] >= expected)

    def _wait_plan(self, ctx, number, signal, source):
        assert signal == SIGNAL and number // self.num_chunks == source != self.me
        self.schedule.until(lambda: (source, number % self.num_chunks) in self.arrived)

    def _arrive(self):
        """Chunks of the peers arrive."""
        chunks = [
            (source, chunk) for source in range(self.ranks) if source != self.me for chunk in range(self.num_chunks)
        ]
        if self.peers_wait:
            self.schedule.until(lambda: len(self.signals) == len(chunks))
        self.schedule.random.shuffle(chunks)
        for chunk in chunks:
            self.schedule.until()
            self.arrived.add(chunk)

    def _copy(self, tokens_at, rows_at, rows_ptr, token, end, num_words, choices, warps, at_once):
        """Copy tokens to their rows."""
        self.schedule.until()
        source = self.me if tokens_at < STRIDE else (tokens_at - (self.me + 1) * STRIDE) // self.slot_bytes
        place = 0 if source == self.me else (self.me + 1) * STRIDE + source * self.slot_bytes
        assert tokens_at == place and 0 <= source < self.ranks, "the address is of no rank's tokens"
        assert rows_at == ROWS_AT and rows_ptr == ROW_OF_CHOICE + source * self.rows * choices
        assert 8 * num_words == self.row_bytes and choices == self.choices and warps == _num_warps()
        assert end == self.rows and token >= 0 and TOKENS % at_once == 0
        chunk = source, token // self.chunk_rows
        assert source == self.me or chunk in self.arrived, "tokens are copied before they arrive"
        self.schedule.until()
        for each in range(token, min(token + TOKENS, end)):
            self.copied[source, each] += 1
            for tokens in self.left:
                tokens.discard((source, each))

    def _load(self, waits):
        """Wait for stages as the partition that loads does."""
        choose = self.schedule.random
        ready = 0
        for stage in [*sorted(choose.choices(range(self.stages), k=self.stages)), self.stages - 1]:
            self.schedule.until()
            before, ready = ready, self.code["await_copies"](None, stage, ready, waits)
            assert not any(self.left[: stage + 1]), "rows can be loaded before they have been copied"
            assert ready == max(before, stage + 1)

    # ---- pushes ----

    def _push(self, dst, src, row_bytes, rows, num_bytes):
        self.schedule.until()
        peer, offset = dst // STRIDE - 1, dst % STRIDE - self.me * self.slot_bytes
        assert offset == src and row_bytes == num_bytes == self.row_bytes and src % row_bytes == 0
        for row in range(rows):
            self.pushed[peer, src // row_bytes + row] += 1
        self.schedule.until()

    def _notify(self, ctx, flag, count, number, peer, value):
        assert value == SIGNAL and 0 <= flag < self.num_chunks * (self.ranks - 1)
        self.schedule.until()
        self.flags[flag] += 1
        if self.flags[flag] == count:
            source, chunk = divmod(number, self.num_chunks)
            assert source == self.me and all(self.pushed[peer, row] for row in self._tokens_of_chunk(chunk))
            self.signals[peer, chunk] += 1

    def _check_pushes(self):
        peers = [rank for rank in range(self.ranks) if rank != self.me]
        assert self.pushed == {(peer, row): 1 for peer in peers for row in range(self.rows)}
        assert self.signals == {(peer, chunk): 1 for peer in peers for chunk in range(self.num_chunks)}


# ---- sums of tokens ----


class AddRun:
    """The partitions of programs of all ranks that add rows of tokens.

    Each rank has ``tile_rows`` rows of tiles. They are finished slice by slice, but for some tiles that are computed at
    the same time.
    """

    def __init__(self, seed, ranks, rows, n, columns, slice_columns, chunk_rows, tile_rows, programs, source=None):
        self.schedule = FastSchedule(seed)
        self.ranks, self.rows, self.n, self.columns, self.chunk_rows = ranks, rows, n, columns, chunk_rows
        self.is_portable = [rank > 0 and self.schedule.random.random() < 0.2 for rank in range(ranks)]
        self.tile_rows, self.slice_columns, self.programs = tile_rows, slice_columns, programs
        self.groups, self.blocks = chunk_rows // TOKENS, cdiv(n, columns)
        self.num_pieces = cdiv(rows, chunk_rows) * self.groups * self.blocks  # of the tokens of a rank
        each_rank = range(ranks)
        self.items, self.done = [0 for _ in each_rank], [Counter() for _ in each_rank]
        self.stored = [Counter() for _ in each_rank]  # tiles of each tile column
        order = [column for column in range(cdiv(n, BLOCK_N)) for _ in range(tile_rows)]  # slices come in this order
        self.tiles = [order[:] for _ in each_rank]  # that are not finished: their tile columns
        self.added = [set() for _ in each_rank]  # (owner, first token, first column)
        self.signals = [set() for _ in each_rank]
        self.code = compiled(
            source or ADD_SOURCE, signal_at=self._signal_at, wait=self._wait, notify_by_warps=self._notify,
            wait_for_ranks=self._wait_for_ranks, request_by_warps=self._request, item_of_warps=lambda answer: answer,
            multiply_experts=self._multiply,
        )
        self.code |= {"_add_for_peer": self._add_for_peer, "_add_own": self._add_own}

    def __call__(self):
        threads = {}
        for rank in range(self.ranks):
            threads[f"tiles of {rank}"] = partial(self._finish_tiles, rank)
            if self.is_portable[rank]:
                threads[f"portable kernel of {rank}"] = partial(self._add_all, rank)
            else:
                threads |= self._partitions(rank, self.schedule.random.randint(1, self.programs))
        self.schedule.start(threads)
        for rank in range(self.ranks):
            is_complete = sorted(self.added[rank]) == sorted(self._pieces(range(self.ranks)))
            peers = [peer for peer in range(self.ranks) if peer != rank]
            has_all = self.signals[rank] == {
                peer * self.num_pieces + number for peer in peers for number in range(self.num_pieces)
            }
            assert is_complete and has_all

    def _partitions(self, rank, started):
        """Return {name: function} for the partitions of a rank's programs that have started."""
        z = SimpleNamespace(dtype=SimpleNamespace(element_ty=SimpleNamespace(primitive_bitwidth=16)))
        tensors, slices = ("out", z, "rows", None), (self.tile_rows, self.slice_columns)
        sums = rank, tensors, slices, 0, self.rows, self.n, self.chunk_rows, HALF, SIGNAL, rank
        constants = self.columns, 2, self.ranks, False
        found = {}
        for program in range(started):
            for which in range(2):
                found[f"multiply {which} of {program}, {rank}"] = partial(
                    self.code["_multiply_and_add"], sums, rank, None, 1, None, which, False, "", False, *constants
                )
            found[f"add of {program}, {rank}"] = partial(self.code["add_partition"], sums, *constants, 2, 4)
        return found

    def _pieces(self, owners):
        """Return (owner, first token, first column) of all pieces of the tokens of some ranks."""
        tokens, columns = range(0, round_up(self.rows, self.chunk_rows), TOKENS), range(0, self.n, self.columns)
        return list(itertools.product(owners, tokens, columns))

    def _add_all(self, rank):
        """Do the work of the portable kernel, which adds the peers' tokens first. It sets a signal for each piece."""
        pieces = self._pieces(peer for peer in range(self.ranks) if peer != rank)
        self.schedule.random.shuffle(pieces)
        self.schedule.until(lambda: sum(self.stored[rank].values()) == self.tile_rows * cdiv(self.n, BLOCK_N))
        for piece in pieces:
            self.schedule.until()
            self.added[rank].add(piece)
            self.schedule.until()
            self.signals[piece[0]].add(rank * self.num_pieces + self._number_of(piece))
        for piece in self._pieces([rank]):
            number = self._number_of(piece)
            signals = {peer * self.num_pieces + number for peer in range(self.ranks) if peer != rank}
            self.schedule.until(lambda signals=signals: signals <= self.signals[rank])
            self.added[rank].add(piece)

    def _number_of(self, piece):
        """Return the number of a piece among those of its owner, as ``moe_gemm_rs_kernel`` counts them."""
        _, token, column = piece
        within = token % self.chunk_rows // TOKENS * self.blocks + column // self.columns
        return token // self.chunk_rows * self.groups * self.blocks + within

    def _in_flight(self):
        return 2 * self.programs

    def _finish_tiles(self, rank):
        tiles = self.tiles[rank]
        while tiles:
            column = tiles.pop(self.schedule.random.randrange(min(len(tiles), self._in_flight())))
            self.schedule.until()
            self.stored[rank][column] += 1
            self.schedule.until()
            self.done[rank][column // self.slice_columns] += 1

    def _multiply(self, rank, *_):
        """Return when there are no tiles to begin."""
        self.schedule.until(lambda: len(self.tiles[rank]) < self._in_flight())

    def _request(self, rank, queue, warps):
        assert queue == 1 and warps == _num_warps()
        self.schedule.until()
        self.items[rank] += 1
        return self.items[rank] - 1

    def _wait(self, rank, slice_id, expected, me, SCOPE):  # noqa: N803
        assert SCOPE == "gpu" and rank == me
        self.schedule.until(lambda: self.done[rank][slice_id] >= expected)

    def _signal_at(self, rank, half, number):
        assert half == HALF
        return number

    def _notify(self, rank, first, stride, count, owner, value, warps):
        assert value == SIGNAL and owner != rank and count <= 32 * warps and warps == _num_warps()
        self.schedule.until()
        signals = {rank * self.num_pieces + self._number_of(piece) for piece in self.added[rank] if piece[0] == owner}
        for signal in range(first, first + stride * count, stride):
            assert signal in signals, "the signal comes before the sums"
            assert signal not in self.signals[owner], "a signal is set twice"
            self.signals[owner].add(signal)

    def _wait_for_ranks(self, rank, first, stride, expected, warps, with_own):
        assert expected == SIGNAL and not with_own and warps == _num_warps()
        signals = {first + stride * peer for peer in range(self.ranks) if peer != rank}
        self.schedule.until(lambda: signals <= self.signals[rank])

    def _add_for_peer(self, rank, tensors, half, owner, token, column, rows, n, shard_bytes, me, columns, *constants):
        assert owner != me
        self._add(rank, owner, token, column, rows, n, shard_bytes, me, columns, *constants)

    def _add_own(
        self, rank, tensors, half, token, column, rows, n, shard_bytes, me, columns, choices, ranks, rounds, warps,
        at_once,
    ):
        piece = me, token, column
        assert all(piece in self.added[peer] for peer in range(ranks) if peer != me), "sums are read before they arrive"
        self._add(rank, me, token, column, rows, n, shard_bytes, me, columns, choices, warps, at_once)

    def _add(self, rank, owner, token, column, rows, n, shard_bytes, me, columns, choices, warps, at_once):
        assert (rank, rows, n, columns, choices, warps) == (me, self.rows, self.n, self.columns, 2, _num_warps())
        assert shard_bytes == round_up(2 * rows * n, 16) and TOKENS % at_once == 0
        assert token % TOKENS == 0 <= token and column % columns == 0 <= column < n
        self.schedule.until()
        for tile_column in range(column // BLOCK_N, cdiv(min(column + columns, n), BLOCK_N)):
            assert self.stored[rank][tile_column] == self.tile_rows, "rows are added before they are complete"
        self.schedule.until()
        assert (owner, token, column) not in self.added[rank], "tokens are added twice"
        self.added[rank].add((owner, token, column))


# ---- tiles ----


class MoeRun(GroupGemmRun):
    """A program of a kernel that loads, multiplies and stores tiles of the table. Other programs have some of them.

    A work item is known by the number that is passed on. In buffers its rows begin at row ``number * BLOCK_M``, and its
    columns at column 0, as in ``GroupGemmRun``.
    """

    partitions = tiles

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

    def quarters(self, item):
        return super().quarters(item) if item in self.taken else []

    def threads(self):
        form = {"dtype": "bf16", "block_type": BLOCK, "layout": None}
        x, y, pre = (SimpleNamespace(name=name, **form) for name in ("x", "y", "pre"))
        table = Pointer([word for entry in self.table for word in (*entry, -1)])
        begins = Pointer([sum(stage < each for stage in self.stages) for each in range(2 * MAX_STAGES)])
        tiles = table, begins, self.tiles_n, self.schedule.random.choice([1, 2, 8])
        shared = self.memory, indexed(self.bars)

        def load():
            self.load((x, "weight"), *shared, tiles, (self.n, None), SIGNAL, self.steps)

        def store():
            self.store(*shared, ("y", y), ("pre", pre), tiles, self.n)
            self.closed = True

        return super().threads() | {"load": load, "store": store}

    def load(self, operands, memory, bars, tiles, problem, signal, steps):
        raise NotImplementedError

    def store(self, memory, bars, y, pre, tiles, n):
        raise NotImplementedError

    def _code(self, source):
        code = super()._code(without_types(source))
        vars(code["gl"]).update(ARITHMETIC)
        return code

    def names(self):
        names = super().names() | {
            "tl": SimpleNamespace(**ARITHMETIC), "MAX_STAGES": MAX_STAGES, "TILE_WORDS": TILE_WORDS,
            "add_release_by_warps": self._release, "await_copies": self._await_copies,
            "request_by_warp": self._request, "partition_barrier": lambda: self.schedule.until(),
        }
        del names["_place_of"]  # a function of ``tiles``
        return names

    def _request(self, ctx, queue):
        assert queue == 0, "the other queue has copies or sums"

    def _item(self, answer):
        """Return the next work item. Other programs may have fetched some."""
        self.next_item += self.schedule.random.choice([1, 1, 1, 2])
        if self.next_item <= self.items:
            self.fetched.append(self.next_item - 1)
        return self.next_item - 1

    def _begin_item(self, memory, bars, item, place, turn):
        number = item // 2
        assert item % 2 == (self.ends[number] <= HALF_M) and place == self.place_of_item(number)
        assert number not in self.taken, "a tile is computed twice"
        self.taken.append(number)
        self.loading = number
        self.begin_item(memory, bars, item, place, turn)

    def place_of_item(self, item):
        expert, row, _ = self.table[item // self.tiles_n]
        return row, item % self.tiles_n, expert

    def _await_copies(self, ctx, stage, ready, waits):
        raise NotImplementedError

    def check_loads(self, tile):
        """Check that rows of a tile can be loaded."""

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
            if pred:
                self.check_loads(number // self.tiles_n)
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


class MoeAgGemmRun(MoeRun):
    """A program of ``moe_ag_gemm_specialized_kernel``. The rows of the stages are copied in random order."""

    def __init__(self, seed, num_tiles, tiles_n, steps, activation, source=None, promotes=False):
        self.copied = set()  # stages
        super().__init__(seed, num_tiles, tiles_n, steps, activation, source or AG_GEMM_SOURCE, promotes)

    def threads(self):
        def copy_rows():
            stages = list(range(MAX_STAGES))
            self.schedule.random.shuffle(stages)
            for stage in stages:
                self.schedule.until()
                self.copied.add(stage)

        return super().threads() | {"copies": copy_rows}

    def load(self, operands, memory, bars, tiles, problem, signal, steps):
        self.code["_load"](None, operands, memory, bars, tiles, problem, signal, steps, "waits", self.is_pair, False)

    def store(self, memory, bars, y, pre, tiles, n):
        self.code["store_partition"](
            memory, bars, y, pre, tiles, n, 0, 1, self.is_pair, self.activation == "keep", False
        )

    def _await_copies(self, ctx, stage, ready, waits):
        assert waits == "waits"
        self.schedule.until(lambda: self.copied >= set(range(ready, stage + 1)))
        return max(ready, stage + 1)

    def check_loads(self, tile):
        assert self.copied >= set(range(self.stages[tile] + 1)), "rows are loaded before they are copied"


class MoeGemmRsRun(MoeRun):
    """A program of ``moe_gemm_rs_specialized_kernel``."""

    def __init__(self, seed, num_tiles, tiles_n, steps, slice_columns, source=None, promotes=False):
        self.slice_columns, self.num_tiles = slice_columns, num_tiles
        self.counted = []
        super().__init__(seed, num_tiles, tiles_n, steps, None, source or GEMM_RS_SOURCE, promotes)

    def __call__(self):
        super().__call__()
        assert sorted(self.counted) == sorted(self.taken)

    def load(self, operands, memory, bars, tiles, problem, signal, steps):
        slices = self.num_tiles, self.slice_columns
        self.code["_load"](None, operands, memory, bars, tiles, problem, signal, steps, slices, False)

    def store(self, memory, bars, y, pre, tiles, n):
        self.code["store_partition"](memory, bars, y, y, tiles, n, 0, self.slice_columns, False, False, True)

    def _release(self, word, warps):
        assert warps == 1 and word == self.storing % self.tiles_n // self.slice_columns
        assert {entry[1:] for entry in self.sent} >= set(self.quarters(self.storing)), "a tile is counted too early"
        assert self.storing not in self.counted, "a tile is counted twice"
        self.counted.append(self.storing)
        self.schedule.until()
