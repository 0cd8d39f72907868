"""The permutes that a user would write round NCCL in plain torch, as quick as torch makes them.

Whole rows are moved in words of eight bytes, numbers of experts are sorted as bytes, and a token's choices are added up
in the quicker of two ways. Nothing waits for the host. Gradients are taken and added up, too: torch would add to each
token by atomics, which is slower.
"""

import torch

from bench.core import harness
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


class Taken(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx, rows, order, places):
        ctx.places = places
        return taken(rows, order)

    @staticmethod
    def backward(ctx, dtaken):
        return taken(dtaken, ctx.places), None, None


class Spread(torch.autograd.Function):
    """A row for each of the ``choices`` choices of tokens [T, H], in an order of choices."""

    @staticmethod
    def forward(ctx, tokens, order, places, choices):
        ctx.places, ctx.choices = places, choices
        return taken(tokens, order // choices)

    @staticmethod
    def backward(ctx, drows):
        return taken(drows, ctx.places).view(-1, ctx.choices, drows.shape[1]).sum(1), None, None, None


class WeightedSum(torch.autograd.Function):
    """Tokens of their choices' rows, which lie in an order of choices."""

    @staticmethod
    def forward(ctx, rows, weights, order, places, add_up):
        choices = taken(rows, places).view(*weights.shape, -1)
        ctx.save_for_backward(choices, weights)
        ctx.order = order
        return add_up(choices, weights)

    @staticmethod
    def backward(ctx, dy):
        choices, weights = ctx.saved_tensors
        dchoices = weights.to(dy.dtype).unsqueeze(2) * dy.unsqueeze(1)
        dweights = torch.bmm(choices, dy.unsqueeze(2)).squeeze(2).to(weights.dtype)
        return taken(dchoices.view(-1, dy.shape[1]), ctx.order), dweights, None, None, None


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
