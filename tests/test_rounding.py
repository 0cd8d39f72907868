"""Integer rounding."""

import math

from tdkernels.rounding import cdiv, next_power_of_2, round_up


def test_rounding():
    for n in range(200):
        for multiple in (1, 2, 3, 7, 16):
            assert cdiv(n, multiple) == math.ceil(n / multiple)
            assert round_up(n, multiple) % multiple == 0 and 0 <= round_up(n, multiple) - n < multiple
        assert next_power_of_2(n) == 2 ** math.ceil(math.log2(max(n, 1)))
