"""ep_dispatch and ep_combine in halves, which send and which receive, so that something else runs in between.

What is sent is received once, by the EpSent that it gave. By torch's collectives the first half does it all.

Example:
    sent = tdkernels.ep_dispatch_send(x, topk_ids, topk_weights, num_experts=64, max_tokens=capacity)
    shared = shared_expert(x)  # what hides the wire
    recv, handle = sent.receive()
"""

import torch

from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.op import EpHandle, EpTokens, checked_combine, handle_of, row_weights_of
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.runtime.autograd import may_be_differentiated
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call


class EpSent:
    """What has been sent and is to be received: ``receive()`` gives what the whole call would have returned.

    An exception in ``receive()`` breaks the group on this rank: its peers have what was sent, and go on.
    """

    def __init__(self, operator, group, receive):
        self._operator, self._group, self._receive = operator, group, receive

    def receive(self):
        try:
            return self._receive()
        except BaseException as error:
            group_state(self._group).end_abruptly(self._operator, error)
            raise


def _refuse_gradients(operator, *tensors):
    if may_be_differentiated([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]):
        whole = operator.removesuffix("_send")
        raise ValueError(f"{operator}: the halves have no gradient; use torch.no_grad, or {whole}")


@outside_graphs
@whole_call
def ep_dispatch_send(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
    num_experts: int | None = None, scales: torch.Tensor | None = None, quantize: str | None = None,
    max_tokens: int | None = None,
    max_tokens_per_rank: int | None = None, group: GroupLike = None, config: EpConfig | None = None,
) -> EpSent:
    """The first half of ``ep_dispatch``, whose arguments it has; what is called before ``receive()`` hides the wire.

    Returns:
        EpSent; its receive() returns (recv, handle). One dispatch of a group may be under way at a time

    Gradient:
        none; ValueError if one may be asked for

    Raises:
        as ep_dispatch
        RuntimeError: while another dispatch of the group is under way
    """
    _refuse_gradients("ep_dispatch_send", x, topk_weights)
    request = DispatchRequest(
        "ep_dispatch", resolve_group(group), x, topk_ids, num_experts, config, quantize, max_tokens,
        max_tokens_per_rank,
    )
    handle = handle_of(request, topk_weights, scales, allow_torch=False)  # phases are there to overlap
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
    """The first half of ``ep_combine``, whose arguments it has; what is called before ``receive()`` hides the wire.

    Returns:
        EpSent; its receive() returns y. One combine of a group may be under way at a time

    Gradient:
        none; ValueError if one may be asked for

    Raises:
        as ep_combine
        RuntimeError: while another combine of the group is under way
    """
    topk_weights, config = checked_combine(expert_out, handle, topk_weights, group, config)
    _refuse_gradients("ep_combine_send", expert_out, topk_weights)
    row_weights = row_weights_of(handle, topk_weights, config)
    routing = handle._routing
    receive = routing.send_combine(expert_out, weights=topk_weights, row_weights=row_weights, config=config)
    return EpSent("ep_combine", routing.group, receive)
