"""Draw overlap.svg, the picture of the README: python docs/images/overlap.py"""

from pathlib import Path

WIDTH, LANE, GAP, LEFT = 760, 26, 6, 132
COMPUTE, WIRE, TEXT = "#2166ac", "#e08214", "#333333"
# (lane, label, start, end, color): a schedule for rank 0 of 4, not to scale.
SEQUENCE = [
    (0, "all-gather of x", 0, 30, WIRE), (1, "GEMM", 30, 92, COMPUTE),
]
OVERLAPPED = [
    (0, "shard of rank 1", 0, 10, WIRE), (0, "rank 2", 10, 20, WIRE), (0, "rank 3", 20, 30, WIRE),
    (1, "tiles of own rows", 0, 15.5, COMPUTE), (1, "rows of rank 1", 15.5, 31, COMPUTE),
    (1, "rows of rank 2", 31, 46.5, COMPUTE), (1, "rows of rank 3", 46.5, 62, COMPUTE),
]


def bar(lane, label, start, end, color, top):
    scale = (WIDTH - LEFT - 20) / 92
    x, width, y = LEFT + start * scale, (end - start) * scale - 1, top + lane * (LANE + GAP)
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" rx="3" fill="{color}"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle" fill="white" font-size="11">{label}</text>'
    )


def panel(title, bars, top):
    lanes = [
        f'<text x="{LEFT - 10}" y="{top + 17 + i * (LANE + GAP)}" text-anchor="end" font-size="11" fill="{TEXT}">{name}</text>'
        for i, name in enumerate(("link", "multiprocessors"))
    ]
    head = f'<text x="12" y="{top - 10}" font-size="12" font-weight="bold" fill="{TEXT}">{title}</text>'
    return [head, *lanes, *(bar(*one, top) for one in bars)]


def picture():
    body = [
        *panel("NCCL, then cuBLAS", SEQUENCE, 34),
        *panel("tdkernels.ag_gemm: one kernel", OVERLAPPED, 138),
    ]
    style = 'font-family="sans-serif"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 206" width="{WIDTH}" {style}>',
        f'<rect width="{WIDTH}" height="206" rx="6" fill="white"/>', *body, "</svg>", "",
    ])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
