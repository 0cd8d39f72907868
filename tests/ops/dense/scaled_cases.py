"""Test bodies for the dense operators with scaled fp8 operands. Every rank runs them; see test_scaled.py."""

import dataclasses
import math

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
# Error of an accumulator relative to the sum of magnitudes. Tensor cores of sm_90 keep 13 fraction bits of the terms of
# an fp8 instruction and truncate: 1.45 * 2**-12 was measured with 64 terms on H200. This is an empirical limit for
# columns of similar sizes. ``truncation`` in tests/nn/float8_recipe.py is a bound for all operands.
ACCUMULATOR = {"cpu": 2.0**-20, "cuda": 2.0**-11}


class ScaledCase:
    """A rank's shard of one scaled problem, and the expected output from its dequantized operands in fp64.

    Args:     operator: "ag_gemm", "gemm_rs" or "gemm_ar"
              rows, n, k: a rank's share of M, N and K, or the whole size if the operator does not shard it
              scaling: (of x, of the weight), each "tensor", "row" or "block"
    """

    def __init__(
        self, operator, rows, n, k, scaling=("row", "row"), *, bias=True, seed=0, out_dtype=torch.bfloat16,
        dtypes=(E4M3, E4M3),
    ):
        self.operator, self.out_dtype = operator, out_dtype
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(seed)
        m = rows * self.world_size if operator == "ag_gemm" else rows
        full_n, full_k = (n * self.world_size, k) if operator == "ag_gemm" else (n, k * self.world_size)
        x = torch.randn(m, full_k, generator=generator) * torch.exp(torch.randn(m, 1, generator=generator))
        weight = torch.randn(full_n, full_k, generator=generator)
        weight *= torch.exp(torch.randn(full_n, 1, generator=generator))
        self.bias = torch.randn(full_n, generator=generator).to(out_dtype) if bias else None
        shards = [self._shard(x, weight, rank) for rank in range(self.world_size)]
        quantized = [
            (*quantize_ref(x, scaling[0], dtypes[0]), *quantize_ref(weight, scaling[1], dtypes[1], weight=True))
            for x, weight in shards
        ]
        self._use(quantized)
        if bias and operator == "ag_gemm":
            self.bias = self.bias.chunk(self.world_size)[self.rank]
        self.bias = None if self.bias is None else self.bias.to(device())

    def _use(self, quantized):
        """Set the operands of this rank and the expected output, from (x, scale_x, weight, scale_w) of all ranks."""
        self.quantized = quantized
        self.x, self.scale_x, self.weight, self.scale_w = (part.to(device()) for part in quantized[self.rank])
        self.expected, self.magnitude, self.sizes_of_partials = self._oracle(quantized)

    def edit(self, edit):
        """Change the CPU copies of all ranks' operands in place: edit(x, scale_x, weight, scale_w). No bias."""
        assert self.bias is None
        for operands in self.quantized:
            edit(*operands)
        self._use(self.quantized)

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
    layout = "scaled by block" if scaling[0] == "block" else "scaled fast" if fast else "scaled"
    for seed, shape in enumerate(shapes):
        case = ScaledCase(operator, *shape, scaling, seed=seed, **(options or {}))
        config = case.config_for(layout, **changes)
        for _ in range(2):
            output = case.run(config, use_fast_accum=fast)
            case.check(output)
            output.fill_(math.nan)


def same_bits(operator, shape, scaling="block", **changes):
    """Check that repeated calls give the same bits, and on all ranks if the output is replicated."""
    case = ScaledCase(operator, *shape, (scaling, scaling))
    config = case.config_for("scaled by block" if scaling == "block" else "scaled", **changes)
    first = case.run(config)
    for _ in range(3):
        assert torch.equal(first.view(torch.int16), case.run(config).view(torch.int16))
    case.check(first)
    if operator == "gemm_ar":
        rank_0 = first.view(torch.uint8).clone()
        dist.broadcast(rank_0, 0)
        assert torch.equal(first.view(torch.uint8), rank_0)


# ---- special values ----

SMALL, LARGE = 1e-40, 1e30  # a denormal number in fp32


def _edit_by_row(x, scale_x, weight, scale_w):
    x[1], scale_x[1] = 0.0, 0.0  # as quantize_ref quantizes a row of zeros
    weight[2], scale_w[2] = 0.0, 0.0
    x[3, 5] = math.nan
    scale_x[4], scale_w[5] = 0.0, 0.0  # of codes that are not zero
    scale_x[6], scale_w[6] = math.nan, math.nan
    scale_x[7], scale_w[7] = -scale_x[7], -scale_w[7]
    scale_x[8], scale_w[8] = SMALL, LARGE


def _edit_by_block(x, scale_x, weight, scale_w):
    x[1], scale_x[1] = 0.0, 0.0
    x[3, 5] = math.nan
    scale_x[4, 1], scale_w[:, 2] = 0.0, 0.0
    scale_x[6, -1] = math.nan
    scale_x[7, 0] *= -1
    scale_x[8, :2], scale_w[:, 0] = SMALL, LARGE


def _edit_tensor(x, scale_x, weight, scale_w):
    x[1] = 0.0
    x[3, 5] = math.nan
    scale_x.fill_(SMALL)
    scale_w.fill_(-LARGE)


_EDITS = {"row": _edit_by_row, "block": _edit_by_block, "tensor": _edit_tensor}


def _check_special(case, output):
    """Check the positions of NaN and Inf, and the error of the other elements."""
    expected, got = case.expected.float(), output.cpu()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf() * got.sign(), expected.isinf() * expected.sign())
    finite = expected.isfinite()
    magnitude = torch.where(finite, case.magnitude, 0.0)
    allowed = ACCUMULATOR[output.device.type] * magnitude + 2.0**-22 * magnitude
    error = torch.where(finite, got.double() - case.expected, 0.0).abs()
    assert (error <= allowed).all(), f"{error.max()}, {(error / allowed).nan_to_num(0.0).max()}"


def handles_special_values(operator, scaling, **changes):
    """Check codes and scales of 0, NaN and Inf, and negative, denormal and large scales, in an fp32 output.

    Rows of zeros give zeros, and NaN reaches exactly the outputs that depend on it.
    """
    layout = "scaled by block" if scaling == "block" else "scaled"
    rows = 24 if operator == "gemm_rs" else 12
    options = {"bias": False, "out_dtype": torch.float32}
    case = ScaledCase(operator, rows, 48, 272, (scaling, scaling), **options)
    case.edit(_EDITS[scaling])
    config = case.config_for(layout, **changes)
    for _ in range(2):
        _check_special(case, case.run(config))
    infinite = ScaledCase(operator, rows, 48, 272, (scaling, scaling), dtypes=(E5M2, E4M3), seed=1, **options)
    infinite.edit(lambda x, scale_x, weight, scale_w: x[2:4, 5].fill_(math.inf))
    _check_special(infinite, infinite.run(config))
    infinite.scale_w.fill_(math.inf)
    assert not infinite.run(config).isfinite().any()
    case = ScaledCase(operator, rows, 48, 272, (scaling, scaling), seed=2)
    case.check(case.run(config))  # the workspace keeps no NaN
