"""Whether tables are looked up, and whether a call may start to tune: off, cached or on."""

import contextlib
import os

MODES = ("off", "cached", "on")
_chosen = None


def set_mode(mode):
    """Choose what a call does that was given no config; the same on all ranks.

    Args:
        mode: "off": the fused operator in its default config; "cached": the best config that is known, never tuning;
            "on": tune at the first call with a shape for which there is neither a cached nor a shipped config (seconds
            a shape, all ranks together; never during CUDA-graph capture); None: ``TDKERNELS_AUTOTUNE``, or "cached"

    Raises:
        ValueError
    """
    global _chosen
    if mode is not None and mode not in MODES:
        raise ValueError(f'mode must be "off", "cached", "on" or None, not {mode!r}')
    _chosen = mode


def get_mode():
    """The mode in force.

    Raises:
        ValueError: when ``TDKERNELS_AUTOTUNE`` is none
    """
    if _chosen is not None:
        return _chosen
    mode = os.environ.get("TDKERNELS_AUTOTUNE") or "cached"
    if mode not in MODES:
        raise ValueError(f"TDKERNELS_AUTOTUNE must be off, cached or on, not {mode!r}")
    return mode


@contextlib.contextmanager
def mode(mode):
    """``set_mode`` for a block: ``with tdkernels.autotune.mode("on"): model(batch)``."""
    global _chosen
    before = _chosen
    set_mode(mode)
    try:
        yield
    finally:
        _chosen = before
