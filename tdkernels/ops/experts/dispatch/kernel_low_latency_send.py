"""Device functions of ``ep_direct_kernel`` that send the count row and the tokens; see ``kernel_low_latency``."""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.experts.dispatch.kernel_payload import read_block, slot_parts, write_block
from tdkernels.ops.experts.dispatch.layout import MAX_CHUNKS, experts_at, places_at

# MOST_COMPARED: maximum elements of a tile that compares assignments with ids or experts. MOST_IDS: maximum ids of such
# a tile, and ids that are counted at a time. More take long to compile, and with small k there are not more ids.
MOST_COMPARED, MOST_IDS = tl.constexpr(8192), tl.constexpr(1024)


@td.jit
def direct_slot_parts(row_bytes, scale_bytes, K: tl.constexpr):
    """Return (offset of the scales in a slot, offset of the K experts, bytes of a slot); see ``low_latency``."""
    scales_begin, experts_begin, _ = slot_parts(row_bytes, scale_bytes, K)
    return scales_begin, experts_begin, (experts_begin + 12 * K + 127) // 128 * 128


@triton.constexpr_function
def line_words(num_experts, world_size):
    """Return the int32 words of a count row, a multiple of 16 bytes."""
    return (num_experts + 2 * world_size + 2 + 3) // 4 * 4


@td.jit
def line_of(area, source, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Return the address of a rank's count row in the half of a buffer that begins at ``area``."""
    return area.to(tl.pointer_type(tl.int32)) + source * line_words(EXPERTS, RANKS)


@td.jit
def slot_of(area, source, token, most, slot_bytes, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Return the address of the slot of a source's token in the half of a buffer that begins at ``area``."""
    lines = (4 * RANKS * line_words(EXPERTS, RANKS) + 127) // 128 * 128
    return area + lines + (tl.cast(source, tl.int64) * most + token) * slot_bytes


@td.jit
def experts_of(ids_ptr, at, there, EXPERTS: tl.constexpr, NONE: tl.constexpr):
    """Return the experts of assignments, NONE for ids that are dropped or out of range."""
    ids = tl.load(ids_ptr + at, mask=there, other=-1)
    return tl.where((ids >= 0) & (ids < EXPERTS), ids, NONE).to(tl.int32)


# ---- counts ----


@td.jit
def send_counts(
    ctx, half, signal, ids_ptr, bad_ptr, num_tokens,
    K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, N: tl.constexpr,
):
    """Count this rank's rows, and send its count row to all ranks."""
    E: tl.constexpr = max(triton.next_power_of_2(EXPERTS), 32)  # at least one bin for each thread of a warp
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    C: tl.constexpr = EXPERTS + RANKS + 2
    me = td.rank(ctx)
    counts = tl.full((E,), 0, tl.int32)
    bad = tl.full((), 0, tl.int32)
    if bad_ptr is not None:
        bad += tl.load(bad_ptr)
    for start in range(0, num_tokens * K, N):
        at = start + tl.arange(0, N)
        experts = experts_of(ids_ptr, at, at < num_tokens * K, EXPERTS, -1)
        counts += tl.histogram(experts, E, mask=experts >= 0)
        is_wrong = (tl.load(ids_ptr + at, mask=at < num_tokens * K, other=-1) != -1) & (experts < 0)
        bad += td.sum_of(is_wrong.to(tl.int32), 0)
    expert, rank = tl.arange(0, E), tl.arange(0, R)
    rows = td.sum_of(tl.where(expert[None, :] // (EXPERTS // RANKS) == rank[:, None], counts[None, :], 0), 1)
    is_sent = td.is_void(signal) == 0  # in a void launch a peer may still read data of an earlier launch
    for step in range(RANKS):
        to = (me + 1 + step) % RANKS
        line = line_of(td.data_at(ctx, half, to), me, EXPERTS, RANKS)
        tl.store(line + expert, counts, mask=(expert < EXPERTS) & is_sent)
        tl.store(line + EXPERTS + rank, tl.full((R,), 0, tl.int32), mask=(rank < RANKS) & is_sent)
        tl.store(line + EXPERTS + RANKS, bad, mask=is_sent)
        tl.store(line + EXPERTS + RANKS + 1, num_tokens, mask=is_sent)
        tl.store(line + C + rank, rows, mask=(rank < RANKS) & is_sent)
    # waiter: on every rank, this one included, the program that writes the tables and all receivers
    td.notify_all(ctx, td.signal_at(ctx, half, 0) + RANKS * MAX_CHUNKS + me, signal, WITH_OWN=True)


# ---- tokens ----


@td.jit
def _number(ids_ptr, token, experts, K: tl.constexpr, EXPERTS: tl.constexpr, N: tl.constexpr):
    """Return, for each assignment of a token, the number of this rank's earlier assignments to the same expert."""
    choice = tl.arange(0, triton.next_power_of_2(K))
    number = tl.full(experts.shape, 0, tl.int32)
    for start in range(0, (token + 1) * K, N):
        at = start + tl.arange(0, N)
        others = experts_of(ids_ptr, at, at < (token + 1) * K, EXPERTS, -2)
        earlier = at[None, :] < token * K + choice[:, None]
        number += td.sum_of(((others[None, :] == experts[:, None]) & earlier).to(tl.int32), 1)
    return number


@td.jit
def send_token(
    ctx, half, signal, token, num_tokens, most, ids_ptr, x_ptr, scales_ptr, weights_ptr, tables, items, scale_words,
    K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, N: tl.constexpr, PAYLOAD: tl.constexpr, trace,
):
    """Store a token in its slot at each rank that has an expert of it, and signal all ranks."""
    SCALE_BYTES: tl.constexpr = PAYLOAD.scale.primitive_bitwidth // 8
    choice = tl.arange(0, triton.next_power_of_2(K))
    me = td.rank(ctx)
    scales_begin, experts_begin, slot_bytes = direct_slot_parts(
        items * (PAYLOAD.item.primitive_bitwidth // 8), scale_words * SCALE_BYTES, K
    )
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    x = x_ptr.to(tl.int64) + tl.cast(token, tl.int64) * items * (PAYLOAD.source.primitive_bitwidth // 8)
    scales = scales_ptr.to(tl.int64) + tl.cast(token, tl.int64) * scale_words * SCALE_BYTES
    row, row_scales = read_block(x, scales, 0, items, scale_words, True, PAYLOAD, False)
    weights = tl.full(choice.shape, 1.0, tl.float32)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + tl.cast(token, tl.int64) * K + choice, mask=choice < K, other=0.0)
    experts = experts_of(ids_ptr, token * K + choice, choice < K, EXPERTS, -1)
    dest = tl.where(experts >= 0, experts // (EXPERTS // RANKS), -1)
    is_sent = td.is_void(signal) == 0  # in a void launch a peer may still read data of an earlier launch
    sent_items, sent_words = tl.where(is_sent, items, 0), tl.where(is_sent, scale_words, 0)
    td.mark(trace, "copies", ALL_PEERS)
    for block in range(blocks):
        if block > 0:
            row, row_scales = read_block(x, scales, block, items, scale_words, True, PAYLOAD, False)
        for step in range(RANKS):
            to = (me + 1 + step) % RANKS
            if td.max_of((dest == to).to(tl.int32), 0) != 0:
                slot = slot_of(td.data_at(ctx, half, to), me, token, most, slot_bytes, EXPERTS, RANKS)
                write_block(
                    row, row_scales, slot, slot + scales_begin, block, sent_items, sent_words,
                    PAYLOAD, True,
                )
    number = _number(ids_ptr, token, experts, K, EXPERTS, N)  # while the token's stores are in flight
    for step in range(RANKS):  # also to ranks without an expert of the token, which must know that
        to = (me + 1 + step) % RANKS
        slot = slot_of(td.data_at(ctx, half, to), me, token, most, slot_bytes, EXPERTS, RANKS)
        there = (slot + experts_begin).to(tl.pointer_type(tl.int32)) + choice
        tl.store(there, tl.where(dest == to, experts, -1), mask=(choice < K) & is_sent)
        tl.store(there + K, number, mask=(choice < K) & is_sent)
        tl.store((there + 2 * K).to(tl.pointer_type(tl.float32)), weights, mask=(choice < K) & is_sent)
    td.mark(trace, "pushes", ALL_PEERS)
    # The receiver of this token on this rank replaces these numbers by rows.
    tl.store(experts_at(tables, token, K, EXPERTS, RANKS) + choice, experts, mask=choice < K)
    tl.store(places_at(tables, token, num_tokens, K, EXPERTS, RANKS) + choice, number, mask=choice < K)
    # waiter: every rank's receiver of this token
    td.notify_all(ctx, td.signal_at(ctx, half, 0) + me * MAX_CHUNKS + token, signal, WITH_OWN=True)
