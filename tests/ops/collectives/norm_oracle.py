"""Calls of all_reduce_rms_norm and all_reduce_layer_norm, and their results: sums in rank order and norms in fp64.

Every rank draws the operands of all ranks from a seed, so it can compute the expected output locally.
"""

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import AllReduceNormConfig
from tests.ops.collectives.cases import same
from tests.support.ranks import device

OPERATORS = "all_reduce_rms_norm", "all_reduce_layer_norm"
EPS = 1e-3  # large enough that a test notices if it is missing
FP32, FP64 = torch.float32, torch.float64


def config_of(changes):
    return None if changes is None else AllReduceNormConfig(**changes)


class NormCase:
    """A call with random operands. Attributes: full, all ranks' x [W, ...], and residual, weight and bias, on the CPU.

    Args: without: names of operands that are None; weight_dtype: None for the dtype of x.
    """

    def __init__(self, operator, shape, dtype, seed=0, without=(), weight_dtype=None, group=None):
        self.operator, self.group, self.dtype = operator, group, dtype
        self.is_layer_norm = operator == "all_reduce_layer_norm"
        self.rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        generator = torch.Generator().manual_seed(seed)

        def draw(*size, dtype):
            return torch.randn(size, generator=generator).to(dtype)

        # With a mean that is not small, so that RMSNorm and LayerNorm differ.
        self.full = draw(world_size, *shape, dtype=dtype) + 0.5
        self.residual = None if "residual" in without else draw(*shape, dtype=dtype)
        self.weight = draw(shape[-1], dtype=weight_dtype or dtype)
        self.bias = None if "bias" in without else draw(shape[-1], dtype=weight_dtype or dtype)

    def operands(self):
        """Return this rank's (x, residual, weight, bias) on its device."""
        own = self.full[self.rank], self.residual, self.weight, self.bias
        return tuple(None if operand is None else operand.to(device()) for operand in own)

    def call(self, changes=None, quantize=None, operands=None):
        return call(self.operator, *(operands or self.operands()), changes, quantize=quantize, group=self.group)

    def r(self):
        """Return the expected r: the sum in fp32 in rank order plus the residual, rounded once."""
        total = torch.zeros(self.full.shape[1:])
        for x in self.full:
            total = total + x.float()
        return (total if self.residual is None else total + self.residual.float()).to(self.dtype)

    def y(self, r):
        """Return (y in fp64 for a rounded r, largest allowed error)."""
        return normalized(r, self.weight, self.bias, self.is_layer_norm)

    def check(self, outputs, is_exact=True, r=None):
        """Check (y, r). Without ``is_exact``, torch's all-reduce has rounded the sum before the residual was added."""
        y, got_r = outputs
        expected = self.r() if r is None else r
        assert got_r.dtype == y.dtype == self.dtype and got_r.shape == y.shape == expected.shape
        assert got_r.is_contiguous() and y.is_contiguous() and got_r.device == y.device
        got_r, y = got_r.detach().cpu(), y.detach().cpu()
        if is_exact:
            assert same(got_r, expected), f"{self.operator}: r"
        else:
            largest = self.full.abs().sum(0).max() if expected.numel() else 0.0
            torch.testing.assert_close(got_r, expected, rtol=0, atol=4 * torch.finfo(self.dtype).eps * float(largest))
        exact, allowed = self.y(got_r)
        wrong = ~((y.double() - exact).abs() <= allowed) & exact.isfinite()
        assert not wrong.any(), (self.operator, y[wrong], exact[wrong])
        assert torch.equal(y.isnan(), exact.isnan())

    def check_fp8(self, outputs, y):
        """Check (codes, r, scale) against y of the same call without quantization; on CPU ranks every bit."""
        codes, r, scale = outputs
        assert codes.shape == y.shape and scale.shape == (*y.shape[:-1], 1) and scale.dtype == FP32
        self.check((y, r))
        expected, scales = tdkernels.quantize_fp8(y.view(-1, y.shape[-1]), dtype=codes.dtype)
        if y.device.type == "cpu":
            assert same(codes, expected.view(y.shape)) and same(scale, scales.view(scale.shape))
        torch.testing.assert_close(scale, scales.view(scale.shape), rtol=1e-5, atol=0.0)
        error = (codes.float() * scale - y.float()).abs()
        assert (error <= 2.0**-4 * 1.01 * torch.maximum(y.float().abs(), scale * 2.0**-5)).all()


def call(operator, x, residual, weight, bias, changes=None, **options):
    config = config_of(changes)
    function = getattr(tdkernels, operator)
    if operator == "all_reduce_layer_norm":
        return function(x, residual, weight, bias, EPS, config=config, **options)
    return function(x, residual, weight, EPS, bias=bias, config=config, **options)


def normalized(r, weight, bias, is_layer_norm):
    """Return (the norm of r in fp64, the error that fp32 arithmetic and rounding to the dtype of r may cause)."""
    wide, scale = r.double(), weight.double()
    mean = wide.mean(-1, keepdim=True) if is_layer_norm else torch.zeros((), dtype=FP64)
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (wide - mean) * rstd * scale
    size = y.abs() + rstd * scale.abs() * (wide.abs().amax(-1, keepdim=True) if is_layer_norm else 0.0)
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    information = torch.finfo(r.dtype)
    return y, information.eps / 2 * y.abs() + 2.0**-21 * size + information.smallest_normal * information.eps


def has_same_bits_on_all_ranks(outputs, group=None):
    for output in outputs:
        own = output.detach().contiguous().reshape(-1).view(torch.uint8)
        rank_0 = own.clone()
        dist.broadcast(rank_0, dist.get_global_rank(group, 0) if group else 0, group=group)
        assert torch.equal(own, rank_0)
