"""Add the partials of a tile, in a partition of WARPS warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.memory import pointer_to
from tdkernels.ops.common.specialized.layout import BLOCK_M, BLOCK_N


@gluon.jit
def rows_and_columns(ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return the indices of ROWS rows and of the columns of a tile."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    return rows, gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))


@gluon.jit
def store_rows(z_ptr, values, rows, columns, M, N):
    """Store rows of a tile in z [M, N]."""
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    gl.store(z_ptr + rows[:, None].to(gl.int64) * N + columns[None, :], values, mask=mask)


@gluon.jit
def _add_rows(
    partials, source_bytes, sums, z_ptr, bias_ptr, row, col, M, N, ROWS: gl.constexpr, RANKS: gl.constexpr,
    HAS_BIAS: gl.constexpr, WARPS: gl.constexpr,
):
    """``add_part`` for ROWS rows of a tile. ``partials`` and ``sums`` are the addresses of these rows."""
    dtype: gl.constexpr = z_ptr.dtype.element_ty
    rows, columns = rows_and_columns(ROWS, WARPS)
    offsets = rows[:, None] * BLOCK_N + columns[None, :]
    layout: gl.constexpr = offsets.type.layout
    total = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
    for source in gl.static_range(RANKS):
        partial = pointer_to(partials + source * source_bytes, dtype) + offsets
        total += gl.load(partial, eviction_policy="evict_first").to(gl.float32)
    if HAS_BIAS:
        total += gl.load(bias_ptr + col + columns, mask=col + columns < N, other=0.0).to(gl.float32)[None, :]
    z = total.to(dtype)
    for number in gl.static_range(len(sums)):
        gl.store(pointer_to(sums[number], dtype) + offsets, z)
    store_rows(z_ptr, z, row + rows, col + columns, M, N)


@gluon.jit
def add_part(
    partials, source_bytes, sums, z_ptr, bias_ptr, place, part, M, N, ROWS: gl.constexpr, SPLIT: gl.constexpr,
    RANKS: gl.constexpr, HAS_BIAS: gl.constexpr, WARPS: gl.constexpr,
):
    """Add the partials of all ranks, in rank order, for one of SPLIT row blocks of a tile. Store the sums in z [M, N].

    partials, source_bytes: address of the partial of rank 0, and bytes from there to that of the next rank
    sums: addresses of further tiles in which the sums are stored
    place: first row and first column of the tile in z
    ROWS: rows that two warps add at a time
    """
    row, col = place
    row_bytes: gl.constexpr = BLOCK_N * (z_ptr.dtype.element_ty.primitive_bitwidth // 8)
    part_rows: gl.constexpr = BLOCK_M // SPLIT
    added_rows: gl.constexpr = min(ROWS * WARPS // 2, part_rows)
    for first in range(part * part_rows, (part + 1) * part_rows, added_rows):
        these = ()
        for number in gl.static_range(len(sums)):
            these = these + (sums[number] + first * row_bytes,)  # type: ignore[assignment]
        _add_rows(
            partials + first * row_bytes, source_bytes, these, z_ptr, bias_ptr, row + first, col, M, N, added_rows,
            RANKS, HAS_BIAS, WARPS,
        )
