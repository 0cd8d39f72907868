"""Few tokens to their experts, in one launch: what is not known yet when a token leaves is found out where it arrives.

``ep_dispatch_kernel`` needs to know where tokens go before it sends any, so a launch before it counts, exchanges the
counts and lays out. Here every rank has room for S tokens of every rank, so that a token's slot is known without
counting, and numbers travel beside the tokens:

1. Program 0 counts this rank's rows for each expert, and sends that line of numbers to all ranks.
2. Senders take a token each, and store it in its slot at every rank that has an expert of it, their own included. Which
   row of an expert's it is, among those of this rank, they see by looking through the ids of the tokens before. These
   numbers and the experts follow the token, and then a signal to all ranks.
3. One program waits for all lines, and makes the tables of them that combines and later dispatches go by.
4. Receivers take a token of a rank each. They wait for all lines, which say where the rows of each rank and expert
   begin, then for the token, and copy it to its rows. Those of our own tokens complete what the tables say of them.

Nobody waits but 3 and 4, for 1 and 2 only, which have the smallest program ids (law 1). All ranks send all others their
line, and wait for one from each (law 3). What 1 and 2 call is in ``kernel_low_latency_send``.

A half of the memory: a line for each rank, then S slots for each rank. A line: C words as in the tables (``layout``,
without tokens for each rank), then how many rows each rank gets. A slot: items, scales, then of K choices the experts
(-1: not here), the numbers of their rows among the sender's for that expert, and the weights.
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

# ---- 3. the tables ----


@td.jit
def _settle(
    ctx, area, most, tables, splits_ptr, capacity, call,
    BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):
    """Make of all lines the tables that are not of tokens."""
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
    for table in tl.static_range(4):  # ours, theirs, parts, their: S slots for each rank, in the order of the ranks
        begins = tl.where((table == 0) | (table == 3), me, ranks) * most
        tl.store(ours + table * RANKS, begins, mask=ranks < RANKS)
    tl.debug_barrier()  # counts are read by other threads than have written them
    rows = lay_out_rows(tables, splits_ptr, me, BY_SOURCE, EXPERTS, RANKS)
    tl.debug_barrier()  # splits may be stored again
    nothing = tl.full((), 0, tl.int32)
    store_summary(ctx, tables, splits_ptr, me, rows, nothing, capacity, call, BY_SOURCE, EXPERTS, RANKS)
    # A receiver that gave up meanwhile has said so, and that may just have been written over. It had given up before.
    goes = summary_at(tables, EXPERTS, RANKS) + VALID
    tl.atomic_add(goes, 0, sem="acq_rel", scope="gpu")
    tl.store(goes, -1, mask=td.failed_for_all(ctx))


@td.jit
def _give_up(tables, splits_ptr, BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """What the tables say where a line did not come: no combine may go by them, and no product has rows."""
    SPLITS: tl.constexpr = EXPERTS if BY_SOURCE else EXPERTS // RANKS
    number = tl.arange(0, triton.next_power_of_2(SPLITS))
    tl.store(summary_at(tables, EXPERTS, RANKS) + VALID, -1)
    tl.store(splits_ptr + number, tl.full(number.shape, 0, tl.int32), mask=number < SPLITS)


# ---- 4. receivers ----


@td.jit
def _everything_fits(area, capacity, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Whether anything is to be received, as all ranks decide by the same numbers (``store_summary`` of the tables)."""
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    C: tl.constexpr = EXPERTS + RANKS + 2
    source, rank = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    lines = line_of(area, source, EXPERTS, RANKS)
    rows = td.sum_of(tl.load(lines + C + rank, mask=(source < RANKS) & (rank < RANKS), other=0), 0)
    bad = tl.load(lines + EXPERTS + RANKS + rank, mask=(source < RANKS) & (rank == 0), other=0)
    return (td.max_of(rows, 0) <= capacity) & (td.max_of(td.max_of((bad != 0).to(tl.int32), 1), 0) == 0)


@td.jit
def _first_rows(area, source, BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """(experts, where a source's rows for each begin among those of the expert's rank): in any order.

    BY_SOURCE: as of ``lay_out_rows``.
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
    """The rows of some choices, which have these numbers among their source's; -1 of those without an expert."""
    of_choice = all_experts[None, :] == experts[:, None]
    rows = td.sum_of(tl.where(of_choice, first_rows[None, :], 0), 1) + number
    return tl.where(experts >= 0, rows, -1)


@td.jit
def _receive_token(
    slot, scales_begin, experts_begin, all_experts, first_rows, capacity,
    size, outputs,
    K: tl.constexpr, PAYLOAD: tl.constexpr,
):
    """Copy a token that has come from its slot to its rows; returns these, -1 for choices that are not here."""
    items, scale_words = size
    row_weights_ptr = outputs[2]
    choice = tl.arange(0, triton.next_power_of_2(K))
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    # On its way while the rows are found, even if there are none.
    row, row_scales = read_block(slot, slot + scales_begin, 0, items, scale_words, True, PAYLOAD, True)
    at = (slot + experts_begin).to(tl.pointer_type(tl.int32)) + choice
    experts = tl.load(at, mask=choice < K, other=-1)
    number = tl.load(at + K, mask=choice < K, other=0)
    weights = tl.load((at + 2 * K).to(tl.pointer_type(tl.float32)), mask=choice < K, other=0.0)
    here = _rows_of(experts, number, all_experts, first_rows)
    # Of a call that does not go there are none; and whatever a peer has sent, no others than those that there are.
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
def _complete(
    tables, token, num_tokens, goes, all_experts, first_rows, K: tl.constexpr, EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Say in the tables where a token of ours has gone."""
    choice = tl.arange(0, triton.next_power_of_2(K))
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    experts = tl.load(experts_at(tables, token, K, EXPERTS, RANKS) + choice, mask=choice < K, other=-1)
    places_ptr = places_at(tables, token, num_tokens, K, EXPERTS, RANKS) + choice
    places = _rows_of(experts, tl.load(places_ptr, mask=choice < K, other=0), all_experts, first_rows)
    places = tl.where(goes, places, -1)
    dest = tl.where(places >= 0, experts // (EXPERTS // RANKS), -1)
    is_sent = td.max_of((dest[None, :] == ranks[:, None]).to(tl.int32), 1) != 0
    tl.debug_barrier()  # all threads have read what is now written over
    tl.store(places_ptr, places, mask=choice < K)
    sent = sent_at(tables, token, num_tokens, K, EXPERTS, RANKS) + ranks
    tl.store(sent, tl.where(is_sent, token, -1), mask=ranks < RANKS)


@td.jit(do_not_specialize=["num_tokens", "most", "capacity", "num_senders", "items", "scale_words", "plan", "call"])
def ep_direct_kernel(
    ctx, ids_ptr, bad_ptr, x_ptr, scales_ptr, weights_ptr, tables, came, splits_ptr,
    rows_ptr, row_scales_ptr, row_weights_ptr,
    num_tokens, most, capacity, num_senders, items, scale_words, plan, call,
    ADVANCE: tl.constexpr, BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    N: tl.constexpr, PAYLOAD: tl.constexpr, trace_ptr=None,
):
    """x [T, items] of each rank, T <= most, to rows [capacity, items] of the ranks with its experts; see the module.

    ``num_senders``: with program 0; 0 where this launch only receives. Signal number ``source * MAX_CHUNKS + token`` of
    a half says that a source's token is in our slots, number ``ranks * MAX_CHUNKS + source`` that its line is here.
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
    all_came = num_tokens < 0
    if pid >= num_senders:
        # producer: every rank's program 0
        all_came = td.wait_plan_all(ctx, signals + RANKS * MAX_CHUNKS, 1, signal, WITH_OWN=True)
        if pid == num_senders:
            if all_came:
                _settle(ctx, area, most, tables, splits_ptr, capacity, call, BY_SOURCE, EXPERTS, RANKS)
            else:
                _give_up(tables, splits_ptr, BY_SOURCE, EXPERTS, RANKS)
    scales_begin, experts_begin, slot_bytes = direct_slot_parts(
        items * (PAYLOAD.item.primitive_bitwidth // 8), scale_words * (PAYLOAD.scale.primitive_bitwidth // 8), K
    )
    choice = tl.arange(0, triton.next_power_of_2(K))
    work = most * RANKS
    first_piece = tl.where((pid > num_senders) & all_came, pid - num_senders - 1, work)
    for piece in range(first_piece, work, tl.maximum(tl.num_programs(0) - num_senders - 1, 1)):
        source, token = (me + 1 + piece) % RANKS, piece // RANKS
        trace = (trace_ptr, MAX_CHUNKS + piece)
        td.mark(trace, "starts")
        goes = _everything_fits(area, capacity, EXPERTS, RANKS)
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
                    slot, scales_begin, experts_begin, all_experts, first_rows, tl.where(goes, capacity, 0),
                    (items, scale_words), (rows_ptr, row_scales_ptr, row_weights_ptr, None, None),
                    K, PAYLOAD,
                )
                tl.store(slot_at(came, source * most + token, K, RANKS) + choice, here, mask=choice < K)
                tl.store(chunk_at(came, source, token), token)
                tl.store(chunk_at(came, source, token) + 1, (td.max_of(here, 0) >= 0).to(tl.int32))
                if source == me:
                    _complete(tables, token, num_tokens, goes, all_experts, first_rows, K, EXPERTS, RANKS)
            else:
                tl.store(summary_at(tables, EXPERTS, RANKS) + VALID, -1)  # no combine may go by incomplete tables
        elif token == 0:  # a rank without tokens has one chunk, of none
            tl.store(chunk_at(came, source, token), 0)
            tl.store(chunk_at(came, source, token) + 1, 0)
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    td.finish(ctx, ADVANCE)
