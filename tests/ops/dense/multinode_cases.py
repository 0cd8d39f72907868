"""Test bodies for the dense operators across nodes. Every rank runs them.

``local`` is the number of ranks per simulated node. Tests for groups on one node are in cases.py.
"""

import random
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import PeerTimeoutError
from tdkernels.ops.dense.gemm_ar import launch_multinode as gemm_ar_launch_multinode
from tests.ops.dense.cases import config_for, has_same_bits_on_all_ranks
from tests.support.dense_oracle import Case
from tests.support.simulated_nodes import a_group_on_nodes, reseed
from tests.test_protocol import failure_of, poison, timeout


def adding_once(fn, *args, **kwargs):
    """Call ``fn`` while one owner per tile of gemm_ar sums the partials of all nodes, whatever the message size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_ar_launch_multinode, "_TRIP_BYTES", -1)
        return fn(*args, **kwargs)


def computes(operator, dtype, local, shapes, *, bias=True, exact=False, **changes):
    """Check output and gradients (see ``Case.runs_backward``) for each shape, with changed config fields."""
    with a_group_on_nodes(local) as group:
        for i, shape in enumerate(shapes):
            case = Case(operator, dtype, *shape, bias=bias, exact=exact, seed=i)
            config = config_for(case, **changes)
            results = case.run(group=group, config=config)
            has_gradients = case.runs_backward(config=config)
            assert set(results) == {"output", *["dx", "dweight", *["dbias"] * bias] * has_gradients}
            case.check(results)
            has_same_bits_on_all_ranks(case, results)


def computes_subsets_of_gradients(operator, local):
    with a_group_on_nodes(local) as group:
        for input_name, result in (("x", "dx"), ("weight", "dweight"), ("bias", "dbias")):
            case = Case(operator, torch.float32, 9, 13, 17)
            for name in ("x", "weight", "bias"):
                getattr(case, name).requires_grad_(name == input_name)
            results = case.run(group=group)
            assert set(results) == {"output", result}
            case.check(results)


def reuses_poisoned_memory(operator, local, shapes):
    """Check calls of changing shapes and data on a workspace that is filled with NaN in between."""
    with a_group_on_nodes(local) as group:
        for turn in range(2):
            for i, shape in enumerate(shapes):
                case = Case(operator, torch.bfloat16, *shape, exact=True, seed=turn * len(shapes) + i)
                results = case.run(group=group)
                poison(group)  # outputs must not alias the workspace
                case.check(results)
        del group


def waits_for_a_slow_rank(operator, local):
    with a_group_on_nodes(local) as group:
        for slow in range(dist.get_world_size()):
            case = Case(operator, torch.bfloat16, 9, 5, 7, seed=slow)
            if dist.get_rank() == slow:
                time.sleep(0.1)
            output = case.call(group=group)
            if dist.get_rank() == slow:
                time.sleep(0.1)
            output.backward(case.dy)
            case.check({"output": output, **case.gradients()})


def computes_in_any_network_order(operator, local, seeds, shapes, **changes):
    """Check back-to-back small calls, each with another delivery order of the network."""
    with a_group_on_nodes(local) as group:
        cases = [Case(operator, torch.float32, *shape, exact=True, seed=i) for i, shape in enumerate(shapes * 2)]
        configs = [config_for(case, **changes) for case in cases]
        pauses = random.Random(dist.get_rank())
        for seed in range(seeds):
            reseed(seed)
            turn = seed % len(cases)
            output = cases[turn].call(group=group, config=configs[turn])
            cases[turn].check({"output": output.detach()})
            if pauses.random() < 0.2:
                time.sleep(pauses.uniform(0, 0.01))


def is_deterministic(operator, local, dtype, **changes):
    """Check that calls return the same bits in any delivery order of the network."""
    with a_group_on_nodes(local) as group:
        case = Case(operator, dtype, 20, 37, 40)
        config = config_for(case, **changes)
        first = case.call(group=group, config=config)
        case.check({"output": first.detach()})
        has_same_bits_on_all_ranks(case, {"output": first.detach()})
        for seed in range(1, 4):
            reseed(seed)
            assert torch.equal(case.call(group=group, config=config), first), f"changed with seed {seed}"


def reduces_in_fixed_order(operator, local, dtype, **changes):
    """Check the bits of z: fp32 sums in rank order within a node, then the rounded node sums in node order."""
    # The partials are x[0], which depend neither on the summation order of the GEMM nor on rounding.
    case = Case(operator, dtype, 20, 37, 1, bias=False)
    with torch.no_grad():
        case.weight.fill_(1.0)
    partial = case.x.detach().float()
    partials = [torch.empty_like(partial) for _ in range(case.world_size)]
    dist.all_gather(partials, partial)
    total = torch.zeros_like(partial)
    for node in range(case.world_size // local):
        node_sum = torch.zeros_like(partial)
        for rank_partial in partials[node * local : (node + 1) * local]:
            node_sum += rank_partial
        # gemm_rs does not round the sum of its own node; in gemm_ar all ranks add the same rounded sums.
        rounds = operator == "gemm_ar" or node != case.rank // local
        total += node_sum.to(dtype).float() if rounds else node_sum
    expected = case.own_parts({"output": total.to(dtype).expand(-1, case.shape[1])})["output"]
    with a_group_on_nodes(local) as group:
        got = case.call(group=group, config=config_for(case, **changes)).detach()
        tdkernels.synchronize()
    wrong = (got != expected).sum().item()
    assert wrong == 0, f"{wrong} of {got.numel()} elements of {case.title} have another summation order"


def misses_a_rank(operator, local, missing):
    """Skip a call on rank ``missing``; return the peer named in the error of this rank, None on ``missing``."""
    with a_group_on_nodes(local) as group:
        case = Case(operator, torch.float32, 6, 4, 8, exact=True)
        case.check(case.run(group=group))
        dist.barrier()
        error = None
        if dist.get_rank() != missing:
            # Each rank waits longer than lower ranks, so it would see data that they send after their timeout.
            with timeout(0.5 + 0.5 * dist.get_rank()):
                error = failure_of(case.call, group=group)
            assert str(failure_of(case.call, group=group)) == str(error)
        dist.barrier()
        del group
    if dist.get_rank() == missing:
        return None
    assert type(error) is PeerTimeoutError, repr(error)
    assert (error.operator, error.rank) == (operator, dist.get_rank()) and error.seen < error.expected
    return error.peer


def reports_disagreement(operator, local):
    """Check that disagreeing ranks raise before any launch, and that the group stays usable."""
    with a_group_on_nodes(local) as group:
        case = Case(operator, torch.float32, 6 + (dist.get_rank() == 1), 4, 8)
        error = failure_of(case.call, group=group)
        assert type(error) is ValueError and "on rank 1" in str(error), repr(error)
        after = Case(operator, torch.float32, 6, 4, 8, exact=True)
        after.check({"output": after.call(group=group).detach()})
        del group
