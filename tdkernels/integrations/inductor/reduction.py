"""Replace a product and the reduction of it by gemm_rs or gemm_ar.

    product -> [views] -> [split at dimension d, cat] -> reduce_scatter_tensor -> wait_tensor     gemm_rs
    product -> [views] -> all_reduce -> wait_tensor                                               gemm_ar

A product is an mm or an addmm. The split and the cat exist if dimension d > 0 is scattered. The input may be a sum of
products, as in the backward of several linear layers with one input: x_1 @ w_1 + x_2 @ w_2 is one product of
concatenated operands. It costs a pass over the operands, and is rounded once instead of once for each product.

A mean is the sum, divided by W. A bias that is added to the result stays a node of its own, which inductor fuses with
the nodes after it, so that it is rounded as before. A bias that each rank adds before the reduction, as torch's
RowwiseParallel does, is summed over the ranks by an all-reduce of N elements, and added to the result.
"""

from typing import Any, NamedTuple

import torch
from torch import fx

import tdkernels.ops.dense.gemm_ar.op
import tdkernels.ops.dense.gemm_rs.op  # noqa: F401  registers the operators
from tdkernels.integrations.inductor import nodes
from tdkernels.integrations.inductor.matching import Collective, Product, as_collective, as_product, check_product
from tdkernels.integrations.inductor.nodes import NotFused, add, aten, c10d, value_of

_ops: Any = torch.ops.tdkernels
# With fewer rows the all-reduce of a bias, which is one more collective, may take longer than the fusion saves. The
# threshold is an estimate: NCCL's all-reduce takes 13 us for 16 KiB on four H200, and 41 us for 4 MiB, the size of 256
# rows of 8192 bf16.
_LEAST_ROWS_OF_BIASED = 256


class _Input(NamedTuple):
    """The input of a reduction: a sum of products, mostly of one, behind views and pieces."""

    products: list[Product]
    chain: list[fx.Node]  # nodes between the products and the reduction
    whole: fx.Node  # the tensor [..., N] that is reduced, before it is divided
    dim: int  # the dimension of it that is scattered


def fuse(reduction: fx.Node) -> tuple[str, str]:
    """Replace a reduce-scatter or an all-reduce and its product, and return the name of the operator and "".

    Raises:
        NotFused: If the input is not a product that can be fused with it. The graph computes the same as before.
    """
    collective = as_collective(reduction)
    if nodes.arguments(reduction)["reduce_op"].lower() not in ("sum", "avg"):
        raise NotFused(f"op {nodes.arguments(reduction)['reduce_op']}")
    source = _input_of(collective)
    for product in source.products:
        check_product(product)
        if not nodes.have_one_shape(product.node, source.products[0].node):
            raise NotFused("the products of the sum have different shapes")
        _check_bias(product)
    scatters = reduction.target is c10d.reduce_scatter_tensor.default
    if scatters:
        _check_rows(source)
    _rewrite(collective, source, scatters)
    return "gemm_rs" if scatters else "gemm_ar", ""


def _check_bias(product):
    """Raise NotFused if a product with a bias may have few rows."""
    rows = value_of(product.node).shape[0]
    if product.bias is not None and not nodes.is_known(rows >= _LEAST_ROWS_OF_BIASED):
        raise NotFused(
            f"{product.node.name} adds its bias on each rank, before the reduction, and may have fewer than "
            f"{_LEAST_ROWS_OF_BIASED} rows"
        )


# ---- matching ----


def _input_of(collective):
    """Return the products of a reduction. Raises NotFused if there are none that are used only by it."""
    node, user, chain, dim = collective.source, collective.node, [], 0
    whole = node
    if collective.node.target is c10d.reduce_scatter_tensor.default and node.target is aten.cat.default:
        matched = nodes.pieces_of(node, collective.ranks)
        if matched is None or nodes.arguments(node)["dim"] != 0:
            raise NotFused("no mm produces its input, aten.cat does")
        if list(node.users) != [user]:
            raise NotFused(f"aten.cat has {len(node.users)} users")
        whole, dim, pieces = matched
        chain += [node, *pieces]
        node, user = whole, pieces[0]
    return _Input(_products(node, user, chain, "its input"), chain, whole, dim)


def _products(node, user, chain, role):
    """Return the products that are added in a tensor, and append the nodes after them to ``chain``."""
    while nodes.passes_values_on(node):
        _check_users(node, [user, *chain])
        chain.append(node)
        node, user = node.args[0], node
    if node.target is aten.add.Tensor and _is_plain_sum(node):
        _check_users(node, [user, *chain])
        chain.append(node)
        terms = [nodes.arguments(node)[name] for name in ("self", "other")]
        return [product for term in terms for product in _products(term, node, chain, "a term of its input")]
    product = as_product(node)
    if product is None:
        raise NotFused(_no_product(node, role))
    _check_users(node, [user, *chain])
    return [product]


def _is_plain_sum(node):
    """Return whether a node adds two different tensors of one shape and dtype."""
    called = nodes.arguments(node)
    terms = called["self"], called["other"]
    return terms[0] is not terms[1] and called["alpha"] == 1 and nodes.have_one_shape(*terms)


def _check_users(node, own):
    """Raise NotFused if a tensor has users besides those of the pattern, so that it is needed in memory."""
    others = [user for user in node.users if user not in own and not nodes.is_size(user)]
    if others:
        kind = "mm" if as_product(node) else nodes.name_of(node)
        raise NotFused(f"{kind} has {len(others) + 1} users, also {nodes.name_of(others[0])}")


def _no_product(node, role):
    """Return why a node is not a product that can be fused."""
    is_item = node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node)
    producers = {getattr(one.target, "namespace", "") for one in [node, *([node.args[0]] if is_item else [])]}
    if "tdkernels" in producers:
        return "its mm is fused with an all-gather"
    name = f"the input {node.name}" if node.op == "placeholder" else nodes.name_of(node)
    return f"no mm produces {role}, {name} does"


def _check_rows(source):
    """Raise NotFused unless rows of the product are scattered, and not parts of rows."""
    shape, n = value_of(source.whole).shape, value_of(source.products[0].node).shape[1]
    if source.dim == len(shape) - 1:
        raise NotFused("its last dimension is scattered")
    if not nodes.is_known(shape[-1] == n):
        raise NotFused(f"rows of the mm are divided by a view {list(shape)}")


# ---- rewriting ----


def _operands(graph, products):
    """Return x [M, K] and weight [N, K] of a sum of products; those of several products are concatenated along K."""
    lefts, rights = [product.left for product in products], [product.right for product in products]
    if len(products) == 1:
        return lefts[0], nodes.as_weight(graph, rights[0])
    x = add(graph, aten.cat.default, lefts, 1)
    if all(nodes.is_known(value_of(right).stride(1) == 1) for right in rights):
        return x, nodes.as_weight(graph, add(graph, aten.cat.default, rights, 0))
    return x, add(graph, aten.cat.default, [nodes.as_weight(graph, right) for right in rights], 1)


def _call(graph, collective, source, scatters):
    """Add the operator at the insertion point, and return its output [rows, N]."""
    x, weight = _operands(graph, source.products)
    if not scatters:
        return add(graph, _ops.gemm_ar.default, x, weight, None, collective.group, "")
    segment_rows = None
    if source.dim:
        sizes = nodes.sizes_apart(graph, source.whole)[source.dim : -1]
        segment_rows = nodes.product(graph, [nodes.divided(graph, sizes[0], collective.ranks), *sizes[1:]])
    return add(graph, _ops.gemm_rs.default, x, weight, None, segment_rows, collective.group, "")


def _with_biases(graph, collective, source, z):
    """Return z plus the biases of the products, summed over the ranks."""
    biases = [product.bias for product in source.products if product.bias is not None]
    if not biases:
        return z
    total = biases[0]
    for bias in biases[1:]:
        total = add(graph, aten.add.Tensor, total, bias)
    total = add(graph, c10d.all_reduce.default, total, "sum", collective.group)
    return add(graph, aten.add.Tensor, z, add(graph, c10d.wait_tensor.default, total))


def _result_sizes(graph, collective, source, scatters):
    """Return the sizes of the result of the collective."""
    sizes = nodes.sizes_apart(graph, source.whole)
    if scatters:
        sizes[source.dim] = nodes.divided(graph, sizes[source.dim], collective.ranks)
    if scatters and not source.dim and isinstance(sizes[0], fx.Node):
        sizes[0] = -1  # torch would not simplify the sizes of the view that follow it
    return sizes


def _rewrite(collective: Collective, source: _Input, scatters: bool) -> None:
    """Insert the operator in front of the collective, and erase the nodes that it replaces."""
    node, graph = collective.node, collective.node.graph
    produced = [product.node for product in source.products]
    for view in [*produced, *source.chain]:
        if view in produced or nodes.passes_values_on(view) or view.target is aten.add.Tensor:
            nodes.take_sizes(graph, view)
    with graph.inserting_before(node):
        z = _with_biases(graph, collective, source, _call(graph, collective, source, scatters))
        if nodes.arguments(node)["reduce_op"].lower() == "avg":
            z = add(graph, aten.div.Tensor, z, collective.ranks)
        z = nodes.reshaped(graph, z, _result_sizes(graph, collective, source, scatters))
    collective.wait.replace_all_uses_with(z)
    for user in [user for user in node.users if user is not collective.wait]:
        user.replace_input_with(node, z)
    rights = [product.right for product in source.products if product.right.op != "placeholder"]
    nodes.erase_unused(graph, [*produced, *source.chain, node, collective.wait, *rights])
