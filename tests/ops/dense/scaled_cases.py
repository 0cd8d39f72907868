"""Test bodies for the dense operators with scaled fp8 operands. Every rank runs them; see test_scaled.py."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.ops.common.scaling import dequantize, quantize_ref
from tdkernels.ops.common.tile_config import scaled_tiles
from tests.ops.dense.cases import _DEFAULTS
from tests.support.ranks import device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONFIG_CLASSES = {
    "ag_gemm": tdkernels.AgGemmConfig, "gemm_rs": tdkernels.GemmRsConfig, "gemm_ar": tdkernels.GemmArConfig,
}
# Error of an accumulator relative to the sum of magnitudes. Tensor cores of sm_90 accumulate fp8 with 13 bits or more.
ACCUMULATOR = {"cpu": 2.0**-20, "cuda": 2.0**-12}


class ScaledCase:
    """A rank's shard of one scaled problem, and the expected output from its dequantized operands in fp64.

    Args:     operator: "ag_gemm", "gemm_rs" or "gemm_ar"
              rows, n, k: a rank's share of M, N and K, or the whole size if the operator does not shard it
              scaling: (of x, of the weight), each "tensor", "row" or "block"
              change: (x, weight) -> None: modifies the whole operands in fp32 before they are quantized
    """

    def __init__(
        self, operator, rows, n, k, scaling=("row", "row"), *, bias=True, seed=0, out_dtype=torch.bfloat16,
        dtypes=(E4M3, E4M3), change=None,
    ):
        self.operator, self.out_dtype = operator, out_dtype
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(seed)
        m = rows * self.world_size if operator == "ag_gemm" else rows
        full_n, full_k = (n * self.world_size, k) if operator == "ag_gemm" else (n, k * self.world_size)
        x = torch.randn(m, full_k, generator=generator) * torch.exp(torch.randn(m, 1, generator=generator))
        weight = torch.randn(full_n, full_k, generator=generator) * torch.exp(torch.randn(full_n, 1, generator=generator))
        if change is not None:
            change(x, weight)
        self.bias = torch.randn(full_n, generator=generator).to(out_dtype) if bias else None
        shards = [self._shard(x, weight, rank) for rank in range(self.world_size)]
        quantized = [
            (*quantize_ref(x, scaling[0], dtypes[0]), *quantize_ref(weight, scaling[1], dtypes[1], weight=True))
            for x, weight in shards
        ]
        x, self.scale_x, weight, self.scale_w = (part.to(device()) for part in quantized[self.rank])
        self.x, self.weight = x, weight
        self.expected, self.magnitude, self.sizes_of_partials = self._oracle(quantized)
        if bias and operator == "ag_gemm":
            self.bias = self.bias.chunk(self.world_size)[self.rank]
        self.bias = None if self.bias is None else self.bias.to(device())

    def _shard(self, x, weight, rank):
        if self.operator == "ag_gemm":
            return x.chunk(self.world_size)[rank], weight.chunk(self.world_size)[rank]
        return x.chunk(self.world_size, 1)[rank].contiguous(), weight.chunk(self.world_size, 1)[rank].contiguous()

    def _oracle(self, quantized):
        """Return (expected, sum of the magnitudes of all products, sum of the magnitudes of the ranks' partials)."""
        wide = [
            (dequantize(x, scale_x, torch.float64), dequantize(weight, scale_w, torch.float64))
            for x, scale_x, weight, scale_w in quantized
        ]
        if self.operator == "ag_gemm":
            x, weight = torch.cat([x for x, _ in wide]), wide[self.rank][1]
            z, magnitude = x @ weight.t(), x.abs() @ weight.abs().t()
            bias = None if self.bias is None else self.bias.chunk(self.world_size)[self.rank]
            partials = z.abs()
        else:
            products = [x @ weight.t() for x, weight in wide]
            z, partials = sum(products), sum(one.abs() for one in products)
            magnitude, bias = sum(x.abs() @ weight.abs().t() for x, weight in wide), self.bias
        z = z if bias is None else z + bias.double()
        if self.operator == "gemm_rs":
            return tuple(one.chunk(self.world_size)[self.rank] for one in (z, magnitude, partials))
        return z, magnitude, partials

    def run(self, config=None, **options):
        operator = getattr(tdkernels, self.operator)
        return operator(
            self.x, self.weight, self.bias, scale_x=self.scale_x, scale_w=self.scale_w, out_dtype=self.out_dtype,
            config=config, **options,
        )

    def check(self, output, accumulator=None):
        """Check dtype, shape and error. Each partial and the output may be rounded to out_dtype."""
        assert output.dtype == self.out_dtype and output.shape == self.expected.shape
        unit = torch.finfo(self.out_dtype).eps
        accumulator = ACCUMULATOR[output.device.type] if accumulator is None else accumulator
        allowed = accumulator * self.magnitude + unit * (2 * self.sizes_of_partials + self.expected.abs()) + 1e-30
        error = (output.cpu().double() - self.expected).abs()
        wrong = ~(error <= allowed)
        assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()} wrong, error {error.max()}, {error / allowed}"

    def config_for(self, layout="scaled", **changes):
        """Return the default config with some fields changed, or None if there are no changes."""
        if not changes:
            return None
        if changes.get("method") in ("torch", "parts"):
            return CONFIG_CLASSES[self.operator](**changes)
        config = _DEFAULTS[self.operator](self.x, self.weight, self.world_size)
        if config.tiles is not None and "tiles" not in changes:
            changes["tiles"] = scaled_tiles(config.tiles, layout, self.x.device)
        return dataclasses.replace(config, **changes)


def computes(operator, shapes, scaling=("row", "row"), *, fast=False, options=None, **changes):
    """Check the output for each shape, with changed config fields, twice: the second call comes from the cache."""
    layout = "scaled by block" if scaling[0] == "block" else "scaled, fast" if fast else "scaled"
    for seed, shape in enumerate(shapes):
        case = ScaledCase(operator, *shape, scaling, seed=seed, **(options or {}))
        config = case.config_for(layout, **changes)
        for _ in range(2):
            output = case.run(config, use_fast_accum=fast)
            case.check(output)
            output.fill_(math.nan)


def same_bits(operator, shape, **changes):
    """Check that repeated calls give the same bits, and on all ranks if the output is replicated."""
    case = ScaledCase(operator, *shape, ("block", "block"))
    first = case.run(case.config_for("scaled by block", **changes))
    for _ in range(5):
        again = case.run(case.config_for("scaled by block", **changes))
        assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    if operator == "gemm_ar":
        rank_0 = first.clone()
        dist.broadcast(rank_0, 0)
        assert torch.equal(first.view(torch.int16), rank_0.view(torch.int16))


def handles_special_values(operator):
    """Check rows of zeros, NaN, Inf (which saturates to NaN in e4m3), and zero, denormal and infinite scales."""

    def change(x, weight):
        x[1], weight[2] = 0.0, 0.0
        x[3, 0] = math.nan

    case = ScaledCase(operator, 24, 48, 64, change=change, bias=False)
    output = case.run().cpu().double()
    assert torch.equal(output.isnan(), case.expected.isnan()) and case.expected.isnan().any()
    finite = ~case.expected.isnan()
    assert torch.equal(output[finite] == 0, case.expected[finite] == 0)
    case.scale_x = torch.full_like(case.scale_x, 1e-40)
    case.scale_w = torch.full_like(case.scale_w, 1e38)
    output = case.run().cpu().double()
    codes = ScaledCase(operator, 24, 48, 64, change=change, bias=False)
    codes.scale_x, codes.scale_w = torch.ones_like(codes.scale_x), torch.ones_like(codes.scale_w)
    ratio = torch.tensor(1e-40).double() * 1e38
    expected = codes.run().cpu().double() * ratio
    close = (output - expected).abs() <= 0.02 * expected.abs() + 1e-6
    assert (close | expected.isnan()).all()
    case.scale_w.fill_(math.inf)
    assert not case.run().isfinite().any()


def rejects(operator, message, error, **changes):
    """Check that a call with changed arguments raises the same error on every rank."""
    case = ScaledCase(operator, 16, 32, 64)
    arguments = {"x": case.x, "weight": case.weight, "bias": case.bias, "scale_x": case.scale_x, "scale_w": case.scale_w}
    arguments.update({name: value(case) for name, value in changes.items()})
    with pytest.raises(error, match=message):
        getattr(tdkernels, operator)(**arguments)
    case.check(case.run())
