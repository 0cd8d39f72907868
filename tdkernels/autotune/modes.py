"""Autotuning modes: whether calls look up tuned configs, and whether they may tune (off, cached or on)."""

import contextlib
import os
from collections.abc import Iterator

MODES = ("off", "cached", "on")
_chosen: str | None = None


def set_mode(mode: str | None) -> None:
    """Set how calls without a config select one. The mode must be the same on all ranks.

    Args:
        mode: One of:

            - "off": the fused operator with its default config.
            - "cached": the best known config. Calls never tune.
            - "on": tune at the first call with a shape that has neither a cached nor a shipped config. This takes
              seconds for each shape and involves all ranks. It never happens during CUDA-graph capture.
            - None: the value of ``TDKERNELS_AUTOTUNE``, or "cached" if it is not set.

    Raises:
        ValueError: If ``mode`` is none of these values.
    """
    global _chosen
    if mode is not None and mode not in MODES:
        raise ValueError(f'mode must be "off", "cached", "on" or None, not {mode!r}')
    _chosen = mode


def get_mode() -> str:
    """Return the current mode: "off", "cached" or "on".

    Raises:
        ValueError: If ``TDKERNELS_AUTOTUNE`` has a value that is not a mode.
    """
    if _chosen is not None:
        return _chosen
    mode = os.environ.get("TDKERNELS_AUTOTUNE") or "cached"
    if mode not in MODES:
        raise ValueError(f"TDKERNELS_AUTOTUNE must be off, cached or on, not {mode!r}")
    return mode


@contextlib.contextmanager
def mode(mode: str | None) -> Iterator[None]:
    """Set the mode within a ``with`` block, and restore the previous mode at its end.

    Args:
        mode: As in ``set_mode``.

    Raises:
        ValueError: If ``mode`` is not a mode.

    Example:
        >>> with tdkernels.autotune.mode("on"):
        ...     model(batch)
    """
    global _chosen
    before = _chosen
    set_mode(mode)
    try:
        yield
    finally:
        _chosen = before
