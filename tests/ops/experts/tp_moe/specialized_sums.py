"""Run the partitions of ``moe_gemm_rs_specialized_kernel`` that add rows; see ``specialized_protocol``."""

import itertools
from collections import Counter
from functools import partial
from types import SimpleNamespace

from tdkernels.ops.experts.tp_moe.launch_specialized import packed
from tdkernels.rounding import cdiv, round_up
from tests.ops.dense.specialized_protocol import BLOCK_N
from tests.ops.experts.tp_moe.specialized_protocol import (
    ADD_SOURCE,
    HALF,
    SIGNAL,
    STRIDE,
    TOKENS,
    FastSchedule,
    compiled,
    num_warps,
    slice_of,
)


class AddRun:
    """The partitions of programs of all ranks that add rows of tokens.

    Each rank has ``tile_rows`` rows of tiles. They are finished slice by slice, but for some tiles that are computed at
    the same time.
    """

    def __init__(
        self, seed, ranks, rows, n, columns, slices, chunk_rows, tile_rows, programs, large_slices=None, source=None,
        own_delay=1,
    ):
        """Create a run. ``slices`` are (first units, tile columns of a unit). All but the last are large by default."""
        self.schedule = FastSchedule(seed)
        self.firsts, self.unit = slices
        self.order = len(self.firsts) - 1 if large_slices is None else large_slices, own_delay
        self.ranks, self.rows, self.n, self.columns, self.chunk_rows = ranks, rows, n, columns, chunk_rows
        self.is_portable = [rank > 0 and self.schedule.random.random() < 0.2 for rank in range(ranks)]
        self.tile_rows, self.programs = tile_rows, programs
        self.groups, self.blocks = chunk_rows // TOKENS, cdiv(n, columns)
        self.num_pieces = cdiv(rows, chunk_rows) * self.groups * self.blocks  # of the tokens of a rank
        each_rank = range(ranks)
        self.items, self.done = [0 for _ in each_rank], [Counter() for _ in each_rank]
        self.stored = [Counter() for _ in each_rank]  # tiles of each tile column
        order = [column for column in range(cdiv(n, BLOCK_N)) for _ in range(tile_rows)]  # slices come in this order
        self.tiles = [order[:] for _ in each_rank]  # that are not finished: their tile columns
        self.added = [set() for _ in each_rank]  # (owner, first token, first column); of its own tokens: of each part
        self.signals = [set() for _ in each_rank]
        self.marks = [{} for _ in each_rank]  # {piece of a trace: kinds}
        self.code = compiled(
            source or ADD_SOURCE, signal_at=self._signal_at, wait=self._wait, notify_by_warps=self._notify,
            wait_for_ranks=self._wait_for_ranks, request_by_warps=self._request, item_of_warps=lambda answer: answer,
            mark_by_warps=self._mark, ALL_PEERS=-2, multiply_experts=self._multiply,
            data_at=lambda rank, half, owner: (rank * ranks + owner) * STRIDE,
        )
        self.part = TOKENS // self.code["PARTS"]
        self.code |= {"add_for_peer": self._add_for_peer, "add_own": self._add_own}

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
            peers = [peer for peer in range(self.ranks) if peer != rank]
            pieces = self._pieces(peers) + self._pieces([rank], self.part)
            is_complete = self.added[rank] == {piece for piece in pieces if piece[1] < self.rows}
            has_all = self.signals[rank] == {
                peer * self.num_pieces + number for peer in peers for number in range(self.num_pieces)
            }
            assert is_complete and has_all
            self._check_marks(rank)

    def _check_marks(self, rank):
        """Check that a trace has all work items of a rank, after the tiles, with their kinds in order."""
        first = self.tile_rows * cdiv(self.n, BLOCK_N)
        assert sorted(self.marks[rank]) == list(range(first, first + len(self.marks[rank])))
        owners = {(): 0, ("joins", "pushes"): 0, ("sums",): 0}
        for kinds in self.marks[rank].values():
            assert kinds[:2] == ["starts", "waits"] and kinds[-1] == "ends"
            owners[tuple(kinds[2:-1])] += 1
        assert owners["sums",] > 0 or self.is_portable[rank]
        assert (owners["joins", "pushes"] > 0) == (self.ranks > 1 and not self.is_portable[rank])

    def _mark(self, trace, kind, warps, peer=-1):
        assert warps == num_warps()
        self.marks[trace[0]].setdefault(trace[1], []).append(kind)

    def _partitions(self, rank, started):
        """Return {name: function} for the partitions of a rank's programs that have started."""
        z = SimpleNamespace(dtype=SimpleNamespace(element_ty=SimpleNamespace(primitive_bitwidth=16)))
        tensors, slices = ("out", z, "rows", None), (self.tile_rows, packed(self.firsts), self.unit)
        sums = rank, tensors, slices, 0, self.rows, self.n, self.chunk_rows, self.order, HALF, SIGNAL, rank
        constants = self.columns, 2, self.ranks, False
        found = {}
        for program in range(started):
            for which in range(2):
                found[f"multiply {which} of {program}, {rank}"] = partial(
                    self.code["_multiply_and_add"], sums, rank, None, 1, None, rank, which, False, "", False, *constants
                )
            found[f"add of {program}, {rank}"] = partial(self.code["add_partition"], sums, rank, *constants, 2, False)
        return found

    def _pieces(self, owners, tokens=TOKENS):
        """Return (owner, first token, first column) of all pieces of ``tokens`` tokens of some ranks."""
        first = range(0, round_up(self.rows, self.chunk_rows), tokens)
        return list(itertools.product(owners, first, range(0, self.n, self.columns)))

    def _add_all(self, rank):
        """Do the work of the portable kernel, which adds the peers' tokens first. It sets a signal for each piece."""
        pieces = self._pieces(peer for peer in range(self.ranks) if peer != rank)
        self.schedule.random.shuffle(pieces)
        self.schedule.until(lambda: sum(self.stored[rank].values()) == self.tile_rows * cdiv(self.n, BLOCK_N))
        for piece in pieces:
            self.schedule.until()
            self._count(rank, piece)
            self.schedule.until()
            self.signals[piece[0]].add(rank * self.num_pieces + self._number_of(piece))
        for piece in self._pieces([rank]):
            number = self._number_of(piece)
            signals = {peer * self.num_pieces + number for peer in range(self.ranks) if peer != rank}
            self.schedule.until(lambda signals=signals: signals <= self.signals[rank])
            for token in range(piece[1], piece[1] + TOKENS, self.part):
                self._count(rank, (rank, token, piece[2]))

    def _count(self, rank, piece):
        """Note that a rank has added a piece, if it has tokens."""
        assert piece not in self.added[rank], "tokens are added twice"
        self.added[rank] |= {piece} if piece[1] < self.rows else set()

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
            self.done[rank][slice_of(column, self.firsts, self.unit)] += 1

    def _multiply(self, rank, *_):
        """Return when there are no tiles to begin."""
        self.schedule.until(lambda: len(self.tiles[rank]) < self._in_flight())

    def _request(self, rank, queue, warps):
        assert queue == 1 and warps == num_warps()
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
        assert value == SIGNAL and owner != rank and count <= 32 * warps and warps == num_warps()
        self.schedule.until()
        awaited = {
            rank * self.num_pieces + self._number_of(piece): piece[1] >= self.rows or piece in self.added[rank]
            for piece in self._pieces([owner])
        }
        for signal in range(first, first + stride * count, stride):
            assert awaited.get(signal), "the signal comes before the sums"
            assert signal not in self.signals[owner], "a signal is set twice"
            self.signals[owner].add(signal)

    def _wait_for_ranks(self, rank, first, stride, expected, warps, with_own):
        assert expected == SIGNAL and not with_own and warps == num_warps()
        signals = {first + stride * peer for peer in range(self.ranks) if peer != rank}
        self.schedule.until(lambda: signals <= self.signals[rank])

    def _add_for_peer(self, tensors, to, owner, token, end, column, *others):
        (rank, rank_of_memory), offset = divmod(to // STRIDE, self.ranks), to % STRIDE
        assert rank_of_memory == owner != rank and offset == rank * round_up(2 * self.rows * self.n, 16)
        *sizes, passes = others
        assert passes > 0
        self._add(rank, owner, token, end, column, TOKENS, *sizes)

    def _add_own(
        self, tensors, parts, part_bytes, token, end, column, rows, n, me, columns, choices, ranks, rounds, warps, few
    ):
        assert parts == (me * ranks + me) * STRIDE and part_bytes == round_up(2 * rows * n, 16)
        piece = me, token // TOKENS * TOKENS, column
        there = all(token >= rows or piece in self.added[peer] for peer in range(ranks) if peer != me)
        assert there, "sums are read before they arrive"
        assert not few
        self._add(me, me, token, end, column, self.part, rows, n, columns, choices, warps, self.part)

    def _add(self, rank, owner, token, end, column, step, rows, n, columns, choices, warps, at_once):
        assert (rows, n, columns, choices, warps) == (self.rows, self.n, self.columns, 2, num_warps())
        assert end <= rows and step % at_once == 0 == token % step and column % columns == 0
        assert column < n
        self.schedule.until()
        for tile_column in range(column // BLOCK_N, cdiv(min(column + columns, n), BLOCK_N)):
            assert self.stored[rank][tile_column] == self.tile_rows, "rows are added before they are complete"
        self.schedule.until()
        for first in range(token, end, step):
            assert first // self.chunk_rows == token // self.chunk_rows, "tokens of another chunk are added"
            self._count(rank, (owner, first, column))
