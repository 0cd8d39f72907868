"""Timeout of waits for peers."""

import contextlib
import numbers
import os
from collections.abc import Iterator

# Long enough for a peer that compiles, reads data or writes a checkpoint; short enough to notice a hang.
DEFAULT_S = 300.0
# A kernel counts nanoseconds in 64 bits; 1e9 s, three decades, are well within the range.
MAX_S = 1e9
_chosen_s: float | None = None
# Timeout of launches. None: the next launch determines it. It is cached because reading the environment takes 0.7 µs.
in_force_s: float | None = None


def set_timeout(seconds: float | None) -> None:
    """Set the timeout of every later wait for a peer, in kernels and on the host.

    It must exceed the longest time by which one rank may be later than another, including compilation and checkpoints.
    The environment variable ``TDKERNELS_TIMEOUT_S`` is read at the first launch of a process, and again after
    ``set_timeout(None)``.

    Args:
        seconds: A positive number of seconds up to 1e9, or None for the default: ``TDKERNELS_TIMEOUT_S`` if it is set,
            otherwise 300 s.

    Raises:
        ValueError: If the number is not positive or above 1e9.
    """
    global _chosen_s, in_force_s
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds <= MAX_S):
        raise ValueError(f"timeout must be a positive number of seconds up to {MAX_S:g}, not {seconds!r}")
    _chosen_s = in_force_s = None if seconds is None else float(seconds)


@contextlib.contextmanager
def shorter_timeout(seconds: float) -> Iterator[None]:
    """Limit the timeout to ``seconds`` within a ``with`` block."""
    global _chosen_s, in_force_s
    before = _chosen_s
    _chosen_s = in_force_s = min(seconds, get_timeout())
    try:
        yield
    finally:
        _chosen_s = in_force_s = before


def find_timeout() -> float:
    """Determine the timeout of this and later launches, store it in ``in_force_s``, and return it in seconds."""
    global in_force_s
    in_force_s = get_timeout()
    return in_force_s


def get_timeout() -> float:
    """Return the current timeout in seconds.

    Raises:
        ValueError: If ``TDKERNELS_TIMEOUT_S`` is used and is not a positive number up to 1e9.
    """
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
