"""What the network's words take, a part of the report."""

from bench.report.machines import section

_INTRO = """## The words that take the network

Two ranks on two simulated nodes, so that all goes through NVSHMEM's calls, beside the same by direct stores: one way
of a word with its signal, and GB/s of each direction, both busy, by the number of programs that send and the bytes that
go under one signal. NVSHMEM stores over NVLink here: this is what its calls cost, and no network's speed. Rows are made
by `python -m bench.rdma.cases`.
"""


def text(rows):
    """The section of all rows; nothing if there are none."""
    return section(_INTRO, rows, _table)


def _table(rows):
    hops = {row["by"]: row["us"] for row in rows if row["measure"] == "hop"}
    rates = {(row["by"], row["chunk_bytes"], row["programs"]): row["gbps"] for row in rows if row["measure"] == "rate"}
    programs = sorted({key[2] for key in rates})
    lines = [
        f"{rows[0]['num_gpus']} x {rows[0]['gpu']}, {rows[0]['date'][:10]}; one way: "
        + ", ".join(f"{us:.1f} us {by}" for by, us in sorted(hops.items()))
        + ".",
        "",
        "| by | KiB a signal | " + " | ".join(f"{n} programs" for n in programs) + " |",
        "|---|---|" + "---|" * len(programs),
    ]
    for by, chunk in sorted({key[:2] for key in rates}):
        cells = (rates.get((by, chunk, n)) for n in programs)
        lines.append(f"| {by} | {chunk >> 10} | " + " | ".join(f"{c:.0f}" if c else "–" for c in cells) + " |")
    return "\n".join(lines) + "\n"
