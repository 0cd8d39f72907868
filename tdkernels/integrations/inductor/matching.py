"""Conditions that a collective and a matrix product must meet to run on an operator of tdkernels."""

from typing import Any, NamedTuple

import torch
from torch import fx

from tdkernels.integrations.inductor.nodes import NotFused, arguments, aten, c10d, is_known, is_size, value_of
from tdkernels.ops.common.validation import DTYPES
from tdkernels.runtime.autograd import DEVICES
from tdkernels.runtime.torch_op import world_size_by_name


class Collective(NamedTuple):
    """A functional collective that is waited for once."""

    node: fx.Node
    source: fx.Node  # its input
    wait: fx.Node
    ranks: int
    group: str


class Product(NamedTuple):
    """A matrix product of a graph: left [M, K] @ right [K, N] (+ bias [N])."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None


def check_tensor(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of an operand. Raises NotFused if its dtype or device is not supported."""
    value = value_of(node)
    if value is None:
        raise NotFused(f"the graph has no shape of {node.name}")
    if value.dtype not in DTYPES:
        raise NotFused(f"dtype {str(value.dtype).removeprefix('torch.')}")
    if value.device.type not in DEVICES:
        raise NotFused(f"device {value.device.type}")
    return value


def as_collective(node: fx.Node) -> Collective:
    """Return a collective of the graph. Raises NotFused if its group or its users are not supported."""
    group, source = arguments(node)["group_name"], node.args[0]
    if not isinstance(group, str):
        raise NotFused("its group is not given by name")
    try:
        ranks = world_size_by_name(group)
    except (RuntimeError, ValueError, KeyError) as err:
        raise NotFused(f"group {group} is unknown in this process") from err
    waits = [user for user in node.users if user.target is c10d.wait_tensor.default]
    if len(waits) != 1:
        raise NotFused(f"the graph has {len(waits)} waits for it")
    others = [user for user in node.users if user is not waits[0] and user.op != "output" and not is_size(user)]
    if others:
        raise NotFused(f"{others[0].name} uses it without a wait")
    check_tensor(source)  # type: ignore[arg-type]
    return Collective(node, source, waits[0], ranks, group)  # type: ignore[arg-type]


def as_product(node: fx.Node) -> Product | None:
    """Return an mm or addmm of the graph as a Product, or None for another node."""
    if node.target is aten.mm.default:
        return Product(node, node.args[0], node.args[1], None)  # type: ignore[arg-type]
    if node.target is aten.addmm.default:
        return Product(node, node.args[1], node.args[2], node.args[0])  # type: ignore[arg-type]
    return None


def check_product(product: Product) -> None:
    """Raise NotFused unless an operator of tdkernels computes the product."""
    called: dict[str, Any] = arguments(product.node)
    name = product.node.name
    if called.get("alpha", 1) != 1 or called.get("beta", 1) != 1:
        raise NotFused(f"{name} has alpha or beta")
    left, right = check_tensor(product.left), check_tensor(product.right)
    if right.dtype != left.dtype or right.device != left.device:
        raise NotFused(f"the operands of {name} differ in dtype or device")
    if is_known(right.shape[0] == 0) or is_known(right.shape[1] == 0):
        raise NotFused(f"K or N of {name} is 0")
    if product.bias is None:
        return
    bias = check_tensor(product.bias)
    if bias.dtype != left.dtype or bias.device != left.device:
        raise NotFused(f"the bias of {name} differs in dtype or device")
    if bias.dim() != 1 or not is_known(bias.shape[0] == right.shape[1]):
        raise NotFused(f"the bias of {name} is {list(bias.shape)}, not [N]")
