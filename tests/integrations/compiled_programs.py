"""Programs compiled by AOTAutograd and the pass of tdkernels.integrations.inductor, and their comparison."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from tdkernels.integrations import inductor
from tests.integrations.torchtitan_layers import draw

# torch 2.13 renames them.
gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
scatter = getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd
all_reduce = funcol.all_reduce
COLLECTIVES = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


def world():
    return dist.group.WORLD


def own(*shape, seed=0, dtype=torch.float32):
    """Return small integers that differ between ranks."""
    return draw(*shape, seed=1000 * dist.get_rank() + seed, dtype=dtype)


def one_product(dim):
    return lambda x, w: F.linear(gather(x, dim, world()), w)


class Compiled:
    """A function compiled by AOTAutograd and the pass; ``graphs`` are the rewritten graphs."""

    def __init__(self, function, passes=None):
        self.passes, self.graphs = passes or inductor.overlap_pass(), []
        torch._dynamo.reset()
        self.call = torch.compile(function, backend=self._backend, fullgraph=True)

    def _compile(self, gm, example_inputs):
        from functorch.compile import make_boxed_func

        self.passes(gm)
        gm.graph.lint()
        self.graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def _backend(self, gm, example_inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.compile_fx import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        return aot_autograd(
            fw_compiler=self._compile, bw_compiler=self._compile, decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )(gm, example_inputs)

    def count(self, name):
        """Return the number of calls of an operator in all graphs."""
        return sum(getattr(node.target, "_opname", "") == name for graph in self.graphs for node in graph.nodes)

    def counts(self):
        """Return {operator: number} for the collectives and for the operators of tdkernels, without zeros."""
        names = *COLLECTIVES, "ag_gemm", "ag_gemm_multi", "gemm_rs", "gemm_ar"
        return {name: number for name in names if (number := self.count(name))}


def same(function, *args, counts, passes=None):
    """Compare outputs and gradients of a compiled function with the eager ones; return the compiled function."""
    outputs, compiled = [], Compiled(function, passes)
    for call in (function, compiled.call):
        inputs = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
        ys = call(*inputs)
        ys = list(ys) if isinstance(ys, tuple) else [ys]
        if ys[0].requires_grad:
            sum((y * y.detach().sign()).sum() for y in ys).backward()
        outputs.append([y.detach() + 0 for y in ys] + [one.grad for one in inputs])
    for expected, y in zip(*outputs, strict=True):
        assert (expected is None) == (y is None)
        assert y is None or torch.equal(expected, y)
    assert counts is None or compiled.counts() == counts
    return compiled
