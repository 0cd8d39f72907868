"""Launch the kernel that merges attention to some of the keys with that to others."""

from tdkernels.ops.attention.ag_attention.kernel_merge import merge_kernel
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

_LINES = 32  # of a program: rows of one head


def merge(o, lse, part, part_lse, first, dtype):
    """(o, lse) of attention to all keys, in ``dtype``, of that to some and that to others.

    Args:
        o: [B, n, H, D], lse: [B, n, H] fp32
        part, part_lse: the same of the rows from ``first`` on; contiguous
    """
    workspace = local_workspace_of(o.device)
    return launch_cached(
        workspace, ("attention merged", first, dtype), (o, lse, part, part_lse),
        lambda *of: _prepare(workspace, of, first, dtype),
    )


def _prepare(workspace, operands, first, dtype):
    o, lse, _, _ = operands
    batch, rows, heads, d = o.shape
    made = output_spec(o, *o.shape, dtype=dtype), output_spec(lse, *lse.shape)
    args = *made, *operands, batch * rows * heads, rows * heads, first * heads
    constants = {"D": d, "BLOCK_D": next_power_of_2(d), "BLOCK": _LINES, "num_warps": 4}
    grid = (cdiv(batch * rows * heads, _LINES),)
    return Launch(workspace, merge_kernel, grid, args, constants, operands, made, [])
