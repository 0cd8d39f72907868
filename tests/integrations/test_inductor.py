"""The pass of tdkernels.integrations.inductor: results equal those of the unfused program, and the report is complete.

Most tests run the graphs of AOTAutograd after the pass without inductor's code generation, which takes most of the time
of a compilation.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

from tdkernels.integrations import inductor
from tdkernels.integrations.inductor import reduction
from tests.integrations.compiled_programs import Compiled, all_reduce, gather, one_product, own, same, scatter, world
from tests.integrations.torchtitan_layers import draw
from tests.support.ranks import device, on_ranks

# ---- all-gather ----


def several_products(x, w, v, b):
    full = gather(x, 1, world())
    return F.linear(full, w), F.linear(full, v, b), full @ w.t()


def late_weight(x, w):
    """The weight is computed after the gathered tensor is used: it must be moved."""
    full = gather(x, 0, world())
    y = full.sum(1)
    return full @ (w + y[0]).t(), full @ (2 * w + 1).t(), y


def both_orders(x, w):
    """The gathered tensor is needed in the order of ranks, and as [B, S, H]."""
    group = world().group_name
    full = funcol.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 2, group))
    return torch.cat(full.chunk(2), 1) @ w.t(), full.relu(), torch.cat(full.chunk(2), 1).neg()


def gathers():
    x, w, v, b = own(4, 6, 8), own(12, 8, seed=1), own(10, 8, seed=2), own(10, seed=3)
    same(one_product(0), x[0], w, counts={"ag_gemm": 1})
    same(one_product(0), x, w, counts={"ag_gemm": 1})
    same(one_product(1), x.bfloat16(), w.bfloat16(), counts={"ag_gemm_multi": 1})
    compiled = same(one_product(1), x[:1], w, counts=None)
    # torch 2.11 leaves the concatenation of a single sequence in the graph.
    assert compiled.counts() in ({"ag_gemm": 1}, {"ag_gemm_multi": 1})
    same(one_product(2), own(2, 3, 2, 8), w, counts={"ag_gemm_multi": 1})
    compiled = same(several_products, x, w, v, b, counts={"ag_gemm_multi": 1})
    assert str(compiled.passes.report) == "1 of 1 collectives fused in 1 graph: 1 ag_gemm"
    node = next(node for node in compiled.graphs[0].nodes if "ag_gemm_multi" in str(node.target))
    assert len(node.args[1]) == 3 and node.args[4] is False
    assert compiled.count("mm") == compiled.count("addmm") == compiled.count("cat") == 0


def gathers_for_other_users():
    x, w = own(4, 6, 8), own(12, 8, seed=1)
    compiled = same(late_weight, x[0], w, counts={"ag_gemm_multi": 1})
    assert compiled.count("mm") == 1, "the weight that depends on the gathered tensor is multiplied by torch"
    assert str(compiled.passes.report).endswith(
        "\ngraph 0: all_gather_into_tensor [6, 8] float32: "
        "ag_gemm, but not all products: both operands of mm depend on it"
    )
    same(both_orders, x, w, counts={"ag_gemm_multi": 1})
    for dim in (0, 1):
        compiled = same(one_product(dim), x.requires_grad_(), w.requires_grad_(), counts={
            "ag_gemm_multi": 1, "gemm_rs": 1,
        })
        assert str(compiled.passes.report) == "2 of 2 collectives fused in 2 graphs: 1 ag_gemm, 1 gemm_rs"


def test_all_gather():
    on_ranks(2, gathers)


def test_gathered_tensor_has_other_users():
    on_ranks(2, gathers_for_other_users)


# ---- reductions ----


def product_then_scatter(dim):
    return lambda x, w: scatter(x @ w.t(), "sum", dim, world())


def product_then_sum(x, w, b):
    return all_reduce(F.linear(x, w), "sum", world()) + b


def means(x, w):
    """torch has no mean on a CPU, so that only the compiled function runs."""
    scattered = funcol.reduce_scatter_tensor(x @ w.t(), "avg", 1, world())
    return scattered, all_reduce(x[0] @ w.t(), "avg", world())


def reduces():
    x, w, b = own(4, 6, 8), own(12, 8, seed=1), own(12, seed=2)
    for dim, one in ((0, x[0]), (0, x), (1, x), (2, own(2, 3, 4, 8)), (1, x.bfloat16())):
        same(product_then_scatter(dim), one, w.to(one.dtype), counts={"gemm_rs": 1})
    for one in (x, x[0, :5], x.bfloat16()):
        compiled = same(product_then_sum, one, w.to(one.dtype), b.to(one.dtype), counts={"gemm_ar": 1})
        assert compiled.count("mm") == compiled.count("addmm") == 0
    compiled = Compiled(means)
    scattered, total = compiled.call(x, w)
    assert torch.equal(scattered, funcol.reduce_scatter_tensor(x @ w.t(), "sum", 1, world()) / 2)
    assert torch.equal(total, all_reduce(x[0] @ w.t(), "sum", world()) / 2)
    assert compiled.counts() == {"gemm_rs": 1, "gemm_ar": 1}


def test_reduce_scatter_and_all_reduce():
    on_ranks(2, reduces)


def two_biased_products(x, w, b, v):
    y = F.linear(x, w, b) + F.linear(x.neg(), v, b + 1) + x @ v.t()
    return scatter(y, "sum", 1, world()), all_reduce(F.linear(x[0], w, b), "sum", world())


def biased_mean(x, w, b):
    return funcol.reduce_scatter_tensor(F.linear(x, w, b), "avg", 0, world())


def reduces_biased_products():
    """Biases that the ranks add before a reduction differ between the ranks here."""
    x, w, v, b = own(4, 6, 8), own(12, 8, seed=1), own(12, 8, seed=2), own(12, seed=3)
    with mock.patch.object(reduction, "_LEAST_ROWS_OF_BIASED", 1):
        for one in (x, x.bfloat16()):
            same(lambda x, w, b: all_reduce(F.linear(x, w, b), "sum", world()), one, w.to(one.dtype), b.to(one.dtype),
                 counts={"all_reduce": 1, "gemm_ar": 1})
        for dim in (0, 1):
            same(lambda x, w, b, dim=dim: scatter(F.linear(x, w, b), "sum", dim, world()), x, w, b,
                 counts={"all_reduce": 1, "gemm_rs": 1})
        compiled = same(two_biased_products, x, w, b, v, counts={"all_reduce": 2, "gemm_rs": 1, "gemm_ar": 1})
        assert compiled.count("mm") == compiled.count("addmm") == 0
        assert str(compiled.passes.report) == "2 of 2 collectives fused in 1 graph: 1 gemm_ar, 1 gemm_rs"
        compiled = Compiled(biased_mean)
        expected = funcol.reduce_scatter_tensor(F.linear(x, w, b), "sum", 0, world()) / 2
        assert torch.equal(compiled.call(x, w, b), expected)
        assert compiled.counts() == {"all_reduce": 1, "gemm_rs": 1}
        compiled = Compiled(lambda x, w, b: all_reduce(F.linear(x, w, b), "sum", world()))
        for rows in (4, 6):  # a symbolic number of rows may be any
            one = own(rows, 8)
            torch._dynamo.mark_dynamic(one, 0)
            assert torch.equal(compiled.call(one, w, b), all_reduce(F.linear(one, w, b), "sum", world()) + 0)


def test_biases_before_a_reduction():
    on_ranks(2, reduces_biased_products)


# ---- training ----


def mlp(x, gate, up, down):
    """Tensor and sequence parallelism of [B, S / W, H]."""
    full = gather(x, 1, world())
    return scatter((F.linear(full, gate).relu() * F.linear(full, up)) @ down.t(), "sum", 1, world())


def trains():
    tensors = [own(2, 4, 8), own(12, 8, seed=1), own(12, 8, seed=2), own(8, 12, seed=3)]
    compiled = same(mlp, *(one.requires_grad_() for one in tensors), counts={"ag_gemm_multi": 2, "gemm_rs": 2})
    assert str(compiled.passes.report) == "4 of 4 collectives fused in 2 graphs: 2 ag_gemm, 2 gemm_rs"


def test_training_step():
    on_ranks(2, trains)


class MLP(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=bias), nn.Linear(16, 8, bias=bias)

    def forward(self, x):
        return self.down(self.up(x).relu())


def dtensor_models():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh(device().type, (2,))
    x = draw(2, 4, 8, seed=9)
    sequence = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    few = "addmm_1 adds its bias on each rank, before the reduction, and may have fewer than 256 rows"
    for bias, (columns, rows), least_rows, counts, reasons in (
        (False, sequence, 256, {"ag_gemm_multi": 2, "gemm_rs": 2}, []),
        (True, sequence, 256, {"reduce_scatter_tensor": 1, "ag_gemm_multi": 2, "gemm_rs": 1}, [few]),
        (True, sequence, 1, {"all_reduce": 1, "ag_gemm_multi": 2, "gemm_rs": 2}, []),
        (False, ({}, {}), 256, {"gemm_ar": 2}, []),
    ):
        model = MLP(bias)
        for seed, one in enumerate(model.parameters()):
            one.data = draw(*one.shape, seed=seed)
        plan = {"up": ColwiseParallel(**columns), "down": RowwiseParallel(**rows)}
        parallelize_module(model, mesh, plan)
        results, compiled = [], Compiled(model)
        for call in (model, compiled.call):
            one = x.clone().requires_grad_()
            with mock.patch.object(reduction, "_LEAST_ROWS_OF_BIASED", least_rows):
                y = call(one)
                (y * y.detach().sign()).sum().backward()
            results.append([y.detach(), one.grad, *(p.grad.to_local() for p in model.parameters())])
            model.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert compiled.counts() == counts
        assert [entry.reason for entry in compiled.passes.report.entries if not entry.runs] == reasons


def test_dtensor_models():
    on_ranks(2, dtensor_models)


# ---- dynamic shapes ----


def symbolic_sizes():
    w, v = own(12, 8, seed=1), own(8, 12, seed=2)
    cases = [
        (one_product(0), (0,), {"ag_gemm": 1}), (one_product(1), (0, 1), {"ag_gemm_multi": 1}),
        (product_then_scatter(0), (0,), {"gemm_rs": 1}), (product_then_scatter(1), (0, 1), {"gemm_rs": 1}),
        (lambda x, w: all_reduce(x @ w.t(), "sum", world()), (0, 1), {"gemm_ar": 1}),
    ]
    for function, dims, counts in cases:
        compiled = Compiled(function)
        for shape in ((4, 6, 8), (6, 10 if 1 in dims else 6, 8)):
            x = own(*shape)
            for dim in dims:
                torch._dynamo.mark_dynamic(x, dim)
            assert torch.equal(compiled.call(x, w), function(x, w) + 0)
        assert (len(compiled.graphs), compiled.counts()) == (1, counts)
    compiled = Compiled(mlp)
    for rows in (4, 6):
        x = own(2, rows, 8)
        torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled.call(x, w, w, v), mlp(x, w, w, v) + 0)
    assert compiled.counts() == {"ag_gemm_multi": 1, "gemm_rs": 1}


def test_dynamic_shapes():
    on_ranks(2, symbolic_sizes)


# ---- the report ----


def two_users(x, w):
    y = x @ w.t()
    return scatter(y, "sum", 0, world()), y.relu()


def square(x):
    full = gather(x, 0, world())
    return full @ full.t()


def chain(x, w, v):
    """The product of the gathered rows is scattered."""
    return scatter(gather(x, 0, world()) @ w.t(), "sum", 0, world())


def reports():
    x, w, b = own(4, 8), own(8, 8, seed=1), own(8, seed=2)
    cases = [  # (function, the collective in the report, the reason)
        (lambda x, w: gather(x, 0, world()).relu(), "all_gather_into_tensor [4, 8] float32",
         "no mm multiplies its rows, its users are aten.relu"),
        (lambda x, w: w @ gather(x, 0, world()), None, "no mm multiplies its rows, its users are aten.mm"),
        (lambda x, w: gather(x.t().contiguous(), 1, world()) @ w.repeat(1, 1)[:, :8], None,
         "its last dimension is gathered"),
        (lambda x, w: gather(x.double(), 0, world()) @ w.double(), "all_gather_into_tensor [4, 8] float64",
         "dtype float64"),
        (lambda x, w: square(x), None, "both operands of mm depend on it"),
        (two_users, "reduce_scatter_tensor [4, 8] float32", "mm has 2 users, also aten.relu"),
        (lambda x, w: scatter((x @ w).relu(), "sum", 0, world()), None, "no mm produces its input, aten.relu does"),
        (lambda x, w: scatter((x @ w).view(8, 4) + w @ x.t(), "sum", 0, world()), None,
         "the products of the sum have different shapes"),
        (lambda x, w: scatter(x @ w + x, "sum", 0, world()), None,
         "no mm produces a term of its input, the input arg0_1 does"),
        (lambda x, w: scatter(x @ w, "sum", 1, world()), None, "its last dimension is scattered"),
        (lambda x, w: all_reduce(x @ w, "max", world()), "all_reduce [4, 8] float32", "op max"),
        (lambda x, w: all_reduce(F.linear(x, w, b), "sum", world()), None,
         "addmm adds its bias on each rank, before the reduction, and may have fewer than 256 rows"),
        (lambda x, w: all_reduce(x, "sum", world()), None, "no mm produces its input, the input arg0_1 does"),
        (lambda x, w: funcol.all_to_all_single(x @ w, None, None, world()), "all_to_all_single [4, 8] float32",
         "no operator of tdkernels contains this collective"),
    ]
    for function, collective, reason in cases:
        compiled = same(function, x, w, counts=None)
        (entry,) = compiled.passes.report.entries
        assert entry.runs is None and entry.reason == reason
        assert collective is None or entry.collective == collective
    compiled = same(chain, x, w, w, counts={"ag_gemm": 1, "reduce_scatter_tensor": 1})
    assert str(compiled.passes.report) == (
        "1 of 2 collectives fused in 1 graph: 1 ag_gemm\n"
        "graph 0: reduce_scatter_tensor [8, 8] float32: its mm is fused with an all-gather"
    )
    compiled = same(chain, x, w, w, counts={"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
                    passes=inductor.overlap_pass(groups=[]))
    assert str(compiled.passes.report).count("float32: the pass has no group 0") == 2
    with inductor.installed([world()]) as passes, pytest.raises(ValueError, match=r"already, for the groups \('0',\)"):
        inductor.install()
    same(chain, x, w, w, counts={"ag_gemm": 1, "reduce_scatter_tensor": 1}, passes=passes)
    assert inductor.overlap_pass(groups=[world()]).uuid() != inductor.overlap_pass().uuid()
    assert "no graph was compiled" in str(inductor.overlap_pass().report)


def test_report():
    on_ranks(2, reports)
