"""tp_moe with fp8 weights, for inference: configs and the two stages.

    method     gate-up stage                                       down stage
    "fused"    ``moe_ag_gemm_kernel``                              ``moe_gemm_rs_kernel``
    "torch"    all-gather of codes and scales, group_gemm          group_gemm, sums by token, reduce-scatter

x and the input of the down stage are quantized in blocks of 1 x 128, or by row, as the scale of the weight needs. The
scales of x take at most 1/32 of the bytes of its codes. They are gathered with the ids, before the codes are pushed.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tdkernels.autotune.invariance import check_invariant, is_batch_invariant, reject_invariant, reject_max_ranks
from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.multinode import spans_nodes, torch_across_nodes
from tdkernels.ops.common.scaling import Scales, layout_of
from tdkernels.ops.common.tile_config import scaled_tiles, specialized_tiles
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.experts.grouped_gemm.fp8_weights import fp8_product, quantized, scale_kind
from tdkernels.ops.experts.grouped_gemm.op import group_gemm
from tdkernels.ops.experts.tp_moe import launch_ag_gemm, launch_gemm_rs
from tdkernels.ops.experts.tp_moe.config import MoeTpConfig, completed, completed_invariant
from tdkernels.ops.experts.tp_moe.steps import (
    Configs,
    first_fields,
    routing_of,
    rows_of_tokens,
    sums_of_rows,
    weights_of_ranks,
)
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.experts.tp_moe.routing import MoeRouting


def fp8_configs(
    x: torch.Tensor, topk_ids: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor], use_fast_accum: bool, activation: str | None,
    group: "dist.ProcessGroup", config: MoeTpConfig | None,
) -> Configs:
    """Return the Configs of a call of tp_moe with fp8 weights: the given one, or the default. Nothing is tuned."""
    reject_max_ranks("tp_moe")
    if spans_nodes(group):
        reject_invariant("tp_moe", "a group on several nodes")
    check_invariant("tp_moe", config)
    config = torch_across_nodes(config, MoeTpConfig, group)
    weights = zip((w_gate_up, w_down), scales, strict=True)
    layouts = [layout_of(scale_kind(w, scale), use_fast_accum) for w, scale in weights]
    fields = {
        **first_fields(x, topk_ids, w_gate_up, activation), "w_dtype": str(w_gate_up.dtype),
        "w_down_dtype": str(w_down.dtype), "scaling": ", ".join(layouts), "config": as_argument(config),
    }
    group_state(group).check_consensus_cached("tp_moe", fields)
    sizes = group.size() * topk_ids.shape[0], topk_ids.shape[1]
    first = _complete(config, *sizes, w_gate_up, layouts[0], activation)
    return Configs(first, _complete(config, *sizes, w_down, layouts[1]), None)


def _complete(config, tokens, choices, w, layout, activation=None):
    """Return the config with tiles for a GEMM with w. All ranks together have ``tokens`` tokens."""
    if config is not None and config.tiles is not None:
        return config
    if is_batch_invariant():
        return completed_invariant(config, w.dtype, w.device, layout)
    found = completed(config, tokens, choices, *w.shape, w.dtype, w.device, layout, activation)
    if found.warp_specialize:
        return replace(found, tiles=specialized_tiles(found.tiles, w.dtype))
    return replace(found, tiles=scaled_tiles(found.tiles, layout, w.device))


def gate_up_stage(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w: torch.Tensor, scale_w: torch.Tensor,
    use_fast_accum: bool, activation: str | None, group: "dist.ProcessGroup", config: MoeTpConfig,
) -> tuple[torch.Tensor, "MoeRouting"]:
    """Quantize and gather the tokens x. Return (gate-up product h [R, ·] of their rows in the dtype of x, routing)."""
    kind, is_torch = scale_kind(w, scale_w), config.method == "torch"
    codes, scale_x = quantized(x, w, kind)
    routing = routing_of("tp_moe", topk_ids, w, group, config, topk_weights, None if is_torch else scale_x)
    if is_torch:
        full = all_gather_rows(codes.view(torch.uint8), group)  # NCCL of older versions has no fp8 types
        rows, scale_x = (rows_of_tokens(one, routing) for one in (full, all_gather_rows(scale_x, group)))
        return group_gemm(
            rows.view(codes.dtype), w, routing.splits, activation=activation, scale_x=scale_x, scale_w=scale_w,
            out_dtype=x.dtype, use_fast_accum=use_fast_accum,
        ), routing
    assert routing.scales is not None
    scales = Scales(routing.scales, scale_w.contiguous(), kind, x.dtype, use_fast_accum)
    return launch_ag_gemm.launch(codes, w, routing, config, activation, scales=scales).y, routing


def down_stage(
    h: torch.Tensor, w: torch.Tensor, scale_w: torch.Tensor, use_fast_accum: bool, topk_weights: torch.Tensor,
    routing: "MoeRouting", config: MoeTpConfig,
) -> torch.Tensor:
    """Quantize h, and return the weighted sums y [M / W, N] of this rank's tokens in the dtype of h."""
    weights = weights_of_ranks(topk_weights, routing)
    if config.method == "torch":
        made = fp8_product(h, w, scale_w, routing.splits, h.dtype, use_fast_accum=use_fast_accum)
        return sums_of_rows(made, routing, weights)
    kind = scale_kind(w, scale_w)
    codes, scale_h = quantized(h, w, kind)
    scales = Scales(scale_h, scale_w.contiguous(), kind, h.dtype, use_fast_accum)
    return launch_gemm_rs.launch(codes, w, routing, weights, config, scales)
