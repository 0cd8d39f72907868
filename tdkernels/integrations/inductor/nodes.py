"""Nodes of a post-grad graph: arguments, sizes, views, pieces of a tensor, and new nodes.

All decisions use only the structure of the graph, so they are the same on all ranks that compile the same program.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional

# Nodes with the values of their first argument in the same order.
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten.alias.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


class NotFused(Exception):
    """A collective stays as it is. The message is the reason, for the report."""


# ---- reading ----


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator call by name, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema), node.args))
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**defaults, **given, **node.kwargs}


def value_of(node: Any) -> torch.Tensor | None:
    """Return the fake tensor of a node, or None if it has none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def name_of(node: fx.Node) -> str:
    """Return the operator of a node for reports, such as "aten.bmm"."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.replace("::", ".")
    return node.op if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def passes_values_on(node: fx.Node) -> bool:
    """Return whether a node has the values of its first argument in the same order."""
    return node.target in _VIEWS or node.target in _COPIES


def is_size(node: fx.Node) -> bool:
    """Return whether a node is a symbolic size of its argument."""
    return node.target is aten.sym_size.int


def is_known(condition: Any) -> bool:
    """Return whether a condition on symbolic sizes holds for all sizes that the graph accepts. Adds no guard."""
    return bool(condition) if isinstance(condition, bool) else statically_known_true(condition)


def have_one_shape(a: Any, b: Any) -> bool:
    """Return whether two nodes are tensors of the same shape and dtype."""
    one, other = value_of(a), value_of(b)
    if one is None or other is None or one.dtype != other.dtype or one.dim() != other.dim():
        return False
    return all(is_known(m == n) for m, n in zip(one.shape, other.shape, strict=True))


def order_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the position of each node."""
    return {node: number for number, node in enumerate(graph.nodes)}


def descendants(node: fx.Node) -> set[fx.Node]:
    """Return a node and all nodes that depend on it."""
    found, new = {node}, [node]
    while new:
        users = [user for user in new.pop().users if user not in found]
        found.update(users)
        new += users
    return found


def ancestors_after(nodes: Iterable[fx.Node], anchor: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Return those of the nodes and their ancestors that come after ``anchor``, in order."""
    found: set[fx.Node] = set()
    new = [node for node in nodes if order[node] > order[anchor]]
    while new:
        node = new.pop()
        if node not in found:
            found.add(node)
            new += [source for source in node.all_input_nodes if order[source] > order[anchor]]
    return sorted(found, key=order.__getitem__)


def changes_memory(node: fx.Node) -> bool:
    """Return whether a node has a side effect, such as an operator that writes to an argument."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutable or (node.op == "call_function" and node.is_impure() and node.target is not c10d.wait_tensor.default)


def pieces_of(cat: fx.Node, ranks: int) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """Match a concatenation of W equal pieces of one tensor, all of them and in order.

    torch emits it if a dimension other than 0 is gathered or scattered. The pieces are equal because torch.cat needs
    equal sizes along the other dimensions.

    Returns:
        (the tensor, the dimension that is divided, the nodes of the pieces in order), or None.
    """
    parts = arguments(cat)["tensors"]
    if len(parts) != ranks or len(set(parts)) != ranks or any(list(part.users) != [cat] for part in parts):
        return None
    if all(part.target is operator.getitem for part in parts):
        return _pieces_of_split(parts)
    if all(part.target is aten.slice.Tensor for part in parts):
        return _pieces_of_slices(parts)
    return None


def _pieces_of_split(parts):
    split = parts[0].args[0]
    if any(part.args != (split, number) for number, part in enumerate(parts)) or split.target not in _SPLITS:
        return None
    if len(split.users) != len(parts) or len(split.meta.get("val", ())) != len(parts):
        return None
    called = arguments(split)
    return called["self"], called["dim"] % value_of(called["self"]).dim(), [split, *parts]


def _pieces_of_slices(parts):
    calls = [arguments(part) for part in parts]
    source, dim = calls[0]["self"], calls[0]["dim"]
    if any(call["self"] is not source or call["dim"] != dim or call["step"] != 1 for call in calls):
        return None
    begin = 0
    for part, call in zip(parts, calls, strict=True):
        start = call["start"].meta["val"] if isinstance(call["start"], fx.Node) else call["start"] or 0
        if not is_known(start == begin):
            return None
        begin = begin + value_of(part).shape[dim]
    if not is_known(begin == value_of(source).shape[dim]):
        return None
    return source, dim % value_of(source).dim(), parts


# ---- new nodes ----


def add(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Add a call at the insertion point of the graph, with its fake value."""
    node = graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda arg: arg.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*values)
    if isinstance(target, torch._ops.OpOverload):
        # Inductor passes the operator tensors with these strides.
        node.meta["eager_input_vals"] = values, {}
    return node


def size(graph: fx.Graph, node: fx.Node, dim: int) -> Any:
    """Return a size of a tensor: a number, or a new node if it is symbolic."""
    number = value_of(node).shape[dim]  # type: ignore[union-attr]
    return number if isinstance(number, int) else add(graph, aten.sym_size.int, node, dim)


def sizes_apart(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """Return the sizes of an mm, an addmm, a view or a sum without using the node itself.

    Raises:
        NotFused: If a symbolic size is not an argument of the view.
    """
    value = value_of(node)
    if node.target in _COPIES or node.target is aten.add.Tensor:
        return sizes_apart(graph, arguments(node)["self"])
    if node.target in (aten.mm.default, aten.addmm.default):
        left, right = node.args[-2:]
        return [size(graph, left, 0), size(graph, right, 1)]  # type: ignore[arg-type]
    if node.target not in _VIEWS:
        raise NotFused(f"a symbolic size is read from {node.name}")
    found = []
    for number, given in zip(value.shape, node.args[1], strict=True):  # type: ignore[union-attr, arg-type]
        if not isinstance(number, int) and not isinstance(given, fx.Node):
            raise NotFused(f"the symbolic size {number} is inferred by {node.name}")
        found.append(number if isinstance(number, int) else given)
    return found


def take_sizes(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the symbolic sizes that are read from an mm or a view, so that they do not need the node.

    Raises:
        NotFused: See ``sizes_apart``.
    """
    for user in [user for user in node.users if is_size(user)]:
        with graph.inserting_before(user):
            number = sizes_apart(graph, node)[user.args[1]]  # type: ignore[index]
        if isinstance(number, fx.Node):
            user.replace_all_uses_with(number)
            graph.erase_node(user)


def product(graph: fx.Graph, numbers: Iterable[Any]) -> Any:
    """Return the product of numbers and nodes: a number, or a new node."""
    result: Any = 1
    for number in numbers:
        if isinstance(result, int) and isinstance(number, int):
            result = result * number
        elif isinstance(result, int) and result == 1:
            result = number
        else:
            result = add(graph, operator.mul, result, number)
    return result


def divided(graph: fx.Graph, number: Any, ranks: int) -> Any:
    """Return a number or a node divided by W."""
    return number // ranks if isinstance(number, int) else add(graph, operator.floordiv, number, ranks)


def reshaped(graph: fx.Graph, node: fx.Node, sizes: list[Any]) -> fx.Node:
    """Return a tensor with other sizes; the node itself if they are equal."""
    wanted = [one.meta["val"] if isinstance(one, fx.Node) else one for one in sizes]
    shape = value_of(node).shape  # type: ignore[union-attr]
    if len(wanted) == len(shape):
        # -1 is a size that is inferred; with as many dimensions it must be equal.
        known = [isinstance(a, int) and a < 0 or is_known(a == b) for a, b in zip(wanted, shape, strict=True)]
        if all(known):
            return node
    return add(graph, aten.reshape.default, node, sizes)


def as_rows(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return a tensor [..., K] as [rows, K]."""
    shape = value_of(node).shape  # type: ignore[union-attr]
    return node if len(shape) == 2 else add(graph, aten.reshape.default, node, [-1, shape[-1]])


def as_weight(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the second operand of an mm, [K, N], as a weight [N, K]. It is a view."""
    if node.target is aten.permute.default and [dim % 2 for dim in node.args[1]] == [1, 0]:  # type: ignore
        return node.args[0]  # type: ignore[return-value]
    return add(graph, aten.permute.default, node, [1, 0])


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of the nodes that have no users, users before their arguments."""
    order = order_of(graph)
    for node in sorted(set(nodes), key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)
