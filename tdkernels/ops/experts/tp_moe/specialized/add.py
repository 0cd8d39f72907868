"""Work items that add the rows of each token, and the sums of all ranks, in partitions of two or four warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import data_at, signal_at
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import item_of_warps, notify_by_warps, request_by_warps, wait_for_ranks
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.lang.signals import wait
from tdkernels.ops.common.specialized.layout import BLOCK_N
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_TOKENS
from tdkernels.ops.experts.tp_moe.kernel_gemm_rs import ALIGN
from tdkernels.ops.experts.tp_moe.kernel_route import chunk_at_turn
from tdkernels.ops.experts.tp_moe.specialized.slices import columns_of_slice, first_column, slice_of_column
from tdkernels.ops.experts.tp_moe.specialized.sums import add_for_peer, add_own, passes_in_flight, tokens_of_pass

_TOKENS = gl.constexpr(BLOCK_TOKENS)  # per signal
# A large work item for a peer has the tokens of several signals, so that there are fewer releases. A small one has the
# tokens of one signal, and for this rank's tokens a part of them.
_SIGNALS, PARTS = gl.constexpr(4), gl.constexpr(4)
_LAST = gl.constexpr(0x7FFFFFFF)  # more than all work items


@gluon.jit
def _await_tiles(ctx, slice_id, complete, slices, tiles_n, done_ptr, me):
    """Wait until the tiles of slices 0 to ``slice_id`` are stored. Return the number of complete slices.

    complete: number of slices for which this partition has waited
    """
    while complete <= slice_id:
        expected = slices[0] * columns_of_slice(slices, complete, tiles_n)
        wait(ctx, done_ptr + complete, expected, me, SCOPE="gpu")  # producer: store_partition of this rank
        complete += 1
    return complete


@gluon.jit
def _size_of_items(slice_id, large_slices):
    """Return (signals of a work item of a slice for a peer, work items for this rank's tokens of a signal)."""
    return gl.where(slice_id < large_slices, _SIGNALS, 1), gl.where(slice_id < large_slices, 1, PARTS)


@gluon.jit
def _first_block(slices, slice_id, blocks, COLUMNS: gl.constexpr):
    """Return the first block of columns of a slice. If there is no such slice, it is ``blocks``."""
    return gl.minimum(first_column(slices, slice_id) * BLOCK_N // COLUMNS, blocks)


@gluon.jit
def _items_of_turn(turn, queue, COLUMNS: gl.constexpr, RANKS: gl.constexpr):
    """Return the numbers of work items of a turn: for the tokens of the peers, for those of this rank.

    A turn has the peers' tokens of the slice with its number, and then this rank's tokens of the slice ``own_delay``
    before.

    queue: (slices, the last slice, ``large_slices`` and ``own_delay`` of the kernel, those of ``_sizes_of_shard``)
    """
    slices, _, large_slices, own_delay, sizes = queue
    num_chunks, groups, blocks = sizes[0], sizes[1], sizes[2]
    own = turn - own_delay
    signals, parts = _size_of_items(turn, large_slices)[0], _size_of_items(own, large_slices)[1]
    of_peers = _first_block(slices, turn + 1, blocks, COLUMNS) - _first_block(slices, turn, blocks, COLUMNS)
    of_own = _first_block(slices, own + 1, blocks, COLUMNS) - _first_block(slices, own, blocks, COLUMNS)
    of_peers *= (RANKS - 1) * num_chunks * ((groups + signals - 1) // signals)
    return of_peers, of_own * num_chunks * groups * parts


@gluon.jit
def _turn_of_item(item, queue, COLUMNS: gl.constexpr, RANKS: gl.constexpr):
    """Return (turn of a work item, number of work items before that turn).

    An item past the last one has the turn after the last, and the number of all work items.
    """
    _, last, _, own_delay, _ = queue
    turn, first, end = 0, 0, 0
    for i in range(last + 1 + own_delay):
        of_peers, of_own = _items_of_turn(i, queue, COLUMNS, RANKS)
        end += of_peers + of_own
        turn += gl.where(item >= end, 1, 0)
        first = gl.where(item >= end, end, first)
    return turn, first


@gluon.jit
def _place_of_item(item, queue, COLUMNS: gl.constexpr, RANKS: gl.constexpr):
    """Return (slice, whether the tokens are this rank's, index among the slice's items of that kind) of a work item."""
    _, _, _, own_delay, _ = queue
    turn, first = _turn_of_item(item, queue, COLUMNS, RANKS)
    of_peers, _ = _items_of_turn(turn, queue, COLUMNS, RANKS)
    is_own = item >= first + of_peers
    return turn - gl.where(is_own, own_delay, 0), is_own, item - first - gl.where(is_own, of_peers, 0)


@gluon.jit
def _sizes_of_shard(sums, COLUMNS: gl.constexpr):
    """Return (chunks, signals of a chunk, blocks of columns, signals, bytes of the sums) of a rank's tokens."""
    _, tensors, _, _, M_shard, N, chunk_rows, _, _, _, _ = sums
    num_chunks, groups = (M_shard + chunk_rows - 1) // chunk_rows, chunk_rows // _TOKENS
    blocks = (N + COLUMNS - 1) // COLUMNS
    shard_bytes = M_shard.to(gl.int64) * N * (tensors[1].dtype.element_ty.primitive_bitwidth // 8)
    return num_chunks, groups, blocks, num_chunks * groups * blocks, (shard_bytes + ALIGN - 1) // ALIGN * ALIGN


@gluon.jit
def _run_item_for_peer(
    sums, sizes, number, block, signals, trace, COLUMNS: gl.constexpr, CHOICES: gl.constexpr, RANKS: gl.constexpr,
    WARPS: gl.constexpr, PROMOTE: gl.constexpr,
):
    """Run a work item for a peer's tokens: send their sums, then its signals. Return the next item.

    sizes: those of ``_sizes_of_shard``
    number: index of the tokens among those of the peers, in units of ``signals`` signals
    block: block of columns
    """
    ctx, tensors, _, _, M_shard, N, chunk_rows, _, half, signal, me = sums
    num_chunks, groups, blocks, of_shard, shard_bytes = sizes
    each = (groups + signals - 1) // signals
    group = number % each * signals
    count = gl.minimum(signals, groups - group)
    owner, chunk = chunk_at_turn(num_chunks + number // each, me, RANKS, num_chunks)
    token = chunk * chunk_rows + group * _TOKENS
    mark_by_warps(trace, "joins", WARPS, owner)
    add_for_peer(
        tensors, data_at(ctx, half, owner) + me * shard_bytes, owner, token,
        gl.minimum(token + count * _TOKENS, M_shard), block * COLUMNS, M_shard, N, COLUMNS, CHOICES, WARPS,
        tokens_of_pass(CHOICES, WARPS, PROMOTE, COLUMNS), passes_in_flight(CHOICES, PROMOTE),
    )
    # Not earlier: other warps may have time for the next item while these add.
    answer = request_by_warps(ctx, 1, WARPS)
    first = (chunk * groups + group) * blocks + block  # signal
    mark_by_warps(trace, "pushes", WARPS, owner)
    # waiter: the owner's work items for the same tokens and columns
    notify_by_warps(ctx, signal_at(ctx, half, me * of_shard + first), blocks, count, owner, signal, WARPS)
    return item_of_warps(answer)


@gluon.jit
def _run_own_item(
    sums, sizes, number, block, parts, trace, COLUMNS: gl.constexpr, CHOICES: gl.constexpr, RANKS: gl.constexpr,
    ROUND_OWN: gl.constexpr, WARPS: gl.constexpr, PROMOTE: gl.constexpr,
):
    """Run a work item for this rank's tokens: wait for the peers, then add. Return the next item.

    sizes: those of ``_sizes_of_shard``
    number: index of the tokens, in units of 1 / ``parts`` of a signal's tokens
    block: block of columns
    """
    ctx, tensors, _, _, M_shard, N, chunk_rows, _, half, signal, me = sums
    _, groups, blocks, of_shard, shard_bytes = sizes
    group = number // parts  # of all chunks
    token = group // groups * chunk_rows + (group % groups * parts + number % parts) * (_TOKENS // parts)
    first = group * blocks + block  # signal
    if RANKS > 1:  # producer: the work items of the peers for the same tokens and columns
        wait_for_ranks(ctx, signal_at(ctx, half, first), of_shard, signal, WARPS, False)
    mark_by_warps(trace, "sums", WARPS)
    add_own(
        tensors, data_at(ctx, half, me), shard_bytes, token, gl.minimum(token + _TOKENS // parts, M_shard),
        block * COLUMNS, M_shard, N, me, COLUMNS, CHOICES, RANKS, ROUND_OWN, WARPS, PROMOTE,
    )
    return item_of_warps(request_by_warps(ctx, 1, WARPS))


@gluon.jit
def add_partition(
    sums, trace_ptr, COLUMNS: gl.constexpr, CHOICES: gl.constexpr, RANKS: gl.constexpr, ROUND_OWN: gl.constexpr,
    WARPS: gl.constexpr, PROMOTE: gl.constexpr,
):
    """Add the rows of tokens, together with other partitions, slice by slice.

    sums: (ctx, tensors, slices, ``done_ptr``, tokens of a rank, N, tokens of a chunk, (``large_slices``, ``own_delay``)
        of the kernel, half, signal, rank)
    tensors: pointers to the rows [R, N], to z, to the row of each assignment and to their weights or None
    PROMOTE: whether threads have few registers

    Work items of the last slices are small, because the warps that have multiplied share them, too.
    """
    ctx, _, slices, done_ptr, _, N, _, order, _, signal, me = sums
    large_slices, own_delay = order
    sizes = _sizes_of_shard(sums, COLUMNS)
    blocks, tiles_n = sizes[2], (N + BLOCK_N - 1) // BLOCK_N
    queue = slices, slice_of_column(slices, tiles_n - 1), large_slices, own_delay, sizes
    num_items = gl.where(signal == 0, 0, _turn_of_item(_LAST, queue, COLUMNS, RANKS)[1])
    complete = 0
    item = item_of_warps(request_by_warps(ctx, 1, WARPS))
    while item < num_items:
        slice_id, is_own, number = _place_of_item(item, queue, COLUMNS, RANKS)
        first_block = _first_block(slices, slice_id, blocks, COLUMNS)
        of_slice = _first_block(slices, slice_id + 1, blocks, COLUMNS) - first_block
        block, rest = first_block + number % of_slice, number // of_slice
        signals, parts = _size_of_items(slice_id, large_slices)
        trace = trace_ptr, slices[0] * tiles_n + item  # after the tiles
        mark_by_warps(trace, "starts", WARPS)
        if trace_ptr is not None:  # later also for the peers, if the tokens are this rank's
            mark_by_warps(trace, "waits", WARPS, gl.where(is_own, ALL_PEERS, me))
        complete = _await_tiles(ctx, slice_id, complete, slices, tiles_n, done_ptr, me)
        if is_own == 0:
            item = _run_item_for_peer(
                sums, sizes, rest, block, signals, trace, COLUMNS, CHOICES, RANKS, WARPS, PROMOTE
            )
        else:
            item = _run_own_item(
                sums, sizes, rest, block, parts, trace, COLUMNS, CHOICES, RANKS, ROUND_OWN, WARPS, PROMOTE
            )
        mark_by_warps(trace, "ends", WARPS)
