"""Permutes for the NCCL baselines, written in plain torch and as fast as torch allows.

Rows are moved as 64-bit words, expert ids are sorted as bytes, and the weighted sum over a token's experts uses the
faster of two implementations. No operation synchronizes with the host. The backward also uses gathers and sums; torch's
own backward of index_select uses atomics, which is slower.
"""

import torch

from bench.core import harness
from tdkernels.autotune import timing
from tdkernels.launch import rank_device


def words(rows):
    """View rows as 64-bit words; torch's index_select copies one element per thread."""
    width = rows.shape[1] * rows.element_size()
    return rows.view(torch.int64) if width % 8 == 0 else rows.view(torch.uint8)


def take_rows(rows, numbers):
    """Return the rows with these indices."""
    return words(rows).index_select(0, numbers).view(rows.dtype)


def sort(numbers, bound):
    """Sort integers below ``bound``. Return (sorted values, stable order)."""
    return torch.sort(numbers.to(torch.uint8) if bound <= 256 else numbers, stable=True)


def inverse(order):
    """Return the inverse permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Permuted(torch.autograd.Function):
    """Permute rows; ``places`` is the inverse of ``order``."""

    @staticmethod
    def forward(ctx, rows, order, places):
        ctx.places = places
        return take_rows(rows, order)

    @staticmethod
    def backward(ctx, dtaken):
        return take_rows(dtaken, ctx.places), None, None


class Expanded(torch.autograd.Function):
    """Replicate tokens [T, H] to one row per top-k assignment, in the given order of assignments."""

    @staticmethod
    def forward(ctx, tokens, order, places, choices):
        ctx.places, ctx.choices = places, choices
        return take_rows(tokens, order // choices)

    @staticmethod
    def backward(ctx, drows):
        return take_rows(drows, ctx.places).view(-1, ctx.choices, drows.shape[1]).sum(1), None, None, None


class WeightedSum(torch.autograd.Function):
    """Sum the rows of each token's top-k assignments, weighted; rows are in the given order of assignments."""

    @staticmethod
    def forward(ctx, rows, weights, order, places, add_up):
        choices = take_rows(rows, places).view(*weights.shape, -1)
        ctx.save_for_backward(choices, weights)
        ctx.order = order
        return add_up(choices, weights)

    @staticmethod
    def backward(ctx, dy):
        choices, weights = ctx.saved_tensors
        dchoices = weights.to(dy.dtype).unsqueeze(2) * dy.unsqueeze(1)
        dweights = torch.bmm(choices, dy.unsqueeze(2)).squeeze(2).to(weights.dtype)
        return take_rows(dchoices.view(-1, dy.shape[1]), ctx.order), dweights, None, None, None


def sum_by_bmm(choices, weights):
    """Reduce [T, k, H] to [T, H] with weights [T, k], as a batched GEMM."""
    return torch.bmm(weights.to(choices.dtype).unsqueeze(1), choices).squeeze(1)


def sum_elementwise(choices, weights):
    """Reduce [T, k, H] to [T, H] with weights [T, k], as a multiplication and a sum."""
    return (choices * weights.to(choices.dtype).unsqueeze(2)).sum(1)


def fastest_sum(tokens, hidden, weights):
    """Time both implementations for ``tokens`` tokens and return the faster one. Collective."""
    choices = weights.new_ones(tokens, weights.shape[1], hidden, dtype=torch.bfloat16)
    functions = (sum_by_bmm, sum_elementwise)

    def ms(function):
        call = lambda _: function(choices, weights)  # noqa: E731
        timing.burst(call, [None], 1, rank_device())
        return timing.burst(call, [None], 3, rank_device())[0]

    times = harness.slowest([ms(function) for function in functions])
    return functions[times.index(min(times))]
