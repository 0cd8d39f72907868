"""Launches of the grouped GEMMs of experts: group_gemm, tp_moe, and the fused ep_moe."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch

from tdkernels.ops.common.scaling import Scales, blocks, layout_of
from tdkernels.ops.common.tile_config import scaled_tiles
from tdkernels.ops.experts.dispatch import counting
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.ep_moe import launch_dispatch_gemm as ep_moe_launch_dispatch_gemm
from tdkernels.ops.experts.ep_moe import launch_gemm_combine as ep_moe_launch_gemm_combine
from tdkernels.ops.experts.ep_moe import launch_sort as ep_moe_launch_sort
from tdkernels.ops.experts.grouped_gemm import config as grouped_gemm_config
from tdkernels.ops.experts.grouped_gemm import launch as grouped_gemm_launch
from tdkernels.ops.experts.grouped_gemm import launch_weighted_rows
from tdkernels.ops.experts.grouped_gemm import launch_weights as grouped_gemm_launch_weights
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.tp_moe import config as tp_moe_config
from tdkernels.ops.experts.tp_moe import launch_ag_gemm as tp_moe_launch_ag_gemm
from tdkernels.ops.experts.tp_moe import launch_gemm_rs as tp_moe_launch_gemm_rs
from tdkernels.ops.experts.tp_moe import launch_rows as tp_moe_launch_rows
from tdkernels.ops.experts.tp_moe import launch_unfused as tp_moe_launch_unfused
from tdkernels.ops.experts.tp_moe import routing as moe_routing
from tdkernels.runtime import gpu
from tests.compiled.targets import BF16, compile_launches, tiles_for
from tests.support.aot import recorded_launches
from tests.support.routing import planned

# Launches of a training step of group_gemm, in order. Those of SwiGLU are missing without an activation. "ends"
# computes the group ends that torch's grouped GEMM takes.
GROUPED = ["forward", "swiglu", "gradient of swiglu", "gradient of x", "gradient of w", "ends"]


@functools.cache
def grouped_launches(arch, dtype, activation, sizes=(256, 512, 512)):
    """Return {name: (kernel, args, kwargs)} of a training step on ``arch``. "gradient of x" takes w transposed."""
    rows, n, k = sizes
    x, w = torch.zeros(rows, k, dtype=dtype), torch.zeros(4, n, k, dtype=dtype)
    splits = torch.zeros(4, dtype=torch.int32)
    launchers = grouped_gemm_launch, grouped_gemm_launch_weights
    with recorded_launches(launchers) as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        config = GroupGemmConfig(tiles=tiles_for(arch, dtype))
        patch.setattr(grouped_gemm_launch, "completed", lambda *_: config)
        y, pre = grouped_gemm_launch.product(x, w, splits, activation, keep=True)
        if activation:
            grouped_gemm_launch.swiglu(pre, splits, activation)
        dy = y if pre is None else grouped_gemm_launch.swiglu_backward(y, pre, splits, activation)
        grouped_gemm_launch.product(dy, w.transpose(1, 2), splits)
        grouped_gemm_launch_weights.weight_gradient(dy, x, splits, 4)
        grouped_gemm_launch.ends_of_groups(splits, x)
    names = [name for name in GROUPED if activation or "swiglu" not in name]
    return dict(zip(names, launches, strict=True))


def compile_grouped(name, arch, dtype, activation=None, **options):
    (compiled,) = compile_launches([grouped_launches(arch, dtype, activation, **options)[name]], arch)
    return compiled


def compile_grouped_tree(arch, dtype, leaves, tiles):
    """Compile group_gemm of one expert whose sum over K is a tree with this number of leaves."""
    with recorded_launches(grouped_gemm_launch) as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        x, weight = torch.zeros(256, 1024, dtype=dtype), torch.zeros(256, 1024, dtype=dtype)
        grouped_gemm_launch.linear_by_tree(x, weight, leaves, GroupGemmConfig(tiles=tiles), dtype)
    (compiled,) = compile_launches(launches, arch)
    return compiled


def scaled_launch(arch, dtype, kind, activation, fast=False, sizes=(256, 512, 512), tiles=None, w_dtype=None):
    """Return (kernel, args, kwargs) of group_gemm for operands in ``dtype`` with scales, "row" or "block".

    ``w_dtype``: dtype of the weight; None: as ``dtype``.
    """
    rows, n, k = sizes
    x, w = torch.zeros(rows, k, dtype=dtype), torch.zeros(4, n, k, dtype=w_dtype or dtype)
    of_x, of_w = ((rows, 1), (4, n, 1)) if kind == "row" else ((rows, blocks(k)), (4, blocks(n), blocks(k)))
    scales = Scales(torch.ones(of_x), torch.ones(of_w), kind, BF16, fast)
    with recorded_launches(grouped_gemm_launch) as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(grouped_gemm_config, "default_tiles", lambda *_: tiles_for(arch, dtype))
        on_gpu = torch.device("cuda")
        patch.setattr(grouped_gemm_launch, "scaled_tiles", lambda tiles, layout, _: scaled_tiles(tiles, layout, on_gpu))
        config, splits = GroupGemmConfig(tiles=tiles), torch.zeros(4, dtype=torch.int32)
        grouped_gemm_launch.product(x, w, splits, activation, config=config, scales=scales)
    (launch,) = launches
    return launch


def compile_scaled(arch, dtype, kind, activation=None, **options):
    (compiled,) = compile_launches([scaled_launch(arch, dtype, kind, activation, **options)], arch)
    return compiled


# Launches of tp_moe and its backward: the routing and the grouped GEMMs. Launches of the same kernel differ in its
# compile-time options: transposed weight, SwiGLU, top-k weights.
TP_MOE_ROUTE = ["pack ids", "count ids", "pack", "count", "place", "order", "scales"]
TP_MOE_ROWS = ["rows", "rows, swiglu", "rows, interleaved", "gradient of sums"]
TP_MOE_SUMS = ["sums", "gradient of rows"]
TP_MOE_UNFUSED = ["unfused sums", "unfused sums, weighted"]
TP_MOE_GRADIENTS = ["gradients", "gradients, swiglu", "gradients, interleaved", "gradients by row", "gathered rows"]


@functools.cache
def tp_moe_launches(arch, dtype, sizes=(256, 2, 4, 512, 256), ranks=4):
    """Return {name: (kernel, args, kwargs)}; ``sizes`` are per rank: M / W, k, E, H, I / W."""
    tokens, k, experts, width, hidden = sizes
    group = SimpleNamespace(size=lambda: ranks)
    config = tp_moe_config.MoeTpConfig(tiles=tiles_for(arch, dtype))
    x, weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(ranks * tokens, k)
    gate_up, down = (torch.zeros(experts, *size, dtype=dtype) for size in ((2 * hidden, width), (width, hidden)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(moe_routing, "all_gather", lambda message, group: message.repeat(ranks))
        route_launches, row_launches, sum_launches, unfused_launches, gradient_launches, copy_launches = (
            stack.enter_context(recorded_launches(module)) for module in (
                moe_routing, tp_moe_launch_ag_gemm, tp_moe_launch_gemm_rs, tp_moe_launch_unfused,
                launch_weighted_rows, tp_moe_launch_rows,
            )
        )
        ids = torch.zeros(tokens, k, dtype=torch.int64)
        for parts in (), (weights[:tokens].to(dtype), torch.ones(tokens, 3)):
            routing = moe_routing.route("op", ids, experts, group, config.chunk_rows, config.tiles.block_m, 3, *parts)
        rows = functools.partial(tp_moe_launch_ag_gemm.launch, routing=routing, config=config)
        rows(x, gate_up)
        h = rows(x, gate_up, activation="swiglu", keep=True).y
        dpre = rows(x, gate_up, activation="swiglu_interleaved", keep=True).pre
        rows(x, down.transpose(1, 2), keep_rows=True)
        tp_moe_launch_gemm_rs.launch(h, down, routing, weights, config)
        tp_moe_launch_gemm_rs.launch(dpre, gate_up.transpose(1, 2), routing, None, config)
        for of_rows in None, weights:
            tp_moe_launch_unfused.sums(h, routing.rows, of_rows)
        for inner, activation in (h.clone(), None), (dpre, "swiglu"), (dpre, "swiglu_interleaved"):
            launch_weighted_rows.weighted_gradients(h, inner, routing.splits, routing.choices, weights, activation)
        row_weights = torch.ones(h.shape[0])
        launch_weighted_rows.weighted_gradients(h, dpre, routing.splits, None, row_weights, "swiglu")
        tp_moe_launch_rows.rows_of_workspace(x, routing, tp_moe_launch_ag_gemm.get_workspace(group, x.device, ""))
    names = TP_MOE_ROUTE + TP_MOE_ROWS + TP_MOE_SUMS + TP_MOE_UNFUSED + TP_MOE_GRADIENTS
    # Both routings place and order the rows in the same way.
    route_launches = route_launches[:2] + route_launches[-5:]
    launches = route_launches + row_launches + sum_launches + unfused_launches + gradient_launches + copy_launches
    return dict(zip(names, launches, strict=True))


def compile_tp_moe(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([tp_moe_launches(arch, dtype, **options)[name]], arch)
    return compiled


TP_MOE_SCALED = ["rows", "sums"]


@functools.cache
def scaled_tp_moe_launches(arch, dtype, sizes=(256, 2, 4, 512, 256), ranks=4, kind="block"):
    """Return {name: (kernel, args, kwargs)} of tp_moe with weights in ``dtype`` and scales, "row" or "block"."""
    tokens, k, experts, width, hidden = sizes
    group, on_gpu = SimpleNamespace(size=lambda: ranks), torch.device("cuda")
    config = tp_moe_config.MoeTpConfig(tiles=scaled_tiles(tiles_for(arch, dtype), layout_of(kind, False), on_gpu))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(moe_routing, "all_gather", lambda message, group: message.repeat(ranks))
        stack.enter_context(recorded_launches(moe_routing))
        row_launches, sum_launches = (
            stack.enter_context(recorded_launches(module)) for module in (tp_moe_launch_ag_gemm, tp_moe_launch_gemm_rs)
        )
        ids = torch.zeros(tokens, k, dtype=torch.int64)
        routing = moe_routing.route("op", ids, experts, group, config.chunk_rows, config.tiles.block_m, 3)
        x, h = torch.zeros(tokens, width, dtype=dtype), torch.zeros(ranks * tokens * k, hidden, dtype=dtype)

        def weight(n, k):
            of_x, of_w = ((1,), (n, 1)) if kind == "row" else ((blocks(k),), (blocks(n), blocks(k)))
            scales = Scales(torch.ones(len(h), *of_x), torch.ones(experts, *of_w), kind, BF16, False)
            return torch.zeros(experts, n, k, dtype=dtype), scales

        gate_up, scales = weight(2 * hidden, width)
        tp_moe_launch_ag_gemm.launch(x, gate_up, routing, config, "swiglu", scales=scales)
        down, scales = weight(width, hidden)
        tp_moe_launch_gemm_rs.launch(h, down, routing, torch.ones(ranks * tokens, k), config, scales)
    return dict(zip(TP_MOE_SCALED, row_launches + sum_launches, strict=True))


def compile_scaled_tp_moe(name, arch, dtype, **options):
    (compiled,) = compile_launches([scaled_tp_moe_launches(arch, dtype, **options)[name]], arch)
    return compiled


# Launches of the fused ep_moe and its gradients: the sort of its rows, and the two fused kernels.
EP_MOE = ["order", "rows, swiglu", "rows, interleaved", "gradient of sums", "sums", "gradient of rows"]


@functools.cache
def ep_moe_launches(arch, dtype, sizes=(256, 2, 4, 512, 256), ranks=4):
    """Return {name: (kernel, args, kwargs)}; ``sizes`` are per rank: T, k, E / W, H, I."""
    tokens, k, each, width, hidden = sizes
    group, tiles = SimpleNamespace(size=lambda: ranks, rank=lambda: 0), tiles_for(arch, dtype)
    x, weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, k)
    gate_up, down = (torch.zeros(each, *size, dtype=dtype) for size in ((2 * hidden, width), (width, hidden)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(ep_moe_launch_dispatch_gemm, "rows_of_buffer", lambda workspace, x: x[:1])
        stack.enter_context(recorded_launches(counting, ranks))
        sort_launches, row_launches, sum_launches = (
            stack.enter_context(recorded_launches(module, ranks))
            for module in (ep_moe_launch_sort, ep_moe_launch_dispatch_gemm, ep_moe_launch_gemm_combine)
        )
        ids, capacity = torch.zeros(tokens, k, dtype=torch.int64), 2 * tokens
        routing = counting.count(*planned(group, ids, each * ranks, EpConfig(), per_choice=True, max_tokens=capacity))
        order = ep_moe_launch_sort.order_of(routing)
        rows, sums = ep_moe_launch_dispatch_gemm.launch, ep_moe_launch_gemm_combine.launch
        received = rows(routing, order, x, weights, gate_up, tiles, activation="swiglu", keep=True, keep_rows=True)
        rows(routing, order, x, weights, gate_up, tiles, activation="swiglu_interleaved")
        dh = rows(
            routing, order, x, None, down.transpose(1, 2), tiles, gradient=(received.y, received.weights),
            keep_rows=True,
        )
        sums(routing, received.y, down, received.origins, tiles, weights=weights)
        sums(routing, received.pre, gate_up.transpose(1, 2), received.origins, tiles, dots=dh.dots)
    return dict(zip(EP_MOE, sort_launches + row_launches + sum_launches, strict=True))


def compile_ep_moe(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([ep_moe_launches(arch, dtype, **options)[name]], arch)
    return compiled
