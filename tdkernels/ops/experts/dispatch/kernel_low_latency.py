"""Low-latency dispatch kernel: count and send few tokens in one launch.

The two-phase strategy needs a launch that exchanges counts before ``ep_dispatch_kernel`` can compute the slots and rows
of the tokens. Here every rank has S slots for each source rank, so a token's slot is known without counts. Its rows are
computed by the receiver, from counts that are sent concurrently:

1. Program 0 counts this rank's rows for each expert, and sends this count row to all ranks.
2. Senders take one token each. They store it in its slot at every rank that has an expert of it, this rank included.
   They compare its experts with the ids of all earlier tokens, which gives the number of each of its rows among this
   rank's rows for that expert. They store the experts and these numbers in the slot, then signal all ranks.
3. One program waits for all count rows, and writes the tables for combines and later dispatches.
4. Receivers take one token of a rank each. They wait for all count rows, which determine the first row of each source
   rank and expert, then for the token, and copy it to its rows. Receivers of this rank's own tokens also complete the
   tables.

Progress (invariant 1). Only 3 and 4 wait, and only for 1 and 2, which have the smallest program ids. Buffer reuse
(invariant 3). Every rank sends its count row to all others and waits for one from each. The device functions of 1 and 2
are in ``kernel_low_latency_send``.

A half of the memory has a count row for each rank, then S slots for each rank. A count row has the C words of
``counts`` in the tables (``layout``; the tokens for each rank are 0), then the number of rows for each rank. A slot has
items and scales, then for the K assignments: the expert (-1: not on the receiver), the number of the row among the
sender's rows for that expert, and the weight.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.dispatch.kernel_low_latency_send import (
    direct_slot_parts,
    line_of,
    send_counts,
    send_token,
    slot_of,
)
from tdkernels.ops.experts.dispatch.kernel_payload import read_block, spread
from tdkernels.ops.experts.dispatch.kernel_route import lay_out_rows, store_summary
from tdkernels.ops.experts.dispatch.layout import (
    MAX_CHUNKS,
    VALID,
    chunk_at,
    counts_of,
    experts_at,
    places_at,
    send_offsets_at,
    sent_at,
    slot_at,
    summary_at,
    whole_items,
)

# ---- 3. tables ----


@td.jit
def _write_tables(
    ctx, area, most, tables, splits_ptr, capacity, call,
    BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):
    """Write all tables without a token dimension from the count rows."""
    C: tl.constexpr = EXPERTS + RANKS + 2
    BLOCK: tl.constexpr = min(triton.next_power_of_2(C), 512)
    me = td.rank(ctx)
    for source in range(RANKS):
        for start in range(0, C, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            counts = tl.load(line_of(area, source, EXPERTS, RANKS) + columns, mask=columns < C)
            tl.store(counts_of(tables, source, EXPERTS, RANKS) + columns, counts, mask=columns < C)
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    ours = send_offsets_at(tables, EXPERTS, RANKS) + ranks
    # Send, recv, parts and peer offsets: every rank has S slots for each rank, in rank order.
    for table in tl.static_range(4):
        begins = tl.where((table == 0) | (table == 3), me, ranks) * most
        tl.store(ours + table * RANKS, begins, mask=ranks < RANKS)
    tl.debug_barrier()  # threads read counts that other threads have stored
    rows = lay_out_rows(tables, splits_ptr, me, BY_SOURCE, EXPERTS, RANKS)
    tl.debug_barrier()  # store_summary may overwrite splits
    nothing = tl.full((), 0, tl.int32)
    store_summary(ctx, tables, splits_ptr, me, rows, nothing, capacity, call, BY_SOURCE, EXPERTS, RANKS)
    # A receiver that timed out meanwhile has stored -1, which may just have been overwritten. In that case the failure
    # was recorded before the overwrite, so check for it again.
    valid_ptr = summary_at(tables, EXPERTS, RANKS) + VALID
    tl.atomic_add(valid_ptr, 0, sem="acq_rel", scope="gpu")
    tl.store(valid_ptr, -1, mask=td.failed_for_all(ctx))


@td.jit
def _invalidate_tables(tables, splits_ptr, BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Invalidate the tables and set all splits to 0, if a count row did not arrive. No combine may use the tables."""
    SPLITS: tl.constexpr = EXPERTS if BY_SOURCE else EXPERTS // RANKS
    number = tl.arange(0, triton.next_power_of_2(SPLITS))
    tl.store(summary_at(tables, EXPERTS, RANKS) + VALID, -1)
    tl.store(splits_ptr + number, tl.full(number.shape, 0, tl.int32), mask=number < SPLITS)


# ---- 4. receivers ----


@td.jit
def _everything_fits(area, capacity, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Return whether the call is valid. The decision is the same on all ranks, and the same as in ``store_summary``."""
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    C: tl.constexpr = EXPERTS + RANKS + 2
    source, rank = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    lines = line_of(area, source, EXPERTS, RANKS)
    rows = td.sum_of(tl.load(lines + C + rank, mask=(source < RANKS) & (rank < RANKS), other=0), 0)
    bad = tl.load(lines + EXPERTS + RANKS + rank, mask=(source < RANKS) & (rank == 0), other=0)
    return (td.max_of(rows, 0) <= capacity) & (td.max_of(td.max_of((bad != 0).to(tl.int32), 1), 0) == 0)


@td.jit
def _first_rows(area, source, BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Return (experts, first row of a source's rows for each, on the expert's rank), in any order.

    BY_SOURCE: see ``lay_out_rows``.
    """
    EACH: tl.constexpr = EXPERTS // RANKS
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    LOCAL: tl.constexpr = triton.next_power_of_2(EACH)
    rank, local = tl.arange(0, R)[:, None], tl.arange(0, LOCAL)[None, :]
    there = (rank < RANKS) & (local < EACH)
    total = tl.full((R, LOCAL), 0, tl.int32)
    before = tl.full((R, LOCAL), 0, tl.int32)
    own = tl.full((R, LOCAL), 0, tl.int32)
    for other in range(RANKS):
        counts = tl.load(line_of(area, other, EXPERTS, RANKS) + rank * EACH + local, mask=there, other=0)
        total += counts
        before += tl.where(other < source, counts, 0)
        own += tl.where(other == source, counts, 0)
    if BY_SOURCE:
        first = td.sum_of(before, 1)[:, None] + td.running_sum(own, 1) - own
    else:
        first = td.running_sum(total, 1) - total + before
    experts = tl.where(there, rank * EACH + local, -2)
    return tl.reshape(experts, (R * LOCAL,)), tl.reshape(first, (R * LOCAL,))


@td.jit
def _rows_of(experts, number, all_experts, first_rows):
    """Return the rows of assignments from their numbers among the source's rows; -1 for those without an expert."""
    of_choice = all_experts[None, :] == experts[:, None]
    rows = td.sum_of(tl.where(of_choice, first_rows[None, :], 0), 1) + number
    return tl.where(experts >= 0, rows, -1)


@td.jit
def _receive_token(
    slot, scales_begin, experts_begin, all_experts, first_rows, capacity,
    size, outputs,
    K: tl.constexpr, PAYLOAD: tl.constexpr,
):
    """Copy a received token from its slot to its rows. Return the rows, -1 for assignments to other ranks."""
    items, scale_words = size
    row_weights_ptr = outputs[2]
    choice = tl.arange(0, triton.next_power_of_2(K))
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    # Start this load before the rows are computed, even if there are none.
    row, row_scales = read_block(slot, slot + scales_begin, 0, items, scale_words, True, PAYLOAD, True)
    at = (slot + experts_begin).to(tl.pointer_type(tl.int32)) + choice
    experts = tl.load(at, mask=choice < K, other=-1)
    number = tl.load(at + K, mask=choice < K, other=0)
    weights = tl.load((at + 2 * K).to(tl.pointer_type(tl.float32)), mask=choice < K, other=0.0)
    here = _rows_of(experts, number, all_experts, first_rows)
    # In an invalid call the capacity is 0, so there are no rows. The check also bounds row numbers sent by a peer.
    here = tl.where((here >= 0) & (here < capacity), here, -1)
    is_here = td.max_of(here, 0) >= 0
    for block in range(tl.where(is_here, blocks, 0)):
        if block > 0:
            row, row_scales = read_block(slot, slot + scales_begin, block, items, scale_words, True, PAYLOAD, True)
        spread(here, weights, row, row_scales, block, size, outputs, PAYLOAD)
    if row_weights_ptr is not None:
        tl.store(row_weights_ptr + here, weights, mask=here >= 0)
    return here


@td.jit
def _store_places(
    tables, token, num_tokens, valid, all_experts, first_rows, K: tl.constexpr, EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Store the rows of a token of this rank in the tables."""
    choice = tl.arange(0, triton.next_power_of_2(K))
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    experts = tl.load(experts_at(tables, token, K, EXPERTS, RANKS) + choice, mask=choice < K, other=-1)
    places_ptr = places_at(tables, token, num_tokens, K, EXPERTS, RANKS) + choice
    places = _rows_of(experts, tl.load(places_ptr, mask=choice < K, other=0), all_experts, first_rows)
    places = tl.where(valid, places, -1)
    dest = tl.where(places >= 0, experts // (EXPERTS // RANKS), -1)
    is_sent = td.max_of((dest[None, :] == ranks[:, None]).to(tl.int32), 1) != 0
    tl.debug_barrier()  # all threads have read the numbers that are now overwritten
    tl.store(places_ptr, places, mask=choice < K)
    sent = sent_at(tables, token, num_tokens, K, EXPERTS, RANKS) + ranks
    tl.store(sent, tl.where(is_sent, token, -1), mask=ranks < RANKS)


@td.jit(do_not_specialize=["num_tokens", "most", "capacity", "num_senders", "items", "scale_words", "plan", "call"])
def ep_direct_kernel(
    ctx, ids_ptr, bad_ptr, x_ptr, scales_ptr, weights_ptr, tables, received, splits_ptr,
    rows_ptr, row_scales_ptr, row_weights_ptr,
    num_tokens, most, capacity, num_senders, items, scale_words, plan, call,
    ADVANCE: tl.constexpr, BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    N: tl.constexpr, PAYLOAD: tl.constexpr, trace_ptr=None,
):
    """Send x [T, items] of each rank, T <= most, to rows [capacity, items] of the ranks of its experts; see the module.

    ``num_senders`` includes program 0. It is 0 if this launch only receives. Signal number ``source * MAX_CHUNKS +
    token`` of a half says that a source's token is in this rank's slots. Signal number ``ranks * MAX_CHUNKS + source``
    says that its count row has arrived.
    """
    items = whole_items(items, PAYLOAD.item, PAYLOAD.aligned)
    scale_words = tl.cast(scale_words, tl.int32)
    num_tokens, most = tl.cast(num_tokens, tl.int32), tl.cast(most, tl.int32)
    epoch, half, signal = td.call(ctx, plan)
    me = td.rank(ctx)
    pid = tl.program_id(0)
    if (pid == 0) & (num_senders > 0):
        send_counts(ctx, half, signal, ids_ptr, bad_ptr, num_tokens, K, EXPERTS, RANKS, N)
    first_token = tl.where((pid > 0) & (pid < num_senders), pid - 1, num_tokens)
    for token in range(first_token, num_tokens, tl.maximum(num_senders - 1, 1)):
        trace = (trace_ptr, token)
        td.mark(trace, "starts")
        send_token(
            ctx, half, signal, token, num_tokens, most, ids_ptr, x_ptr, scales_ptr, weights_ptr, tables,
            items, scale_words, K, EXPERTS, RANKS, N, PAYLOAD, trace,
        )
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    area = td.data_at(ctx, half, me)
    signals = td.signal_at(ctx, half, 0)
    all_arrived = num_tokens < 0
    if pid >= num_senders:
        # producer: every rank's program 0
        all_arrived = td.wait_plan_all(ctx, signals + RANKS * MAX_CHUNKS, 1, signal, WITH_OWN=True)
        if pid == num_senders:
            if all_arrived:
                _write_tables(ctx, area, most, tables, splits_ptr, capacity, call, BY_SOURCE, EXPERTS, RANKS)
            else:
                _invalidate_tables(tables, splits_ptr, BY_SOURCE, EXPERTS, RANKS)
    scales_begin, experts_begin, slot_bytes = direct_slot_parts(
        items * (PAYLOAD.item.primitive_bitwidth // 8), scale_words * (PAYLOAD.scale.primitive_bitwidth // 8), K
    )
    choice = tl.arange(0, triton.next_power_of_2(K))
    work = most * RANKS
    first_piece = tl.where((pid > num_senders) & all_arrived, pid - num_senders - 1, work)
    for piece in range(first_piece, work, tl.maximum(tl.num_programs(0) - num_senders - 1, 1)):
        source, token = (me + 1 + piece) % RANKS, piece // RANKS
        trace = (trace_ptr, MAX_CHUNKS + piece)
        td.mark(trace, "starts")
        valid = _everything_fits(area, capacity, EXPERTS, RANKS)
        tokens = tl.load(line_of(area, source, EXPERTS, RANKS) + EXPERTS + RANKS + 1)
        all_experts, first_rows = _first_rows(area, source, BY_SOURCE, EXPERTS, RANKS)
        is_sent = token < tl.minimum(tokens, most)
        if is_sent:
            td.mark(trace, "waits", source)
            # producer: the source's sender of this token
            seen = td.wait_plan(ctx, signals + source * MAX_CHUNKS + token, signal, source)
            if td.completed(seen, signal):
                td.mark(trace, "receives", source)
                slot = slot_of(area, source, token, most, slot_bytes, EXPERTS, RANKS)
                here = _receive_token(
                    slot, scales_begin, experts_begin, all_experts, first_rows, tl.where(valid, capacity, 0),
                    (items, scale_words), (rows_ptr, row_scales_ptr, row_weights_ptr, None, None),
                    K, PAYLOAD,
                )
                tl.store(slot_at(received, source * most + token, K, RANKS) + choice, here, mask=choice < K)
                tl.store(chunk_at(received, source, token), token)
                tl.store(chunk_at(received, source, token) + 1, (td.max_of(here, 0) >= 0).to(tl.int32))
                if source == me:
                    _store_places(tables, token, num_tokens, valid, all_experts, first_rows, K, EXPERTS, RANKS)
            else:
                tl.store(summary_at(tables, EXPERTS, RANKS) + VALID, -1)  # no combine may use incomplete tables
        elif token == 0:  # a rank without tokens has one empty chunk
            tl.store(chunk_at(received, source, token), 0)
            tl.store(chunk_at(received, source, token) + 1, 0)
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    td.finish(ctx, ADVANCE)
