"""Timing rounds of the tuner: the length of the measurements and the rules of elimination."""

import math
from dataclasses import dataclass

_MAX_CALLS = 100
# Limits of (host time until the call is launched) / (time of the call). From HOST_COUNTS on, the host may affect the
# timing, so a CUDA graph is timed if the calls can be captured. From HOST_BOUND on, the GPU is assumed to wait for the
# host. The limits are infinite on CPU ranks, where the launch itself computes.
HOST_COUNTS = {"cuda": 0.5, "cpu": math.inf}
HOST_BOUND = {"cuda": 0.9, "cpu": math.inf}
HAS_GRAPHS = {"cuda": True, "cpu": False}
NOISE = 1.1  # a host-bound default config is kept if it takes at most NOISE times as long as the fastest config


@dataclass(frozen=True)
class Round:
    """One round of the elimination.

    Attributes:
        repeats: Number of bursts for each candidate.
        ms: Length of a burst in ms; 0 means a single call.
        tolerance: A candidate stays if its time is at most ``tolerance`` times the best time.
        keep: Maximum number of candidates that stay.
    """

    repeats: int
    ms: float
    tolerance: float
    keep: int


ROUNDS = {
    "cuda": (Round(2, 1, 1.5, 24), Round(2, 3, 1.15, 8), Round(3, 8, 1.05, 4)),
    "cpu": (Round(1, 0, 1.5, 4),),
}
FINAL = {"cuda": Round(5, 12, 1.0, 1), "cpu": Round(2, 0, 1.0, 1)}


def calls_of(burst_ms: float, ms: float | None) -> int:
    """Return the number of calls that fill a burst of ``burst_ms`` if a call takes ``ms`` (None if not known).

    The number is the same on all ranks, because ``ms`` is.
    """
    if not burst_ms:
        return 1
    return 2 if not ms else max(2, min(_MAX_CALLS, round(burst_ms / ms)))
