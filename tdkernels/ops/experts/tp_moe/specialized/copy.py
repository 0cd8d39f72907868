"""Copy tokens to the rows of their experts, in partitions of two or four warps."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import signal_at
from tdkernels.lang.gluon_signals import add_release_by_warps, item_of_warps, request_number_by_warps
from tdkernels.lang.memory import pointer_to
from tdkernels.lang.signals import wait, wait_plan
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_TOKENS
from tdkernels.ops.experts.tp_moe.kernel_route import chunk_at_turn, first_turn_of, stage_of_turn

_TOKENS = gl.constexpr(BLOCK_TOKENS)  # of a work item; a chunk has a multiple
_WORDS = gl.constexpr(256)  # 64-bit words of a token that are copied at a time


@gluon.jit
def _copy_item(
    tokens_at, rows_at, rows_ptr, token, end, num_words, CHOICES: gl.constexpr, WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Copy _TOKENS tokens of a rank from ``token`` on, as far as they are before ``end``, to their rows.

    tokens_at, rows_at: addresses of the rank's tokens, and of the rows of all experts
    rows_ptr: the row of each assignment of the rank's tokens, or -1
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    for first in range(0, _TOKENS, AT_ONCE):
        tokens = token + first + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
        there = tokens < end
        for word in range(0, num_words, _WORDS):
            words = word + gl.arange(0, _WORDS, layout=gl.SliceLayout(0, layout))
            inside = (words < num_words)[None, :]
            at = pointer_to(tokens_at, tl.int64) + tokens[:, None].to(gl.int64) * num_words + words[None, :]
            block = gl.load(at, mask=there[:, None] & inside)
            for j in gl.static_range(CHOICES):
                row = gl.load(rows_ptr + tokens.to(gl.int64) * CHOICES + j, mask=there, other=-1)
                to = pointer_to(rows_at, tl.int64) + row[:, None].to(gl.int64) * num_words + words[None, :]
                gl.store(to, block, mask=(row >= 0)[:, None] & inside)


@gluon.jit
def copy_tokens(
    ctx, places, sizes, half, signal, counters, first_turn, last_turn, me, CHOICES: gl.constexpr, WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Copy the tokens of turns ``first_turn`` to ``last_turn`` - 1 to their rows, as they arrive.

    The partitions of all programs share the work. For turns see ``kernel_route``.

    places: (address of this rank's tokens, of the slot of rank 0, of the rows of all experts; pointer to the row of
        each assignment, or -1)
    sizes: (tokens of a rank, bytes of a row, bytes of a slot, tokens of a chunk, chunks of a rank, ranks, stages)
    counters: (pointer to the number of items of these turns that have been fetched, an int32 zero; ``done_ptr``)
    AT_ONCE: tokens that are copied at a time: as many as fit in the registers
    """
    x_at, slots_at, rows_at, rows_ptr = places
    M_shard, row_bytes, slot_bytes, chunk_rows, num_chunks, ranks, stages = sizes
    counter_ptr, done_ptr = counters
    num_words = row_bytes // 16 * 2  # so that the compiler knows that it is even
    of_turn = chunk_rows // _TOKENS  # also of a chunk with fewer tokens
    num_items = gl.where(signal == 0, 0, (last_turn - first_turn) * of_turn)
    item = item_of_warps(request_number_by_warps(counter_ptr, WARPS))
    while item < num_items:
        answer = request_number_by_warps(counter_ptr, WARPS)
        turn = first_turn + item // of_turn
        source, chunk = chunk_at_turn(turn, me, ranks, num_chunks)
        tokens_at = x_at
        if source != me:
            # producer: push_partition of the source
            wait_plan(ctx, signal_at(ctx, half, source * num_chunks + chunk), signal, source)
            tokens_at = slots_at + source.to(gl.int64) * slot_bytes
        _copy_item(
            tokens_at, rows_at, rows_ptr + source.to(gl.int64) * M_shard * CHOICES,
            chunk * chunk_rows + item % of_turn * _TOKENS, M_shard, num_words, CHOICES, WARPS, AT_ONCE,
        )
        stage = stage_of_turn(turn, stages, ranks, num_chunks)
        add_release_by_warps(done_ptr + stage, WARPS)  # waiter: await_copies
        item = item_of_warps(answer)


@gluon.jit
def await_copies(ctx, stage, ready, waits):
    """Wait until the rows of all stages up to ``stage`` can be loaded. Return the number of these stages.

    ready: number of stages for which this partition of one warp has waited
    waits: (``done_ptr``, ``sizes`` of ``copy_tokens``, rank)
    """
    done_ptr, sizes, me = waits
    _, _, _, chunk_rows, num_chunks, ranks, stages = sizes
    while ready <= stage:
        turns = first_turn_of(ready + 1, stages, ranks, num_chunks) - first_turn_of(ready, stages, ranks, num_chunks)
        expected = turns * (chunk_rows // _TOKENS)
        wait(ctx, done_ptr + ready, expected, me, SCOPE="gpu", FOR_TMA=True)  # producer: copy_tokens of this rank
        ready += 1
    return ready
