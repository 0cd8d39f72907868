"""Copies of tokens by the warp-specialized moe_ag_gemm, on the CPU and in random order."""

import itertools

import numpy as np
import pytest

from tdkernels.rounding import round_up
from tests.ops.experts.tp_moe.specialized_copies import CopyRun
from tests.ops.experts.tp_moe.specialized_protocol import (
    COPY_SOURCE,
    MAX_STAGES,
    ROUTE,
    SEEDS,
    STRIDE,
    Pointer,
    code_of_values,
    compiled,
)
from tests.support.mutants import check_found


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
COPIES = [
    (1, 40, 16, 1), (1, 5, 256, 2), (2, 1, 16, 2), (2, 50, 32, 1), (2, 100, 32, 3), (3, 37, 16, 4), (3, 20, 256, 2),
    (3, 130, 48, 5), (4, 70, 32, 8), (4, 33, 16, 6), (5, 16, 16, 7), (4, 3, 64, 8),
]


@pytest.mark.parametrize("ranks, rows, chunk_rows, stages", COPIES)
def test_copies_in_any_order(ranks, rows, chunk_rows, stages):
    for seed in range(SEEDS):
        CopyRun(seed, ranks, rows, chunk_rows, stages, 1 + seed % 4)()


WAIT_FOR_CHUNK = "            wait_plan(ctx, signal_at(ctx, half, source * num_chunks + chunk), signal, source)\n"
COPY_CALL = (
    "        _copy_item(\n            tokens_at, rows_at, rows_ptr + source.to(gl.int64) * M_shard * CHOICES,\n"
    "            chunk * chunk_rows + item % of_turn * _TOKENS, M_shard, num_words, CHOICES, WARPS, AT_ONCE,\n"
    "        )\n"
)
RELEASE = (
    "        stage = stage_of_turn(turn, stages, ranks, num_chunks)\n"
    "        add_release_by_warps(done_ptr + stage, WARPS)  # waiter: await_copies\n"
)
PUSH_CALL = (
    "    if num_comm > 0:\n"
    "        push_partition(ctx, places[0], half, signal, shard, (None, 0, 0), program, num_comm, False)\n"
)
OTHER_COPIES = "    copy_tokens(ctx, places, sizes, half, signal, counters, first, last, me, CHOICES, 2, AT_ONCE)\n"
COPY_MUTANTS = {
    "copies do not wait for their chunk": (WAIT_FOR_CHUNK, ""),
    "copies wait for the chunk of another turn": ("source * num_chunks + chunk)", "source * num_chunks)"),
    "the counter of the stage of the turn before": (
        "stage = stage_of_turn(turn, stages,", "stage = stage_of_turn(turn - 1, stages,",
    ),
    "the counter of another stage": (
        "add_release_by_warps(done_ptr + stage,", "add_release_by_warps(done_ptr + 0 * stage,",
    ),
    "tokens are counted before they are copied": (COPY_CALL + RELEASE, RELEASE + COPY_CALL),
    "the last stage is not awaited": ("while ready <= stage", "while ready < stage"),
    "own tokens are not awaited": (
        "    while ready <= stage", "    ready = gl.maximum(ready, 1)\n    while ready <= stage",
    ),
    "one copy of a stage is not awaited": (
        "expected = turns * (chunk_rows // _TOKENS)", "expected = gl.maximum(turns * (chunk_rows // _TOKENS) - 1, 0)",
    ),
    "only one copy per chunk is awaited": ("expected = turns * (chunk_rows // _TOKENS)", "expected = turns"),
    "both ranges of turns have one counter": (
        "(done_ptr + _OTHERS).to(gl.pointer_type(gl.int32))", "(done_ptr + _OWN).to(gl.pointer_type(gl.int32))",
    ),
    "the queue of own copies is the counter of stage 0": (
        "_OWN, _OTHERS = MAX_STAGES,", "_OWN, _OTHERS = gl.constexpr(0),",
    ),
    "the copies of peers begin with own tokens": ("first, last = num_chunks,", "first, last = 0,"),
    "the last chunk is not copied": ("= num_chunks, ranks * num_chunks", "= num_chunks, ranks * num_chunks - 1"),
    "the slots of ranks have no padding": (
        "tokens_at = slots_at + source.to(gl.int64) * slot_bytes",
        "tokens_at = slots_at + source.to(gl.int64) * M_shard * row_bytes",
    ),
    "own tokens come from the slot": (
        "        if source != me:\n            # producer: push", "        if True:\n            # producer: push",
    ),
    "tokens have the rows of another rank": (
        "rows_ptr + source.to(gl.int64) * M_shard * CHOICES", "rows_ptr + source.to(gl.int64) * M_shard",
    ),
    "each program has a fixed share": (
        "        item = item_of_warps(answer)\n\n\n@gluon.jit\ndef await_copies",
        "        item += 6\n\n\n@gluon.jit\ndef await_copies",
    ),
    "tokens of peers are copied before the push": (
        PUSH_CALL, "", OTHER_COPIES, OTHER_COPIES + PUSH_CALL,
    ),
    "copied rows are not fenced for TMA": (", FOR_TMA=True)", ")"),
    "a part of a chunk is not copied": (
        "of_turn = chunk_rows // _TOKENS  # also", "of_turn = gl.minimum(chunk_rows, M_shard) // _TOKENS  # also",
    ),
}


@pytest.mark.parametrize("mutant", COPY_MUTANTS)
def test_errors_in_copies_are_found(mutant):
    cases = (3, 100, 32, 3), (3, 20, 256, 2)
    check_found(lambda seed, source: CopyRun(seed, *cases[seed % 2], 2, source), COPY_SOURCE, COPY_MUTANTS[mutant])


@pytest.mark.parametrize("source_rank", [0, 2])
@pytest.mark.parametrize("num_words, at_once", [(2, 16), (300, 8), (512, 4)])
def test_values_of_copies(source_rank, num_words, at_once):
    code, memory = code_of_values(COPY_SOURCE)
    rng, tokens, choices = np.random.default_rng(1), 21, 2
    rows = rng.permutation(3 * tokens * choices)
    rows[rng.integers(0, len(rows), 9)] = -1
    memory[0], memory[1] = rng.random(3 * tokens * num_words), np.full(len(rows) * num_words, np.nan)
    at, first = 8 * source_rank * tokens * num_words, source_rank * tokens * choices
    for token in range(0, round_up(tokens, 16), 16):
        code["_copy_item"](at, STRIDE, Pointer(rows, first), token, tokens, num_words, choices, 4, at_once)
    expected = np.full((len(rows), num_words), np.nan)
    for choice in range(first, first + tokens * choices):
        if rows[choice] >= 0:
            expected[rows[choice]] = memory[0].reshape(-1, num_words)[choice // choices]
    np.testing.assert_array_equal(memory[1].reshape(-1, num_words), expected)
