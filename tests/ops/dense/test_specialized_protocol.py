"""The barriers of the warp-specialized kernels, on the CPU and in random order."""

import pytest

from tests.ops.dense.specialized_protocol import source_of
from tests.ops.dense.specialized_runs import AgGemmRun, GemmRsRun
from tests.support.subset import THOROUGH

SIZES = [(0, 3), (1, 1), (1, 9), (2, 2), (3, 4), (5, 7)]  # work items, steps
SEEDS = 200 if THOROUGH else 10


@pytest.mark.parametrize("items, steps", SIZES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_gemm_rs_in_any_order(items, steps, ranks):
    for seed in range(SEEDS):
        GemmRsRun(seed, items, steps, ranks)()


@pytest.mark.parametrize("items, steps", SIZES)
@pytest.mark.parametrize("slice_steps", [1, 4, 9])
def test_ag_gemm_in_any_order(items, steps, slice_steps):
    for seed in range(SEEDS):
        AgGemmRun(seed, items, steps, slice_steps)()


LAST_ARRIVAL = (
    "    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)\n    if WHICH == 0:\n        write_item(memory[4]",
    "    if WHICH == 0:\n        mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)\n        write_item(memory[4]",
)
OF_BOTH = {
    "the last arrival of a partition does not wait": LAST_ARRIVAL,
    "a stage is free when its product has begun": ("warpgroup_mma_wait(1, ", "warpgroup_mma_wait(2, "),
    "a half does not wait for the one before": (
        "    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)\n    out.index", "    out.index",
    ),
    "a half is free before it has been read": ("            tma.store_wait(0)  # the half has been read\n", ""),
    "a store is not fenced": ("    fence_async_shared()\n", ""),
    "loads do not wait": ("    mbarrier.wait(bars.index(FREE + stage), ((turn // STAGES) & 1) ^ 1)\n", ""),
    "an item is not passed on": ("        write_item(sent.index(0), item, FOUR_WARPS)\n", "        pass\n"),
}
OF_GEMM_RS = {"a signal does not wait for its tile": ("        await_tma_stores()\n", "")}
OF_AG_GEMM = {
    "a half of a tile counts as two": ("range(2 - code % 2)", "range(2)"),
    "rows are read before they arrive": ("    if is_own == 0:\n", "    if False:\n"),
    "a slice has the signal of the one before": ("first_ptr + slice_id,", "first_ptr + max(slice_id - 1, 0),"),
    "a half of a tile loads all of the weight": ("stage, 1, is_whole, W_IS_KN", "stage, 1, True, W_IS_KN"),
}


@pytest.mark.parametrize("mutant", OF_BOTH | OF_GEMM_RS)
def test_errors_in_gemm_rs_are_found(mutant):
    _finds(lambda seed, source: GemmRsRun(seed, 3, 6, 2, source), OF_BOTH | OF_GEMM_RS, mutant)


@pytest.mark.parametrize("mutant", OF_BOTH | OF_AG_GEMM)
def test_errors_in_ag_gemm_are_found(mutant):
    _finds(lambda seed, source: AgGemmRun(seed, 4, 6, 2, source), OF_BOTH | OF_AG_GEMM, mutant)


def _finds(run, mutants, mutant):
    kernel = run(0, None)
    source = source_of(kernel.partitions)
    before, after = mutants[mutant]
    assert source.count(before) == 1
    source = source.replace(before, after)
    with pytest.raises(AssertionError):
        for seed in range(200):
            run(seed, source)()
