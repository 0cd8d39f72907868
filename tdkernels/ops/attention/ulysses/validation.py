"""Checks of what a user passes to the Ulysses projections, before anything is launched."""

from tdkernels.ops.common.validation import check_floats, check_weight, shape_of


def check_product(operator, name, rows, weight, bias, divided_by):
    """Raise unless rows @ weight.T + bias makes sense, where rows have one of ``divided_by`` parts of the columns."""
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


def check_divided(operator, name, tensor, dimension, size, world_size):
    """Raise unless a dimension, which is called ``size``, can be divided between the ranks."""
    if tensor.shape[dimension] % world_size:
        raise ValueError(
            f"{operator}: {size} = {tensor.shape[dimension]} of {name} {shape_of(tensor)} must be divisible by the "
            f"group's {world_size} ranks"
        )
