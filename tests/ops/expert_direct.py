"""What a dispatch with ``max_tokens_per_rank`` is asked, as functions that every rank runs. test_ep_direct.py asks."""

import contextlib
import random
import time
from unittest import mock

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, PeerTimeoutError, PlanMismatchError
from tdkernels.ops.ep_direct_kernel import ep_direct_kernel
from tdkernels.symm.workspace import Workspace
from tests.ops.collective import same
from tests.ops.expert_parallel import (
    SMALL,
    UNEVEN,
    case_of,
    config_of,
    expected_gradients_of_combine,
    quantized,
    told,
)
from tests.ops.expert_ranks import USUAL, check_disagreement
from tests.ops.routed import BF16, FP16, FP32, Routed
from tests.ranks import a_group, device
from tests.test_protocol import failure_of, poison, stalls, timeout


def bound_of(case):
    """The smallest max_tokens_per_rank of a case."""
    return max(*case.tokens, 1)


def padded(rows, capacity):
    """[capacity, …] that begins with rows; the others are NaN, which nobody may add to anything."""
    out = rows.new_full((capacity, *rows.shape[1:]), torch.nan)
    out[: len(rows)] = rows
    return out


def goes_straight(dispatch, straight=True, **options):
    """What a dispatch returns, which has to take the one launch; or not if not ``straight``."""
    launched = []
    launch = type(ep_direct_kernel).launch_alike

    def spied(kernel, *args, **kwargs):
        launched.append(kernel is ep_direct_kernel)
        return launch(kernel, *args, **kwargs)

    type(ep_direct_kernel).launch_alike = spied
    try:
        result = dispatch(**options)
    finally:
        type(ep_direct_kernel).launch_alike = launch
    assert launched == [True] if straight else launched and not any(launched), f"launches that are direct: {launched}"
    return result


def there_and_back(case, config=None, group=None, **options):
    """A dispatch and a combine, checked."""
    options = {"max_tokens_per_rank": bound_of(case), **options}
    recv, handle = goes_straight(case.dispatch, config=config, group=group, **options)
    capacity = recv.x.shape[0]
    y = tdkernels.ep_combine(padded(case.expert_out(), capacity), handle, group=group)
    case.check_received(recv, capacity=capacity)
    case.check_combined(y, combine=config.combine if config else "per_rank")


def computes(spec, changes, room=0):
    """Forward and every gradient, by the least bound and by one that leaves ``room``."""
    case = case_of(**spec)
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    rows, _ = case.capacity()
    least = bound_of(case)
    enough = case.world_size * least * min(case.k, case.experts // case.world_size)  # if a token's experts differ
    for most, max_tokens in ((least, None if rows <= enough else rows), (least + room, max(rows, 1) + room)):
        case.x.requires_grad_()
        case.weights.requires_grad_()
        recv, handle = goes_straight(case.dispatch, config=config, max_tokens_per_rank=most, max_tokens=max_tokens)
        capacity = max_tokens or enough
        case.check_received(recv, capacity=capacity)
        expert_out = padded(case.expert_out(), capacity).requires_grad_()
        y = tdkernels.ep_combine(expert_out, handle)
        case.check_combined(y, combine=combine)
        _check_gradients(case, recv, expert_out, y, combine)
        again, _ = tdkernels.ep_dispatch(case.x, handle, case.weights)
        case.check_received(again, capacity=capacity)


def _check_gradients(case, recv, expert_out, y, combine):
    capacity, width = expert_out.shape
    all_dy = case.draw(sum(case.tokens), width, case.dtype)
    d_out, dw = torch.autograd.grad(y, [expert_out, case.weights], all_dy[case.mine].to(device()))
    d_rows, exact, low = expected_gradients_of_combine(case, all_dy, case.all_weights)
    assert same(d_out[: case.num_rows], d_rows), f"dexpert_out: {case.title}"
    assert not d_out[case.num_rows :].any(), "rows that no token has take part in no sum"
    case.check_numbers("dtopk_weights of combine", dw, exact, low)

    d_choices = case.draw(case.all_ids.numel(), width, case.dtype)
    d_weights = case.draw(case.all_ids.numel(), 1, FP32)
    d_recv = padded(d_choices[case.order].to(device()), capacity)
    d_row_weights = padded(d_weights.flatten()[case.order].to(device()), capacity)
    dx, dw = torch.autograd.grad([recv.x, recv.topk_weights], [case.x, case.weights], [d_recv, d_row_weights])
    tdkernels.synchronize()
    case.check_numbers("dx of dispatch", dx, *case.combined(d_choices, None, combine))
    expected = d_weights.view(case.valid.shape).where(case.valid, 0.0)[case.mine].to(case.weights.dtype)
    assert same(dw, expected), f"dtopk_weights of dispatch: {case.title}"


# ---- what is moved ----


def moves_any_bits(dtypes):
    for seed, (dtype, width) in enumerate(dtypes):
        case = case_of([4, 0, 5, 2], 2, 2, width, dtype, values="bits", seed=seed)
        weighted = seed % 2 == 0
        all_scales = case.draw(sum(case.tokens), 5, FP16)
        scales = all_scales[case.mine].to(device()) if seed % 3 else None
        recv, _ = goes_straight(case.dispatch, weighted=weighted, scales=scales, max_tokens_per_rank=7, max_tokens=40)
        case.check_received(recv, weighted=weighted, capacity=40)
        assert (recv.scales is None) == (scales is None)
        assert scales is None or same(recv.scales[: case.num_rows], case.received(all_scales))


def quantizes(width, dtype, changes):
    case = case_of([4, 0, 3, 5], 2, 2, width, dtype, values="normal", seed=width)
    recv, handle = goes_straight(case.dispatch, quantize="fp8", config=config_of(changes), max_tokens_per_rank=5)
    tdkernels.synchronize()
    codes, scales = quantized(case.all_x)
    assert same(recv.scales[: case.num_rows], case.received(scales)), f"scales: {case.title}"
    assert same(recv.x[: case.num_rows], case.received(codes)), f"codes: {case.title}"
    assert same(recv.topk_weights[: case.num_rows], case.by_row(case.all_weights)), f"topk_weights: {case.title}"
    case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), recv.x.shape[0]), handle))


def counts_many():
    """More choices before a token than are compared at a time, and more tokens than programs."""
    case = case_of([90, 37, 64, 5], 33, 33, 3, FP32, seed=9)
    there_and_back(case, EpConfig(**{**SMALL, "num_senders": 4, "num_receivers": 5, "num_warps": 4}))


def takes_the_other_way(config, most, k):
    """Of many tokens, or if told not to: all is as without the bound, but for the host, which never waits."""
    case = case_of(UNEVEN, k, 3, 16, seed=3)
    recv, handle = goes_straight(case.dispatch, straight=False, config=config, max_tokens_per_rank=most)
    capacity = case.world_size * most * min(k, 3)
    case.check_received(recv, capacity=capacity)
    case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), capacity), handle))


def comes_in_halves(config):
    case = case_of(UNEVEN, 3, 3, 33, FP16, seed=11)
    options = {"num_experts": case.experts, "max_tokens_per_rank": 8, "config": config}
    rank = dist.get_rank()
    for turn in range(3):
        time.sleep(0.1 if turn == rank else 0.0)
        sent = tdkernels.ep_dispatch_send(case.x, case.ids, case.weights, **options)
        error = failure_of(case.dispatch, max_tokens_per_rank=8)
        assert type(error) is RuntimeError and "sent and not yet received" in str(error), repr(error)
        time.sleep(0.1 if turn == rank + 1 else 0.0)
        recv, handle = sent.receive()
        case.check_received(recv, capacity=recv.x.shape[0])
        y = tdkernels.ep_combine(padded(case.expert_out(), recv.x.shape[0]), handle)
        case.check_combined(y)


# ---- what cannot be ----


def refuses_what_is_too_much(spec):
    """One row less than is needed: all ranks are told, once, and the next call is right."""
    case = case_of(**spec)
    rows, _ = case.capacity()
    most = bound_of(case)
    for _ in range(2):  # both halves
        error = told(case, max_tokens=rows - 1, max_tokens_per_rank=most)
        assert type(error) is ValueError, repr(error)
        for words in (f"ep_dispatch: max_tokens={rows - 1} is too small", f"{rows} rows"):
            assert words in str(error), f"{words} in {error}"
        tdkernels.synchronize()  # says it once only
    there_and_back(case, max_tokens=rows)


def nothing_comes_back_of_what_was_too_much(halves):
    """A host that does not look between a dispatch and its combine, as with a GPU, and one that does on rank 0.

    Both go on: a combine reads no rows and gives none. The next dispatch says what was wrong, on all ranks.
    """
    case = case_of([3, 4, 2, 5], 2, 2, 8, ids="last")
    most, (rows, _) = 5, case.capacity()
    bounds = {"max_tokens": rows - 1, "max_tokens_per_rank": most}
    hidden = mock.patch.object(Workspace, "_raise_note")
    with hidden:
        if halves:
            operands = case.x, case.ids, case.weights
            sent = tdkernels.ep_dispatch_send(*operands, num_experts=case.experts, **bounds)
        else:
            recv, handle = case.dispatch(**bounds)
    looks = contextlib.nullcontext() if dist.get_rank() == 0 else hidden
    if device().type == "cuda":
        torch.cuda.synchronize()  # the note is there
    with contextlib.nullcontext() if device().type == "cuda" else hidden if halves else looks:
        if halves:
            recv, handle = sent.receive()
        y = tdkernels.ep_combine(torch.full_like(recv.x, torch.nan), handle)
        again, _ = tdkernels.ep_dispatch(case.x, handle)
    assert not recv.splits.any() and not y.any(), "a sum of rows that nobody has"
    error = failure_of(case.dispatch, max_tokens_per_rank=most)
    assert type(error) is ValueError and f"max_tokens={rows - 1} is too small" in str(error), repr(error)
    there_and_back(case)


def refuses_wrong_ids(wrong, where, id_dtype):
    case = case_of(UNEVEN, 3, 3, 8, seed=9)
    offender = [rank for rank, tokens in enumerate(case.tokens) if tokens][where]
    right = case.ids
    case.ids = right.to(id_dtype).clone()
    if dist.get_rank() == offender:
        case.ids[where, 1] = wrong
    error = told(case, max_tokens_per_rank=7)
    assert type(error) is ValueError, repr(error)
    assert f"ep_dispatch: the ids or splits of rank {offender} are out of range" in str(error), str(error)
    tdkernels.synchronize()
    case.ids = right
    there_and_back(case)


def refuses_too_many_tokens(config):
    """On whichever rank they are, all are told whose, and how many."""
    case = case_of(UNEVEN, 3, 3, 8, seed=9)
    offender = max(range(case.world_size), key=case.tokens.__getitem__)
    most = case.tokens[offender]
    for _ in range(2):
        error = told(case, config=config, max_tokens_per_rank=most - 1)
        assert type(error) is ValueError, repr(error)
        mine = f"x [{most}, 8] has more tokens than max_tokens_per_rank = {most - 1}"
        theirs = f"ep_dispatch: rank {offender} has {most} tokens, more than max_tokens_per_rank"
        assert theirs in str(error) or (dist.get_rank() == offender and mine in str(error)), str(error)
        failure_of(tdkernels.synchronize)  # rank ``offender`` may be told twice
    recv, handle = case.dispatch(config=config, max_tokens_per_rank=most)
    case.check_received(recv, capacity=recv.x.shape[0])
    case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), recv.x.shape[0]), handle))


def refuses():
    case = case_of(2, 2, 2, 8)
    for most in (0, -1, 1.0, True, "2", 1 << 29):
        error = failure_of(case.dispatch, max_tokens_per_rank=most)
        assert type(error) is ValueError and "max_tokens_per_rank must be a positive integer" in str(error), repr(error)
    there_and_back(case)


# ---- between the ranks ----

KINDS = [
    dict(k=2, experts_each=2, width=24, dtype=BF16, changes=SMALL),
    dict(k=1, experts_each=4, width=7, dtype=FP32, changes={**SMALL, "combine": "per_expert"}),
    dict(k=3, experts_each=4, width=80, dtype=FP16, changes=None),
]


def endures(calls, most_tokens, seed):
    """Random tokens on random ways, counted before and not, between which ranks wait and all memory is NaNs."""
    world_size = dist.get_world_size()
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for _ in range(calls):
        kind = of_all.choice(KINDS)
        tokens = [of_all.choice([0, 1, of_all.randrange(most_tokens + 1)]) for _ in range(world_size)]
        case = Routed(
            tokens, kind["k"], kind["experts_each"] * world_size, kind["width"], kind["dtype"],
            ids=of_all.choice(["any", "any", "distinct", "one", "last", "none"]), seed=of_all.randrange(1 << 30),
        )  # fmt: skip
        config = config_of(kind["changes"])
        if of_all.random() < 0.2:
            poison()
        time.sleep(own.choice([0.0, own.uniform(0.0, 0.01)]))
        straight = of_all.random() < 0.8
        bound = {"max_tokens_per_rank": most_tokens, "max_tokens": max(*case.capacity(), 1)} if straight else {}
        if straight:
            recv, handle = goes_straight(case.dispatch, config=config, **bound)
        else:
            recv, handle = case.dispatch(config=config)
        expert_out = padded(case.expert_out(), recv.x.shape[0])
        time.sleep(own.choice([0.0, own.uniform(0.0, 0.01)]))
        y = tdkernels.ep_combine(expert_out, handle)
        if of_all.random() < 0.2:
            poison()  # what we got is ours and does not change with the workspace
        case.check_received(recv, capacity=recv.x.shape[0])
        case.check_combined(y, combine=(kind["changes"] or {}).get("combine", "per_rank"))


def outruns_its_peers(calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other."""
    cases = [case_of([4, 6, 3, 5], 2, 2, 24, ids="any", seed=seed) for seed in range(calls)]
    options = {"config": config_of(SMALL), "max_tokens_per_rank": 6}
    for case in cases[:2]:
        recv, handle = case.dispatch(**options)
        tdkernels.ep_combine(recv.x, handle)
    outs = [padded(case.expert_out(), recv.x.shape[0]) for case in cases]
    with stalls(seed=dist.get_rank()):
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
