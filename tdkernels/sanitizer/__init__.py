"""Find races between the ranks of a kernel, on CPU ranks: a vector-clock race checker and a seeded scheduler.

    with tdkernels.sanitizer.record():       # collective; raises RaceError at the end if there is a race
        y = my_operator(x)

With ``TDKERNELS_SANITIZE=1`` each run of a RankPool is recorded. ``docs/race-checker.md`` explains the reports.
"""

from tdkernels.sanitizer.lockstep import DeadlockError
from tdkernels.sanitizer.report import AccessReport, Race, RaceError
from tdkernels.sanitizer.schedule import schedule
from tdkernels.sanitizer.session import Races, record

__all__ = ["AccessReport", "DeadlockError", "Race", "RaceError", "Races", "record", "schedule"]
