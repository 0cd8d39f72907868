"""Settings of a process that change results, and so must be the same on all ranks.

Every consensus check compares them. Launch plans and cached launches depend on them, so a rank that changes a setting
alone cannot exchange data with ranks that did not.
"""

import os

VARIABLE = "TDKERNELS_BATCH_INVARIANT"
_VALUES = {"": False, "0": False, "1": True}
# Cached, because reading the environment takes 0.7 µs. None: the variable has an invalid value, so the first use raises
# an error.
_batch_invariant: bool | None = _VALUES.get(os.environ.get(VARIABLE, ""))


def set_batch_invariant(enabled: bool | None) -> None:
    """Set the setting ``batch_invariant``. None: the value of the environment variable, which is read again."""
    global _batch_invariant
    _batch_invariant = _VALUES.get(os.environ.get(VARIABLE, "")) if enabled is None else enabled


def is_batch_invariant() -> bool:
    """Return the setting ``batch_invariant``.

    Raises:
        ValueError: If ``TDKERNELS_BATCH_INVARIANT`` is used and is neither 0 nor 1.
    """
    if _batch_invariant is None:
        raise ValueError(f"{VARIABLE} must be 0 or 1, not {os.environ.get(VARIABLE)!r}")
    return _batch_invariant


def shared_fields() -> dict[str, bool]:
    """Return the settings that differ from their defaults, as fields of a consensus check."""
    return {"batch_invariant": True} if is_batch_invariant() else {}
