"""A mixture of experts that is not divided, by plain torch: what a layer of experts has to give, and its gradients."""

import torch
import torch.nn.functional as F

NAMES = ("x", "topk_weights", "w_gate_up", "w_down")


def mixture(x, topk_ids, topk_weights, w_gate_up, w_down, activated=True):
    """y [T, H] of all experts' weights, expert by expert and in the dtype of x; an id of -1 is no choice.

    ``activated``: by SwiGLU; else w_gate_up is one matrix, whose product goes to the next as it is.
    """
    y = torch.zeros_like(x)
    for expert in range(w_gate_up.shape[0]):
        token, choice = torch.where(topk_ids == expert)
        h = F.linear(x[token], w_gate_up[expert])
        if activated:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        made = F.linear(h, w_down[expert])
        y = y.index_add(0, token, (made * topk_weights[token, choice, None]).to(y.dtype))
    return y


def results_of(operands, topk_ids, dy, activated=True):
    """{"y": …, "dx": …} of the mixture of ``operands``, which are named as in NAMES."""
    operands = {name: operands[name].detach().clone().requires_grad_() for name in NAMES}
    y = mixture(operands["x"], topk_ids, *(operands[name] for name in NAMES[1:]), activated)
    y.backward(dy)
    return {"y": y.detach(), **{f"d{name}": operand.grad for name, operand in operands.items()}}
