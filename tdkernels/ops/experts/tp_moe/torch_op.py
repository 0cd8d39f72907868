"""torch.library operators of tp_moe for torch.compile: one for the forward and one for the backward.

A MoeRouting is not a tensor, so it cannot be passed from the forward to the backward. The backward computes it again,
with an all-gather of the ids and four small launches. It must get the same rows, so compiled calls of one shape keep
the config of the first call. The configs of the gradients are selected in the backward, as in eager mode.
"""

import torch

from tdkernels.autotune.invariance import batch_invariant, check_invariant, is_batch_invariant, reject_max_ranks
from tdkernels.ops.common.config import from_text
from tdkernels.ops.experts.tp_moe.config import MoeTpConfig
from tdkernels.ops.experts.tp_moe.steps import (
    first_forward,
    layer_backward,
    routing_of,
    second_forward,
    tp_moe_configs,
)
from tdkernels.runtime import autograd, torch_op
from tdkernels.runtime.autograd import fake_gradients, pack_gradients, unpack_gradients
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

INVARIANT = " batch_invariant"  # end of the config as text of a call in the batch-invariant mode


def _configs(x, topk_ids, w_gate_up, w_down, activation, group, text, invariant=False):
    """Return the Configs that the first compiled call with this signature selected.

    ``text``: the config, and INVARIANT if the call was traced in the batch-invariant mode, so that the backward has the
    rows of the forward if it runs in another mode. ``invariant``: whether the forward runs in the mode.
    """
    operands = x, topk_ids, w_gate_up, w_down
    invariant |= text.endswith(INVARIANT)
    text = text.removesuffix(INVARIANT)
    call = "tp_moe", *(tensor.shape for tensor in operands), x.dtype, x.device, activation, text, invariant
    known = group_state(group).compiled_calls
    given = from_text(MoeTpConfig, text) if text else None
    with batch_invariant(invariant):
        check_invariant("tp_moe", given)
        if call in known:
            return known[call]
        known[call] = tp_moe_configs(*operands, activation, group, given)
    return known[call]


@whole_call
def _tp_moe(x, topk_ids, topk_weights, w_gate_up, w_down, activation, keep, group, config):
    group, activation = torch_op.group_by_name(group), activation or None
    reject_max_ranks("tp_moe")
    configs = _configs(x, topk_ids, w_gate_up, w_down, activation, group, config, is_batch_invariant())
    if not x.shape[0]:
        return _empty_outputs(x, topk_ids, w_gate_up, w_down, keep, group.size())
    routing = routing_of("tp_moe", topk_ids, w_gate_up, group, configs.first, topk_weights)
    h, pre = first_forward(x, w_gate_up, routing, activation, configs.first, keep)
    y, weights = second_forward(h, w_down, topk_weights, routing, configs.second)
    if not keep:
        return y, y.new_empty(0), y.new_empty(0)
    return y, h if pre is None else pre, weights


def _empty_outputs(x, topk_ids, w_gate_up, w_down, keep, ranks):
    """Return uninitialized (y, ``inner`` of ``layer_backward``, routing weights of all ranks).

    Without ``keep`` only y has data.
    """
    y = x.new_empty(x.shape[0], w_down.shape[1])
    if not keep:
        return y, x.new_empty(0), x.new_empty(0)
    tokens, choices = ranks * x.shape[0], topk_ids.shape[1]
    inner = x.new_empty(tokens * choices, w_gate_up.shape[1])
    return y, inner, x.new_empty(tokens, choices, dtype=torch.float32)


@whole_call
def _tp_moe_backward(
    dy, x, topk_ids, topk_weights, w_gate_up, w_down, inner, weights, need_dx, need_dtopk, need_dgate_up, need_ddown,
    activation, group, config,
):
    operands, needs = (x, topk_weights, w_gate_up, w_down), (need_dx, need_dtopk, need_dgate_up, need_ddown)
    if not x.shape[0]:
        return tuple(tensor.zero_() for tensor in fake_gradients(operands, needs))
    group, activation = torch_op.group_by_name(group), activation or None
    configs = _configs(x, topk_ids, w_gate_up, w_down, activation, group, config)
    routing = routing_of("tp_moe", topk_ids, w_gate_up, group, configs.first)
    made = layer_backward(
        dy, x, inner, weights, w_gate_up, w_down, routing, activation, configs.backward, needs
    )
    return pack_gradients(made, operands, needs)


_OPERANDS = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down"


def _fake_tp_moe(x, topk_ids, topk_weights, w_gate_up, w_down, activation, keep, group, config):
    return _empty_outputs(x, topk_ids, w_gate_up, w_down, keep, torch_op.world_size_by_name(group))


def _fake_tp_moe_backward(dy, x, topk_ids, topk_weights, w_gate_up, w_down, inner, weights, *call):
    return fake_gradients((x, topk_weights, w_gate_up, w_down), call[:4])


torch_op.register(
    f"tp_moe({_OPERANDS}, str activation, bool keep, str group, str config) -> (Tensor, Tensor, Tensor)",
    _tp_moe,
    _fake_tp_moe,
)
torch_op.register(
    f"tp_moe_backward(Tensor dy, {_OPERANDS}, Tensor inner, Tensor weights, bool need_dx, bool need_dtopk,"
    " bool need_dgate_up, bool need_ddown, str activation, str group, str config)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _tp_moe_backward,
    _fake_tp_moe_backward,
)


class _TpMoe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_ids, topk_weights, w_gate_up, w_down, activation, *call):
        operands = x, topk_ids, topk_weights, w_gate_up, w_down
        y, *kept = torch.ops.tdkernels.tp_moe(*operands, activation, True, *call)
        ctx.save_for_backward(*operands, *kept)
        ctx.call = activation, *call
        return y

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("tp_moe")
        need_dx, _, *others = ctx.needs_input_grad[:5]
        needs = need_dx, *others
        made = torch.ops.tdkernels.tp_moe_backward(dy, *ctx.saved_tensors, *needs, *ctx.call)
        dx, *gradients = unpack_gradients(made, needs)
        return dx, None, *gradients, None, None, None


def tp_moe_compiled(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    activation: str | None, group: str, config: str,
) -> torch.Tensor:
    """Return y for valid operands, through torch.library. The group is given by its name, the config as text."""
    operands = x, topk_ids, topk_weights, w_gate_up, w_down
    if autograd.may_be_differentiated([x, topk_weights, w_gate_up, w_down]):
        return _TpMoe.apply(*operands, activation or "", group, config)
    return torch.ops.tdkernels.tp_moe(*operands, activation or "", False, group, config)[0]
