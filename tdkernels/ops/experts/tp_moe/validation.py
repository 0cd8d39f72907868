"""Validation of the arguments of tp_moe, moe_ag_gemm and moe_gemm_rs, before anything is launched."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tdkernels.ops.common.config import check_config
from tdkernels.ops.common.scaling import check_fp8
from tdkernels.ops.common.validation import DTYPES, INTEGERS, check_tensor, shape_of
from tdkernels.ops.experts.grouped_gemm.fp8_weights import (
    check_fp8_experts,
    check_fp8_scale,
    check_fp8_tiles,
    check_scales_given,
)
from tdkernels.ops.experts.grouped_gemm.validation import check_activation, check_experts, check_method
from tdkernels.ops.experts.tp_moe.config import MoeTpConfig

if TYPE_CHECKING:
    import torch

    from tdkernels.ops.experts.tp_moe.routing import MoeRouting


def _check_ids(operator, topk_ids, x, num_experts):
    check_tensor(operator, "topk_ids", topk_ids, INTEGERS, x, memory=False)
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"{operator}: topk_ids must be [M / W, k] with the {x.shape[0]} rows of x, its shape is "
            f"{shape_of(topk_ids)}"
        )
    if not 1 <= topk_ids.shape[1] <= num_experts:
        raise ValueError(
            f"{operator}: topk_ids {shape_of(topk_ids)} must have from 1 to E = {num_experts} choices"
        )


def _check_weights(operator, weights, device, shape):
    check_tensor(operator, "topk_weights", weights, DTYPES, memory=False)
    if weights.device != device:
        raise ValueError(f"{operator}: topk_weights is on {weights.device} but the tokens are on {device}")
    if tuple(weights.shape) != tuple(shape):
        raise ValueError(f"{operator}: topk_weights {shape_of(weights)} must have the shape of topk_ids {list(shape)}")


def check_ag_gemm(
    operator: str, x: "torch.Tensor", topk_ids: "torch.Tensor", w: "torch.Tensor", activation: str | None,
    config: MoeTpConfig | None, name: str = "w",
) -> None:
    """Raise TypeError or ValueError if arguments of ``moe_ag_gemm`` are invalid, naming the argument and its shape."""
    check_experts(operator, x, w, name)
    check_activation(operator, activation, w, name)
    _check_ids(operator, topk_ids, x, w.shape[0])
    check_config(operator, config, MoeTpConfig, x)
    check_method(operator, config, w, name)


def check_gemm_rs(
    operator: str, h: "torch.Tensor", routing: "MoeRouting", topk_weights: "torch.Tensor", w: "torch.Tensor",
    config: MoeTpConfig | None,
) -> None:
    """Raise TypeError or ValueError if arguments of ``moe_gemm_rs`` are invalid, naming the argument and its shape."""
    check_experts(operator, h, w, rows="h")
    if w.shape[0] != routing.num_experts:
        raise ValueError(f"{operator}: w {shape_of(w)} must have the {routing.num_experts} experts of the routing")
    if h.shape[0] != routing.choices.shape[0]:
        raise ValueError(f"{operator}: h {shape_of(h)} must have the routing's {routing.choices.shape[0]} rows")
    if h.device != routing.choices.device:
        raise ValueError(f"{operator}: h is on {h.device} but the routing is on {routing.choices.device}")
    _check_weights(operator, topk_weights, h.device, (routing.tokens, routing.num_choices))
    check_config(operator, config, MoeTpConfig, h)
    check_method(operator, config, w)


def check_tp_moe(
    x: "torch.Tensor", topk_ids: "torch.Tensor", topk_weights: "torch.Tensor", w_gate_up: "torch.Tensor",
    w_down: "torch.Tensor", activation: str | None, config: MoeTpConfig | None, scales: Any = None,
) -> None:
    """Raise TypeError or ValueError if arguments of ``tp_moe`` are invalid, naming the argument and its shape.

    ``scales``: (scale_gate_up, scale_down) for weights in fp8.
    """
    operator = "tp_moe"
    if scales is None:
        check_ag_gemm(operator, x, topk_ids, w_gate_up, activation, config, name="w_gate_up")
    else:
        _check_fp8_gate_up(operator, x, topk_ids, w_gate_up, scales, activation, config)
    _check_weights(operator, topk_weights, x.device, topk_ids.shape)
    check_tensor(operator, "w_down", w_down, memory=False)
    if scales is None and w_down.dtype != x.dtype or w_down.device != x.device:
        raise TypeError(f"{operator}: x is {x.dtype} on {x.device} but w_down is {w_down.dtype} on {w_down.device}")
    width = w_gate_up.shape[1] // (2 if activation else 1)
    expected = (w_gate_up.shape[0], x.shape[1], width)
    if tuple(w_down.shape) != expected:
        raise ValueError(
            f"{operator}: w_down {shape_of(w_down)} must be [E, H, I / W] = {list(expected)}, by x {shape_of(x)} and "
            f"w_gate_up {shape_of(w_gate_up)}"
        )
    if scales is None:
        check_method(operator, config, w_down, "w_down")
    else:
        check_fp8(operator, "w_down", w_down)
        check_fp8_scale(operator, x, w_down, scales[1], "w_down", "scale_down")
        check_fp8_tiles(operator, config and config.tiles, (w_gate_up, w_down), scales)


def _check_fp8_gate_up(operator, x, topk_ids, w_gate_up, scales, activation, config):
    """Check the arguments of the gate-up stage with weights in fp8."""
    check_scales_given(operator, scales)
    check_fp8_experts(operator, x, w_gate_up, scales[0], "w_gate_up", "scale_gate_up")
    check_activation(operator, activation, w_gate_up, "w_gate_up")
    _check_ids(operator, topk_ids, x, w_gate_up.shape[0])
    if isinstance(config, MoeTpConfig) and config.method == "torch":
        config = replace(config, method="fused")  # supports fp8 on all devices: only its collectives are torch's
    check_config(operator, config, MoeTpConfig, w_gate_up)
