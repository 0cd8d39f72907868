"""Batch invariance: whether a row of a result may depend on the other rows of the call.

In the batch-invariant mode, calls select one config that does not depend on the number of rows (``Tunable.invariant``),
and explicit configs whose results depend on the batch are rejected (``check_invariant``). The setting itself is in
``symm.shared_settings``, because every consensus check compares it.

With ``max_ranks`` the sum over K, or over the ranks, is a binary tree over ``max_ranks`` equal parts of K, the leaves,
in order. A node is the fp32 sum of its two children. Every node except the root is rounded to the dtype of the output.
A rank computes the subtree of its part of K and sends its root; the receiver adds the roots with the rest of the tree.
So the bits do not depend on the number of ranks, if it is a power of two.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from tdkernels.autotune.modes import get_mode
from tdkernels.symm import shared_settings
from tdkernels.symm.shared_settings import batch_invariance, invariant_ranks, is_batch_invariant


def set_batch_invariant(enabled: bool | None, max_ranks: int | None = None) -> None:
    """Set whether a row of a result has the same bits whatever the number, the order and the values of other rows.

    With ``max_ranks`` the bits also do not depend on the number of ranks that divide the work. The setting applies to
    the forward results of later calls in this process, for the operators listed in the guide on batch invariance. Other
    operators raise NotImplementedError while it is on. It must be the same on all ranks.

    Args:
        enabled: True or False. None: the value of ``TDKERNELS_BATCH_INVARIANT``, or False if it is not set.
        max_ranks: 2, 4 or 8: the bits are the same for 1, 2, 4, ... up to this number of ranks. None: they are the
            same for one number of ranks.

    Raises:
        TypeError: If ``enabled`` or ``max_ranks`` has another type.
        ValueError: If ``max_ranks`` is another number, or if it is given and ``enabled`` is not True.

    Source:
        A reduction tree that is the same for every degree of tensor parallelism: https://arxiv.org/abs/2511.17826.
    """
    if enabled is not None and not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True, False or None, not {enabled!r}")
    if max_ranks is not None:
        if type(max_ranks) is not int:
            raise TypeError(f"max_ranks must be 2, 4, 8 or None, not {max_ranks!r}")
        if max_ranks not in shared_settings.MAX_RANKS:
            raise ValueError(f"max_ranks must be 2, 4, 8 or None, not {max_ranks}")
        if enabled is not True:
            raise ValueError(f"max_ranks={max_ranks} is only valid if enabled is True, not {enabled!r}")
    shared_settings.set_batch_invariant(enabled, max_ranks)


@contextlib.contextmanager
def batch_invariant(enabled: bool | None = True, max_ranks: int | None = None) -> Iterator[None]:
    """Set the batch-invariant mode within a ``with`` block, and restore the previous setting at its end.

    Args:
        enabled: As in ``set_batch_invariant``.
        max_ranks: As in ``set_batch_invariant``.

    Raises:
        TypeError: If ``enabled`` or ``max_ranks`` has another type than in ``set_batch_invariant``.
        ValueError: If ``max_ranks`` is invalid, or if ``TDKERNELS_BATCH_INVARIANT`` is used and is none of 0, 1, 2, 4
            and 8.

    Example:
        >>> with tdkernels.batch_invariant():
        ...     logits = model(tokens)
    """
    before = batch_invariance()
    set_batch_invariant(enabled, max_ranks)
    try:
        yield
    finally:
        shared_settings.set_batch_invariant(before > 0, before if before > 1 else None)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _in_mode(function: Callable[_P, _R], enabled: bool, applies: Callable[[], object]) -> Callable[_P, _R]:
    """Return ``function`` so that calls have the mode on or off, without ``max_ranks``, if ``applies()`` is true."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not applies():
            return function(*args, **kwargs)
        with batch_invariant(enabled):
            return function(*args, **kwargs)

    return call


def without_invariance(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that computes gradients, which the mode does not cover, to run outside the mode."""
    return _in_mode(function, False, is_batch_invariant)


def for_one_number_of_ranks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that computes gradients to run without ``max_ranks`` of the mode, which does not cover them.

    Sizes of gradients need not fulfil the conditions of ``max_ranks``.
    """
    return _in_mode(function, True, invariant_ranks)


def selection_mode() -> str:
    """Return the settings that config selection depends on, as part of the keys of caches."""
    if not is_batch_invariant():
        return get_mode()
    return f"{get_mode()}, batch-invariant{f' for {invariant_ranks()} ranks' if invariant_ranks() else ''}"


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
        _raise_not_supported(operator, what, "(tdkernels.set_batch_invariant)")


def reject_max_ranks(operator: str, what: str = "") -> None:
    """Raise an error if the mode has ``max_ranks``, for a call whose bits may depend on the number of ranks.

    Args:
        operator: As for ``reject_invariant``.
        what: As for ``reject_invariant``.

    Raises:
        NotImplementedError: If the mode is on with ``max_ranks``.
    """
    if invariant_ranks():
        _raise_not_supported(operator, what, f"with max_ranks={invariant_ranks()}")


def _raise_not_supported(operator, what, setting):
    subject = what or "the operator"
    raise NotImplementedError(f"{operator}: {subject} is not supported in the batch-invariant mode {setting}")


def check_ranks(operator: str, world_size: int) -> None:
    """Raise an error if the mode has ``max_ranks`` and the reduction tree cannot be divided among the ranks.

    Args:
        operator: The operator, for errors.
        world_size: Number of ranks of the group.

    Raises:
        ValueError: If the number of ranks is not a power of two of at most ``max_ranks``.
    """
    most = invariant_ranks()
    if most and (world_size > most or world_size & (world_size - 1)):
        raise ValueError(
            f"{operator}: a group of {world_size} ranks is not supported in the batch-invariant mode with "
            f"max_ranks={most}; it must have a power of two of at most {most} ranks"
        )


def check_leaves(operator: str, world_size: int, weight: Any, block_k: int) -> None:
    """Raise an error if the mode has ``max_ranks`` and K cannot be divided into the leaves of the reduction tree.

    Args:
        operator: The operator, for errors.
        world_size: Number of ranks of the group, which divide K.
        weight: This rank's columns of the weight, [N, K / W].
        block_k: Step of the main loop of the GEMM.

    Raises:
        ValueError: See ``check_ranks``; or if K is not divisible by ``max_ranks`` times ``block_k``.
    """
    check_ranks(operator, world_size)
    most = invariant_ranks()
    k = world_size * weight.shape[1]
    if most and k % (most * block_k):
        on_ranks = f"on each of {world_size} rank{'s' * (world_size > 1)}"
        raise ValueError(
            f"{operator}: weight {list(weight.shape)} {on_ranks}: in the batch-invariant mode with max_ranks={most}, "
            f"K = {k} of all ranks must be divisible by {most * block_k}, which is max_ranks times block_k = {block_k} "
            f"of the tile"
        )


def leaves_of_rank(world_size: int) -> int:
    """Return the number of leaves of the reduction tree that a rank computes, or 0 without ``max_ranks``."""
    return invariant_ranks() // world_size
