"""The steps of ep_moe before its ep_combine: tokens to the ranks of their experts, and what these make of them."""

from tdkernels.ops.experts.dispatch.op import ep_dispatch
from tdkernels.ops.experts.dispatch.quantize import dequantize
from tdkernels.ops.experts.grouped_gemm.op import group_gemm


def receive(x, topk_ids, topk_weights, num_experts, quantize, max_tokens, max_tokens_per_rank, group, config):
    """(rows of this rank's experts in the dtype of x, how many of each, the EpHandle): the way there."""
    recv, handle = ep_dispatch(
        x, topk_ids, topk_weights.detach(), num_experts=num_experts, quantize=quantize, max_tokens=max_tokens,
        max_tokens_per_rank=max_tokens_per_rank, group=group, config=config,
    )
    # The combine applies the weights and has their gradient: they are sent without one, and nothing of it comes back.
    handle._topk_weights = topk_weights
    rows = recv.x if quantize is None else dequantize(recv.x, recv.scales, x.dtype)
    return rows, recv.splits, handle


def experts(rows, splits, w_gate_up, w_down, activation, config):
    """What this rank's experts make of their rows."""
    hidden = group_gemm(rows, w_gate_up, splits, activation=activation, config=config)
    return group_gemm(hidden, w_down, splits, config=config)
