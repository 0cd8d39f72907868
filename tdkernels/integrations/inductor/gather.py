"""Replace an all-gather and the products of its rows by ag_gemm.

    shard -> all_gather_into_tensor -> wait_tensor                       rows of rank 0, 1, ...
                                       [split, cat at dimension d]       if dimension d > 0 of the shard is gathered
                                       [views]
                                       mm or addmm, once or several times

If the gathered tensor has other users, such as the output of a forward graph that saves it for the backward, ag_gemm
returns it.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

import tdkernels.ops.dense.ag_gemm.op  # noqa: F401  registers the operators
from tdkernels.integrations.inductor import nodes
from tdkernels.integrations.inductor.matching import Collective, Product, as_collective, as_product, check_product
from tdkernels.integrations.inductor.nodes import NotFused, add, aten, value_of

_ops: Any = torch.ops.tdkernels


class _Form(NamedTuple):
    """The gathered tensor in one order of its rows, and the products of them."""

    root: fx.Node  # the wait, or the cat
    dim: int  # the gathered dimension of the shard
    pieces: list[fx.Node]  # nodes between the wait and the cat
    views: list[fx.Node]  # views of the root with the same rows
    products: list[Product]


def fuse(gather: fx.Node) -> tuple[str, str]:
    """Replace an all-gather and its products.

    Returns:
        The name of the operator, and why other products of the gathered rows are not part of it; mostly empty.

    Raises:
        NotFused: If no product can be fused with it. The graph computes the same as before.
    """
    collective = as_collective(gather)
    form, reasons = _form_of(collective)
    _replace_sizes(collective, form)
    _rewrite(collective, form)
    return "ag_gemm", "; ".join(reasons)


# ---- matching ----


def _form_of(collective):
    """Return the form of the gathered tensor that most products use, and why others cannot be fused.

    Raises:
        NotFused: If there are no products.
    """
    value = value_of(collective.source)
    if value.dim() < 2:
        raise NotFused("its input has no rows")
    if not isinstance(value.shape[-1], int):
        raise NotFused(f"K of {list(value.shape)} is symbolic")
    wait, reasons = collective.wait, []
    forms = [_with_products(collective, wait, 0, [], reasons)]
    for cat in _cats_after(wait):
        dim = nodes.arguments(cat)["dim"] % value.dim()
        matched = nodes.pieces_of(cat, collective.ranks)
        if matched is None or matched[:2] != (wait, 0):
            continue
        if dim == value.dim() - 1:
            reasons.append("its last dimension is gathered")
        elif dim > 0:
            forms.append(_with_products(collective, cat, dim, matched[2], reasons))
    best = max(forms, key=lambda form: len(form.products))
    if not best.products:
        raise NotFused(reasons[0] if reasons else f"no mm multiplies its rows, {_consumers(forms[-1])}")
    return best, reasons


def _cats_after(wait):
    """Return the concatenations of pieces of a tensor."""
    users = [user for user in wait.users if user.op == "call_function"]
    return list({cat: None for user in users for one in [user, *user.users] for cat in one.users
                 if cat.target is aten.cat.default})


def _consumers(form):
    """Return the operators that use the gathered tensor, for a reason."""
    users = {nodes.name_of(user) for view in [form.root, *form.views] for user in view.users if user not in form.views}
    return f"its users are {', '.join(sorted(users))}" if users else "it has no users"


def _with_products(collective, root, dim, pieces, reasons):
    """Return a form with the products that can be fused; append why others cannot to ``reasons``."""
    views, products, dependent = [], [], nodes.descendants(collective.wait)
    k = value_of(collective.source).shape[-1]
    new = [root]
    while new:
        node = new.pop()
        for user in node.users:
            if nodes.passes_values_on(user) and _has_rows(user, k):
                views.append(user)
                new.append(user)
            product = as_product(user)
            if product is None or product.left is not node:
                continue
            try:
                check_product(product)
                if product.right in dependent or product.bias in dependent:
                    raise NotFused(f"both operands of {product.node.name} depend on it")
                products.append(product)
            except NotFused as err:
                reasons.append(str(err))
    order = nodes.order_of(root.graph)
    products.sort(key=lambda product: order[product.node])
    return _Form(root, dim, pieces, views, products)


def _has_rows(node, k):
    """Return whether a tensor has rows of K elements."""
    value = value_of(node)
    shape = () if value is None else value.shape
    return len(shape) > 1 and nodes.is_known(shape[-1] == k)


# ---- rewriting ----


def _replace_sizes(collective, form):
    """Compute symbolic sizes of the gathered tensor from those of the shard, so that they do not need the tensor."""
    shard, ranks = collective.source, collective.ranks
    graph = shard.graph
    gathered = [(collective.node, 0), (collective.wait, 0)] + ([(form.root, form.dim)] if form.pieces else [])
    for node, dim in gathered:
        for user in [user for user in node.users if nodes.is_size(user)]:
            with graph.inserting_before(user):
                number = nodes.size(graph, shard, user.args[1])
                number = nodes.product(graph, [number, ranks] if user.args[1] % len(_shape(shard)) == dim else [number])
            user.replace_all_uses_with(number)
            graph.erase_node(user)
    for view in form.views:
        nodes.take_sizes(graph, view)


def _shape(node):
    return value_of(node).shape


def _remaining_users(collective, form):
    """Return (nodes that still need the root, nodes that still need the wait in the order of ranks)."""
    fused = {product.node for product in form.products}

    def vanishes(node):
        return node in fused or (node in form.views and all(map(vanishes, node.users)))

    of_root = [user for user in form.root.users if not vanishes(user)]
    saved = [user for user in collective.node.users if user is not collective.wait]
    if not form.pieces:
        return of_root + saved, []
    return of_root, saved + [user for user in collective.wait.users if user not in form.pieces]


def _anchor_of(form, users):
    """Return the first node that needs a result, and the operands that must be moved before it.

    Raises:
        NotFused: If they would be moved across an operator with a side effect.
    """
    graph = form.root.graph
    order = nodes.order_of(graph)
    anchor = min([product.node for product in form.products] + users, key=order.__getitem__)
    operands = [one for product in form.products for one in (product.right, product.bias) if one is not None]
    moved = nodes.ancestors_after(operands, anchor, order)
    if moved:
        between = [node for node in graph.nodes if order[anchor] <= order[node] <= order[moved[-1]]]
        if any(map(nodes.changes_memory, between)):
            raise NotFused("a weight is computed after an operator with a side effect")
    return anchor, moved


def _call(graph, collective, form, needs_gathered):
    """Add the operator at the insertion point. Return its outputs, and the gathered rows [M, K] or None."""
    shard, group = collective.source, collective.group
    rows = nodes.as_rows(graph, shard)
    weights = [nodes.as_weight(graph, product.right) for product in form.products]
    biases = [product.bias for product in form.products]
    if len(weights) == 1 and not needs_gathered and not form.pieces:
        return [add(graph, _ops.ag_gemm.default, rows, weights[0], biases[0], group, "")], None
    segment_rows = nodes.product(graph, [nodes.size(graph, shard, d) for d in range(form.dim, len(_shape(shard)) - 1)])
    call = rows, weights, biases, segment_rows, needs_gathered, group, ""
    results = add(graph, _ops.ag_gemm_multi.default, *call)
    ys = [add(graph, operator.getitem, results, number) for number in range(len(weights))]
    return ys, add(graph, operator.getitem, results, len(weights)) if needs_gathered else None


def _as_root(graph, collective, form, gathered):
    """Return the gathered rows with the sizes of the root."""
    sizes = [nodes.size(graph, collective.source, d) for d in range(len(_shape(collective.source)))]
    sizes[form.dim] = nodes.product(graph, [sizes[form.dim], collective.ranks])
    return nodes.reshaped(graph, gathered, sizes)


def _by_rank(graph, collective, form, gathered):
    """Return gathered rows [B, W, segment_rows, K] in the order of ranks, with the sizes of the wait."""
    sizes = [nodes.size(graph, collective.source, d) for d in range(len(_shape(collective.source)))]
    outer, segment_rows = nodes.product(graph, sizes[: form.dim]), nodes.product(graph, sizes[form.dim : -1])
    segments = add(graph, aten.reshape.default, gathered, [outer, collective.ranks, segment_rows, sizes[-1]])
    moved = add(graph, aten.permute.default, segments, [1, 0, 2, 3])
    sizes[0] = nodes.product(graph, [sizes[0], collective.ranks])
    return add(graph, aten.reshape.default, moved, sizes)


def _rewrite(collective: Collective, form: _Form) -> None:
    """Insert ag_gemm in front of the first node that needs a result, and erase the nodes that it replaces."""
    graph, wait = collective.node.graph, collective.wait
    of_root, of_wait = _remaining_users(collective, form)
    anchor, moved = _anchor_of(form, of_root + of_wait)
    for node in moved:
        anchor.prepend(node)
    with graph.inserting_before(anchor):
        ys, gathered = _call(graph, collective, form, bool(of_root or of_wait))
        root: Any = _as_root(graph, collective, form, gathered) if of_root else None
        by_rank: Any = _by_rank(graph, collective, form, gathered) if of_wait else root
    for product, y in zip(form.products, ys, strict=True):
        product.node.replace_all_uses_with(y)
        graph.erase_node(product.node)
    if of_root:
        form.root.replace_all_uses_with(root)
    if of_wait:
        wait.replace_all_uses_with(by_rank)
    for user in [user for user in collective.node.users if user.op == "output"]:
        user.replace_input_with(collective.node, by_rank)
    rights = [product.right for product in form.products if product.right.op != "placeholder"]
    nodes.erase_unused(graph, [*form.views, *form.pieces, form.root, wait, collective.node, *rights])
