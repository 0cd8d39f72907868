"""Pipelined gemm_rs: while torch's GEMM computes the part of one rank, the copy engine sends the previous part.

The part of rank + 1 is computed first, this rank's own part last. Then the parts of all ranks, each rounded to the
dtype of the output, are added in fp32 and in rank order. The GEMM has all SMs. The cost is one more read and write of
the sum. Callers that launch other work before they add the parts compute half of the ranks' parts at a time.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tdkernels.ops.collectives.async_reduce_scatter import AsyncReduceScatter
from tdkernels.ops.common.scaling import Scales, out_dtype_of, row_major
from tdkernels.ops.dense.vendor_gemm import cut, product_of, rows_of
from tdkernels.rounding import cdiv
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call
from tdkernels.symm.workspace import refuse_nodes

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig


@whole_call
def launch(
    x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", group: "dist.ProcessGroup",
    config: "GemmRsConfig", fields: Mapping[str, Any], scales: Scales | None = None,
) -> "torch.Tensor":
    """Run gemm_rs with method "parts"; ``fields`` must be equal on all ranks."""
    if scales is not None:
        x, weight = row_major(x), row_major(weight)
    scatter = start("gemm_rs", fields, x, weight, group, config.pieces, out_dtype_of(x, scales))
    with scatter:
        return scatter.add_to(send_products(scatter, x, weight, config.pieces, scales), bias)


def start(
    operator: str, fields: Mapping[str, Any], x: "torch.Tensor", weight: "torch.Tensor", group: "dist.ProcessGroup",
    pieces: int, out_dtype: "torch.dtype | None" = None,
) -> AsyncReduceScatter:
    """Return the AsyncReduceScatter for x @ weight.T, before its ``begin``.

    ``out_dtype``: the dtype of the product, if it is not that of x.

    Raises:
        NotImplementedError: If the group spans several nodes.
    """
    refuse_nodes(operator, group_state(group))
    rows = x.shape[0] // group.size()
    part_bytes = rows * weight.shape[0] * (out_dtype or x.dtype).itemsize
    return AsyncReduceScatter(operator, fields, part_bytes, group, x.device, len(cut(rows, pieces)), passes_on=False)


def send_products(
    scatter: AsyncReduceScatter, x: "torch.Tensor", weight: "torch.Tensor", pieces: int, scales: Scales | None = None
) -> "torch.Tensor":
    """Compute x @ weight.T, send each peer its rows in ``pieces`` chunks, and return this rank's rows."""
    ranks, n, dtype = scatter.world_size, weight.shape[0], out_dtype_of(x, scales)
    by_owner = x.chunk(ranks)
    rows = by_owner[0].shape[0]
    spans = cut(rows, pieces)
    for step in range(1, ranks):
        owner = (scatter.rank + step) % ranks
        for piece, (first, count) in enumerate(spans):
            part = product_of(rows_of(by_owner[owner], first, count), weight, scales, owner * rows + first)
            assert part.dtype == dtype, "the offsets below are for another dtype"
            scatter.send(owner, part, piece, offset=first * n * dtype.itemsize)
    return product_of(by_owner[scatter.rank], weight, scales, scatter.rank * rows)


def send_halves(scatter: AsyncReduceScatter, x: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
    """Compute x @ weight.T in two GEMMs, send each peer its rows, and return this rank's rows, a view.

    The first GEMM is for the half of the ranks that this rank is not in. The rows of the other half are sent after the
    last GEMM, so this is for callers that launch other work before they add the parts. Compared with a GEMM for each
    rank, the host takes less time, and larger GEMMs are faster.
    """
    ranks, rank = scatter.world_size, scatter.rank
    rows = x.shape[0] // ranks
    middle = cdiv(ranks, 2)
    halves = (0, middle), (middle, ranks)
    first, last = halves if rank >= middle else halves[::-1]
    for begin, end in (first, last):
        parts = product_of(x[begin * rows : end * rows], weight).view(end - begin, rows, -1).unbind()
        # In this order, ranks that send to the same half send to different owners, if the halves have the same size.
        turn = rank % middle % (end - begin)
        owners = [begin + (turn + step) % (end - begin) for step in range(end - begin)]
        scatter.send_all({owner: parts[owner - begin] for owner in owners if owner != rank})
    return parts[rank - begin]  # of the second half
