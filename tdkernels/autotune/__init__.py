"""Autotuning: select a config for each problem, tune new problems, and store the results.

``selection`` selects the config of a call, ``tuner`` searches for the best config, ``table`` and ``disk_cache`` store
it, and ``explain`` reports the selection. These modules access operators only through ``tunable.Tunable``. The search
spaces are defined in the packages of the operators.
"""

from tdkernels.autotune import on_demand, selection
from tdkernels.autotune.modes import get_mode, mode, set_mode
from tdkernels.autotune.tuner import TuningError, tune

selection.tune_on_demand, selection.report_choice = on_demand.tune, on_demand.report

__all__ = ["TuningError", "get_mode", "mode", "set_mode", "tune"]
