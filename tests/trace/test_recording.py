"""Traces recorded on ranks: intervals of every program, their order and peers; results are the same as without."""

from collections import Counter, defaultdict
from itertools import groupby, pairwise

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.runtime import recorder as runtime_recorder
from tdkernels.symm import resolve_group
from tdkernels.trace import Recorder, record
from tdkernels.trace.clocks import offsets
from tdkernels.trace.recording import _config
from tdkernels.trace.summary import arrivals, headline, longest_waits, shares, tables
from tdkernels.trace.timeline import ALL_PEERS, NO_PEER, make_trace, row_of
from tests.support.ranks import DEVICE, device, on_ranks
from tests.support.simulated_nodes import thorough
from tests.trace.recorded import REPETITIONS, VARIANTS, problem, recordings

each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_size = pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=thorough)])

# Roles of the programs of each variant: the kinds of their intervals in order, without "starts" and "finishes".
ROLES = {
    "push": {("multiplies", "stores"), ("waits", "multiplies", "stores"), ("pushes",), ()},
    "copy engine": {("multiplies", "stores"), ("waits", "multiplies", "stores"), ()},
    "reduce-scatter": {("multiplies", "stores"), ("waits", "pushes"), ("multiplies", "waits", "sums"), ()},
    "reduce-scatter, direct": {("multiplies", "stores"), ("multiplies", "pushes"), ("waits", "sums")},
    "two shot": {("multiplies", "stores"), ("waits", "pushes"), ("waits", "sums"), ("waits", "receives"), ()},
    "two shot, direct": {
        ("multiplies", "stores"), ("multiplies", "pushes"), ("waits", "sums"), ("waits", "receives"), (),
    },
    "one shot": {("multiplies", "joins"), ("multiplies", "joins", "pushes", "waits", "sums")},
    "one shot reduce-scatter": {("multiplies", "pushes", "waits", "sums")},
    "one shot all-gather": {("pushes",), ("waits", "multiplies", "joins"), ("waits", "multiplies", "joins", "stores")},
    "ulysses qkv": {("multiplies", "stores"), ("waits", "receives"), ()},
    "ulysses out": {("pushes",), ("multiplies", "waits", "multiplies", "stores")},
    "attention": {("pushes",), ("waits",), ()},
    "decode": {("multiplies", "stores")},
    "decode, several tokens": {("waits", "starts", *("multiplies", "stores") * 2, "pushes", "waits", "sums")},
    "moe all-gather": {("pushes",), ("copies",), ("waits", "copies"), ("waits", "multiplies", "stores"), ()},
    "token dispatch": {("copies", "pushes"), ("waits", "receives")},
    "token dispatch, low latency": {("copies", "pushes"), ("waits", "receives")},
    "token combine": {("joins", "pushes"), ("waits", "sums")},
    "moe reduce-scatter": {("multiplies", "stores"), ("waits", "joins", "pushes"), ("waits", "joins", "waits", "sums")},
}
# Further roles that may occur: one wait for each chunk of a peer, except for chunks known to have arrived; and parts of
# tiles, in which one program is the last arriver.
PART = ("multiplies", "stores")
LAST = (*PART, "joins")
MORE = {
    "attention": {("multiplies", *("waits", "multiplies") * count, "stores") for count in range(1, 9)},
    "decode": {
        PART + PART, *((*parts, "pushes", "waits", "sums") for parts in (LAST, PART + LAST, LAST + PART, LAST + LAST))
    },
}


def group_by_program(intervals):
    return {program: list(members) for program, members in groupby(intervals, key=lambda i: i.program)}


def role(intervals):
    """Return the kinds of a program's intervals, with runs of the same kind merged."""
    kinds = [kind for kind, _ in groupby(i.kind for i in intervals)]
    assert kinds[0] == "starts" and kinds[-1] == "finishes"
    return tuple(kinds[1:-1])


@each_size
@each_variant
def test_every_program_is_recorded_from_start_to_end(variant, world_size):
    reports = recordings(variant, world_size)
    trace = make_trace(reports)
    assert len(trace.ranks) == world_size and len(reports[0]["events"]) == REPETITIONS
    for rank, intervals in enumerate(trace.ranks):
        programs = group_by_program(intervals)
        assert list(programs) == list(range(reports[rank]["events"][0].shape[1]))
        for program_intervals in programs.values():
            for interval, following in pairwise(program_intervals):
                assert interval.begin <= interval.end == following.begin
            assert len({(i.multiprocessor, i.lane) for i in program_intervals}) == 1
        roles = {role(program_intervals) for program_intervals in programs.values()}
        assert ROLES[variant] - {()} <= roles <= ROLES[variant] | MORE.get(variant, set())
        assert roles & MORE.get(variant, roles)
        rows = defaultdict(list)
        for interval in intervals:
            rows[row_of(interval)].append((interval.begin, interval.end))
        assert list(trace.rows(rank)) == sorted(rows)
        for row in rows.values():
            row.sort()
            assert all(end <= begin for (_, end), (begin, _) in pairwise(row)), "programs overlap in a row"
    assert min(trace.span(rank)[0] for rank in range(world_size)) == 0


@each_size
@each_variant
def test_waits_and_pushes_name_the_correct_peer(variant, world_size):
    trace = make_trace(recordings(variant, world_size))
    for rank, intervals in enumerate(trace.ranks):
        others = set(range(world_size)) - {rank}
        peers = {"waits": Counter(), "pushes": Counter()}
        for program_intervals in group_by_program(intervals).values():
            steps = [(i.kind, i.peer) for i in program_intervals[1:-1]]
            for kind, peer in steps:
                if kind in peers:
                    peers[kind][peer] += 1
            match role(program_intervals):
                case ("waits", "multiplies", "stores") if variant == "moe all-gather":
                    assert steps[0][1] == rank
                case ("waits", "multiplies", "stores"):
                    assert steps[0][1] == steps[1][1] in others
                case ("waits",):
                    assert steps == [("waits", ALL_PEERS)]
                case ("multiplies", "waits", "multiplies", *_) if variant == "attention":
                    assert steps[0][1] == rank and steps[1::2] == [
                        ("waits", peer) for _, peer in steps[2::2]
                    ] + [("stores", NO_PEER)]
                    assert {peer for _, peer in steps[1:-1]} == others
                case (*_, "pushes", "waits", "sums") if variant.startswith("decode"):
                    assert steps[-3:] == [("pushes", ALL_PEERS), ("waits", ALL_PEERS), ("sums", NO_PEER)]
                case ("copies",):
                    assert steps[0][1] == rank
                case ("waits", "copies"):
                    assert steps[0][1] == steps[1][1] in others
                case ("waits", "joins", "pushes"):
                    assert steps[0][1] == rank and steps[1][1] == steps[2][1] in others
                case ("waits", "joins", "waits", "sums"):
                    assert [peer for _, peer in steps[:3]] == [rank, rank, ALL_PEERS]
                case ("waits", "pushes"):
                    assert steps[0][1] == rank and steps[1][1] in others
                case ("multiplies", "waits", "sums"):
                    assert steps[1] == ("waits", ALL_PEERS)
                case ("waits", "sums") if variant == "token combine" or variant.endswith(", direct"):
                    assert steps == [("waits", ALL_PEERS), ("sums", ALL_PEERS)]
                case ("joins", "pushes"):
                    assert steps[1][1] in others
                case ("copies", "pushes"):
                    assert steps == [("copies", ALL_PEERS), ("pushes", ALL_PEERS)]
                case ("waits", "sums"):
                    assert steps == [("waits", rank), ("waits", ALL_PEERS), ("sums", ALL_PEERS)]
                case ("waits", "receives"):
                    assert steps[0][1] == steps[1][1]
                    assert steps[0][1] in others | ({rank} if variant == "token dispatch, low latency" else set())
                case ("multiplies", "joins", "pushes", "waits", "sums"):
                    assert steps[2:4] == [("pushes", ALL_PEERS), ("waits", ALL_PEERS)]
        if variant in ("push", "copy engine"):  # the same number of waits for each peer
            assert others <= peers["waits"].keys() <= others | {rank}
            assert len({peers["waits"][peer] for peer in others}) == 1
        scatters = "reduce-scatter", "reduce-scatter, direct", "moe reduce-scatter"
        if variant in ("push", *scatters, "moe all-gather", "attention"):
            assert peers["pushes"].keys() == others and len(set(peers["pushes"].values())) == 1


@each_size
def test_no_wait_ends_before_its_data_is_sent(world_size):
    trace = make_trace(recordings("push", world_size))
    for rank, intervals in enumerate(trace.ranks):
        for peer in set(range(world_size)) - {rank}:
            sent = min(i.begin for i in trace.ranks[peer] if (i.kind, i.peer) == ("pushes", rank))
            waited = min(i.end for i in intervals if (i.kind, i.peer) == ("waits", peer))
            allowed = sum(trace.about["clock_error_ns"][r] for r in (rank, peer))
            assert waited >= sent - allowed


@each_size
@each_variant
def test_shares_add_up_to_one(variant, world_size):
    trace = make_trace(recordings(variant, world_size))
    for rank, intervals in enumerate(trace.ranks):
        share = shares(trace, rank)
        tail = share.pop("tail")
        assert sum(share.values()) == pytest.approx(1.0)
        assert all(-1e-9 <= value <= 1 for value in share.values()) and -1e-9 <= tail <= share["idle"] + 1e-9
        assert variant.startswith("token ") or share["multiplies"] > 0
        first, last, sent = arrivals(trace, rank)
        assert first <= last and sent == (variant not in ("copy engine", "ulysses qkv"))
        waits = longest_waits(trace, rank)
        longest = max(i.end - i.begin for i in intervals if i.kind == "waits")
        assert waits[0].end - waits[0].begin == longest
    (_, columns, rows), (_, columns_of_waits, rows_of_waits) = tables(trace)
    assert len(rows) == world_size and all(len(row) == len(columns) for row in rows)
    assert rows_of_waits and all(len(row) == len(columns_of_waits) for row in rows_of_waits)
    assert "traced" in headline(trace) and "clocks agree within" in headline(trace)


@pytest.mark.skipif(DEVICE == "cuda", reason="only processes of one machine have the same clock")
@each_size
def test_offset_of_equal_clocks_is_zero(world_size):
    reports = recordings("push", world_size)
    if reports[0]["gpu"] == "cpu":
        for number in range(REPETITIONS):
            for ahead, error in offsets([rank_recording["times"][number] for rank_recording in reports]):
                assert abs(ahead) <= error + 1


def results(variant):
    """In a rank: return whether calls with and without a trace have equal results, and whether events were recorded."""
    operator, shape, changes, layout = problem(variant, dist.get_world_size())
    group, world_size = resolve_group(), dist.get_world_size()
    op = tunable(operator)
    case = Problem.on(device(), operator, shape, torch.float32, layout, world_size, world_size)
    config = _config(case, device(), group, changes)
    generator = torch.Generator(device()).manual_seed(dist.get_rank())
    operands = op.prepared(op.operands(case, device(), generator), case, group, config)

    def call():
        return op.comparable(op.run(operands, case, group, config), case)

    plain = call()
    with record(Recorder()) as recorder:
        traced = call()
    again = call()
    tdkernels.synchronize()
    assert runtime_recorder.buffer(device(), 1) is None, "still recording"
    return torch.equal(plain, traced) and torch.equal(plain, again), bool(recorder.events.any())


@each_variant
def test_traced_call_computes_the_same_bits(variant):
    assert on_ranks(2, results, variant) == [(True, True)] * 2
