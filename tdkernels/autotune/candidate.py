"""What the tuner keeps of a candidate, and what it gives in the end."""

import statistics
from dataclasses import dataclass, field

from tdkernels.autotune.table import Entry


@dataclass
class Trial:
    """A candidate: its ms as far as they are known, and why it is out, if it is."""

    config: object
    samples: list = field(default_factory=list)  # of the last round that it was in
    host_samples: list = field(default_factory=list)  # of the same: ms until the host had launched a call
    last_round: int = -1
    reason: str | None = None

    @property
    def ms(self):
        return statistics.median_low(self.samples) if self.samples else None

    @property
    def host_ms(self):
        return statistics.median_low(self.host_samples)


@dataclass
class Result:
    """What was found. ``log`` says what was cut, and why.

    Attributes:
        trials: those of the last round first, then those that dropped out in the round before and so on, the faster
            ones of a round first; failures last
    """

    entry: Entry
    trials: list
    log: list
    seconds: float
