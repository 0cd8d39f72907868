"""What a candidate's output is compared with, and how far it may be off."""

import torch


class Reference:
    """An operator's specification of one set of operands, in a wider type and as torch computes it in theirs.

    Attributes: ``exact``, the output in the wider type; ``allowed``, the errors (of the norm, the largest one) that an
    output may have: not farther off than twice the plain sequence, and no single element astray, which a norm would
    hide.
    """

    def __init__(self, tunable, problem, operands, group):
        self.dtype = operands[0].dtype
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        widened = [tensor.to(wide) if tensor.is_floating_point() else tensor for tensor in operands]
        self.exact = tunable.reference(widened, problem, group)
        plain = tunable.reference(operands, problem, group)
        unit = torch.finfo(plain.dtype).eps / 2
        norm, largest = self.errors(plain)
        self.allowed = 2 * max(norm, unit), 4 * max(largest, unit * _largest(self.exact))
        poison(plain)

    def errors(self, output):
        """(relative error of the norm, largest error) of an output."""
        difference = output.to(self.exact.dtype) - self.exact
        scale = max(self.exact.norm().item(), torch.finfo(self.exact.dtype).tiny)
        return difference.norm().item() / scale, _largest(difference)

    def check(self, output):
        """Raise ArithmeticError unless an output is what it should be."""
        if output.shape != self.exact.shape or output.dtype != self.dtype:
            raise ArithmeticError(f"wrong: {output.dtype} {list(output.shape)}")
        errors = self.errors(output)
        if not all(error <= allowed for error, allowed in zip(errors, self.allowed, strict=True)):  # NaN is not
            raise ArithmeticError(f"wrong: errors (norm, largest) {errors}, allowed are {self.allowed}")


def poison(made):
    """Fill what was made, tensors in tuples with whatever else, with NaN: the allocator is likely to give it out next,
    and nobody shall be right by leaving it as it is."""
    if isinstance(made, torch.Tensor) and made.is_floating_point():
        made.fill_(torch.nan)
    elif isinstance(made, tuple):
        for part in made:
            poison(part)


def _largest(values):
    """The largest magnitude; 0 of none."""
    return values.abs().max().item() if values.numel() else 0.0
