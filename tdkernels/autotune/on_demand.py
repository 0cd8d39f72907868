"""Tune a problem on demand, and log which config a call runs with.

``selection`` calls these functions through module attributes that ``tdkernels.autotune`` sets, because the tuner and
``explain`` import ``selection``.
"""

import logging
import shlex
from typing import TYPE_CHECKING

from tdkernels.autotune import disk_cache, tuner
from tdkernels.autotune.explain import explanation
from tdkernels.autotune.modes import get_mode
from tdkernels.autotune.selection import CACHE, DEFAULT, Choice
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tdkernels.autotune.problem import Problem
    from tdkernels.autotune.tunable import Tunable

_log = logging.getLogger("tdkernels")
_warned: set = set()  # pairs (operator, GPU) without a table, for which this process has logged the warning


def tune(
    tunable: "Tunable", problem: "Problem", device: "torch.device", group: "dist.ProcessGroup",
) -> Choice | None:
    """Tune a problem and return the Choice for it; None if it could not be tuned. Collective."""
    try:
        entry = tuner.tune_problem(tunable, problem, device, group).entry
    except tuner.TuningError as error:  # on every rank
        if group_state(group).rank == 0:
            _log.warning("%s: could not be tuned: %s", problem, error)
        return None
    return Choice(tunable.config_from_dict(entry.config), CACHE, entry)


def report(tunable: "Tunable", problem: "Problem", device: "torch.device", choice: Choice) -> None:
    """Log which config runs, and warn if no table exists for the GPU. Called once for each problem."""
    try:
        _log_choice(tunable, problem, device, choice)
    except Exception:  # a failure to log on rank 0 must not stop it while the other ranks continue
        _log.exception("%s: could not log the selected config", problem)


def _log_choice(tunable, problem, device, choice):
    if choice.source == DEFAULT and device.type == "cuda" and get_mode() != "off":
        _warn_once(tunable, problem)
    _log.info("%s", explanation(tunable, problem, device, choice).line())


def _warn_once(tunable, problem):
    """Warn once for each operator and GPU that there is no table, and name the command that tunes."""
    table_of = problem.operator, problem.gpu
    if table_of in _warned or disk_cache.user_entries(*table_of) or disk_cache.shipped_entries(*table_of):
        return
    _warned.add(table_of)
    sizes = "x".join(map(str, problem.shape))
    usual = tunable.default_layout(problem.torch_dtype)
    layout = "" if problem.layout == usual else f" --layout {shlex.quote(problem.layout)}"
    if problem.torch_dtype.itemsize == 1:
        layout = f" --dtype fp8{layout}"
    _log.warning(
        "%s runs with a default config: there is no table of %s for this GPU. Tune it once: python -m tdkernels tune "
        "%s --shape %s%s --nproc %d", problem, problem.operator, problem.operator, sizes, layout, problem.world_size,
    )
