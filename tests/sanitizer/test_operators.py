"""No operator has a data race: every variant, forward and backward, with small uneven shapes, four calls."""

import pytest

from tdkernels.sanitizer import record
from tests.support.ranks import DEVICE, on_ranks
from tests.support.variants import VARIANTS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the race checker runs on CPU ranks")
CALLS = 4


def count_events(variant):
    with record() as races:
        variant.run(CALLS)
    return races.events


@pytest.mark.parametrize("name", VARIANTS)
def test_no_race(name):
    variant = VARIANTS[name]
    (events, *_) = on_ranks(variant.world_size, count_events, variant)
    assert events > 100, "nothing was recorded"
