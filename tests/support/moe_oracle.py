"""Unsharded mixture of experts in plain torch: the expected result of an MoE layer, and its gradients."""

import torch
import torch.nn.functional as F

NAMES = ("x", "topk_weights", "w_gate_up", "w_down")


def mixture(x, topk_ids, topk_weights, w_gate_up, w_down, activated=True):
    """Return y [T, H], computed expert by expert in the dtype of x; an id of -1 is no assignment.

    ``activated``: apply SwiGLU; otherwise w_gate_up is a single projection without activation.
    """
    y = torch.zeros_like(x)
    for expert in range(w_gate_up.shape[0]):
        token, choice = torch.where(topk_ids == expert)
        h = F.linear(x[token], w_gate_up[expert])
        if activated:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        out = F.linear(h, w_down[expert])
        y = y.index_add(0, token, (out * topk_weights[token, choice, None]).to(y.dtype))
    return y


def results_of(operands, topk_ids, dy, activated=True):
    """Return {"y": …, "dx": …} of the mixture of ``operands``, which are named as in NAMES."""
    operands = {name: operands[name].detach().clone().requires_grad_() for name in NAMES}
    y = mixture(operands["x"], topk_ids, *(operands[name] for name in NAMES[1:]), activated)
    y.backward(dy)
    return {"y": y.detach(), **{f"d{name}": operand.grad for name, operand in operands.items()}}
