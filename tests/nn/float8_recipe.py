"""The recipes of torchao.float8 for tensor-parallel linear layers, in plain torch on one process, and comparisons."""

import copy

import torch

from tdkernels.ops.common.scaling import dequantize, quantize_ref
from tests.ops.dense.scaled_cases import ACCUMULATOR
from tests.support.ranks import device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Product:
    """A product left @ right.T in fp64, with both operands quantized along their rows, and bounds of its error.

    Attributes:
        value: The product.
        magnitude: The product of the magnitudes.
        partials: The sum of the magnitudes of the partial products that ranks send.
    """

    def __init__(self, left, right, recipe=None, gradient=False):
        if recipe is not None:
            scaling = "row" if recipe == "rowwise" else "tensor"
            e5m2 = gradient and recipe == "tensorwise"
            left = dequantize(*quantize_ref(left.float(), scaling, E5M2 if e5m2 else E4M3), torch.float64)
            right = dequantize(*quantize_ref(right.float(), scaling, E4M3), torch.float64)
        left, right = left.double(), right.double()
        self.value, self.magnitude = left @ right.t(), left.abs() @ right.abs().t()
        self.partials = self.value.abs()

    def __add__(self, other):
        total = copy.copy(self)
        for name in ("value", "magnitude", "partials"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total

    def own(self, part):
        """Return the product with ``part`` applied to all matrices."""
        result = copy.copy(self)
        result.value, result.magnitude, result.partials = map(part, (self.value, self.magnitude, self.partials))
        return result


def column_recipe(x, weights, biases, dys, recipe, dweight_recipe):
    """Return ([y of each rank], dx, [dweight of each rank])."""
    ys = [Product(x, weight, recipe) for weight in weights]
    for y, bias in zip(ys, biases, strict=True):
        y.value = y.value + bias.double()
    parts = [Product(dy, weight.t(), recipe, True) for dy, weight in zip(dys, weights, strict=True)]
    return ys, add(parts), [Product(dy.t(), x.t(), dweight_recipe, True) for dy in dys]


def row_recipe(xs, weights, bias, dy, recipe, dweight_recipe):
    """Return (y, [dx of each rank], [dweight of each rank])."""
    y = add([Product(x, weight, recipe) for x, weight in zip(xs, weights, strict=True)])
    y.value = y.value + bias.double()
    dxs = [Product(dy, weight.t(), recipe, True) for weight in weights]
    return y, dxs, [Product(dy.t(), x.t(), dweight_recipe, True) for x in xs]


def add(products):
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total


def expect(layer, x, weight, bias, dy, recipe, dweight_recipe, rank, ranks, of_rows):
    """Return the expected (y, dx, dweight, rows that the gradient of the bias sums) of this rank."""
    if layer == "column":
        dys = dy.chunk(ranks, 1)
        ys, dx, grads = column_recipe(x, weight.chunk(ranks), bias.chunk(ranks), dys, recipe, dweight_recipe)
        return ys[rank], dx.own(of_rows), grads[rank], dys[rank]
    y, dxs, grads = row_recipe(x.chunk(ranks, 1), weight.chunk(ranks, 1), bias, dy, recipe, dweight_recipe)
    return y.own(of_rows), dxs[rank], grads[rank], dy


def draw(*shape, seed, dtype):
    """Return normal numbers in rows and columns of different sizes, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp(torch.randn(*shape[:-1], 1, generator=generator))
    return (x * torch.exp(torch.randn(shape[-1], generator=generator))).to(dtype).to(device())


def rows_of(x):
    return x.reshape(-1, x.shape[-1]).cpu()


def close(name, got, expected, case):
    """Compare a tensor [..., columns] with a Product or with a sum in fp64."""
    unit = torch.finfo(got.dtype).eps
    got = rows_of(got) if got.dim() > 1 else got.cpu()
    value = expected.value if isinstance(expected, Product) else expected[0]
    magnitude = expected.magnitude if isinstance(expected, Product) else expected[1]
    partials = expected.partials if isinstance(expected, Product) else expected[0].abs()
    assert got.shape == value.shape, f"{name}: {got.shape}, {case}"
    allowed = ACCUMULATOR[device().type] * magnitude + unit * (2 * partials + value.abs()) + 1e-30
    error = (got.double() - value).abs()
    assert (error <= allowed).all(), f"{name}: error {(error / allowed).max()} of the allowed one, {case}"


def relative_error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()
