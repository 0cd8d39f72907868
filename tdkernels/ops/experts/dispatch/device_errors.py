"""The errors for ids and splits that are wrong: every rank hears whose they are, and that rank what is wrong with them.

Kernels find out, and leave the host a note, which on a GPU may be read long after the call. So what an error is to say
of an operand is kept without the operand, and its values are looked up only if it is still there.
"""

import weakref

import torch

from tdkernels.symm.group import in_step


class _Operand:
    """What was given to be routed: ``rule`` says what is wrong with it where something is."""

    def __init__(self, tensor):
        self._tensor, self._shape = weakref.ref(tensor), tensor.shape

    def refused(self, operator, rank, here):
        """The error for the operand of ``rank``, on rank ``here``."""
        words = f"{operator}: {self.name} of rank {rank} {self.rule}"
        return ValueError(f"{words}; here {self.name} {list(self._shape)}{self._values()}" if rank == here else words)

    def _values(self):
        tensor = self._tensor()
        if tensor is None or (tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return ""
        return self.wrong_values(tensor)


class TopkIds(_Operand):
    name = "topk_ids"

    def __init__(self, ids, num_experts):
        self._tensor, self._shape = weakref.ref(ids), ids.shape  # not by super(): each dispatch makes one
        self._num_experts = num_experts

    @property
    def rule(self):
        return f"are out of range: each must be from 0 to {self._num_experts - 1}, or -1 for none"

    def wrong_values(self, ids):
        wrong = ids[(ids < -1) | (ids >= self._num_experts)]
        return f" has {wrong[0].item()}" if len(wrong) else ""


class Splits(_Operand):
    name = "splits"
    rule = "are negative or do not add up to the rows of its x"

    def __init__(self, splits, rows):
        super().__init__(splits)
        self._rows = rows

    def wrong_values(self, splits):
        return f", the least of which is {splits.min().item()}, add up to {splits.sum().item()}, and x has {self._rows}"


def too_many_tokens(operator, rank, tokens):
    return in_step(ValueError(f"{operator}: rank {rank} has {tokens} tokens, more than max_tokens_per_rank"))


def own_too_many(operator, x, what, most):
    """The error of the rank that has them, at once; ``what`` the rows of x are."""
    return in_step(ValueError(f"{operator}: x {list(x.shape)} has more {what} than max_tokens_per_rank = {most}"))
