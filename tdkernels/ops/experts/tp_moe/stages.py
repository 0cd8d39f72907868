"""In how many stages the tokens of all ranks are multiplied by the experts' weights; see ``kernel_route``.

Our own tokens can be multiplied while those of the others are on the way, but every stage reads all the weights, and
its last tiles leave multiprocessors idle. What is best follows from the sizes, of which the host knows all but the
routing: it is taken to be even.
"""

import functools

from tdkernels.autotune.hardware import hardware
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES

_TILE_ROWS, _TILE_COLUMNS = 128, 256
_LINK_SHARE = 0.88  # that programs reach of a link's best rate


@functools.lru_cache(maxsize=4096)
def best_stages(world_size, tokens, choices, experts, n, k, dtype, device):
    """How many stages for ``tokens`` a rank of ``choices`` experts each, of weights [n, k]."""
    if world_size == 1:
        return 1
    rates = hardware(device, dtype)
    times = [
        _seconds(stages, world_size, tokens, choices, experts, n, k, dtype.itemsize, rates)
        for stages in range(1, MAX_STAGES.value + 1)
    ]
    return 1 + times.index(min(times))


def _seconds(stages, world_size, tokens, choices, experts, n, k, itemsize, rates):
    weights = experts * n * k * itemsize / rates.memory
    wire = (world_size - 1) * tokens * k * itemsize / (_LINK_SHARE * rates.link)
    product = 2.0 * world_size * tokens * choices * n * k / rates.flops
    idle = 0.5 * 2.0 * _TILE_ROWS * _TILE_COLUMNS * k / (rates.flops / rates.num_sms)
    return seconds_of_stages(stages, world_size, wire, product, weights, idle)


def seconds_of_stages(stages, world_size, wire, product, weights, idle):
    """About how long all stages take: each begins when its tokens are here and the stage before is done.

    Args:
        wire, product: seconds of all tokens
        weights: of reading the experts' once
        idle: at the end of a stage
    """
    if stages == 1:
        return wire + max(product, weights) + idle
    end = max(product / world_size, weights) + idle
    share = (world_size - 1) / world_size / (stages - 1)  # of all tokens, in each of the other stages
    for stage in range(1, stages):
        end = max(end, wire * stage / (stages - 1)) + max(product * share, weights) + idle
    return end
