"""Calls of several launches: detect an exception between two launches, which leaves the ranks out of step."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tdkernels.symm.group import live_states, number_of_launches

_P = ParamSpec("_P")
_R = TypeVar("_R")


def whole_call(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function whose launches form one collective call.

    If an exception ends the function after its first launch, the peers still wait for the remaining launches, and would
    mistake the data of the next call for them. So the decorator breaks every group in which this thread has launched a
    kernel during the call: later calls raise RuntimeError on this rank, and the peers get PeerTimeoutError. Exceptions
    that all ranks raise at the same place (``group.in_step``) break nothing.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        before = number_of_launches()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if _stops_recomputation(error):
                raise
            for state in live_states():
                thread, number = state.last_launch
                if thread == threading.get_ident() and number > before:
                    state.end_abruptly(function.__name__.lstrip("_"), error)
            raise

    return call


def _stops_recomputation(error):
    """Return whether activation checkpointing has stopped a recomputation that has all it needs, as on all ranks."""
    return type(error).__name__ == "_StopRecomputationError" and type(error).__module__ == "torch.utils.checkpoint"
