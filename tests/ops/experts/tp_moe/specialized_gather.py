"""Run the partitions of ``moe_ag_gemm_specialized_kernel`` that push tokens, and the waits of those that load.

See ``specialized_protocol``.
"""

import itertools
from collections import Counter
from functools import partial

import numpy as np

from tdkernels.ops.common.tile_config import PUSHED_BYTES, PUSHED_ROW_BYTES, PUSHED_ROWS, num_parts
from tdkernels.rounding import cdiv, round_up
from tests.ops.experts.tp_moe.specialized_protocol import (
    HALF,
    MAX_STAGES,
    PUSH_SOURCE,
    SIGNAL,
    STRIDE,
    FastSchedule,
    Pointer,
    compiled,
    num_warps,
)


class GatherRun:
    """The partitions of programs of one rank that push tokens, and the waits of those that load.

    Chunks of the peers arrive in random order. In some runs they do not arrive before this rank has pushed its own.
    """

    def __init__(self, seed, ranks, rows, chunk_rows, stages, programs, source=None):
        self.schedule = FastSchedule(seed)
        choose = self.schedule.random
        self.ranks, self.rows, self.chunk_rows, self.stages, self.programs = ranks, rows, chunk_rows, stages, programs
        self.me, self.num_chunks = choose.randrange(ranks), cdiv(rows, chunk_rows)
        self.row_bytes = choose.choice([2048, 6160])
        self.num_comm = choose.choice([choose.randint(1, programs + 2), 40]) if ranks > 1 else 0
        self.peers_wait = choose.random() < 0.5
        self.slot_bytes = round_up(rows, 8) * self.row_bytes
        self.arrived, self.items = set(), 0
        self.pushed, self.flags, self.signals = Counter(), Counter(), Counter()
        self.marks = {}  # {piece of a trace: kinds}
        self.code = self._code(source or PUSH_SOURCE)

    def __call__(self):
        started = self.schedule.random.randint(1, self.programs)
        sizes = (
            self.rows, self.row_bytes, self.slot_bytes, self.chunk_rows, self.num_chunks, self.ranks, self.stages
        )
        shard, threads = (None, 0, HALF, SIGNAL, sizes), {"peers": self._arrive}
        tiles = None, Pointer(list(range(2 * MAX_STAGES))), 3, 1  # MAX_STAGES tile rows, three tile columns
        for program in range(started):
            threads[f"push of {program}"] = partial(self.code["_push"], shard, program, self.num_comm, "trace", tiles)
            threads[f"load of {program}"] = partial(self._load, (HALF, SIGNAL, sizes, self.me))
        self.schedule.start(threads)
        self._check_pushes()

    def _chunks_of(self, stage):
        """Return the chunks of the peers in a stage."""
        first_turn_of = self.code["first_turn_of"]
        first, last = (first_turn_of(each, self.stages, self.ranks, self.num_chunks) for each in (stage, stage + 1))
        turns = range(first, last)
        chunks = {self.code["chunk_at_turn"](turn, self.me, self.ranks, self.num_chunks) for turn in turns}
        return {(source, chunk) for source, chunk in chunks if source != self.me}

    def _code(self, source):
        code = compiled(
            source, rank=lambda ctx: self.me, num_ranks=lambda ctx: self.ranks, data_at=self._data_at,
            signal_at=self._signal_at, flag_at=lambda ctx, index: index, wait_each=self._wait_each,
            request_by_warps=self._request, item_of_warps=lambda answer: answer, is_last_arriver_of_warps=self._is_last,
            notify_all_by_warps=self._notify, ALL_PEERS=-2, mark_by_warps=self._mark, PUSHED_BYTES=PUSHED_BYTES,
            PUSHED_ROWS=PUSHED_ROWS, PUSHED_ROW_BYTES=PUSHED_ROW_BYTES,
        )
        code["_copy"] = self._push
        return code

    def _data_at(self, ctx, half, rank):
        assert half == HALF
        return (rank + 1) * STRIDE

    def _signal_at(self, ctx, half, number):
        assert half == HALF
        return number

    def _wait_each(self, ctx, numbers, signal, sources, there):
        """Each thread waits for a signal of a peer, or only reads a word."""
        assert signal == SIGNAL and (numbers >= 0).all() and (numbers < self.ranks * self.num_chunks).all()
        assert (numbers // self.num_chunks == sources).all() and not (there & (sources == self.me)).any()
        assert len(numbers) == 32 * num_warps()
        needed = {(int(number) // self.num_chunks, int(number) % self.num_chunks) for number in numbers[there]}
        self.schedule.until(lambda: needed <= self.arrived)

    def _load(self, waits):
        """Wait for stages as the partition that loads does."""
        choose = self.schedule.random
        ready = 0
        for stage in [*sorted(choose.choices(range(self.stages), k=self.stages)), self.stages - 1]:
            self.schedule.until()
            before, ready = ready, self.code["await_tokens"](None, stage, ready, waits)
            needed = set().union(*(self._chunks_of(each) for each in range(stage + 1)))
            assert needed <= self.arrived, "tokens can be loaded before they arrive"
            assert ready == max(before, stage + 1)

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

    # ---- pushes ----

    def _request(self, ctx, queue, warps):
        assert queue == 1 and warps == num_warps()
        self.schedule.until()
        self.items += 1
        return self.items - 1

    def _push(self, ctx, half, offset, src, first, row_bytes, rows, num_bytes, warps):
        assert warps == num_warps() and first == 1 and half == HALF
        self.schedule.until()
        assert offset - self.me * self.slot_bytes == src and row_bytes == self.row_bytes
        begin = src % row_bytes
        assert begin % PUSHED_ROW_BYTES == 0 and begin + num_bytes <= row_bytes
        blocks = range(begin // PUSHED_ROW_BYTES, cdiv(begin + num_bytes, PUSHED_ROW_BYTES))
        for step in range(first, self.ranks):
            for row in range(rows):
                for block in blocks:
                    self.pushed[(self.me + step) % self.ranks, src // row_bytes + row, block] += 1
            self.schedule.until()

    def _is_last(self, flag, count, warps):
        assert 0 <= flag < self.num_chunks and warps == num_warps()
        self.schedule.until()
        self.flags[flag] += 1
        return self.flags[flag] == count

    def _notify(self, ctx, number, value, warps, first):
        assert value == SIGNAL and warps == num_warps() and first == 0
        self.schedule.until()
        source, chunk = divmod(number, self.num_chunks)
        rows = range(chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.rows))
        for peer in (rank for rank in range(self.ranks) if rank != self.me):
            assert source == self.me and all(self.pushed[peer, row, block] for row in rows for block in self._blocks())
            self.signals[peer, chunk] += 1

    def _mark(self, trace, kind, warps, peer=-1):
        assert trace[0] == "trace" and warps == num_warps()
        self.marks.setdefault(trace[1], []).append(kind)

    def _blocks(self):
        """Return the blocks of a row that are copied at a time."""
        return range(cdiv(self.row_bytes, PUSHED_ROW_BYTES))

    def _check_pushes(self):
        first = 3 * MAX_STAGES
        assert sorted(self.marks) == list(range(first, first + len(self.marks)))
        assert all(kinds == ["starts", "pushes", "ends"] for kinds in self.marks.values())
        parts = num_parts(min(self.chunk_rows, self.rows), self.row_bytes, self.ranks, self.num_chunks, self.num_comm)
        assert len(self.marks) == (self.num_chunks * parts if self.ranks > 1 else 0)
        peers = [rank for rank in range(self.ranks) if rank != self.me]
        each = itertools.product(peers, range(self.rows), self._blocks())
        assert self.pushed == dict.fromkeys(each, 1)
        assert self.signals == {(peer, chunk): 1 for peer in peers for chunk in range(self.num_chunks)}


def addresses_of(code, assignments, ranks, me, rows, row_bytes, slot_rows, choices, row, count):
    """Return the addresses of the first elements of the rows of a tile, as the partition that loads computes them.

    Elements have 2 bytes.
    """
    sizes = rows, row_bytes, slot_rows * row_bytes, 16, cdiv(rows, 16), ranks, 2
    places, dtype = (STRIDE, 2 * STRIDE), type("Dtype", (), {"primitive_bitwidth": 16})
    halves = code["_assignments"](assignments, row, count, me, sizes, choices)
    pointers = [code["_pointers"](half, places, sizes, me, dtype, choices) for half in halves]
    columns = np.arange(64)
    assert all((each == each[:, :1] + columns).all() for each in pointers)
    return np.concatenate([2 * each[:, 0] for each in pointers])
