"""Test bodies for flash_decode across nodes. Every rank runs them; see test_flash_decode_multinode.py.

``local`` is the number of ranks per simulated node.
"""

import time

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import FlashDecodeConfig, PeerTimeoutError, PlanMismatchError
from tdkernels.symm.group import group_state
from tests.ops.attention.flash_decode import cases as decoding
from tests.ops.attention.flash_decode.oracle import Decode, enlarge
from tests.support.simulated_nodes import a_group_on_nodes, reseed
from tests.support.subset import THOROUGH
from tests.test_protocol import failure_of, poison, timeout

SEEDS = 50 if THOROUGH else 12  # delivery orders of the network
SMALLEST = dict(batch=3, heads=1, kv_heads=1, dim=16, keys=2)


def few_programs(number):
    """Return a config with so few programs that each finishes several tiles, some of them owned by its rank."""
    return FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1, num_programs=number)


def computes(spec, config, local):
    """Check o, lse and every gradient, and that all ranks have the same bits."""
    with a_group_on_nodes(local) as group:
        assert group_state(group).topology.num_nodes == group.size() // local > 1
        decoding.computes(dict(enlarge(spec), group=group), config)


def reuses_poisoned_memory(specs, local):
    """Check calls with changing sizes and data on a workspace that is filled with NaN in between."""
    with a_group_on_nodes(local) as group:
        for turn in range(2):
            for number, spec in enumerate(specs):
                case = Decode(**spec, seed=10 * turn + number, group=group)
                o, lse = case.call(return_lse=True)
                poison(group)  # outputs must not alias the workspace
                case.check({"o": o, "lse": lse})
        del group, case


def computes_in_any_network_order(local):
    """Run back-to-back calls, each with another delivery order of the network; return the seeds of wrong results."""
    with a_group_on_nodes(local) as group:
        calls = []
        for programs, case_options in ((1, dict(lens="ragged")), (2, dict(lens="not first", tokens=2, window=3))):
            case = Decode(**SMALLEST, **case_options, seed=programs, group=group)
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


def computes_with_different_tile_orders(local, seeds):
    """Check ranks whose programs finish different tiles. Programs that wait for each other's tiles would hang."""
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
    """Skip a call on rank ``missing``; return the peer named in the error of this rank, None on ``missing``."""
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


def delays_last_rank(local):
    """Let the last rank be late: after its node has timed out, or, with one rank per node, all other ranks."""
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
                outcome = "right" if torch.equal(o, expected) else "wrong"
            except PeerTimeoutError as error:
                outcome = f"missed {error.peer}"
                error.__traceback__ = None
        dist.barrier()
        del group, case
    return outcome


def detects_mismatch_of_cached_plans(local):
    """Check that different cached calls fail. No consensus check runs; only signals can detect it."""
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


def reports_disagreement(local):
    """Check that disagreeing ranks raise before any launch, and that the group stays usable."""
    with a_group_on_nodes(local) as group:
        usual = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6, group=group)
        case = Decode(**usual | ({"batch": 3} if dist.get_rank() == 1 else {}))
        error = failure_of(case.call)
        assert type(error) is ValueError and "flash_decode: the ranks disagree" in str(error), repr(error)
        after = Decode(**usual)
        after.check({"o": after.call()})
        del group, case, after
