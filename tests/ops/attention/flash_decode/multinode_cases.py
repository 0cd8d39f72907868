"""What flash_decode is asked in groups on several nodes, as functions that every rank runs.

``local`` is how many ranks a simulated node has. test_flash_decode_multinode.py asks.
"""

import time

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import FlashDecodeConfig, PeerTimeoutError, PlanMismatchError
from tdkernels.symm.group import group_state
from tests.ops.attention.flash_decode import cases as decoding
from tests.ops.attention.flash_decode.oracle import Decode, many
from tests.support.simulated_nodes import a_group_on_nodes, reseed
from tests.test_protocol import failure_of, poison, timeout

SEEDS = 50
SMALLEST = dict(batch=3, heads=1, kv_heads=1, dim=16, keys=2)


def few_programs(number):
    """A config by which a program comes to the end of several tiles, some of which its rank owns."""
    return FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1, num_programs=number)


def computes(spec, config, local):
    """As on one node: forward, log-sum-exp and every gradient; on all ranks the same bits."""
    with a_group_on_nodes(local) as group:
        assert group_state(group).topology.num_nodes == group.size() // local > 1
        decoding.computes(dict(many(spec), group=group), config)


def takes_new_data(specs, local):
    """Call after call with other sizes and data, on a workspace that is poisoned between."""
    with a_group_on_nodes(local) as group:
        for turn in range(2):
            for number, spec in enumerate(specs):
                case = Decode(**spec, seed=10 * turn + number, group=group)
                o, lse = case.call(return_lse=True)
                poison(group)  # what we got is ours and does not change with the workspace
                case.check({"o": o, "lse": lse})
        del group, case


def is_right_on_every_network(local):
    """Small calls with nothing between them, each on a network with an order of its own; the seeds of wrong ones."""
    with a_group_on_nodes(local) as group:
        calls = []
        for programs, of_case in ((1, dict(lens="ragged")), (2, dict(lens="not first", tokens=2, window=3))):
            case = Decode(**SMALLEST, **of_case, seed=programs, group=group)
            o, lse = case.call(return_lse=True, config=few_programs(programs))
            case.check({"o": o, "lse": lse})
            calls.append((case, programs, (o, lse)))
        wrong = []
        for seed in range(SEEDS):
            reseed(seed)
            case, programs, expected = calls[seed % len(calls)]
            results = case.call(return_lse=True, config=few_programs(programs))
            tdkernels.synchronize()
            if not all(map(torch.equal, results, expected)):
                wrong.append(seed)
        del group, calls, case
    return wrong


def deals_tiles_differently(local, seeds):
    """Each rank's first program ends with another tile: programs that wait for each other's tiles would hang."""
    with a_group_on_nodes(local) as group, timeout(20.0):
        for seed in seeds:
            case = Decode(6, 1, 1, 16, 70, seed=seed, group=group)
            o, lse = case.call(return_lse=True, config=few_programs(3))
            case.check({"o": o, "lse": lse})
        del group, case


def waits_for_a_slow_rank(local):
    with a_group_on_nodes(local) as group:
        for slow in range(dist.get_world_size()):
            case = Decode(2, 4, 2, 16, 6, seed=slow, group=group)
            case.require()
            time.sleep(0.1 if dist.get_rank() == slow else 0.0)
            o, lse = case.call(return_lse=True)
            time.sleep(0.1 if dist.get_rank() == slow else 0.0)
            torch.autograd.backward([o, lse], [case.do, case.dlse])
            case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})
        del group, case


def misses_a_rank(local, missing, spec):
    """The peer of whom the error of a call speaks that one rank does not come to; None there."""
    with a_group_on_nodes(local) as group:
        case = Decode(**spec, group=group)
        case.check({"o": case.call()})
        dist.barrier()
        error = None
        if dist.get_rank() != missing:
            with timeout(1.0):
                error = failure_of(case.call)
            assert str(failure_of(case.call)) == str(error)
        dist.barrier()
        del group, case
    if dist.get_rank() == missing:
        return None
    assert type(error) is PeerTimeoutError, repr(error)
    assert (error.operator, error.rank) == ("flash_decode", dist.get_rank()) and error.seen < error.expected
    return error.peer


def gives_nothing_on_that_it_has_not(local):
    """The last rank comes after its node has given up, or with one rank a node all others."""
    rank, late = dist.get_rank(), dist.get_world_size() - 1
    gives_up = rank < late and (local == 1 or rank // local == late // local)
    with a_group_on_nodes(local) as group:
        case = Decode(3, 2, 1, 16, 5, lens="full", group=group)
        expected = case.call()
        case.check({"o": expected})
        poison(group)
        time.sleep(1.5 if rank == late else 0.0)
        with timeout(0.6 if gives_up else 4.0):
            try:
                o = case.call()
                tdkernels.synchronize()
                answer = "right" if torch.equal(o, expected) else "wrong"
            except PeerTimeoutError as error:
                answer = f"missed {error.peer}"
                error.__traceback__ = None
        dist.barrier()
        del group, case
    return answer


def is_not_fooled_by_a_known_plan(local):
    """Rank 1 makes another call than the others, which all have made before: only the signals can tell."""
    with a_group_on_nodes(local) as group:
        usual = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6, group=group)
        cases = [Decode(**usual), Decode(**usual, tokens=2)]
        for case in cases * 2:
            case.check({"o": case.call()})
        dist.barrier()
        with timeout(1.0):
            error = failure_of(cases[dist.get_rank() == 1].call)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        dist.barrier()
        del group, case, cases


def refuses_other_sequences(local):
    """Ranks that disagree hear of it before anything is launched, and the group is as good as before."""
    with a_group_on_nodes(local) as group:
        usual = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6, group=group)
        case = Decode(**usual | ({"batch": 3} if dist.get_rank() == 1 else {}))
        error = failure_of(case.call)
        assert type(error) is ValueError and "flash_decode: the ranks disagree" in str(error), repr(error)
        after = Decode(**usual)
        after.check({"o": after.call()})
        del group, case, after
