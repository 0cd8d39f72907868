"""Draw expert_parallel.png, the figure of docs/guides/expert-parallel.md: python docs/images/expert_parallel.py"""

import io
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

# Two ranks, two experts each, k = 2. Rank 0 has tokens a, b and c, rank 1 has d and e.
ASSIGNMENTS = {"a": (0, 2), "b": (2, 3), "c": (1, 3)}
COLOURS = {"a": "#92c5de", "b": "#fdb863", "c": "#a6d96a", "d": "#d9d9d9", "e": "#d9d9d9"}
ROWS = [("a", 2), ("b", 2), ("d", 2), ("b", 3), ("c", 3), ("e", 3)]  # destination rows of rank 1: (token, expert)
STAGED = {"a": (0,), "b": (1, 3), "c": (4,)}  # destination rows on rank 1 of the tokens of rank 0
OWN = {"a": "0", "c": "1"}  # local experts of the tokens of rank 0
HEIGHT = 0.42


def box(axis, x, y, width, text, colour="white", size=8):
    axis.add_patch(Rectangle((x, y - HEIGHT / 2), width, HEIGHT, facecolor=colour, edgecolor="#555555", linewidth=0.7))
    axis.text(x + width / 2, y, text, ha="center", va="center", fontsize=size)


def arrow(axis, start, end, colour="#2166ac", style="-", bend=0.0):
    axis.add_patch(FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=8, color=colour, linestyle=style, linewidth=1,
        connectionstyle=f"arc3,rad={bend}", shrinkA=1, shrinkB=1,
    ))


def panel(axis, title, columns):
    axis.set_xlim(0, 13.2)
    axis.set_ylim(-3.3, 1.15)
    axis.axis("off")
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    for x, text in columns.items():
        axis.text(x, 0.62, text, fontsize=8, color="#444444", va="bottom")
    axis.plot([6.05, 6.05], [-3.2, 1.2], color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
    axis.text(5.95, 0.95, "rank 0", ha="right", fontsize=8, color="#777777")
    axis.text(6.15, 0.95, "rank 1", ha="left", fontsize=8, color="#777777")


def dispatch(axis):
    panel(axis, "ep_dispatch", {
        0.0: "tokens and ids", 2.9: "local experts", 6.4: "staging memory of rank 1: slots",
        11.0: "recv.x of rank 1, by expert",
    })
    for i, token in enumerate("abc"):
        first, second = ASSIGNMENTS[token]
        box(axis, 0.0, -0.6 * i, 1.0, token, COLOURS[token])
        box(axis, 1.0, -0.6 * i, 1.0, f"{first}, {second}")
        rows = ", ".join(map(str, STAGED[token]))
        box(axis, 6.4, -0.6 * i, 0.9, token, COLOURS[token])
        box(axis, 7.3, -0.6 * i, 0.9, "scales", size=7)
        box(axis, 8.2, -0.6 * i, 1.5, f"rows {rows}; weights", size=7)
        arrow(axis, (2.05, -0.6 * i), (6.35, -0.6 * i))
        for row in STAGED[token]:
            arrow(axis, (9.75, -0.6 * i), (10.95, -0.6 * row), colour="#777777")
        if token in OWN:
            box(axis, 2.9, -0.6 * i - 0.27, 1.35, f"row of expert {OWN[token]}", COLOURS[token], 6)
    for i, (token, expert) in enumerate(ROWS):
        box(axis, 11.0, -0.6 * i, 0.9, token, COLOURS[token])
        axis.text(12.0, -0.6 * i, f"expert {expert}, from {0 if token in 'abc' else 1}", fontsize=7, va="center")
    box(axis, 0.0, -2.3, 2.6, "rows: 1 1 2 2, tokens: 2 3", size=7)
    counts = "1. send counts to all ranks: 4 bytes for\neach expert and rank, one signal each"
    axis.text(0.0, -2.75, counts, fontsize=7, va="top")
    arrow(axis, (2.65, -2.3), (6.35, -2.3), colour="#d6604d", style="--")
    box(axis, 6.4, -2.3, 2.6, "counts of all ranks", size=7)
    known = "all ranks compute the same layout, so slots and\nrows are known before tokens are sent"
    axis.text(6.4, -2.75, known, fontsize=7, va="top")
    axis.text(2.6, 0.27, "2. send each token once per rank, then signal", fontsize=7, color="#2166ac")
    axis.text(9.3, 0.27, "3. copy to destination rows", fontsize=7, color="#555555")


def combine(axis, per_expert):
    panel(axis, f'ep_combine, "{"per_expert" if per_expert else "per_rank"}"', {
        0.0: "y of rank 0", 2.1: "staging memory of rank 0: slots", 9.2: "sent rows", 11.0: "expert_out of rank 1",
    })
    for i, (token, expert) in enumerate(ROWS):
        box(axis, 11.0, -0.6 * i, 0.9, f"{token}{expert}", COLOURS[token])
    for i, token in enumerate("abc"):
        y = -0.6 * i
        box(axis, 0.0, y, 1.0, token, COLOURS[token])
        arrow(axis, (2.05, y), (1.05, y), colour="#777777")
        here = [f"{token}{ROWS[row][1]}" for row in STAGED[token]]
        if per_expert:
            for j, expert in enumerate(ASSIGNMENTS[token]):
                there = expert >= 2
                colour = COLOURS[token] if there else "#f7f7f7"
                box(axis, 2.1 + 1.2 * j, y, 1.2, f"{token}{expert}" if there else "–", colour)
            text = " and ".join(here)
        else:
            text = " + ".join(f"w·{name}" for name in here)
            box(axis, 2.1, y, 2.4, text, COLOURS[token], size=7)
        box(axis, 8.8, y, 1.5, text, COLOURS[token], size=7)
        arrow(axis, (8.75, y), (4.6, y))
        for row in STAGED[token]:
            arrow(axis, (10.95, -0.6 * row), (10.35, y), colour="#777777")
    axis.text(6.4, 0.27, "rows, not summed" if per_expert else "one sum, rounded", fontsize=7, color="#2166ac")
    sums = "weighted rows in order of the assignments" if per_expert else "sums in rank order"
    note = f"y = {sums}, in fp32, rounded once;\nrows of local experts (a0, c1) are read in place"
    axis.text(0.0, -1.95, note, fontsize=7, va="top")


def main():
    figure = Figure(figsize=(9.6, 9.0), layout="constrained")
    axes = figure.subplots(3, 1)
    dispatch(axes[0])
    combine(axes[1], per_expert=False)
    combine(axes[2], per_expert=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    from PIL import Image  # matplotlib needs it, too

    Image.open(buffer).convert("RGB").quantize(256).save(Path(__file__).with_suffix(".png"), optimize=True)


if __name__ == "__main__":
    main()
