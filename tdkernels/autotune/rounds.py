"""How long the tuner times its candidates, and which of them go on."""

import math
from dataclasses import dataclass

_MAX_CALLS = 100
# How much of a call's time may be the host's, until it has launched the call: before it may come to count, so that a
# CUDA graph is timed if there can be one, and before a GPU is taken to wait for it. CPU ranks compute what they launch.
HOST_COUNTS = {"cuda": 0.5, "cpu": math.inf}
HOST_BOUND = {"cuda": 0.9, "cpu": math.inf}
HAS_GRAPHS = {"cuda": True, "cpu": False}
NOISE = 1.1  # times as long as another config the default may then take


@dataclass(frozen=True)
class Round:
    """Each candidate runs ``repeats`` bursts of ``ms``; those within ``slack`` of the best go on, ``keep`` at most."""

    repeats: int
    ms: float
    tolerance: float
    keep: int


ROUNDS = {
    "cuda": (Round(2, 1, 1.5, 24), Round(2, 3, 1.15, 8), Round(3, 8, 1.05, 4)),
    "cpu": (Round(1, 0, 1.5, 4),),
}
FINAL = {"cuda": Round(5, 12, 1.0, 1), "cpu": Round(2, 0, 1.0, 1)}


def calls_of(burst_ms, ms):
    """How many calls fill a burst; the same on all ranks, as ``ms`` is."""
    if not burst_ms:
        return 1
    return 2 if not ms else max(2, min(_MAX_CALLS, round(burst_ms / ms)))
