"""No operator has a race: each variant, forward and backward, with uneven small shapes, four calls."""

import pytest

from tdkernels.sanitizer import record
from tests.support.ranks import DEVICE, on_ranks
from tests.support.variants import WAYS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the race checker runs on CPU ranks")
CALLS = 4


def has_no_race(way):
    with record() as races:
        way.run(CALLS)
    return races.events


@pytest.mark.parametrize("name", WAYS)
def test_no_race(name):
    way = WAYS[name]
    (events, *_) = on_ranks(way.world_size, has_no_race, way)
    assert events > 100, "nothing was recorded"
