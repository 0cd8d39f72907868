"""Plot a Trace as a PNG: time on the horizontal axis, one row for each multiprocessor, colored by kind of activity.

A multiprocessor with several programs at a time has several rows. If different warps of one program are active at the
same time, a panel has a part for each group of warps, with a row for each multiprocessor in each part.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tdkernels.trace.summary import headline
from tdkernels.trace.timeline import row_of

if TYPE_CHECKING:
    from pathlib import Path

    from tdkernels.trace.timeline import Trace

# Useful work is blue and green, overhead has warm colors. The colors are distinct for color-blind readers, too.
_COLOURS = {
    "multiplies": "#2166ac", "joins": "#5e3c99", "stores": "#67c0ea", "sums": "#1b9e77", "receives": "#a6d96a",
    "copies": "#dfc27d", "pushes": "#fdae61", "waits": "#d7191c", "starts": "#bdbdbd", "finishes": "#7f7f7f",
}
_IDLE = "#ffffff"
_MEANING = {
    "multiplies": "multiplies a tile", "joins": "combines partial results", "stores": "stores a tile",
    "sums": "sums partials", "copies": "copies rows", "receives": "copies to the output", "pushes": "pushes to a peer",
    "waits": "waits for a signal", "starts": "fetches its tile", "finishes": "finishes",
}
# Parts of a panel for kernels whose warps have different tasks: {name: kinds}. Other kinds are in the last part.
_PARTS = {"multiply": ("multiplies",), "send, store": ("pushes", "stores"), "wait, add": ()}
_WIDTH, _RANK_HEIGHT, _MARGIN = 14.0, 3.0, 1.6  # inches
_DPI = 110
_COLUMNS = 1400  # about the width of a panel in pixels


class NoMatplotlib(RuntimeError):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__('the plot needs matplotlib: pip install "tdkernels[bench]"')


def draw(trace: "Trace", path: "Path") -> None:
    """Plot a Trace and write it to a PNG file.

    Raises:
        NoMatplotlib: If matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib from None
    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    }
    with rc_context(style):
        ranks = len(trace.ranks)
        parts = 2 if any(map(trace.is_by_warps, range(ranks))) else 1
        canvas = Figure(figsize=(_WIDTH, _RANK_HEIGHT * ranks * parts + _MARGIN), layout="constrained")
        for rank, axis in enumerate(canvas.subplots(ranks, sharex=True, squeeze=False)[:, 0]):
            _draw_rank(axis, trace, rank)
        axis.set_xlabel("microseconds after the first program of all ranks began")
        canvas.suptitle(f"{trace.title}\n{headline(trace)}", fontsize=10)
        _legend(canvas, {interval.kind for intervals in trace.ranks for interval in intervals})
        canvas.savefig(path, dpi=_DPI)


def _draw_rank(axis, trace, rank):
    end = max(trace.span(r)[1] for r in range(len(trace.ranks)))
    place_of = _place_by_warps(trace, rank) if trace.is_by_warps(rank) else _place_by_program(trace, rank)
    pixels = _pixels(place_of, end)
    axis.imshow(pixels, extent=(0, end / 1e3, len(pixels), 0), aspect="auto", interpolation="nearest")
    known = trace.ranks[rank][0].multiprocessor >= 0
    axis.set_ylabel(f"rank {rank}\n{'multiprocessor' if known else 'program'}")
    if trace.is_by_warps(rank):
        rows = len(pixels) / len(_PARTS)
        axis.set_yticks([(number + 0.5) * rows for number in range(len(_PARTS))], list(_PARTS))
        axis.tick_params(axis="y", length=0)
        for number in range(1, len(_PARTS)):
            axis.axhline(number * rows, color="black", linewidth=1)


def _place_by_program(trace, rank):
    """Return {interval: number of its row}, with a row for each program that runs at the same time."""
    numbers = {row: number for number, row in enumerate(trace.rows(rank))}
    return {interval: numbers[row_of(interval)] for interval in trace.ranks[rank]}


def _place_by_warps(trace, rank):
    """Return {interval: number of its row}, with a part for each group of warps."""
    part_of = {kind: number for number, kinds in enumerate(_PARTS.values()) for kind in kinds}
    places = sorted({interval.multiprocessor for interval in trace.ranks[rank]})
    numbers = {multiprocessor: number for number, multiprocessor in enumerate(places)}
    return {
        interval: part_of.get(interval.kind, len(_PARTS) - 1) * len(places) + numbers[interval.multiprocessor]
        for interval in trace.ranks[rank]
    }


def _pixels(place_of, end):
    """Return the colors [rows, columns, 3] until ``end``. Each column shows the kind that took the most of its time.

    Boxes instead of pixels would either hide the neighbors of intervals thinner than a pixel, or fade.

    Args:
        place_of: {interval: number of its row}.
    """
    times = defaultdict(list)
    for interval, row in place_of.items():
        times[interval.kind, row].append((interval.begin, interval.end))
    edges = np.linspace(0, end, _COLUMNS + 1)
    spent = np.zeros((len(_COLOURS) + 1, 1 + max(place_of.values()), _COLUMNS))
    for (kind, row), spans in times.items():
        spans = _disjoint(spans)
        so_far = np.cumsum(spans[:, 1] - spans[:, 0])
        so_far = np.stack([so_far - (spans[:, 1] - spans[:, 0]), so_far], 1)  # at the begin and the end of each
        spent[list(_COLOURS).index(kind), row] = np.diff(np.interp(edges, spans.ravel(), so_far.ravel()))
    spent[-1] = end / _COLUMNS - spent.sum(0)
    colours = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (*_COLOURS.values(), _IDLE)]
    return np.array(colours, dtype=np.uint8)[spent.argmax(0)]


def _disjoint(spans):
    """Return the sorted [begin, end] of spans, each without the time of those before it."""
    found = np.array(sorted(spans))
    found[1:, 0] = np.maximum(found[1:, 0], np.maximum.accumulate(found[:-1, 1]))
    found[:, 1] = np.maximum(found[:, 0], found[:, 1])
    return found


def _legend(canvas, kinds):
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=_MEANING[kind]) for kind, colour in _COLOURS.items() if kind in kinds]
    handles.append(Patch(facecolor=_IDLE, edgecolor="#bdbdbd", label="idle"))
    canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
