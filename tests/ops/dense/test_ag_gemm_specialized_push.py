"""The partition of the warp-specialized ag_gemm that pushes: on the CPU, with stand-ins for Gluon, in random order."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tdkernels import AgGemmConfig, Tiles
from tdkernels.ops.common.specialized import push
from tdkernels.ops.common.tile_config import PUSHED_BYTES, PUSHED_ROW_BYTES, PUSHED_ROWS
from tdkernels.ops.dense.ag_gemm import launch_specialized
from tdkernels.rounding import cdiv
from tests.support.mutants import check_found
from tests.support.thread_schedule import Schedule

SIGNAL, HALF, STRIDE = 7, 1, 1 << 40  # STRIDE: distance between the addresses of two ranks
SCALES = 1 << 50  # address of the scales
TILES = Tiles(128, 256, 64)


class Push:
    """The partitions of all programs of rank 1 that push a shard [rows, k] to the other ranks.

    variant: "fixed_half" or "across", which copy the shard to this rank's slot, too, or ""
    scaled: with the scales of its rows, one or several for each
    """

    def __init__(self, seed, rows, k, ranks, chunk_tiles, num_workers, variant, source=None, scaled=True):
        self.schedule = Schedule(seed)
        self.rows, self.ranks, self.num_workers = rows, ranks, num_workers
        self.copies_own, self.notifies_own = variant != "", variant == "across"
        self.row_bytes = 2 * k
        config = AgGemmConfig(tiles=TILES, chunk_tiles=chunk_tiles, warp_specialize=True)
        self.slices = launch_specialized.num_slices(k, config)
        self.num_flags = launch_specialized.num_flags(rows, k, ranks, config)
        self.chunk_rows = min(128 * chunk_tiles, rows)
        self.num_chunks = cdiv(rows, 128 * chunk_tiles)
        self.slice_bytes = cdiv(cdiv(k, 64), self.slices) * 64 * 2
        self.slot_bytes = cdiv(rows, 8) * 8 * self.row_bytes
        per_row = self.schedule.random.choice([1, 5])
        scales_offset = ranks * self.slot_bytes + cdiv(rows, 8) * 8 * 4 * per_row  # after the rows and those of rank 0
        self.scales = (SCALES if scaled else None, scales_offset, per_row)
        x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
        self.num_pushes = launch_specialized._num_pushes(x, ranks, config, self.copies_own)
        self.marks = {}  # {piece of a trace: kinds}
        self.items, self.flags, self.sent, self.sent_scales, self.signals = 0, {}, {}, {}, []
        self.code = self._code(source or Path(push.__file__).read_text())

    def __call__(self):
        """Run them. Only some of the programs have started, those with the smallest ids."""
        started = self.schedule.random.randint(1, self.num_workers)
        shard = (
            self.rows, self.row_bytes, self.chunk_rows, self.slice_bytes, self.slices, self.num_chunks, self.slot_bytes
        )
        # The last one is a program that does not push.
        self.schedule.start({
            f"program {program}": lambda program=program: self.code["push_partition"](
                None, 0, HALF, SIGNAL, shard, self.scales, program, self.num_workers, self.copies_own, 2, "trace", 100,
                False, self.notifies_own,
            )
            for program in [*range(started), self.num_workers]
        })
        peers = [rank for rank in range(self.ranks) if rank != 1 or self.copies_own]
        # Not "assert a == b": in CI pytest compares the texts of these tables, which takes up to 20 s.
        is_complete = set(self.sent) == {(peer, row) for peer in peers for row in range(self.rows)}
        assert is_complete
        for parts in self.sent.values():
            assert sorted(parts) == self._parts_of_row(range(self.slices))
        with_scales = [] if self.scales[0] is None else peers
        numbers = range(self.rows * self.scales[2])
        has_scales_once = self.sent_scales == {(peer, number): 1 for peer in with_scales for number in numbers}
        assert has_scales_once
        numbers = range(self.num_chunks * self.slices)
        notified = [peer for peer in peers if peer != 1 or self.notifies_own]
        expected = [(peer, self.num_chunks * self.slices + number) for peer in notified for number in numbers]
        assert sorted(self.signals) == expected
        assert set(self.flags.values()) == {0} and set(self.flags) == set(range(self.num_flags))

        assert sorted(self.marks) == list(range(100, 100 + self.num_pushes))
        kinds = {tuple(of_piece) for of_piece in self.marks.values()}
        assert kinds == {("starts", "pushes", "ends")}

    def _mark(self, trace, kind, warps, peer=-1):
        self.marks.setdefault(trace[1], []).append(kind)

    def _parts_of_row(self, slices):
        begins = [number * self.slice_bytes for number in slices]
        return [(begin, min(self.slice_bytes, self.row_bytes - begin)) for begin in begins]

    def _code(self, source):
        tree = ast.parse(source.replace(".to(tl.int64)", "").replace(".to(tl.int32)", ""))
        tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
        gl = SimpleNamespace(
            constexpr=int, minimum=min, maximum=max, where=lambda condition, one, other: one if condition else other
        )
        names = {
            "gl": gl, "gluon": SimpleNamespace(jit=lambda function: function), "rank": lambda ctx: 1,
            "num_ranks": lambda ctx: self.ranks, "data_at": lambda ctx, half, peer: (peer + 1) * STRIDE,
            "flag_at": lambda ctx, index: index, "signal_at": lambda ctx, half, number: number,
            "request_by_warps": lambda ctx, queue, warps: self._request(queue), "item_of_warps": lambda answer: answer,
            "is_last_arriver_of_warps": self._arrive, "notify_all_by_warps": self._notify, "ALL_PEERS": -2,
            "notify_by_warps": self._notify_one,
            "mark_by_warps": self._mark, "PUSHED_BYTES": PUSHED_BYTES, "PUSHED_ROWS": PUSHED_ROWS,
            "PUSHED_ROW_BYTES": PUSHED_ROW_BYTES,
        }
        exec(compile(tree, push.__file__, "exec"), names)
        names |= {"_copy": self._copy, "_copy_scales": self._copy_scales}
        return names

    def _request(self, queue):
        assert queue == 1
        self.schedule.until()
        self.items += 1
        return self.items - 1

    def _copy(self, ctx, half, offset, src, first, row_bytes, rows, num_bytes, warps):
        self.schedule.until()
        assert half == HALF and offset - self.slot_bytes == src and row_bytes == self.row_bytes
        for step in range(first, self.ranks):
            for row in range(rows):
                place = (1 + step) % self.ranks, src // row_bytes + row
                self.sent.setdefault(place, []).append((src % row_bytes, num_bytes))
            self.schedule.until()

    def _copy_scales(self, dst, src, count, warps):
        self.schedule.until()
        peer, offset = dst // STRIDE - 1, dst % STRIDE - self.scales[1]
        assert offset == src - SCALES and offset % 4 == 0
        for number in range(offset // 4, offset // 4 + count):
            self.sent_scales[peer, number] = self.sent_scales.get((peer, number), 0) + 1
        self.schedule.until()

    def _arrive(self, flag, count, warps):
        self.schedule.until()
        self.flags[flag] = self.flags.get(flag, 0) + 1
        is_last = self.flags[flag] == count
        self.flags[flag] *= not is_last
        return is_last

    def _notify(self, ctx, number, value, warps, first):
        assert warps == 2
        self._signal(number, value, [rank for rank in range(first, min(first + 64, self.ranks)) if rank != 1])

    def _notify_one(self, ctx, number, stride, count, peer, value, warps):
        assert count == 1 and warps == 2
        self._signal(number, value, [peer])

    def _signal(self, number, value, peers):
        self.schedule.until()
        assert value == SIGNAL
        chunk, slice_id = divmod(number - self.num_chunks * self.slices, self.slices)
        rows = range(chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.rows))
        (part,) = self._parts_of_row([slice_id])
        numbers = range(rows.start * self.scales[2], rows.stop * self.scales[2])
        has_scales = self.scales[0] is not None and slice_id == 0
        for peer in peers:
            assert all(part in self.sent.get((peer, row), []) for row in rows), "the signal comes before its data"
            if has_scales:
                assert all((peer, each) in self.sent_scales for each in numbers), "the signal comes before the scales"
            self.signals.append((peer, number))


# More ranks than a partition has threads: several notify_all_by_warps.
CASES = [(1, 8, 2, 1), (130, 1088, 3, 1), (300, 2056, 2, 2), (520, 4096, 3, 2), (256, 4096, 4, 1), (9, 1088, 66, 1)]


@pytest.mark.parametrize("variant", ["", "fixed_half", "across"])
@pytest.mark.parametrize("rows, k, ranks, chunk_tiles", CASES)
def test_all_parts_are_pushed_by_the_programs_that_have_started(rows, k, ranks, chunk_tiles, variant):
    for seed in range(5):
        scaled = variant != "fixed_half" and seed % 2 == 0
        Push(seed, rows, k, ranks, chunk_tiles, 1 + 3 * seed, variant, scaled=scaled)()


QUEUE = "        item = item_of_warps(request_by_warps(ctx, 1, WARPS))\n"
MUTANTS = {
    "each program has a fixed share": (
        QUEUE, "        item = program\n", "item = item_of_warps(answer)", "item += num_workers",
    ),
    "the signal of a chunk follows its first part": ("(flag, parts, WARPS)", "(flag, 1, WARPS)"),
    "all slices have one flag": ("flag_at(ctx, chunk * slices + slice_id)", "flag_at(ctx, chunk * slices)"),
    "only as many peers as threads get the signal": ("range(0, num_ranks(ctx), 32 * WARPS)", "range(1)"),
    "this rank's rows are not skipped": ("0 if COPY_OWN else 1", "0"),
    "a part has one row too few": ("end - row,", "end - row - 1,"),
    "the scales go with the last slice": ("slice_id == 0", "slice_id == slices - 1"),
    "the scales go with every part": ("(part == 0) & (slice_id", "(part >= 0) & (slice_id"),
    "the last chunk has scales of rows that do not exist": ("gl.minimum(chunk_rows, rows - begin)", "chunk_rows"),
    "a row has one scale": ("gl.minimum(chunk_rows, rows - begin) * per_row", "gl.minimum(chunk_rows, rows - begin)"),
}


OF_THE_COPY = {
    "this rank gets no signal": ("        if NOTIFY_OWN:", "        if False:"),
    "this rank's signal follows the first part": (
        "    if is_last_arriver_of_warps(flag, parts, WARPS):",
        "    if NOTIFY_OWN and part == 0:\n        notify_by_warps(ctx, word, 1, 1, me, signal, WARPS)\n"
        "    NOTIFY_OWN = False\n    if is_last_arriver_of_warps(flag, parts, WARPS):",
    ),
    "this rank's rows are skipped": ("0 if COPY_OWN else 1", "1"),
    "this rank's scales are skipped": ("range(first, ranks):\n        place", "range(1, ranks):\n        place"),
}


@pytest.mark.parametrize("mutant", OF_THE_COPY)
def test_errors_in_the_copy_are_found(mutant):
    run = lambda seed, source: Push(seed, 300, 2056, 3, 2, 6, "across", source)  # noqa: E731
    check_found(run, Path(push.__file__).read_text(), OF_THE_COPY[mutant], seeds=20)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_errors_are_found(mutant):
    run = lambda seed, source: Push(seed, 300 if seed else 9, 2056, 3 if seed else 66, 2, 6, "", source)  # noqa: E731
    check_found(run, Path(push.__file__).read_text(), MUTANTS[mutant], seeds=20)


def test_number_of_slices():
    """Only calls that may run the specialized kernel have several, and only if programs push."""
    config = AgGemmConfig(tiles=TILES, warp_specialize=True)
    assert [launch_specialized.num_slices(k, config) for k in (0, 1024, 1025, 8192)] == [1, 1, 2, 8]
    assert launch_specialized.num_slices(1088, config, num_nodes=2) == 1
    others = [
        AgGemmConfig(tiles=TILES), replace(config, tiles=Tiles(64, 64, 64)), replace(config, transport="copy_engine"),
    ]
    assert [launch_specialized.num_slices(1088, other) for other in others] == [1, 1, 1]
