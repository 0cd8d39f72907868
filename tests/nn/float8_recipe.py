"""The recipes of torchao.float8 for tensor-parallel linear layers, in plain torch on one process, and comparisons."""

import copy

import torch

from tdkernels.ops.common.scaling import dequantize, quantize_ref
from tests.ops.dense.scaled_cases import ACCUMULATOR
from tests.support.ranks import device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_INSTRUCTION_K = 32  # elements of K that an fp8 instruction of the tensor cores of sm_90 multiplies


class Product:
    """A product left @ right.T in fp64, with both operands quantized along their rows, and bounds of its error.

    Attributes:
        value: The product.
        accumulator: Bound of the error of its accumulation.
        partials: The sum of the magnitudes of the partial products that ranks send.
    """

    def __init__(self, left, right, recipe=None, gradient=False):
        normal = None
        if recipe is not None:
            scaling = "row" if recipe == "rowwise" else "tensor"
            e5m2 = gradient and recipe == "tensorwise"
            quantized = quantize_ref(left.float(), scaling, E5M2 if e5m2 else E4M3), quantize_ref(
                right.float(), scaling, E4M3
            )
            left, right = (dequantize(*one, torch.float64) for one in quantized)
            normal = [torch.finfo(codes.dtype).tiny * scale.double() for codes, scale in quantized]
        left, right = left.double(), right.double()
        self.value = left @ right.t()
        self.partials = self.value.abs()
        if normal is None or device().type == "cpu":
            self.accumulator = ACCUMULATOR[device().type] * (left.abs() @ right.abs().t())
        else:
            self.accumulator = truncation(left, right, *normal)

    def __add__(self, other):
        total = copy.copy(self)
        for name in ("value", "accumulator", "partials"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total

    def own(self, part):
        """Return the product with ``part`` applied to all matrices."""
        result = copy.copy(self)
        result.value, result.accumulator, result.partials = map(part, (self.value, self.accumulator, self.partials))
        return result


def truncation(left, right, normal_l, normal_r):
    """Return a bound of the error of left @ right.T for dequantized operands on tensor cores of sm_90.

    An instruction adds _INSTRUCTION_K products and the accumulator. It aligns them to the largest exponent e of these
    addends, where the exponent of a product is the sum of those of its operands, and truncates each to a multiple of
    u = 2**(e - 13). With this rule an emulation of y of RowParallelLinear on 4 ranks, each with one instruction, gives
    1.06456 of 2**-11 times the sum of the magnitudes, and 1.06458 was measured on H200. No multiple of this sum is a
    tight bound: if one product is large, all others may lose up to u, even if they are small.

    A positive addend loses less than u, and a negative one gains less than u, so the products together change the
    result by at most u times the number of positive or of negative products. The accumulator changes it by at most u
    per instruction after the first. It is at most the sum of the positive or of the negative products, in any order of
    the products. A promoted accumulator is added in fp32, whose error is that on CPUs.

    Args:
        left, right: [M, K] and [N, K].
        normal_l, normal_r: Smallest normal number of their rows. Subnormal operands have its exponent.
    """
    products = left[:, None] * right[None]
    largest = (left.abs().maximum(normal_l)[:, None] * right.abs().maximum(normal_r)[None]).amax(-1)
    addends = (products > 0).sum(-1).maximum((products < 0).sum(-1))
    later = -(-left.shape[1] // _INSTRUCTION_K) - 1  # instructions after the first
    if later:
        sums = products.clamp(min=0).sum(-1), products.clamp(max=0).sum(-1).abs()
        largest, addends = largest.maximum(sums[0]).maximum(sums[1]), addends + later
    return 2.0**-13 * largest * addends + ACCUMULATOR["cpu"] * products.abs().sum(-1)


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
    is_product = isinstance(expected, Product)
    value = expected.value if is_product else expected[0]
    accumulator = expected.accumulator if is_product else ACCUMULATOR[device().type] * expected[1]
    partials = expected.partials if is_product else expected[0].abs()
    assert got.shape == value.shape, f"{name}: {got.shape}, {case}"
    allowed = accumulator + unit * (2 * partials + value.abs()) + 1e-30
    error = (got.double() - value).abs()
    assert (error <= allowed).all(), f"{name}: error {(error / allowed).max()} of the allowed one, {case}"


def relative_error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()
