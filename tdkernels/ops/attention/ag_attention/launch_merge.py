"""Launch the kernel that merges attention results over two sets of keys."""

from typing import TYPE_CHECKING

from tdkernels.ops.attention.ag_attention.kernel_merge import merge_kernel
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

if TYPE_CHECKING:
    import torch

_LINES = 32  # lines per program; a line is one row of one head


def merge(
    o: "torch.Tensor", lse: "torch.Tensor", part: "torch.Tensor", part_lse: "torch.Tensor", first: int,
    dtype: "torch.dtype",
) -> "list[torch.Tensor]":
    """Merge attention results over two sets of keys by their log-sum-exp, and return [o, lse] over both.

    Args:
        o: Result over the first set of keys, [B, n, H, D].
        lse: Its log-sum-exp, [B, n, H] fp32.
        part: Result over the second set for the rows from ``first`` on, contiguous.
        part_lse: Its log-sum-exp, contiguous.
        first: First row of ``part``.
        dtype: Dtype of the merged o.
    """
    workspace = local_workspace_of(o.device)
    return launch_cached(
        workspace, ("attention merged", first, dtype), (o, lse, part, part_lse),
        lambda *of: _prepare(workspace, of, first, dtype),
    )


def _prepare(workspace, operands, first, dtype):
    o, lse, _, _ = operands
    batch, rows, heads, d = o.shape
    outputs = output_spec(o, *o.shape, dtype=dtype), output_spec(lse, *lse.shape)
    args = *outputs, *operands, batch * rows * heads, rows * heads, first * heads
    constants = {"D": d, "BLOCK_D": next_power_of_2(d), "BLOCK": _LINES, "num_warps": 4}
    grid = (cdiv(batch * rows * heads, _LINES),)
    return Launch(workspace, merge_kernel, grid, args, constants, operands, outputs, [])
