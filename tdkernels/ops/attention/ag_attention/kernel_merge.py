"""Kernel that merges attention results over two sets of keys by their log-sum-exp (lse)."""

import triton.language as tl

from tdkernels import lang as td


@td.jit(do_not_specialize=["lines", "per_entry", "before"])
def merge_kernel(
    o_ptr, lse_ptr, a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, lines, per_entry, before,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):
    """Merge results a and b. A line is one row of one head.

    a has ``per_entry`` lines per batch entry. b does not have the first ``before`` lines of each batch entry.
    """
    line = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = line < lines
    entry, place = line // per_entry, line % per_entry
    other = line - (entry + 1) * before
    both = here & (place >= before)
    a_lse = tl.load(a_lse_ptr + line, mask=here, other=0.0)
    b_lse = tl.load(b_lse_ptr + other, mask=both, other=float("-inf"))
    max_lse = tl.maximum(a_lse, b_lse)
    a_sum, b_sum = tl.exp(a_lse - max_lse), tl.exp(b_lse - max_lse)
    total = a_sum + b_sum
    cols = tl.arange(0, BLOCK_D)
    within = (cols < D)[None, :]
    a = tl.load(a_ptr + line[:, None] * D + cols[None, :], mask=here[:, None] & within, other=0.0)
    b = tl.load(b_ptr + other[:, None] * D + cols[None, :], mask=both[:, None] & within, other=0.0)
    o = td.to_float32(a) * (a_sum / total)[:, None] + td.to_float32(b) * (b_sum / total)[:, None]
    o_ptrs = o_ptr + line[:, None] * D + cols[None, :]
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=here[:, None] & within)
    tl.store(lse_ptr + line, max_lse + tl.log(total), mask=here)
