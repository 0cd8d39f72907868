"""How the launchers of the warp-specialized kernels divide tiles along K, see ``along_k``."""

from typing import Any, NamedTuple

import torch

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.ops.common.specialized.launch import is_enabled
from tdkernels.ops.common.tile_config import SPECIALIZED_TILE, STEP_BYTES
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import output_spec

_MAX_SUMS = 256  # of parts of a launch, of 128 KiB each
_MAX_PARTS = 8
# In steps of K, about 0.6 us: of each tile, of dividing tiles at all, and of each further part of a tile. Fitted to
# `gemm_rs` and `gemm_ar` with 2, 4 and 8 ranks on H200.
_TILE_STEPS, _DIVISION_STEPS, _PART_STEPS = 1, 16, 4
_LEAST_STEPS = 16  # of a part
_LEAST_GAIN = 0.05  # of the time of the launch by the model, otherwise tiles are not divided


class Division(NamedTuple):
    """Division of the last tiles of a launch.

    Attributes:
        whole: Number of tiles that are not divided.
        divided: Number of tiles that are.
        parts: Number of parts of each of them.
    """

    whole: int
    divided: int
    parts: int

    @property
    def further_items(self) -> int:
        """Number of parts that store their sums: work items in addition to one for each tile."""
        return self.divided * (self.parts - 1)


class Divided(NamedTuple):
    """Arguments of a kernel for divided tiles.

    Attributes:
        sums: The memory for the sums of parts in fp32, or None: no tile is divided.
        division: Which tiles are divided.
        first_flag: Number of the first flag of these tiles.
    """

    sums: Any
    division: Division
    first_flag: int

    @property
    def made(self) -> tuple[Any, ...]:
        """The tensors that each launch allocates."""
        return () if self.sums is None else (self.sums,)


NOT_DIVIDED = Divided(None, Division(0, 0, 1), 0)


def num_flags(config: Any) -> int:
    """Return the private words that divided tiles need, on whatever rank a kernel runs."""
    return 2 * _MAX_SUMS if is_enabled(config) else 0


def divided(x: torch.Tensor, tiles: int, first_flag: int) -> Divided:
    """Return the arguments of a launch that multiplies ``tiles`` tiles of rows of x [M, K].

    In the batch-invariant mode no tile is divided, since the division depends on the number of tiles.
    """
    steps, programs = cdiv(x.shape[1] * x.itemsize, STEP_BYTES), gpu.num_sms(x.device) - gpu.spare_sms
    division = None if is_batch_invariant() else divide(tiles, steps, programs)
    if division is None:
        return NOT_DIVIDED
    sums = output_spec(x, division.further_items, *SPECIALIZED_TILE, dtype=torch.float32)
    return Divided(sums, division, first_flag)


def compiled(x: torch.Tensor, tiles: int) -> Divided:
    """Return ``divided`` for a launch that is only compiled."""
    found = divided(x, tiles, 0)
    return found if found.sums is None else found._replace(sums=x.new_empty(1, dtype=torch.float32))


def divide(tiles: int, steps: int, programs: int) -> Division | None:
    """Return how to divide ``tiles`` tiles of ``steps`` steps of K, or None if that gains too little by the model."""
    full, rest = divmod(tiles, programs)
    if rest == 0:
        return None
    undivided = (full + 1) * (steps + _TILE_STEPS)
    most = min(programs // rest, _MAX_PARTS, steps // _LEAST_STEPS, 1 + _MAX_SUMS // rest)
    times = {parts: steps / parts + _DIVISION_STEPS + _PART_STEPS * parts for parts in range(2, most + 1)}
    parts = min(times, key=times.__getitem__, default=None)
    if parts is None or full * (steps + _TILE_STEPS) + times[parts] > (1 - _LEAST_GAIN) * undivided:
        return None
    return Division(tiles - rest, rest, parts)
