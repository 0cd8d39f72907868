"""How long a rank waits for its peers before it says who did not come."""

import contextlib
import numbers
import os

# Long enough for a rank that compiles, reads data or writes a checkpoint; short enough to be noticed.
DEFAULT_S = 300.0
# A kernel counts nanoseconds in 64 bits; three decades are still well within.
MAX_S = 1e9
_chosen_s = None
in_force_s = None  # what launches wait; None: to be found out by the next one, as reading the environment takes 0.7 µs


def set_timeout(seconds: float | None) -> None:
    """Bound every later wait for a peer; None goes back to ``TDKERNELS_TIMEOUT_S`` or 300 s.

    The environment is read at the first launch of a process, and again after ``set_timeout(None)``.

    Args:
        seconds: positive number of seconds, or None

    Raises:
        ValueError: when it is not positive or beyond 1e9
    """
    global _chosen_s, in_force_s
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds <= MAX_S):
        raise ValueError(f"timeout must be a positive number of seconds up to {MAX_S:g}, not {seconds!r}")
    _chosen_s = in_force_s = None if seconds is None else float(seconds)


@contextlib.contextmanager
def shorter_timeout(seconds):
    """No longer than ``seconds`` within the block."""
    global _chosen_s, in_force_s
    before = _chosen_s
    _chosen_s = in_force_s = min(seconds, get_timeout())
    try:
        yield
    finally:
        _chosen_s = in_force_s = before


def find_timeout():
    """The bound in force, in seconds, for this and later launches."""
    global in_force_s
    in_force_s = get_timeout()
    return in_force_s


def get_timeout() -> float:
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
    if not 0 < seconds <= MAX_S:
        raise ValueError(f"TDKERNELS_TIMEOUT_S must be a positive number of seconds up to {MAX_S:g}, not {text!r}")
    return seconds
