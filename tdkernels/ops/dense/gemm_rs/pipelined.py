"""GEMM-RS by torch's GEMM: a part for another rank is on its way, by the copy engine, while the next is multiplied.

The parts for rank + 1 come first, our own last; the ranks' parts are then added in fp32 and in rank order, each of them
rounded to the dtype of x. No multiprocessor is taken from the product; the sum is read and written once more.
"""

from tdkernels.ops.collectives.async_reduce_scatter import AsyncReduceScatter
from tdkernels.ops.dense.vendor_gemm import cut, product
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call
from tdkernels.symm.workspace import refuse_nodes


@whole_call
def launch(x, weight, bias, group, config, fields):
    """As ``gemm_rs_kernel.launch``, for a config of this method; ``fields``: what must be the same on all ranks."""
    scatter = start("gemm_rs", fields, x, weight, group, config.pieces)
    with scatter:
        return scatter.add_to(send_products(scatter, x, weight, config.pieces), bias)


def start(operator, fields, x, weight, group, pieces):
    """The Scatter of x @ weight.T, not begun."""
    refuse_nodes(operator, group_state(group))
    rows = x.shape[0] // group.size()
    part_bytes = rows * weight.shape[0] * x.element_size()
    return AsyncReduceScatter(operator, fields, part_bytes, group, x.device, len(cut(rows, pieces)), passes_on=False)


def send_products(scatter, x, weight, pieces):
    """Send each rank its rows of x @ weight.T, and return ours."""
    ranks, n = scatter.world_size, weight.shape[0]
    by_owner = x.unflatten(0, (ranks, -1))
    spans = cut(by_owner.shape[1], pieces)
    for step in range(1, ranks):
        owner = (scatter.rank + step) % ranks
        for piece, (first, count) in enumerate(spans):
            part = x.new_empty(count, n)
            product(by_owner[owner, first : first + count], weight, None, part)
            scatter.send(owner, part, piece, offset=first * n * x.element_size())
    own = x.new_empty(by_owner.shape[1], n)
    product(by_owner[scatter.rank], weight, None, own)
    return own
