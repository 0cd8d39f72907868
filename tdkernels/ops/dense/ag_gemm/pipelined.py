"""AG-GEMM by torch's GEMM: a piece of a shard is multiplied while the copy engine brings those that follow.

Our own shard comes first, for it is here; then those of the ranks below us, which all ranks send at the same time and
each to another. No multiprocessor is taken from the product, which is as fast as the vendor's library; but nothing of a
piece can begin before all of it is here, and the last one is multiplied when all else is done.
"""

from contextlib import ExitStack

from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.dense.vendor_gemm import cut, product
from tdkernels.symm.whole_call import whole_call


@whole_call
def launch(x, weight, bias, group, config, fields, keep_gathered):
    """As ``ag_gemm_kernel.launch``, for a config of this method; ``fields``: what must be the same on all ranks."""
    x = gemm_operands.rows_contiguous(x)
    rows = x.shape[0]
    pieces = cut(rows, config.pieces)
    gather = AsyncAllGather("ag_gemm", fields, x, group, pieces[0][1], copies=True)
    y = x.new_empty(gather.world_size, rows, weight.shape[0])
    with ExitStack() as closing:
        closing.enter_context(gather)
        gather.copy(own=keep_gathered)
        product(x, weight, bias, y[gather.rank])
        for step in range(1, gather.world_size):
            source = gather.source(step)
            shard, made = gather.gathered[source], y[source]
            for number, (first, count) in enumerate(pieces):
                gather.wait(step, number)
                product(shard[first : first + count], weight, bias, made[first : first + count])
        if keep_gathered:
            closing.pop_all()
    return y.view(-1, weight.shape[0]), gather if keep_gathered else None
