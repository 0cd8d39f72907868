"""Attention of query rows over parts of a latent cache (MLA) on Hopper, in Gluon; method "split" of flash_decode.

A key has 576 columns: 512 latent columns, which are its value as well, and 64 rotary ones. A program computes a tile of
64 query rows. The fp32 output of a tile, 64 x 512, fills half of the registers of an SM, so two warp groups share it:
"left" has columns 0 to 255, "right" columns 256 to 511. Keys arrive in blocks of ``BLOCK``; left computes the scores
and weights of the blocks with even numbers, right those of the odd blocks. Each warp group needs the weights of both,
and passes its own to the other one through shared memory. Per pair of blocks:

    left    weights 0  -> publish | o += weights 0 @ v 0 | scores of the next even block | o += weights 1 @ v 1
    right   o += weights 0 @ v 0 | weights 1 -> publish  | o += weights 1 @ v 1 | scores of the next odd block

So one warp group computes weights while the tensor cores work for the other one. A third partition loads keys with TMA,
and converts those of an fp8 cache (``conversion``), in two pieces per block: latent columns 0 to 255 with the rotary
columns (freed by left), and 256 to 511 (freed by right). Four blocks fit in shared memory.

The maximum of a row is updated only when a score, to base 2, exceeds it by more than 8 (``LAZY``). Until then weights
are at most 2**8, which changes neither the precision of a product nor that of the fp32 sums, and the output is not
rescaled. Warps skip rescaling if all their factors are 1.

ptxas executes all products one after another if an instruction changes an accumulator while a product of the same warp
group is in flight. So outputs are rescaled only after a wait for all of them.

The work is divided as in ``kernel_split``, into pairs of blocks. This kernel does not communicate.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.lang.gluon_memory import reinterpret
from tdkernels.ops.attention.flash_decode.latent.conversion import convert_partition
from tdkernels.ops.attention.flash_decode.latent.layout import (
    BLOCK,
    BUFFERS,
    CONSUMER_REGISTERS,
    FP8_CONSUMER_REGISTERS,
    FP8_SCALED,
    FREE_A,
    FREE_B,
    HALF,
    LATENT,
    NUM_BARRIERS,
    NUM_VECTORS,
    PAIRS,
    QUERY,
    QUERY_FREE,
    QUERY_RAW,
    ROTARY,
    ROWS,
    SUMS,
    output_layout,
    rescale,
    scores_layout,
)
from tdkernels.ops.attention.flash_decode.latent.loading import (
    clear,
    first_part,
    is_there,
    load_partition,
    part_at,
)
from tdkernels.ops.attention.flash_decode.latent.weights import (
    as_operand,
    begin_part,
    mask,
    publish,
    start_scores,
    store_part,
    take,
    weights_of,
)

# ---- the warp group of even blocks and columns 0 to 255 ----

@gluon.jit
def _left_weights(
    call, memory, bars, tile, scores, there, pair, turn, maximum, state, TQ: gl.constexpr, PAGE: gl.constexpr
):
    """Compute and publish the weights of an even block. ``maximum`` is that of the output so far.

    state: (maxima of the sums, sums)
    """
    _, length, limits = tile
    scale = call[5]
    own, total = state
    scores = mask(scores, 2 * pair, length, limits, there, TQ, PAGE)
    dtype: gl.constexpr = memory[5].dtype
    weights, added, factors, new = weights_of(scores, scale, gl.max(scores, 1) * scale, maximum, dtype)
    publish(memory, bars, turn, weights, factors, new, 0)
    total = total * gl.exp2(own - gl.where(new == float("-inf"), 0.0, new)) + added
    return weights, factors, (new, total)


@gluon.jit
def _left_step(
    call, memory, bars, tile, q_rotary, o, weights, factors, pair, turn, state,
    TQ: gl.constexpr, PAGE: gl.constexpr, LAST: gl.constexpr,
):
    """Add the values of a pair of blocks, and unless it is the LAST, compute the weights of the next even block."""
    entry, length, _ = tile
    k_left = memory[2]
    even = (turn % PAIRS) * 2
    if LAST:
        clear(k_left.index(even), 2 * pair, length, PAGE)
    o = rescale(o, factors)
    product = warpgroup_mma(as_operand(weights), k_left.index(even), o, is_async=True)
    if LAST:
        o = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(bars.index(FREE_A + even), count=1)
    else:
        there = is_there(call, entry, 2 * pair + 2, length, PAGE)
        scores = start_scores(memory, bars, q_rotary, turn + 1, 0)
        product = warpgroup_mma_wait(3, deps=[product])
        mbarrier.arrive(bars.index(FREE_A + even), count=1)
        scores, o = warpgroup_mma_wait(0, deps=[scores, product])
    theirs, their_factors, maximum = take(memory, bars, turn, 1)
    if LAST:
        clear(k_left.index(even + 1), 2 * pair + 1, length, PAGE)
    o = rescale(o, their_factors)
    product = warpgroup_mma(theirs, k_left.index(even + 1), o, is_async=True)
    if not LAST:
        weights, factors, state = _left_weights(
            call, memory, bars, tile, scores, there, pair + 1, turn + 1, maximum, state, TQ, PAGE
        )
    o = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(bars.index(FREE_A + even + 1), count=1)
    return o, weights, factors, maximum, state


@gluon.jit
def left_partition(
    call, memory, bars, work, TQ: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    FP8: gl.constexpr,
):
    """Partition of the even blocks and of columns 0 to 255 of the output."""
    entry, block_r, first, pos, end, _ = work
    of_row: gl.constexpr = gl.SliceLayout(1, scores_layout())
    turn = 0
    part = 0
    while pos < end:
        tile, q_rotary = begin_part(call, memory, bars, entry, block_r, part, TQ, GROUP, 0, FP8)
        length = tile[1]
        first_pair, past_pair, stop, ends, number = part_at(call, work, first, pos, entry, length, CHUNK)
        maximum = gl.full((ROWS,), float("-inf"), gl.float32, of_row)
        state = maximum, gl.zeros((ROWS,), gl.float32, of_row)
        o = gl.zeros((ROWS, HALF), gl.float32, output_layout())
        there = is_there(call, entry, 2 * first_pair, length, PAGE)
        mbarrier.wait(bars.index(QUERY), part & 1)
        scores = warpgroup_mma_wait(0, deps=[start_scores(memory, bars, q_rotary, turn, 0)])
        weights, factors, state = _left_weights(
            call, memory, bars, tile, scores, there, first_pair, turn, maximum, state, TQ, PAGE
        )
        for pair in range(first_pair, past_pair - 1):
            o, weights, factors, maximum, state = _left_step(
                call, memory, bars, tile, q_rotary, o, weights, factors, pair, turn, state, TQ, PAGE, False
            )
            turn += 1
        pair = past_pair - 1
        o, weights, factors, maximum, state = _left_step(
            call, memory, bars, tile, q_rotary, o, weights, factors, pair, turn, state, TQ, PAGE, True
        )
        turn += 1
        mbarrier.arrive(bars.index(QUERY_FREE), count=1)
        own, total = state
        total *= gl.exp2(own - gl.where(maximum == float("-inf"), 0.0, maximum))
        store_part(call, memory, bars, o, maximum, total, number, part, 0, FP8)
        if ends:
            first = stop
            entry += 1
        pos = stop
        part += 1


# ---- the warp group of odd blocks and columns 256 to 511 ----


@gluon.jit
def _right_step(
    call, memory, bars, tile, q_rotary, o, scores, there, pair, turn, state,
    TQ: gl.constexpr, PAGE: gl.constexpr, LAST: gl.constexpr,
):
    """Compute the weights of an odd block, add the values of the pair, and compute the next scores unless it is LAST.

    state: (maxima, sums)
    """
    entry, length, limits = tile
    scale = call[5]
    k_right = memory[3]
    own, total = state
    even = (turn % PAIRS) * 2
    scores = mask(scores, 2 * pair + 1, length, limits, there, TQ, PAGE)
    top = gl.max(scores, 1) * scale
    theirs, their_factors, maximum = take(memory, bars, turn, 0)
    if LAST:
        clear(k_right.index(even), 2 * pair, length, PAGE)
    o = rescale(o, their_factors)
    product = warpgroup_mma(theirs, k_right.index(even), o, is_async=True)
    dtype: gl.constexpr = memory[5].dtype
    weights, added, factors, new = weights_of(scores, scale, top, maximum, dtype)
    publish(memory, bars, turn, weights, factors, new, 1)
    total = total * gl.exp2(own - gl.where(new == float("-inf"), 0.0, new)) + added
    o = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(bars.index(FREE_B + even), count=1)
    if LAST:
        clear(k_right.index(even + 1), 2 * pair + 1, length, PAGE)
    o = rescale(o, factors)
    product = warpgroup_mma(as_operand(weights), k_right.index(even + 1), o, is_async=True)
    if LAST:
        o = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(bars.index(FREE_B + even + 1), count=1)
    else:
        there = is_there(call, entry, 2 * pair + 3, length, PAGE)
        scores = start_scores(memory, bars, q_rotary, turn + 1, 1)
        product = warpgroup_mma_wait(3, deps=[product])
        mbarrier.arrive(bars.index(FREE_B + even + 1), count=1)
        scores, o = warpgroup_mma_wait(0, deps=[scores, product])
    return o, scores, there, (new, total)


@gluon.jit
def right_partition(
    call, memory, bars, work, TQ: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    FP8: gl.constexpr,
):
    """Partition of the odd blocks and of columns 256 to 511 of the output."""
    entry, block_r, first, pos, end, _ = work
    of_row: gl.constexpr = gl.SliceLayout(1, scores_layout())
    turn = 0
    part = 0
    while pos < end:
        tile, q_rotary = begin_part(call, memory, bars, entry, block_r, part, TQ, GROUP, 1, FP8)
        length = tile[1]
        first_pair, past_pair, stop, ends, number = part_at(call, work, first, pos, entry, length, CHUNK)
        state = gl.full((ROWS,), float("-inf"), gl.float32, of_row), gl.zeros((ROWS,), gl.float32, of_row)
        o = gl.zeros((ROWS, HALF), gl.float32, output_layout())
        there = is_there(call, entry, 2 * first_pair + 1, length, PAGE)
        mbarrier.wait(bars.index(QUERY), part & 1)
        scores = warpgroup_mma_wait(0, deps=[start_scores(memory, bars, q_rotary, turn, 1)])
        for pair in range(first_pair, past_pair - 1):
            o, scores, there, state = _right_step(
                call, memory, bars, tile, q_rotary, o, scores, there, pair, turn, state, TQ, PAGE, False
            )
            turn += 1
        pair = past_pair - 1
        o, scores, there, state = _right_step(
            call, memory, bars, tile, q_rotary, o, scores, there, pair, turn, state, TQ, PAGE, True
        )
        turn += 1
        mbarrier.arrive(bars.index(QUERY_FREE), count=1)
        store_part(call, memory, bars, o, state[0], state[1], number, part, 1, FP8)
        if ends:
            first = stop
            entry += 1
        pos = stop
        part += 1


# ---- the kernel ----


@gluon.jit
def _barriers(FP8: gl.constexpr):
    """Return the initialized barriers: each waits for one arrival, or for one of each warp group."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(QUERY):
        mbarrier.init(bars.index(number), count=1)
    mbarrier.init(bars.index(QUERY), count=2 if FP8 else 1)
    mbarrier.init(bars.index(QUERY_FREE), count=2)
    mbarrier.init(bars.index(SUMS), count=2)
    if FP8:
        for number in gl.static_range(QUERY_RAW, NUM_BARRIERS):
            mbarrier.init(bars.index(number), count=1)
    fence_async_shared()
    return bars


@gluon.jit
def _shared_memory(dtype: gl.constexpr, FP8: gl.constexpr):
    """Return the tuple ``memory`` of all partitions, see ``loading``."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK, element_bitwidth=16, rank=2)
    latent_dtype: gl.constexpr = gl.float16 if FP8 else dtype
    q_left = gl.allocate_shared_memory(latent_dtype, [ROWS, HALF], swizzled)
    q_right = gl.allocate_shared_memory(latent_dtype, [ROWS, HALF], swizzled)
    k_left = gl.allocate_shared_memory(latent_dtype, [BUFFERS, BLOCK, HALF], swizzled)
    k_right = gl.allocate_shared_memory(latent_dtype, [BUFFERS, BLOCK, HALF], swizzled)
    k_rotary = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK, ROTARY], swizzled)
    weights = gl.allocate_shared_memory(latent_dtype, [2, ROWS, BLOCK], narrow)
    vectors = gl.allocate_shared_memory(gl.float32, [NUM_VECTORS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if FP8:
        raw: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        raw_left = reinterpret(k_left, gl.uint8, [2 * BUFFERS, BLOCK, HALF], raw)
        raw_right = reinterpret(k_right, gl.uint8, [2 * BUFFERS, BLOCK, HALF], raw)
        q_rotary = gl.allocate_shared_memory(dtype, [ROWS, ROTARY], swizzled)
        return q_left, q_right, k_left, k_right, k_rotary, weights, vectors, (raw_left, raw_right), q_rotary
    else:
        return q_left, q_right, k_left, k_right, k_rotary, weights, vectors


_NOT_SPECIALIZED = [
    "stride_table", "num_pages", "lse_at", "scale", "B", "capacity", "shares", "slots", "tiles_of_entry",
]


@gluon_jit(do_not_specialize=_NOT_SPECIALIZED)
def latent_kernel(
    q_ptr, latent, rotary, queries, lens_ptr, table_ptr, stride_table, num_pages, k_scale_ptr, v_scale_ptr, scratch_ptr,
    lse_at, scale, B, capacity, shares, slots, tiles_of_entry, TQ: gl.constexpr, GROUP: gl.constexpr, BP: gl.constexpr,
    PAGE: gl.constexpr, CHUNK: gl.constexpr = 0, FP8: gl.constexpr = 0, ROPE_AT: gl.constexpr = LATENT,
):
    """Store the parts of o and lse in scratch memory, numbered as in ``kernel_split``.

    q_ptr: q [B * TQ * GROUP, 576]
    latent, rotary: descriptors of the cache, for [1, BLOCK, 256] and [1, BLOCK, 64] elements: [B, capacity, columns],
        or [num_pages, PAGE, columns]
    queries: a descriptor of q for [ROWS, 256] elements
    scratch_ptr: o [parts, ROWS, 512]; from element ``lse_at`` on, lse [parts, ROWS] to base 2; fp32
    scale: factor of the scores, positive, including log2(e)
    tiles_of_entry: blocks of ROWS query rows of an entry
    PAGE: keys per page, a multiple of BLOCK; 0 for a dense cache
    slots, CHUNK: as in ``kernel_split``
    FP8: 1 if ``latent`` is e4m3, as bytes, 2 if it also has scales, otherwise 0
    ROPE_AT: the first column of ``rotary`` to read
    """
    # As ``td.launch_dependents``: the second launch is a programmatic dependent launch.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    memory = _shared_memory(dtype, FP8)
    bars = _barriers(FP8)
    work = first_part(lens_ptr, B, capacity, shares, tiles_of_entry, BP, CHUNK)
    table = table_ptr, stride_table, num_pages
    scales = scale, scale  # not used, but partitions need a tuple of the same form
    if FP8 == FP8_SCALED:
        scales = gl.load(k_scale_ptr), gl.load(v_scale_ptr)
    call = q_ptr, lens_ptr, table, scratch_ptr, lse_at, scale, B, capacity, (shares, slots), scales
    keys = latent, rotary, queries
    registers: gl.constexpr = FP8_CONSUMER_REGISTERS if FP8 else CONSUMER_REGISTERS
    if FP8:
        gl.warp_specialize(
            [
                (convert_partition, (call, keys, memory, bars, work, TQ, GROUP, PAGE, CHUNK, ROPE_AT)),
                (left_partition, (call, memory, bars, work, TQ, GROUP, PAGE, CHUNK, FP8)),
                (right_partition, (call, memory, bars, work, TQ, GROUP, PAGE, CHUNK, FP8)),
            ],
            [4, 4],
            [registers, registers],
        )
    else:
        gl.warp_specialize(
            [
                (load_partition, (call, keys, memory, bars, work, TQ, GROUP, PAGE, CHUNK, ROPE_AT)),
                (left_partition, (call, memory, bars, work, TQ, GROUP, PAGE, CHUNK, FP8)),
                (right_partition, (call, memory, bars, work, TQ, GROUP, PAGE, CHUNK, FP8)),
            ],
            [4, 4],
            [registers, registers],
        )
