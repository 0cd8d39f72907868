"""No operator has a race: each variant, forward and backward, with uneven small shapes, four calls."""

import pytest

from tdkernels.sanitizer import record
from tests.ranks import DEVICE, on_ranks
from tests.ways import WAYS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the race checker runs on CPU ranks")
CALLS = 4


def has_no_race(function, args):
    with record() as races:
        for _ in range(CALLS):
            function(*args)
    return races.events


@pytest.mark.parametrize("way", WAYS)
def test_no_race(way):
    _, world_size, function, args = WAYS[way]
    (events, *_) = on_ranks(world_size, has_no_race, function, args)
    assert events > 100, "nothing was recorded"
