"""Validation of the arguments of the Ulysses projections, before anything is launched."""

from typing import TYPE_CHECKING, Any

from tdkernels.ops.common.validation import check_floats, check_weight, shape_of

if TYPE_CHECKING:
    import torch


def check_product(operator: str, name: str, rows: Any, weight: Any, bias: Any, divided_by: int) -> None:
    """Raise TypeError or ValueError if the operands of rows @ weight.T + bias are invalid.

    The rows have a 1 / ``divided_by`` share of the columns K. ``name`` is the name of the argument ``rows``.
    """
    check_floats(operator, {name: rows, "weight": weight} | ({} if bias is None else {"bias": bias}))
    columns = "K" if divided_by == 1 else "K / W"
    if rows.dim() < 2:
        raise ValueError(
            f"{operator}: {name} must have at least 2 dimensions [positions, {columns}], its shape is {shape_of(rows)}"
        )
    check_weight(operator, weight, bias)
    if rows.shape[-1] * divided_by != weight.shape[1]:
        times = "" if divided_by == 1 else f", times the group's {divided_by} ranks,"
        raise ValueError(
            f"{operator}: the last dimension of {name} {shape_of(rows)}{times} must be the K of weight "
            f"{shape_of(weight)}"
        )


def check_divided(
    operator: str, name: str, tensor: "torch.Tensor", dimension: int, size: str, world_size: int
) -> None:
    """Raise ValueError if a dimension of the argument ``name``, called ``size``, is not divisible by the ranks."""
    if tensor.shape[dimension] % world_size:
        raise ValueError(
            f"{operator}: {size} = {tensor.shape[dimension]} of {name} {shape_of(tensor)} must be divisible by the "
            f"group's {world_size} ranks"
        )
