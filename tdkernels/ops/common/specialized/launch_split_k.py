"""Split-K in the launchers of the warp-specialized kernels, see ``split_k``."""

from typing import Any, NamedTuple

import torch

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.ops.common.specialized.launch import is_enabled
from tdkernels.ops.common.tile_config import SPECIALIZED_TILE, STEP_BYTES
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import output_spec

_MAX_SUMS = 256  # of a launch, of 128 KiB each
_MAX_SPLITS = 8
# Costs in steps of K (a step takes about 0.6 us): per tile, per launch with split-K, per split of a tile. Fitted to
# `gemm_rs` and `gemm_ar` with 2, 4 and 8 ranks on H200.
_TILE_STEPS, _SPLIT_K_STEPS, _SPLIT_STEPS = 1, 16, 4
_LEAST_STEPS = 16  # of a split
_LEAST_GAIN = 0.05  # of the time of the launch by the model, otherwise tiles are not split


class LastWave(NamedTuple):
    """How the tiles of the last wave are split along K.

    Attributes:
        whole_tiles: Number of tiles that are not split.
        split_tiles: Number of tiles that are.
        num_splits: Number of splits of each of them.
    """

    whole_tiles: int
    split_tiles: int
    num_splits: int

    @property
    def further_items(self) -> int:
        """Number of splits that store their sums: work items in addition to one for each tile."""
        return self.split_tiles * (self.num_splits - 1)


class Splits(NamedTuple):
    """Arguments of a kernel for split-K.

    Attributes:
        sums: The memory for the sums of splits in fp32, or None: no tile is split.
        last_wave: Which tiles are split.
        first_flag: Number of the first flag of these tiles.
    """

    sums: Any
    last_wave: LastWave
    first_flag: int

    @property
    def output_specs(self) -> tuple[Any, ...]:
        """The tensors that each launch allocates."""
        return () if self.sums is None else (self.sums,)


NO_SPLITS = Splits(None, LastWave(0, 0, 1), 0)


def num_flags(config: Any) -> int:
    """Return the private words that split tiles need, on whatever rank a kernel runs."""
    return 2 * _MAX_SUMS if is_enabled(config) else 0


def splits_of(x: torch.Tensor, tiles: int, first_flag: int) -> Splits:
    """Return the arguments of a launch that multiplies ``tiles`` tiles of rows of x [M, K].

    In the batch-invariant mode no tile is split, since that depends on the number of tiles.
    """
    last_wave = _last_wave_of(x, tiles)
    if last_wave is None:
        return NO_SPLITS
    sums = output_spec(x, last_wave.further_items, *SPECIALIZED_TILE, dtype=torch.float32)
    return Splits(sums, last_wave, first_flag)


def compiled(x: torch.Tensor, tiles: int) -> Splits:
    """Return ``splits_of`` for a launch that is only compiled."""
    found = splits_of(x, tiles, 0)
    return found if found.sums is None else found._replace(sums=x.new_empty(1, dtype=torch.float32))


def takes(x: torch.Tensor, tiles: int, may_split: bool) -> float:
    """Return the time of a launch as for ``splits_of`` by the model, in steps of K, or without split-K."""
    steps, programs = _steps_and_programs(x)
    return _takes(tiles, steps, programs, _last_wave_of(x, tiles) if may_split else None)


def _steps_and_programs(x):
    return cdiv(x.shape[1] * x.itemsize, STEP_BYTES), gpu.available_sms(x.device)


def _last_wave_of(x, tiles):
    """Return how ``tiles`` tiles of rows of x are split, or None."""
    return None if is_batch_invariant() else choose(tiles, *_steps_and_programs(x))


def _takes(tiles, steps, programs, last_wave):
    """Return the time of a launch by the model, in steps of K. ``last_wave``: how its last tiles are split, or None."""
    if last_wave is None:
        return cdiv(tiles, programs) * (steps + _TILE_STEPS)
    splits = last_wave.num_splits
    return tiles // programs * (steps + _TILE_STEPS) + steps / splits + _SPLIT_K_STEPS + _SPLIT_STEPS * splits


def choose(tiles: int, steps: int, programs: int) -> LastWave | None:
    """Return how to split tiles of ``steps`` steps of K, or None if that gains too little by the model."""
    full, rest = divmod(tiles, programs)
    if rest == 0:
        return None
    whole = _takes(tiles, steps, programs, None)
    most = min(programs // rest, _MAX_SPLITS, steps // _LEAST_STEPS, 1 + _MAX_SUMS // rest)
    found = [LastWave(tiles - rest, rest, splits) for splits in range(2, most + 1)]
    best = min(found, key=lambda one: _takes(tiles, steps, programs, one), default=None)
    if best is None or _takes(tiles, steps, programs, best) > (1 - _LEAST_GAIN) * whole:
        return None
    return best
