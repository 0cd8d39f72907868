"""How long a rank waits for its peers before it says who did not come."""

import os

# Long enough for a rank that compiles, reads data or writes a checkpoint; short enough to be noticed.
DEFAULT_S = 300.0
_chosen_s = None


def set_timeout(seconds):
    """Bound every later wait for a peer; None goes back to ``TDKERNELS_TIMEOUT_S`` or 300 s.

    Args:     seconds: positive number of seconds, or None
    Raises:   ValueError when it is not positive
    """
    global _chosen_s
    if seconds is not None and not seconds > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {seconds!r}")
    _chosen_s = None if seconds is None else float(seconds)


def get_timeout():
    """The bound in force, in seconds."""
    if _chosen_s is not None:
        return _chosen_s
    text = os.environ.get("TDKERNELS_TIMEOUT_S")
    if text is None:
        return DEFAULT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"TDKERNELS_TIMEOUT_S must be a positive number of seconds, not {text!r}")
    return seconds
