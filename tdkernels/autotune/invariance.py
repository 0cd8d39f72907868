"""Batch invariance: whether a row of a result may depend on the other rows of the call.

In the batch-invariant mode, calls select one config that does not depend on the number of rows (``Tunable.invariant``),
and explicit configs whose results depend on the batch are rejected (``check_invariant``). The setting itself is in
``symm.shared_settings``, because every consensus check compares it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from tdkernels.autotune.modes import get_mode
from tdkernels.symm import shared_settings
from tdkernels.symm.shared_settings import is_batch_invariant


def set_batch_invariant(enabled: bool | None) -> None:
    """Set whether a row of a result has the same bits whatever the number, the order and the values of other rows.

    The setting applies to the forward results of later calls in this process, for the operators listed in the guide on
    batch invariance. Other operators raise NotImplementedError while it is on. It must be the same on all ranks.

    Args:
        enabled: True or False. None: the value of ``TDKERNELS_BATCH_INVARIANT``, or False if it is not set.

    Raises:
        TypeError: If ``enabled`` is none of these values.
    """
    if enabled is not None and not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True, False or None, not {enabled!r}")
    shared_settings.set_batch_invariant(enabled)


@contextlib.contextmanager
def batch_invariant(enabled: bool | None = True) -> Iterator[None]:
    """Set the batch-invariant mode within a ``with`` block, and restore the previous setting at its end.

    Args:
        enabled: As in ``set_batch_invariant``.

    Raises:
        TypeError: If ``enabled`` is not a bool or None.
        ValueError: If ``TDKERNELS_BATCH_INVARIANT`` is used and is neither 0 nor 1.

    Example:
        >>> with tdkernels.batch_invariant():
        ...     logits = model(tokens)
    """
    before = is_batch_invariant()
    set_batch_invariant(enabled)
    try:
        yield
    finally:
        shared_settings.set_batch_invariant(before)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_invariance(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that computes gradients, which the mode does not cover, to run outside the mode."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not is_batch_invariant():
            return function(*args, **kwargs)
        with batch_invariant(False):
            return function(*args, **kwargs)

    return call


def selection_mode() -> str:
    """Return the settings that config selection depends on, as part of the keys of caches."""
    return f"{get_mode()}, batch-invariant" if is_batch_invariant() else get_mode()


def check_invariant(operator: str, config: Any) -> None:
    """Raise an error if the batch-invariant mode is on and results with an explicit config depend on the batch.

    Args:
        operator: The operator, for errors.
        config: A config with a method ``variant_reason``, or None.

    Raises:
        ValueError: If results with this config depend on the batch. The message names the field.
    """
    if config is not None and is_batch_invariant():
        reason = config.variant_reason()
        if reason is not None:
            raise ValueError(f"{operator}: config is not batch-invariant: {reason}")


def reject_invariant(operator: str, what: str = "") -> None:
    """Raise an error if the batch-invariant mode is on, for a call that cannot be batch-invariant.

    Args:
        operator: The operator, for errors.
        what: The property of the call that is not supported, such as ``'wire="fp8"'``. Empty: the operator itself.

    Raises:
        NotImplementedError: If the mode is on.
    """
    if is_batch_invariant():
        subject = f"{what} is" if what else "the operator is"
        raise NotImplementedError(
            f"{operator}: {subject} not supported in the batch-invariant mode (tdkernels.set_batch_invariant)"
        )
