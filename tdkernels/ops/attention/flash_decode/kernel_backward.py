"""Backward kernel of flash_decode on one rank: dk and dv of its own keys, and its part of dq.

A program processes a range of blocks of keys of one entry and one head of the cache. It recomputes the scores of all
query rows, and the global lse turns them into the softmax weights over the keys of all ranks. Each program adds its dq
to its own buffer; the buffers are summed afterwards, in order.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.attention.flash_decode.kernel import _attention_mask, _capped, _first_blocks
from tdkernels.ops.attention.flash_decode.kernel_merge import query_rows
from tdkernels.ops.attention.flash_decode.kv_cache import FP8_NONE, cache_rows, key_rows, load_query, num_keys


@td.jit
def _add_rows(ptr, rows, there, D: tl.constexpr, FIRST: tl.constexpr, values):
    """Add ``values`` to columns from FIRST on of fp32 rows. No other program accesses these rows."""
    offs = FIRST + tl.arange(0, values.shape[1])
    at = rows[:, None] * D + offs[None, :]
    mask = there[:, None] & (offs < D)[None, :]
    tl.store(ptr + at, tl.load(ptr + at, mask=mask, other=0.0) + values, mask=mask)


@td.jit
def _store_keys(ptr, keys, there, stride, WIDTH: tl.constexpr, FIRST: tl.constexpr, values):
    """Store columns from FIRST on of the gradient of a block of keys."""
    offs = FIRST + tl.arange(0, values.shape[1])
    at = keys.to(tl.int64)[:, None] * stride + offs[None, :]
    values = td.from_float32(values, ptr.dtype.element_ty)
    tl.store(ptr + at, values, mask=there[:, None] & (offs < WIDTH)[None, :])


@td.jit(do_not_specialize=["heads", "capacity", "num_pages", "score_scale", "scale", "cap", "window"])
def flash_decode_backward_kernel(
    q_ptr, k_ptr, v_ptr, lens_ptr, after_ptr, table_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    heads, capacity, num_pages, score_scale, scale, cap, window, strides, TILE: tl.constexpr, PAGE: tl.constexpr,
):
    """Compute dk [B, capacity, heads, D], dv [B, capacity, heads, DV], and dq [splits, B, TQ, heads * G, D] per split.

    Program (b * heads + head, split) computes one entry, head and split.

    Args:
        after_ptr: Number of keys on later ranks, [B].
        delta_ptr: rowsum(do * o), minus the gradient of lse if there is one, [B, TQ, heads * G].
        dq_ptr: fp32, initialized with zeros.
        strides: (batch, sequence, head) of k, then of v, then the row stride of the block table.
        TILE: As for ``flash_decode_kernel``.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    TQ: tl.constexpr = TILE.queries
    G: tl.constexpr = TILE.group
    D: tl.constexpr = TILE.d
    D1: tl.constexpr = TILE.d1
    D2: tl.constexpr = TILE.d2
    DV: tl.constexpr = TILE.dv
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_table = strides
    entry, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    split, splits = tl.program_id(1), tl.num_programs(1)
    length = num_keys(lens_ptr, entry, True, capacity)
    after = tl.load(after_ptr + entry).to(tl.int32)
    first_block = _first_blocks(length, after, window, TQ, BLOCK_N, TILE.window)
    num_blocks = (length + BLOCK_N - 1) // BLOCK_N - first_block
    share = (num_blocks + splits - 1) // splits
    begin = first_block + split * share
    end = tl.minimum(begin + share, first_block + num_blocks)
    queries = (tl.num_programs(0) // heads).to(tl.int64) * (TQ * heads * G)
    dq_ptr += split * queries * D
    from_entry = tl.where(PAGE == 0, entry.to(tl.int64), 0)
    k_ptr += from_entry * stride_kb + head.to(tl.int64) * stride_kh
    v_ptr += from_entry * stride_vb + head.to(tl.int64) * stride_vh
    dk_ptr += (entry.to(tl.int64) * capacity * heads + head) * D
    dv_ptr += (entry.to(tl.int64) * capacity * heads + head) * DV
    columns = tl.arange(0, TILE.padded_dv)
    for block in range(begin, end):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        table = table_ptr + entry.to(tl.int64) * stride_table
        k_rows, there = key_rows(table, keys, keys < length, num_pages, stride_kb, stride_ks, PAGE)
        v_rows, _ = key_rows(table, keys, keys < length, num_pages, stride_vb, stride_vs, PAGE)
        WIDTH1: tl.constexpr = D if D < D1 else D1
        k1 = cache_rows(k_ptr, k_rows, there, WIDTH1, D1, FP8_NONE, False)
        v = cache_rows(v_ptr, v_rows, there, DV, TILE.padded_dv, FP8_NONE, False)
        dk1 = tl.full((BLOCK_N, D1), 0.0, tl.float32)
        dv = tl.full((BLOCK_N, TILE.padded_dv), 0.0, tl.float32)
        if D2:
            k2 = cache_rows(k_ptr + D1, k_rows, there, D - D1, D2, FP8_NONE, False)
            dk2 = tl.full((BLOCK_N, D2), 0.0, tl.float32)
        for from_row in range(0, TQ * G, BLOCK_M):
            row = from_row + tl.arange(0, BLOCK_M)
            is_row = row < TQ * G
            query = query_rows(entry, head, row, heads, G, TQ)
            q1 = load_query(q_ptr, query, is_row, D, 0, D1, FP8_NONE)
            do_mask = is_row[:, None] & (columns < DV)[None, :]
            do = tl.load(do_ptr + query[:, None] * DV + columns[None, :], mask=do_mask, other=0.0)
            lse = tl.load(lse2_ptr + query, mask=is_row, other=float("-inf"))
            delta = tl.load(delta_ptr + query, mask=is_row, other=0.0)
            scores = td.dot(q1, tl.trans(k1), tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), TILE.precision)
            if D2:
                q2 = load_query(q_ptr, query, is_row, D, D1, D2, FP8_NONE)
                scores = td.dot(q2, tl.trans(k2), scores, TILE.precision)
            scores = _capped(scores * score_scale, cap, TILE.soft_cap)
            visible = _attention_mask(keys, length, after, tl.where(is_row, row // G, -1), window, TQ, TILE.window)
            visible &= (lse > float("-inf"))[:, None]
            if PAGE:
                visible &= there[None, :]
            p = tl.exp2(tl.where(visible, scores - lse[:, None], float("-inf")))
            dp = td.dot(do, tl.trans(v), tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), TILE.precision)
            ds = p * (dp - delta[:, None]) * scale
            if TILE.soft_cap:
                ds *= 1.0 - (scores / cap) * (scores / cap)
            p_low, ds_low = td.from_float32(p, v.dtype), td.from_float32(ds, v.dtype)
            dv = td.dot(tl.trans(p_low), do, dv, TILE.precision)
            dk1 = td.dot(tl.trans(ds_low), q1, dk1, TILE.precision)
            dq1 = td.dot(ds_low, k1, tl.full((BLOCK_M, D1), 0.0, tl.float32), TILE.precision)
            _add_rows(dq_ptr, query, is_row, D, 0, dq1)
            if D2:
                dk2 = td.dot(tl.trans(ds_low), q2, dk2, TILE.precision)
                dq2 = td.dot(ds_low, k2, tl.full((BLOCK_M, D2), 0.0, tl.float32), TILE.precision)
                _add_rows(dq_ptr, query, is_row, D, D1, dq2)
        _store_keys(dk_ptr, keys, there, heads * D, WIDTH1, 0, dk1)
        if D2:
            _store_keys(dk_ptr, keys, there, heads * D, D, D1, dk2)
        _store_keys(dv_ptr, keys, there, heads * DV, DV, 0, dv)
