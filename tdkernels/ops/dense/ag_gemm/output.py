"""Outputs of ag_gemm: how a tile is stored, and tensor descriptors. y is [rows / segment_rows, W, segment_rows, N]."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.dense.ag_gemm.config import BARRIER_BYTES, LEAST_STORE, blocks_in_memory
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles
    from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig


def has_whole_tiles(rows: int, segment_rows: int, block_m: int) -> bool:
    """Return whether no tile of a shard with ``rows`` rows has rows of two segments."""
    return segment_rows == rows or segment_rows % block_m == 0


def as_planes(y: torch.Tensor, segment_rows: int) -> tuple[list[int], list[int]]:
    """Return the (shape, strides) of an output [planes * segment_rows, n] as [planes, segment_rows, n]."""
    n = y.shape[1]
    return [max(y.shape[0] // max(segment_rows, 1), 1), segment_rows, n], [segment_rows * n, n, 1]


def output_descriptors(
    x: torch.Tensor, ys: Sequence[torch.Tensor], config: "AgGemmConfig", segment_rows: int, constants: dict[str, Any]
) -> list[TensorDescriptor | None]:
    """Return the descriptor of each output or None, and set the constant STORES."""
    tiles: Any = config.tiles
    constants["STORES"] = stores = num_stores(
        tiles, x.dtype, gpu.shared_memory_bytes(x.device), blocks_in_memory(x.device), ys[0].element_size()
    )
    whole_tiles = has_whole_tiles(x.shape[0], segment_rows, tiles.block_m)
    by_engine = constants["PRODUCT"].use_tma and whole_tiles and all(y.shape[1] % 8 == 0 for y in ys)
    return [_output_descriptor(y, segment_rows, tiles, stores) if by_engine else None for y in ys]


def num_stores(tiles: "Tiles", dtype: torch.dtype, available: int, blocks: int, out_bytes: int | None = None) -> int:
    """Return in how many column blocks a tile is stored: ``blocks`` of them and the stages fit in shared memory.

    ``out_bytes``: bytes per element of the output, if they are not those of ``dtype``.
    """
    free = available - tiles.shared_memory_bytes(dtype) - BARRIER_BYTES
    stores = 1
    while blocks * tiles.block_m * tiles.block_n * (out_bytes or dtype.itemsize) > stores * free and (
        tiles.block_n // stores > LEAST_STORE
    ):
        stores *= 2
    return stores


def _output_descriptor(y, segment_rows, tiles, stores):
    """Return the descriptor of an output for one of ``stores`` column blocks of a tile."""
    return TensorDescriptor(y, *as_planes(y, segment_rows), [1, tiles.block_m, tiles.block_n // stores])
