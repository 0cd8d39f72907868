"""Run the partitions of ``moe_ag_gemm_specialized_kernel`` that push and copy tokens; see ``specialized_protocol``."""

from collections import Counter
from functools import partial

from tdkernels.rounding import cdiv, round_up
from tests.ops.experts.tp_moe.specialized_protocol import (
    COPY_SOURCE,
    HALF,
    ROW_OF_CHOICE,
    ROWS_AT,
    SIGNAL,
    STRIDE,
    TOKENS,
    FastSchedule,
    compiled,
    num_warps,
)


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
        assert warps == num_warps()
        self.schedule.until()
        self.words[counter] += 1
        return self.words[counter] - 1

    def _release(self, word, warps):
        assert warps == num_warps() and 0 <= word < self.stages
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
        assert 8 * num_words == self.row_bytes and choices == self.choices and warps == num_warps()
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
