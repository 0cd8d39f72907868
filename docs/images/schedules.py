"""Draw the schedules of the operators, not to scale: python docs/images/schedules.py

It writes docs/images/schedule_*.svg.
A schedule is rank 0's, of 4 ranks: what travels over the link, and what the multiprocessors do meanwhile.
tests/test_docs.py compares the files with what this program draws.
"""

from pathlib import Path

WIDTH, LANE, GAP, LEFT, END = 760, 26, 6, 132, 96
COMPUTE, LINK, SUM, TEXT = "#2166ac", "#e08214", "#4d9221", "#333333"
LANES = "link", "multiprocessors"


def row(begin, length, labels, color):
    """Bars of the same length, one after the other."""
    return [(begin + i * length, begin + (i + 1) * length, label, color) for i, label in enumerate(labels)]


# {file: [(title, bars of the link, bars of the multiprocessors)]}; a bar is (begin, end, label, color).
SCHEDULES = {
    "ag_gemm": [
        ("NCCL, then cuBLAS", [(0, 30, "all-gather of x", LINK)], [(30, 92, "GEMM", COMPUTE)]),
        (
            "tdkernels.ag_gemm: one kernel", row(0, 10, ["rank 1", "rank 2", "rank 3"], LINK),
            row(0, 15.5, ["own rows", "rows of rank 1", "rows of rank 2", "rows of rank 3"], COMPUTE),
        ),
    ],
    "gemm_rs": [
        ("cuBLAS, then NCCL", [(62, 92, "reduce-scatter", LINK)], [(0, 62, "GEMM", COMPUTE)]),
        (
            "tdkernels.gemm_rs: one kernel",
            [(15.5, 25.5, "to rank 1", LINK), (31, 41, "to rank 2", LINK), (46.5, 56.5, "to rank 3", LINK)],
            [*row(0, 15.5, ["rows of rank 1", "rows of rank 2", "rows of rank 3", "own rows"], COMPUTE),
             (62, 67, "sum", SUM)],
        ),
    ],
    "gemm_ar": [
        ("cuBLAS, then NCCL", [(62, 92, "all-reduce", LINK)], [(0, 62, "GEMM", COMPUTE)]),
        (
            "tdkernels.gemm_ar, two_shot: one kernel",
            [(10, 52, "partial sums of tiles to their owners", LINK), (52, 76, "sums to all ranks", LINK)],
            [(0, 62, "tiles of other owners, then own tiles", COMPUTE), (62, 70, "sums", SUM)],
        ),
    ],
    "flash_decode": [
        (
            "attention, then all-gather, then merge", [(60, 76, "all-gather", LINK)],
            [(0, 60, "attention over own keys", COMPUTE), (76, 88, "merge", SUM)],
        ),
        (
            "tdkernels.flash_decode: one kernel",
            row(15, 15, ["o, lse of 1", "o, lse of 2", "o, lse of 3", "of 4"], LINK),
            [*row(0, 15, ["heads 1", "heads 2", "heads 3", "heads 4"], COMPUTE), (60, 68, "merge", SUM)],
        ),
    ],
    "ag_attention": [
        ("all-gather, then attention", [(0, 26, "all-gather of k, v", LINK)], [(26, 92, "attention", COMPUTE)]),
        (
            "tdkernels.ag_attention", row(0, 9, ["rank 3", "rank 2", "rank 1"], LINK),
            row(0, 16.5, ["own keys", "keys of rank 3", "keys of rank 2", "keys of rank 1"], COMPUTE),
        ),
    ],
    "ulysses": [
        (
            "tdkernels.ulysses_qkv: heads go to their ranks",
            row(14, 14, ["to rank 1", "to rank 2", "to rank 3"], LINK),
            row(0, 14, ["heads of rank 1", "heads of rank 2", "heads of rank 3", "own heads"], COMPUTE),
        ),
        (
            "tdkernels.ulysses_out: heads come back", row(0, 12, ["rank 1", "rank 2", "rank 3"], LINK),
            row(0, 14, ["own heads", "of rank 1", "of rank 2", "of rank 3"], COMPUTE),
        ),
    ],
    "tp_moe": [
        (
            "tdkernels.moe_ag_gemm: gate-up stage", row(0, 10, ["rank 1", "rank 2", "rank 3"], LINK),
            row(0, 15.5, ["own tokens", "of rank 1", "of rank 2", "of rank 3"], COMPUTE),
        ),
        (
            "tdkernels.moe_gemm_rs: down stage", row(15.5, 15.5, ["to rank 1", "to rank 2", "to rank 3"], LINK),
            [*row(0, 15.5, ["of rank 1", "of rank 2", "of rank 3", "own tokens"], COMPUTE), (62, 68, "sum", SUM)],
        ),
    ],
    "ep_dispatch": [
        (
            "tdkernels.ep_dispatch: two phases",
            [(4, 12, "counts", LINK), (16, 62, "tokens, one copy for each rank", LINK)],
            [(0, 4, "", COMPUTE), (12, 16, "", COMPUTE), (20, 70, "rows to their experts, as tokens arrive", SUM)],
        ),
        (
            "tdkernels.ep_dispatch with max_tokens_per_rank: low latency, one launch",
            [(4, 40, "tokens and counts", LINK)], [(0, 4, "", COMPUTE), (8, 46, "rows to their experts", SUM)],
        ),
    ],
}


_LABEL = 'text-anchor="middle" fill="white" font-size="11"'
_NAME = f'text-anchor="end" font-size="11" fill="{TEXT}"'


def bar(begin, end, label, color, top):
    scale = (WIDTH - LEFT - 12) / END
    x, width = LEFT + begin * scale, (end - begin) * scale - 1
    assert len(label) * 5.6 < width, f"{label!r} does not fit its bar"
    found = f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}" rx="3" fill="{color}"/>'
    if label:
        found += f'<text x="{x + width / 2:.1f}" y="{top + 17}" {_LABEL}>{label}</text>'
    return found


def picture(panels):
    """The SVG of some panels, below each other, on a white ground for dark pages."""
    height = 104 * len(panels) + 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"',
        ' font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="white"/>',
    ]
    for number, (title, *lanes) in enumerate(panels):
        top = 34 + 104 * number
        lines.append(f'<text x="12" y="{top - 10}" font-size="12" font-weight="bold" fill="{TEXT}">{title}</text>')
        for lane, (name, bars) in enumerate(zip(LANES, lanes, strict=True)):
            y = top + lane * (LANE + GAP)
            lines.append(f'<text x="{LEFT - 10}" y="{y + 17}" {_NAME}>{name}</text>')
            lines += [bar(*one, y) for one in bars]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    for name, panels in SCHEDULES.items():
        (Path(__file__).parent / f"schedule_{name}.svg").write_text(picture(panels))
