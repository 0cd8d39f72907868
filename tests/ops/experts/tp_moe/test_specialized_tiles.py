"""Tiles of the warp-specialized kernels of tp_moe, on the CPU and in random order."""

import itertools
import random

import pytest

from tdkernels.ops.experts.tp_moe.launch_specialized import packed
from tdkernels.ops.experts.tp_moe.specialized import slices as slices_module
from tests.ops.experts.tp_moe.specialized_protocol import (
    AG_GEMM_SOURCE,
    GEMM_RS_SOURCE,
    MAX_STAGES,
    SEEDS,
    TILE_WORDS,
    Pointer,
    compiled,
    slice_of,
    source_of,
)
from tests.ops.experts.tp_moe.specialized_tiles import MoeAgGemmRun, MoeGemmRsRun
from tests.support.mutants import check_found, mutated


def _table(num_tiles):
    return [(7 * tile, 100 * tile + 3, 1 + tile % 128) for tile in range(num_tiles)]


def _check_places(num_tiles, tiles_n, group_m, begins, order, place, code, past=9):
    """Check that each column of each tile comes once, that stages ascend, and that later items load nothing."""
    table = _table(num_tiles)
    words = Pointer([word for entry in table for word in (*entry, *[-1] * (TILE_WORDS - 3))])
    tiles = words, Pointer(begins), tiles_n, group_m
    order = code["ends_of_stages"](tiles, None) if order is None else order
    num_items, found = num_tiles * tiles_n, []
    for item in range(num_items + past):
        stage, number, column, *entry = code["place_of"](item, num_items, order, tiles, code[place])
        if item < num_items:
            assert number % tiles_n == column and tuple(entry) == table[number // tiles_n]
            found.append((int(stage), number))
        else:
            assert entry == [0, 0, 0]
    assert sorted(number for _, number in found) == list(range(num_items))
    stages = [stage for stage, _ in found]
    assert stages == sorted(stages)
    return found


def _check_stages(code):
    rng = random.Random(1)
    for case in range(60):
        tiles_of = [rng.choice([0, 0, 1, 2, 7]) if case else 0 for _ in range(MAX_STAGES)]
        begins = [sum(tiles_of[:stage]) for stage in range(2 * MAX_STAGES)]
        found = _check_places(
            sum(tiles_of), rng.randint(1, 5), rng.choice([1, 2, 8]), begins, None, "place_by_stage", code
        )
        num_columns = len(found) // max(sum(tiles_of), 1)
        assert all(begins[stage] <= number // num_columns < begins[stage + 1] for stage, number in found)


def _check_slices(code):
    firsts_of = [[0], [0, 1], [0, 2], [0, 3, 4], [0, 1, 2, 3, 4, 5, 6]]
    for rows, tiles_n, firsts, unit, group_m in itertools.product(
        [1, 2, 5], range(1, 9), firsts_of, [1, 2], [1, 2, 8]
    ):
        firsts = [first for first in firsts if first * unit < tiles_n]
        slices = rows, packed(firsts), unit
        found = _check_places(rows, tiles_n, group_m, [0], slices, "place_by_slice", code)
        assert all(slice_id == slice_of(number % tiles_n, firsts, unit) for slice_id, number in found)


def test_places_of_stages():
    _check_stages(compiled(AG_GEMM_SOURCE))


def test_places_of_slices():
    _check_slices(compiled(GEMM_RS_SOURCE))


def test_places_of_slices_without_tiles():
    """All assignments are dropped. The result is not used."""
    code = compiled(GEMM_RS_SOURCE)
    assert _check_places(0, 3, 8, [0], (0, packed([0, 1]), 2), "place_by_slice", code) == []


PLACE_MUTANTS = {
    "the first item of a stage is of the stage before": (
        _check_stages, "is_before = ends <= item", "is_before = ends < item",
    ),
    "tiles of a stage begin with the first one": (_check_stages, "first // tiles_n + pid_m", "pid_m"),
    "a stage without tiles has no row": (
        _check_stages, "gl.maximum(end - first, tiles_n) // tiles_n", "(end - first) // tiles_n - 1",
    ),
    "items past the last one load": (_check_stages, "item < num_items\n    expert", "item < num_items + 1\n    expert"),
    "the last stage has no end": (
        _check_stages, "gl.load(begins_ptr + 1 + gl.minimum", "gl.load(begins_ptr + gl.minimum",
    ),
    "items past the last one have a place": (
        _check_slices, "gl.minimum(item, gl.maximum(num_items - 1, 0))", "item",
    ),
    "the last slice ends with a unit": (
        _check_slices, "gl.minimum(first_column(slices, slice_id + 1), tiles_n)", "first_column(slices, slice_id + 1)",
    ),
    "a slice begins with the first column": (
        _check_slices, "return slice_id, pid_m, first + pid_n", "return slice_id, pid_m, pid_n",
    ),
    "all slices have the columns of the first": (
        _check_slices, "columns_of_slice(slices, slice_id, tiles_n)", "columns_of_slice(slices, 0, tiles_n)",
    ),
    "the first column of a slice is in the one before": (
        _check_slices, "column >= first_column", "column > first_column",
    ),
    "the last of most slices is not found": (
        _check_slices, "gl.static_range(1, MAX_SLICES)", "gl.static_range(1, MAX_SLICES - 1)",
    ),
}


@pytest.mark.parametrize("mutant", PLACE_MUTANTS)
def test_errors_in_places_are_found(mutant):
    check, *changes = PLACE_MUTANTS[mutant]
    with pytest.raises((AssertionError, ZeroDivisionError)):
        check(compiled(mutated(source_of(slices_module) + AG_GEMM_SOURCE, changes)))


TILES = [(0, 2, 3), (1, 1, 1), (2, 2, 9), (4, 3, 5), (3, 5, 14)]  # tiles, tile columns, steps


@pytest.mark.parametrize("num_tiles, tiles_n, steps", TILES)
@pytest.mark.parametrize("activation, promotes", [(None, False), ("swiglu", True), ("keep", False)])
def test_moe_ag_gemm_in_any_order(num_tiles, tiles_n, steps, activation, promotes):
    for seed in range(SEEDS):
        MoeAgGemmRun(seed, num_tiles, tiles_n, steps, activation, promotes=promotes)()


@pytest.mark.parametrize("num_tiles, tiles_n, steps", TILES)
@pytest.mark.parametrize("unit, promotes", [(1, False), (2, True)])
def test_moe_gemm_rs_in_any_order(num_tiles, tiles_n, steps, unit, promotes):
    firsts = [first for first in (0, 2, 3) if first * unit < tiles_n]
    for seed in range(SEEDS):
        MoeGemmRsRun(seed, num_tiles, tiles_n, steps, (firsts, unit), promotes=promotes)()


def _mutants_of_loads(item, place, last, first, end):
    """Return mutants of a partition that loads tiles.

    item, place: the lines that get the next work item, and its place
    last, first: the arguments that end the last steps of a tile, and those before
    end: the line that passes on the end of the items
    """
    return {
        "both halves of the rows are loaded": (
            "        is_whole = count > HALF_M\n", "        is_whole = count >= HALF_M\n",
        ),
        "a half with one row is not loaded": (
            "        is_whole = count > HALF_M\n", "        is_whole = count > HALF_M + 1\n",
        ),
        "halves are multiplied as whole tiles": ("2 * number + gl.where(is_whole, 0, 1)", "2 * number"),
        "a tile has the place of the one before": (item + place, place + item),
        "the place of a tile is not computed": (item + place, item),
        "steps are loaded twice": (f"turn, late, {last}", f"turn, early, {last}"),
        "steps are not loaded": (f"turn, early, {first}", f"turn, late, {first}"),
        "the end of the items is not passed on": (end, end.replace("end_items(", "(")),
    }


STORE_MUTANTS = {
    "rows of the next tile are stored by TMA": ("row + BLOCK_M <= end", "row + HALF_M <= end"),
    "rows of the next tile are stored": ("end = row + gl.load(entry + 2)", "end = row + BLOCK_M"),
    "a tile is stored at the rows of the first one": (
        "entry = table_ptr + number // tiles_n * TILE_WORDS", "entry = table_ptr",
    ),
    "a tile is stored at the first columns": ("pid_n = number % tiles_n", "pid_n = 0"),
    "a half is free before it has been read": ("        tma.store_wait(0)\n", ""),
}
AWAIT = "        ready = await_tokens(ctx, stage, ready, waits)\n"
NEXT_ASSIGNMENTS = (
    "        low, high = _assignments(choices_ptr, row, count, me, sizes, CHOICES)\n"
    "        turn = _load_steps(w_desc, rows, K, memory, bars, block, is_whole, turn, late"
)
AG_GEMM_MUTANTS = STORE_MUTANTS | _mutants_of_loads(
    "        item = item_of_warps(answer)\n",
    "        stage, number, pid_n, expert, row, count = place_of(item, num_items, ends, tiles, place_by_stage)\n",
    "steps, W_IS_KN", "late, W_IS_KN", "    end_items(memory, bars, turn, ARRIVALS, VECTOR)\n",
) | {
    "tiles come from the other queue": (
        "answer = request_by_warps(ctx, 0, _WARPS)", "answer = request_by_warps(ctx, 1, _WARPS)",
    ),
    "tokens are not awaited": (AWAIT, ""),
    "tokens of the stage before are awaited": (AWAIT, AWAIT.replace("stage,", "stage - 1,")),
    "tokens of one stage too few are awaited": (AWAIT, AWAIT.replace("ready, waits", "ready + 1, waits")),
    "tokens of stages without tiles are not awaited": ("    await_tokens(ctx, stages - 1, ready, waits)\n", ""),
    "tokens of the last stage are not awaited": ("await_tokens(ctx, stages - 1,", "await_tokens(ctx, stages - 2,"),
    "a tile has the rows of the one before": (NEXT_ASSIGNMENTS, NEXT_ASSIGNMENTS.split("\n")[1]),
    "both halves have the first rows": ("_pointers(high, places", "_pointers(low, places"),
    "copies are not fenced": ("    if memory[5]:\n", "    if False:\n"),
    "copies are not awaited": (
        "        async_copy.mbarrier_arrive(full, increment_count=False)\n", "        mbarrier.arrive(full, count=1)\n",
    ),
    "the last half is always loaded": ("        if is_whole:\n", "        if True:\n"),
    "columns past the last one are loaded": ("inside = (k + columns < K)[None, :]", "inside = (k + columns >= 0)"),
    "each step loads the first columns": ("rows[1] + k, mask", "rows[1], mask"),
    "a half goes to the buffer of the other one": (
        "x.index(2 * stage + 1), rows[1]", "x.index(2 * stage), rows[1]",
    ),
}
RS_MUTANTS_OF_LOADS = _mutants_of_loads(
    "        item = item_of_warp(answer)\n",
    "        _, number, pid_n, expert, row, count = place_of(item, num_items, slices, tiles, place_by_slice)\n",
    "steps, HALF_ROWS", "late, HALF_ROWS", "    end_items(memory, bars, turn)\n\n\n@gluon.jit\ndef store_partition(",
)
COUNT = "            await_tma_stores()\n            add_release_by_warps(done_ptr + slice_of_column(slices, pid_n), 1)"
GEMM_RS_MUTANTS = STORE_MUTANTS | RS_MUTANTS_OF_LOADS | {
    "tiles come from the other queue": ("answer = request_by_warp(ctx, 0)", "answer = request_by_warp(ctx, 1)"),
    "stores are not awaited": (COUNT, COUNT.replace("            await_tma_stores()\n", "")),
    "a tile is counted when TMA has read it": (COUNT, COUNT.replace("await_tma_stores()", "tma.store_wait(0)")),
    "a tile is counted before its stores are awaited": (
        COUNT, COUNT.split("\n")[1] + "\n            await_tma_stores()",
    ),
    "a tile is counted for another slice": ("done_ptr + slice_of_column(slices, pid_n)", "done_ptr + pid_n"),
    "a tile is counted twice": (COUNT, COUNT + "\n" + COUNT.split("\n")[1]),
    "only some tiles are counted": ("        if COUNTS:\n", "        if COUNTS and end - row > HALF_M:\n"),
}


@pytest.mark.parametrize("mutant", AG_GEMM_MUTANTS)
@pytest.mark.parametrize("activation", [None, "keep"])
def test_errors_in_moe_ag_gemm_are_found(mutant, activation):
    run = lambda seed, source: MoeAgGemmRun(seed, 4, 2, 10, activation, source)  # noqa: E731
    check_found(run, AG_GEMM_SOURCE, AG_GEMM_MUTANTS[mutant])


def test_columns_of_up_that_are_stored_with_those_of_gate_are_found():
    """Columns past the last one of gate are those of up. TMA stores no columns past those of the output."""
    changes = "(row + BLOCK_M <= end) & (col + HALF_N <= N)", "(row + BLOCK_M <= end)"
    check_found(lambda seed, source: MoeAgGemmRun(seed, 4, 2, 2, "keep", source), AG_GEMM_SOURCE, changes)


@pytest.mark.parametrize("mutant", GEMM_RS_MUTANTS)
def test_errors_in_moe_gemm_rs_are_found(mutant):
    run = lambda seed, source: MoeGemmRsRun(seed, 3, 3, 10, ([0, 1], 2), source)  # noqa: E731
    check_found(run, GEMM_RS_SOURCE, GEMM_RS_MUTANTS[mutant])
