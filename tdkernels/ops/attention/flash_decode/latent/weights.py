"""Functions of both warp groups of ``latent_kernel``: scores, weights and their exchange, and the end of a part."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from tdkernels.ops.attention.flash_decode.latent.conversion import convert_query, rotary_query
from tdkernels.ops.attention.flash_decode.latent.layout import (
    BLOCK,
    FACTOR,
    FP8_SCALED,
    HALF,
    KEYS_A,
    KEYS_B,
    LATENT,
    LAZY,
    MAXIMUM,
    PAIRS,
    READY,
    ROWS,
    SUM,
    SUMS,
    TAKEN,
    output_layout,
    scores_layout,
)
from tdkernels.ops.attention.flash_decode.latent.loading import length_of


@gluon.jit
def _limits(length, block_r, TQ: gl.constexpr, GROUP: gl.constexpr):
    """Return the last visible key of each row of a tile."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores_layout()))
    return length - TQ + (block_r * ROWS + rows) // GROUP


@gluon.jit
def begin_part(
    call, memory, bars, entry, block_r, part, TQ: gl.constexpr, GROUP: gl.constexpr, ODD: gl.constexpr,
    FP8: gl.constexpr,
):
    """Return (tile, rotary columns of the queries) for a part of an entry. With an fp8 cache, convert half of a query.

    tile: (entry, number of its keys, last visible key of each row)
    """
    q_ptr, lens_ptr, _, _, _, _, _, capacity, _, _ = call
    length = length_of(lens_ptr, entry, capacity)
    rows = TQ * GROUP - block_r * ROWS
    row = entry * (TQ * GROUP) + block_r * ROWS
    if FP8:
        convert_query(call, memory, bars, row, rows, part, ODD, FP8)
        q_rotary = memory[8]
    else:
        # As an operand in registers, which are read faster than shared memory.
        q_rotary = rotary_query(q_ptr, row, rows, gl.DotOperandLayout(0, scores_layout(), 2))
    return (entry, length, _limits(length, block_r, TQ, GROUP)), q_rotary


@gluon.jit
def start_scores(memory, bars, q_rotary, turn, ODD: gl.constexpr):
    """Start the products of the queries and a block of keys, as its pieces arrive: three products in flight."""
    q_left, q_right, k_left, k_right, k_rotary = memory[0], memory[1], memory[2], memory[3], memory[4]
    phase = (turn // PAIRS) & 1
    buffer = (turn % PAIRS) * 2 + ODD
    scores = gl.zeros((ROWS, BLOCK), gl.float32, scores_layout())
    if ODD:
        mbarrier.wait(bars.index(KEYS_B + buffer), phase)
        scores = warpgroup_mma(q_right, k_right.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(KEYS_A + buffer), phase)
        scores = warpgroup_mma(q_rotary, k_rotary.index(buffer).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(q_left, k_left.index(buffer).permute((1, 0)), scores, is_async=True)
    else:
        mbarrier.wait(bars.index(KEYS_A + buffer), phase)
        scores = warpgroup_mma(q_rotary, k_rotary.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_left, k_left.index(buffer).permute((1, 0)), scores, is_async=True)
        mbarrier.wait(bars.index(KEYS_B + buffer), phase)
        scores = warpgroup_mma(q_right, k_right.index(buffer).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def mask(scores, block, length, limits, there, TQ: gl.constexpr, PAGE: gl.constexpr):
    """Mask keys that are not in this block, those after the limit of a row, and all if the block is not ``there``."""
    begin = block * BLOCK
    if PAGE:
        length = gl.where(there, length, 0)
        limits = gl.where(there, limits, -1)
    if begin + BLOCK > length - TQ + 1:
        keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, scores_layout()))
        keys += begin if PAGE else gl.minimum(begin, length - BLOCK)  # as in ``place``
        scores = gl.where((keys >= begin)[None, :] & (keys[None, :] <= limits[:, None]), scores, float("-inf"))
    return scores


@gluon.jit
def weights_of(scores, scale, top, maximum, dtype: gl.constexpr):
    """Return (weights in ``dtype``, their sums, factors of earlier sums, new maxima) of scores with row maxima ``top``.

    scale: factor of the scores, with log2(e)
    maximum: maxima so far
    """
    new = gl.where(top > maximum + LAZY, top, maximum)
    base = gl.where(new == float("-inf"), 0.0, new)
    weights = gl.exp2(scores * scale - base[:, None])
    return weights.to(dtype), gl.sum(weights, 1), gl.exp2(maximum - base), new


@gluon.jit
def publish(memory, bars, turn, weights, factors, maximum, ODD: gl.constexpr):
    """Pass the weights of this warp group to the other one."""
    shared_weights, vectors = memory[5], memory[6]
    mbarrier.wait(bars.index(TAKEN + ODD), (turn & 1) ^ 1)
    shared_weights.index(ODD).store(weights)
    vectors.index(FACTOR + ODD).store(factors)
    vectors.index(MAXIMUM + ODD).store(maximum)
    mbarrier.arrive(bars.index(READY + ODD), count=1)


@gluon.jit
def take(memory, bars, turn, OF: gl.constexpr):
    """Wait for the weights of the other warp group. Return (weights as an operand, factors of the output, maxima)."""
    shared_weights, vectors = memory[5], memory[6]
    mbarrier.wait(bars.index(READY + OF), turn & 1)
    weights = shared_weights.index(OF).load(gl.DotOperandLayout(0, output_layout(), 2))
    factors = vectors.index(FACTOR + OF).load(gl.SliceLayout(1, output_layout()))
    maximum = vectors.index(MAXIMUM + OF).load(gl.SliceLayout(1, scores_layout()))
    mbarrier.arrive(bars.index(TAKEN + OF), count=1)
    return weights, factors, maximum


@gluon.jit
def as_operand(weights):
    """Return weights of this warp group in the layout of an operand."""
    return gl.convert_layout(weights, gl.DotOperandLayout(0, output_layout(), 2))


@gluon.jit
def store_part(call, memory, bars, o, maximum, total, number, part, ODD: gl.constexpr, FP8: gl.constexpr):
    """Add the sums of both warp groups, and store this one's columns of part ``number`` in scratch memory."""
    scratch_ptr, lse_at = call[3], call[4]
    vectors = memory[6]
    layout: gl.constexpr = gl.SliceLayout(1, output_layout())
    vectors.index(SUM + ODD).store(total)
    mbarrier.arrive(bars.index(SUMS), count=1)
    mbarrier.wait(bars.index(SUMS), part & 1)
    total = vectors.index(SUM).load(layout) + vectors.index(SUM + 1).load(layout)
    nonempty = total > 0.0
    divisor = gl.where(nonempty, total, 1.0)
    rows = number.to(gl.int64) * ROWS + gl.arange(0, ROWS, layout=layout)
    columns = ODD * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, output_layout()))
    o = o / divisor[:, None]
    if FP8 == FP8_SCALED:
        o *= call[9][1]
    gl.store(scratch_ptr + rows[:, None] * LATENT + columns[None, :], o)
    if ODD == 0:
        maximum = gl.convert_layout(maximum, layout)
        gl.store(scratch_ptr + lse_at + rows, gl.where(nonempty, maximum + gl.log2(divisor), float("-inf")))
