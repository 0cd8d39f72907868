"""What gemm_rs and gemm_ar are asked in groups on several nodes, as functions that every rank of the world runs.

``local`` is how many ranks a simulated node has. The operators' own ways are asked of groups on one node, by dense.py.
"""

import random
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import PeerTimeoutError
from tdkernels.ops.dense.gemm_ar import launch_multinode as gemm_ar_launch_multinode
from tests.ops.dense.cases import config_for, has_the_bits_of_rank_0
from tests.support.dense_oracle import Case
from tests.support.simulated_nodes import a_group_on_nodes, reseed
from tests.test_protocol import failure_of, poison, timeout


def adding_once(fn, *args, **kwargs):
    """Call a function, for which one owner of gemm_ar's tiles adds all nodes' sums, however little there is to send."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_ar_launch_multinode, "_TRIP_BYTES", -1)
        return fn(*args, **kwargs)


def computes(operator, dtype, local, shapes, *, bias=True, exact=False, **changes):
    """Output and every gradient of each shape, with the config changed as told."""
    with a_group_on_nodes(local) as group:
        for i, shape in enumerate(shapes):
            case = Case(operator, dtype, *shape, bias=bias, exact=exact, seed=i)
            results = case.run(group=group, config=config_for(case, **changes))
            assert set(results) == {"output", "dx", "dweight", *["dbias"] * bias}
            case.check(results)
            has_the_bits_of_rank_0(case, results)


def computes_only_the_gradients_asked_for(operator, local):
    with a_group_on_nodes(local) as group:
        for asked, result in (("x", "dx"), ("weight", "dweight"), ("bias", "dbias")):
            case = Case(operator, torch.float32, 9, 13, 17)
            for name in ("x", "weight", "bias"):
                getattr(case, name).requires_grad_(name == asked)
            results = case.run(group=group)
            assert set(results) == {"output", result}
            case.check(results)


def reuses_poisoned_memory(operator, local, shapes):
    """Calls with new data, of shapes that grow and shrink, on a workspace that is poisoned between."""
    with a_group_on_nodes(local) as group:
        for turn in range(2):
            for i, shape in enumerate(shapes):
                case = Case(operator, torch.bfloat16, *shape, exact=True, seed=turn * len(shapes) + i)
                results = case.run(group=group)
                poison(group)  # what we got is ours and does not change with the workspace
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


def is_right_on_every_network(operator, local, seeds, shapes, **changes):
    """Small calls with nothing between them, each on a network with an order of its own."""
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


def repeats_its_bits(operator, local, dtype, **changes):
    """The same bits every time, whatever comes first."""
    with a_group_on_nodes(local) as group:
        case = Case(operator, dtype, 20, 37, 40)
        config = config_for(case, **changes)
        first = case.call(group=group, config=config)
        case.check({"output": first.detach()})
        has_the_bits_of_rank_0(case, {"output": first.detach()})
        for seed in range(1, 4):
            reseed(seed)
            assert torch.equal(case.call(group=group, config=config), first), f"changed with seed {seed}"


def adds_in_order(operator, local, dtype, **changes):
    """z to the bit: partials are added in fp32, inside a node in rank order, then the nodes' rounded sums in theirs."""
    # The partials are x[0], which the order of a product cannot change, and no rounding either.
    case = Case(operator, dtype, 20, 37, 1, bias=False)
    with torch.no_grad():
        case.weight.fill_(1.0)
    partial = case.x.detach().float()
    partials = [torch.empty_like(partial) for _ in range(case.world_size)]
    dist.all_gather(partials, partial)
    total = torch.zeros_like(partial)
    for node in range(case.world_size // local):
        of_node = torch.zeros_like(partial)
        for of_rank in partials[node * local : (node + 1) * local]:
            of_node += of_rank
        # What gemm_rs adds of its own node is not rounded before; all ranks of gemm_ar add the same.
        rounds = operator == "gemm_ar" or node != case.rank // local
        total += of_node.to(dtype).float() if rounds else of_node
    expected = case.own_parts({"output": total.to(dtype).expand(-1, case.shape[1])})["output"]
    with a_group_on_nodes(local) as group:
        got = case.call(group=group, config=config_for(case, **changes)).detach()
        tdkernels.synchronize()
    wrong = (got != expected).sum().item()
    assert wrong == 0, f"{wrong} of {got.numel()} elements of {case.title} were added otherwise"


def misses_a_rank(operator, local, missing):
    """The error of a call that one rank does not come to; None there."""
    with a_group_on_nodes(local) as group:
        case = Case(operator, torch.float32, 6, 4, 8, exact=True)
        case.check(case.run(group=group))
        dist.barrier()
        error = None
        if dist.get_rank() != missing:
            # Each waits longer than those before it, and so would take for a result what they make after they gave up.
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


def refuses_other_rows(operator, local):
    """Ranks that disagree hear of it before anything is launched, and the group is as good as before."""
    with a_group_on_nodes(local) as group:
        case = Case(operator, torch.float32, 6 + (dist.get_rank() == 1), 4, 8)
        error = failure_of(case.call, group=group)
        assert type(error) is ValueError and "on rank 1" in str(error), repr(error)
        after = Case(operator, torch.float32, 6, 4, 8, exact=True)
        after.check({"output": after.call(group=group).detach()})
        del group
