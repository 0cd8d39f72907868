"""Calls of several launches: an exception between two of them must not leave the ranks out of step unnoticed."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tdkernels.symm.group import live_states, number_of_launches

_P = ParamSpec("_P")
_R = TypeVar("_R")


def whole_call(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function whose launches belong together.

    If an exception ends the function after its first launch, the peers wait for the rest, and would take what the next
    call sends for it. So every group in which this thread has launched meanwhile is broken on this rank: its calls
    raise RuntimeError, and the peers get PeerTimeoutError. An exception that all ranks raise at the same place
    (``group.in_step``) does no harm.
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
    """Whether torch's activation checkpointing ends a forward early: on all ranks, with all that it needs."""
    return type(error).__name__ == "_StopRecomputationError" and type(error).__module__ == "torch.utils.checkpoint"
