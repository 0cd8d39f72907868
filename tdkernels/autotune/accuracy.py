"""Accuracy check of the tuner: the reference output of a problem and the allowed error."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.problem import Problem
    from tdkernels.autotune.tunable import Tunable


class Reference:
    """Reference output for one set of operands, computed by torch in a wider dtype and in the operands' dtype.

    The allowed errors follow from the error of torch's own computation in the operands' dtype. The limit on the largest
    error catches a single wrong element, which the norm would hide.

    Attributes:
        exact: The output in the wider dtype: fp64 for fp32 operands, else fp32.
        allowed: (error of the norm, largest error). An output may have twice the error of the norm and four times the
            largest error of torch's computation, or of the rounding unit if that is larger.
    """

    def __init__(
        self, tunable: "Tunable", problem: "Problem", operands: tuple[torch.Tensor, ...], group: "dist.ProcessGroup",
    ) -> None:
        wide = torch.float64 if operands[0].dtype == torch.float32 else torch.float32
        widened = [tensor.to(wide) if tensor.is_floating_point() else tensor for tensor in operands]
        self.exact = tunable.reference(widened, problem, group)
        plain = tunable.reference(operands, problem, group)
        self.dtype = plain.dtype
        unit = torch.finfo(plain.dtype).eps / 2
        norm, largest = self.errors(plain)
        self.allowed = 2 * max(norm, unit), 4 * max(largest, unit * _largest(self.exact))
        poison(plain)

    def errors(self, output: torch.Tensor) -> tuple[float, float]:
        """Return (relative error of the norm, largest absolute error) of an output."""
        difference = output.to(self.exact.dtype) - self.exact
        scale = max(self.exact.norm().item(), torch.finfo(self.exact.dtype).tiny)
        return difference.norm().item() / scale, _largest(difference)

    def check(self, output: torch.Tensor) -> None:
        """Raise ArithmeticError if the shape, the dtype or the accuracy of an output is wrong."""
        if output.shape != self.exact.shape or output.dtype != self.dtype:
            raise ArithmeticError(f"wrong: {output.dtype} {list(output.shape)}")
        errors = self.errors(output)
        if not all(error <= allowed for error, allowed in zip(errors, self.allowed, strict=True)):  # false for NaN
            raise ArithmeticError(f"wrong: errors (norm, largest) {errors}, allowed are {self.allowed}")


def poison(output) -> None:
    """Fill the floating-point tensors of an output, a tensor or nested tuples, with NaN.

    The allocator is likely to reuse this memory for the next candidate. Without the NaN a candidate that writes nothing
    could pass the check.
    """
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        output.fill_(torch.nan)
    elif isinstance(output, tuple):
        for part in output:
            poison(part)


def _largest(values):
    """Return the largest magnitude; 0 for an empty tensor."""
    return values.abs().max().item() if values.numel() else 0.0
