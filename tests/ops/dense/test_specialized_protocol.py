"""The barriers of the warp-specialized kernel of gemm_rs, on the CPU and in random order."""

from pathlib import Path

import pytest

from tdkernels.ops.dense.gemm_rs.specialized import partitions
from tests.ops.dense.specialized_protocol import Run
from tests.support.subset import THOROUGH

SIZES = [(0, 3), (1, 1), (1, 9), (2, 2), (3, 4), (5, 7)]  # work items, steps
SEEDS = 200 if THOROUGH else 10


@pytest.mark.parametrize("items, steps", SIZES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_order(items, steps, ranks):
    for seed in range(SEEDS):
        Run(seed, items, steps, ranks)()


MUTANTS = {
    "the last arrival of a partition does not wait": (
        "    mbarrier.wait(bars.index(OUT_FREE), 1)\n    if WHICH == 0:\n        write_item(sent.index(0), NO_ITEM",
        "    if WHICH == 0:\n        mbarrier.wait(bars.index(OUT_FREE), 1)\n        write_item(sent.index(0), NO_ITEM",
    ),
    "a stage is free when its product has begun": ("warpgroup_mma_wait(1, ", "warpgroup_mma_wait(2, "),
    "the second half does not wait for the first": ("        mbarrier.wait(bars.index(OUT_FREE), 0)\n", ""),
    "a half is free before it has been read": ("            tma.store_wait(0)  # the half has been read\n", ""),
    "a store is not fenced": (
        "        out.index(WHICH).store(right)\n        fence_async_shared()\n",
        "        out.index(WHICH).store(right)\n",
    ),
    "a signal does not wait for its tile": ("        await_tma_stores()\n", ""),
    "loads do not wait": (
        "        mbarrier.wait(bars.index(FREE + stage), ((turn // STAGES) & 1) ^ 1)\n        write_item",
        "        write_item",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_errors_are_found(mutant):
    source = Path(partitions.__file__).read_text()
    before, after = MUTANTS[mutant]
    assert source.count(before) == 1
    source = source.replace(before, after)
    with pytest.raises(AssertionError):
        for seed in range(200):
            Run(seed, 3, 6, 2, source)()
