"""Launch the kernel that sorts the rows of a fused ep_moe."""

from tdkernels.ops.experts.dispatch.routing import places_constants, tile_tokens
from tdkernels.ops.experts.ep_moe.kernel_sort import ep_order_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime.kernel_launch import Launch, alone_on, launch_kept, to_be_made

_BLOCK = 64


def order_of(routing):
    """Choices [T * k] by expert.

    Launched without a workspace: that would look for what an earlier launch had to tell, and a rank that finds a note
    of this call's routing before it has sent anything leaves its peers waiting.
    """
    me, tables = routing.group.rank(), routing.tables
    key = "order", routing.sizes, me, routing.world_size
    (order,) = launch_kept(alone_on(tables.device), key, (tables,), lambda tables: _prepare(routing, me, tables))
    return order


def _prepare(routing, me, tables):
    choices = routing.tokens * routing.choices
    order = to_be_made(tables, max(choices, 1))
    known = places_constants(routing.choices, routing.num_experts, routing.world_size, None)
    constants = {**known, "TILE_TOKENS": tile_tokens(routing.choices), "BLOCK": _BLOCK, "num_warps": 4}
    grid = (max(cdiv(choices, _BLOCK), 1),)
    args = tables, order, me, routing.tokens
    return Launch(alone_on(tables.device), ep_order_kernel, grid, args, constants, (tables,), [order], [])
