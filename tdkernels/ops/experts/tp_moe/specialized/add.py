"""Add the rows of each token, and the sums of all ranks, in partitions of two or four warps.

Columns are loaded, kept and stored in pairs, as int32, and separated in assembly when they are added. Triton 3.8
separates tensors of 16-bit numbers where they are loaded. Rows that wait for their addition would then take twice as
many registers, more than there are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import data_at, signal_at
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import item_of_warps, notify_by_warps, request_by_warps, wait_for_ranks
from tdkernels.lang.memory import pointer_to
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.lang.signals import wait
from tdkernels.ops.common.specialized.layout import BLOCK_N
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_TOKENS
from tdkernels.ops.experts.tp_moe.kernel_gemm_rs import ALIGN
from tdkernels.ops.experts.tp_moe.kernel_route import chunk_at_turn

_TOKENS = gl.constexpr(BLOCK_TOKENS)  # per signal
# A large work item for a peer has the tokens of several signals, so that there are fewer releases. A small one has the
# tokens of one signal, and for this rank's tokens a part of them.
_SIGNALS, PARTS = gl.constexpr(4), gl.constexpr(4)
# One row of 512 columns takes 8 registers of each thread of a warp.
_ROWS_IN_FLIGHT, _MOST_PASSES = 8, 4


@gluon.constexpr_function
def _passes_in_flight(rows, few_registers):
    """Return the number of passes whose rows a warp loads at the same time, if a token has ``rows`` rows."""
    return min(max(_ROWS_IN_FLIGHT // (2 if few_registers else 1) // rows, 1), _MOST_PASSES)


@gluon.constexpr_function
def _tokens_of_pass(rows, warps, few_registers):
    """Return the number of tokens that warps add in a pass, if each has ``rows`` rows: as many as fit in registers."""
    return warps // 2 if few_registers or rows > 10 else warps


@gluon.constexpr_function
def _layout(tokens, warps):
    """Return the layout of a block of pairs of columns of several tokens."""
    return gl.BlockedLayout([1, 4], [1, 32], [tokens, warps // tokens], [1, 0])


@gluon.jit
def _rows_of(tensors, owner, tokens, end, M_shard, CHOICES: gl.constexpr):
    """Return the row of each assignment of tokens before ``end`` of rank ``owner``, otherwise -1, in a tuple."""
    rows: gl.tuple = ()
    for j in gl.static_range(CHOICES):
        at = tensors[2] + (owner * M_shard + tokens).to(gl.int64) * CHOICES + j
        rows += (gl.load(at, mask=tokens < end, other=-1),)
    return rows


@gluon.jit
def _load_rows(tensors, rows, pairs, N):
    """Load some pairs of columns of the rows of each token, in a tuple."""
    first = tensors[0].to(gl.pointer_type(gl.int32), bitcast=True)
    parts: gl.tuple = ()
    for j in gl.static_range(len(rows)):
        at = first + rows[j][:, None].to(gl.int64) * (N // 2) + pairs[None, :]
        parts += (gl.load(at, mask=(rows[j] >= 0)[:, None] & (pairs < N // 2)[None, :], other=0),)
    return parts


@gluon.jit
def _weights_of(tensors, owner, tokens, rows, M_shard):
    """Return the weight of each assignment of tokens of rank ``owner``, in a tuple, which is empty if all are 1.

    rows: the rows of the assignments. If there is none, the weight is not loaded.
    """
    weights: gl.tuple = ()
    if tensors[3] is not None:
        for j in gl.static_range(len(rows)):
            at = tensors[3] + (owner * M_shard + tokens).to(gl.int64) * len(rows) + j
            weights += (gl.load(at, mask=rows[j] >= 0, other=0.0),)
    return weights


@gluon.constexpr_function
def _name(dtype):
    """Return the name of a type in PTX."""
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.jit
def _split(pairs, dtype: gl.constexpr):
    """Return the first and the second number of each pair, in fp32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32." + _name(dtype) + " $0, a; cvt.f32." + _name(dtype)
        + " $1, b; }",
        "=f,=f,r", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )


@gluon.jit
def _join(halves, dtype: gl.constexpr):
    """Return pairs of the numbers of two fp32 tensors, rounded to ``dtype``."""
    return gl.inline_asm_elementwise(
        "cvt.rn." + _name(dtype) + "x2.f32 $0, $2, $1;", "=r,f,f", [halves[0], halves[1]], dtype=gl.int32,
        is_pure=True, pack=1,
    )


@gluon.jit
def _weighted_sum(parts, weights, dtype: gl.constexpr):
    """Return the weighted sums of each token's rows in fp32, (of the first columns of all pairs, of the second).

    Assignments without a row add nothing.
    """
    first = gl.zeros_like(parts[0]).to(gl.float32)
    second = first
    for j in gl.static_range(len(parts)):
        a, b = _split(parts[j], dtype)
        if len(weights) > 0:
            a, b = a * weights[j][:, None], b * weights[j][:, None]
        first, second = first + a, second + b
    return first, second


@gluon.jit
def _place_of(tokens, pairs, end, N):
    """Return (offsets, mask) of pairs of columns of tokens before ``end``, in a tensor [M_shard, N]."""
    offs = tokens[:, None].to(gl.int64) * (N // 2) + pairs[None, :]
    return offs, (tokens < end)[:, None] & (pairs < N // 2)[None, :]


@gluon.jit
def _add_for_peer(
    tensors, to, owner, token, end, column, M_shard, N, COLUMNS: gl.constexpr, CHOICES: gl.constexpr,
    WARPS: gl.constexpr, AT_ONCE: gl.constexpr, PASSES: gl.constexpr,
):
    """Sum the rows of the tokens ``token`` to ``end`` - 1 of rank ``owner``, and store COLUMNS columns at ``to``.

    to: address of the sums [M_shard, N]
    AT_ONCE: tokens of a pass
    PASSES: passes whose rows are loaded while the rows of as many passes before are added
    """
    layout: gl.constexpr = _layout(AT_ONCE, WARPS)
    dtype: gl.constexpr = tensors[1].dtype.element_ty
    tokens = token + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
    pairs = column // 2 + gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, layout))
    rows: gl.tuple = ()
    parts: gl.tuple = ()
    weights: gl.tuple = ()
    for i in gl.static_range(PASSES):
        rows += (_rows_of(tensors, owner, tokens + i * AT_ONCE, end, M_shard, CHOICES),)
    for i in gl.static_range(PASSES):
        parts += (_load_rows(tensors, rows[i], pairs, N),)
        weights += (_weights_of(tensors, owner, tokens + i * AT_ONCE, rows[i], M_shard),)
    rows = ()
    for i in gl.static_range(PASSES):
        rows += (_rows_of(tensors, owner, tokens + (PASSES + i) * AT_ONCE, end, M_shard, CHOICES),)
    for _ in range(token, end, PASSES * AT_ONCE):
        next_parts: gl.tuple = ()
        next_weights: gl.tuple = ()
        next_rows: gl.tuple = ()
        for i in gl.static_range(PASSES):
            total = _join(_weighted_sum(parts[i], weights[i], dtype), dtype)
            next_parts += (_load_rows(tensors, rows[i], pairs, N),)
            there, coming = tokens + i * AT_ONCE, tokens + (PASSES + i) * AT_ONCE
            next_weights += (_weights_of(tensors, owner, coming, rows[i], M_shard),)
            next_rows += (_rows_of(tensors, owner, coming + PASSES * AT_ONCE, end, M_shard, CHOICES),)
            offs, mask = _place_of(there, pairs, end, N)
            gl.store(pointer_to(to, gl.int32) + offs, total, mask=mask)
        tokens += PASSES * AT_ONCE
        parts, weights, rows = next_parts, next_weights, next_rows


@gluon.jit
def _add_own(
    tensors, parts_at, part_bytes, token, end, column, M_shard, N, me, COLUMNS: gl.constexpr, CHOICES: gl.constexpr,
    RANKS: gl.constexpr, ROUND_OWN: gl.constexpr, WARPS: gl.constexpr, AT_ONCE: gl.constexpr,
):
    """Store COLUMNS columns of z for the tokens ``token`` to ``end`` - 1 of this rank: its own sums plus the peers'.

    parts_at, part_bytes: address of the sums of rank 0, and distance to those of the next rank. They are added in fp32,
        in rank order.
    """
    layout: gl.constexpr = _layout(AT_ONCE, WARPS)
    dtype: gl.constexpr = tensors[1].dtype.element_ty
    tokens = token + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
    pairs = column // 2 + gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, layout))
    z = tensors[1].to(gl.pointer_type(gl.int32), bitcast=True)
    rows = _rows_of(tensors, me, tokens, end, M_shard, CHOICES)
    for _ in range(token, end, AT_ONCE):
        weights = _weights_of(tensors, me, tokens, rows, M_shard)
        own = _weighted_sum(_load_rows(tensors, rows, pairs, N), weights, dtype)
        rows = _rows_of(tensors, me, tokens + AT_ONCE, end, M_shard, CHOICES)
        if ROUND_OWN:
            own = _split(_join(own, dtype), dtype)
        offs, mask = _place_of(tokens, pairs, end, N)
        first, second = gl.zeros_like(own[0]), gl.zeros_like(own[0])
        for source in gl.static_range(RANKS):
            at = pointer_to(parts_at + source * part_bytes, gl.int32) + offs
            part = _split(gl.load(at, mask=mask & (me != source), other=0), dtype)
            first = first + gl.where(me == source, own[0], part[0])
            second = second + gl.where(me == source, own[1], part[1])
        gl.store(z + offs, _join((first, second), dtype), mask=mask)
        tokens += AT_ONCE


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
def _items_of_slice(of_slice, num_chunks, groups, signals, parts, RANKS: gl.constexpr):
    """Return the number of work items of a slice (for the peers' tokens, for this rank's tokens).

    signals: signals of a work item for a peer
    parts: work items for this rank's tokens of a signal
    """
    of_peers = (RANKS - 1) * num_chunks * ((groups + signals - 1) // signals) * of_slice
    return of_peers, num_chunks * groups * parts * of_slice


@gluon.jit
def _place_before_last(item, of_peers, of_own):
    """Return ``_place_of_item`` of a work item before those of the last slice."""
    later = gl.maximum(item - of_peers, 0)  # after the peers' tokens of the first slice
    group, within = later // (of_peers + of_own), later % (of_peers + of_own)
    is_first = item < of_peers
    is_own = (is_first == 0) & (within >= of_peers)
    slice_id = gl.where(is_first, 0, group + gl.where(is_own, 0, 1))
    return slice_id, is_own, gl.where(is_first, item, within - gl.where(is_own, of_peers, 0))


@gluon.jit
def _place_of_item(item, last, large, small):
    """Return (slice, whether the tokens are this rank's, index among the slice's items of that kind) of a work item.

    last: the last slice
    large, small: numbers of work items (for the peers' tokens, for this rank's tokens) of each slice but the last, and
        of the last slice

    This rank's tokens of a slice come after the peers' tokens of the next one, so that the sums of the peers arrive
    meanwhile.
    """
    of_peers, of_own = large
    slice_id, is_own, number = _place_before_last(item, of_peers, of_own)
    # The last items: the peers' tokens of the last slice, then this rank's tokens of the slice before and of the last.
    at_end = item - last * of_peers - gl.maximum(last - 1, 0) * of_own
    own, of_before = at_end - small[0], gl.where(last > 0, of_own, 0)
    is_before = (own >= 0) & (own < of_before)
    last_number = gl.where(own < 0, at_end, own - gl.where(is_before, 0, of_before))
    slice_id = gl.where(at_end < 0, slice_id, last - gl.where(is_before, 1, 0))
    return slice_id, gl.where(at_end < 0, is_own, own >= 0), gl.where(at_end < 0, number, last_number)


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
    """Run a work item for a peer's tokens: send their sums, then its signals. Return the request for the next item.

    sizes: those of ``_sizes_of_shard``
    number: index of the tokens among those of the peers, in units of ``signals`` signals
    block: block of columns; there are no sums if it is not in N
    """
    ctx, tensors, _, _, M_shard, N, chunk_rows, _, half, signal, me = sums
    num_chunks, groups, blocks, of_shard, shard_bytes = sizes
    each = (groups + signals - 1) // signals
    group = number % each * signals
    count = gl.where(block < blocks, gl.minimum(signals, groups - group), 0)
    owner, chunk = chunk_at_turn(num_chunks + number // each, me, RANKS, num_chunks)
    token = chunk * chunk_rows + group * _TOKENS
    mark_by_warps(trace, "joins", WARPS, owner)
    _add_for_peer(
        tensors, data_at(ctx, half, owner) + me * shard_bytes, owner, token,
        gl.minimum(token + count * _TOKENS, M_shard), block * COLUMNS, M_shard, N, COLUMNS, CHOICES, WARPS,
        _tokens_of_pass(CHOICES, WARPS, PROMOTE), _passes_in_flight(CHOICES, PROMOTE),
    )
    # Not earlier: other warps may have time for the next item while these add.
    answer = request_by_warps(ctx, 1, WARPS)
    first = (chunk * groups + group) * blocks + block  # signal
    mark_by_warps(trace, "pushes", WARPS, owner)
    # waiter: the owner's work items for the same tokens and columns
    notify_by_warps(ctx, signal_at(ctx, half, me * of_shard + first), blocks, count, owner, signal, WARPS)
    return answer


@gluon.jit
def _run_own_item(
    sums, sizes, number, block, parts, trace, COLUMNS: gl.constexpr, CHOICES: gl.constexpr, RANKS: gl.constexpr,
    ROUND_OWN: gl.constexpr, WARPS: gl.constexpr, PROMOTE: gl.constexpr,
):
    """Run a work item for this rank's tokens: wait for the peers, then add. Return the request for the next item.

    sizes: those of ``_sizes_of_shard``
    number: index of the tokens, in units of 1 / ``parts`` of a signal's tokens
    block: block of columns; there are no sums if it is not in N
    """
    ctx, tensors, _, _, M_shard, N, chunk_rows, _, half, signal, me = sums
    _, groups, blocks, of_shard, shard_bytes = sizes
    group = number // parts  # of all chunks
    token = group // groups * chunk_rows + (group % groups * parts + number % parts) * (_TOKENS // parts)
    if block < blocks:
        first = group * blocks + block  # signal
        if RANKS > 1:  # producer: the work items of the peers for the same tokens and columns
            wait_for_ranks(ctx, signal_at(ctx, half, first), of_shard, signal, WARPS, False)
        mark_by_warps(trace, "sums", WARPS)
        _add_own(
            tensors, data_at(ctx, half, me), shard_bytes, token, gl.minimum(token + _TOKENS // parts, M_shard),
            block * COLUMNS, M_shard, N, me, COLUMNS, CHOICES, RANKS, ROUND_OWN, WARPS,
            _tokens_of_pass(CHOICES + RANKS - 1, WARPS, PROMOTE),
        )
    return request_by_warps(ctx, 1, WARPS)


@gluon.jit
def add_partition(
    sums, trace_ptr, COLUMNS: gl.constexpr, CHOICES: gl.constexpr, RANKS: gl.constexpr, ROUND_OWN: gl.constexpr,
    WARPS: gl.constexpr, PROMOTE: gl.constexpr,
):
    """Add the rows of tokens, together with other partitions, slice by slice.

    sums: (ctx, tensors, slices, ``done_ptr``, tokens of a rank, N, tokens of a chunk, ``has_large`` of the kernel,
        half, signal, rank)
    tensors: pointers to the rows [R, N], to z, to the row of each assignment and to their weights or None
    slices: as for ``load_partition``
    PROMOTE: whether threads have few registers

    Work items of the last slice are small, because the warps that have multiplied share them, too.
    """
    ctx, _, slices, done_ptr, _, N, _, has_large, _, signal, me = sums
    sizes = _sizes_of_shard(sums, COLUMNS)
    num_chunks, groups, _, _, _ = sizes
    of_slice = slices[1] * BLOCK_N // COLUMNS  # blocks of a slice; the last one may have fewer
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    last = (tiles_n + slices[1] - 1) // slices[1] - 1
    signals, parts = gl.where(has_large, _SIGNALS, 1), gl.where(has_large, 1, PARTS)
    large = _items_of_slice(of_slice, num_chunks, groups, signals, parts, RANKS)
    small = _items_of_slice(of_slice, num_chunks, groups, 1, PARTS, RANKS)
    num_items = gl.where(signal == 0, 0, last * (large[0] + large[1]) + small[0] + small[1])
    complete = 0
    item = item_of_warps(request_by_warps(ctx, 1, WARPS))
    while item < num_items:
        slice_id, is_own, number = _place_of_item(item, last, large, small)
        block, rest = slice_id * of_slice + number % of_slice, number // of_slice
        trace = trace_ptr, slices[0] * tiles_n + item  # after the tiles
        mark_by_warps(trace, "starts", WARPS)
        if trace_ptr is not None:  # later also for the peers, if the tokens are this rank's
            mark_by_warps(trace, "waits", WARPS, gl.where(is_own, ALL_PEERS, me))
        complete = _await_tiles(ctx, slice_id, complete, slices, tiles_n, done_ptr, me)
        if is_own == 0:
            count = gl.where(slice_id < last, signals, 1)
            answer = _run_item_for_peer(
                sums, sizes, rest, block, count, trace, COLUMNS, CHOICES, RANKS, WARPS, PROMOTE
            )
        else:
            count = gl.where(slice_id < last, parts, PARTS)
            answer = _run_own_item(
                sums, sizes, rest, block, count, trace, COLUMNS, CHOICES, RANKS, ROUND_OWN, WARPS, PROMOTE
            )
        mark_by_warps(trace, "ends", WARPS)
        item = item_of_warps(answer)
