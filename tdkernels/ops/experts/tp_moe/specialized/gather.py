"""The partition of moe_ag_gemm that loads tiles. It gathers the tokens of a tile from where they lie.

A token lies among the tokens of this rank, or in the slot of its rank. TMA loads blocks of consecutive rows only, so
the threads of two warps copy the rows of a tile ("cp.async"), 16 bytes at a time. TMA loads the weight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tdkernels.lang.context import signal_at
from tdkernels.lang.gluon_memory import async_load
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import item_of_warps, request_by_warps, wait_each
from tdkernels.lang.memory import pointer_to
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.specialized.layout import BLOCK_N, FULL, HALF_M, STAGES, STEP_BYTES, WARPS
from tdkernels.ops.common.specialized.load import await_stage, begin_item, end_items, load_weight
from tdkernels.ops.experts.grouped_gemm.specialized.partitions import block_of_tile
from tdkernels.ops.experts.tp_moe.kernel_route import chunk_at_turn, first_turn_of
from tdkernels.ops.experts.tp_moe.specialized.tiles import ends_of_stages, place_by_stage, place_of

_WARPS = gl.constexpr(WARPS.value[1])
# At the barrier FULL: the announcement of the bytes of the weight, and each thread's copies.
ARRIVALS = gl.constexpr(1 + 32 * _WARPS.value)
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [_WARPS.value], [0]))  # layout of a vector
_COPY_BYTES = gl.constexpr(16)


@gluon.constexpr_function
def _layout(bits):
    """Return the layout of rows of a step, of elements of ``bits`` bits. A thread copies 16 bytes of some rows."""
    elements, threads = _COPY_BYTES.value * 8 // bits, STEP_BYTES.value // _COPY_BYTES.value
    return gl.BlockedLayout([1, elements], [32 // threads, threads], [_WARPS.value, 1], [1, 0])


# ``sizes`` of all functions: (tokens of a rank, bytes of a row, bytes of a slot, tokens of a chunk, chunks of a rank,
# ranks, stages)


@gluon.jit
def await_tokens(ctx, stage, ready, waits):
    """Wait until the tokens of all stages up to ``stage`` have arrived. Return the number of these stages.

    ready: number of stages for which this partition has waited
    waits: (half, signal, ``sizes``, rank)
    """
    half, signal, sizes, me = waits
    _, _, _, _, num_chunks, ranks, stages = sizes
    while ready <= stage:
        # This rank's chunks, which come first, have no signal.
        first = gl.maximum(first_turn_of(ready, stages, ranks, num_chunks), num_chunks)
        end = first_turn_of(ready + 1, stages, ranks, num_chunks)
        for turn in range(first, end, 32 * _WARPS):
            turns = turn + gl.arange(0, 32 * _WARPS, layout=VECTOR)
            there = turns < end
            source, chunk = chunk_at_turn(gl.minimum(turns, end - 1), me, ranks, num_chunks)
            # producer: push_partition of the source
            wait_each(ctx, signal_at(ctx, half, 0) + source * num_chunks + chunk, signal, source, there)
        ready += 1
    return ready


@gluon.jit
def _assignments(choices_ptr, row, count, me, sizes, CHOICES: gl.constexpr):
    """Return the assignments of the rows of a tile, in two halves. Rows from ``count`` on get one of this rank."""
    rows = gl.arange(0, HALF_M, layout=VECTOR)
    some = me * sizes[0] * CHOICES
    low = gl.load(choices_ptr + row + rows, mask=rows < count, other=some)
    return low, gl.load(choices_ptr + row + HALF_M + rows, mask=HALF_M + rows < count, other=some)


@gluon.jit
def _pointers(assignments, places, sizes, me, DTYPE: gl.constexpr, CHOICES: gl.constexpr):
    """Return pointers to the first elements of the tokens of assignments, in the layout of a step.

    places: addresses (of this rank's tokens, of the slot of rank 0)
    """
    M_shard, row_bytes, slot_bytes, _, _, _, _ = sizes
    layout: gl.constexpr = _layout(DTYPE.primitive_bitwidth)
    tokens = assignments // CHOICES
    source = tokens // M_shard
    shard = gl.where(source == me, places[0], places[1] + source.to(gl.int64) * slot_bytes)
    tokens_at = shard + (tokens - source * M_shard).to(gl.int64) * row_bytes
    columns = gl.arange(0, STEP_BYTES * 8 // DTYPE.primitive_bitwidth, layout=gl.SliceLayout(0, layout))
    there = gl.convert_layout(tokens_at, gl.SliceLayout(1, layout))
    return pointer_to(there, DTYPE)[:, None] + columns[None, :]


@gluon.jit
def _load_steps(w_desc, rows, K, memory, bars, block, is_whole, turn, first, last, W_IS_KN: gl.constexpr):
    """``load_steps`` for rows whose pointers are given: (of the first HALF_M rows, of the others)."""
    x = memory[0]
    BLOCK_K: gl.constexpr = x.shape[2]
    _, _, left, right, above = block
    columns = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, _layout(x.dtype.primitive_bitwidth)))
    for step in range(first, last):
        stage = await_stage(bars, turn)
        full = bars.index(FULL + stage)
        k = step * BLOCK_K
        mbarrier.expect(full, BLOCK_N * STEP_BYTES)
        load_weight(w_desc, above + k, left, full, memory, stage, 0, True, W_IS_KN)
        load_weight(w_desc, above + k, right, full, memory, stage, 1, True, W_IS_KN)
        inside = (k + columns < K)[None, :]
        async_load(x.index(2 * stage), rows[0] + k, mask=inside)
        if is_whole:
            async_load(x.index(2 * stage + 1), rows[1] + k, mask=inside)
        async_copy.mbarrier_arrive(full, increment_count=False)
        turn += 1
    return turn


@gluon.jit
def gather_partition(
    ctx, tokens, w_desc, memory, bars, tiles, problem, steps, waits, trace_ptr, CHOICES: gl.constexpr,
    PAIR: gl.constexpr, W_IS_KN: gl.constexpr,
):
    """Fetch the tiles of each stage, wait for their tokens, and load their operands.

    tokens: (``places`` of ``_pointers``, pointer to the assignment of each row)
    waits: as for ``await_tokens``

    The next tile is requested 2 * STAGES steps before the end of the current one. Its place and assignments are loaded
    STAGES steps before that end. Neither delays loads, because the tensor cores still have loaded steps to multiply.
    """
    places, choices_ptr = tokens
    _, signal, sizes, me = waits
    _, _, _, _, _, _, stages = sizes
    N, K = problem
    ends = ends_of_stages(tiles, VECTOR)
    num_items = gl.where(signal == 0, 0, gl.max(ends, 0))
    dtype: gl.constexpr = memory[0].dtype
    early, late = gl.maximum(steps - 2 * STAGES, 0), gl.maximum(steps - STAGES, 0)
    turn = 0
    ready = 0
    item = item_of_warps(request_by_warps(ctx, 0, _WARPS))
    stage, number, pid_n, expert, row, count = place_of(item, num_items, ends, tiles, place_by_stage)
    low, high = _assignments(choices_ptr, row, count, me, sizes, CHOICES)
    while item < num_items:
        is_whole = count > HALF_M
        trace = trace_ptr, number
        mark_by_warps(trace, "starts", _WARPS)
        if trace_ptr is not None:
            if ready <= stage:
                mark_by_warps(trace, "waits", _WARPS, ALL_PEERS)
        ready = await_tokens(ctx, stage, ready, waits)
        mark_by_warps(trace, "multiplies", _WARPS)
        rows = (
            _pointers(low, places, sizes, me, dtype, CHOICES), _pointers(high, places, sizes, me, dtype, CHOICES),
        )
        begin_item(memory, bars, 2 * number + gl.where(is_whole, 0, 1), (row, pid_n, expert), turn, VECTOR)
        block = block_of_tile(row, expert, pid_n, N, K, PAIR, W_IS_KN)
        turn = _load_steps(w_desc, rows, K, memory, bars, block, is_whole, turn, 0, early, W_IS_KN)
        answer = request_by_warps(ctx, 0, _WARPS)
        turn = _load_steps(w_desc, rows, K, memory, bars, block, is_whole, turn, early, late, W_IS_KN)
        item = item_of_warps(answer)
        stage, number, pid_n, expert, row, count = place_of(item, num_items, ends, tiles, place_by_stage)
        low, high = _assignments(choices_ptr, row, count, me, sizes, CHOICES)
        turn = _load_steps(w_desc, rows, K, memory, bars, block, is_whole, turn, late, steps, W_IS_KN)
    end_items(memory, bars, turn, ARRIVALS, VECTOR)
    # Stages may have no tiles. Each call waits for all peers (invariant 3), and a later kernel may read all tokens.
    await_tokens(ctx, stages - 1, ready, waits)
