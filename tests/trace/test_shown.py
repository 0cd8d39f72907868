"""Output made from events: intervals on one clock, a file for Perfetto, a plot, tables."""

import json

import numpy as np
import pytest

from tdkernels.trace import perfetto
from tdkernels.trace.summary import arrivals, shares, tables
from tdkernels.trace.timeline import ALL_PEERS, KINDS, NO_PEER, make_trace

SECOND = 10**9


def events(programs, turns=1):
    """Return the buffer of a launch; programs: for each [(time, kind, peer, multiprocessor)]."""
    words = np.zeros((len(KINDS) + turns, len(programs), 2), dtype=np.int64)
    for program, steps_of_program in enumerate(programs):
        for time, kind, peer, multiprocessor in steps_of_program:
            index = KINDS.index(kind)
            if words[index, program, 0]:
                index = len(KINDS)
            words[index, program] = time, KINDS.index(kind) | (peer + 2) << 8 | multiprocessor << 32
    return words


def program(begin, multiprocessor, *steps):
    """Return the events of a program that starts at ``begin`` and runs each (kind, peer, duration); it ends 1 later."""
    recorded, time = [(begin, "starts", NO_PEER, multiprocessor)], begin + 1
    for kind, peer, duration in steps:
        recorded.append((time, kind, peer, multiprocessor))
        time += duration
    return [*recorded, (time, "finishes", NO_PEER, multiprocessor), (time + 1, "ends", NO_PEER, multiprocessor)]


def recording(*repetitions, times=None, multiprocessors=4):
    return {
        "operator": "ag_gemm", "shape": "8x8x8", "dtype": "bfloat16", "gpu": "NVIDIA Testing", "world_size": 2,
        "config": "", "torch": "2", "triton": "3", "num_multiprocessors": multiprocessors, "untraced_ms": 0.9,
        "traced_ms": 1.0, "events": list(repetitions), "times": [times] * len(repetitions),
    }


def two_ranks(ahead=5 * SECOND):
    """Rank 1, whose clock is ahead, pushes to rank 0, which multiplies on three of four multiprocessors."""
    sent, received, remote = (np.zeros((2, 3), dtype=np.int64) for _ in range(3))
    sent[1], received[1], remote[1] = (0, 100, 200), (40, 130, 220), ahead + np.array([10, 105, 212])
    rank_0 = events([
        program(1000, 0, ("multiplies", 0, 98)),
        program(1000, 1, ("waits", 1, 28), ("multiplies", 1, 70)),
        program(1010, 1, ("multiplies", 0, 40)),  # concurrent with the previous program
        program(1110, 0, ("multiplies", 0, 88)),
        program(1150, 3, ("multiplies", 0, 28)),
    ])
    rank_1 = events([
        program(ahead + 1004, 0, ("pushes", 0, 20), ("pushes", 0, 30)),
        program(ahead + 1004, 1, ("pushes", ALL_PEERS, 60)),
        program(ahead + 1000, 2, ("multiplies", 0, 199)),
    ])
    return [
        recording(rank_0, times=np.stack([sent, received], -1)),
        recording(rank_1, times=np.stack([remote, remote], -1)),
    ]


def test_clock_offsets_are_within_their_error():
    trace = make_trace(two_ranks())
    # From the send and receive times, rank 1 is ahead by -30 … 10, -25 … 5 and -8 … 12, together by -8 … 5.
    assert trace.about["clock_error_ns"] == [0.0, pytest.approx(6.5 + trace.about["tick_ns"])]
    begins = sorted(i.begin for i in trace.ranks[1] if i.kind == "starts")
    assert begins[1] - begins[0] == 4 and abs(begins[0]) <= 7
    assert min(begin for begin, _ in (trace.span(0), trace.span(1))) == 0


def test_concurrent_programs_of_a_multiprocessor_get_separate_rows():
    trace = make_trace(two_ranks())
    assert list(trace.rows(0).values()) == [
        "multiprocessor 0", "multiprocessor 1", "multiprocessor 1, place 1", "multiprocessor 3"
    ]
    assert {i.lane for i in trace.ranks[0] if i.program == 2} == {1}


def test_shares_include_idle_multiprocessors():
    trace = make_trace(two_ranks())
    share = shares(trace, 0)
    total = 4 * 200  # multiprocessor 2 is idle
    assert trace.span(0)[1] - trace.span(0)[0] == 200
    # Multiprocessor 1 multiplies from 29 to 99 and from 11 to 51.
    assert share["multiplies"] == pytest.approx((98 + 88 + (99 - 11) + 28) / total)
    assert share["waits"] == pytest.approx(28 / total)
    assert share["overhead"] == pytest.approx(5 * 2 / total)
    assert share["idle"] == pytest.approx((10 + 100 + 200 + 170) / total)
    assert share["tail"] == pytest.approx((0 + 100 + 200 + 20) / total)


def test_data_arrives_at_the_end_of_the_push():
    trace = make_trace(two_ranks())
    pushes = [i.end for i in trace.ranks[1] if i.kind == "pushes"]
    assert arrivals(trace, 0) == (min(pushes), max(pushes), True)
    assert arrivals(trace, 1) is None
    assert tables(trace)[1][2][0][3] == "rank 1"


def test_median_repetition_is_kept():
    def events_of(*durations):
        return [events([program(1000, 0, ("multiplies", 0, duration))]) for duration in durations]

    times = two_ranks()
    found = [recording(*events_of(10, 500, 30), times=times[0]["times"][0])]
    found.append(recording(*events_of(20, 20, 20), times=times[1]["times"][0]))
    trace = make_trace(found)
    assert [i.end - i.begin for i in trace.ranks[0] if i.kind == "multiplies"] == [30]
    assert trace.about["repetitions"] == 3


def test_program_without_an_end_raises():
    found = two_ranks()
    found[1]["events"][0][KINDS.index("ends"), 2] = 0
    with pytest.raises(RuntimeError, match="rank 1.* 1 of 3 programs"):
        make_trace(found)


def test_perfetto_file(tmp_path):
    trace = make_trace(two_ranks())
    path = tmp_path / "trace.json"
    perfetto.save(trace, path)
    found = json.loads(path.read_text())
    complete = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == sum(map(len, trace.ranks))
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    for event in complete:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] in (0, 1) and type(event["tid"]) is int
    named = [event for event in found["traceEvents"] if event["ph"] == "M"]
    assert len(named) + len(complete) == len(found["traceEvents"])
    threads = {(e["pid"], e["tid"]) for e in named if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} == threads
    assert {e["pid"] for e in named if e["name"] == "process_name"} == {0, 1}
    assert perfetto.load(path) == trace


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {"world_size": 1}, "traceEvents": [{"ph": "X"}]}'])
def test_invalid_trace_files_are_rejected(text, tmp_path):
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(ValueError, match="not a trace of tdkernels"):
        perfetto.load(tmp_path / "some.json")


def test_plot_shows_the_intervals(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    from tdkernels.trace import plot

    trace = make_trace(two_ranks())
    plot.draw(trace, tmp_path / "trace.png")
    image = Image.open(tmp_path / "trace.png").convert("RGB")
    pixels = dict((colour, count) for count, colour in image.getcolors(1 << 24))

    def area(kind):
        value = plot._COLOURS[kind]
        return pixels.get(tuple(int(value[i : i + 2], 16) for i in (1, 3, 5)), 0)

    assert area("multiplies") > area("pushes") > area("waits") > 1000
    assert area("sums") == 0, "the legend shows only kinds that occur"


def test_groups_of_warps_have_a_part_of_the_plot_each():
    from tdkernels.trace import plot

    trace = make_trace(two_ranks())
    assert not trace.is_by_warps(0)
    trace.about["by_warps"] = True
    assert trace.is_by_warps(0) and not trace.is_by_warps(1)
    places = plot._place_by_warps(trace, 0)
    rows = {(i.kind, i.multiprocessor): row for i, row in places.items() if i.kind in ("multiplies", "waits")}
    # Multiprocessors 0, 1 and 3 in each of three parts.
    assert rows == {("multiplies", 0): 0, ("multiplies", 1): 1, ("multiplies", 3): 2, ("waits", 1): 7}
    pixels = plot._pixels(places, trace.span(0)[1])
    # Multiprocessor 1 multiplies from 29 to 99 and from 11 to 51, and is idle from 100 on.
    blue, idle = ([int(plot._COLOURS["multiplies"][i : i + 2], 16) for i in (1, 3, 5)], [255, 255, 255])
    columns = [time * plot._COLUMNS // 200 for time in (5, 20, 40, 90, 150)]
    assert pixels[1, columns].tolist() == [idle, blue, blue, blue, idle]
    assert pixels[7, columns[1]].tolist() != idle and pixels[4, columns[1]].tolist() == idle


def test_every_kind_has_a_color_and_a_description():
    from tdkernels.trace import plot

    assert plot._COLOURS.keys() == plot._MEANING.keys() == set(KINDS) - {"ends"}


def test_interpreter_trace_has_a_row_for_each_program():
    found = two_ranks()
    for rank_recording in found:
        rank_recording["gpu"], rank_recording["num_multiprocessors"] = "cpu", 0
        words = rank_recording["events"][0]
        words[..., 1] = np.where(words[..., 0] > 0, words[..., 1] & 0xFFFFFFFF | -1 << 32, 0)
    trace = make_trace(found)
    assert list(trace.rows(1).values()) == ["program 0", "program 1", "program 2"]
    assert "CPU ranks" in trace.title
