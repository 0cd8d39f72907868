"""Validation of the arguments of operators with grouped GEMMs, before anything is launched."""

from typing import Any

import torch

from tdkernels.ops.common.validation import INTEGERS, check_floats, check_tensor
from tdkernels.ops.experts.grouped_gemm.dispatch import why_not_torch
from tdkernels.ops.experts.grouped_gemm.swiglu import ACTIVATIONS


def check_experts(operator: str, x: torch.Tensor, w: torch.Tensor, name: str = "w", rows: str = "x") -> None:
    """Check that rows x [R, K] and weights w [E, N, K] fit together.

    Args:
        operator: Name of the operator, for errors.
        x: The rows, called ``rows`` in errors.
        w: The weights, called ``name`` in errors.

    Raises:
        TypeError, ValueError: If not. The message names the argument and its shape.
    """
    check_floats(operator, {rows: x, name: w}, memory=True)
    check_expert_shapes(operator, x, w, name, rows)


def check_expert_shapes(operator: str, x: torch.Tensor, w: torch.Tensor, name: str = "w", rows: str = "x") -> None:
    """Raise ValueError unless x is [R, K] and w is [E, N, K], as ``check_experts``."""
    if x.dim() != 2:
        raise ValueError(f"{operator}: {rows} must have 2 dimensions [rows, K], its shape is {list(x.shape)}")
    if w.dim() != 3:
        raise ValueError(f"{operator}: {name} must have 3 dimensions [E, N, K], its shape is {list(w.shape)}")
    if x.shape[1] != w.shape[2]:
        raise ValueError(
            f"{operator}: the last dimension of {rows} {list(x.shape)} and of {name} {list(w.shape)} must be the same K"
        )
    if 0 in w.shape:
        raise ValueError(f"{operator}: {name} {list(w.shape)} has an empty dimension")


def check_activation(operator: str, activation: str | None, w: torch.Tensor, name: str = "w") -> None:
    """Raise ValueError if the activation is unknown, or if it needs an even N and w [E, N, K] has an odd one."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{operator}: activation must be one of {ACTIVATIONS}, not {activation!r}")
    if activation is not None and w.shape[1] % 2:
        raise ValueError(f"{operator}: {name} {list(w.shape)} must have an even N for {activation}, gate and up")


def check_method(operator: str, config: Any, w: torch.Tensor, name: str = "w") -> None:
    """Raise ValueError if a config (or None) selects torch's grouped GEMM and that does not support the weight."""
    if config is None or config.method != "torch":
        return
    reason = why_not_torch(w.shape, w.dtype, w.device)
    if reason is not None:
        raise ValueError(f"{operator}: {reason}; {name} is {list(w.shape)} of {w.dtype}")


def check_splits(x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless ``splits`` has an integer for each expert of w [E, N, K]."""
    check_tensor("group_gemm", "splits", splits, INTEGERS, x, memory=False)
    if tuple(splits.shape) != tuple(w.shape[:1]):
        raise ValueError(
            f"group_gemm: splits must be [E] with the E = {w.shape[0]} of w, its shape is {list(splits.shape)}"
        )
