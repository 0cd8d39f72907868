"""Argument checks of all_to_all, ep_dispatch and ep_combine. They run before anything is launched.

All of them raise TypeError or ValueError; the message names the argument and its shape.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tdkernels.autotune.invariance import check_invariant, reject_invariant
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.validation import DTYPES, INTEGERS, check_rows, check_tensor, shape_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.request import DispatchRequest
    from tdkernels.ops.experts.dispatch.routing import Routing

PAYLOADS = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)


def check_payload(operator: str, x: torch.Tensor, scales: torch.Tensor | None, max_tokens: int | None) -> None:
    """Check x [T, H], its scales [T] or [T, S], and max_tokens."""
    check_rows(operator, "x", x, PAYLOADS)
    if scales is not None:
        check_tensor(operator, "scales", scales, None, x)
        if scales.dim() not in (1, 2) or scales.shape[0] != x.shape[0]:
            raise ValueError(
                f"{operator}: scales must be [T] or [T, S] with the T = {x.shape[0]} rows of x, its shape is "
                f"{shape_of(scales)}"
            )
    if max_tokens is not None and (type(max_tokens) is not int or not 0 < max_tokens < 1 << 30):
        raise ValueError(f"{operator}: max_tokens must be a positive integer below 2**30, not {max_tokens!r}")


def check_most_tokens(operator: str, most: int | None, choices: int, world_size: int) -> None:
    """Check max_tokens_per_rank for tokens with ``choices`` assignments. Row numbers of all ranks must fit in int32."""
    if most is not None and (type(most) is not int or not 0 < most * choices * world_size < 1 << 30):
        raise ValueError(
            f"{operator}: max_tokens_per_rank must be a positive integer, and its product with {choices} choices and "
            f"{world_size} ranks below 2**30, not {most!r}"
        )


def check_num_experts(operator: str, num_experts: int | None, world_size: int) -> None:
    """Check that num_experts is a positive integer divisible by the number of ranks."""
    if type(num_experts) is not int or num_experts < 1:
        raise ValueError(f"{operator}: num_experts must be a positive integer, not {num_experts!r}")
    if num_experts % world_size:
        raise ValueError(f"{operator}: num_experts {num_experts} must be divisible by the group's {world_size} ranks")


def check_dispatch(
    request: "DispatchRequest", topk_weights: torch.Tensor | None, scales: torch.Tensor | None
) -> None:
    """Check the arguments of an ``ep_dispatch`` with topk_ids."""
    operator, x, topk_ids, num_experts = request.operator, request.x, request.ids, request.num_experts
    check_payload(operator, x, scales, request.max_tokens)
    check_tensor(operator, "topk_ids", topk_ids, INTEGERS, x)
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"{operator}: topk_ids must be [T, k] with the T = {x.shape[0]} rows of x, its shape is "
            f"{shape_of(topk_ids)}"
        )
    check_num_experts(operator, num_experts, request.group.size())
    if not 1 <= topk_ids.shape[1] <= num_experts:  # type: ignore[operator]  # an int by check_num_experts
        raise ValueError(
            f"{operator}: topk_ids {shape_of(topk_ids)} must have from 1 to num_experts = {num_experts} choices"
        )
    check_weights(operator, topk_weights, x, topk_ids.shape)
    _check_quantize(operator, x, scales, request.quantize)


def check_again(
    x: torch.Tensor, routing: "Routing", topk_weights: torch.Tensor | None, scales: torch.Tensor | None,
    quantize: str | None,
) -> None:
    """Check the arguments of an ``ep_dispatch`` with a handle."""
    operator = "ep_dispatch"
    check_payload(operator, x, scales, None)
    shape = routing.shape
    check_tensor(operator, "topk_ids (the handle)", routing.splits, None, x)
    if x.shape[0] != shape.tokens:
        raise ValueError(f"{operator}: x {shape_of(x)} must have the {shape.tokens} tokens of the handle")
    check_weights(operator, topk_weights, x, (shape.tokens, shape.choices))
    _check_quantize(operator, x, scales, quantize)


def _check_quantize(operator, x, scales, quantize):
    if quantize not in (None, "fp8"):
        raise ValueError(f'{operator}: quantize must be None or "fp8", not {quantize!r}')
    if quantize is not None and (x.dtype not in DTYPES or scales is not None):
        raise ValueError(f"{operator}: quantize needs an x in bf16, fp16 or fp32 (it is {x.dtype}) and no scales")


def check_weights(operator: str, weights: torch.Tensor | None, x: torch.Tensor, shape: Sequence[int]) -> None:
    """Check topk_weights, which may be None, against x and the shape of topk_ids."""
    if weights is None:
        return
    check_tensor(operator, "topk_weights", weights, DTYPES, x)
    if tuple(weights.shape) != tuple(shape):
        raise ValueError(f"{operator}: topk_weights {shape_of(weights)} must have the shape of topk_ids {list(shape)}")


def check_combine(expert_out: torch.Tensor, routing: "Routing", topk_weights: torch.Tensor | None) -> None:
    """Check the arguments of an ``ep_combine``."""
    operator = "ep_combine"
    check_rows(operator, "expert_out", expert_out)
    if expert_out.device != routing.splits.device:
        raise ValueError(
            f"{operator}: expert_out is on {expert_out.device} but the tokens were on {routing.splits.device}"
        )
    if expert_out.shape[0] != routing.rows:
        raise ValueError(f"{operator}: expert_out {shape_of(expert_out)} must have the {routing.rows} rows of recv.x")
    check_weights(operator, topk_weights, expert_out, (routing.shape.tokens, routing.shape.choices))




def check_invariant_combine(config: "EpConfig", group: "dist.ProcessGroup") -> None:
    """Raise an error in the batch-invariant mode if the sums of a combine with this config depend on the batch."""
    if spans_nodes(group):
        reject_invariant("ep_combine", "a group on several nodes")
    check_invariant("ep_combine", config)
