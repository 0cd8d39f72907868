"""What operators of experts have in common for the tuner."""

import torch

from tdkernels.ops.experts.grouped_gemm.swiglu import ACTIVATIONS
from tdkernels.rounding import cdiv


def why_not_shared(tunable, problem, divided, experts, choices):
    """Why ranks cannot share a problem, or None.

    Args:
        divided: the sizes, by number, that the ranks divide
        experts, choices: how many, and of a token
    """
    reason = tunable.why_not_divided(problem, divided)
    if reason is not None:
        return reason
    if choices > experts:
        return f"a token has at most EXPERTS = {experts} choices, not {choices}"
    return None


def activation_of(problem):
    """The activation that a layout names, or None."""
    return problem.layout if problem.layout in ACTIVATIONS else None


def expert_ids(tokens, choices, experts, device, generator):
    """[tokens, choices] different experts for each token, all of them as likely."""
    return torch.rand(tokens, experts, generator=generator, device=device).argsort(1)[:, :choices].contiguous()


def rows_by_expert(x, rows, experts):
    """[experts, rows of each, K] made of the rows of x [·, K], for about so many ``rows`` in all."""
    each = cdiv(rows, experts)
    return x.repeat(cdiv(experts * each, x.shape[0]), 1)[: experts * each].view(experts, each, -1)
