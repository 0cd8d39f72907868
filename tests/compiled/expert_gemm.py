"""What launches products by expert: group_gemm, tp_moe, and an ep_moe that overlaps."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch

from tdkernels.ops.experts.dispatch import counting
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.ep_moe import launch_dispatch_gemm as ep_moe_launch_dispatch_gemm
from tdkernels.ops.experts.ep_moe import launch_gemm_combine as ep_moe_launch_gemm_combine
from tdkernels.ops.experts.ep_moe import launch_sort as ep_moe_launch_sort
from tdkernels.ops.experts.grouped_gemm import launch as grouped_gemm_launch
from tdkernels.ops.experts.tp_moe import config as tp_moe_config
from tdkernels.ops.experts.tp_moe import launch_ag_gemm as tp_moe_launch_ag_gemm
from tdkernels.ops.experts.tp_moe import launch_gemm_rs as tp_moe_launch_gemm_rs
from tdkernels.ops.experts.tp_moe import routing as moe_routing
from tdkernels.runtime import gpu
from tests.compiled.targets import BF16, compile_launches, tiles_for
from tests.support.aot import recorded_launches
from tests.support.routing import planned

# What the launches of a training step of group_gemm are, in their order, and what torch's product is told; without an
# activation there is no "swiglu".
GROUPED = ["product", "swiglu", "gradient of x", "gradient of w", "ends"]


@functools.cache
def grouped_launches(arch, dtype, activation, sizes=(256, 512, 512)):
    """{name: (kernel, args, kwargs)} of a step on ``arch``; the gradient of x has the weight the other way round."""
    rows, n, k = sizes
    x, w = torch.zeros(rows, k, dtype=dtype), torch.zeros(4, n, k, dtype=dtype)
    splits = torch.zeros(4, dtype=torch.int32)
    with recorded_launches(grouped_gemm_launch) as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(grouped_gemm_launch, "default_tiles", lambda *_: tiles_for(arch, dtype))
        y, pre = grouped_gemm_launch.product(x, w, splits, activation, keep=True)
        dy = y if pre is None else grouped_gemm_launch.swiglu_backward(y, pre, splits, activation)
        grouped_gemm_launch.product(dy, w.transpose(1, 2), splits)
        grouped_gemm_launch.weight_gradient(dy, x, splits, 4)
        grouped_gemm_launch.ends_of_groups(splits, x)
    names = [name for name in GROUPED if activation or name != "swiglu"]
    return dict(zip(names, launches, strict=True))


def compile_grouped(name, arch, dtype, activation=None, **options):
    (compiled,) = compile_launches([grouped_launches(arch, dtype, activation, **options)[name]], arch)
    return compiled


# What tp_moe and its backward launch: the routing, and products by expert. Those of one kernel differ in what is
# compiled of it: a weight either way round, SwiGLU, weights of choices.
SLICED_ROUTE = ["count", "place", "order"]
SLICED_ROWS = ["rows", "rows, swiglu", "rows, interleaved", "gradient of sums"]
SLICED_SUMS = ["sums", "gradient of rows"]


@functools.cache
def sliced_launches(arch, dtype, sizes=(256, 2, 4, 512, 256), ranks=4):
    """{name: (kernel, args, kwargs)}; sizes are those of a rank: M / W, k, E, H, I / W."""
    tokens, k, experts, width, hidden = sizes
    group = SimpleNamespace(size=lambda: ranks)
    config = tp_moe_config.MoeTpConfig(tiles=tiles_for(arch, dtype))
    x, weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(ranks * tokens, k)
    gate_up, down = (torch.zeros(experts, *size, dtype=dtype) for size in ((2 * hidden, width), (width, hidden)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(moe_routing, "all_gather", lambda ids, group: ids.repeat(ranks, 1))
        of_route, of_rows, of_sums = (
            stack.enter_context(recorded_launches(module))
            for module in (moe_routing, tp_moe_launch_ag_gemm, tp_moe_launch_gemm_rs)
        )
        ids = torch.zeros(tokens, k, dtype=torch.int64)
        routing = moe_routing.route("op", ids, experts, group, config.chunk_rows, config.tiles.block_m, 3)
        rows = functools.partial(tp_moe_launch_ag_gemm.launch, routing=routing, config=config)
        rows(x, gate_up)
        h = rows(x, gate_up, activation="swiglu", keep=True).y
        dpre = rows(x, gate_up, activation="swiglu_interleaved", keep=True).pre
        rows(x, down.transpose(1, 2), gradients=tp_moe_launch_ag_gemm.Gradients(h, weights))
        tp_moe_launch_gemm_rs.launch(h, down, routing, weights, config)
        tp_moe_launch_gemm_rs.launch(dpre, gate_up.transpose(1, 2), routing, None, config)
    names = SLICED_ROUTE + SLICED_ROWS + SLICED_SUMS
    return dict(zip(names, of_route + of_rows + of_sums, strict=True))


def compile_sliced(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([sliced_launches(arch, dtype, **options)[name]], arch)
    return compiled


# What an ep_moe that overlaps launches, with its gradients: the order of its rows, and the two kernels.
EXPERT_LAYER = ["order", "rows, swiglu", "rows, interleaved", "gradient of sums", "sums", "gradient of rows"]


@functools.cache
def expert_layer_launches(arch, dtype, sizes=(256, 2, 4, 512, 256), ranks=4):
    """{name: (kernel, args, kwargs)}; sizes are those of a rank: T, k, E / W, H, I."""
    tokens, k, each, width, hidden = sizes
    group, tiles = SimpleNamespace(size=lambda: ranks, rank=lambda: 0), tiles_for(arch, dtype)
    x, weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, k)
    gate_up, down = (torch.zeros(each, *size, dtype=dtype) for size in ((2 * hidden, width), (width, hidden)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(ep_moe_launch_dispatch_gemm, "rows_of_buffer", lambda workspace, x: x[:1])
        stack.enter_context(recorded_launches(counting, ranks))
        of_order, of_rows, of_sums = (
            stack.enter_context(recorded_launches(module, ranks))
            for module in (ep_moe_launch_sort, ep_moe_launch_dispatch_gemm, ep_moe_launch_gemm_combine)
        )
        ids, most = torch.zeros(tokens, k, dtype=torch.int64), 2 * tokens
        routing = counting.count(*planned(group, ids, each * ranks, EpConfig(), per_choice=True, max_tokens=most))
        order = ep_moe_launch_sort.order_of(routing)
        rows, sums = ep_moe_launch_dispatch_gemm.launch, ep_moe_launch_gemm_combine.launch
        came = rows(routing, order, x, weights, gate_up, tiles, activation="swiglu", keep=True, keep_rows=True)
        rows(routing, order, x, weights, gate_up, tiles, activation="swiglu_interleaved")
        of_h = rows(
            routing, order, x, None, down.transpose(1, 2), tiles, gradient=(came.y, came.weights), keep_rows=True
        )
        sums(routing, came.y, down, came.origins, tiles, weights=weights)
        sums(routing, came.pre, gate_up.transpose(1, 2), came.origins, tiles, dots=of_h.dots)
    return dict(zip(EXPERT_LAYER, of_order + of_rows + of_sums, strict=True))


def compile_expert_layer(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([expert_layer_launches(arch, dtype, **options)[name]], arch)
    return compiled
