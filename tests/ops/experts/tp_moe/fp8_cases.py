"""Test bodies for tp_moe with fp8 weights. Every rank runs them; test_fp8_weights.py starts them."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import MoeTpConfig, Tiles
from tdkernels.ops.experts.tp_moe import fp8, launch_ag_gemm, launch_gemm_rs
from tests.ops.experts.ep_moe.fp8_cases import ROUNDED
from tests.ops.experts.grouped_gemm.scaled_cases import E4M3, E5M2, dequantized_weights, quantized_weights
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.ops.experts.tp_moe.oracle import BF16, FP16, FP32
from tests.support import moe_oracle
from tests.support.ranks import device
from tests.test_protocol import timeout

LOW = Tiles(16, 32, 32, 2, num_warps=4, num_stages=2)
CONFIGS = {
    "default": None,
    "one stage": MoeTpConfig(tiles=LOW, num_comm_sms=1, chunk_rows=16, stages=1),
    "three stages": MoeTpConfig(tiles=LOW, num_comm_sms=2, chunk_rows=16, stages=3),
    "torch": MoeTpConfig(method="torch"),
}


class Fp8Slices:
    """Tokens of all ranks and experts in fp8, and this rank's shards of them.

    Magnitudes of x and of the weights differ between rows, experts and blocks, so that a wrong scale gives a wrong y.

    Args:     tokens: M / W; k, experts, width: k, E, H; hidden: I / W; activation: as of tp_moe
              scalings: of both weights: "block", "row" or "expert"
    """

    def __init__(
        self, tokens, k=2, experts=3, width=144, hidden=80, dtype=BF16, weight_dtype=E4M3, activation="swiglu",
        scalings=("block", "block"), seed=0,
    ):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.dtype, self.activation, total = dtype, activation, tokens * world_size
        self.mine = slice(rank * tokens, (rank + 1) * tokens)
        generator = torch.Generator().manual_seed(seed)

        def magnitudes(*shape):
            return torch.exp(torch.randn(shape, generator=generator))

        def by_block(size):
            return magnitudes(-(-size // 128)).repeat_interleave(128)[:size]

        x = torch.randn(total, width, generator=generator) * magnitudes(total, 1) * by_block(width)
        self.all_x = (x * 0.1).to(dtype)  # small enough for fp16
        self.all_ids = torch.randint(-1, experts, (total, k), generator=generator)
        self.all_weights = torch.rand(total, k, generator=generator)
        self.all_weights[self.all_ids < 0] = torch.nan
        projections = 2 if activation else 1
        self.shards = [  # of all ranks; each rank's slices are quantized separately
            [
                quantized_weights(w * magnitudes(experts, 1, 1) * by_block(w.shape[1])[:, None], scaling, weight_dtype)
                for scaling, w in zip(scalings, (
                    torch.randn(experts, projections * hidden, width, generator=generator) * width**-0.5,
                    torch.randn(experts, width, hidden, generator=generator) * hidden**-0.5 * by_block(hidden),
                ), strict=True)
            ]
            for _ in range(world_size)
        ]
        (self.gate_up, self.down) = ([part.to(device()) for part in pair] for pair in self.shards[rank])
        self.x, self.ids, self.weights = (
            whole[self.mine].to(device()) for whole in (self.all_x, self.all_ids, self.all_weights)
        )

    def arguments(self):
        return dict(
            x=self.x, topk_ids=self.ids, topk_weights=self.weights, w_gate_up=self.gate_up[0], w_down=self.down[0],
            activation=self.activation, scale_gate_up=self.gate_up[1], scale_down=self.down[1],
        )

    def call(self, **options):
        return tdkernels.tp_moe(**{**self.arguments(), **options})

    def expected(self):
        """Return y of this rank in fp64, without rounding of x and of the input of the down GEMM."""
        y = torch.zeros(self.all_x.shape, dtype=torch.float64)
        weights = self.all_weights.double().where(self.all_ids >= 0, 0.0)
        for shard in self.shards:
            gate_up, down = (dequantized_weights(*pair) for pair in shard)
            if self.activation == "swiglu_interleaved":
                gate_up = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1)
            activated = self.activation is not None
            y += moe_oracle.mixture(self.all_x.double(), self.all_ids, weights, gate_up, down, activated)
        return y[self.mine]

    def check(self, y):
        tdkernels.synchronize()
        expected = self.expected()
        assert y.dtype == self.dtype and y.shape == expected.shape
        error = (y.cpu().double() - expected).square().mean(1).sqrt()
        allowed = ROUNDED * expected.square().mean(1).sqrt()
        assert (error <= allowed).all(), f"{(error / allowed * ROUNDED).tolist()}"


def computes(spec, config):
    """Check y, twice: the second call comes from the cache."""
    layer = Fp8Slices(**spec)
    for _ in range(2):
        with poisoned_outputs():
            y = layer.call(config=CONFIGS[config])
        layer.check(y)


def stages_equal_group_gemm(scaling="block"):
    """Check the rows of the gate-up stage, bitwise, against group_gemm of the gathered tokens."""
    layer = Fp8Slices(20, width=272, hidden=144, scalings=(scaling, scaling))
    (w, scale_w), stage, found = layer.gate_up, fp8.gate_up_stage, []

    def record(*operands):
        found.append(stage(*operands))
        return found[-1]

    with mock.patch("tdkernels.ops.experts.tp_moe.op.gate_up_stage", record):
        layer.call(config=CONFIGS["three stages"])
    tdkernels.synchronize()
    ((h, routing),) = found
    used = int(routing.splits.sum())
    tokens = routing.choices[:used].long() // layer.ids.shape[1]
    codes, scale_x = tdkernels.quantize_fp8(layer.all_x.to(device()), "block" if scaling == "block" else "row")
    rows = codes.view(torch.uint8)[tokens].view(codes.dtype)
    expected = tdkernels.group_gemm(
        rows, w, routing.splits, activation="swiglu", scale_x=scale_x[tokens], scale_w=scale_w,
        config=tdkernels.GroupGemmConfig(tiles=LOW),
    )
    assert used > 0 and torch.equal(h[:used], expected)


def sends_codes():
    """Tokens are pushed in fp8. Partial sums are sent in the dtype of x."""
    layer = Fp8Slices(20)
    with (
        mock.patch.object(launch_ag_gemm, "launch", wraps=launch_ag_gemm.launch) as gather,
        mock.patch.object(launch_gemm_rs, "launch", wraps=launch_gemm_rs.launch) as scatter,
    ):
        layer.check(layer.call())
    for launch in gather, scatter:
        (call,) = launch.call_args_list
        assert call.args[0].dtype == E4M3


def accumulates_fast():
    """Both stages get the option. Block-wise products are added in fp32 in any case."""
    for scalings in (("row", "expert"), ("block", "row")):
        layer = Fp8Slices(20, scalings=scalings)
        with (
            mock.patch.object(launch_ag_gemm, "launch", wraps=launch_ag_gemm.launch) as gather,
            mock.patch.object(launch_gemm_rs, "launch", wraps=launch_gemm_rs.launch) as scatter,
        ):
            layer.check(layer.call(use_fast_accum=True))
            layer.check(layer.call())
        found = [[call.kwargs["scales"] for call in gather.call_args_list]]
        found.append([call.args[5] for call in scatter.call_args_list])
        assert [[scales.use_fast_accum for scales in calls] for calls in found] == [[True, False]] * 2
        assert found[0][0].layout == ("scaled fast" if scalings[0] == "row" else "scaled by block")
    layer.check(layer.call(use_fast_accum=True, config=CONFIGS["torch"]))


def rejects_gradients():
    layer = Fp8Slices(5)
    expected = layer.call()
    for name in ("x", "weights"):
        given = getattr(layer, name)
        setattr(layer, name, given.clone().requires_grad_())
        with pytest.raises(RuntimeError, match="tp_moe: operands with scales have no gradient; call it under"):
            layer.call()
        with torch.no_grad():
            assert torch.equal(layer.call(), expected)
        setattr(layer, name, given)


def compiles():
    """A compiled function calls the layer between its graphs."""
    torch._dynamo.reset()
    layer = Fp8Slices(5)
    expected = layer.call()
    backend = "inductor" if device().type == "cuda" else "aot_eager"
    assert torch.equal(torch.compile(lambda: layer.call() * 2, backend=backend)(), expected * 2)


def reports_disagreement():
    """Ranks with weights in different formats raise an error on every rank."""
    layer = Fp8Slices(5, width=112)
    if dist.get_rank() == 1:
        layer.gate_up[0] = layer.gate_up[0].float().to(E5M2)
    with timeout(5.0), pytest.raises(ValueError, match="tp_moe: .*w_dtype"):
        layer.call()


def reports_different_scalings():
    """Ranks with scales of different kinds raise an error on every rank."""
    layer = Fp8Slices(5, width=96, scalings=("block" if dist.get_rank() else "row", "block"))
    with timeout(5.0), pytest.raises(ValueError, match="tp_moe: .*scaling"):
        layer.call()


def rejects_invalid_arguments():
    """Each rank rejects invalid arguments locally, before any launch; later calls are correct."""
    layer = Fp8Slices(4)
    valid = layer.arguments()
    x, w_gate_up, w_down = layer.x, layer.gate_up[0], layer.down[0]
    table = [
        (dict(scale_gate_up=None), TypeError, "scale_gate_up is None; weights in float8 need scale_gate_up and"),
        (dict(scale_down=None), TypeError, "scale_down is None; weights in float8 need scale_gate_up and scale_down"),
        (dict(scale_gate_up=None, scale_down=None), TypeError, "w_gate_up is torch.float8_e4m3fn"),
        (dict(use_fast_accum=1), TypeError, "use_fast_accum must be True or False, not 1"),
        (
            dict(scale_gate_up=None, scale_down=None, use_fast_accum=True), TypeError,
            "use_fast_accum is for weights in float8 with scale_gate_up and scale_down",
        ),
        (dict(x=x.to(E4M3)), TypeError, "x is torch.float8_e4m3fn; bfloat16, float16 and float32 are supported"),
        (dict(w_gate_up=w_gate_up.bfloat16()), TypeError, "w_gate_up is torch.bfloat16; with scales float8_e4m3fn"),
        (dict(w_down=w_down.bfloat16()), TypeError, "w_down is torch.bfloat16; with scales float8_e4m3fn"),
        (
            dict(scale_gate_up=layer.gate_up[1][:, :1]), ValueError,
            r"scale_gate_up \[3, 1, 2\] must have the shape \[3, 2, 2\] \(block-wise\), \[3, 160, 1\] \(row-wise\) or "
            r"\[3\] \(one for each expert\) for w_gate_up \[3, 160, 144\]",
        ),
        (
            dict(scale_down=layer.down[1].mT), ValueError,
            r"scale_down \[3, 1, 2\] must have the shape \[3, 2, 1\] .* for w_down \[3, 144, 80\]",
        ),
        (dict(w_down=w_down[:, :, :64]), ValueError, r"w_down \[3, 144, 64\] must be \[E, H, I / W\] = \[3, 144, 80\]"),
        (
            dict(w_gate_up=w_gate_up[:, :144], w_down=w_down[:, :, :72]), ValueError,
            r"the last dimension of w_down \[3, 144, 72\] must be a multiple of 16 for float8",
        ),
        (
            dict(config=MoeTpConfig(tiles=Tiles(16, 16, 16, 1, 1, 1))), ValueError,
            "config cannot run: block_k must be at least 32",
        ),
        (
            dict(config=MoeTpConfig(tiles=Tiles(16, 16, 256, 1, 1, 1))), ValueError,
            "config cannot run: block_k must be at most 128 with block-wise scales, not 256",
        ),
    ]
    for changes, kind, message in table:
        with pytest.raises(kind, match=message) as caught:
            tdkernels.tp_moe(**{**valid, **changes})
        assert str(caught.value).startswith("tp_moe: "), str(caught.value)
    layer.check(layer.call())


SPECS = {
    "bf16": dict(tokens=20),
    "fp16, e5m2": dict(tokens=37, width=272, hidden=144, dtype=FP16, weight_dtype=E5M2, seed=1),
    "fp32, interleaved": dict(tokens=9, width=128, hidden=128, dtype=FP32, activation="swiglu_interleaved", seed=2),
    "not activated": dict(tokens=6, k=1, width=48, hidden=272, activation=None, seed=3),
    "no tokens": dict(tokens=0),
    "row-wise": dict(tokens=20, width=272, hidden=144, scalings=("row", "row"), seed=4),
    "row-wise, interleaved": dict(tokens=9, activation="swiglu_interleaved", scalings=("row", "expert"), seed=5),
    "block-wise, then row-wise": dict(tokens=11, dtype=FP16, scalings=("block", "row"), seed=6),
    "by expert": dict(tokens=6, k=1, activation=None, weight_dtype=E5M2, scalings=("expert", "expert"), seed=7),
}
