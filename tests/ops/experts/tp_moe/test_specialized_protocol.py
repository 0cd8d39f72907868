"""Waits, signals and work items of the warp-specialized kernels of tp_moe, on the CPU and in random order."""

import itertools
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest

from tdkernels.ops.experts.tp_moe.launch_specialized import _slice_columns
from tdkernels.rounding import cdiv, next_power_of_2, round_up
from tests.ops.dense.specialized_protocol import Stuck
from tests.ops.experts.tp_moe import specialized_protocol as protocol
from tests.ops.experts.tp_moe.specialized_protocol import (
    ADD_SOURCE,
    AG_GEMM_SOURCE,
    COPY_SOURCE,
    GEMM_RS_SOURCE,
    MAX_STAGES,
    AddRun,
    Constexpr,
    CopyRun,
    MoeAgGemmRun,
    MoeGemmRsRun,
    Pointer,
)
from tests.support.subset import THOROUGH

SEEDS = 100 if THOROUGH else 8
BLOCK_COLUMNS = 512


def _mutated(source, changes):
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        assert source.count(before) == 1
        source = source.replace(before, after)
    return source


def _finds(run, source, changes):
    """Check that a run with changes of the source fails. ``run``: (seed, source) -> a run"""
    source = _mutated(source, changes)
    with pytest.raises(AssertionError):
        for seed in range(200):
            run(seed, source)()


# ---- copies ----


def test_stages_of_turns():
    route = protocol.compiled(protocol.ROUTE)
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
    "        _copy_item(\n            tokens_at, rows_at, rows_ptr + source.to(gl.int64) * rows * CHOICES,\n"
    "            chunk * chunk_rows + item % of_turn * _TOKENS, rows, num_words, CHOICES, WARPS, AT_ONCE,\n        )\n"
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
OF_COPIES = {
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
    "a stage has one copy too few": (
        "expected = turns * (chunk_rows // _TOKENS)", "expected = gl.maximum(turns * (chunk_rows // _TOKENS) - 1, 0)",
    ),
    "a chunk has one copy": ("expected = turns * (chunk_rows // _TOKENS)", "expected = turns"),
    "both ranges of turns have one counter": (
        "(done_ptr + _OTHERS).to(gl.pointer_type(gl.int32))", "(done_ptr + _OWN).to(gl.pointer_type(gl.int32))",
    ),
    "a counter is that of a stage": ("_OWN, _OTHERS = MAX_STAGES,", "_OWN, _OTHERS = gl.constexpr(0),"),
    "the copies of peers begin with own tokens": ("first, last = num_chunks,", "first, last = 0,"),
    "the last chunk is not copied": ("= num_chunks, ranks * num_chunks", "= num_chunks, ranks * num_chunks - 1"),
    "the slots of ranks have no padding": (
        "tokens_at = slots_at + source.to(gl.int64) * slot_bytes",
        "tokens_at = slots_at + source.to(gl.int64) * rows * row_bytes",
    ),
    "own tokens come from the slot": (
        "        if source != me:\n            # producer: push", "        if True:\n            # producer: push",
    ),
    "tokens have the rows of another rank": (
        "rows_ptr + source.to(gl.int64) * rows * CHOICES", "rows_ptr + source.to(gl.int64) * rows",
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
        "of_turn = chunk_rows // _TOKENS  # also", "of_turn = gl.minimum(chunk_rows, rows) // _TOKENS  # also",
    ),
}


@pytest.mark.parametrize("mutant", OF_COPIES)
def test_errors_in_copies_are_found(mutant):
    cases = (3, 100, 32, 3), (3, 20, 256, 2)
    _finds(lambda seed, source: CopyRun(seed, *cases[seed % 2], 2, source), COPY_SOURCE, OF_COPIES[mutant])


# ---- sums ----


def _columns(n):
    return min(next_power_of_2(n), BLOCK_COLUMNS)


def test_slices():
    """A slice has whole blocks of columns, and there are at most as many as counters."""
    for n in [*range(8, 9000, 8), *range(9000, 40000, 264), 1 << 17]:
        columns, slice_columns = _columns(n), _slice_columns(n, _columns(n))
        assert slice_columns * 256 % columns == 0 and cdiv(cdiv(n, 256), slice_columns) <= MAX_STAGES


# Tokens of a rank, N, tokens of a chunk, rows of tiles.
SUMS = [
    (5, 1032, 256, 2), (40, 1032, 16, 3), (70, 4200, 32, 1), (20, 128, 16, 2), (30, 200, 48, 4), (1, 8, 16, 1),
    (100, 264, 96, 2), (20, 600, 16, 0),
]


@pytest.mark.parametrize("rows, n, chunk_rows, tile_rows", SUMS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_in_any_order(ranks, rows, n, chunk_rows, tile_rows):
    columns = _columns(n)
    for seed in range(SEEDS):
        AddRun(seed, ranks, rows, n, columns, _slice_columns(n, columns), chunk_rows, tile_rows, 1 + seed % 3)()


@pytest.mark.parametrize("columns, slice_columns", [(256, 2), (128, 1), (512, 4), (512, 6)])
def test_sums_of_other_slices(columns, slice_columns):
    """Blocks of columns and slices that no launch has with this N."""
    for seed in range(SEEDS):
        AddRun(seed, 2, 20, 1296, columns, slice_columns, 16, 2, 1 + seed % 3)()


FOR_PEER = """            for other in range(count):
                _add_for_peer(
                    ctx, tensors, half, owner, token + other * _TOKENS, column, M_shard, N, shard_bytes, me, COLUMNS,
                    CHOICES, WARPS, AT_ONCE,
                )
"""
NOTIFY = """            # waiter: the owner's work items for the same tokens and columns
            to = signal_at(ctx, half, me * of_shard + first)
            notify_by_warps(ctx, to, blocks, count, owner, signal, WARPS)
"""
OWN_FIRST = """        slice_id, within = item // (of_own + of_peers), item % (of_own + of_peers)
        is_own = within < of_own
        number = within - gl.where(is_own, 0, of_own)
"""
OF_SUMS = {
    "a signal is set before its sums are stored": (FOR_PEER + NOTIFY, NOTIFY + FOR_PEER),
    "signals of a work item have a distance of 1": (
        "notify_by_warps(ctx, to, blocks, count", "notify_by_warps(ctx, to, 1, count",
    ),
    "a work item has one signal": (
        "notify_by_warps(ctx, to, blocks, count", "notify_by_warps(ctx, to, blocks, gl.minimum(count, 1)",
    ),
    "own tokens of the last slice come after tokens of peers": (
        "is_last = group == num_slices - 1", "is_last = group == num_slices",
    ),
    "slices are not awaited": (
        "        complete = _await_tiles(ctx, slice_id, complete, slices, tiles_n, done_ptr, me)\n", "",
    ),
    "the last slice is not awaited": ("while complete <= slice_id", "while complete < slice_id"),
    "a slice is awaited without those before": (
        "        complete += 1\n    return complete", "        complete = slice_id + 1\n    return complete",
    ),
    "one tile is not awaited": (
        "rows * gl.minimum(columns, tiles_n - complete * columns)",
        "rows * gl.minimum(columns, tiles_n - complete * columns) - 1",
    ),
    "the last slice has as many tiles as the others": (
        "rows * gl.minimum(columns, tiles_n - complete * columns)", "rows * columns",
    ),
    "own items of the last slice are lost": (
        "sizes[0] * (of_peers + of_own))", "sizes[0] * (of_peers + of_own) - of_own)",
    ),
    "the last item is lost": ("while item < num_items", "while item < num_items - 1"),
    "own tokens do not wait for the peers": (
        "            if RANKS > 1:  # producer", "            if RANKS > 9:  # producer",
    ),
    "own tokens wait for another piece": (
        "wait_for_ranks(ctx, signal_at(ctx, half, first)", "wait_for_ranks(ctx, signal_at(ctx, half, first - block)",
    ),
    "ranks share signals": ("signal_at(ctx, half, me * of_shard + first)", "signal_at(ctx, half, first)"),
    "signals of a rank overlap": ("of_shard = num_chunks * groups * blocks", "of_shard = num_chunks * groups"),
    "the last slice has as many blocks as the others": (
        "count = gl.where(block < blocks, gl.minimum(count, groups - group), 0)",
        "count = gl.minimum(count, groups - group)",
    ),
    "a work item has groups of the next chunk": ("gl.minimum(count, groups - group), 0)", "count, 0)"),
    "groups of a chunk that do not fill a work item are lost": (
        "wide_groups = (groups + _GROUPS - 1) // _GROUPS", "wide_groups = groups // _GROUPS",
    ),
    "peers' tokens are this rank's": ("gl.where(is_own, 0, num_chunks), me, RANKS", "0, me, RANKS"),
    "signals are in the order of the blocks": (
        "first = (chunk * groups + group) * blocks + block",
        "first = (chunk * groups + group) + block * groups * num_chunks",
    ),
    "each partition has a fixed share": ("        item = item_of_warps(answer)\n", "        item += 9\n"),
    "blocks of a slice are those of the first": (
        "block = slice_id * of_slice + number % of_slice", "block = number % of_slice",
    ),
}


def _with_error(seed, source):
    """Return a run with 3 slices, of 2, 2 and 1 blocks, and 6 groups in a chunk, or one with 3 slices of one block."""
    sizes = [(3, 150, 1160, 256, 2, 96, 2), (2, 40, 1296, 512, 2, 16, 3)][seed % 2]
    return AddRun(seed, *sizes, 2, source)


@pytest.mark.parametrize("mutant", OF_SUMS)
def test_errors_in_sums_are_found(mutant):
    _finds(_with_error, ADD_SOURCE, OF_SUMS[mutant])


def test_own_tokens_that_come_before_the_tokens_of_peers_are_found():
    """All warps that add wait for peers, whose warps wait, too."""
    source = _mutated(ADD_SOURCE, ("        slice_id, is_own, number = _order_of(item, sizes)\n", OWN_FIRST))
    with pytest.raises(Stuck, match="all wait"):
        AddRun(0, 2, 150, 1160, 256, 2, 96, 2, 1, source)()


# ---- values of one work item ----


def _of_values(source):
    """Return the names of a source whose functions move values."""
    memory = {}

    def pointer_to(address, size):
        place, offset = divmod(address, protocol.STRIDE)
        return protocol.Pointer(memory[place], offset // size)

    code = protocol.compiled(
        re.sub(r"\.to\((dtype|gl\.float32)\)", "", source), pointer_to=pointer_to,
        data_at=lambda ctx, half, rank: rank * protocol.STRIDE,
    )
    vars(code["tl"])["int64"] = 8
    vars(code["gl"]).update(
        BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, float32=None,
        zeros=lambda shape, *_: np.zeros(shape), store=lambda ptr, values, mask: ptr.store(values, mask),
    )
    return code, memory


@pytest.mark.parametrize("source_rank", [0, 2])
@pytest.mark.parametrize("num_words, at_once", [(2, 16), (300, 8), (512, 4)])
def test_values_of_copies(source_rank, num_words, at_once):
    code, memory = _of_values(COPY_SOURCE)
    rng, tokens, choices = np.random.default_rng(1), 21, 2
    rows = rng.permutation(3 * tokens * choices)
    rows[rng.integers(0, len(rows), 9)] = -1
    memory[0], memory[1] = rng.random(3 * tokens * num_words), np.full(len(rows) * num_words, np.nan)
    at, first = 8 * source_rank * tokens * num_words, source_rank * tokens * choices
    for token in range(0, round_up(tokens, 16), 16):
        code["_copy_item"](at, protocol.STRIDE, Pointer(rows, first), token, tokens, num_words, choices, 4, at_once)
    expected = np.full((len(rows), num_words), np.nan)
    for choice in range(first, first + tokens * choices):
        if rows[choice] >= 0:
            expected[rows[choice]] = memory[0].reshape(-1, num_words)[choice // choices]
    np.testing.assert_array_equal(memory[1].reshape(-1, num_words), expected)


@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("weighted", [False, True])
def test_values_of_sums(columns, weighted):
    """Rank 1 stores its sums for the tokens of rank 2, and adds up its own."""
    code, memory = _of_values(ADD_SOURCE)
    rng, tokens, choices, ranks, n = np.random.default_rng(1), 21, 3, 3, 24
    rows = rng.integers(-1, 40, ranks * tokens * choices)
    out, z, weights = rng.random(40 * n), np.full(tokens * n, np.nan), rng.random(len(rows))
    dtype = SimpleNamespace(element_ty=Constexpr(2))
    z_ptr = Pointer(z)
    z_ptr.dtype = dtype
    tensors = Pointer(out), z_ptr, Pointer(rows), Pointer(weights) if weighted else None
    memory[1], memory[2] = rng.random(ranks * tokens * n), np.full(ranks * tokens * n, np.nan)
    for token in range(0, round_up(tokens, 16), 16):
        for column in range(0, n, columns):
            shared = token, column, tokens, n, 2 * tokens * n, 1, columns, choices
            code["_add_for_peer"](None, tensors, 1, 2, *shared, 2, 4)
            code["_add_own"](None, tensors, 1, *shared, ranks, True, 4, 8)
    chosen = np.where(rows[:, None] >= 0, out.reshape(-1, n)[rows], 0) * (weights[:, None] if weighted else 1)
    sums = chosen.reshape(ranks, tokens, choices, n).sum(2)
    found = memory[2].reshape(ranks, tokens, n)
    np.testing.assert_allclose(found[1], sums[2])
    assert np.isnan(found[[0, 2]]).all()
    parts = memory[1].reshape(ranks, tokens, n)
    np.testing.assert_allclose(z.reshape(tokens, n), parts[0] + sums[1] + parts[2])


# ---- tiles ----


def _table(num_tiles):
    return [(7 * tile, 100 * tile + 3, 1 + tile % 128) for tile in range(num_tiles)]


def _check_places(num_tiles, tiles_n, group_m, begins, order, place, code, past=9):
    """Check that each column of each tile comes once, that stages ascend, and that later items load nothing."""
    table = _table(num_tiles)
    tiles = Pointer([word for entry in table for word in (*entry, -1)]), Pointer(begins), tiles_n, group_m
    order = code["ends_of_stages"](tiles) if order is None else order
    num_items, found = num_tiles * tiles_n, []
    for item in range(num_items + past):
        stage, number, column, *entry = code["_place_of"](item, num_items, order, tiles, code[place])
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
    for rows, tiles_n, columns, group_m in itertools.product([1, 2, 5], range(1, 8), [1, 2, 3, 8], [1, 2, 8]):
        found = _check_places(rows, tiles_n, group_m, [0], (rows, columns), "place_by_slice", code)
        assert all(slice_id == number % tiles_n // columns for slice_id, number in found)


def test_places_of_stages():
    _check_stages(protocol.compiled(AG_GEMM_SOURCE))


def test_places_of_slices():
    _check_slices(protocol.compiled(GEMM_RS_SOURCE))


def test_places_of_slices_without_tiles():
    """All assignments are dropped. The result is not used."""
    code = protocol.compiled(GEMM_RS_SOURCE)
    assert _check_places(0, 3, 8, [0], (0, 2), "place_by_slice", code) == []


OF_PLACES = {
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
    "the last slice has as many columns as the others": (
        _check_slices, "gl.minimum(columns, tiles_n - first)", "columns",
    ),
    "a slice begins with the first column": (
        _check_slices, "return item // of_slice, pid_m, first + pid_n", "return item // of_slice, pid_m, pid_n",
    ),
}


@pytest.mark.parametrize("mutant", OF_PLACES)
def test_errors_in_places_are_found(mutant):
    check, *changes = OF_PLACES[mutant]
    with pytest.raises((AssertionError, ZeroDivisionError)):
        check(protocol.compiled(_mutated(AG_GEMM_SOURCE, changes)))


TILES = [(0, 2, 3), (1, 1, 1), (2, 2, 9), (4, 3, 5), (3, 5, 14)]  # tiles, tile columns, steps


@pytest.mark.parametrize("num_tiles, tiles_n, steps", TILES)
@pytest.mark.parametrize("activation, promotes", [(None, False), ("swiglu", True), ("keep", False)])
def test_moe_ag_gemm_in_any_order(num_tiles, tiles_n, steps, activation, promotes):
    for seed in range(SEEDS):
        MoeAgGemmRun(seed, num_tiles, tiles_n, steps, activation, promotes=promotes)()


@pytest.mark.parametrize("num_tiles, tiles_n, steps", TILES)
@pytest.mark.parametrize("slice_columns, promotes", [(1, False), (2, True)])
def test_moe_gemm_rs_in_any_order(num_tiles, tiles_n, steps, slice_columns, promotes):
    for seed in range(SEEDS):
        MoeGemmRsRun(seed, num_tiles, tiles_n, steps, slice_columns, promotes=promotes)()


PLACE = "        stage, number, pid_n, expert, row, count = _place_of(item, num_items, order, tiles, PLACE)\n"
NEXT_FUNCTION = "\n\n\n@gluon.jit\ndef store_partition("  # of ``tiles``
OF_TILES = {
    "both halves of the rows are loaded": (
        "        is_whole = count > HALF_M\n", "        is_whole = count >= HALF_M\n",
    ),
    "a half with one row is not loaded": (
        "        is_whole = count > HALF_M\n", "        is_whole = count > HALF_M + 1\n",
    ),
    "halves are multiplied as whole tiles": ("2 * number + gl.where(is_whole, 0, 1)", "2 * number"),
    "a tile has the place of the one before": (
        "        item = item_of_warp(answer)\n" + PLACE, PLACE + "        item = item_of_warp(answer)\n",
    ),
    "the place of a tile is not computed": (
        "        item = item_of_warp(answer)\n" + PLACE, "        item = item_of_warp(answer)\n",
    ),
    "steps are loaded twice": ("turn, late, steps, HALF_ROWS", "turn, early, steps, HALF_ROWS"),
    "steps are not loaded": ("turn, early, late, HALF_ROWS", "turn, late, late, HALF_ROWS"),
    "the end of the items is not passed on": (
        "    end_items(memory, bars, turn)" + NEXT_FUNCTION, "    pass" + NEXT_FUNCTION,
    ),
    "rows of the next tile are stored by TMA": ("row + BLOCK_M <= end", "row + HALF_M <= end"),
    "rows of the next tile are stored": ("end = row + gl.load(entry + 2)", "end = row + BLOCK_M"),
    "a tile is stored at the rows of the first one": (
        "entry = table_ptr + number // tiles_n * TILE_WORDS", "entry = table_ptr",
    ),
    "a tile is stored at the first columns": ("pid_n = number % tiles_n", "pid_n = 0"),
    "tiles come from the other queue": ("answer = request_by_warp(ctx, 0)", "answer = request_by_warp(ctx, 1)"),
    "a half is free before it has been read": ("        tma.store_wait(0)\n", ""),
}
AWAIT = "            ready = AWAIT(ctx, stage, ready, waits)\n"
OF_AG_GEMM = {
    "rows are not awaited": (AWAIT, "            pass\n"),
    "rows of the stage before are awaited": (AWAIT, "            ready = AWAIT(ctx, stage - 1, ready, waits)\n"),
    "rows of one stage too few are awaited": (AWAIT, "            ready = AWAIT(ctx, stage, ready + 1, waits)\n"),
}
COUNT = "            await_tma_stores()\n            add_release_by_warps(done_ptr + pid_n // slice_columns, 1)"
OF_GEMM_RS = {
    "a tile is counted before its stores": (COUNT, COUNT.replace("            await_tma_stores()\n", "")),
    "a tile is counted when TMA has read it": (COUNT, COUNT.replace("await_tma_stores()", "tma.store_wait(0)")),
    "a tile is counted when its stores are awaited later": (
        COUNT, COUNT.split("\n")[1] + "\n            await_tma_stores()",
    ),
    "a tile is counted for another slice": ("done_ptr + pid_n // slice_columns", "done_ptr + pid_n"),
    "a tile is counted twice": (COUNT, COUNT + "\n" + COUNT.split("\n")[1]),
    "only some tiles are counted": ("        if COUNTS:\n", "        if COUNTS and end - row > HALF_M:\n"),
}


@pytest.mark.parametrize("mutant", OF_TILES | OF_AG_GEMM)
@pytest.mark.parametrize("activation", [None, "keep"])
def test_errors_in_moe_ag_gemm_are_found(mutant, activation):
    changes = (OF_TILES | OF_AG_GEMM)[mutant]
    _finds(lambda seed, source: MoeAgGemmRun(seed, 4, 2, 10, activation, source), AG_GEMM_SOURCE, changes)


def test_columns_of_up_that_are_stored_with_those_of_gate_are_found():
    """Columns past the last one of gate are those of up. TMA stores no columns past those of the output."""
    changes = "(row + BLOCK_M <= end) & (col + HALF_N <= N)", "(row + BLOCK_M <= end)"
    _finds(lambda seed, source: MoeAgGemmRun(seed, 4, 2, 2, "keep", source), AG_GEMM_SOURCE, changes)


@pytest.mark.parametrize("mutant", OF_TILES | OF_GEMM_RS)
def test_errors_in_moe_gemm_rs_are_found(mutant):
    changes = (OF_TILES | OF_GEMM_RS)[mutant]
    _finds(lambda seed, source: MoeGemmRsRun(seed, 3, 3, 10, 2, source), GEMM_RS_SOURCE, changes)
