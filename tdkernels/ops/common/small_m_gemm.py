"""Building blocks for small-M GEMM.

With few rows a GEMM is bound by reading the weight. A tile covers all rows, so that the weight is read once, and has
few columns, so that every SM reads a part of the weight. If N gives too few tiles for the SMs, ``split_k`` programs
share the K of a tile. The tensor cores get the weight as the first operand and x as the second: as the first operand,
x would be padded to 64 rows on Hopper.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.gemm_tile import (
    add_nodes,
    add_product,
    as_aligned,
    block_scales,
    columns_of_leaf,
    pack_node,
    scaled_by_rows,
)
from tdkernels.ops.common.scaling import Scales
from tdkernels.ops.common.tile_config import LARGE, Tiles, Wave, fastest_in_waves
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import output_spec

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tdkernels.autotune.hardware import Hardware

_MAX_SPLIT = 8
_MIN_STEPS = 4  # minimum steps of block_k per program; with fewer, a program is not worth starting
# Tiles for more than 64 rows from Hopper on. In solo mode on an H200 with 2, 4 and 8 ranks, the tile with the shortest
# time in whole waves takes 1.01 to 1.02 of the time of the fastest one (geometric means of 64 to 108 cases for each
# operator, 128 to 1024 rows).
_WAVES = (
    Wave(Tiles(64, 64, 128, num_warps=4, num_stages=6), 0.7),
    Wave(Tiles(64, 128, 128, num_warps=4, num_stages=4), 1.0),
    Wave(Tiles(128, 64, 128, num_warps=4, num_stages=4), 1.06),
    Wave(Tiles(128, 128, 64, num_warps=4, num_stages=6), 1.4),
    Wave(LARGE, 2.4),
)
_MOST_RANKS_OF_LARGE = 2  # that exchange partial tiles: with more, these take too many registers
# The same for fp8 operands on Hopper by layout, and more than 32 rows, if no partial tiles are exchanged. A tile on
# each SM needs many bytes in flight to read the weight fast. With more tiles, two programs on an SM with fewer bytes
# each are faster. ag_gemm in solo mode on an H200 with 4 and 8 ranks, 64 to 512 rows: the tile with the shortest time
# takes 1.00 of the time of the fastest one (40 cases for each layout).
_WAVES_IN_FP8 = {
    "scaled fast": (
        Wave(Tiles(64, 64, 256, num_warps=4, num_stages=6), 0.7),
        Wave(Tiles(64, 128, 256, num_warps=4, num_stages=4), 1.0),
        Wave(Tiles(64, 128, 128, num_warps=4, num_stages=4), 1.45, per_sm=2),
        Wave(Tiles(128, 128, 128, num_warps=8, num_stages=5), 1.05),
        Wave(Tiles(128, 256, 128, num_warps=8, num_stages=4), 1.85),
    ),
    "scaled": (
        Wave(Tiles(64, 64, 256, num_warps=4, num_stages=6), 0.7),
        Wave(Tiles(64, 128, 256, num_warps=8, num_stages=4), 1.0),
        Wave(Tiles(64, 128, 128, num_warps=8, num_stages=4), 1.45, per_sm=2),
        Wave(Tiles(128, 128, 256, num_warps=8, num_stages=3), 1.05),
    ),
    "scaled by block": (
        Wave(Tiles(64, 64, 128, num_warps=4, num_stages=8), 0.8),
        Wave(Tiles(64, 128, 128, num_warps=4, num_stages=6), 1.0),
        Wave(Tiles(64, 128, 128, num_warps=4, num_stages=4), 1.5, per_sm=2),
        Wave(Tiles(128, 128, 128, num_warps=8, num_stages=5), 1.8),
    ),
}
# The same for more than 64 rows if partial tiles are exchanged. gemm_rs in solo mode on an H200 with 4 and 8 ranks, 128
# to 384 rows: the tile with the shortest time takes 1.02, 1.03 and 1.00 of the time of the fastest one (23, 23 and 12
# cases). ``per_sm`` is fitted, too: with 8 ranks some of these tiles have registers for fewer programs.
_NARROW_IN_EXCHANGE = (
    Wave(Tiles(64, 128, 256, num_warps=8, num_stages=4), 0.9),
    Wave(Tiles(64, 128, 128, num_warps=8, num_stages=4), 1.0, per_sm=2, one_wave_only=True),
)
_WAVES_OF_EXCHANGE_IN_FP8 = {
    "scaled fast": (*_NARROW_IN_EXCHANGE, Wave(Tiles(128, 128, 128, num_warps=8, num_stages=5), 1.3)),
    "scaled": (*_NARROW_IN_EXCHANGE, Wave(Tiles(128, 128, 256, num_warps=8, num_stages=3), 1.3)),
    "scaled by block": (
        Wave(Tiles(64, 64, 128, num_warps=4, num_stages=4), 0.8, per_sm=3),
        Wave(Tiles(64, 128, 128, num_warps=8, num_stages=4), 1.0, per_sm=2),
    ),
}


def default_tiles(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, exchanging: int = 0, layout: str | None = None
) -> tuple[Tiles, int]:
    """Return the heuristic (tiles, split_k) for operands [rows, k] and [n, k].

    They give enough programs to read the weight at full speed. ``exchanging``: number of ranks that exchange partial
    tiles, 0 if the kernel exchanges none. ``layout``: the layout of fp8 operands, see ``scaling.layout_of``.
    """
    num_sms = gpu.num_sms(device)
    if device.type == "cpu":
        tiles = Tiles(_height(rows, 64), 64, 64, num_warps=1, num_stages=1)
    elif dtype == torch.float32:
        tiles = Tiles(_height(rows, 64), 64, 32, num_warps=4, num_stages=2)
    elif waves := _fp8_waves(rows, device, exchanging, layout):
        tiles = fastest_in_waves(waves, rows, n, num_sms)
    else:
        tiles = _sixteen_bit_tiles(rows, n, num_sms, device, exchanging)
    return tiles, default_split(tiles, rows, n, k, num_sms)


def default_split(tiles: Tiles, rows: int, n: int, k: int, num_sms: int) -> int:
    """Return the heuristic number of K splits for a tile and operands [rows, k] and [n, k]."""
    programs = max(tiles.count(rows, n), 1)
    return max(min(num_sms // (2 * programs), k // (_MIN_STEPS * tiles.block_k), _MAX_SPLIT), 1)


def compared_tiles(
    rows: int, dtype: torch.dtype, device: torch.device, exchanging: int = 0, layout: str | None = None
) -> list[Tiles]:
    """Return the tiles whose times of waves ``default_tiles`` compares. There are none if it selects a tile otherwise.

    Arguments are those of ``default_tiles``.
    """
    if device.type == "cpu" or dtype == torch.float32 or gpu.capability(device) < (9, 0):
        return []
    if waves := _fp8_waves(rows, device, exchanging, layout):
        return [wave.tiles for wave in waves]
    waves = _sixteen_bit_waves(exchanging) if _height(rows, 128) > 64 else ()
    return [_for_exchange(wave.tiles) if exchanging else wave.tiles for wave in waves]


def _height(rows, most):
    """Return block_m for a tile that covers all rows, at most ``most``."""
    return min(max(next_power_of_2(rows), 16), most)


def _sixteen_bit_tiles(rows, n, num_sms, device, exchanging):
    """Return tiles for 16-bit types, with as many stages as shared memory allows: loads in flight keep the memory busy.

    If there are tiles for all SMs even with twice the columns, tiles are twice as wide, which reads x half as often.
    """
    if torch.version.hip:  # gfx942 has 64 KiB for all stages
        return Tiles(_height(rows, 64), 64, 128, num_warps=4, num_stages=2)
    block_m = _height(rows, 128)
    if gpu.capability(device) < (9, 0):
        return Tiles(block_m, 64, 64, num_warps=4, num_stages=4 if block_m <= 64 else 3)
    if block_m > 64:
        tiles = fastest_in_waves(_sixteen_bit_waves(exchanging), rows, n, num_sms)
    else:
        wide = cdiv(n, 64) > num_sms
        tiles = Tiles(block_m, *((128, 128) if wide else (64, 128)), num_warps=4, num_stages=4 if wide else 6)
    return _for_exchange(tiles) if exchanging else tiles


def _sixteen_bit_waves(exchanging):
    """Return the tiles for 16-bit types and more than 64 rows on Hopper."""
    return [one for one in _WAVES if one.tiles != LARGE or exchanging <= _MOST_RANKS_OF_LARGE]


def _fp8_waves(rows, device, exchanging, layout):
    """Return the tiles for fp8 operands that were measured for this number of rows. There may be none."""
    measured, least = (_WAVES_OF_EXCHANGE_IN_FP8, 65) if exchanging else (_WAVES_IN_FP8, 33)
    return measured.get(layout, ()) if rows >= least and gpu.capability(device) == (9, 0) else ()


def _for_exchange(tiles):
    """Return a tile with enough registers for partials that are sent and added.

    8 warps take 0.74 to 1.02 of the time of 4 with these tiles, 0.91 on average (``gemm_rs`` in solo mode with 2, 4 and
    8 ranks on an H200, 239 cases).
    """
    return replace(tiles, num_warps=8) if tiles.block_m >= 64 and tiles.block_n >= 128 else tiles


def tiles_to_try(rows: int, dtype: torch.dtype, device: torch.device) -> list[Tiles]:
    """Return candidate tiles for this number of rows."""
    if device.type == "cpu" or dtype == torch.float32:
        return [default_tiles(rows, 64, 1, dtype, device)[0]]
    heights = sorted({_height(rows, 64), _height(rows, 64 if torch.version.hip else 128)})
    if torch.version.hip or gpu.capability(device) < (9, 0):
        shapes = [(64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 4, 2)]
    else:
        shapes = [(64, 128, 4, 6), (64, 128, 4, 4), (128, 64, 4, 6), (128, 128, 4, 4), (128, 128, 4, 3)]
        shapes += [(128, 64, 8, 6), (128, 128, 8, 4)] if rows > 32 else []
        shapes += [(256, 64, 8, 4)] if rows > 128 else []
    tiles = [
        Tiles(height, width, depth, num_warps=warps, num_stages=stages)
        for height in heights for width, depth, warps, stages in shapes
    ]
    return [tile for tile in tiles if tile.illegal(device, dtype) is None]


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles, scales: Scales | None = None
) -> "tuple[torch.Tensor, int, TensorDescriptor | None, TensorDescriptor | None, dict[str, Any]]":
    """Return ``gemm_operands.product`` for small M.

    With 16 rows or fewer, plain loads read the weight as fast as TMA (H200). Descriptors would then only cost host time
    and are not used.
    """
    return gemm_operands.product(x, weight, bias, tiles, by_tma=tiles.block_m > 16, scales=scales)


def k_of_part(k: int, tiles: Tiles, split_k: int) -> int:
    """Return the K of one split, in whole steps of block_k. For the last splits, less or nothing may be left."""
    steps = cdiv(k, tiles.block_k)
    return cdiv(steps, split_k) * tiles.block_k


def seconds(
    rows: int, n: int, k: int, dtype: torch.dtype, tiles: Tiles, split_k: int, hardware: "Hardware"
) -> float:
    """Estimate the seconds of a GEMM: the time to read the weight. With fewer programs than SMs it is read slower."""
    programs = tiles.count(rows, n) * split_k
    reading = (n * k + rows * k) * dtype.itemsize / hardware.memory / min(1.0, programs / hardware.num_sms)
    multiplying = 2.0 * max(rows, tiles.block_m) * n * k / hardware.flops
    parts = 2 * split_k * rows * n * 4 if split_k > 1 else 0
    return max(reading, multiplying) + parts / hardware.memory


def scratch_to_be_made(like: torch.Tensor, num_tiles: int, tiles: Tiles, split_k: int) -> torch.Tensor:
    """Return the output spec of the fp32 scratch memory for ``reduce_splits``; one element without split-K."""
    size = num_tiles * split_k * tiles.block_m * tiles.block_n if split_k > 1 else 1
    return output_spec(like, size, dtype=torch.float32)


@td.jit
def place_of(program, tiles_m, K, k_of_part, split_k, PRODUCT: tl.constexpr):
    """Return the tile coordinates of a program: (tile, K split, first row, first column, first k, last k).

    The ``split_k`` programs of a tile have consecutive numbers, and so do the tiles of a column.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    tile = program // split_k
    part = program % split_k
    row = tile % tiles_m * BLOCK_M
    col = tile // tiles_m * BLOCK_N
    first_k = part * (k_of_part // BLOCK_K * BLOCK_K)
    last_k = as_aligned(tl.minimum(first_k + k_of_part, K), PRODUCT.aligned)
    return tile, part, row, col, first_k, last_k


@td.jit
def _add_product(acc, w, x, k, K, x_scale, rows, w_scale, col, N, PRODUCT: tl.constexpr):
    """Return acc + w @ x: with block-wise scales, times the scales of the blocks at column k."""
    if PRODUCT.scaling == "block":
        scale_x, scale_w = block_scales(k, K, x_scale, rows, w_scale, col, N, PRODUCT)
        part = td.dot(w, x, tl.full(acc.shape, 0.0, tl.float32), PRODUCT.precision)
        if PRODUCT.block_n <= 128:
            return acc + part * (scale_w * scale_x)[None, :]
        else:
            return acc + part * scale_w[:, None] * scale_x[None, :]
    elif PRODUCT.scaling == "row":
        return td.dot(w, x, acc, PRODUCT.precision, PRODUCT.imprecise_k)
    else:
        return add_product(acc, w, x, PRODUCT.precision)


@td.jit
def small_m_tile(
    x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, first_k, last_k, PRODUCT: tl.constexpr,
    x_scale=None, scaled_rows=0, w_scale=None,
):
    """Return x[row : +BLOCK_M] @ w[col : +BLOCK_N].T over columns first_k to last_k - 1, fp32 [BLOCK_M, BLOCK_N].

    The pointer of x addresses [rows, K], its descriptor [planes, rows, K]. first_k is a multiple of BLOCK_K, and so is
    last_k unless it is K. Rows and columns outside of the operands are undefined. K is ``stride_x``. The scales are
    those of ``gemm_tile``.
    """
    acc = _transposed_tile(
        x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, first_k, last_k, PRODUCT,
        x_scale, scaled_rows, w_scale,
    ).T
    if PRODUCT.scaling == "row":
        acc = scaled_by_rows(acc, x_scale, scaled_rows, w_scale, col, N, PRODUCT)
    return acc


@td.jit
def small_m_tree(
    x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, K, PRODUCT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return ``small_m_tile`` over all of K as the root of the rank's reduction tree, see ``gemm_tile``."""
    tl.static_assert(PRODUCT.scaling == "")
    leaf_k = columns_of_leaf(K, PRODUCT)
    return _transposed_tree(
        x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, 0, leaf_k, PRODUCT, PRODUCT.leaves,
        DTYPE,
    ).T


@td.jit
def _transposed_tree(
    x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, first_k, leaf_k, PRODUCT: tl.constexpr,
    LEAVES: tl.constexpr, DTYPE: tl.constexpr,
):
    """Return the sum of LEAVES leaves of ``leaf_k`` columns, from column ``first_k`` on, fp32 [BLOCK_N, BLOCK_M]."""
    if LEAVES > 1:
        HALF: tl.constexpr = LEAVES // 2
        left = pack_node(_transposed_tree(
            x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, first_k, leaf_k, PRODUCT, HALF,
            DTYPE,
        ), DTYPE)
        right = _transposed_tree(
            x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, first_k + HALF * leaf_k, leaf_k,
            PRODUCT, HALF, DTYPE,
        )
        return add_nodes(left, right, DTYPE)
    else:
        return _transposed_tile(
            x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, first_k, first_k + leaf_k,
            PRODUCT, None, 0, None,
        )


@td.jit
def _transposed_tile(
    x_ptr, x_desc, plane, row, rows, stride_x, w_ptr, w_desc, col, stride_w, N, first_k, last_k, PRODUCT: tl.constexpr,
    x_scale, scaled_rows, w_scale,
):
    """Return ``small_m_tile`` without the scales of rows, transposed."""
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    if PRODUCT.use_tma:
        for k in range(first_k, last_k, BLOCK_K):
            x = x_desc.load([plane, row, k]).reshape(BLOCK_M, BLOCK_K)
            if PRODUCT.w_is_kn:
                w = w_desc.load([k, col]).T
            else:
                w = w_desc.load([col, k])
            acc = _add_product(acc, w, x.T, k, stride_x, x_scale, scaled_rows, w_scale, col, N, PRODUCT)
    else:
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_n = col + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        first = tl.cast(first_k, tl.int64)
        x_ptrs = x_ptr + offs_m[None, :].to(tl.int64) * stride_x + (first + offs_k[:, None])
        if PRODUCT.w_is_kn:
            step_w = tl.cast(stride_w, tl.int64) * BLOCK_K
            w_ptrs = w_ptr + offs_n[:, None] + (first + offs_k[None, :]) * stride_w
        else:
            step_w = tl.full((), BLOCK_K, tl.int64)
            w_ptrs = w_ptr + offs_n[:, None].to(tl.int64) * stride_w + (first + offs_k[None, :])
        mask_m = offs_m[None, :] < rows
        mask_n = offs_n[:, None] < N
        for k in range(first_k, last_k, BLOCK_K):
            x = tl.load(x_ptrs, mask=mask_m & (offs_k[:, None] < last_k - k), other=0.0)
            w = tl.load(w_ptrs, mask=mask_n & (offs_k[None, :] < last_k - k), other=0.0)
            acc = _add_product(acc, w, x, k, stride_x, x_scale, scaled_rows, w_scale, col, N, PRODUCT)
            x_ptrs += BLOCK_K
            w_ptrs += step_w
    return acc


@td.jit
def reduce_splits(ctx, acc, scratch_ptr, tile, part, split_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Split-K reduction: return (sum of ``acc`` over the splits in order, whether this program arrived last).

    The sum is only valid in the program that arrived last.
    """
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    own_ptr = scratch_ptr + (tile.to(tl.int64) * split_k + part) * TILE
    tl.store(own_ptr + offs, acc)
    is_last = td.is_last_arriver(td.flag_at(ctx, tile), split_k)
    if is_last:
        first_ptr = scratch_ptr + tile.to(tl.int64) * split_k * TILE
        acc = tl.load(first_ptr + offs)
        for other in range(1, split_k):
            acc += tl.load(first_ptr + other * TILE + offs)
    return acc, is_last
