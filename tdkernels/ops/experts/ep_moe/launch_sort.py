"""Launch the kernel that sorts the rows of a fused ep_moe."""

from tdkernels.ops.experts.dispatch.layout import tile_tokens
from tdkernels.ops.experts.ep_moe.kernel_sort import ep_order_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

_BLOCK = 64


def order_of(routing):
    """Choices [T * k] by expert.

    Launched without a workspace: that would look for what an earlier launch had to tell, and a rank that finds a note
    of this call's routing before it has sent anything leaves its peers waiting.
    """
    me, tables = routing.group.rank(), routing.tables
    key = "order", routing.launch_key, me
    workspace = local_workspace_of(tables.device)
    (order,) = launch_cached(workspace, key, (tables,), lambda tables: _prepare(routing, me, tables))
    return order


def _prepare(routing, me, tables):
    shape = routing.shape
    choices = shape.tokens * shape.choices
    order = output_spec(tables, max(choices, 1))
    constants = {
        **routing.table_constants(), "TILE_TOKENS": tile_tokens(shape.choices), "BLOCK": _BLOCK, "num_warps": 4
    }
    grid = (max(cdiv(choices, _BLOCK), 1),)
    args = tables, order, me, shape.tokens
    return Launch(local_workspace_of(tables.device), ep_order_kernel, grid, args, constants, (tables,), [order], [])
