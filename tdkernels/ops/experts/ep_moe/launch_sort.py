"""Launch the kernel that sorts the assignments of a fused ep_moe by expert."""

from typing import TYPE_CHECKING, Any

from tdkernels.ops.experts.dispatch.layout import tile_tokens
from tdkernels.ops.experts.ep_moe.kernel_sort import ep_order_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

if TYPE_CHECKING:
    import torch

_BLOCK = 64


def order_of(routing: Any) -> "torch.Tensor":
    """Return this rank's assignments [T * k], sorted by expert, for a CountedRouting.

    The launch uses a local workspace, which does not check for host errors of earlier launches. If a rank found an
    error of this call's routing before it has sent anything, its peers would wait for it.
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
