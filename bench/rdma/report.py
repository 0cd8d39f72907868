"""Report section of the RDMA primitives: latency and bandwidth."""

from bench.report.machines import section

_INTRO = """## RDMA primitives

Two ranks on two simulated nodes, where all transfers use NVSHMEM calls ("network"), compared with direct stores
("direct"). One-way latency is for a 64-bit word with its signal. The table gives GB/s per direction with both
directions busy, by the number of sending programs and the KiB per signal. NVSHMEM itself stores over NVLink here, so
the numbers show the cost of its calls, not the speed of a network. Rows are written by `python -m bench.rdma.cases`.
"""


def text(rows):
    """Return the section, or "" if there are no rows."""
    return section(_INTRO, rows, _table)


def _table(rows):
    hops = {row["by"]: row["us"] for row in rows if row["measure"] == "hop"}
    rates = {(row["by"], row["chunk_bytes"], row["programs"]): row["gbps"] for row in rows if row["measure"] == "rate"}
    programs = sorted({key[2] for key in rates})
    lines = [
        f"{rows[0]['num_gpus']} x {rows[0]['gpu']}, {rows[0]['date'][:10]}; one-way latency: "
        + ", ".join(f"{us:.1f} us {by}" for by, us in sorted(hops.items()))
        + ".",
        "",
        "| transport | KiB per signal | " + " | ".join(f"{n} programs" for n in programs) + " |",
        "|---|---|" + "---|" * len(programs),
    ]
    for by, chunk in sorted({key[:2] for key in rates}):
        cells = (rates.get((by, chunk, n)) for n in programs)
        lines.append(f"| {by} | {chunk >> 10} | " + " | ".join(f"{c:.0f}" if c else "–" for c in cells) + " |")
    return "\n".join(lines) + "\n"
