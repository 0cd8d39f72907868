"""Config of ag_gemm, and the heuristic that selects a config without tuning."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.ops.collectives.async_all_gather import slot_rows_of
from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.config import METHODS
from tdkernels.ops.common.specialized import launch as launch_specialized
from tdkernels.ops.common.tile_config import LARGE, Tiles, default_tiles, tiles_of_product
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

# From this shard size on, one copy per peer is faster than programs that push, because it takes no SM (4 H200).
_LARGE_SHARD_BYTES = 64 << 20
# For two ranks. On 2 H100, five shapes: 8 % faster than 24 on average in CUDA graphs, and as fast in eager mode.
_NUM_COMM_SMS_OF_TWO = 8
# For the warp-specialized kernel, whose programs push about 10 GB/s each. On 8 H200 and in eight shapes, 64 were the
# fastest of 24, 32, 48, 64, 96 and 128 on average; 128 took 1.05 of their time. In fp8 a GEMM takes half of the time:
# on 4 H100 and in three shapes, 96 and 131 took 0.96 of the time of 64, and 40 took 1.14.
NUM_COMM_SPECIALIZED, _NUM_COMM_SPECIALIZED_FP8 = 64, 96
_CHUNK_SPECIALIZED = 2  # in solo mode as fast as 1 if the GEMM takes longer than the link, otherwise up to 12 % faster
# Up to this share of tile rows, tiles have rows of several shards. With 1/4 to 5/6 of them the kernel took 0.44 to 0.97
# of the time in 54 of 72 cases, and at most 1.11 with few tiles (H200 in solo mode, 2, 4 and 8 ranks).
_FEWER_TILE_ROWS = 7 / 8
MAX_WEIGHTS = 3  # of one call of a kernel: each is a separate argument
LEAST_STORE = 32  # columns of a tile that are stored at a time, if shared memory is scarce
BARRIER_BYTES = 256  # of the pipeline, in shared memory
# Up to this many rows of all ranks, reading the weight takes most of the time. "one_shot" reads it only once.
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 256}
# On Hopper it is faster for more rows, too, if there are few tiles, since its tiles are smaller. The fewer rows there
# are, the less it loses because it waits for all of them. H200 in solo mode, 256 to 1024 rows on 4 and 8 ranks: the
# faster kernel of the two by this limit takes 1.01 of the time of the fastest, at most 1.07 (48 cases).
_ONE_SHOT_MOST_ROWS, _ONE_SHOT_ROWS_AND_TILES = 1023, 1 << 15
# The limit of rows times tiles for fp8 by layout, from _LEAST_ROWS_OF_FP8 rows on. Two accumulators make the small-M
# GEMM slower. The kernel by these limits takes 1.00 to 1.01 of the time of the faster one of the two on average, at
# most 1.17 (32 to 40 cases for each layout, 128 to 768 rows). On two ranks the default takes 1.01, 1.01 and 1.04 of
# the time of the fastest config measured, at most 1.29 (48 cases for each, 96 to 1008 rows).
_ONE_SHOT_ROWS_AND_TILES_OF_FP8 = {"scaled fast": 61440, "scaled": 29696, "scaled by block": 16384}
_LEAST_ROWS_OF_FP8 = 65


def blocks_in_memory(device: "torch.device") -> int:
    """Return how many column blocks of a tile the epilogue has in shared memory at a time.

    On Blackwell the accumulator is not in registers, and its conversion needs shared memory, too.
    """
    return 2 if gpu.capability(device) >= (10, 0) else 1


@dataclass(frozen=True)
class AgGemmConfig:
    """Config of ``ag_gemm``.

    Attributes:
        method: "fused" runs the overlapping kernel. "parts" is a pipelined GEMM: torch's GEMM multiplies a part of the
            rows at a time, as the copy engine brings them. "torch" runs an all-gather, then a GEMM.
        tiles: Tile of the GEMM, see ``Tiles``. None selects the default for the device and shape.
        transport: "push" sends shards by programs, "copy_engine" by the copy engine. "one_shot" sends them by programs
            and starts the GEMM when all shards have arrived, for small M. On several nodes it is always "push".
        num_comm_sms: Number of programs that push concurrently. When they have finished, other programs compute tiles
            on their SMs. Not used by "copy_engine".
        chunk_tiles: Number of tile rows per chunk, which is sent with one signal. Not used by "one_shot".
        split_k: Number of K splits of a tile, each computed by one program. Only used by "one_shot".
        pieces: Number of chunks in which a shard is sent and multiplied. The only other field that method
            "parts" uses.
        warp_specialize: Whether different warps of a program may load, multiply, store and push, with transport "push"
            or "copy_engine". They do so on Hopper and one node, for tiles of 128 x 256, operands that TMA can load, and
            N / W a multiple of 16. Operands have 16 bits, and steps 64 elements of K. Alternatively operands are fp8
            with K as the inner dimension, steps have 128 elements, outputs have 16 bits, and transport is "push".
            Operands of different fp8 formats are not supported with fast accumulation. Programs that push then also
            compute tiles, and ``num_warps`` and ``num_stages`` are not used. Otherwise another kernel runs, with at
            most 24 programs that push (8 for two ranks). Results are the same.
    """

    method: str = "fused"
    tiles: Tiles | None = None
    transport: str = "push"
    num_comm_sms: int = 24
    chunk_tiles: int = 1
    split_k: int = 1
    pieces: int = 1
    warp_specialize: bool = False

    def illegal(self, device: "torch.device", dtype: "torch.dtype") -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in METHODS:
            return f'method must be "fused", "parts" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # uses no other field
        if self.pieces < 1:
            return f"pieces must be at least 1, not {self.pieces}"
        if self.method == "parts":
            return None  # uses no other field
        if self.transport not in ("push", "copy_engine", "one_shot"):
            return f'transport must be "push", "copy_engine" or "one_shot", not {self.transport!r}'
        if self.num_comm_sms < 1:
            return f"num_comm_sms must be at least 1, not {self.num_comm_sms}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        for name in ("chunk_tiles", "split_k"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        return self.tiles.illegal(device, dtype, self._store_bytes(device, dtype)) if self.tiles is not None else None

    def variant_reason(self) -> str | None:
        """Return why a row of a result depends on the batch with this config, or None if it does not."""
        if self.method != "fused":
            return f'method must be "fused", not {self.method!r}'
        if invariant_ranks() and self.transport == "one_shot":  # its small-M GEMM is not that of one rank
            return 'with max_ranks, transport must be "push" or "copy_engine", not "one_shot"'
        return None

    def _store_bytes(self, device, dtype):
        """Return the shared memory for storing a tile besides the stages: its smallest column block."""
        if self.transport == "one_shot" or not gpu.has_tma(device) or dtype.itemsize > 2:
            return 0
        block = self.tiles.block_m * min(self.tiles.block_n, LEAST_STORE) * dtype.itemsize
        return blocks_in_memory(device) * block + BARRIER_BYTES


def num_chunks(rows: int, config: AgGemmConfig) -> int:
    """Return the number of chunks of a shard with ``rows`` rows; the config has a tile."""
    return cdiv(rows, config.chunk_tiles * config.tiles.block_m)  # type: ignore[union-attr]


def has_tiles_across(rows: int, world_size: int) -> bool:
    """Return whether tiles of the warp-specialized kernel have rows of several shards of ``rows`` rows.

    With tiles of one shard, the last tile row of each shard may be partly empty. With tiles of several shards, this
    rank's rows are copied to their slot first. So they are used if there are clearly fewer of them. They need slots
    without gaps.
    """
    across, apart = cdiv(world_size * rows, LARGE.block_m), world_size * cdiv(rows, LARGE.block_m)
    return slot_rows_of(rows) == rows and world_size > 1 and across <= _FEWER_TILE_ROWS * apart


def num_tiles(rows: int, n: int, world_size: int) -> int:
    """Return the number of tiles of the warp-specialized kernel for ``world_size`` shards of ``rows`` rows."""
    if has_tiles_across(rows, world_size):
        return LARGE.count(world_size * rows, n)
    return world_size * LARGE.count(rows, n)


def num_pushing(world_size: int) -> int:
    """Return the default number of programs that push on a GPU."""
    return _NUM_COMM_SMS_OF_TWO if world_size == 2 else 24


def specialized_config(dtype: "torch.dtype", device: "torch.device") -> AgGemmConfig:
    """Return the default config of the warp-specialized kernel."""
    num_comm = _NUM_COMM_SPECIALIZED_FP8 if dtype.itemsize == 1 else NUM_COMM_SPECIALIZED
    num_comm = min(num_comm, gpu.num_sms(device) - 1)
    return AgGemmConfig(tiles=LARGE, num_comm_sms=num_comm, chunk_tiles=_CHUNK_SPECIALIZED, warp_specialize=True)


def default_config(
    rows: int, n: int, k: int, dtype: "torch.dtype", device: "torch.device", world_size: int, num_nodes: int = 1,
    layout: str | None = None,
) -> AgGemmConfig:
    """Return the heuristic config for operands [rows, k] and [n, k] of a rank.

    ``layout``: the layout of fp8 operands, see ``scaling.layout_of``. The tiles are those of 16-bit operands.
    """
    # If tiles have rows of several shards, few rows in a shard need no small tiles.
    tiles = default_tiles(rows * world_size if has_tiles_across(rows, world_size) else rows, n, dtype, device)
    specializes = num_nodes == 1 and launch_specialized.suits(tiles, n, k, dtype, device, layout)
    if num_nodes == 1 and _suits_one_shot(rows, n, dtype, device, world_size, layout if specializes else None):
        tiles, split_k = small_m_gemm.default_tiles(rows * world_size, n, k, dtype, device, layout=layout)
        num_comm = 2 if device.type == "cpu" else 24
        return AgGemmConfig(tiles=tiles, transport="one_shot", num_comm_sms=num_comm, split_k=split_k)
    if device.type == "cpu":
        return AgGemmConfig(tiles=tiles, num_comm_sms=2)
    # Also for few tiles, which it divides: with 24 to 48 of them it takes 0.63 to 0.78 of the time of the other kernel
    # with tiles of 128 x 128 (solo mode with 4 and 8 ranks, an H200, four shapes).
    if specializes:
        return _specialized_for(rows, n, dtype, device, world_size, layout)
    tiles = tiles_of_product(rows, n, world_size, 0.5, dtype, device)
    if rows * k * dtype.itemsize >= _LARGE_SHARD_BYTES and num_nodes == 1:
        return AgGemmConfig(tiles=tiles, transport="copy_engine", chunk_tiles=cdiv(rows, tiles.block_m))
    return AgGemmConfig(tiles=tiles, num_comm_sms=num_pushing(world_size))


def _specialized_for(rows, n, dtype, device, world_size, layout=None):
    """Return the default config of the warp-specialized kernel for an output of ``world_size`` shards [rows, n]."""
    config = specialized_config(dtype, device)
    # If all tiles run at the same time, each needs the first slice of its rows at once. But one program pushes the
    # scales of a chunk. If they are block-wise, chunks of two tiles take 0.79 to 0.99 of the time of one chunk,
    # otherwise 1.02 to 1.21 (H200 in solo mode, 4 and 8 ranks, 12 and 24 cases). More than 1008 rows on two ranks were
    # not measured.
    fit = num_tiles(rows, n, world_size) <= gpu.num_sms(device)
    if not fit or layout == "scaled by block":
        return config
    return replace(config, chunk_tiles=max(cdiv(rows, LARGE.block_m), config.chunk_tiles))


def of_several_weights(x: "torch.Tensor", weights: "Sequence[torch.Tensor]", world_size: int) -> AgGemmConfig | None:
    """Return a config that multiplies by several weights in one launch instead of "one_shot", or None.

    "one_shot" gathers x for each weight. So with more rows than reading a weight takes, tiles that begin before all
    rows have arrived are used on Hopper. The config only depends on what is equal on all ranks.
    """
    rows, k = x.shape
    if len(weights) == 1 or rows * world_size <= _ONE_SHOT_ROWS[x.device.type]:
        return None
    n = sum(weight.shape[0] for weight in weights)
    tiles = default_tiles(rows * world_size, n, x.dtype, x.device)
    if not all(launch_specialized.suits(tiles, weight.shape[0], k, x.dtype, x.device) for weight in weights):
        return None
    return _specialized_for(rows, n, x.dtype, x.device, world_size)


def _suits_one_shot(rows, n, dtype, device, world_size, layout):
    """Return whether "one_shot" is the default on one node.

    ``layout``: the layout of the problem if the warp-specialized kernel is the alternative, otherwise None
    """
    total = rows * world_size
    rows_and_tiles = total * num_tiles(rows, n, world_size)
    if layout in _ONE_SHOT_ROWS_AND_TILES_OF_FP8 and world_size > 1 and total >= _LEAST_ROWS_OF_FP8:
        return total <= _ONE_SHOT_MOST_ROWS and rows_and_tiles < _ONE_SHOT_ROWS_AND_TILES_OF_FP8[layout]
    if total <= _ONE_SHOT_ROWS[device.type]:
        return True
    if dtype.itemsize != 2 or total > _ONE_SHOT_MOST_ROWS or gpu.capability(device) != (9, 0):
        return False
    return rows_and_tiles < _ONE_SHOT_ROWS_AND_TILES


def default_config_for(x: "torch.Tensor", weight: "torch.Tensor", world_size: int) -> AgGemmConfig:
    """Return ``default_config`` for operands [M / W, K] and [N / W, K]."""
    return default_config(x.shape[0], *weight.shape, x.dtype, x.device, world_size)  # type: ignore[call-arg]
