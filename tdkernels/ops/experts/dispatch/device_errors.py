"""Errors for invalid ids and splits. Every rank raises with the number of the rank; that rank also reports the values.

Kernels detect these errors and report them to the host (``lang.host_error``). On a GPU the host may read the report
long after the call. So the message is prepared without a reference to the operand, and the invalid values are looked up
only if the operand still exists.
"""

import weakref

import torch

from tdkernels.symm.early_error import early
from tdkernels.symm.group import in_step


class _Operand:
    """Description of an operand for errors.

    Subclasses define ``name``, the name of the argument; ``rule``, the text that says what an invalid operand violates;
    and ``wrong_values(tensor)``.
    """

    def __init__(self, tensor):
        self._tensor, self._shape = weakref.ref(tensor), tensor.shape

    def refused(self, operator, rank, here):
        """Return the error for the operand of ``rank``, raised on rank ``here``."""
        words = f"{operator}: {self.name} of rank {rank} {self.rule}"
        return ValueError(f"{words}; here {self.name} {list(self._shape)}{self._values()}" if rank == here else words)

    def _values(self):
        tensor = self._tensor()
        if tensor is None or (tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return ""
        return self.wrong_values(tensor)


class TopkIds(_Operand):
    """Description of topk_ids."""

    name = "topk_ids"

    def __init__(self, ids: torch.Tensor, num_experts: int) -> None:
        # Without super().__init__, to save time: every dispatch creates an object.
        self._tensor, self._shape = weakref.ref(ids), ids.shape
        self._num_experts = num_experts

    @property
    def rule(self) -> str:
        return f"are out of range: each must be from 0 to {self._num_experts - 1}, or -1 for none"

    def wrong_values(self, ids: torch.Tensor) -> str:
        """Return text with an invalid id, or ""."""
        wrong = ids[(ids < -1) | (ids >= self._num_experts)]
        return f" has {wrong[0].item()}" if len(wrong) else ""


class Splits(_Operand):
    """Description of the splits of an all_to_all."""

    name = "splits"
    rule = "are negative or do not add up to the rows of its x"

    def __init__(self, splits: torch.Tensor, rows: int) -> None:
        super().__init__(splits)
        self._rows = rows

    def wrong_values(self, splits: torch.Tensor) -> str:
        """Return text with the smallest split, the sum of the splits, and the number of rows."""
        return f", the least of which is {splits.min().item()}, add up to {splits.sum().item()}, and x has {self._rows}"


def too_many_tokens(operator: str, rank: int, tokens: int) -> Exception:
    """Return the error that all ranks raise if ``rank`` has more tokens than max_tokens_per_rank.

    It is early: that rank raises ``own_too_many`` at once.
    """
    return early(in_step(ValueError(f"{operator}: rank {rank} has {tokens} tokens, more than max_tokens_per_rank")))


def own_too_many(operator: str, x: torch.Tensor, what: str, most: int | None) -> Exception:
    """Return the error that the rank with too many tokens raises at once. ``what`` names the rows of x."""
    return in_step(ValueError(f"{operator}: x {list(x.shape)} has more {what} than max_tokens_per_rank = {most}"))
