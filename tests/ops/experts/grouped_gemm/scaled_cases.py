"""Problems of group_gemm with scaled fp8 operands, and their expected results from dequantized operands in fp64."""

import torch
import torch.nn.functional as F

import tdkernels
from tdkernels.ops.common.scaling import Scales, dequantize, quantize_ref
from tests.ops.dense.scaled_cases import ACCUMULATOR
from tests.ops.experts.grouped_gemm.oracle import counts_within
from tests.support.ranks import device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SIGMOID = 2.0**-20  # relative error of silu in fp32
_SLOPE = 1.1  # the largest slope of silu


def quantized_weights(w, scaling, dtype=E4M3):
    """Return (codes [E, N, K], scales) of w: "tensor" (one scale), "expert" (one for each), "row" or "block"."""
    if scaling == "tensor":
        codes, scale = quantize_ref(w.flatten(0, 1), "tensor", dtype)
        return codes.view(w.shape), scale
    kind = "tensor" if scaling == "expert" else scaling
    codes, scales = zip(*[quantize_ref(each, kind, dtype, weight=True) for each in w], strict=True)
    scale = torch.stack(scales)
    return torch.stack(codes), scale.flatten() if scaling == "expert" else scale


def dequantized_weights(codes, scale):
    """Return codes [E, N, K] times their scales, in fp64."""
    scale = scale.reshape(-1, 1, 1) if scale.dim() < 3 else scale
    scale = scale.expand(codes.shape[0], *scale.shape[1:])
    return torch.stack([dequantize(*each, torch.float64) for each in zip(codes, scale, strict=True)])


class ScaledGrouped:
    """One problem on the rank's device.

    Args:     splits, n, k, activation: as for ``Grouped``
              scaling: (of x, of w): "tensor", "row", "block"; w also "expert"
              spare: rows that belong to no group; their codes and scales are NaN
              change: (x, w) -> None: modifies the operands in fp32 before they are quantized
    """

    def __init__(
        self, splits, n, k, scaling=("row", "row"), activation=None, *, spare=0, rows=None, seed=0,
        dtypes=(E4M3, E4M3), out_dtype=torch.bfloat16, change=None,
    ):
        self.activation, self.out_dtype = activation, out_dtype
        rows = sum(splits) + spare if rows is None else rows
        self.counts = counts_within(splits, rows)
        self.used = sum(self.counts)
        generator = torch.Generator().manual_seed(seed)

        def magnitudes(*shape):
            return torch.exp(torch.randn(shape, generator=generator))

        # Magnitudes differ between rows, experts and blocks of K, so that a wrong scale gives a wrong result.
        by_block = magnitudes(-(-k // 128)).repeat_interleave(128)[:k]
        x = torch.randn(rows, k, generator=generator) * magnitudes(rows, 1) * by_block
        w = torch.randn(len(splits), n, k, generator=generator) * magnitudes(len(splits), n, 1) * k**-0.5
        w *= magnitudes(len(splits), 1, 1)
        if change is not None:
            change(x, w)
        x, scale_x = quantize_ref(x, scaling[0], dtypes[0])
        w, scale_w = quantized_weights(w, scaling[1], dtypes[1])
        self.expected, self.error = self._oracle(x, w, scale_x, scale_w)
        x.view(torch.uint8)[self.used :] = 0x7F
        if scale_x.numel() > 1:
            scale_x[self.used :] = torch.nan
        self.splits = torch.tensor(splits, dtype=torch.int32, device=device())
        self.x, self.w, self.scale_x, self.scale_w = (each.to(device()) for each in (x, w, scale_x, scale_w))

    def _oracle(self, x, w, scale_x, scale_w):
        """Return (expected output, allowed error before the output is rounded), in fp64."""
        x, w = dequantize(x, scale_x, torch.float64)[: self.used], dequantized_weights(w, scale_w)
        parts = list(zip(x.split(self.counts), w, strict=True))
        pre = torch.cat([F.linear(part, weight) for part, weight in parts])
        error = torch.cat([F.linear(part.abs(), weight.abs()) for part, weight in parts])
        error = error * ACCUMULATOR[device().type]
        if self.activation is None:
            return pre, error

        def halves(pre):
            return pre.chunk(2, 1) if self.activation == "swiglu" else pre.unflatten(1, (-1, 2)).unbind(2)

        (gate, up), (gate_error, up_error) = halves(pre), halves(error)
        output = F.silu(gate) * up
        of_gate = _SLOPE * gate_error * (up.abs() + up_error)
        return output, of_gate + F.silu(gate).abs() * up_error + _SIGMOID * output.abs()

    def scales(self, fast):
        """Return the ``Scales`` of a call."""
        kind = "block" if self.scale_x.shape[-1] > 1 else "row"
        return Scales(self.scale_x, self.scale_w, kind, self.out_dtype, fast)

    def call(self, **options):
        arguments = {"scale_x": self.scale_x, "scale_w": self.scale_w, "out_dtype": self.out_dtype, **options}
        return tdkernels.group_gemm(self.x, self.w, self.splits, activation=self.activation, **arguments)

    def check(self, output):
        """Check dtype, shape, and the error of the rows that belong to a group."""
        assert output.dtype == self.out_dtype and output.shape == (self.x.shape[0], self.expected.shape[1])
        allowed = self.error + torch.finfo(self.out_dtype).eps * self.expected.abs() + 1e-30
        error = (output[: self.used].cpu().double() - self.expected).abs()
        wrong = ~(error <= allowed)
        assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()} wrong, error {error.max()}, {error / allowed}"
