"""Steps of ep_moe before its ep_combine: dispatch the tokens, and apply experts with weights in fp8."""

from typing import TYPE_CHECKING

from tdkernels.ops.experts.dispatch.op import EpHandle, ep_dispatch, handle_of
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.ops.experts.grouped_gemm.fp8_weights import fp8_product
from tdkernels.ops.quantize.op import dequantize_rows

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.op import EpTokens
    from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig


def receive(
    x: "torch.Tensor", topk_ids: "torch.Tensor | EpHandle", topk_weights: "torch.Tensor", num_experts: int,
    quantize: str | None, max_tokens: int | None, max_tokens_per_rank: int | None, group: "dist.ProcessGroup",
    config: "EpConfig | None",
) -> "tuple[EpTokens, EpHandle]":
    """Dispatch tokens, and return (rows of this rank's experts, handle). Arguments are those of ``ep_dispatch``.

    If the host waits for the number of rows, there may be some more of them, which belong to no expert.
    """
    weights, bounds = topk_weights.detach(), (max_tokens, max_tokens_per_rank)
    if bounds == (None, None):
        if not isinstance(topk_ids, EpHandle):
            request = DispatchRequest("ep_dispatch", group, x, topk_ids, num_experts, config, quantize)
            topk_ids = handle_of(request, weights, None)
        topk_ids._routing.add_spare_rows()
    recv, handle = ep_dispatch(
        x, topk_ids, weights,  # type: ignore[arg-type]
        num_experts=num_experts, quantize=quantize, max_tokens=max_tokens, max_tokens_per_rank=max_tokens_per_rank,
        group=group, config=config,
    )
    # The combine applies the routing weights, and ``experts_and_combine`` computes their gradient. The dispatch sends
    # detached weights, so its backward sends no gradient for them.
    handle._topk_weights = topk_weights
    return recv, handle


def rows_of(recv: "EpTokens", dtype: "torch.dtype") -> "torch.Tensor":
    """Return the received rows in ``dtype``: dequantized if they were sent in fp8."""
    return recv.x if recv.scales is None else dequantize_rows(recv.x, recv.scales, dtype)


def fp8_experts(
    recv: "EpTokens", w_gate_up: "torch.Tensor", w_down: "torch.Tensor", scales: "tuple[torch.Tensor, torch.Tensor]",
    use_fast_accum: bool, activation: str, dtype: "torch.dtype", config: "GroupGemmConfig | None",
) -> "torch.Tensor":
    """Apply the experts of this rank, with weights in fp8, to their rows. Return the result in ``dtype``.

    ``scales`` are those of w_gate_up and of w_down. If the first are block-wise, rows that were sent in fp8 are
    multiplied as they are.
    """
    hidden = fp8_product(
        recv.x, w_gate_up, scales[0], recv.splits, dtype, activation, recv.scales, config, use_fast_accum
    )
    return fp8_product(hidden, w_down, scales[1], recv.splits, dtype, config=config, use_fast_accum=use_fast_accum)
