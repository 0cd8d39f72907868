"""Pushes and gathers of the warp-specialized moe_ag_gemm, on the CPU and in random order."""

import itertools

import numpy as np
import pytest

from tests.ops.experts.tp_moe.specialized_gather import GatherRun, addresses_of
from tests.ops.experts.tp_moe.specialized_protocol import (
    GATHER_SOURCE,
    MAX_STAGES,
    PUSH_SOURCE,
    ROUTE,
    SEEDS,
    STRIDE,
    Pointer,
    compiled,
)
from tests.support.mutants import check_found, mutated


def test_stages_of_turns():
    route = compiled(ROUTE)
    for ranks, chunks, stages in itertools.product(range(1, 6), range(1, 6), range(1, MAX_STAGES + 1)):
        turns = range(ranks * chunks)
        sources = [route["chunk_at_turn"](turn, 2 % ranks, ranks, chunks) for turn in turns]
        assert sources[:chunks] == [(2 % ranks, chunk) for chunk in range(chunks)]
        assert sorted(sources) == list(itertools.product(range(ranks), range(chunks)))
        firsts = [route["first_turn_of"](stage, stages, ranks, chunks) for stage in range(stages + 1)]
        assert firsts[0] == 0 and firsts[-1] == len(turns) and firsts == sorted(firsts)
        for turn in turns:
            (expected,) = [stage for stage in range(stages) if firsts[stage] <= turn < firsts[stage + 1]]
            assert route["stage_of_turn"](turn, stages, ranks, chunks) == expected


# Ranks, tokens of a rank, tokens of a chunk, stages.
CASES = [
    (1, 40, 16, 1), (1, 5, 256, 2), (2, 1, 16, 2), (2, 50, 32, 1), (2, 100, 32, 3), (3, 37, 16, 4), (3, 20, 256, 2),
    (3, 130, 48, 5), (4, 70, 32, 8), (4, 33, 16, 6), (5, 16, 16, 7), (4, 3, 64, 8), (3, 700, 16, 2),
]


@pytest.mark.parametrize("ranks, rows, chunk_rows, stages", CASES)
def test_pushes_and_waits_in_any_order(ranks, rows, chunk_rows, stages):
    for seed in range(SEEDS):
        GatherRun(seed, ranks, rows, chunk_rows, stages, 1 + seed % 4)()


PUSH = "shard, (None, 0, 0), program, num_comm, False, 1, trace_ptr"
MUTANTS = {
    "the last stage is not awaited": ("while ready <= stage", "while ready < stage"),
    "one stage too many is ready": ("        ready += 1", "        ready += 2"),
    "chunks of a stage are not awaited": (
        "end = first_turn_of(ready + 1, stages", "end = first_turn_of(ready, stages",
    ),
    "the last chunk of a stage is not awaited": ("there = turns < end", "there = turns < end - 1"),
    "own chunks are awaited": (
        "gl.maximum(first_turn_of(ready, stages, ranks, num_chunks), num_chunks)",
        "first_turn_of(ready, stages, ranks, num_chunks)",
    ),
    "threads without a chunk read any word": ("gl.minimum(turns, end - 1), me", "turns, me"),
    "only the first chunks of a stage are awaited": ("range(first, end, 32 * _WARPS)", "range(first, first + 1)"),
    "a chunk has the signal of another one": ("source * num_chunks + chunk, signal", "source * num_chunks, signal"),
    "two warps push": (PUSH, PUSH.replace(", 1, trace", ", 2, trace")),
    "half of each row is pushed": (
        "gl.minimum(chunk_rows, M_shard), row_bytes, 1", "gl.minimum(chunk_rows, M_shard), row_bytes // 2, 1",
    ),
    "slots have no padding": ("row_bytes, 1, num_chunks, slot_bytes", "row_bytes, 1, num_chunks, M_shard * row_bytes"),
    "only the first bytes of a row are pushed": ("byte = part % across * part_bytes", "byte = 0 * part"),
    "the parts of a row overlap": ("gl.minimum(part_bytes, num_bytes - byte)", "num_bytes - byte"),
    "each part of a row has rows of its own": ("part // across * part_rows", "part * part_rows"),
    "a chunk is complete without the parts of its rows": ("across, parts * across", "across, parts"),
    "too few programs push": ("    if num_comm > 0:\n", "    if program > 0:\n"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_errors_in_pushes_and_waits_are_found(mutant):
    cases = (3, 100, 32, 3), (3, 700, 16, 2), (3, 20, 256, 2)
    check_found(lambda seed, source: GatherRun(seed, *cases[seed % 3], 2, source), PUSH_SOURCE, MUTANTS[mutant])


def _check_addresses(source):
    """Check the addresses of the rows of tiles of 1 to 128 rows, for assignments in random order."""
    code = compiled(source)
    vars(code["gl"]).update(
        BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, convert_layout=lambda values, layout: values,
    )
    code |= {
        "_layout": lambda bits: None, "pointer_to": lambda address, dtype: address // 2, "STEP_BYTES": 128,
        "HALF_M": 64,
    }
    rng = np.random.default_rng(1)
    for me, choices, count in itertools.product([0, 2], [1, 2, 3], [1, 64, 65, 128]):
        ranks, rows, row_bytes, slot_rows, row = 3, 77, 48, 80, 9
        assignments = rng.integers(0, ranks * rows * choices, row + count)
        found = addresses_of(code, Pointer(assignments), ranks, me, rows, row_bytes, slot_rows, choices, row, count)
        for place in range(128):
            choice = assignments[row + place] if place < count else me * rows * choices
            source_rank, token = divmod(choice // choices, rows)
            shard = STRIDE if source_rank == me else 2 * STRIDE + source_rank * slot_rows * row_bytes
            assert found[place] == shard + token * row_bytes


def test_addresses_of_rows():
    _check_addresses(GATHER_SOURCE)


ADDRESS_MUTANTS = {
    "rows past the last one are loaded": ("mask=rows < count", "mask=rows < count + 1"),
    "the second half has the rows of the first": ("choices_ptr + row + HALF_M + rows", "choices_ptr + row + rows"),
    "rows without an assignment are those of rank 0": ("some = me * sizes[0] * CHOICES", "some = 0"),
    "own tokens come from the slot": ("gl.where(source == me, ", "gl.where(source < 0, "),
    "slots have no padding": ("* slot_bytes", "* M_shard * row_bytes"),
    "an assignment is taken for a token": ("assignments // CHOICES", "assignments"),
    "tokens have their number in all ranks": ("(tokens - source * M_shard)", "tokens"),
}


@pytest.mark.parametrize("mutant", ADDRESS_MUTANTS)
def test_errors_in_addresses_are_found(mutant):
    with pytest.raises(AssertionError):
        _check_addresses(mutated(GATHER_SOURCE, ADDRESS_MUTANTS[mutant]))
