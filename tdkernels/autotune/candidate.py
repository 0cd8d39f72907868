"""Candidates of the tuner: configs with their timings, the result of tuning, and candidates that are always tried."""

import statistics
from dataclasses import dataclass, field

from tdkernels.autotune.table import Entry


@dataclass
class Trial:
    """A candidate config of the tuner.

    Attributes:
        config: The config.
        samples: ms of a call, one for each burst of the last round that the candidate took part in.
        host_samples: For the same bursts, the ms until the host had launched a call.
        last_round: Number of that round; -1 before the first.
        reason: Why the candidate was rejected; None if it was not.
    """

    config: object
    samples: list = field(default_factory=list)
    host_samples: list = field(default_factory=list)
    last_round: int = -1
    reason: str | None = None

    @property
    def ms(self) -> float | None:
        """The median time of a call in ms; None if it was not timed."""
        return statistics.median_low(self.samples) if self.samples else None

    @property
    def host_ms(self) -> float:
        """The median time in ms until the host had launched a call."""
        return statistics.median_low(self.host_samples)


@dataclass
class Result:
    """The result of ``tune``.

    Attributes:
        entry: The best config, with its measurements.
        trials: All candidates. Those of the last round come first, then those eliminated in the round before, and so
            on; within a round the faster ones come first. Failed candidates are last.
        log: Lines of text: which candidates were eliminated or rejected, and why.
        seconds: Duration of the tuning.
    """

    entry: Entry
    trials: list
    log: list
    seconds: float


def first_of_each_kind(configs: list) -> list:
    """Return the first config of each method and transport.

    The estimates of different methods cannot be compared well: the rates of links depend on the number of ranks. On 8
    H200 the kernel was estimated to be the fastest for 8192 x 8192 x 28672, and the pipelined method was not tried.
    """
    first: dict = {}
    for config in configs:
        first.setdefault((getattr(config, "method", None), getattr(config, "transport", None)), config)
    return list(first.values())
