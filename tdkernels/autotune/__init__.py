"""Per-shape configs: tuned by the whole group, cached on disk, shipped for some GPUs.

``choose`` says which config a call runs with, ``tuner`` finds the best one, ``table`` and ``cache`` keep it and
``explain`` speaks about it. They know operators only as ``operator.Tunable``: spaces of configs live with their
operators.
"""

from tdkernels.autotune import on_demand, selection
from tdkernels.autotune.modes import get_mode, mode, set_mode
from tdkernels.autotune.tuner import TuningError, tune

selection.tune_on_demand, selection.report_choice = on_demand.tune, on_demand.report

__all__ = ["TuningError", "get_mode", "mode", "set_mode", "tune"]
