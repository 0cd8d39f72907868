"""A Trace as a PNG: time to the right, multiprocessors one above the other, coloured by what they do."""

import numpy as np

from tdkernels.trace.summary import headline
from tdkernels.trace.timeline import row_of

# What is wanted in blue and green, what costs time in warm colours; distinct for colour-blind readers too.
_COLOURS = {
    "multiplies": "#2166ac", "joins": "#5e3c99", "stores": "#92c5de", "sums": "#1b9e77", "receives": "#a6d96a",
    "pushes": "#fdae61", "waits": "#d7191c", "starts": "#bdbdbd", "finishes": "#7f7f7f",
}  # fmt: skip
_MEANING = {
    "multiplies": "multiplies a tile", "joins": "adds parts of K", "stores": "stores a tile", "sums": "sums partials",
    "receives": "brings a sum to z", "pushes": "pushes to a peer", "waits": "waits for a signal",
    "starts": "finds its tile", "finishes": "comes to its end",
}  # fmt: skip
_WIDTH, _RANK_HEIGHT, _MARGIN = 14.0, 3.0, 1.6  # inches
_DPI = 110


class NoMatplotlib(RuntimeError):
    """There is no matplotlib to draw with."""

    def __init__(self):
        super().__init__('the picture needs matplotlib: pip install "tdkernels[bench]", the extra that brings it')


def draw(trace, path):
    """Write the PNG.

    Raises:   NoMatplotlib
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib from None
    style = {"font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
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
    from matplotlib.collections import PolyCollection

    place = {row: number for number, row in enumerate(trace.rows(rank))}
    for kind, colour in _COLOURS.items():
        boxes = [(i.begin / 1e3, i.end / 1e3, place[row_of(i)]) for i in trace.ranks[rank] if i.kind == kind]
        if boxes:
            # Without smoothing: most boxes are thinner than a pixel, and their edges would fade them all.
            axis.add_collection(PolyCollection(_corners(np.array(boxes)), facecolor=colour, edgecolor="none",
                                               antialiased=False))  # fmt: skip
    axis.set_xlim(0, max(trace.span(r)[1] for r in range(len(trace.ranks))) / 1e3)
    axis.set_ylim(len(place), 0)
    axis.margins(0)
    known = trace.ranks[rank][0].multiprocessor >= 0
    axis.set_ylabel(f"rank {rank}\n{'multiprocessor' if known else 'program'}")


def _corners(boxes):
    """The corners [boxes, 4, 2] of boxes (begin, end, row)."""
    begin, end, top = boxes.T
    bottom = top + 1
    return np.stack([np.stack(corner, -1) for corner in ((begin, top), (end, top), (end, bottom), (begin, bottom))], 1)


def _legend(canvas, kinds):
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=_MEANING[kind]) for kind, colour in _COLOURS.items() if kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor="#bdbdbd", label="idle"))
    canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
