"""Cost model for the number of overlap stages of tp_moe; see ``kernel_route`` for what a stage is.

This rank's tokens can be multiplied while the tokens of the peers are on the way. But each stage reads all weights. The
best number of stages follows from the sizes. The host knows all of them except the routing, which the model assumes to
be uniform.
"""

import functools
from typing import TYPE_CHECKING

from tdkernels.autotune.hardware import hardware
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES

if TYPE_CHECKING:
    import torch

_TILE_ROWS, _TILE_COLUMNS = 128, 256
_LINK_SHARE = 0.88  # share of the peak bandwidth of a link that programs reach
# Share of the time to read the weights that each further stage adds, even if the products take longer than reading. As
# one of 4 or 8 ranks on an H200 (solo mode) it is 0.07 to 0.31, with the warp-specialized kernel.
_READING_SHARE = 0.25


@functools.lru_cache(maxsize=4096)
def best_stages(
    world_size: int, tokens: int, choices: int, experts: int, n: int, k: int, dtype: "torch.dtype",
    device: "torch.device",
) -> int:
    """Return the best number of stages for ``tokens`` tokens per rank, ``choices`` experts each, weights [n, k]."""
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


def seconds_of_stages(
    stages: int, world_size: int, wire: float, product: float, weights: float, idle: float,
) -> float:
    """Estimate the seconds of all stages. A stage starts when its tokens have arrived and the previous stage is done.

    Programs that have finished a stage begin the next one, so multiprocessors are idle at the end of the last one only.

    Args:
        wire: Seconds to transfer all tokens.
        product: Seconds to multiply all tokens.
        weights: Seconds to read the weights of the experts once.
        idle: Idle seconds at the end.
    """
    if stages == 1:
        return wire + max(product, weights) + idle
    end = max(product / world_size, weights)
    share = (world_size - 1) / world_size / (stages - 1)  # of all tokens, in each of the other stages
    for stage in range(1, stages):
        end = max(end, wire * stage / (stages - 1)) + max(product * share, weights) + _READING_SHARE * weights
    return end + idle
