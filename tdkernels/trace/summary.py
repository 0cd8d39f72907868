"""What a Trace says in numbers: shares of the multiprocessors' time, when data came, who waited longest."""

from collections import defaultdict

from tdkernels.trace.timeline import ALL_PEERS, KINDS, NO_PEER

_OVERHEAD = ("starts", "finishes")
BUSY = tuple(kind for kind in KINDS if kind not in (*_OVERHEAD, "ends"))
_SENDS = ("pushes", "sums")  # and to whom, if it names a peer
_WAITS = 3  # of each rank


def shares(trace, rank):
    """{kind: its share of the time of all places where programs run, from the rank's first program to its last}.

    "overhead" is finding out what to do and coming to an end, "idle" is when no program runs, "tail" that part of it
    after a place's last program. All but "tail" add up to 1.
    """
    begin, end = trace.span(rank)
    spent, last = defaultdict(int), defaultdict(lambda: begin)
    for interval in trace.ranks[rank]:
        spent[interval.kind] += interval.end - interval.begin
        place = interval.multiprocessor, interval.lane
        last[place] = max(last[place], interval.end)
    unused = max(trace.about["num_multiprocessors"] - len({multiprocessor for multiprocessor, _ in last}), 0)
    total = max((len(last) + unused) * (end - begin), 1)
    found = {kind: spent[kind] / total for kind in BUSY}
    found["overhead"] = sum(spent[kind] for kind in _OVERHEAD) / total
    found["idle"] = 1 - sum(found.values())
    found["tail"] = (sum(end - of_place for of_place in last.values()) + unused * (end - begin)) / total
    return found


def arrivals(trace, rank):
    """(when the first and the last data from a peer were here, in ns, whether the peers say so), or None without any.

    The peers say so if they are programs that push: then it is when they had raised the signal. Of a copy engine all
    that is known is when a program that waited for it went on.
    """
    ends = [
        interval.end
        for peer, intervals in enumerate(trace.ranks)
        for interval in intervals
        if peer != rank and interval.kind in _SENDS and interval.peer in (rank, ALL_PEERS)
    ]
    sent = bool(ends)
    if not sent:
        ends = [i.end for i in trace.ranks[rank] if i.kind == "waits" and i.peer not in (rank, NO_PEER)]
    return (min(ends), max(ends), sent) if ends else None


def longest_waits(trace, rank, count=_WAITS):
    """The intervals in which programs of a rank waited longest."""
    waits = [interval for interval in trace.ranks[rank] if interval.kind == "waits"]
    return sorted(waits, key=lambda i: (i.begin - i.end, i.program))[:count]


def headline(trace):
    """The line that says most: how long it took, what tracing cost, and what the multiprocessors did."""
    mean = defaultdict(float)
    for rank in range(len(trace.ranks)):
        for kind, share in shares(trace, rank).items():
            mean[kind] += share / len(trace.ranks)
    ends = [trace.span(rank)[1] for rank in range(len(trace.ranks))]
    parts = [f"{kind} {mean[kind]:.0%}" for kind in (*BUSY, "overhead", "idle") if mean[kind] >= 0.005]
    a = trace.about
    return (
        f"{_ms(max(ends))} ms from the first program to the last; a call takes {max(a['traced_ms']):.3f} ms traced, "
        f"{max(a['untraced_ms']):.3f} ms untraced\n{', '.join(parts)}; clocks agree within "
        f"{max(a['clock_error_ns']) / 1e3:.2f} us, tick {a['tick_ns']} ns"
    )


def tables(trace):
    """[(title, columns, rows of text)] to be printed."""
    return [_of_ranks(trace), _of_waits(trace)]


def _of_ranks(trace):
    kinds = [kind for kind in BUSY if any(i.kind == kind for intervals in trace.ranks for i in intervals)]
    rows = []
    for rank in range(len(trace.ranks)):
        begin, end = trace.span(rank)
        share = shares(trace, rank)
        arrived = arrivals(trace, rank)
        rows.append([
            str(rank), _ms(end - begin), _us(begin), *(f"{share[kind]:.1%}" for kind in kinds),
            *(f"{share[kind]:.1%}" for kind in ("overhead", "idle", "tail")),
            *([_us(time) for time in arrived[:2]] if arrived else ["-", "-"]),
            f"± {trace.about['clock_error_ns'][rank] / 1e3:.2f}",
        ])
    seen = "data" if all(found is None or found[2] for found in map(lambda r: arrivals(trace, r), range(len(rows)))) \
        else "data seen"
    columns = [
        "rank", "ms", "began, us", *kinds, "overhead", "idle", "(at the end)",
        f"first {seen}, us", f"last {seen}, us", "clock, us",
    ]
    return trace.title, columns, rows


def _of_waits(trace):
    rows = []
    for rank in range(len(trace.ranks)):
        for wait in longest_waits(trace, rank):
            peer = "all peers" if wait.peer == ALL_PEERS else "itself" if wait.peer == rank else f"rank {wait.peer}"
            place = str(wait.multiprocessor) if wait.multiprocessor >= 0 else "-"
            rows.append([str(rank), str(wait.program), place, peer, _us(wait.begin), _us(wait.end - wait.begin)])
    return "longest waits", ["rank", "program", "multiprocessor", "for", "from, us", "for, us"], rows


def _ms(ns):
    return f"{ns / 1e6:.4f}"


def _us(ns):
    return f"{ns / 1e3:.1f}"
