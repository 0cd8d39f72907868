"""Every variant of every operator, forward and backward, with small uneven shapes.

It has no data race in several calls, and its values are right if ranks and programs run in another order.
"""

import pytest

from tdkernels.sanitizer import record
from tests.fuzz import fuzz
from tests.support.ranks import DEVICE, on_ranks
from tests.support.subset import THOROUGH
from tests.support.variants import VARIANTS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the race checker runs on CPU ranks")
CALLS = 4 if THOROUGH else 3  # the third call uses the data of the first one again
SEEDS = range(2 if THOROUGH else 1)


def checked(variant):
    """Return the number of recorded events, and the scheduling points of each schedule."""
    with record() as races:
        variant.run(CALLS)
    return races.events, fuzz(variant, SEEDS)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_race_and_correct_values_in_any_order(name):
    variant = VARIANTS[name]
    results = on_ranks(variant.world_size, checked, variant)
    assert results[0][0] > 100, "nothing was recorded"
    for _, points in results:
        assert min(points) > 0, "a rank had no scheduling point"
