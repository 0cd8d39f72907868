"""Test bodies for experts with fp8 weights: tokens that are multiplied as they were sent, and ep_moe with scales."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, EpMoeConfig, GroupGemmConfig, Tiles
from tdkernels.ops.common.scaling import dequantize
from tdkernels.ops.experts.grouped_gemm import fp8_weights
from tdkernels.ops.experts.grouped_gemm.fp8_weights import quantized
from tests.ops.experts.dispatch.cases import quantize_ref, tokens_of
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32, Routed
from tests.ops.experts.grouped_gemm.scaled_cases import ACCUMULATOR, E4M3, E5M2, dequantized_weights, quantized_weights
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support import moe_oracle
from tests.support.ranks import device

UNEVEN = [7, 0, 11, 4]  # tokens of ranks
# Root mean square of the error of y relative to y, if x and the input of the down GEMM are rounded to e4m3, with an
# error of up to 1/16 of each element. In plain torch it was 0.025 to 0.053 for most of these tokens.
ROUNDED = 0.1


class Fp8Experts:
    """Tokens and experts of all ranks with weights in fp8, and this rank's shards of them.

    Magnitudes of x and of the weights differ between rows, experts and blocks, so that a wrong scale gives a wrong y.

    Args:     tokens: T of each rank; width, hidden: H and I; dtype, weight_dtype: of x and of the weights
              scalings: of both weights: "block", "row" or "expert"
    """

    def __init__(self, tokens, width, hidden, dtype=BF16, weight_dtype=E4M3, scalings=("block", "block"), seed=0):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.experts = 3 * world_size
        case = Routed(tokens_of(tokens)[:world_size], 2, self.experts, width, dtype, values="normal", seed=seed)
        self.case = case

        def magnitudes(*shape):
            return torch.exp(torch.randn(shape, generator=case.generator))

        def by_block(size):
            return magnitudes(-(-size // 128)).repeat_interleave(128)[:size]

        # Small enough for fp16.
        case.all_x = (case.all_x * 0.1 * magnitudes(len(case.all_x), 1) * by_block(width)).to(dtype)
        case.x = case.all_x[case.mine].to(device())
        self.whole = {}
        self.kinds = ["block" if scaling == "block" else "row" for scaling in scalings]
        sizes = ("w_gate_up", 2 * hidden, width), ("w_down", width, hidden)
        for scaling, (name, n, k) in zip(scalings, sizes, strict=True):
            w = torch.randn(self.experts, n, k, generator=case.generator) * k**-0.5
            w *= magnitudes(self.experts, 1, 1) * by_block(n)[:, None] * by_block(k)
            self.whole[name] = quantized_weights(w, scaling, weight_dtype)
        mine = slice(3 * rank, 3 * rank + 3)
        self.own = {name: [part[mine].to(device()) for part in parts] for name, parts in self.whole.items()}

    def call(self, **options):
        (w_gate_up, scale_gate_up), (w_down, scale_down) = self.own["w_gate_up"], self.own["w_down"]
        arguments = {"scale_gate_up": scale_gate_up, "scale_down": scale_down, **options}
        case = self.case
        with poisoned_outputs():
            return tdkernels.ep_moe(
                case.x, case.ids, case.weights, w_gate_up, w_down, num_experts=self.experts, **arguments
            )

    def call_steps(self, quantize):
        """Compute y by the operators that ep_moe is made of."""
        (w_gate_up, scale_gate_up), (w_down, scale_down) = self.own["w_gate_up"], self.own["w_down"]
        case, out_dtype = self.case, self.case.dtype
        recv, handle = case.dispatch(quantize=quantize)
        codes, scale = recv.x, recv.scales
        if not quantize or self.kinds[0] == "row":
            rows = dequantize(codes, scale).to(out_dtype) if quantize else codes
            codes, scale = tdkernels.quantize_fp8(rows, self.kinds[0])
        hidden = tdkernels.group_gemm(
            codes, w_gate_up, recv.splits, activation="swiglu", scale_x=scale, scale_w=scale_gate_up,
            out_dtype=out_dtype,
        )
        codes, scale = tdkernels.quantize_fp8(hidden, self.kinds[1])
        made = tdkernels.group_gemm(
            codes, w_down, recv.splits, scale_x=scale, scale_w=scale_down, out_dtype=out_dtype
        )
        return tdkernels.ep_combine(made, handle)

    def check(self, y):
        """Check the error relative to the layer in fp64, with the same weights but without rounding of its inputs."""
        tdkernels.synchronize()
        weights = [dequantized_weights(*self.whole[name]) for name in ("w_gate_up", "w_down")]
        case = self.case
        weights_of_tokens = case.all_weights.double().where(case.valid, 0.0)
        expected = moe_oracle.mixture(case.all_x.double(), case.all_ids, weights_of_tokens, *weights)[case.mine]
        assert y.dtype == case.dtype and y.shape == expected.shape
        error = (y.cpu().double() - expected).square().mean(1).sqrt()
        wrong = ~(error <= ROUNDED * expected.square().mean(1).sqrt())  # of each token
        assert not wrong.any(), f"{wrong.sum()} of {len(wrong)} tokens: {error / expected.square().mean(1).sqrt()}"


def multiplies_tokens_as_sent(tokens, width, options):
    """Check ep_dispatch in fp8, group_gemm with the scales it returns, and ep_combine, against fp64."""
    layer = Fp8Experts(tokens, width, 72, seed=width)
    case, (w, scale_w) = layer.case, layer.own["w_gate_up"]
    recv, handle = case.dispatch(quantize="fp8", **options)
    assert recv.x.dtype == E4M3
    rows = tdkernels.group_gemm(recv.x, w, recv.splits, scale_x=recv.scales, scale_w=scale_w, out_dtype=FP32)
    y = tdkernels.ep_combine(rows, handle)
    tdkernels.synchronize()
    codes, scales = quantize_ref(case.all_x)
    x = codes.double() * scales.double().repeat_interleave(128, 1)[:, :width]
    weights = dequantized_weights(*layer.whole["w_gate_up"])
    expected, magnitude = torch.zeros(len(x), 144).double(), torch.zeros(len(x), 144).double()
    for token, choice in case.valid.nonzero().tolist():
        weight, factor = weights[case.all_ids[token, choice]], case.all_weights[token, choice].double()
        expected[token] += factor * (weight @ x[token])
        magnitude[token] += factor.abs() * (weight.abs() @ x[token].abs())
    allowed = (ACCUMULATOR[device().type] + 2.0**-21) * magnitude
    error = (y.cpu().double() - expected[case.mine]).abs()
    assert (error <= allowed[case.mine]).all(), f"{error.max()}, {(error / allowed[case.mine]).max()}"


def computes(tokens, width, hidden, dtype, weight_dtype, quantize, scalings=("block", "block")):
    """Check y against fp64, and for equality with the sequence of operators. The second call comes from the cache."""
    layer = Fp8Experts(tokens, width, hidden, dtype, weight_dtype, scalings, seed=hidden)
    expected = layer.call_steps(quantize)
    for _ in range(2):
        y = layer.call(quantize=quantize)
        layer.check(y)
        assert torch.equal(y, expected)


def respects_capacity():
    """With capacity, rows that are not written contain anything, and the host does not wait."""
    layer = Fp8Experts(UNEVEN, 144, 80)
    expected = layer.call(quantize="fp8")
    for options in ({"max_tokens": 96}, {"max_tokens_per_rank": 11}):
        assert torch.equal(layer.call(quantize="fp8", **options), expected)
        layer.check(layer.call(**options))


def computes_with_configs():
    layer = Fp8Experts(UNEVEN, 144, 80)
    tiles = Tiles(32, 32, 32, num_warps=4, num_stages=2)
    configs = [EpMoeConfig(EpConfig(combine="per_expert"), GroupGemmConfig(tiles=tiles)), EpMoeConfig(method="torch")]
    for config in configs:
        for quantize in (None, "fp8"):
            layer.check(layer.call(config=config, quantize=quantize))


def accumulates_fast():
    """Both GEMMs get the option."""
    layer = Fp8Experts(UNEVEN, 144, 80, scalings=("row", "expert"))
    with mock.patch.object(fp8_weights, "group_gemm", wraps=fp8_weights.group_gemm) as gemm:
        for quantize in (None, "fp8"):
            layer.check(layer.call(use_fast_accum=True, quantize=quantize))
        layer.check(layer.call())
    assert [call.kwargs["use_fast_accum"] for call in gemm.call_args_list] == 4 * [True] + 2 * [False]


def takes_interleaved_weights():
    layer = Fp8Experts([7, 5], 128, 128)
    w, scale = layer.own["w_gate_up"]
    scale = torch.full_like(scale, 2.0**-9)  # gate and up rows of a block have the same scale
    layer.own["w_gate_up"] = [w, scale]
    expected = layer.call()
    assert expected.isfinite().all() and expected.any()
    order = torch.arange(256, device=device()).view(2, 128).t().flatten()
    layer.own["w_gate_up"] = [w.view(torch.uint8)[:, order].view(E4M3), scale]
    assert torch.equal(layer.call(activation="swiglu_interleaved"), expected)


def rejects_gradients():
    layer = Fp8Experts(UNEVEN, 144, 80)
    expected, case = layer.call(), layer.case
    for name in ("x", "weights"):
        given = getattr(case, name)
        setattr(case, name, given.clone().requires_grad_())
        with pytest.raises(RuntimeError, match="ep_moe: operands with scales have no gradient; call it under"):
            layer.call()
        with torch.no_grad():
            assert torch.equal(layer.call(), expected)
        setattr(case, name, given)


def compiles():
    """A compiled function calls the layer between its graphs."""
    torch._dynamo.reset()
    layer = Fp8Experts(UNEVEN, 144, 80)
    expected = layer.call(max_tokens_per_rank=11)
    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(lambda: layer.call(max_tokens_per_rank=11) * 2, backend=backend)
    assert torch.equal(compiled(), expected * 2)


def rejects_invalid_arguments():
    """Each rank rejects invalid arguments locally, before any launch; later calls are correct."""
    layer = Fp8Experts(4, 144, 80)
    case, (w_gate_up, scale_gate_up), (w_down, scale_down) = layer.case, layer.own["w_gate_up"], layer.own["w_down"]
    valid = dict(
        x=case.x, topk_ids=case.ids, topk_weights=case.weights, w_gate_up=w_gate_up, w_down=w_down,
        num_experts=layer.experts, scale_gate_up=scale_gate_up, scale_down=scale_down,
    )
    tiles = {block_k: GroupGemmConfig(tiles=Tiles(16, 16, block_k, 1, 1, 1)) for block_k in (16, 256)}
    table = [
        (dict(scale_gate_up=None), TypeError, "scale_gate_up is None; weights in float8 need scale_gate_up and"),
        (dict(scale_down=None), TypeError, "scale_down is None; weights in float8 need scale_gate_up and scale_down"),
        (dict(scale_gate_up=None, scale_down=None), TypeError, "w_gate_up is torch.float8_e4m3fn"),
        (dict(x=case.x.to(E4M3)), TypeError, "x is torch.float8_e4m3fn; bfloat16, float16 and float32 are supported"),
        (dict(w_gate_up=w_gate_up.bfloat16()), TypeError, "w_gate_up is torch.bfloat16; with scales float8_e4m3fn"),
        (dict(w_down=w_down.bfloat16()), TypeError, "w_down is torch.bfloat16; with scales float8_e4m3fn"),
        (dict(use_fast_accum=1), TypeError, "use_fast_accum must be True or False, not 1"),
        (
            dict(scale_gate_up=None, scale_down=None, use_fast_accum=True), TypeError,
            "use_fast_accum is for weights in float8 with scale_gate_up and scale_down",
        ),
        (dict(scale_gate_up=1.0), TypeError, "scale_gate_up must be a torch.Tensor, not float"),
        (dict(scale_down=scale_down.double()), TypeError, "scale_down is torch.float64; float32 is supported"),
        (dict(scale_down=scale_down.to("meta")), ValueError, "but scale_down is on meta"),
        (
            dict(scale_gate_up=scale_gate_up[:, :1]), ValueError,
            r"scale_gate_up \[3, 1, 2\] must have the shape \[3, 2, 2\] \(block-wise\), \[3, 160, 1\] \(row-wise\) or "
            r"\[3\] \(one for each expert\) for w_gate_up \[3, 160, 144\]",
        ),
        (
            dict(scale_down=scale_down.mT), ValueError,
            r"scale_down \[3, 1, 2\] must have the shape \[3, 2, 1\] .* for w_down \[3, 144, 80\]",
        ),
        (
            dict(w_gate_up=w_gate_up[:, :144], w_down=w_down[:, :, :72]), ValueError,
            r"the last dimension of w_down \[3, 144, 72\] must be a multiple of 16 for float8",
        ),
        (
            dict(x=case.x[:, :40], w_gate_up=w_gate_up[:, :, :40], w_down=w_down[:, :40]), ValueError,
            r"the last dimension of w_gate_up \[3, 160, 40\] must be a multiple of 16 for float8",
        ),
        (
            dict(config=EpMoeConfig(method="fused")), ValueError,
            'method "fused" does not support this call: it cannot multiply weights in float8',
        ),
        (dict(config=EpMoeConfig(gemm=tiles[16])), ValueError, "config cannot run: gemm: block_k must be at least 32"),
        (dict(config=EpMoeConfig(gemm=tiles[256])), ValueError, "config cannot run: gemm: block_k must be at most 128"),
    ]
    for changes, kind, message in table:
        with pytest.raises(kind, match=message) as caught:
            tdkernels.ep_moe(**{**valid, **changes})
        assert str(caught.value).startswith("ep_moe: "), str(caught.value)
    layer.check(layer.call())


def converts_codes_for_fnuz_weights():
    """Codes that were sent are in the OCP format. For weights in the format of gfx942 they are converted."""
    x = torch.randn(5, 272, device=device()) * torch.exp(torch.randn(5, 1, device=device()))
    codes, scales = tdkernels.quantize_fp8(x, "block")
    assert quantized(codes, torch.empty(1, dtype=E5M2), "block", scales, FP32) == (codes, scales)
    fnuz = torch.empty(1, dtype=torch.float8_e5m2fnuz)
    converted, scales_of_converted = quantized(codes, fnuz, "block", scales, FP32)
    assert converted.dtype == torch.float8_e4m3fnuz
    error = dequantize(converted, scales_of_converted) - dequantize(codes, scales)
    # Both formats have 3 bits of mantissa, and the scale is the largest magnitude over 448 or 240.
    assert (error.abs() <= dequantize(codes, scales).abs() / 16 + scales_of_converted.amax(1, True) / 1024).all()


DTYPES = [(BF16, E4M3), (FP16, E5M2), (FP32, E4M3)]
