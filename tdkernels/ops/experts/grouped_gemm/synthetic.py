"""Helpers of the tunables of MoE operators: synthetic operands, and checks of problems."""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.experts.grouped_gemm.swiglu import ACTIVATIONS
from tdkernels.rounding import cdiv

if TYPE_CHECKING:
    from tdkernels.autotune.problem import Problem
    from tdkernels.ops.common.tunable_base import ConfigTunable


def why_not_shared(
    tunable: "ConfigTunable", problem: "Problem", divided: tuple[int, ...], experts: int, choices: int,
) -> str | None:
    """Return why a problem cannot be divided between the ranks, or None if it can.

    Args:
        divided: Indices of the sizes in ``problem.shape`` that the ranks divide.
        experts: Number of experts.
        choices: Number of experts per token (top-k).
    """
    reason = tunable.why_not_divided(problem, divided)
    if reason is not None:
        return reason
    if choices > experts:
        return f"a token has at most EXPERTS = {experts} choices, not {choices}"
    return None


def activation_of(problem: "Problem") -> str | None:
    """Return the activation that the layout of a problem names, or None."""
    return problem.layout if problem.layout in ACTIVATIONS else None


def expert_ids(
    tokens: int, choices: int, experts: int, device: torch.device, generator: torch.Generator,
) -> torch.Tensor:
    """Return [tokens, choices] random expert ids, uniformly distributed and distinct for each token."""
    return torch.rand(tokens, experts, generator=generator, device=device).argsort(1)[:, :choices].contiguous()


def rows_by_expert(x: torch.Tensor, rows: int, experts: int) -> torch.Tensor:
    """Repeat the rows of x [·, K] to [experts, rows per expert, K], with about ``rows`` rows in total."""
    each = cdiv(rows, experts)
    return x.repeat(cdiv(experts * each, x.shape[0]), 1)[: experts * each].view(experts, each, -1)
