"""Expected results of the dense operators, from the unsharded computation, and the error bound.

    case = Case("ag_gemm", torch.bfloat16, rows=37, n=29, k=51, bias=True)
    case.check(case.run())                # forward and every gradient, by name

Every rank draws the same full operands from the seed and keeps its shard.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from tests.support.ranks import device
from tests.support.subset import THOROUGH

GRADIENTS = {"x": "dx", "weight": "dweight", "bias": "dbias"}

# The sizes of each tensor, and the dimension along which each operator shards it. A tensor that is not listed is
# replicated. The gradient of a tensor has the same sizes.
SIZES = {"x": "MK", "weight": "NK", "bias": "N", "output": "MN"}
DIVIDED = {
    "ag_gemm": {"x": "M", "weight": "N", "bias": "N", "output": "N"},
    "gemm_rs": {"x": "K", "weight": "K", "output": "M"},
    "gemm_ar": {"x": "K", "weight": "K"},
    "column_linear": {"weight": "N", "bias": "N", "output": "N"},
}
OPERATORS = ["ag_gemm", "gemm_rs", "gemm_ar"]  # with an exchange in the forward
_LIKE = {"dy": "output", **{gradient: name for name, gradient in GRADIENTS.items()}}  # tensor with the same sizes


def whole_shape(operator, rows, n, k, world_size):
    """Return M, N and K of the whole problem for a rank's rows, n and k."""
    divided = DIVIDED[operator].values()
    return tuple(world_size * own if size in divided else own for size, own in zip("MNK", (rows, n, k), strict=True))


class Case:
    """A rank's shard of one problem, on the rank's device.

    Args:     operator: one of OPERATORS
              rows, n, k: a rank's share of M, N and K, or the whole size if the operator does not shard it: the weight
              of a rank is [n, k], x of ag_gemm and gemm_ar is [rows, k], the output of gemm_rs and gemm_ar is [rows, n]
              exact: draw from -1, 0 and 1, so that every sum is exact in every dtype and `check` requires equality
              rank, world_size: in the group that the operator is called with; None means the world

    x, weight, bias and dy are this rank's operands and its shard of the gradient of the output; a test may replace them
    with tensors of the same values. `expected` and `low` hold this rank's shard of the results, by name: in fp64 from
    the unsharded computation, and as torch computes them in the dtype on the device. `whole` names the replicated
    results, `shape` is that of the whole problem: M, N, K.
    """

    def __init__(
        self, operator, dtype, rows, n, k, *, bias=True, seed=0, exact=False, rank=None, world_size=None
    ):
        self.rank = dist.get_rank() if rank is None else rank
        self.world_size = dist.get_world_size() if world_size is None else world_size
        self.operator, self.dtype, self.exact = operator, dtype, exact
        self.title = f"{operator} {dtype} rows={rows} n={n} k={k} rank {self.rank} of {self.world_size}"
        self.divided = DIVIDED[operator]
        self.whole = {GRADIENTS.get(name, name) for name in SIZES.keys() - self.divided.keys()}
        self.shape = whole_shape(operator, rows, n, k, self.world_size)
        sizes = dict(zip("MNK", self.shape, strict=True))
        generator = torch.Generator().manual_seed(seed)

        def draw(name, scale=1.0):
            shape = [sizes[size] for size in SIZES[name]]
            if exact:
                return torch.randint(-1, 2, shape, generator=generator).double()
            return (torch.randn(shape, generator=generator) * scale).to(dtype).double()

        x, weight, dy = draw("x"), draw("weight", scale=sizes["K"] ** -0.5), draw("output")
        operands = {"x": x, "weight": weight}
        if bias:
            operands["bias"] = draw("bias")

        self.expected = self.own_parts(_unsharded(operands, dy))
        to_device = {"device": device(), "dtype": dtype}
        full = {name: operand.to(**to_device) for name, operand in operands.items()}
        own = self.own_parts({**operands, "dy": dy})
        self.low = self.own_parts(_unsharded(full, dy.to(**to_device)))
        self.low |= self._local_products(full, dy.to(**to_device))
        # A copy, so that it is a separate tensor and not a view of the full one.
        own = {name: part.to(**to_device).clone(memory_format=torch.contiguous_format) for name, part in own.items()}
        self.x, self.weight = own["x"].requires_grad_(), own["weight"].requires_grad_()
        self.bias = own["bias"].requires_grad_() if bias else None
        self.dy = own["dy"]

    def _local_products(self, full, dy):
        """Return the results that a rank computes whole from its own or gathered operands, by torch in its shapes.

        A library uses another order of summation for another shape, which can double the error of a small fp32 result.
        """
        own = self.own_parts({**full, "dy": dy})
        # Rows are gathered; columns are not.
        x = full["x"] if self.divided.get("x") == "M" else own["x"]
        dy = dy if self.divided.get("output") == "M" else own["dy"].contiguous()
        results = {"dweight": dy.t() @ x}
        # If K is sharded, the local product is only a partial sum.
        if "K" not in self.divided.values():
            results["output"] = F.linear(x, own["weight"], own.get("bias"))
        if "N" not in self.divided.values():
            results["dx"] = dy @ own["weight"]
        if "bias" in full:
            results["dbias"] = dy.sum(0)
        return results

    def own_parts(self, full):
        """This rank's part of the named full tensors."""

        def part(name, tensor):
            if name not in self.divided:
                return tensor
            return tensor.tensor_split(self.world_size, SIZES[name].index(self.divided[name]))[self.rank]

        return {name: part(_LIKE.get(name, name), tensor) for name, tensor in full.items()}

    def call(self, **options):
        return getattr(tdkernels, self.operator)(self.x, self.weight, self.bias, **options)

    def runs_backward(self, **options):
        """Return whether ``run(None, …)`` with these options runs the backward.

        The backward of ag_gemm and gemm_rs depends on the method of a config, and on none of its other fields. So
        with a config of the method "fused" it repeats that of a call without a config, which costs more than the
        forward. It then runs with TDKERNELS_TEST_THOROUGH only.
        """
        config = options.get("config")
        repeats = config is not None and config.method == "fused" and "main_grad" not in options
        return THOROUGH or self.operator == "gemm_ar" or not repeats

    def run(self, backward=None, **options):
        """Run forward and backward; return "output" and the gradients of operands that require one, by name."""
        for operand in (self.x, self.weight, self.bias):
            if operand is not None:
                operand.grad = None
        output = self.call(**options)
        if output.requires_grad and (self.runs_backward(**options) if backward is None else backward):
            output.backward(self.dy.view(output.shape))
        return {"output": output.detach(), **self.gradients()}

    def gradients(self):
        """Return the gradients of the operands, by name."""
        operands = {name: getattr(self, name) for name in GRADIENTS}
        return {GRADIENTS[n]: t.grad for n, t in operands.items() if t is not None and t.grad is not None}

    def check(self, results):
        """Raise AssertionError if one of the named results exceeds the error bound."""
        tdkernels.synchronize()  # raises the error of a kernel before its result is compared
        for name, got in results.items():
            title = f"{name} of {self.title}"
            got = got.reshape(self.expected[name].shape)
            if self.exact:
                assert got.dtype == self.dtype, f"{title}: {got.dtype}"
                wrong = (got.cpu().double() != self.expected[name]).sum().item()  # a NaN is unequal too
                assert wrong == 0, f"{title}: {wrong} of {got.numel()} elements are wrong"
            else:
                assert_close(title, got, self.expected[name], self.low[name])


def _unsharded(operands, dy):
    """Return output and gradients of F.linear on full operands, by name."""
    operands = {name: operand.detach().clone().requires_grad_() for name, operand in operands.items()}
    output = F.linear(operands["x"], operands["weight"], operands.get("bias"))
    output.backward(dy)
    return {"output": output.detach(), **{GRADIENTS[name]: operand.grad for name, operand in operands.items()}}


def relative_error(value, exact):
    """Return |value - exact| / |exact| in the Frobenius norm, in fp64; NaN or infinite if ``value`` is."""
    exact = exact.detach().cpu()
    difference = (value.detach().cpu().double() - exact).norm().item()
    scale = exact.norm().item()
    if scale == 0.0:  # empty or all zeros
        return 0.0 if difference == 0.0 else math.inf
    return difference / scale


def assert_close(name, got, exact, low):
    """Raise AssertionError if the error of ``got`` exceeds twice that of torch's ``low``; ``exact`` is in fp64."""
    assert got.shape == exact.shape, f"{name}: shape {list(got.shape)}, not {list(exact.shape)}"
    assert got.dtype == low.dtype, f"{name}: {got.dtype}, not {low.dtype}"
    # A small output may be exact in torch by chance, so the bound is at least one rounding, u = eps / 2.
    bound = 2 * max(relative_error(low, exact), torch.finfo(low.dtype).eps / 2)
    assert math.isfinite(bound), f"{name}: plain torch is off by {bound / 2}, which bounds nothing"
    error = relative_error(got, exact)
    assert error <= bound, f"{name}: relative error {error:.3g} is above {bound:.3g}"  # false for NaN too
