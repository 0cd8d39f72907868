"""Send and receive phases of ep_dispatch and ep_combine as separate calls, to overlap them with other work.

A call that sends returns an EpSent, whose ``receive`` must be called once. With torch's collectives the send phase does
all of the work.

Example:
    sent = tdkernels.ep_dispatch_send(x, topk_ids, topk_weights, num_experts=64, max_tokens=capacity)
    shared = shared_expert(x)  # runs while the tokens are on the wire
    recv, handle = sent.receive()
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.op import EpHandle, EpTokens, checked_combine, handle_of, row_weights_of
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.runtime.autograd import may_be_differentiated
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    import torch.distributed as dist


class EpSent:
    """A dispatch or combine that has been sent and not yet received.

    An exception in ``receive`` makes the group unusable on this rank, because its peers have received its data and
    continue.
    """

    def __init__(self, operator: str, group: "dist.ProcessGroup", receive: Callable[[], Any]) -> None:
        self._operator, self._group, self._receive = operator, group, receive

    def receive(self) -> Any:
        """Run the receive phase.

        Returns:
            The result of the whole operator: (recv, handle) of ``ep_dispatch``, or y of ``ep_combine``.

        Raises:
            RuntimeError: If it was received already.
            PeerTimeoutError: If a peer does not send in time.
        """
        try:
            return self._receive()
        except BaseException as error:
            group_state(self._group).end_abruptly(self._operator, error)
            raise


def _reject_gradients(operator, *tensors):
    if may_be_differentiated([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]):
        whole = operator.removesuffix("_send")
        raise ValueError(f"{operator}: separate send and receive have no gradient; use torch.no_grad, or {whole}")


@outside_graphs
@whole_call
def ep_dispatch_send(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
    num_experts: int | None = None, scales: torch.Tensor | None = None, quantize: str | None = None,
    max_tokens: int | None = None,
    max_tokens_per_rank: int | None = None, group: GroupLike = None, config: EpConfig | None = None,
) -> EpSent:
    """Run the send phase of ``ep_dispatch``. Work launched before ``receive()`` overlaps the communication.

    Args:
        x: Tokens [T, H], as in ``ep_dispatch``.
        topk_ids: Experts of each token, [T, k], or the EpHandle of an earlier dispatch, as in ``ep_dispatch``.
        topk_weights: Weights [T, k] or None, as in ``ep_dispatch``.
        num_experts: Number of experts E, divisible by W.
        scales: Scales [T] or [T, S] of an x that is already quantized, or None.
        quantize: None or "fp8", as in ``ep_dispatch``.
        max_tokens: Upper bound of the rows that any rank receives, or None, as in ``ep_dispatch``.
        max_tokens_per_rank: Upper bound of T on all ranks, or None, as in ``ep_dispatch``.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: EpConfig, the same on all ranks, or None, as in ``ep_dispatch``.

    Returns:
        EpSent. Its ``receive()`` returns (recv, handle). A group can have one dispatch in flight.

    Gradient:
        None. The call raises ValueError if a gradient may be needed.

    Raises:
        TypeError, ValueError, PeerTimeoutError: As in ``ep_dispatch``.
        RuntimeError: If another dispatch of the group is in flight.
    """
    _reject_gradients("ep_dispatch_send", x, topk_weights)
    request = DispatchRequest(
        "ep_dispatch", resolve_group(group), x, topk_ids, num_experts, config, quantize, max_tokens,
        max_tokens_per_rank,
    )
    handle = handle_of(request, topk_weights, scales, allow_torch=False)  # separate phases are for overlap
    routing = handle._routing
    receive_rows = routing.send_dispatch(x, scales=scales, weights=topk_weights, quantize=quantize is not None)

    def receive():
        rows, row_scales, row_weights = receive_rows()
        handle.keep_row_weights(row_weights)
        return EpTokens(rows, routing.splits, row_weights, row_scales), handle

    return EpSent("ep_dispatch", routing.group, receive)


@outside_graphs
@whole_call
def ep_combine_send(
    expert_out: torch.Tensor, handle: EpHandle, topk_weights: torch.Tensor | None = None, *, group: GroupLike = None,
    config: EpConfig | None = None,
) -> EpSent:
    """Run the send phase of ``ep_combine``. Work launched before ``receive()`` overlaps the communication.

    Args:
        expert_out: [R, H], one row for each row of recv.x, as in ``ep_combine``.
        handle: The EpHandle of the dispatch that sent the tokens.
        topk_weights: Weights [T, k] or None, as in ``ep_combine``.
        group: The group of the dispatch.
        config: EpConfig, the same on all ranks, or None, as in ``ep_combine``.

    Returns:
        EpSent. Its ``receive()`` returns y. A group can have one combine in flight.

    Gradient:
        None. The call raises ValueError if a gradient may be needed.

    Raises:
        TypeError, ValueError, PeerTimeoutError: As in ``ep_combine``.
        RuntimeError: If another combine of the group is in flight.
    """
    topk_weights, config = checked_combine(expert_out, handle, topk_weights, group, config)
    _reject_gradients("ep_combine_send", expert_out, topk_weights)
    row_weights = row_weights_of(handle, topk_weights, config)
    routing = handle._routing
    receive = routing.send_combine(expert_out, weights=topk_weights, row_weights=row_weights, config=config)
    return EpSent("ep_combine", routing.group, receive)
