"""Test bodies for tp_moe and its two stages. Every rank runs them; test_tp_moe.py starts them."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels import MoeTpConfig, Tiles
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.experts.grouped_gemm import launch_weights
from tdkernels.ops.experts.tp_moe import launch_ag_gemm as tp_moe_launch_ag_gemm
from tdkernels.ops.experts.tp_moe import launch_gemm_rs as tp_moe_launch_gemm_rs
from tdkernels.ops.experts.tp_moe import steps
from tdkernels.ops.experts.tp_moe.kernel_route import BY_EXPERT, MAX_STAGES
from tdkernels.symm.workspace import Workspace
from tests.ops.experts.tp_moe.oracle import BF16, FP32, Sliced
from tests.support.moe_oracle import NAMES
from tests.support.ranks import a_group, device
from tests.test_protocol import timeout

LOW, TALL = Tiles(16, 32, 16, 2, num_warps=4, num_stages=2), Tiles(128, 32, 32, num_warps=4, num_stages=2)
CONFIGS = {
    "default": None,
    "one stage": MoeTpConfig(tiles=LOW, num_comm_sms=1, chunk_rows=16, stages=1),
    "two stages": MoeTpConfig(num_comm_sms=3, chunk_rows=32, stages=2),
    "three stages": MoeTpConfig(tiles=LOW, num_comm_sms=2, chunk_rows=16, stages=3),
    "eight stages": MoeTpConfig(tiles=LOW, num_comm_sms=4, chunk_rows=16, stages=8),
    "tall tiles": MoeTpConfig(tiles=TALL, num_comm_sms=1, chunk_rows=64, stages=2),
    "torch": MoeTpConfig(method="torch"),
}
SMALL = dict(tokens=6, k=2, experts=3, width=10, hidden=3)


@contextlib.contextmanager
def poisoned_outputs():
    """Fill uninitialized memory with NaN, or with the largest integer, within this context."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---- forward and gradients ----


def computes(spec, config):
    """Check forward and all gradients, and the forward of the reference."""
    layer = Sliced(**spec)
    with poisoned_outputs():
        results = layer.run(config=CONFIGS[config])
    assert set(results) == {"y", *(f"d{name}" for name in NAMES)}
    layer.check(results)
    with torch.no_grad():
        layer.check({"y": layer.call(tdkernels.tp_moe_ref)})


def computes_gate_up_stage(spec, config):
    """Check the gate-up stage alone: the routing and the rows, bitwise."""
    layer = Sliced(**spec, activation=None, exact=True)
    with poisoned_outputs():
        h, routing = tdkernels.moe_ag_gemm(
            layer.own["x"], layer.ids, layer.own["w_gate_up"], config=CONFIGS[config], group=layer.group
        )
    tdkernels.synchronize()
    check_routing(layer, routing)
    for rows in (16, 64):
        check_tiling(routing, rows)
    choices = routing.choices[: int(routing.splits.sum())].long()
    tokens = layer.whole["x"].double()[choices // layer.ids.shape[1]]
    weights = layer.part("w_gate_up", layer.whole["w_gate_up"], layer.rank).double()
    experts = layer.all_ids.flatten()[choices]
    exact = torch.stack([weight @ token for weight, token in zip(weights[experts], tokens, strict=True)])
    assert h.shape == (layer.all_ids.numel(), weights.shape[1]) and h.dtype == layer.dtype
    assert torch.equal(h[: len(choices)].double(), exact), "h"


def check_tiling(routing, tile_rows):
    """Check that the table lists the tiles of a routing in the order of stages, and in the order of experts."""
    tiling = routing.tiling(tile_rows)
    begins = tiling.begins[: MAX_STAGES.value + 1].tolist()
    table = tiling.table[: begins[-1]].tolist()
    tiles, row = [], 0
    for expert, count in enumerate(routing.splits.tolist()):
        tiles += [[expert, row + first, min(count - first, tile_rows)] for first in range(0, count, tile_rows)]
        row += count
    assert [entry[BY_EXPERT.value :][:3] for entry in table] == tiles
    assert sorted(entry[:3] for entry in table) == tiles
    for begin, end in itertools.pairwise(begins):
        of_stage = [entry[:3] for entry in table[begin:end]]
        assert of_stage == sorted(of_stage), "a stage is in the order of experts"


def check_routing(layer, routing):
    """Check splits, choices and rows of the routing of the layer's ids."""
    ids, k = layer.all_ids.flatten(), layer.ids.shape[1]
    valid = ids >= 0
    splits = torch.bincount(ids[valid], minlength=layer.experts)
    assert routing.splits.dtype == torch.int32 and routing.splits.tolist() == splits.tolist()
    choices, rows = routing.choices[: int(valid.sum())].long(), routing.rows.flatten()
    assert torch.equal(choices.sort().values, valid.nonzero().flatten()), "each assignment must have one row"
    assert torch.equal(ids[choices], torch.repeat_interleave(splits)), "rows must be grouped by expert"
    assert routing.rows.shape == (len(layer.all_ids), k)
    assert torch.equal(rows[choices], torch.arange(len(choices), device=rows.device, dtype=torch.int32))
    assert torch.equal(rows == -1, ~valid), "a dropped assignment must have no row"
    sources = choices // (layer.tokens * k)
    for source in sources.split(splits.tolist()):
        own = source == layer.rank
        assert own[: int(own.sum())].all(), "each expert's rows must begin with this rank's tokens"


def reuses_routing_for_two_down_stages(spec, config):
    """Use one routing for two down stages with other weights and widths, and compare with the unsharded layer."""
    layers = [Sliced(**spec), Sliced(**spec | {"width": spec["width"] + 8})]
    first, other = layers
    other.ids, other.all_ids = first.ids, first.all_ids
    for name in ("x", "w_gate_up", "topk_weights"):
        first.own[name].requires_grad_()
    x, w, weights = (first.own[name] for name in ("x", "w_gate_up", "topk_weights"))
    downs = [layer.own["w_down"].requires_grad_() for layer in layers]
    h, routing = tdkernels.moe_ag_gemm(x, first.ids, w, activation=first.activation, config=CONFIGS[config])
    ys = [tdkernels.moe_gemm_rs(h, routing, weights, down, config=CONFIGS[config]) for down in downs]
    first.check({"y": ys[0].detach()})
    # The second output gets a gradient of zeros, so that the sums are the gradients of the first.
    (ys[0] * first.dy).sum().add((ys[1] * 0).sum()).backward()
    first.check(first.gradients())
    assert downs[1].grad.shape == downs[1].shape and not downs[1].grad.any()
    assert repr(routing) == (
        f"MoeRouting({first.world_size} x {first.tokens} tokens, {first.ids.shape[1]} of {first.experts} experts each)"
    )


# ---- autograd ----


def computes_only_required_gradients():
    """Each gradient can be computed alone, and nothing is launched for the others."""
    layer = Sliced(**SMALL, dtype=FP32, seed=5)
    for name, launches in (
        ("x", (2, 2, 0, 0)), ("topk_weights", (2, 1, 0, 0)), ("w_gate_up", (2, 1, 1, 1)), ("w_down", (2, 1, 0, 1)),
    ):
        with (
            mock.patch.object(tp_moe_launch_ag_gemm, "launch", wraps=tp_moe_launch_ag_gemm.launch) as ag,
            mock.patch.object(tp_moe_launch_gemm_rs, "launch", wraps=tp_moe_launch_gemm_rs.launch) as rs,
            mock.patch.object(AsyncAllGather, "start", wraps=AsyncAllGather.start) as gather,
            mock.patch.object(launch_weights, "weight_gradient", wraps=launch_weights.weight_gradient) as wgrad,
        ):
            results = layer.run(wanted=(name,))
        assert set(results) == {"y", f"d{name}"}
        layer.check(results)
        assert tuple(spy.call_count for spy in (ag, rs, gather, wgrad)) == launches, name
        assert ag.call_args.kwargs["keep_rows"] == (name == "w_down")


def can_detect_anomalies():
    """Rows of dropped assignments do not let ``torch.autograd.detect_anomaly`` report NaN."""
    layer = Sliced(**SMALL, dtype=FP32, seed=8)
    x, ids, weights, w_gate_up, w_down = layer.operands()
    h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation="swiglu")
    used = int(routing.splits.sum())
    h[used:] = 0.0
    with poisoned_outputs(), torch.autograd.detect_anomaly():
        h.requires_grad_()
        tdkernels.moe_gemm_rs(h, routing, weights, w_down).backward(layer.dy)
        layer.check(layer.run())
    assert used < len(h) and h.grad.isfinite().all() and not h.grad[used:].any()


def saves_nothing_without_grad():
    layer = Sliced(**SMALL, seed=6)
    layer.require()
    for mode in (torch.no_grad, torch.inference_mode):
        with mock.patch.object(tp_moe_launch_ag_gemm, "launch", wraps=tp_moe_launch_ag_gemm.launch) as launch, mode():
            y = layer.call()
        assert not y.requires_grad and launch.call_args.args[5] is False
        layer.check({"y": y})


def saves_only_what_gradients_need():
    """The input of SwiGLU is saved, or h if the gate-up stage needs no gradient or has no activation."""
    rows, hidden = dist.get_world_size() * SMALL["tokens"] * SMALL["k"], SMALL["hidden"]
    for activation, wanted, expected in (
        ("swiglu", NAMES, (False, True)), ("swiglu_interleaved", ("x",), (False, True)),
        ("swiglu", ("w_down", "topk_weights"), (True, False)), (None, NAMES, (True, False)),
    ):
        layer, saved = Sliced(**SMALL, activation=activation, dtype=FP32, seed=21), []
        layer.require(wanted)

        def pack(tensor, saved=saved):
            saved.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer.call()
        assert ((rows, hidden) in saved, (rows, 2 * hidden) in saved) == expected, (activation, wanted, saved)
        y.backward(layer.dy)
        layer.check({"y": y.detach(), **layer.gradients()})


def goes_backward_twice():
    layer = Sliced(**SMALL, seed=7)
    layer.require()
    y = layer.call()
    y.backward(layer.dy, retain_graph=True)
    y.backward(layer.dy)
    layer.check({name: gradient / 2 for name, gradient in layer.gradients().items()})


def uses_an_output_twice():
    layer = Sliced(**SMALL, dtype=FP32, seed=8)
    layer.require()
    y = layer.call()
    ((y * layer.dy / 2).sum() + (y * layer.dy / 2).sum()).backward()
    layer.check(layer.gradients())


def takes_an_expanded_gradient():
    """``y.sum().backward()`` passes a gradient with strides of zero."""
    layer = Sliced(**SMALL, dtype=FP32, seed=9)
    layer.dy = torch.ones_like(layer.dy)
    expected = layer.run()
    layer.dy = torch.ones((), device=device()).expand(layer.dy.shape)
    for name, result in layer.run().items():
        assert torch.equal(result, expected[name]), name


def recomputes_in_a_checkpoint():
    layer = Sliced(**SMALL, seed=10)
    layer.require()
    y = checkpoint(layer.call, use_reentrant=False)
    y.backward(layer.dy)
    layer.check({"y": y.detach(), **layer.gradients()})


def follows_autocast():
    layer = Sliced(**SMALL, seed=11)
    layer.own = {name: operand.float() for name, operand in layer.own.items()}
    with torch.autocast(device().type, BF16):
        results = layer.run()
    assert results["y"].dtype == BF16 and {results[f"d{name}"].dtype for name in NAMES} == {FP32}
    layer.check({name: result if name == "dtopk_weights" else result.to(BF16) for name, result in results.items()})


def rejects_second_derivatives():
    layer = Sliced(**SMALL, dtype=FP32, seed=12)
    layer.require()
    # torch's grouped GEMM for GPUs supports neither fp32 nor these widths.
    for config in ("default",) if device().type == "cuda" else ("default", "torch"):
        y = layer.call(config=CONFIGS[config])
        with pytest.raises(RuntimeError, match="tp_moe: second derivatives"):
            torch.autograd.grad(y, layer.own["x"], layer.dy, create_graph=True)
        h, _ = tdkernels.moe_ag_gemm(layer.own["x"], layer.ids, layer.own["w_gate_up"], config=CONFIGS[config])
        with pytest.raises(RuntimeError, match="moe_ag_gemm: second derivatives"):
            torch.autograd.grad(h, layer.own["x"], torch.ones_like(h), create_graph=True)


def compiles_with_graph_breaks():
    """torch.compile compiles the code before and after the call and runs the call outside the graphs."""
    torch._dynamo.reset()
    layer = Sliced(**SMALL, dtype=FP32, seed=16)
    layer.require()

    def between(x, *operands):
        return tdkernels.tp_moe(x * 1.0, *operands) * 1.0

    y = torch.compile(between, backend="eager")(*layer.operands())
    y.backward(layer.dy)
    layer.check({"y": y.detach(), **layer.gradients()})


AUTOGRAD = [
    can_detect_anomalies, computes_only_required_gradients, saves_nothing_without_grad, saves_only_what_gradients_need,
    goes_backward_twice, uses_an_output_twice,
    takes_an_expanded_gradient, recomputes_in_a_checkpoint, follows_autocast, rejects_second_derivatives,
    compiles_with_graph_breaks,
]


# ---- memory layouts ----


def takes_any_layout():
    """Transposed weights and gradients, strided rows and int32 ids give the same bits as contiguous operands."""
    layer = Sliced(**SMALL | {"tokens": 24, "hidden": 4}, activation=None, seed=13)
    expected = layer.run()
    layer.check(expected)
    for name in ("w_gate_up", "w_down"):
        layer.own[name] = layer.own[name].detach().transpose(1, 2).contiguous().transpose(1, 2)
    x = layer.own["x"].detach()
    layer.own["x"] = torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]
    layer.own["topk_weights"] = layer.own["topk_weights"].detach().t().contiguous().t()
    layer.ids, layer.dy = layer.ids.int().t().contiguous().t(), layer.dy.t().contiguous().t()
    for name, result in layer.run().items():
        assert torch.equal(result, expected[name]), name


# ---- groups ----


def computes_in_a_subgroup():
    """Compute in a group of the last two ranks; rank 0 makes no call. Another group rejects the routing."""
    with a_group([1, 2]) as group:
        if dist.get_rank() == 0:
            return
        layer = Sliced(**SMALL, group=group, seed=14)
        layer.check(layer.run())
        h, routing = tdkernels.moe_ag_gemm(layer.own["x"], layer.ids, layer.own["w_gate_up"], group=group)
        with pytest.raises(ValueError, match="moe_gemm_rs: the routing belongs to another group than the call"):
            tdkernels.moe_gemm_rs(h, routing, layer.own["topk_weights"], layer.own["w_down"])
        del group, routing, layer


# ---- errors ----


def rejects_invalid_ids():
    """If one rank has an invalid id, every rank raises an error, and the next call is correct."""
    layer = Sliced(**SMALL, seed=15)
    right = layer.ids
    for wrong in (layer.experts, -2, 1 << 40, -(1 << 40)):
        layer.ids = right.clone()
        if layer.rank == layer.world_size - 1:
            layer.ids[0, 1] = wrong
        with pytest.raises(ValueError, match=r"tp_moe: 1 of all ranks' topk_ids are not -1 to num_experts - 1 = 2"):
            layer.call()
            tdkernels.synchronize()
        layer.ids = right
        layer.check({"y": layer.call().detach()})


def early_invalid_id_error_keeps_ranks_in_step():
    """An invalid id is visible to the host of rank 0 at each launch, and to the other hosts at none.

    Rank 0 continues, since the other ranks wait for it, also in the backward, whose tiles have another height. Then
    every rank raises the error, and the next call is correct.
    """
    tall = MoeTpConfig(tiles=TALL, num_comm_sms=1)
    config_of_gradient = mock.patch.object(steps, "config_of_gradient", lambda *call: tall)
    with a_group() as group, config_of_gradient:
        layer = Sliced(**SMALL, group=group, seed=15)
        layer.check(layer.run(config=CONFIGS["three stages"]))
        right, layer.ids = layer.ids, layer.ids.clone()
        if layer.rank == 1:
            layer.ids[0, 1] = layer.experts
        launch_ends_first = mock.patch.object(Workspace, "after_launch", _wait_for_launch)
        unread_mailbox = mock.patch.object(Workspace, "_raise_note") if layer.rank else contextlib.nullcontext()
        with timeout(5.0), launch_ends_first, unread_mailbox:
            layer.run(config=CONFIGS["three stages"])
        with pytest.raises(ValueError, match=r"tp_moe: 1 of all ranks' topk_ids are not -1 to num_experts - 1 = 2"):
            tdkernels.synchronize()
        layer.ids = right
        layer.check(layer.run(config=CONFIGS["three stages"]))
        del group, layer


_after_launch = Workspace.after_launch


def _wait_for_launch(workspace, stream=None):
    """Replace ``after_launch``: wait for the launch, without a check for errors that the kernel recorded."""
    with mock.patch.object(workspace, "check"):
        _after_launch(workspace, stream)
    if workspace.device.type == "cuda":
        torch.cuda.synchronize(workspace.device)


def rejects_invalid_arguments():
    """Each rank rejects invalid arguments locally, before any launch; later calls are correct."""
    layer = Sliced(4, 2, 3, 16, 8)
    x, ids, weights, w_gate_up, w_down = layer.operands()
    valid = dict(x=x, topk_ids=ids, topk_weights=weights, w_gate_up=w_gate_up, w_down=w_down)
    gate_up_errors = [
        (dict(x=[1.0]), TypeError, "x must be a torch.Tensor, not list"),
        (dict(x=x.double()), TypeError, "x is torch.float64; bfloat16, float16 and float32"),
        (dict(x=x.float()), TypeError, "x is torch.float32 but w.* is torch.bfloat16"),
        (dict(x=x[0]), ValueError, r"x must have 2 dimensions \[rows, K\], its shape is \[16\]"),
        (dict(x=x[:, :8]), ValueError, r"last dimension of x \[4, 8\] and of w.* \[3, 16, 16\] must be the same K"),
        (dict(x=x[:3]), ValueError, r"topk_ids must be \[M / W, k\] with the 3 rows of x, its shape is \[4, 2\]"),
        (dict(topk_ids=None), TypeError, "topk_ids must be a torch.Tensor, not NoneType"),
        (dict(topk_ids=ids.float()), TypeError, "topk_ids is torch.float32; int32 and int64"),
        (dict(topk_ids=ids[:, 0]), ValueError, r"topk_ids must be \[M / W, k\] .*\[4\]"),
        (dict(topk_ids=ids[:, :0]), ValueError, r"topk_ids \[4, 0\] must have from 1 to E = 3 choices"),
        (dict(topk_ids=ids.repeat(1, 2)), ValueError, r"topk_ids \[4, 4\] must have from 1 to E = 3 choices"),
        (dict(topk_ids=ids.to("meta")), ValueError, "x is on .* but topk_ids is on meta"),
        (dict(w_gate_up=None), TypeError, "w.* must be a torch.Tensor, not NoneType"),
        (dict(w_gate_up=w_gate_up[0]), ValueError, r"w.* must have 3 dimensions \[E, N, K\], its shape is \[16, 16\]"),
        (dict(w_gate_up=w_gate_up[:, :5]), ValueError, r"w.* \[3, 5, 16\] must have an even N"),
        (dict(w_gate_up=w_gate_up[:0]), ValueError, r"w.* \[0, 16, 16\] has an empty dimension"),
        (dict(w_gate_up=w_gate_up.to("meta")), ValueError, "x is on .* but w.* is on meta"),
        (dict(activation="gelu"), ValueError, "activation must be one of .*, not 'gelu'"),
        (dict(config="best"), TypeError, "config must be a MoeTpConfig or None, not str"),
        (dict(config=MoeTpConfig("best")), ValueError, "config cannot run: method must be"),
        (dict(config=MoeTpConfig(chunk_rows=24)), ValueError, "chunk_rows must be a multiple of 16, not 24"),
        (dict(config=MoeTpConfig(stages=9)), ValueError, "stages must be 0 to 8, not 9"),
        (dict(config=MoeTpConfig(num_comm_sms=0)), ValueError, "num_comm_sms must be at least 1, not 0"),
        (dict(config=MoeTpConfig(tiles=Tiles(block_m=24))), ValueError, "block_m must be a power of two"),
        (dict(group="world"), TypeError, "group"),
    ]
    down_errors = [
        (dict(topk_weights=None), TypeError, "topk_weights must be a torch.Tensor, not NoneType"),
        (dict(topk_weights=weights.double()), TypeError, "topk_weights is torch.float64"),
        (dict(topk_weights=weights[:, :1]), ValueError, r"topk_weights \[4, 1\] must have the shape of .* \[4, 2\]"),
        (dict(topk_weights=weights.to("meta")), ValueError, "topk_weights is on meta but the tokens are on"),
        (dict(w_down=None), TypeError, "w_down must be a torch.Tensor, not NoneType"),
        (dict(w_down=w_down.float()), TypeError, "x is torch.bfloat16 .* but w_down is torch.float32"),
        (dict(w_down=w_down[:, :, :7]), ValueError, r"w_down \[3, 16, 7\] must be \[E, H, I / W\] = \[3, 16, 8\]"),
        (dict(w_down=w_down[:2]), ValueError, r"w_down \[2, 16, 8\] must be .* = \[3, 16, 8\]"),
        (dict(activation=None), ValueError, r"w_down \[3, 16, 8\] must be .* = \[3, 16, 16\]"),
    ]
    for changes, kind, message in gate_up_errors + down_errors:
        check_rejection("tp_moe", lambda **call: tdkernels.tp_moe(**call), valid, changes, kind, message)
    for changes, kind, message in gate_up_errors:
        changes = dict(changes)
        gate_up_arguments = dict(x=x, topk_ids=ids, w=w_gate_up, activation="swiglu")
        if "w_gate_up" in changes:
            changes["w"] = changes.pop("w_gate_up")
        check_rejection(
            "moe_ag_gemm", lambda **call: tdkernels.moe_ag_gemm(**call), gate_up_arguments, changes, kind, message
        )
    rejects_invalid_down_stage_arguments(layer)
    layer.check({"y": layer.call()})


def rejects_invalid_down_stage_arguments(layer):
    x, ids, weights, w_gate_up, w = layer.operands()
    h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation="swiglu")
    valid = dict(h=h, routing=routing, topk_weights=weights, w=w)
    rows = len(h)
    for changes, kind, message in (
        (dict(routing=ids), TypeError, "routing must be the MoeRouting of a moe_ag_gemm, not Tensor"),
        (dict(h=h[1:]), ValueError, rf"h \[{rows - 1}, 8\] must have the routing's {rows} rows"),
        (dict(h=h.float()), TypeError, "h is torch.float32 but w is torch.bfloat16"),
        (dict(h=h[:, :7]), ValueError, rf"the last dimension of h \[{rows}, 7\] and of w \[3, 16, 8\] must be the sam"),
        (dict(w=w[:2]), ValueError, r"w \[2, 16, 8\] must have the 3 experts of the routing"),
        (dict(w=w[0]), ValueError, "w must have 3 dimensions"),
        (dict(topk_weights=weights[1:]), ValueError, r"topk_weights \[3, 2\] must have the shape of .* \[4, 2\]"),
        (dict(topk_weights=weights.double()), TypeError, "topk_weights is torch.float64"),
        (dict(config=3), TypeError, "config must be a MoeTpConfig or None, not int"),
    ):
        check_rejection("moe_gemm_rs", lambda **call: tdkernels.moe_gemm_rs(**call), valid, changes, kind, message)


def check_rejection(operator, call, valid, changes, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call(**{**valid, **changes})
    assert "group" in changes or str(caught.value).startswith(f"{operator}: "), str(caught.value)
