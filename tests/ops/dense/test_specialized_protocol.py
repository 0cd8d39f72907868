"""The barriers of the warp-specialized kernels, on the CPU and in random order."""

import pytest

from tests.ops.dense.specialized_protocol import source_of
from tests.ops.dense.specialized_runs import AgGemmAcrossRun, AgGemmRun, GemmRsRun, GroupGemmRun, PairsRun, SplitRun
from tests.support.mutants import check_found
from tests.support.subset import THOROUGH

SIZES = [(0, 3), (1, 1), (1, 9), (2, 2), (3, 4), (5, 7)]  # work items, steps
SEEDS = 200 if THOROUGH else 10
each_sum = pytest.mark.parametrize("promotes", [False, True], ids=["one accumulator", "two accumulators"])


@pytest.mark.parametrize("items, steps", SIZES)
@pytest.mark.parametrize("ranks", [2, 3])
@each_sum
def test_gemm_rs_in_any_order(items, steps, ranks, promotes):
    for seed in range(SEEDS):
        GemmRsRun(seed, items, steps, ranks, promotes=promotes)()


@pytest.mark.parametrize("tile_rows, steps", [(0, 3), (1, 1), (1, 9), (2, 5)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gemm_rs_in_pairs_in_any_order(tile_rows, steps, ranks):
    for seed in range(SEEDS):
        PairsRun(seed, tile_rows, steps, ranks)()


@pytest.mark.parametrize("items, steps, last_wave", [
    (1, 8, (1, 2)), (3, 9, (1, 4)), (5, 8, (2, 2)), (5, 11, (2, 3)), (4, 9, (4, 3)),
])
@pytest.mark.parametrize("programs", [1, 2, 3])
@each_sum
def test_split_k_in_any_order(items, steps, last_wave, programs, promotes):
    for seed in range(SEEDS):
        SplitRun(seed, items, steps, 2, last_wave, programs, promotes=promotes)()


@pytest.mark.parametrize("items, steps", SIZES)
@pytest.mark.parametrize("slice_steps", [1, 4, 9])
@each_sum
def test_ag_gemm_in_any_order(items, steps, slice_steps, promotes):
    for seed in range(SEEDS):
        AgGemmRun(seed, items, steps, slice_steps, promotes=promotes)()


@pytest.mark.parametrize("items, steps", SIZES)
@pytest.mark.parametrize("slice_steps", [1, 4, 9])
def test_ag_gemm_with_tiles_across_shards_in_any_order(items, steps, slice_steps):
    for seed in range(SEEDS):
        AgGemmAcrossRun(seed, items, steps, slice_steps)()


@pytest.mark.parametrize("items, steps", SIZES)
@pytest.mark.parametrize("activation, promotes", [
    (None, False), ("swiglu", False), ("keep", False), (None, True), ("swiglu", True),
])
def test_group_gemm_in_any_order(items, steps, activation, promotes):
    for seed in range(SEEDS):
        GroupGemmRun(seed, items, steps, activation, promotes=promotes)()


LAST_ARRIVAL = (
    "    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)\n    if WHICH == 0:\n        write_item(memory[4]",
    "    if WHICH == 0:\n        mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)\n        write_item(memory[4]",
)
BEGIN = (
    "    stage = await_stage(bars, turn)\n    write_item(item_word(memory, stage, 0), item, LAYOUT)\n    for",
    "    stage = turn % STAGES\n    write_item(item_word(memory, stage, 0), item, LAYOUT)\n    for",
)
OF_ALL = {
    "the last arrival of a partition does not wait": LAST_ARRIVAL,
    "a stage is free when its product has begun": ("warpgroup_mma_wait(1, ", "warpgroup_mma_wait(2, "),
    "a half does not wait for the one before": (
        "    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)\n    out.index", "    out.index",
    ),
    "a store is not fenced": ("    fence_async_shared()\n", ""),
    "loads do not wait": ("    mbarrier.wait(bars.index(FREE + stage), ((turn // STAGES) & 1) ^ 1)\n", ""),
    "the last half that was kept does not leave": (
        "    number = pass_kept(memory, bars, kept, kept_item, number, WHICH)\n    pass_no_item", "    pass_no_item",
    ),
    "a half that was kept does not leave": (
        "return acc, turn, pass_kept(memory, bars, kept, kept_item, number, WHICH)", "return acc, turn, number",
    ),
    "an item is not passed on": ("        write_item(sent.index(0), item, FOUR_WARPS)\n", "        pass\n"),
}
EARLY = "a half is free before it has been read"
OF_GEMM_RS = {
    EARLY: ("            tma.store_wait(0)  # the half has been read\n", ""),
    "a signal does not wait for its tile": ("        await_tma_stores()\n", ""),
}
OF_PAIRS = {
    EARLY: OF_GEMM_RS[EARLY],
    "the signal of a half does not wait for it": OF_GEMM_RS["a signal does not wait for its tile"],
    "both halves are those of one rank": (
        "gl.where(is_pair, row_in_segments(row, (owner + 1) % RANKS", "gl.where(is_pair, row_in_segments(row, owner",
    ),
    "the second half goes to the same rank": ("(is_pair != 0) & (step + 1 == peer)", "(is_pair != 0) & (step == peer)"),
    "the second half stays in its place": (
        "store_part(descs[peer], out, 1, half, row, col)", "store_part(descs[peer], out, 1, half, row + HALF_M, col)",
    ),
    "the next rank gets no signal": ("(is_pair != 0) & (step + 1 < RANKS)", "False"),
    "the second half follows the first": ("at = row if part == 0 else second", "at = row + part * HALF_M"),
}
OF_AG_GEMM = {
    EARLY: OF_GEMM_RS[EARLY],
    "a half of a tile counts as two": ("range(2 - code % 2)", "range(2)"),
    "rows are read before they arrive": ("    if slice_id >= ready:\n", "    if False:\n"),
    "one slice too many is ready": ("    if slice_id >= ready:\n", "    if slice_id > ready:\n"),
    "a slice has the signal of the one before": ("first_ptr + slice_id,", "first_ptr + max(slice_id - 1, 0),"),
    "a half of a tile loads all of the weight": ("stage, 1, has_last_columns, W_IS_KN", "stage, 1, True, W_IS_KN"),
}


OF_AG_GEMM_ACROSS = {
    "the last chunk is not awaited": ("range(first, last + 1):  # producer", "range(first, last):  #"),
    "a chunk has the signal of the first one": (
        "first_ptr + (chunk - first) * slices + slice_id", "first_ptr + slice_id",
    ),
    "slices of the first chunk are ready only": (
        "ready = count_ready_by_warp(first_ptr + (chunk - first) * slices, ready, signal)",
        "ready = count_ready_by_warp(first_ptr, ready, signal)",
    ),
    "the chunks of the tile row before are awaited": (
        "    row = tile_row * BLOCK_M\n", "    row = max(tile_row - 1, 0) * BLOCK_M\n",
    ),
    "a tile is stored where its shard would begin": (
        "plane, row = 0, source * BLOCK_M", "plane, row = 0, pid_m * BLOCK_M",
    ),
}


OF_GROUP_GEMM = {
    EARLY: ("        tma.store_wait(0)\n", ""),
    "a half that was kept before a skipped tile does not leave": (
        "        number = pass_kept(memory, bars, kept, kept_item, number, WHICH)\n        turn = _skip",
        "        turn = _skip",
    ),
    "stages of a skipped tile are not freed": ("        mbarrier.arrive(bars.index(FREE + stage), count=1)\n", ""),
    "a skipped half does not wait for the one before": (
        "    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)\n    mbarrier.arrive", "    mbarrier.arrive",
    ),
    "rows of the next group are stored": ("row + BLOCK_M <= end", "row + HALF_M <= end"),
    "rows of the next group are multiplied": ("is_whole = row + HALF_M < end", "is_whole = row < end"),
    "half of the rows are skipped": ("is_whole = row + HALF_M < end", "is_whole = row + HALF_M + 1 < end"),
}


PRODUCT = "    product = warpgroup_mma_wait(0, deps=[product])\n"
ARRIVAL = "    mbarrier.arrive(bars.index(FREE + stage), count=1)\n"
OF_PROMOTION = {
    "a stage is free when its last product has begun": (PRODUCT + ARRIVAL, ARRIVAL + PRODUCT),
    "a product does not wait for its operands": (
        "    stage = await_operands(memory, bars, turn)\n    product", "    stage = turn % STAGES\n    product",
    ),
    "a half that was kept does not leave": ("    if PASS_KEPT:\n", "    if False:\n"),
    "a half is multiplied twice": ("_product(memory, stage, WHICH, 1)", "_product(memory, stage, WHICH, 0)"),
    "a step has the scales of the one before": (
        "following = _load_factors(place, gl.minimum(step + 1, last)", "following = _load_factors(place, step",
    ),
    "both halves have the scales of one": ("of_rows, of_right, FACTORS", "of_rows, of_left, FACTORS"),
}


@pytest.mark.parametrize("mutant", OF_PROMOTION)
@pytest.mark.parametrize("run", [
    lambda seed, source: GemmRsRun(seed, 3, 6, 2, source, promotes=True),
    lambda seed, source: AgGemmRun(seed, 4, 6, 2, source, promotes=True),
    lambda seed, source: GroupGemmRun(seed, 5, 6, "swiglu", source, promotes=True),
], ids=["gemm_rs", "ag_gemm", "group_gemm"])
def test_errors_with_two_accumulators_are_found(mutant, run):
    _finds(run, OF_PROMOTION, mutant)


def test_scales_that_are_read_before_their_rows_arrive_are_found():
    begin = "    factors = _load_factors(place, first, epilogue, WHICH, FACTORS)\n"
    early = "    _load_factors((place[0] + BLOCK_M, 0, 0), 0, epilogue, WHICH, FACTORS)\n"  # of the next item
    mutants = {"early": (begin, begin + early)}
    _finds(lambda seed, source: AgGemmRun(seed, 4, 6, 2, source, promotes=True), mutants, "early")


OF_SPLIT_K = {
    "the sums of a split are not added": ("        left += gl.load(pointers)\n", "        gl.load(pointers)\n"),
    "the sums of one half are added to the other": ("gl.load(pointers + HALF_SIZE)", "gl.load(pointers)"),
    "the sums of the next tile are added": ("first = (-1 - split) * (num_splits", "first = -split * (num_splits"),
    "a flag is set before the sums are stored": (
        "    for side in gl.static_range(2):\n        gl.store(", "    raise_by_warps(flag_at(ctx, first_flag + 2 * "
        "(split - 1) + WHICH), signal, 4)\n    for side in gl.static_range(2):\n        gl.store(",
    ),
    "the last split does not wait": ("        wait_for_rank(ctx, flag, signal, rank(ctx), 4)", "        pass"),
    "the last split waits for the other rows": (
        "first_flag + 2 * number + WHICH", "first_flag + 2 * number + 1 - WHICH",
    ),
    "a flag is not cleared": ("        clear_by_warps(flag, 4)\n", ""),
    "a split is passed on": ("    if split > 0:\n        store", "    if split > 9:\n        store"),
    "a split that is not passed on is kept": ("    kept_item = item * 0 + NO_ITEM\n", "    kept_item = item\n"),
    "a split begins with the first step": ("gl.where(is_whole, 0, first)", "0"),
    "a split has the steps of a tile": ("gl.where(is_whole, steps, end - first)", "steps"),
}


@pytest.mark.parametrize("mutant", OF_SPLIT_K)
def test_errors_in_split_k_are_found(mutant):
    _finds(lambda seed, source: SplitRun(seed, 5, 11, 2, (2, 3), 2, source), OF_SPLIT_K, mutant)


@pytest.mark.parametrize("mutant", OF_ALL | OF_GEMM_RS)
def test_errors_in_gemm_rs_are_found(mutant):
    _finds(lambda seed, source: GemmRsRun(seed, 3, 6, 2, source), OF_ALL | OF_GEMM_RS, mutant)


def test_item_that_begins_before_its_stage_is_free_is_found():
    # With more steps, an item has begun before the one that uses its words again is loaded.
    _finds(lambda seed, source: GemmRsRun(seed, 6, 1, 2, source), {"begin": BEGIN}, "begin")


@pytest.mark.parametrize("mutant", OF_ALL | OF_AG_GEMM)
def test_errors_in_ag_gemm_are_found(mutant):
    _finds(lambda seed, source: AgGemmRun(seed, 4, 6, 2, source), OF_ALL | OF_AG_GEMM, mutant)


@pytest.mark.parametrize("mutant", OF_PAIRS)
def test_errors_in_pairs_are_found(mutant):
    _finds(lambda seed, source: PairsRun(seed, 1, 5, 4, source), OF_PAIRS, mutant)


@pytest.mark.parametrize("mutant", OF_AG_GEMM_ACROSS)
def test_errors_with_tiles_across_shards_are_found(mutant):
    _finds(lambda seed, source: AgGemmAcrossRun(seed, 4, 6, 2, source), OF_AG_GEMM_ACROSS, mutant)


@pytest.mark.parametrize("mutant", OF_ALL | OF_GROUP_GEMM)
@pytest.mark.parametrize("activation", [None, "keep"])
def test_errors_in_group_gemm_are_found(mutant, activation):
    _finds(lambda seed, source: GroupGemmRun(seed, 5, 6, activation, source), OF_ALL | OF_GROUP_GEMM, mutant)


def _finds(run, mutants, mutant):
    check_found(run, source_of(*run(0, None).partitions), mutants[mutant])
