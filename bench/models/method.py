"""One way to run a model, and the calls that are timed in each phase."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tdkernels

# The outputs that are checked in each phase.
OUTPUTS = {"prefill": ("output",), "decode": ("output",), "train": ("output", "norm gradient", "q gradient")}


@dataclass(frozen=True)
class Method:
    """One way to run a phase of a model.

    model:      the model, whose parameters have the gradients
    call:       function of an input set, which is None; returns the tensors that ``OUTPUTS`` names
    dims:       the dimension in which each output is sharded across the ranks; None if it is complete
    complete:   function of the outputs that makes them comparable with the reference, outside the timed call
    checked:    False if the outputs are wrong by construction
    note:       function that describes the method after its first call, for its rows
    """

    model: Any
    call: Callable
    dims: tuple
    complete: Callable = tuple
    checked: bool = True
    note: Callable = str


def call_of(case, model, forward, x, dy, gradients):
    """Return the call of a phase: a forward without gradients, or in training a forward and backward.

    Args:
        forward: function of x that returns the output.
        x: input, or None if the model computes it from tokens.
        dy: gradient of the output.
        gradients: function without arguments that returns the gradients to check, after the backward.
    """
    if case.phase == "train":
        return _training_step(model, forward, x, dy, gradients)

    def call(_):
        return (forward(x),)

    return call


def _training_step(model, forward, x, dy, gradients):
    """Return the call of a forward and backward, which includes the gradients of all parameters and of x."""
    x = None if x is None else x.detach().clone().requires_grad_()

    def call(_):
        model.zero_grad(set_to_none=True)
        if x is not None:
            x.grad = None
        with torch.enable_grad():
            y = forward(x)
        y.backward(dy)
        return (y.detach(), *gradients())

    return call


def own(tensor, dim):
    """Return this rank's part of a tensor; the tensor itself if ``dim`` is None."""
    return tensor if dim is None else tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def full(outputs):
    """Return the complete tensors of DTensors; other tensors as they are."""
    return tuple(one.full_tensor() if isinstance(one, DTensor) else one for one in outputs)


def checking_operators(model, complete):
    """Return ``complete``, preceded by a check that the decoder layers run operators of tdkernels.

    It raises a RuntimeError if a linear layer, or the gather of several of them, does not. The check is made after a
    forward, because some layers decide then.
    """

    def checked(outputs):
        for entry in tdkernels.nn.report(model).entries:
            if entry.runs is None and "layers." in entry.module:
                raise RuntimeError(f"{entry.module} runs no operator of tdkernels: {entry.reason}")
        return complete(outputs)

    return checked
