"""quantize_fp8 against quantize_ref, bit for bit. The reference runs on the CPU, where all its divisions are IEEE's."""

import itertools
import math

import pytest
import torch

import tdkernels
from tdkernels.ops.common.scaling import dequantize, quantize_ref
from tdkernels.ops.quantize.op import dequantize_rows
from tests.lang.test_primitives import floats_to_round
from tests.support.ranks import device, on_ranks

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
KINDS = [("tensor", False), ("row", False), ("block", False), ("block", True)]  # (scaling, weight)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(got, expected, case):
    """Check codes and scales for equal bits; the sign of a NaN is undefined."""
    for name, one, other in zip(("codes", "scale"), got, expected, strict=True):
        one, other = one.cpu(), other.cpu()
        assert one.is_contiguous() and one.dtype == other.dtype and one.shape == other.shape, f"{name}: {case}"
        nan = other.float().isnan()
        assert torch.equal(one.float().isnan(), nan), f"NaN in {name}: {case}"
        bits = torch.uint8 if name == "codes" else torch.int32
        differs = (one.view(bits) != other.view(bits)) & ~nan
        assert not differs.any(), f"{differs.sum()} of {differs.numel()} {name} differ: {case}"


def equals_reference(x, kinds=KINDS, formats=FORMATS[:1], transposes=(False, True)):
    """Compare x [rows, K] for all kinds, with and without transposition."""
    for (scaling, weight), dtype, transpose in itertools.product(kinds, formats, transposes):
        got = tdkernels.quantize_fp8(x, scaling, dtype=dtype, weight=weight, transpose=transpose)
        rows = x.cpu().t().contiguous() if transpose else x.cpu()
        same(got, quantize_ref(rows, scaling, dtype, weight), f"{scaling} {weight=} {transpose=} {dtype} {x.shape}")


def draw(*shape, dtype=torch.float32, seed=0):
    """Return normal numbers in rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    for dim in (0, 1):
        sizes = [shape[dim], 1] if dim == 0 else [1, shape[dim]]
        x = x * torch.exp(torch.randn(*sizes, generator=generator))
    return x.to(dtype).to(device())


# ---- values ----


def quantizes():
    for dtype in DTYPES:
        equals_reference(draw(37, 200, dtype=dtype), formats=FORMATS)
    for number, shape in enumerate([(1, 1), (130, 128), (128, 129), (5, 64), (256, 16), (300, 80)]):
        equals_reference(draw(*shape, dtype=torch.bfloat16, seed=number))


def quantizes_long_groups():
    """A row and a column that are read twice, also if the last block is partial."""
    for columns in (16384, 16385, 24592):
        equals_reference(draw(3, columns, dtype=torch.bfloat16), [("row", False)], transposes=[False])
    for rows in (256, 257, 640):
        equals_reference(draw(rows, 40, dtype=torch.bfloat16), [("row", False)], transposes=[True])


def quantizes_special_values():
    """Zeros, -0, NaN, infinities, and denormal numbers, also with scales that are denormal or underflow."""
    for dtype in DTYPES:
        x = draw(300, 272, dtype=dtype)
        x[0] = 0.0
        x[1, ::2], x[1, 1::2] = -0.0, 0.0
        x[2, 5], x[3, 7], x[4, 9], x[4, 200] = math.nan, math.inf, -math.inf, math.nan
        x[:, 11], x[130, 12], x[131, 13] = 0.0, math.nan, math.inf
        x[5], x[:, 14] = 1e-40, -1e-40  # denormal in bf16 and fp32, 0 in fp16
        x[6], x[6, 3] = 0.0, 1e-43  # the scale underflows
        x[7] = torch.finfo(dtype).max
        x[8] = torch.finfo(dtype).tiny * torch.linspace(-2, 2, 272)
        x[128:256, 128:256] = 0.0
        equals_reference(x, formats=FORMATS)
        equals_reference(x.clamp(-1e-36, 1e-36).nan_to_num(), formats=FORMATS[:2])  # tensor-wise without NaN
    scale = tdkernels.quantize_fp8(x)[1]
    assert scale[0] == 0 and scale[2].isnan() and scale[3].isinf() and scale[4].isnan()


def rounds_to_nearest_even():
    """All numbers of bf16 and fp16, and the midpoints of codes and their neighbors, with the scale 1."""
    for dtype in FORMATS:
        last = 0x7E if dtype == FORMATS[0] else 0x7B if dtype == FORMATS[1] else 0x7F
        codes = torch.arange(last + 1).to(torch.uint8).view(dtype).float()
        midpoints = torch.cat([(codes[1:] + codes[:-1]) / 2, codes[-1:] * 1.0625]).view(torch.int32)
        neighbors = torch.cat([midpoints + offset for offset in (-1, 0, 1)]).view(torch.float32)
        x = torch.cat([floats_to_round(), neighbors, -neighbors])
        x = torch.nn.functional.pad(x, (0, -x.numel() % 1024), value=-math.inf).view(-1, 1024)
        assert x.isnan().any() and x.isinf().any()
        for scale, transpose in ((1.0, False), (1.0, True), (3.0, False)):
            given = torch.full((1, 1), scale, device=device())
            got = tdkernels.quantize_fp8(x.to(device()), "tensor", dtype=dtype, transpose=transpose, scale=given)
            assert got[1] is given
            most = torch.finfo(dtype).max
            expected = (x / scale).clamp(-most, most).to(dtype)
            same(got, (expected.t().contiguous() if transpose else expected, given), f"{dtype} {scale} {transpose}")


def divides_as_ieee():
    """Quotients next to the middle between two codes, for scales of all sizes."""
    generator = torch.Generator().manual_seed(7)
    integers = lambda *shape, below: torch.randint(below, shape, generator=generator)  # noqa: E731
    middles = torch.cat([torch.arange(1, 32) * 2.0**exponent for exponent in range(-20, 12)])
    for dtype, code in itertools.product(DTYPES, FORMATS[:2]):
        narrow, rows = dtype == torch.float16, 96
        exponents = integers(rows, 1, below=16 if narrow else 240) - (12 if narrow else 120)
        largest = ((1 + torch.rand(rows, 1, generator=generator)) * torch.exp2(exponents.float())).to(dtype)
        quotients = middles[integers(rows, 272, below=middles.numel())]
        x = (quotients * (largest.float() / torch.finfo(code).max)).to(dtype)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        x = (x.view(bits) + (integers(rows, 272, below=5) - 2).to(bits)).view(dtype)
        x = torch.where(x.abs() <= largest, x, largest)
        x[:, 0] = largest[:, 0]
        equals_reference((x * (2 * integers(rows, 272, below=2) - 1)).to(device()), formats=[code])


def divides_by_a_given_scale():
    """Powers of two over scales just below powers of two, and negative scales."""
    powers = torch.exp2(torch.arange(-149, 128).float()).repeat(2, 1)
    powers[1] *= -1
    for exponent in (-126, -81, -80, -9, 0, 9, 79, 80, 127):
        for sign in (1, -1):
            given = torch.full((1, 1), sign * (2 - 2.0**-23) * 2.0**exponent)
            for dtype in (torch.float32, torch.bfloat16):
                x = powers.to(dtype)
                got = tdkernels.quantize_fp8(x.to(device()), "tensor", scale=given.to(device()))
                codes = (x.float() / given).clamp(-448, 448).to(torch.float8_e4m3fn)
                same(got, (codes, given), f"{exponent=} {sign=} {dtype}")


def quantizes_by_a_given_scale():
    x = draw(37, 200)
    for transpose in (False, True):
        rows = x.t().contiguous() if transpose else x
        for scale in (0.0, 1e-30, 1e30, math.nan, math.inf):
            given = torch.full((1,), scale, device=device())
            got = tdkernels.quantize_fp8(x, "tensor", transpose=transpose, scale=given)
            codes = torch.where(given == 0, 0.0, rows / given).clamp(-448, 448).to(torch.float8_e4m3fn)
            same(got, (codes, given), f"{scale=} {transpose=}")
        own = tdkernels.quantize_fp8(x, "tensor", transpose=transpose)
        same(tdkernels.quantize_fp8(x, "tensor", transpose=transpose, scale=own[1]), own, "its own scale")


def dequantizes_rows():
    """All codes, rows of any size, views and empty tensors, against plain torch."""
    for dtype in DTYPES:
        for rows, k in ((1, 16), (3, 128), (70, 272), (129, 144), (0, 32), (5, 0)):
            generator = torch.Generator().manual_seed(rows)
            codes = torch.randint(256, (rows, k), generator=generator, dtype=torch.uint8).to(device())
            scale = torch.exp(3 * torch.randn(rows, -(-k // 128), generator=generator)).to(device())
            codes = codes.view(torch.float8_e4m3fn)
            got = dequantize_rows(codes, scale, dtype)
            expected = dequantize(codes.cpu(), scale.cpu()).to(dtype)
            assert got.dtype == dtype and got.shape == (rows, k)
            assert torch.equal(got.cpu().nan_to_num(1e-3), expected.nan_to_num(1e-3)), f"{dtype} {rows} {k}"
    x = draw(24, 256)
    codes, scale = tdkernels.quantize_fp8(x, "block")
    part = dequantize_rows(codes[3:20, :128], scale[3:20, :1], torch.float32)
    assert torch.equal(part, dequantize_rows(codes, scale, torch.float32)[3:20, :128])
    with pytest.raises(ValueError, match=r"scale \[24, 1\] must be \[R, ceil\(K / 128\)\] for \[24, 256\]"):
        dequantize_rows(codes, scale[:, :1], torch.bfloat16)
    call = codes, scale, torch.bfloat16
    torch.library.opcheck(torch.ops.tdkernels.dequantize_rows.default, call, test_utils=("test_faketensor",))


@pytest.mark.parametrize(
    "check",
    [
        quantizes, quantizes_long_groups, quantizes_special_values, rounds_to_nearest_even, divides_as_ieee,
        divides_by_a_given_scale, quantizes_by_a_given_scale, dequantizes_rows,
    ],
)
def test_values(check):
    on_ranks(1, check)


# ---- layouts ----


def accepts_layouts():
    """Leading dimensions, empty tensors, and strided, unaligned and transposed views."""
    x = draw(24, 160, dtype=torch.bfloat16)
    for scaling, weight in KINDS:
        flat = tdkernels.quantize_fp8(x, scaling, weight=weight)
        codes, scale = tdkernels.quantize_fp8(x.view(2, 3, 4, 160), scaling, weight=weight)
        assert codes.shape == (2, 3, 4, 160)
        per_row = scaling != "tensor" and not weight
        assert scale.shape == ((2, 3, 4, flat[1].shape[1]) if per_row else flat[1].shape)
        same((codes.view(24, 160), scale.view(flat[1].shape)), flat, f"{scaling} {weight=}")
        ref = tdkernels.quantize_fp8_ref(x.cpu().view(2, 3, 4, 160), scaling, weight=weight)
        same((codes, scale), ref, f"reference, {scaling} {weight=}")
        for transpose in (False, True):
            for shape in ((0, 32), (32, 0)):
                codes, scale = tdkernels.quantize_fp8(x.new_empty(shape), scaling, weight=weight, transpose=transpose)
                assert codes.shape == (shape[::-1] if transpose else shape) and codes.dtype == torch.float8_e4m3fn
                assert scale.dtype == torch.float32 and not scale.any()
    assert tdkernels.quantize_fp8(x.new_empty(0, 32))[1].shape == (0, 1)
    assert tdkernels.quantize_fp8(x.new_empty(0, 300), "block", weight=True)[1].shape == (0, 3)
    for view in (x[:, :96], x[:, 3:100], x[1:20:2], x.t(), x[:, ::2], x[:1].expand(20, 160)):
        equals_reference(view)
    equals_reference(draw(24, 161, dtype=torch.bfloat16)[:, 1:])


def dequantizes_to_x():
    """Codes times scale differ from x by half a unit in the last place of e4m3 at most."""
    x = draw(200, 300)
    for scaling, weight in KINDS:
        codes, scale = tdkernels.quantize_fp8(x, scaling, weight=weight)
        error = (dequantize(codes, scale) - x).abs()
        smallest = dequantize(torch.full_like(x, 2.0**-10).to(torch.float32), scale)  # half a unit of subnormal codes
        assert (error <= x.abs() * 2.0**-4 * 1.001 + smallest).all(), f"{scaling} {weight=}"


def rejects():
    x = draw(8, 32)
    for call, error, message in (
        (lambda: tdkernels.quantize_fp8([1.0]), TypeError, "quantize_fp8: x must be a torch.Tensor, not list"),
        (lambda: tdkernels.quantize_fp8(x.double()), TypeError, "x is torch.float64; bfloat16, float16 and"),
        (lambda: tdkernels.quantize_fp8(x[0]), ValueError, r"at least 2 dimensions \[rows, K\], its shape is \[32\]"),
        (lambda: tdkernels.quantize_fp8(x, "column"), ValueError, "one of 'tensor', 'row', 'block', not 'column'"),
        (lambda: tdkernels.quantize_fp8(x, dtype=torch.int8), TypeError, "dtype is torch.int8; float8_e4m3fn"),
        (lambda: tdkernels.quantize_fp8(x, weight=True), ValueError, "weight=True is for scaling \"block\", not 'row'"),
        (lambda: tdkernels.quantize_fp8(x, transpose=1), TypeError, "transpose must be True or False, not 1"),
        (lambda: tdkernels.quantize_fp8(x, scale=x[:1, :1]), ValueError, "scale is for scaling \"tensor\", not 'row'"),
        (lambda: tdkernels.quantize_fp8(x, "tensor", scale=x), ValueError, r"scale \[8, 32\] must have one element"),
        (lambda: tdkernels.quantize_fp8(x, "tensor", scale=x[0, 0].half()), TypeError, "scale is torch.float16"),
        (lambda: tdkernels.quantize_fp8(x, "tensor", scale=1.0), TypeError, "scale must be a torch.Tensor, not float"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("check", [accepts_layouts, dequantizes_to_x, rejects])
def test_arguments(check):
    on_ranks(1, check)


# ---- torch.compile and autograd ----


def compiles():
    torch._dynamo.reset()

    def quantize(x, scale):
        first = tdkernels.quantize_fp8(x.sin(), "row")
        last = tdkernels.quantize_fp8(x, "tensor", transpose=True, scale=scale)
        return *first, *tdkernels.quantize_fp8(x, "block", weight=True), last[0]

    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    for rows in (40, 40, 56):
        x = draw(rows, 144, dtype=torch.bfloat16)
        scale = torch.full((1, 1), 0.25, device=device())
        for got, expected in zip(compiled(x, scale), quantize(x, scale), strict=True):
            bits = torch.uint8 if got.dtype != torch.float32 else torch.int32
            assert torch.equal(got.view(bits), expected.view(bits))
    ops, tests = torch.ops.tdkernels, ("test_schema", "test_faketensor")
    for (scaling, weight), transpose in itertools.product(KINDS, (False, True)):
        call = x, scaling, torch.float8_e4m3fn, weight, transpose
        torch.library.opcheck(ops.quantize_fp8.default, call, test_utils=tests)
    call = x, scale, torch.float8_e5m2, True
    torch.library.opcheck(ops.quantize_fp8_by_scale.default, call, test_utils=tests)
    torch.library.opcheck(ops.tensor_scale_fp8.default, (x, torch.float8_e5m2), test_utils=tests)


def has_no_gradient():
    x = draw(8, 32).requires_grad_()
    for scaling, weight in KINDS:
        codes, scale = tdkernels.quantize_fp8(x, scaling, weight=weight)
        assert not codes.requires_grad and not scale.requires_grad
    scale = torch.ones(1, 1, device=device(), requires_grad=True)
    assert not tdkernels.quantize_fp8(x, "tensor", scale=scale)[0].requires_grad


@pytest.mark.parametrize("check", [compiles, has_no_gradient])
def test_torch(check):
    on_ranks(1, check)
