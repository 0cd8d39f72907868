"""Every variant of every operator, forward and backward, with small uneven shapes.

It has no data race in several calls, and its values are right if ranks and programs run in another order.
"""

import pytest

from tdkernels.sanitizer import record
from tests.fuzz import scheduling_points
from tests.support.ranks import DEVICE, on_ranks
from tests.support.simulated_nodes import on_nodes
from tests.support.subset import THOROUGH
from tests.support.variants import VARIANTS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the race checker runs on CPU ranks")
CALLS = 4 if THOROUGH else 3  # the third call uses the data of the first one again
SEEDS = range(2 if THOROUGH else 1)


def checked(variant):
    """Return the number of recorded events, and the scheduling points of each schedule."""

    def run():
        with record() as races:
            variant.run_here(CALLS)
        return races.events, scheduling_points(variant, SEEDS)

    return run() if variant.local is None else on_nodes(variant.local, run)


# Their memory accesses are those of other variants, apart from the dtype or a few rows.
ALIKE = {
    "ag_gemm wire", "ag_gemm wire across nodes", "ag_gemm one_shot scaled by row", "ag_gemm copy_engine scaled by row",
    "ag_gemm of two scaled weights", "gemm_rs direct scaled by row", "gemm_rs forward scaled by block",
    "all_to_all low latency", "ep_dispatch small", "gemm_rs tree", "gemm_ar tree",
    *(f"{operator} across nodes of 1" for operator in ("ag_gemm", "gemm_rs", "gemm_ar")),
}


def test_alike_variants_exist():
    assert ALIKE <= set(VARIANTS)


@pytest.mark.parametrize("name", [name for name in VARIANTS if THOROUGH or name not in ALIKE])
def test_no_race_and_correct_values_in_any_order(name):
    variant = VARIANTS[name]
    results = on_ranks(variant.world_size, checked, variant)
    assert results[0][0] > 100, "nothing was recorded"
    for _, points in results:
        assert min(points) > 0, "a rank had no scheduling point"
