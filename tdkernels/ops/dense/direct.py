"""Device functions of transport "direct": each partial tile is stored at its owner when it is computed.

A program that multiplies computes work items (``piece``). Item number ``piece`` belongs to bundle ``piece // W``, and
its owner is rank + 1 + ``piece % W``: one tile for each rank, this rank's last. Signal number
``source * per_source + bundle`` and slot number ``source * per_source + bundle`` of an owner belong to the partial of
``source``; ``per_source`` is the number of signals of a source.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import gemm_tile, scale_of_row, with_bias
from tdkernels.ops.common.rank_reduce import reduce_in_tree


@td.jit
def _descriptor_of(step, descs, RANKS: tl.constexpr):
    """Return descriptor number ``step``. The compiler turns the branches into selections of an address."""
    found = descs[0]
    for other in tl.static_range(1, RANKS):
        if step == other:
            found = descs[other]
    return found


@td.jit
def _announce(ctx, piece, per_source, half, signal, me, RANKS: tl.constexpr, BY_ENGINE: tl.constexpr):
    """Wait until the tile of work item ``piece`` is in its owner's memory, and set its signal there."""
    if BY_ENGINE:
        td.await_tma_stores()
    # waiter: the owner's program that adds the partials of this tile
    word = td.signal_at(ctx, half, me * per_source + piece // RANKS)
    td.notify(ctx, word, (me + 1 + piece % RANKS) % RANKS, signal)


@td.jit
def _send_partial(
    ctx, partial, piece, first, num_gemm, per_source, half, signal, me, descs, RANKS: tl.constexpr,
    BY_ENGINE: tl.constexpr,
):
    """Store the partial tile of a work item at its owner, row by row.

    With BY_ENGINE the TMA engine sends it while the program computes its next tile, so the signal of the program's tile
    before is set. ``first`` is the first item of the program. ``descs`` are the descriptors of the data of rank + 1,
    rank + 2, ..., [halves, rows, BLOCK_N]; number W is this rank's.
    """
    BLOCK_M: tl.constexpr = partial.shape[0]
    BLOCK_N: tl.constexpr = partial.shape[1]
    DTYPE: tl.constexpr = partial.dtype
    slot = me * per_source + piece // RANKS
    if BY_ENGINE:
        # A branch around the announcement would prevent flattening. Signal 0 sets nothing.
        value = tl.where(piece == first, 0, signal)
        _announce(ctx, tl.maximum(piece - num_gemm, 0), per_source, half, value, me, RANKS, True)
        desc = _descriptor_of(piece % RANKS, descs, RANKS)
        desc.store([half, slot * BLOCK_M, 0], partial.reshape(1, BLOCK_M, BLOCK_N))
    else:
        TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * (DTYPE.primitive_bitwidth // 8)
        dst = td.data_at(ctx, half, (me + 1 + piece % RANKS) % RANKS) + slot.to(tl.int64) * TILE_BYTES
        offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(td.pointer_to(dst, DTYPE) + offs, partial)
        _announce(ctx, piece, per_source, half, signal, me, RANKS, False)


@td.jit
def multiply_and_send(
    ctx, x_ptr, x_desc, row, rows, w_ptr, w_desc, col, stride_w, N, K, x_scale, w_scale,
    piece, first, num_gemm, per_source, half, signal, me, descs,
    DTYPE: tl.constexpr, RANKS: tl.constexpr, BY_ENGINE: tl.constexpr, PRODUCT: tl.constexpr, trace,
):
    """Process a work item: compute the partial tile at (row, col) of x [rows, K] @ w.T, and send it to its owner.

    ``x_scale`` and ``w_scale`` are the scales of x and w, or None. The other arguments are those of ``_send_partial``.
    """
    owner = (me + 1 + piece % RANKS) % RANKS
    td.mark(trace, "multiplies", owner)
    acc = gemm_tile(
        tl.full((PRODUCT.block_m, PRODUCT.block_n), 0.0, tl.float32), x_ptr, x_desc, 0, row, rows,
        w_ptr, w_desc, col, stride_w, N, K, K, PRODUCT, scale_of_row(x_scale, row, K, PRODUCT), rows - row, w_scale,
        DTYPE,
    )
    partial = td.from_float32(acc, DTYPE)
    if owner == me:
        td.mark(trace, "stores")
    else:
        td.mark(trace, "pushes", owner)
    _send_partial(ctx, partial, piece, first, num_gemm, per_source, half, signal, me, descs, RANKS, BY_ENGINE)


@td.jit
def announce_last(
    ctx, first, last, num_gemm, per_source, half, signal, me, RANKS: tl.constexpr, BY_ENGINE: tl.constexpr,
):
    """Set the signal of a program's last tile; its items are ``first``, ``first + num_gemm``, ... below ``last``."""
    if BY_ENGINE:
        if first < last:
            final = first + (last - 1 - first) // num_gemm * num_gemm
            _announce(ctx, final, per_source, half, signal, me, RANKS, True)


@td.jit
def add_partials(
    ctx, parts, part_bytes, half, sums_offset, z_ptr, bias_ptr, row, col, first, end, M, N,
    SLICE: tl.constexpr, BLOCK_N: tl.constexpr, RANKS: tl.constexpr, HAS_BIAS: tl.constexpr, TREE: tl.constexpr,
):
    """Add the partials of all ranks for the elements ``first`` to ``end`` of a tile, and store them in z.

    They are added in rank order, or by ``reduce_in_tree`` if TREE. The partial of rank r is at the address
    ``parts + r * part_bytes``. SLICE elements are added at a time; the loads of the next slices are in flight
    meanwhile. If ``sums_offset`` is not None, the sums are also stored in every peer's buffer: the tile begins there at
    this offset in the data of a half.
    """
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    ROWS: tl.constexpr = SLICE // BLOCK_N
    me = td.rank(ctx)
    offs_n = col + tl.arange(0, BLOCK_N)
    for start in tl.range(first, end, SLICE, num_stages=4):
        total = tl.full((SLICE,), 0.0, tl.float32)
        if TREE:
            offs = start + tl.arange(0, SLICE)
            total = reduce_in_tree(parts, part_bytes, offs, offs >= 0, total, -1, 0, RANKS, DTYPE)
        else:
            for source in tl.static_range(0, RANKS):
                pointer = td.pointer_to(parts + source * part_bytes, DTYPE) + start
                total += td.to_float32(tl.load(pointer + tl.arange(0, SLICE)))
        z = td.from_float32(with_bias(total.reshape(ROWS, BLOCK_N), bias_ptr, offs_n, N, HAS_BIAS), DTYPE)
        if sums_offset is not None:
            for step in tl.static_range(1, RANKS):
                peer_sums = td.data_at(ctx, half, (me + step) % RANKS) + sums_offset
                tl.store(td.pointer_to(peer_sums, DTYPE) + start + tl.arange(0, SLICE), z.reshape(SLICE))
        offs_m = row + start // BLOCK_N + tl.arange(0, ROWS)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        tl.store(z_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :], z, mask=mask)
