"""Steps of ep_moe before its ep_combine: dispatch the tokens, and apply the experts of this rank."""

from typing import TYPE_CHECKING

from tdkernels.ops.experts.dispatch.op import ep_dispatch
from tdkernels.ops.experts.dispatch.quantize import dequantize
from tdkernels.ops.experts.grouped_gemm.op import group_gemm

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.op import EpHandle
    from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig


def receive(
    x: "torch.Tensor", topk_ids: "torch.Tensor | EpHandle", topk_weights: "torch.Tensor", num_experts: int,
    quantize: str | None, max_tokens: int | None, max_tokens_per_rank: int | None, group: "dist.ProcessGroup",
    config: "EpConfig | None",
) -> "tuple[torch.Tensor, torch.Tensor, EpHandle]":
    """Dispatch tokens, and return (rows of this rank's experts in the dtype of x, splits, handle).

    Arguments are those of ``ep_dispatch``. ``splits`` [E / W] is the number of rows of each expert.
    """
    recv, handle = ep_dispatch(
        x, topk_ids, topk_weights.detach(),  # type: ignore[arg-type]
        num_experts=num_experts, quantize=quantize, max_tokens=max_tokens, max_tokens_per_rank=max_tokens_per_rank,
        group=group, config=config,
    )
    # The combine applies the routing weights and has their gradient. The dispatch sends detached weights, so its
    # backward sends no gradient for them.
    handle._topk_weights = topk_weights
    rows = recv.x if quantize is None else dequantize(recv.x, recv.scales, x.dtype)
    return rows, recv.splits, handle


def experts(
    rows: "torch.Tensor", splits: "torch.Tensor", w_gate_up: "torch.Tensor", w_down: "torch.Tensor", activation: str,
    config: "GroupGemmConfig | None",
) -> "torch.Tensor":
    """Apply the experts of this rank to their rows."""
    hidden = group_gemm(rows, w_gate_up, splits, activation=activation, config=config)
    return group_gemm(hidden, w_down, splits, config=config)
