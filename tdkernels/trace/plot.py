"""Plot a Trace as a PNG: time on the horizontal axis, one row for each multiprocessor, colored by kind of activity."""

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
        canvas = Figure(figsize=(_WIDTH, _RANK_HEIGHT * ranks + _MARGIN), layout="constrained")
        for rank, axis in enumerate(canvas.subplots(ranks, sharex=True, squeeze=False)[:, 0]):
            _draw_rank(axis, trace, rank)
        axis.set_xlabel("microseconds after the first program of all ranks began")
        canvas.suptitle(f"{trace.title}\n{headline(trace)}", fontsize=10)
        _legend(canvas, {interval.kind for intervals in trace.ranks for interval in intervals})
        canvas.savefig(path, dpi=_DPI)


def _draw_rank(axis, trace, rank):
    end = max(trace.span(r)[1] for r in range(len(trace.ranks)))
    rows = len(trace.rows(rank))
    axis.imshow(_pixels(trace, rank, end), extent=(0, end / 1e3, rows, 0), aspect="auto", interpolation="nearest")
    known = trace.ranks[rank][0].multiprocessor >= 0
    axis.set_ylabel(f"rank {rank}\n{'multiprocessor' if known else 'program'}")


def _pixels(trace, rank, end):
    """Return the colors [rows, columns, 3] until ``end``. Each column shows the kind that took the most of its time.

    Boxes instead of pixels would either hide the neighbors of intervals thinner than a pixel, or fade.
    """
    place = {row: number for number, row in enumerate(trace.rows(rank))}
    times = defaultdict(list)
    for interval in trace.ranks[rank]:
        times[interval.kind, place[row_of(interval)]].append((interval.begin, interval.end))
    edges = np.linspace(0, end, _COLUMNS + 1)
    spent = np.zeros((len(_COLOURS) + 1, len(place), _COLUMNS))
    for (kind, row), spans in times.items():
        spans = np.array(sorted(spans))
        so_far = np.cumsum(spans[:, 1] - spans[:, 0])
        so_far = np.stack([so_far - (spans[:, 1] - spans[:, 0]), so_far], 1)  # at the begin and the end of each
        spent[list(_COLOURS).index(kind), row] = np.diff(np.interp(edges, spans.ravel(), so_far.ravel()))
    spent[-1] = end / _COLUMNS - spent.sum(0)
    colours = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (*_COLOURS.values(), _IDLE)]
    return np.array(colours, dtype=np.uint8)[spent.argmax(0)]


def _legend(canvas, kinds):
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=_MEANING[kind]) for kind, colour in _COLOURS.items() if kind in kinds]
    handles.append(Patch(facecolor=_IDLE, edgecolor="#bdbdbd", label="idle"))
    canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
