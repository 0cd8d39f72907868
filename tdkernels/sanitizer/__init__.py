"""Race checker for kernels that communicate between ranks: vector clocks and a seeded scheduler, on CPU ranks.

    with tdkernels.sanitizer.record():       # collective; raises RaceError at the end if there is a race
        y = my_operator(x)

If ``TDKERNELS_SANITIZE=1`` is set, each run of a RankPool is recorded. ``docs/contributing/race-checker.md`` explains
the reports.
"""

from tdkernels.sanitizer.lockstep import DeadlockError
from tdkernels.sanitizer.report import AccessReport, Race, RaceError
from tdkernels.sanitizer.schedule import schedule
from tdkernels.sanitizer.session import Races, record

__all__ = ["AccessReport", "DeadlockError", "Race", "RaceError", "Races", "record", "schedule"]
