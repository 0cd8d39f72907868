"""Add the rows of each token, and the sums of all ranks, in partitions of two or four warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import data_at, signal_at
from tdkernels.lang.gluon_signals import item_of_warps, notify_by_warps, request_by_warps, wait_for_ranks
from tdkernels.lang.memory import pointer_to
from tdkernels.lang.signals import wait
from tdkernels.ops.common.specialized.layout import BLOCK_N
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_TOKENS
from tdkernels.ops.experts.tp_moe.kernel_gemm_rs import ALIGN
from tdkernels.ops.experts.tp_moe.kernel_route import chunk_at_turn

_TOKENS = gl.constexpr(BLOCK_TOKENS)  # per signal
_GROUPS = gl.constexpr(4)  # signals per work item for a peer: one barrier before all of them, instead of one for each


@gluon.jit
def _sum_of_choices(tensors, tokens, there, columns, inside, N, CHOICES: gl.constexpr, layout: gl.constexpr):
    """Return the weighted sum of each token's rows in fp32. Assignments without a row add nothing."""
    out_ptr, _, rows_ptr, weights_ptr = tensors
    total = gl.zeros((tokens.shape[0], columns.shape[0]), gl.float32, layout)
    for j in gl.static_range(CHOICES):
        choice = tokens.to(gl.int64) * CHOICES + j
        row = gl.load(rows_ptr + choice, mask=there, other=-1)
        at = out_ptr + row[:, None].to(gl.int64) * N + columns[None, :]
        part = gl.load(at, mask=(row >= 0)[:, None] & inside[None, :], other=0.0).to(gl.float32)
        if weights_ptr is not None:
            part *= gl.load(weights_ptr + choice, mask=row >= 0, other=0.0)[:, None]
        total += part
    return total


@gluon.jit
def _sum_of_ranks(
    parts, part_bytes, offs, mask, own, me, dtype: gl.constexpr, RANKS: gl.constexpr, layout: gl.constexpr
):
    """Return the sum over all ranks in fp32, in rank order.

    parts, part_bytes: address of the sums of rank 0, and distance to those of the next rank
    own: the sums of this rank in fp32
    """
    total = gl.zeros(own.shape, gl.float32, layout)
    for source in gl.static_range(RANKS):
        part = gl.load(pointer_to(parts + source * part_bytes, dtype) + offs, mask=mask & (me != source), other=0.0)
        total += gl.where(me == source, own, part.to(gl.float32))
    return total


@gluon.jit
def _block_of(token, column, M_shard, N, COLUMNS: gl.constexpr, AT_ONCE: gl.constexpr, layout: gl.constexpr):
    """Return (tokens, mask of tokens, columns, mask of columns, offsets in [M_shard, N], mask of offsets)."""
    tokens = token + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    there, inside = tokens < M_shard, columns < N
    offs = tokens[:, None].to(gl.int64) * N + columns[None, :]
    return tokens, there, columns, inside, offs, there[:, None] & inside[None, :]


@gluon.jit
def _add_for_peer(
    ctx, tensors, half, owner, token, column, M_shard, N, shard_bytes, me, COLUMNS: gl.constexpr,
    CHOICES: gl.constexpr, WARPS: gl.constexpr, AT_ONCE: gl.constexpr,
):
    """Sum the rows of _TOKENS tokens of rank ``owner``, from ``token`` on, and store COLUMNS columns at that rank."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = tensors[1].dtype.element_ty
    to = pointer_to(data_at(ctx, half, owner) + me * shard_bytes, dtype)
    for first in range(0, _TOKENS, AT_ONCE):
        tokens, there, columns, inside, offs, mask = _block_of(
            token + first, column, M_shard, N, COLUMNS, AT_ONCE, layout
        )
        total = _sum_of_choices(tensors, owner * M_shard + tokens, there, columns, inside, N, CHOICES, layout)
        gl.store(to + offs, total.to(dtype), mask=mask)


@gluon.jit
def _add_own(
    ctx, tensors, half, token, column, M_shard, N, shard_bytes, me, COLUMNS: gl.constexpr, CHOICES: gl.constexpr,
    RANKS: gl.constexpr, ROUND_OWN: gl.constexpr, WARPS: gl.constexpr, AT_ONCE: gl.constexpr,
):
    """Store COLUMNS columns of z for _TOKENS tokens of this rank, from ``token`` on: its own sums plus the peers'."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    z_ptr = tensors[1]
    dtype: gl.constexpr = z_ptr.dtype.element_ty
    parts = data_at(ctx, half, me)
    for first in range(0, _TOKENS, AT_ONCE):
        tokens, there, columns, inside, offs, mask = _block_of(
            token + first, column, M_shard, N, COLUMNS, AT_ONCE, layout
        )
        total = _sum_of_choices(tensors, me * M_shard + tokens, there, columns, inside, N, CHOICES, layout)
        if ROUND_OWN:
            total = total.to(dtype).to(gl.float32)
        total = _sum_of_ranks(parts, shard_bytes, offs, mask, total, me, dtype, RANKS, layout)
        gl.store(z_ptr + offs, total.to(dtype), mask=mask)


@gluon.jit
def _await_tiles(ctx, slice_id, complete, slices, tiles_n, done_ptr, me):
    """Wait until the tiles of slices 0 to ``slice_id`` are stored. Return the number of complete slices.

    complete: number of slices for which this partition has waited
    """
    rows, columns = slices
    while complete <= slice_id:
        expected = rows * gl.minimum(columns, tiles_n - complete * columns)
        wait(ctx, done_ptr + complete, expected, me, SCOPE="gpu")  # producer: store_partition of this rank
        complete += 1
    return complete


@gluon.jit
def _place_of_item(item, sizes):
    """Return (slice, whether the tokens are this rank's, index among the slice's items of that kind) of a work item.

    sizes: (number of slices, work items of a slice for the peers' tokens, for this rank's tokens)

    This rank's tokens of a slice come after the peers' tokens of the next one, so that the sums of the peers arrive
    meanwhile.
    """
    num_slices, of_peers, of_own = sizes
    rest = gl.maximum(item - of_peers, 0)
    group, within = rest // (of_own + of_peers), rest % (of_own + of_peers)
    is_last = group == num_slices - 1
    is_own = (item >= of_peers) & (is_last | (within >= of_peers))
    number = within - gl.where(is_own & (is_last == 0), of_peers, 0)
    first = item < of_peers
    return gl.where(is_own, group, gl.where(first, 0, group + 1)), is_own, gl.where(first, item, number)


@gluon.jit
def add_partition(
    sums, COLUMNS: gl.constexpr, CHOICES: gl.constexpr, RANKS: gl.constexpr, ROUND_OWN: gl.constexpr,
    WARPS: gl.constexpr, AT_ONCE: gl.constexpr,
):
    """Add the rows of tokens, together with other partitions, slice by slice.

    sums: (ctx, tensors, slices, ``done_ptr``, tokens of a rank, N, tokens of a chunk, half, signal, rank)
    tensors: pointers to the rows [R, N], to z, to the row of each assignment and to their weights or None
    slices: as for ``load_partition``
    AT_ONCE: tokens that are added at a time: as many as fit in the registers
    """
    ctx, tensors, slices, done_ptr, M_shard, N, chunk_rows, half, signal, me = sums
    num_chunks, groups = (M_shard + chunk_rows - 1) // chunk_rows, chunk_rows // _TOKENS
    blocks, tiles_n = (N + COLUMNS - 1) // COLUMNS, (N + BLOCK_N - 1) // BLOCK_N
    of_slice = slices[1] * BLOCK_N // COLUMNS  # blocks of a slice; the last one may have fewer
    of_shard = num_chunks * groups * blocks  # signals
    shard_bytes = M_shard.to(gl.int64) * N * (tensors[1].dtype.element_ty.primitive_bitwidth // 8)
    shard_bytes = (shard_bytes + ALIGN - 1) // ALIGN * ALIGN
    wide_groups = (groups + _GROUPS - 1) // _GROUPS
    of_peers, of_own = (RANKS - 1) * num_chunks * wide_groups * of_slice, num_chunks * groups * of_slice
    sizes = (tiles_n + slices[1] - 1) // slices[1], of_peers, of_own
    num_items = gl.where(signal == 0, 0, sizes[0] * (of_peers + of_own))
    complete = 0
    item = item_of_warps(request_by_warps(ctx, 1, WARPS))
    while item < num_items:
        answer = request_by_warps(ctx, 1, WARPS)
        slice_id, is_own, number = _place_of_item(item, sizes)
        block = slice_id * of_slice + number % of_slice
        rest, each = number // of_slice, gl.where(is_own, groups, wide_groups)
        group, count = rest % each * gl.where(is_own, 1, _GROUPS), gl.where(is_own, 1, _GROUPS)
        count = gl.where(block < blocks, gl.minimum(count, groups - group), 0)
        owner, chunk = chunk_at_turn(rest // each + gl.where(is_own, 0, num_chunks), me, RANKS, num_chunks)
        complete = _await_tiles(ctx, slice_id, complete, slices, tiles_n, done_ptr, me)
        first = (chunk * groups + group) * blocks + block  # signal
        token, column = chunk * chunk_rows + group * _TOKENS, block * COLUMNS
        if is_own == 0:
            for other in range(count):
                _add_for_peer(
                    ctx, tensors, half, owner, token + other * _TOKENS, column, M_shard, N, shard_bytes, me, COLUMNS,
                    CHOICES, WARPS, AT_ONCE,
                )
            # waiter: the owner's work items for the same tokens and columns
            to = signal_at(ctx, half, me * of_shard + first)
            notify_by_warps(ctx, to, blocks, count, owner, signal, WARPS)
        elif count > 0:
            if RANKS > 1:  # producer: the work items of the peers for the same tokens and columns
                wait_for_ranks(ctx, signal_at(ctx, half, first), of_shard, signal, WARPS, False)
            _add_own(
                ctx, tensors, half, token, column, M_shard, N, shard_bytes, me, COLUMNS, CHOICES, RANKS, ROUND_OWN,
                WARPS, AT_ONCE // 2 if RANKS > 4 else AT_ONCE,
            )
        item = item_of_warps(answer)
