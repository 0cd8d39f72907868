"""What is recorded on ranks: every program, in order, with the right peers; and the same results as without."""

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
from tests.trace.recorded import REPETITIONS, WAYS, problem, recordings

each_way = pytest.mark.parametrize("way", WAYS)
each_size = pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=thorough)])

# What the programs of each way do: roles, as their kinds in order without "starts" and "finishes".
ROLES = {
    "push": {("multiplies", "stores"), ("waits", "multiplies", "stores"), ("pushes",), ()},
    "copy engine": {("multiplies", "stores"), ("waits", "multiplies", "stores"), ()},
    "reduce-scatter": {("multiplies", "stores"), ("waits", "pushes"), ("multiplies", "waits", "sums"), ()},
    "reduce-scatter, direct": {("multiplies", "pushes"), ("multiplies", "waits", "sums")},
    "two shot": {("multiplies", "stores"), ("waits", "pushes"), ("waits", "sums"), ("waits", "receives"), ()},
    "one shot": {("multiplies", "joins"), ("multiplies", "joins", "pushes", "waits", "sums")},
    "one shot, sums of own rows": {("multiplies", "pushes", "waits", "sums")},
    "one shot, gathered": {("pushes",), ("waits", "multiplies", "joins"), ("waits", "multiplies", "joins", "stores")},
    "to heads": {("multiplies", "stores"), ("waits", "receives"), ()},
    "to positions": {("pushes",), ("multiplies", "waits", "multiplies", "stores")},
    "attention": {("pushes",), ("waits",), ()},
    "decode": {("multiplies", "stores")},
    "decode of tokens": {("waits", "starts", *("multiplies", "stores") * 2, "pushes", "waits", "sums")},
    "experts' rows": {("pushes",), ("copies",), ("waits", "copies"), ("waits", "multiplies", "stores"), ()},
    "tokens to experts": {("copies", "pushes"), ("waits", "receives")},
    "tokens straight to experts": {("copies", "pushes"), ("waits", "receives")},
    "tokens from experts": {("joins", "pushes"), ("waits", "sums")},
    "experts' sums": {("multiplies", "stores"), ("waits", "joins", "pushes"), ("waits", "joins", "waits", "sums")},
}
# And may do: with one wait for each chunk of a peer, but for those that are known to be there; and with parts of tiles,
# of which somebody is the last to have one.
PART = ("multiplies", "stores")
LAST = (*PART, "joins")
MORE = {
    "attention": {("multiplies", *("waits", "multiplies") * count, "stores") for count in range(1, 9)},
    "decode": {
        PART + PART, *((*parts, "pushes", "waits", "sums") for parts in (LAST, PART + LAST, LAST + PART, LAST + LAST))
    },
}


def by_program(intervals):
    return {program: list(found) for program, found in groupby(intervals, key=lambda i: i.program)}


def role(intervals):
    """The kinds of a program's intervals, one for each run of the same kind."""
    kinds = [kind for kind, _ in groupby(i.kind for i in intervals)]
    assert kinds[0] == "starts" and kinds[-1] == "finishes"
    return tuple(kinds[1:-1])


@each_size
@each_way
def test_every_program_is_there_from_its_start_to_its_end(way, world_size):
    found = recordings(way, world_size)
    trace = make_trace(found)
    assert len(trace.ranks) == world_size and len(found[0]["events"]) == REPETITIONS
    for rank, intervals in enumerate(trace.ranks):
        programs = by_program(intervals)
        assert list(programs) == list(range(found[rank]["events"][0].shape[1]))
        for of_program in programs.values():
            for interval, following in pairwise(of_program):
                assert interval.begin <= interval.end == following.begin
            assert len({(i.multiprocessor, i.lane) for i in of_program}) == 1
        roles = {role(of_program) for of_program in programs.values()}
        assert ROLES[way] - {()} <= roles <= ROLES[way] | MORE.get(way, set())
        assert roles & MORE.get(way, roles)
        rows = defaultdict(list)
        for interval in intervals:
            rows[row_of(interval)].append((interval.begin, interval.end))
        assert list(trace.rows(rank)) == sorted(rows)
        for of_row in rows.values():
            of_row.sort()
            assert all(end <= begin for (_, end), (begin, _) in pairwise(of_row)), "programs overlap in a row"
    assert min(trace.span(rank)[0] for rank in range(world_size)) == 0


@each_size
@each_way
def test_waits_and_pushes_name_the_right_peer(way, world_size):
    trace = make_trace(recordings(way, world_size))
    for rank, intervals in enumerate(trace.ranks):
        others = set(range(world_size)) - {rank}
        peers = {"waits": Counter(), "pushes": Counter()}
        for of_program in by_program(intervals).values():
            seen = [(i.kind, i.peer) for i in of_program[1:-1]]
            for kind, peer in seen:
                if kind in peers:
                    peers[kind][peer] += 1
            match role(of_program):
                case ("waits", "multiplies", "stores") if way == "experts' rows":
                    assert seen[0][1] == rank
                case ("waits", "multiplies", "stores"):
                    assert seen[0][1] == seen[1][1] in others
                case ("waits",):
                    assert seen == [("waits", ALL_PEERS)]
                case ("multiplies", "waits", "multiplies", *_) if way == "attention":
                    assert seen[0][1] == rank and seen[1::2] == [
                        ("waits", peer) for _, peer in seen[2::2]
                    ] + [("stores", NO_PEER)]
                    assert {peer for _, peer in seen[1:-1]} == others
                case (*_, "pushes", "waits", "sums") if way.startswith("decode"):
                    assert seen[-3:] == [("pushes", ALL_PEERS), ("waits", ALL_PEERS), ("sums", NO_PEER)]
                case ("copies",):
                    assert seen[0][1] == rank
                case ("waits", "copies"):
                    assert seen[0][1] == seen[1][1] in others
                case ("waits", "joins", "pushes"):
                    assert seen[0][1] == rank and seen[1][1] == seen[2][1] in others
                case ("waits", "joins", "waits", "sums"):
                    assert [peer for _, peer in seen[:3]] == [rank, rank, ALL_PEERS]
                case ("waits", "pushes"):
                    assert seen[0][1] == rank and seen[1][1] in others
                case ("multiplies", "waits", "sums"):
                    assert seen[1] == ("waits", ALL_PEERS)
                case ("waits", "sums") if way == "tokens from experts":
                    assert seen == [("waits", ALL_PEERS), ("sums", ALL_PEERS)]
                case ("joins", "pushes"):
                    assert seen[1][1] in others
                case ("copies", "pushes"):
                    assert seen == [("copies", ALL_PEERS), ("pushes", ALL_PEERS)]
                case ("waits", "sums"):
                    assert seen == [("waits", rank), ("waits", ALL_PEERS), ("sums", ALL_PEERS)]
                case ("waits", "receives"):
                    assert seen[0][1] == seen[1][1]
                    assert seen[0][1] in others | ({rank} if way == "tokens straight to experts" else set())
                case ("multiplies", "joins", "pushes", "waits", "sums"):
                    assert seen[2:4] == [("pushes", ALL_PEERS), ("waits", ALL_PEERS)]
        if way in ("push", "copy engine"):  # as many for each of the peers
            assert others <= peers["waits"].keys() <= others | {rank}
            assert len({peers["waits"][peer] for peer in others}) == 1
        if way in ("push", "reduce-scatter", "reduce-scatter, direct", "experts' rows", "experts' sums", "attention"):
            assert peers["pushes"].keys() == others and len(set(peers["pushes"].values())) == 1


@each_size
def test_no_wait_ends_before_what_it_waits_for_was_sent(world_size):
    trace = make_trace(recordings("push", world_size))
    for rank, intervals in enumerate(trace.ranks):
        for peer in set(range(world_size)) - {rank}:
            sent = min(i.begin for i in trace.ranks[peer] if (i.kind, i.peer) == ("pushes", rank))
            came = min(i.end for i in intervals if (i.kind, i.peer) == ("waits", peer))
            allowed = sum(trace.about["clock_error_ns"][r] for r in (rank, peer))
            assert came >= sent - allowed


@each_size
@each_way
def test_the_sums_add_up(way, world_size):
    trace = make_trace(recordings(way, world_size))
    for rank, intervals in enumerate(trace.ranks):
        share = shares(trace, rank)
        tail = share.pop("tail")
        assert sum(share.values()) == pytest.approx(1.0)
        assert all(-1e-9 <= value <= 1 for value in share.values()) and -1e-9 <= tail <= share["idle"] + 1e-9
        assert way.startswith("tokens") or share["multiplies"] > 0
        first, last, sent = arrivals(trace, rank)
        assert first <= last and sent == (way not in ("copy engine", "to heads"))
        waits = longest_waits(trace, rank)
        longest = max(i.end - i.begin for i in intervals if i.kind == "waits")
        assert waits[0].end - waits[0].begin == longest
    (_, columns, rows), (_, columns_of_waits, rows_of_waits) = tables(trace)
    assert len(rows) == world_size and all(len(row) == len(columns) for row in rows)
    assert rows_of_waits and all(len(row) == len(columns_of_waits) for row in rows_of_waits)
    assert "traced" in headline(trace) and "clocks agree within" in headline(trace)


@pytest.mark.skipif(DEVICE == "cuda", reason="only processes of one machine have the same clock")
@each_size
def test_clocks_that_are_the_same_are_found_to_be_so(world_size):
    found = recordings("push", world_size)
    if found[0]["gpu"] == "cpu":
        for number in range(REPETITIONS):
            for ahead, error in offsets([of_rank["times"][number] for of_rank in found]):
                assert abs(ahead) <= error + 1


def results(way):
    """Of one rank: what a call returns, without a trace and with one, and whether the trace is there."""
    operator, shape, changes, layout = problem(way, dist.get_world_size())
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


@each_way
def test_a_traced_call_computes_the_same_bits(way):
    assert on_ranks(2, results, way) == [(True, True)] * 2
