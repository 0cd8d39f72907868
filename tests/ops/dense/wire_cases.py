"""Test bodies for ag_gemm and gemm_rs with wire compression. Every rank runs them; see test_wire.py."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from tdkernels import AgGemmConfig, GemmRsConfig
from tdkernels.ops.common.fp8_groups import packed_row_bytes
from tdkernels.ops.dense.ag_gemm import compressed as ag_gemm_compressed
from tdkernels.ops.dense.gemm_rs import compressed as gemm_rs_compressed
from tests.ops.dense.cases import misaligned, row_strided, transposed
from tests.support.dense_oracle import Case
from tests.support.quantization_oracle import bound, quantized, same, spoil
from tests.support.ranks import device
from tests.test_protocol import in_any_order, poison

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CONFIGS = {"ag_gemm": AgGemmConfig, "gemm_rs": GemmRsConfig}


def parts(operator, pieces):
    return None if pieces is None else CONFIGS[operator](method="parts", pieces=pieces)


class Problem:
    """All ranks' operands of one problem, on the CPU, and this rank's operands on its device.

    Args:     operator: "ag_gemm" or "gemm_rs"
              rows, n, k: this rank's share of M, N and K; for gemm_rs rows is M / W, that of its output
              exact: draw small integers, so that every GEMM is exact in every dtype
              change: x [M, K] -> None, modifies the x of each rank
    """

    def __init__(self, operator, dtype, rows, n, k, *, bias=True, exact=False, seed=0, change=None, group=None):
        self.operator, self.dtype, self.exact = operator, dtype, exact
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            if exact:
                return torch.randint(-2, 3, shape, generator=generator).to(dtype)
            magnitude = 1 + 3 * torch.rand(shape, generator=generator)
            return (torch.randn(shape, generator=generator) * magnitude).to(dtype)

        rows_of_x = rows if operator == "ag_gemm" else rows * self.ranks
        self.xs = [draw(rows_of_x, k) for _ in range(self.ranks)]
        self.weights = [draw(n, k) for _ in range(self.ranks)]
        self.biases = [draw(n)] * self.ranks if bias else [None] * self.ranks
        if change is not None:
            for x in self.xs:
                change(x)
        self.x, self.weight = self.xs[self.rank].to(device()), self.weights[self.rank].to(device())
        self.bias = self.biases[self.rank].to(device()) if bias else None

    def call(self, **options):
        options.setdefault("wire", "fp8")
        return getattr(tdkernels, self.operator)(self.x, self.weight, self.bias, **options)

    def _partials(self):
        """Return the partial products of all ranks for the rows of this rank, in fp64."""
        rows = [x.double().chunk(self.ranks)[self.rank] for x in self.xs]
        return [x @ weight.double().t() for x, weight in zip(rows, self.weights, strict=True)]

    def exact_output(self):
        """Return the output that the operator must have bit for bit, if its GEMMs are exact."""
        bias = self.biases[self.rank]
        if self.operator == "ag_gemm":
            x = torch.cat([quantized(x).to(self.dtype) for x in self.xs])
            return F.linear(x.double(), self.weights[self.rank].double(), None if bias is None else bias.double())
        total = torch.zeros_like(self._partials()[0], dtype=FP32)
        for rank, partial in enumerate(self._partials()):
            total += partial.float() if rank == self.rank else quantized(partial)
        return total if bias is None else total + bias.float()

    def check(self, output):
        """Check the output against the uncompressed computation in fp64, and the documented error bound."""
        assert output.dtype == self.dtype
        unit, bias = torch.finfo(self.dtype).eps, self.biases[self.rank]
        if self.operator == "ag_gemm":
            x, weight = torch.cat(self.xs).double(), self.weights[self.rank].double()
            z, magnitude = x @ weight.t(), x.abs() @ weight.abs().t()
            allowed = (bound(x) + unit * x.abs()) @ weight.abs().t() + 2.0**-19 * magnitude
        else:
            products = self._partials()
            z, allowed = sum(products), torch.zeros_like(products[0])
            for rank, partial in enumerate(products):
                x, weight = self.xs[rank].double().chunk(self.ranks)[self.rank], self.weights[rank].double()
                rounding = unit * partial.abs() + 2.0**-19 * (x.abs() @ weight.abs().t())
                allowed += rounding * 1.1 + (bound(partial) if rank != self.rank else 0.0)
        z = z if bias is None else z + bias.double()
        allowed += unit * (z.abs() + allowed) + 1e-30
        error = (output.cpu().double() - z).abs()
        assert error.shape == allowed.shape and not (~(error <= allowed)).any(), (error / allowed).max()
        return error, z


def computes(operator, dtype, shapes, pieces=None, group=None):
    """Check outputs within the error bound, twice: the second call comes from the cache."""
    for seed, shape in enumerate(shapes):
        case = Problem(operator, dtype, *shape, bias=seed % 2 == 0, seed=seed, group=group)
        for _ in range(2):
            output = case.call(config=parts(operator, pieces), group=group)
            case.check(output)
            output.fill_(math.nan)


def is_exact(operator, dtype, shape, pieces=None, change=None):
    """Check every bit of the output for integers, whose GEMMs are exact. ag_gemm rounds once, from its accumulator."""
    case = Problem(operator, dtype, *shape, exact=True, change=change)
    for _ in range(3):
        output = case.call(config=parts(operator, pieces))
        tdkernels.synchronize()
        expected = case.exact_output()
        if operator == "gemm_rs" and output.device.type == "cpu":  # a GPU may fuse products and sums
            assert same(output, expected.to(dtype))
        else:
            close = (output.cpu().double() - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-4
            assert bool((close | (expected.isnan() & output.cpu().isnan())).all())
        output.fill_(math.nan)


def compresses(operator, dtype):
    """Check that the error is that of fp8: neither zero nor much larger than expected."""
    case = Problem(operator, dtype, 24, 130, 128, bias=False)
    error, z = case.check(case.call())
    relative = (error.square().mean() / z.square().mean()).sqrt()
    sent = 1.0 if operator == "ag_gemm" else (case.ranks - 1) / case.ranks  # of the variance of the output
    assert 0.020 * sent**0.5 <= relative <= 0.032 * sent**0.5, relative


def sends_packed_rows(operator, dtype):
    """Check the bytes on the wire: K + 4 * ceil(K / 128) per row, padded to 16, instead of 2 * K or 4 * K."""
    case, sent = Problem(operator, dtype, 16, 256, 256), []
    if operator == "ag_gemm":
        gather = ag_gemm_compressed.AsyncAllGather

        def recorded(name, fields, x, *args, **options):
            sent.append(x)
            return gather(name, fields, x, *args, **options)

        with mock.patch.object(ag_gemm_compressed, "AsyncAllGather", recorded):
            case.call()
    else:
        scatter = gemm_rs_compressed.AsyncReduceScatter

        class Recorded(scatter):
            def send(self, owner, part, *args, **options):
                sent.append(part)
                super().send(owner, part, *args, **options)

        with mock.patch.object(gemm_rs_compressed, "AsyncReduceScatter", Recorded):
            case.call()
    assert len(sent) == (1 if operator == "ag_gemm" else case.ranks - 1)
    assert all(part.dtype == torch.uint8 and part.shape == (16, 256 + 16) for part in sent)
    assert packed_row_bytes(1) == 32 and packed_row_bytes(7168) == 7168 + 4 * 56


def gathers_quantized_rows(dtype, k):
    """Check that the returned x is the quantized one bit for bit on all ranks, with NaN for NaN and infinity."""
    case = Problem("ag_gemm", dtype, 13, 5, k, change=spoil)
    for pieces in (None, 2):
        y, x = case.call(return_gathered=True, config=parts("ag_gemm", pieces))
        expected = torch.cat([quantized(x).to(dtype) for x in case.xs])
        assert same(x, expected) and x.is_contiguous()
        rows = expected.isnan().any(1)
        assert torch.equal(rows, ~torch.cat(case.xs).isfinite().all(1)) and torch.equal(y.cpu().isnan().any(1), rows)
        assert (expected != torch.cat(case.xs))[~rows].any()
    case.x[0] = math.nan  # the result is a copy
    assert same(x, expected)


def keeps_special_values(dtype):
    """Check partials with zeros, NaN and infinity: those that are sent become NaN, and no other element changes."""

    def change(x):
        x[0], x[3, 0] = 0.0, math.nan
        x[5], x[5, 0] = 0.0, torch.finfo(dtype).max  # some products overflow

    case = Problem("gemm_rs", dtype, 8, 140, 5, bias=False, exact=True, change=change)
    products = [F.linear(x.chunk(case.ranks)[case.rank], w) for x, w in zip(case.xs, case.weights, strict=True)]
    total = torch.zeros(8, 140)
    for rank, partial in enumerate(products):
        total += partial.float() if rank == case.rank else quantized(partial)
    output = case.call().cpu()
    assert torch.equal(output.isnan(), total.to(dtype).isnan())
    finite = total.isfinite() & (total.abs() < 1e4)
    assert torch.equal(output[finite], total.to(dtype)[finite]) and finite.any()
    assert torch.equal(output[0] == 0, total[0] == 0)


def has_gradients_of_the_uncompressed_operator(operator, dtype, config_pieces):
    """Check gradients against the uncompressed operator, exactly, and main_grad."""
    rows = 9 if operator == "ag_gemm" else 9 * dist.get_world_size()
    case = Case(operator, dtype, rows, 13, 17, exact=True)
    config = parts(operator, config_pieces)
    results = case.run(wire="fp8", config=config)
    assert set(results) == {"output", "dx", "dweight", "dbias"}
    del results["output"]
    case.check(results)
    main_grad = torch.zeros_like(case.weight, dtype=FP32).detach()
    results = case.run(wire="fp8", config=config, main_grad=main_grad)
    assert set(results) == {"output", "dx", "dbias"}
    assert torch.equal(main_grad.double().cpu(), case.expected["dweight"])
    case.weight.requires_grad_(False)
    case.bias.requires_grad_(False)
    results = case.run(wire="fp8", config=config)
    assert set(results) == {"output", "dx"}
    case.check({"dx": results["dx"]})
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(case.call(wire="fp8").sum(), case.x, create_graph=True)


def supports_lists_and_dim(dtype):
    """Check lists of weights and dim=1: the bits of one weight and of dim=0, and the gradients."""
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(3, 4, 70, generator=generator).to(device(), dtype)
    weights = [torch.randn(n, 70, generator=generator).to(device(), dtype) for n in (9, 20)]
    biases = [None, torch.randn(20, generator=generator).to(device(), dtype)]
    for _ in range(2):
        ys, gathered = tdkernels.ag_gemm(x, weights, biases, dim=1, wire="fp8", return_gathered=True)
        assert gathered.shape == (3, 4 * ranks, 70) and len(ys) == 2
        for y, weight, bias in zip(ys, weights, biases, strict=True):
            single = tdkernels.ag_gemm(x.transpose(0, 1), weight, bias, wire="fp8")
            assert y.shape == (3, 4 * ranks, weight.shape[0]) and single.shape == (4 * ranks, 3, weight.shape[0])
            torch.testing.assert_close(y, single.transpose(0, 1), atol=1e-5, rtol=2 * torch.finfo(dtype).eps)
    operands = [x, *weights, biases[1]]
    gradients = []
    for wire in ("fp8", None):
        leaves = [operand.clone().requires_grad_() for operand in operands]
        ys, gathered = tdkernels.ag_gemm(
            leaves[0], leaves[1:3], [None, leaves[3]], dim=1, wire=wire, return_gathered=True
        )
        loss = sum((y.float() * y.detach().sign().float().abs()).sum() for y in ys) + gathered.float().sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)
    x = torch.randn(2, 3 * ranks, 70, generator=generator).to(device(), dtype)
    z = tdkernels.gemm_rs(x, weights[1], biases[1], dim=1, wire="fp8")
    whole = tdkernels.gemm_rs(x.transpose(0, 1), weights[1], biases[1], wire="fp8")
    assert z.shape == (2, 3, 20) and same(z, whole.transpose(0, 1).contiguous().cpu())


def supports_any_layout(operator):
    """Check copies of the operands with another memory layout: their results have the same bits."""
    case = Problem(operator, BF16, 16, 24, 48)
    expected = case.call().cpu()
    for layout in (transposed, row_strided, misaligned):
        x = case.x
        case.x = layout(x, math.nan)
        assert same(case.call(), expected), layout
        case.x = x
    weight = case.weight
    case.weight = transposed(weight, math.nan)
    case.check(case.call())
    case.weight, case.x = weight, case.x.view(4, -1, case.x.shape[1])
    output = case.call()
    assert output.shape[-2:] == (case.x.shape[1], 24) and same(output.view(expected.shape), expected)


def is_reproducible(operator):
    """Check that calls in any order of the ranks, on memory that is filled with NaN, give the same bits."""
    cases = [Problem(operator, BF16, rows, 40, 70, seed=seed) for seed, rows in enumerate((8, 21, 8))]
    expected = [case.call(config=parts(operator, 2)).cpu() for case in cases]
    poison()
    with in_any_order(seed=3):
        outputs = [case.call(config=parts(operator, 2)) for case in cases * 2]
    tdkernels.synchronize()
    assert all(same(output, wanted) for output, wanted in zip(outputs, expected * 2, strict=True))
