"""Copies between ranks from inside a kernel."""

import triton.language as tl

from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import pointer_to


@jit
def put(dst, src, num_bytes, BLOCK_WORDS: tl.constexpr = 4096):
    """Copy bytes from one address to another with this program alone.

    ``dst`` is usually in a peer's memory: pushing is faster than pulling, since a store does not wait for a response.
    The stores are unordered. Follow them with ``notify`` to signal the peer.

    Args:
        dst: destination address, int64, 16-byte aligned.
        src: source address, int64, 16-byte aligned.
        num_bytes: number of bytes.
        BLOCK_WORDS: number of 64-bit words copied per iteration.
    """
    src_words = pointer_to(src, tl.int64)
    dst_words = pointer_to(dst, tl.int64)
    offs = tl.arange(0, BLOCK_WORDS)
    num_words = num_bytes // 8
    num_full = num_words // BLOCK_WORDS * BLOCK_WORDS
    if num_full > 0:
        words = tl.load(src_words + offs)
        for start in range(BLOCK_WORDS, num_full, BLOCK_WORDS):
            ahead = tl.load(src_words + start + offs)  # in flight while the previous block is stored
            tl.store(dst_words + start - BLOCK_WORDS + offs, words)
            words = ahead
        tl.store(dst_words + num_full - BLOCK_WORDS + offs, words)
    if num_full < num_words:
        mask = num_full + offs < num_words
        words = tl.load(src_words + num_full + offs, mask=mask)
        tl.store(dst_words + num_full + offs, words, mask=mask)
    if num_words * 8 < num_bytes:
        # Fewer than eight bytes are left. A load of a whole word would read past the end of src.
        tail = num_words * 8 + tl.arange(0, 8)
        mask = tail < num_bytes
        rest = tl.load(src.to(tl.pointer_type(tl.int8)) + tail, mask=mask)
        tl.store(dst.to(tl.pointer_type(tl.int8)) + tail, rest, mask=mask)
