"""Settings of a process that change results, and so must be the same on all ranks.

Every consensus check compares them. Launch plans and cached launches depend on them, so a rank that changes a setting
alone cannot exchange data with ranks that did not.
"""

import os

VARIABLE = "TDKERNELS_BATCH_INVARIANT"
MAX_RANKS = 2, 4, 8  # values of ``max_ranks``
_VALUES = {"": 0, "0": 0, "1": 1, **{str(ranks): ranks for ranks in MAX_RANKS}}
# See ``batch_invariance``. Cached, because reading the environment takes 0.7 µs. None: the variable has an invalid
# value, so the first use raises an error.
_batch_invariance: int | None = _VALUES.get(os.environ.get(VARIABLE, ""))


def set_batch_invariant(enabled: bool | None, max_ranks: int | None = None) -> None:
    """Set the settings ``batch_invariant`` and ``max_ranks``. They are not validated.

    Args:
        enabled: True, False, or None for the value of the environment variable, which is read again.
        max_ranks: One of MAX_RANKS, or None. Only used if ``enabled`` is True.
    """
    global _batch_invariance
    if enabled is None:
        _batch_invariance = _VALUES.get(os.environ.get(VARIABLE, ""))
    else:
        _batch_invariance = (max_ranks or 1) if enabled else 0


def batch_invariance() -> int:
    """Return both settings as one number, for the keys of caches.

    Returns:
        0 if the batch-invariant mode is off, 1 if it is on without ``max_ranks``, otherwise ``max_ranks``.

    Raises:
        ValueError: If ``TDKERNELS_BATCH_INVARIANT`` is used and has an invalid value.
    """
    if _batch_invariance is None:
        raise ValueError(f"{VARIABLE} must be 0, 1, 2, 4 or 8, not {os.environ.get(VARIABLE)!r}")
    return _batch_invariance


def is_batch_invariant() -> bool:
    """Return the setting ``batch_invariant``.

    Raises:
        ValueError: If ``TDKERNELS_BATCH_INVARIANT`` is used and has an invalid value.
    """
    return batch_invariance() > 0


def invariant_ranks() -> int:
    """Return the setting ``max_ranks`` of the batch-invariant mode, or 0 if the mode is off or has no ``max_ranks``.

    Raises:
        ValueError: If ``TDKERNELS_BATCH_INVARIANT`` is used and has an invalid value.
    """
    setting = batch_invariance()
    return setting if setting > 1 else 0


def shared_fields() -> dict[str, bool | int]:
    """Return the settings that differ from their defaults, as fields of a consensus check."""
    fields: dict[str, bool | int] = {"batch_invariant": True} if is_batch_invariant() else {}
    return {**fields, "max_ranks": invariant_ranks()} if invariant_ranks() else fields
