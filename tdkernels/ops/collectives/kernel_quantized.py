"""Kernel of all_reduce that sends e4m3 codes with one fp32 scale per 128 elements: "two_shot" with quantized chunks.

It is ``kernel.all_reduce_two_shot_kernel``, except that every block of a chunk is quantized before it is sent, and
dequantized on arrival. In a buffer a block is its BLOCK codes, then its BLOCK / 128 scales; ``wire_bytes`` is the size
of both. BLOCK is a multiple of 512, so that blocks begin at multiples of 16 bytes.

The owner of a chunk adds its own part without quantization. It quantizes the sum, sends it, and stores the dequantized
sum in its own output, too. So all ranks store the same values.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.collectives.kernel import _begin, _blocks, _bring, _length, _mask_of
from tdkernels.ops.common.fp8_groups import (
    GROUP,
    dequantize_groups,
    load_quantized,
    quantize_groups,
    quantized_part_of,
    store_quantized,
)


@td.jit
def wire_bytes(count, BLOCK: tl.constexpr):
    """Return the bytes of ``count`` blocks in a buffer, int64."""
    return tl.cast(count, tl.int64) * (BLOCK + BLOCK // GROUP * 4)


@td.jit
def _load_wire(address, left, there, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return ``left`` elements of the block at an address of a buffer in fp32; zeros if not ``there``."""
    return load_quantized(address, address + BLOCK, left, there, CONVERTS, BLOCK)


@td.jit
def _store_wire(address, codes, scales, left, there, BLOCK: tl.constexpr):
    """Store ``left`` elements of a block at an address of a buffer, if ``there``."""
    store_quantized(address, address + BLOCK, codes, scales, left, there, BLOCK)


@td.jit
def _send_quantized_to_each(
    ctx, me, ranks, x, stride, slot, left, spacing, sent, blocks,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, CONVERTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """For every peer r, quantize blocks at ``x + r * stride`` and store them in its buffer, at offset ``slot``.

    The blocks for peer r have ``left - r * spacing`` items. Nothing is stored if not ``sent``.
    """
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        src = x + start * ITEM_BYTES
        rest = left - start
        first = src + (me + 1) % ranks * stride
        part = tl.load(td.pointer_to(first, DTYPE, ALIGNED) + offs, _mask_of(0, me, ranks, offs, rest, spacing), 0.0)
        for i in range(ranks - 1):
            peer = (me + 1 + i) % ranks
            following = src + (me + 2 + i) % ranks * stride  # loaded while this part is quantized
            mask = _mask_of(i + 1, me, ranks, offs, rest, spacing)
            ahead = tl.load(td.pointer_to(following, DTYPE, ALIGNED) + offs, mask, 0.0)
            codes, scales = quantize_groups(td.to_float32(part), CONVERTS, BLOCK)
            dst = td.symm_base(ctx, peer) + slot + wire_bytes(b, BLOCK)
            _store_wire(dst, codes, scales, rest - peer * spacing, sent, BLOCK)
            part = ahead


@td.jit
def _sum_quantized_blocks(
    ctx, me, ranks, x, parts, part_bytes, sums, z, left, sent, blocks,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, CONVERTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add the parts of blocks in fp32 and in rank order; store the quantized sums at every peer and, as DTYPE, in z.

    This rank's part is at address x, the quantized part of rank r at ``parts + r * part_bytes``. The sums go to offset
    ``sums`` in every peer's buffer, if ``sent``.
    """
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        rest = left - start
        own = tl.load(td.pointer_to(x + start * ITEM_BYTES, DTYPE, ALIGNED) + offs, mask=offs < rest, other=0.0)
        own = td.to_float32(own)
        codes_at = parts + wire_bytes(b, BLOCK)
        at = codes_at, codes_at + BLOCK
        total = tl.full((BLOCK,), 0.0, tl.float32)
        for source in range(0, ranks, 4):  # four parts are loaded at a time
            part0 = quantized_part_of(source, me, ranks, at, part_bytes, rest, own, CONVERTS, BLOCK)
            part1 = quantized_part_of(source + 1, me, ranks, at, part_bytes, rest, own, CONVERTS, BLOCK)
            part2 = quantized_part_of(source + 2, me, ranks, at, part_bytes, rest, own, CONVERTS, BLOCK)
            part3 = quantized_part_of(source + 3, me, ranks, at, part_bytes, rest, own, CONVERTS, BLOCK)
            total += part0
            total += part1
            total += part2
            total += part3
        codes, scales = quantize_groups(total, CONVERTS, BLOCK)
        for step in range(1, ranks):
            dst = td.symm_base(ctx, (me + step) % ranks) + sums + wire_bytes(b, BLOCK)
            _store_wire(dst, codes, scales, rest, sent, BLOCK)
        values = td.from_float32(dequantize_groups(codes, scales, CONVERTS, BLOCK), DTYPE)
        tl.store(td.pointer_to(z + start * ITEM_BYTES, DTYPE, ALIGNED) + offs, values, mask=offs < rest)


@td.jit
def _read_quantized_from(
    i, me, ranks, first, stride, left, spacing, DTYPE: tl.constexpr, CONVERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Load the block of peer ``me + 1 + i`` as DTYPE. The block of rank r is at address ``first + r * stride``."""
    peer = (me + 1 + i) % ranks
    values = _load_wire(first + peer * stride, left - peer * spacing, i < ranks - 1, CONVERTS, BLOCK)
    return td.from_float32(values, DTYPE)


@td.jit
def _receive_quantized_from_each(
    me, ranks, slots, slot_bytes, y, stride, left, spacing, blocks,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, CONVERTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """For every peer r, dequantize blocks at ``slots + r * slot_bytes`` in this rank's buffer to ``y + r * stride``."""
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        src = slots + wire_bytes(b, BLOCK)
        dst = y + start * ITEM_BYTES
        rest = left - start
        for i in range(0, ranks - 1, 4):
            part0 = _read_quantized_from(i, me, ranks, src, slot_bytes, rest, spacing, DTYPE, CONVERTS, BLOCK)
            part1 = _read_quantized_from(i + 1, me, ranks, src, slot_bytes, rest, spacing, DTYPE, CONVERTS, BLOCK)
            part2 = _read_quantized_from(i + 2, me, ranks, src, slot_bytes, rest, spacing, DTYPE, CONVERTS, BLOCK)
            part3 = _read_quantized_from(i + 3, me, ranks, src, slot_bytes, rest, spacing, DTYPE, CONVERTS, BLOCK)
            _bring(i, me, ranks, dst, stride, part0, offs, rest, spacing, DTYPE, ALIGNED)
            _bring(i + 1, me, ranks, dst, stride, part1, offs, rest, spacing, DTYPE, ALIGNED)
            _bring(i + 2, me, ranks, dst, stride, part2, offs, rest, spacing, DTYPE, ALIGNED)
            _bring(i + 3, me, ranks, dst, stride, part3, offs, rest, spacing, DTYPE, ALIGNED)


@td.jit(do_not_specialize=["n", "piece_blocks", "plan"])
def all_reduce_quantized_kernel(
    ctx, x_ptr, z_ptr, n, piece_blocks, plan,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, CONVERTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute z [n] = sum over ranks of x [n]. Rank j mod W sums chunk j and sends the quantized sum to all ranks.

    Rounds, data and signals of a half are as in ``all_reduce_two_shot_kernel``; PIECE is the size of a quantized chunk.
    """
    n = _length(n, ITEM_BYTES, ALIGNED)
    me, ranks, signal, signals, area, sent = _begin(ctx, plan)
    piece = tl.cast(piece_blocks, tl.int64) * BLOCK
    piece_bytes = wire_bytes(piece_blocks, BLOCK)
    rounds = ((n + ranks * piece - 1) // (ranks * piece)).to(tl.int32)
    part_bytes = rounds * piece_bytes  # bytes of the parts of one source
    buffer = td.symm_base(ctx, me)
    for round_ in range(tl.program_id(0), rounds, tl.num_programs(0)):
        start = tl.cast(round_, tl.int64) * ranks * piece
        left = n - start
        blocks = _blocks(left, piece_blocks, BLOCK)
        x = x_ptr.to(tl.int64) + start * ITEM_BYTES
        z = z_ptr.to(tl.int64) + start * ITEM_BYTES
        slots = area + round_ * piece_bytes
        sums = area + ranks * part_bytes + round_ * ranks * piece_bytes
        own, own_sum = me * piece * ITEM_BYTES, sums + me * piece_bytes
        _send_quantized_to_each(
            ctx, me, ranks, x, piece * ITEM_BYTES, slots + me * part_bytes, left, piece, sent, blocks,
            DTYPE, ITEM_BYTES, ALIGNED, CONVERTS, BLOCK,
        )
        # waiter: every peer's program of this round, before it sums
        td.notify_all(ctx, signals + me * rounds + round_, signal)
        # producer: every peer's program of this round, before it waits
        td.wait_plan_all(ctx, signals + round_, rounds, signal)
        _sum_quantized_blocks(
            ctx, me, ranks, x + own, buffer + slots, part_bytes, own_sum, z + own, left - me * piece, sent, blocks,
            DTYPE, ITEM_BYTES, ALIGNED, CONVERTS, BLOCK,
        )
        # waiter: every peer's program of this round, at its end
        td.notify_all(ctx, signals + (ranks + me) * rounds + round_, signal, CHECK_FAILED=True)
        # producer: every peer's program of this round, after it has summed
        td.wait_plan_all(ctx, signals + ranks * rounds + round_, rounds, signal)
        _receive_quantized_from_each(
            me, ranks, buffer + sums, piece_bytes, z, piece * ITEM_BYTES, left, piece, blocks,
            DTYPE, ITEM_BYTES, ALIGNED, CONVERTS, BLOCK,
        )
    td.finish(ctx)
