"""Kernel that adds the dot products of each row: the gradient of the routing weight of its assignment."""

import triton.language as tl

from tdkernels import lang as td


@td.jit(do_not_specialize=["num_assignments", "num_rows", "parts"])
def moe_dots_kernel(dots_ptr, rows_ptr, out_ptr, num_assignments, num_rows, parts, BLOCK: tl.constexpr):
    """Store the sum of dots [parts, num_rows] over the first axis at the assignment of each row, 0 without a row.

    rows_ptr: int32, the row of each assignment, or -1
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = offs < num_assignments
    row = tl.load(rows_ptr + offs, mask=there, other=-1)
    at = dots_ptr + row
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for _ in range(0, parts):
        total += tl.load(at, mask=row >= 0, other=0.0)
        at += num_rows
    tl.store(out_ptr + offs, total, mask=there)
