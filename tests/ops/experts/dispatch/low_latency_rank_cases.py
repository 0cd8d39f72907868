"""Test bodies for the synchronization between ranks in the low-latency dispatch (``max_tokens_per_rank``).

Every rank runs them; test_low_latency.py starts them.
"""

import time

import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, PeerTimeoutError, PlanMismatchError
from tests.ops.experts.dispatch import rank_cases
from tests.ops.experts.dispatch.cases import SMALL, case_of, config_of
from tests.ops.experts.dispatch.low_latency_cases import dispatch_and_combine, min_tokens_per_rank, run_low_latency
from tests.ops.experts.dispatch.oracle import FP32, Routed
from tests.ops.experts.dispatch.rank_cases import BASE_SPEC, check_disagreement, padded
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, timeout


def stress(calls, most_tokens, seed):
    """Make random calls, most of them low-latency and some two-phase."""

    def dispatch(case, config, rng):
        if rng.random() < 0.2:
            return rank_cases.two_phase_dispatch(case, config, rng)
        bounds = {"max_tokens_per_rank": most_tokens, "max_tokens": max(*case.capacity(), 1)}
        recv, handle = run_low_latency(case.dispatch, config=config, **bounds)
        return recv, handle, recv.x.shape[0]

    rank_cases.stress(calls, most_tokens, seed, dispatch)


def runs_ahead_of_peers(calls):
    """Make calls with new data back to back, so that ranks run ahead of each other."""
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


def grows_workspace(widths):
    handles = []
    for seed, (tokens, width) in enumerate(widths):
        case = case_of(tokens, 2, 2, width, FP32, seed=seed)
        dispatch_and_combine(case)
        recv, handle = case.dispatch(max_tokens_per_rank=min_tokens_per_rank(case))
        handles.append((case, handle, recv.x.shape[0]))
    for case, handle, capacity in handles:  # handles stay valid after the workspace has been replaced
        case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), capacity), handle))


def uses_subgroups():
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([1, 2]) as high:
        for _ in range(2):
            for group, members in ((low, [0, 1]), (high, [1, 2])):
                if rank in members:
                    case = Routed([3 + members[0], 2], 2, 4, 16, seed=members[0], rank=members.index(rank))
                    dispatch_and_combine(case, group=group)
        del low, high, group


# Options of rank 1 of three; then the reported field, its value on rank 1 and on the others.
DISAGREEMENTS = {
    "bound": (dict(max_tokens_per_rank=9), "max_tokens_per_rank", 9, 3),
    "capacity": (dict(max_tokens=50), "max_tokens", 50, 18),
    "quantize": (dict(quantize="fp8"), "quantize", "true", "false"),
    "weights": (dict(weighted=False), "weighted", "false", "true"),
    "config": (dict(config=EpConfig(**SMALL, direct_tokens=5)), "config", "direct_tokens=5", "direct_tokens=256"),
}


def reports_disagreement(what):
    changes, field, odd_value, common_value = DISAGREEMENTS[what]
    differs = dist.get_rank() == 1
    case = Routed([3] * 3, **BASE_SPEC)
    options = {"max_tokens_per_rank": 3, "max_tokens": 18, "config": config_of(SMALL), **(changes if differs else {})}
    with a_group() as group:
        error = failure_of(case.dispatch, group=group, **options)
        check_disagreement(error, field, odd_value, common_value)
        dispatch_and_combine(case, group=group)
        del group


# Two cached calls each. Rank 1 then makes the second and the other ranks make the first.
CACHED_CALLS = {
    "bound": (dict(max_tokens_per_rank=3), dict(max_tokens_per_rank=4)),
    "two-phase": (dict(max_tokens_per_rank=3), dict(max_tokens=18)),
    "codes": (dict(max_tokens_per_rank=3), dict(max_tokens_per_rank=3, quantize="fp8")),
}


def detects_mismatch_of_cached_plans(what):
    """If ranks mix two cached calls, the consensus check is skipped, and the plan ids in the signals reveal it."""
    with a_group() as group:
        case = Routed([3] * 3, **BASE_SPEC)
        for options in CACHED_CALLS[what] * 2:
            recv, _ = case.dispatch(group=group, **options)
            tdkernels.synchronize()
            if "quantize" not in options:
                case.check_received(recv, capacity=recv.x.shape[0])
        dist.barrier()
        options = CACHED_CALLS[what][dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.dispatch, group=group, **options)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and "ep_dispatch" in str(error), repr(error)
        again = failure_of(case.dispatch, group=group, **options)
        assert type(again) is type(error) and str(again) == str(error), f"{again!r} after {error!r}"
        del group, recv


def loses_rank_1(leave, timeout_s):
    """Rank 1 dies before it sends its counts; the others time out, in later calls as well."""
    case = case_of(3, 2, 2, 16)
    for _ in range(2):
        dispatch_and_combine(case)
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


def times_out_on_rank_0():
    """Rank 1 is late, and rank 0 times out. Rank 0 sends only its own tokens, so the other ranks complete."""
    rank = dist.get_rank()
    with a_group() as group:
        case = Routed([3] * 3, **BASE_SPEC)
        for _ in range(2):
            dispatch_and_combine(case, group=group)
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
