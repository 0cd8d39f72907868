"""The permutes that a user would write round NCCL in plain torch, as quick as torch makes them.

Whole rows are moved in words of eight bytes, numbers of experts are sorted as bytes, and a token's choices are added up
in the quicker of two ways. Nothing waits for the host.
"""

import torch

from bench import harness
from tdkernels.autotune import timing
from tdkernels.launch import rank_device


def words(rows):
    """Rows in words of eight bytes: torch moves a word a thread."""
    width = rows.shape[1] * rows.element_size()
    return rows.view(torch.int64) if width % 8 == 0 else rows.view(torch.uint8)


def taken(rows, numbers):
    """The rows of these numbers."""
    return words(rows).index_select(0, numbers).view(rows.dtype)


def sort(numbers, bound):
    """Integers below a bound: (sorted, their stable order)."""
    return torch.sort(numbers.to(torch.uint8) if bound <= 256 else numbers, stable=True)


def inverse(order):
    """Where each number has come to."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def sum_by_product(choices, weights):
    """Tokens [T, H] of their choices [T, k, H], weighted."""
    return torch.bmm(weights.to(choices.dtype).unsqueeze(1), choices).squeeze(1)


def sum_by_terms(choices, weights):
    """The same in another way."""
    return (choices * weights.to(choices.dtype).unsqueeze(2)).sum(1)


def quicker_sum(tokens, hidden, weights):
    """The quicker of the two ways for ``tokens`` tokens; collective."""
    choices = weights.new_ones(tokens, weights.shape[1], hidden, dtype=torch.bfloat16)
    ways = (sum_by_product, sum_by_terms)

    def ms(way):
        call = lambda _: way(choices, weights)  # noqa: E731
        timing.burst(call, [None], 1, rank_device())
        return timing.burst(call, [None], 3, rank_device())[0]

    times = harness.slowest([ms(way) for way in ways])
    return ways[times.index(min(times))]
