"""What holds between the ranks of a dispatch with ``max_tokens_per_rank``, as functions that every rank runs.

test_low_latency.py asks.
"""

import time

import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, PeerTimeoutError, PlanMismatchError
from tests.ops.experts.dispatch import rank_cases
from tests.ops.experts.dispatch.cases import SMALL, case_of, config_of
from tests.ops.experts.dispatch.low_latency_cases import bound_of, goes_straight, there_and_back
from tests.ops.experts.dispatch.oracle import FP32, Routed
from tests.ops.experts.dispatch.rank_cases import USUAL, check_disagreement, padded
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, timeout


def endures(calls, most_tokens, seed):
    """Most calls take the one launch, and some count before they send."""

    def dispatch(case, config, of_all):
        if of_all.random() < 0.2:
            return rank_cases.counted(case, config, of_all)
        bounds = {"max_tokens_per_rank": most_tokens, "max_tokens": max(*case.capacity(), 1)}
        recv, handle = goes_straight(case.dispatch, config=config, **bounds)
        return recv, handle, recv.x.shape[0]

    rank_cases.endures(calls, most_tokens, seed, dispatch)


def outruns_its_peers(calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other."""
    cases = [case_of([4, 6, 3, 5], 2, 2, 24, ids="any", seed=seed) for seed in range(calls)]
    options = {"config": config_of(SMALL), "max_tokens_per_rank": 6}
    for case in cases[:2]:
        recv, handle = case.dispatch(**options)
        tdkernels.ep_combine(recv.x, handle)
    outs = [padded(case.expert_out(), recv.x.shape[0]) for case in cases]
    with in_any_order(seed=calls):
        received = [case.dispatch(**options) for case in cases]
        ys = [tdkernels.ep_combine(out, handle) for out, (_, handle) in zip(outs, received, strict=True)]
    for case, (recv, _), y in zip(cases, received, ys, strict=True):
        case.check_received(recv, capacity=recv.x.shape[0])
        case.check_combined(y)


def grows(widths):
    handles = []
    for seed, (tokens, width) in enumerate(widths):
        case = case_of(tokens, 2, 2, width, FP32, seed=seed)
        there_and_back(case)
        recv, handle = case.dispatch(max_tokens_per_rank=bound_of(case))
        handles.append((case, handle, recv.x.shape[0]))
    for case, handle, capacity in handles:  # which know nothing of memory that is no more
        case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), capacity), handle))


def uses_subgroups():
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([1, 2]) as high:
        for _ in range(2):
            for group, members in ((low, [0, 1]), (high, [1, 2])):
                if rank in members:
                    case = Routed([3 + members[0], 2], 2, 4, 16, seed=members[0], rank=members.index(rank))
                    there_and_back(case, group=group)
        del low, high, group


# What rank 1 of three does otherwise, and the field that says so, with its value there and elsewhere.
DISAGREEMENTS = {
    "bound": (dict(max_tokens_per_rank=9), "max_tokens_per_rank", 9, 3),
    "capacity": (dict(max_tokens=50), "max_tokens", 50, 18),
    "quantize": (dict(quantize="fp8"), "quantize", "true", "false"),
    "weights": (dict(weighted=False), "weighted", "false", "true"),
    "direct": (dict(config=EpConfig(**SMALL, direct_tokens=5)), "config", "direct_tokens=5", "direct_tokens=256"),
}


def disagrees(what):
    changes, field, there, elsewhere = DISAGREEMENTS[what]
    odd = dist.get_rank() == 1
    case = Routed([3] * 3, **USUAL)
    options = {"max_tokens_per_rank": 3, "max_tokens": 18, "config": config_of(SMALL), **(changes if odd else {})}
    with a_group() as group:
        error = failure_of(case.dispatch, group=group, **options)
        check_disagreement(error, field, there, elsewhere)
        there_and_back(case, group=group)
        del group


# Two ways to call, both known, of which rank 1 takes the other.
KNOWN = {
    "bound": (dict(max_tokens_per_rank=3), dict(max_tokens_per_rank=4)),
    "counted": (dict(max_tokens_per_rank=3), dict(max_tokens=18)),
    "codes": (dict(max_tokens_per_rank=3), dict(max_tokens_per_rank=3, quantize="fp8")),
}


def is_not_fooled_by_a_known_plan(what):
    """Both calls have been made before, so nobody asks the others; only the signals can tell."""
    with a_group() as group:
        case = Routed([3] * 3, **USUAL)
        for options in KNOWN[what] * 2:
            recv, _ = case.dispatch(group=group, **options)
            tdkernels.synchronize()
            if "quantize" not in options:
                case.check_received(recv, capacity=recv.x.shape[0])
        dist.barrier()
        options = KNOWN[what][dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.dispatch, group=group, **options)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and "ep_dispatch" in str(error), repr(error)
        again = failure_of(case.dispatch, group=group, **options)
        assert type(again) is type(error) and str(again) == str(error), f"{again!r} after {error!r}"
        del group, recv


def loses_rank_1(leave, timeout_s):
    """Rank 1 is gone before it has counted; the others say so, now and whenever asked again."""
    case = case_of(3, 2, 2, 16)
    for _ in range(2):
        there_and_back(case)
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        leave()
    start = time.monotonic()
    error = failure_of(case.dispatch, max_tokens_per_rank=3)
    assert time.monotonic() - start < timeout_s + 5.0
    again = failure_of(case.dispatch, max_tokens_per_rank=3)
    assert type(again) is type(error) and again.peer == error.peer, f"{again!r} after {error!r}"
    raise error


def comes_when_rank_0_has_given_up():
    """Rank 1 is late. What rank 0 has sent was its own, so the others get all that they are to get."""
    rank = dist.get_rank()
    with a_group() as group:
        case = Routed([3] * 3, **USUAL)
        for _ in range(2):
            there_and_back(case, group=group)
        dist.barrier()
        if rank == 1:
            time.sleep(0.9)
        with timeout(0.3 if rank == 0 else 2.0):
            try:
                recv, _ = case.dispatch(group=group, max_tokens_per_rank=3)
                case.check_received(recv, capacity=recv.x.shape[0])
                answer = "right"
            except PeerTimeoutError as error:
                answer = f"missed {error.peer}"
                error.__traceback__ = None
        recv = None
        del group, recv
    return answer
