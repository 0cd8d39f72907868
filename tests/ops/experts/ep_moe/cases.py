"""Test bodies for ep_moe. Every rank runs them; test_ep_moe.py starts them."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels import EpConfig, EpMoeConfig, GroupGemmConfig
from tdkernels.ops.common.scaling import dequantize
from tdkernels.ops.experts.dispatch.counted import CountedRouting
from tdkernels.ops.experts.ep_moe import fused
from tdkernels.ops.experts.ep_moe.launch_sort import order_of
from tdkernels.runtime import call_cache, kernel_launch
from tests.ops.experts.dispatch.cases import quantize_ref, tokens_of
from tests.ops.experts.dispatch.low_latency_cases import record_launches
from tests.ops.experts.dispatch.oracle import BF16, FP32, Routed
from tests.ops.experts.dispatch.torch_backend_cases import without_symmetric_memory
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support import moe_oracle
from tests.support.dense_oracle import assert_close
from tests.support.moe_oracle import NAMES
from tests.support.ranks import a_group, device

UNEVEN = [7, 0, 11, 4]  # tokens of ranks

FEW_PROGRAMS = EpConfig(combine="per_expert", num_senders=2, num_receivers=2, chunk_tokens=4, num_warps=1)
CONFIGS = {
    "default": None,
    "fused": EpMoeConfig(method="fused"),
    "per expert, torch GEMM": EpMoeConfig(FEW_PROGRAMS, GroupGemmConfig(method="torch")),
    "torch": EpMoeConfig(method="torch"),
}


class Layer:
    """Tokens and experts of all ranks, and this rank's shards of them.

    Args:     tokens: T of each rank, or one number for all ranks; experts_each: E / W; width, hidden: H and I
              quantize: whether the expected results use tokens rounded to fp8
              routing and the remaining arguments: as for ``Routed``

    ``own`` maps names to this rank's operands, on its device. ``all_dy`` is the gradient of y of all ranks.
    """

    def __init__(
        self, tokens, k, experts_each, width, hidden, dtype=BF16, *, quantize=False, seed=0, group=None, **routing
    ):
        self.group, rank, world_size = group, dist.get_rank(group), dist.get_world_size(group)
        tokens = tokens_of(tokens)[:world_size]
        experts = experts_each * world_size
        self.case = Routed(tokens, k, experts, width, dtype, values="normal", seed=seed, rank=rank, **routing)
        case, generator = self.case, self.case.generator
        self.dtype, self.experts = dtype, experts

        def weights(*shape):
            return (torch.randn(experts, *shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

        self.whole = {
            "x": case.all_x, "topk_weights": case.all_weights, "w_gate_up": weights(2 * hidden, width),
            "w_down": weights(width, hidden),
        }
        if quantize:
            self.whole["x"] = dequantize(*quantize_ref(case.all_x)).to(dtype)
        mine = slice(rank * experts_each, (rank + 1) * experts_each)
        self.own = {name: self.whole[name][mine].to(device()) for name in ("w_gate_up", "w_down")}
        self.own |= {"x": case.x, "topk_weights": case.weights}  # x before quantization
        self.all_dy = case.draw(sum(tokens), width, dtype)

    def call(self, function=tdkernels.ep_moe, **options):
        return function(*self.operands(), num_experts=self.experts, **options)

    def operands(self):
        return self.own["x"], self.case.ids, *(self.own[name] for name in NAMES[1:])

    def run(self, wanted=NAMES, **options):
        """Run forward and backward; return y and the gradients of the wanted operands, by name."""
        self.own = {name: operand.detach().requires_grad_(name in wanted) for name, operand in self.own.items()}
        with poisoned_outputs():
            y = self.call(**options)
            y.backward(self.all_dy[self.case.mine].to(device()))
        return {"y": y.detach(), **{f"d{name}": self.own[name].grad for name in wanted}}

    def check(self, results):
        """Check that the error of each named result is at most twice the error of plain torch. Collective.

        The results of all ranks are checked together, since plain torch may be exact by chance on a few elements.
        """
        tdkernels.synchronize()
        ranks = [None] * self.case.world_size
        dist.all_gather_object(ranks, {name: got.cpu() for name, got in results.items()}, self.group)
        exact, low = self.expected(torch.double), self.expected(self.dtype)
        for name in results:
            parts = [results_of_rank[name] for results_of_rank in ranks]
            assert_close(f"{name} of {self.case.title}", torch.cat(parts), exact[name], low[name])

    def expected(self, dtype):
        operands = {name: operand.to(dtype) for name, operand in self.whole.items()}
        operands["topk_weights"] = self.whole["topk_weights"]
        if dtype == torch.double:
            operands["topk_weights"] = operands["topk_weights"].double()
        return moe_oracle.results_of(operands, self.case.all_ids, self.all_dy.to(dtype))


# ---- forward and gradients ----


def computes(spec, config):
    """Check forward and all gradients, and the forward of the reference."""
    layer = Layer(**spec)
    with torch.no_grad(), poisoned_outputs():
        y = layer.call(config=CONFIGS[config])
    layer.check({"y": y})
    layer.check(layer.run(config=CONFIGS[config]))
    if dist.get_world_size() > 1:
        layer.check({"y": layer.call(tdkernels.ep_moe_ref).detach()})


def needs_no_symmetric_memory(spec):
    with without_symmetric_memory():
        computes(spec, "torch")


def reuses_workspaces(config):
    """Call with other tokens, weights and row counts in the same workspaces."""
    for seed in range(3):
        layer = Layer(UNEVEN[seed:] + UNEVEN[:seed], 2, 2, 16, 8, seed=seed)
        layer.check(layer.run(config=CONFIGS[config]))


def launches_for_any_number_of_rows(config):
    """Calls find their launches, and the results of checks, in caches if a call had as many rows with spare ones."""
    rows, sizes, made, prepared = set(), set(), [], 0
    add_spare_rows = CountedRouting.add_spare_rows

    def record(routing):
        add_spare_rows(routing)
        sizes.add((routing.rows, routing.reach, routing.slots))

    spy = lambda original: lambda *args: made.append(args) or original(*args)  # noqa: E731
    with (
        mock.patch.object(kernel_launch, "_prepared", spy(kernel_launch._prepared)),
        mock.patch.object(call_cache, "insert", spy(call_cache.insert)),
        mock.patch.object(CountedRouting, "add_spare_rows", record),
    ):
        for seed in range(16):
            layer, before = Layer(60, 2, 2, 16, 8, seed=seed, ids="distinct"), len(made)
            rows.add(layer.case.num_rows)
            layer.run(config=CONFIGS[config])
            prepared += len(made) > before
    assert 1 <= prepared <= len(sizes) < len(rows), (prepared, sizes, rows)


def can_detect_anomalies(bounds):
    """Rows that belong to no expert do not let ``torch.autograd.detect_anomaly`` report NaN."""
    layer = Layer(UNEVEN, 2, 2, 40, 24, FP32, seed=11)
    with torch.autograd.detect_anomaly():
        results = layer.run(**bounds)
    layer.check(results)


def takes_interleaved_weights(config):
    layer = Layer(UNEVEN, 2, 2, 16, 8, FP32)
    concatenated = layer.own["w_gate_up"]
    layer.own["w_gate_up"] = concatenated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    results = layer.run(activation="swiglu_interleaved", config=CONFIGS[config])
    interleaved = results["dw_gate_up"].unflatten(1, (-1, 2))
    layer.check(results | {"dw_gate_up": interleaved.transpose(1, 2).flatten(1, 2)})


def respects_capacity(config):
    """Unused rows affect neither forward nor backward. Every rank rejects a capacity that is one row too small."""
    layer = Layer(UNEVEN, 2, 2, 16, 8, FP32, seed=3)
    needed = max(layer.case.capacity())
    if config == "torch":  # torch stages nothing
        needed = layer.case.capacity()[0]
    if config == "fused":  # the fused kernels have slots for all assignments
        needed = max(needed, 2 * max(UNEVEN[: dist.get_world_size()]))
    for capacity in (needed, needed + 40):
        layer.check(layer.run(max_tokens=capacity, config=CONFIGS[config]))
    for capacity in (1, needed - 1):
        with pytest.raises(ValueError, match=f"max_tokens={capacity} is too small"):
            layer.call(max_tokens=capacity, config=CONFIGS[config])
            tdkernels.synchronize()
    layer.check(layer.run(config=CONFIGS[config]))


def uses_low_latency_dispatch(quantize):
    """With a bound, ep_moe uses one low-latency dispatch with the same results. Exceeding the bound is an error."""
    layer = Layer([17, 0, 21, 14], 2, 2, 128, 8, quantize=quantize is not None, seed=3)
    bound = max(layer.case.tokens)
    wanted = [name for name in NAMES if name != "x" or quantize is None]
    for bounds in ({"max_tokens_per_rank": bound}, {"max_tokens_per_rank": bound + 3, "max_tokens": 100}):
        results, launched = record_launches(layer.run, wanted=wanted, quantize=quantize, **bounds)
        assert launched.count(True) == 1, launched
        layer.check(results)
    with pytest.raises(ValueError, match=f"has (more|{bound}) tokens,? (more )?than max_tokens_per_rank"):
        layer.call(max_tokens_per_rank=bound - 1)
        tdkernels.synchronize()
    tdkernels.synchronize()  # does not raise the error again
    layer.check(layer.run(wanted=wanted, quantize=quantize))


def computes_fused_with_max_tokens_per_rank(tokens, ids):
    """With a bound, the fused method has room for any routing. Exceeding the bound is an error on every rank."""
    layer = Layer(tokens, 2, 2, 16, 8, ids=ids, seed=8)
    bound, world_size = max(*layer.case.tokens, 2), dist.get_world_size()
    routings = []
    with mock.patch.object(fused, "order_of", lambda routing: routings.append(routing) or order_of(routing)):
        for bounds in ({"max_tokens_per_rank": bound}, {"max_tokens_per_rank": bound + 3, "max_tokens": 128}):
            layer.check(layer.run(config=CONFIGS["fused"], **bounds))
    # Rows for the assignments of all ranks, in steps of 64; slots only for the assignments of this rank.
    rows = 2 * bound * world_size
    assert [routing.rows for routing in routings] == [rows, 128]
    assert [routing.reach for routing in routings] == [(-(-rows // 64) * 64, 64), (128, 64)]
    if any(layer.case.tokens):
        with pytest.raises(ValueError, match="max_tokens=1 is too small"):
            layer.call(max_tokens_per_rank=bound, max_tokens=1, config=CONFIGS["fused"])
            tdkernels.synchronize()
        message = f"ep_moe: .* has (more|{bound}) tokens,? (more )?than max_tokens_per_rank"
        with pytest.raises(ValueError, match=message):
            layer.call(max_tokens_per_rank=bound - 1, config=CONFIGS["fused"])
            tdkernels.synchronize()
        tdkernels.synchronize()  # does not raise the error again
    layer.check(layer.run(max_tokens_per_rank=bound, config=CONFIGS["fused"]))


def quantizes_tokens(width):
    """Results match tokens rounded to fp8; all operands except x have gradients."""
    layer = Layer(UNEVEN, 2, 2, width, 8, quantize=True, seed=4)
    layer.check(layer.run(wanted=NAMES[1:], quantize="fp8"))
    layer.own["x"] = layer.own["x"].detach().requires_grad_()
    with pytest.raises(ValueError, match='ep_moe: quantize="fp8" has no gradient, and x requires one'):
        layer.call(quantize="fp8")
    with torch.no_grad():
        y = layer.call(quantize="fp8")
    layer.check({"y": y})


def computes_only_required_gradients():
    """Each gradient can be computed alone, and only the gradients of x and topk_weights are sent back."""
    layer = Layer(UNEVEN, 2, 2, 16, 64, FP32, seed=5)  # wide, since torch's short sums are exact on some CPUs
    sent = []

    def combine(routing, rows, row_numbers=None, **options):
        sent.append((rows.shape[1], row_numbers is not None))
        return whole_combine(routing, rows, row_numbers=row_numbers, **options)

    whole_combine = CountedRouting.combine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountedRouting, "combine", combine)
        for name, back in (
            ("x", [(16, False)]), ("topk_weights", [(0, True)]), ("w_gate_up", []), ("w_down", [])
        ):
            sent.clear()
            layer.check(layer.run(wanted=(name,)))
            assert sent == [(16, False), *back], f"{sent} for the gradient of {name}"
    with torch.no_grad():
        assert not layer.call().requires_grad


def saves_only_what_gradients_need():
    """Of the tensors of rows, only the received rows [R, 40] and the input of SwiGLU [R, 48] or h [R, 24] are saved."""
    layer = Layer(UNEVEN, 2, 2, 40, 24, FP32, seed=9)
    for wanted, widths in (
        (NAMES, [40, 48]), (("w_gate_up",), [40, 48]), (("x", "w_down"), [48]), (("topk_weights", "w_down"), [24]),
    ):
        saved = []

        def pack(tensor, saved=saved):
            if tensor.is_floating_point() and tensor.ndim == 2:
                saved.append(tensor.shape[1])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = layer.run(wanted=wanted)
        assert sorted(saved) == widths, (wanted, saved)
        layer.check(results)


def recomputes_in_a_checkpoint():
    layer = Layer(UNEVEN, 2, 2, 40, 24, FP32, seed=10)
    layer.own = {name: operand.detach().requires_grad_() for name, operand in layer.own.items()}
    y = checkpoint(layer.call, use_reentrant=False)
    y.backward(layer.all_dy[layer.case.mine].to(device()))
    layer.check({"y": y.detach(), **{f"d{name}": layer.own[name].grad for name in NAMES}})


def fused_computes_only_required_gradients():
    """The fused method can compute each gradient alone."""
    layer = Layer(UNEVEN, 2, 2, 16, 64, FP32, seed=5)
    for name in NAMES:
        layer.check(layer.run(wanted=(name,), config=CONFIGS["fused"]))
    with torch.no_grad():
        assert not layer.call(config=CONFIGS["fused"]).requires_grad


def follows_autocast(config):
    layer = Layer(UNEVEN, 2, 2, 16, 8, BF16, seed=6)
    layer.own = {name: operand.float() for name, operand in layer.own.items()}
    with torch.autocast(device().type, BF16):
        results = layer.run(config=CONFIGS[config])
    assert {results[f"d{name}"].dtype for name in NAMES} == {FP32}
    results = {name: result.to(BF16) for name, result in results.items()}
    results["dtopk_weights"] = results["dtopk_weights"].float()
    layer.check(results)


def computes_in_a_subgroup(config):
    """Compute in a group of the last two ranks; rank 0 makes no call."""
    with a_group([1, 2]) as group:
        if dist.get_rank() == 0:
            return
        layer = Layer([4, 3, 0], 2, 2, 16, 8, group=group)
        layer.check(layer.run(group=group, config=CONFIGS[config]))


def rejects_invalid_ids(config):
    """If one rank has an invalid id, every rank raises an error that names it, and the next call is correct."""
    layer = Layer([2, 3, 1, 2], 2, 2, 16, 8, seed=7)
    right = layer.case.ids
    layer.case.ids = right.clone()
    if dist.get_rank() == dist.get_world_size() - 1:
        layer.case.ids[0, 1] = layer.experts
    with pytest.raises(ValueError, match="topk_ids of rank . are out of range"):
        layer.call(config=CONFIGS[config])
    layer.case.ids = right
    layer.check({"y": layer.call(config=CONFIGS[config])})


# ---- invalid arguments ----


def rejects_invalid_arguments():
    """Each rank rejects invalid arguments locally, before any launch; later calls are correct."""
    layer = Layer(4, 2, 3, 16, 8)
    x, ids, weights, w_gate_up, w_down = layer.operands()
    experts, world_size = layer.experts, dist.get_world_size()
    valid = dict(
        x=x, topk_ids=ids, topk_weights=weights, w_gate_up=w_gate_up, w_down=w_down, num_experts=experts
    )
    table = [
        (dict(x=[1.0]), TypeError, "x must be a torch.Tensor, not list"),
        (dict(x=x.to(torch.float8_e4m3fn)), TypeError, "x is torch.float8_e4m3fn"),
        (dict(x=x.float()), TypeError, "x is torch.float32 but w_gate_up is torch.bfloat16"),
        (dict(x=x[0]), ValueError, r"x must have 2 dimensions \[rows, K\], its shape is \[16\]"),
        (dict(x=x[:, :8]), ValueError, r"last dimension of x \[4, 8\] and of w_gate_up \[3, 16, 16\]"),
        (dict(x=x[:3]), ValueError, r"topk_ids must be \[T, k\] with the T = 3 .*\[4, 2\]"),
        (dict(topk_ids=None), TypeError, "topk_ids must be a torch.Tensor"),
        (dict(topk_ids=ids.float()), TypeError, "topk_ids is torch.float32"),
        (dict(topk_weights=None), TypeError, "topk_weights must be a torch.Tensor, not NoneType"),
        (dict(topk_weights=weights[:, :1]), ValueError, r"topk_weights \[4, 1\] .* topk_ids \[4, 2\]"),
        (dict(topk_weights=weights.double()), TypeError, "topk_weights is torch.float64"),
        (dict(w_gate_up=w_gate_up[0]), ValueError, r"w_gate_up must have 3 dimensions .*\[16, 16\]"),
        (dict(w_gate_up=w_gate_up[:, :5], w_down=w_down), ValueError, r"w_gate_up \[3, 5, 16\] must have an even N"),
        (dict(w_gate_up=w_gate_up[:2]), ValueError, rf"w_gate_up must have the 3 experts of this rank \(of {experts}"),
        (dict(w_gate_up=w_gate_up.to("meta")), ValueError, "x is on .* but w_gate_up is on meta"),
        (dict(w_down=None), TypeError, "w_down must be a torch.Tensor"),
        (dict(w_down=w_down.float()), TypeError, "x is torch.bfloat16 but w_down is torch.float32"),
        (dict(w_down=w_down[:, :, :7]), ValueError, r"w_down must be .* = \[3, 16, 8\] .*, its shape is \[3, 16, 7\]"),
        (dict(w_down=w_down[:, :15]), ValueError, r"w_down must be .* its shape is \[3, 15, 8\]"),
        (dict(num_experts=0), ValueError, "num_experts must be a positive integer, not 0"),
        (dict(activation=None), ValueError, r"activation must be one of \('swiglu', .*, not None"),
        (dict(activation="gelu"), ValueError, "activation must be one of .*, not 'gelu'"),
        (dict(quantize="fp4"), ValueError, "quantize must be None or \"fp8\", not 'fp4'"),
        (dict(max_tokens=0), ValueError, "max_tokens must be a positive integer below .*, not 0"),
        (dict(max_tokens_per_rank=0), ValueError, "ep_moe: max_tokens_per_rank must be a positive integer, .* not 0"),
        (dict(config=EpConfig()), TypeError, "config must be an EpMoeConfig or None, not EpConfig"),
        (dict(config=EpMoeConfig(ep=EpConfig(num_warps=3))), ValueError, "config cannot run: ep: num_warps must be"),
        (dict(config=EpMoeConfig(gemm=GroupGemmConfig("best"))), ValueError, "config cannot run: gemm: method must"),
        (dict(config=EpMoeConfig(method="best")), ValueError, 'config cannot run: method must be "fused", "sequence"'),
        (dict(config=EpMoeConfig(EpConfig(), method="torch")), ValueError, 'method "torch" takes no ep and no gemm'),
        (
            dict(config=EpMoeConfig(gemm=GroupGemmConfig("torch"), method="fused")), ValueError,
            'method "fused" multiplies by its own kernels, not by',
        ),
        (
            dict(config=EpMoeConfig(method="fused"), quantize="fp8"), ValueError,
            'method "fused" does not support this call: it cannot multiply quantized tokens',
        ),
        (dict(config=EpMoeConfig(gemm=3)), ValueError, "config cannot run: gemm must be GroupGemmConfig or None"),
        (dict(group="world"), TypeError, "group"),
    ]
    if world_size > 1:
        message = f"num_experts {experts + 1} must be divisible by the group's {world_size} ranks"
        table.append((dict(num_experts=experts + 1), ValueError, message))
    for changes, kind, message in table:
        with pytest.raises(kind, match=message) as caught:
            tdkernels.ep_moe(**{**valid, **changes})
        assert "group" in changes or str(caught.value).startswith("ep_moe: "), str(caught.value)
    with pytest.raises(TypeError, match="positional"):
        tdkernels.ep_moe(x, ids, weights, w_gate_up, w_down, experts)
    layer.check({"y": layer.call()})
