"""What a dispatch with ``max_tokens_per_rank`` is asked, as functions that every rank runs."""

import contextlib
import time
from unittest import mock

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tdkernels.lang.kernel import Kernel
from tdkernels.ops.experts.dispatch.kernel_low_latency import ep_direct_kernel
from tdkernels.symm.timeout import shorter_timeout
from tdkernels.symm.workspace import Workspace
from tests.ops.collectives.cases import same
from tests.ops.experts.dispatch.cases import (
    SMALL,
    UNEVEN,
    case_of,
    config_of,
    expected_gradients_of_combine,
    quantized,
    refusal,
    told,
)
from tests.ops.experts.dispatch.oracle import FP16, FP32
from tests.ops.experts.dispatch.rank_cases import padded
from tests.support.ranks import device
from tests.test_protocol import failure_of


def bound_of(case):
    """The smallest max_tokens_per_rank of a case."""
    return max(*case.tokens, 1)


def launches_of(call, **options):
    """What a call returns, and of each of its launches whether it is a dispatch in one."""
    launched = []
    launch = Kernel.launch_bound

    def spied(kernel, *args, **kwargs):
        launched.append(kernel is ep_direct_kernel)
        return launch(kernel, *args, **kwargs)

    with mock.patch.object(Kernel, "launch_bound", spied):
        return call(**options), launched


def goes_straight(dispatch, straight=True, **options):
    """What a dispatch returns, which has to take the one launch; or not if not ``straight``."""
    result, launched = launches_of(dispatch, **options)
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

    Both go on: a combine reads no rows and gives none. ``synchronize`` then raises the error on every rank.
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
    on_gpu = device().type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()  # the note is there
    # In halves everything is received before anybody looks; else rank 0 looks, on a GPU all do.
    is_raised = on_gpu or (dist.get_rank() == 0 and not halves)
    with contextlib.nullcontext() if is_raised else hidden:
        if halves:
            recv, handle = sent.receive()
        y = tdkernels.ep_combine(torch.full_like(recv.x, torch.nan), handle)
        again, _ = tdkernels.ep_dispatch(case.x, handle)
    assert not recv.splits.any() and not y.any(), "a sum of rows that nobody has"
    error = failure_of(tdkernels.synchronize)
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
    assert str(error) == refusal(case, offender, wrong), str(error)
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


def leaves_the_others_in_step(config, how):
    """The rank with too many tokens has raised, and makes no other call. For the others, whose hosts have not looked
    yet, it need not: what they launch of that routing waits for nobody, and counts for nothing."""
    case = case_of(UNEVEN, 3, 3, 8, seed=9)
    offender = max(range(case.world_size), key=case.tokens.__getitem__)
    most = case.tokens[offender] - 1

    def layer(tokens):
        x, ids, weights = case.x[:tokens], case.ids[:tokens], case.weights[:tokens]
        bounds = {"num_experts": case.experts, "config": config, "max_tokens_per_rank": most}
        if how == "halves":
            recv, handle = tdkernels.ep_dispatch_send(x, ids, weights, **bounds).receive()
            y = tdkernels.ep_combine_send(torch.full_like(recv.x, torch.nan), handle).receive()
            tdkernels.ep_dispatch_send(x, handle).receive()
            return recv, y
        x = x.clone().requires_grad_(how == "backward")
        recv, handle = tdkernels.ep_dispatch(x, ids, weights, **bounds)
        y = tdkernels.ep_combine(recv.x * 2 if how == "backward" else torch.full_like(recv.x, torch.nan), handle)
        if how == "backward":
            y.sum().backward()
        tdkernels.ep_dispatch(x.detach(), handle)
        return recv, y.detach()

    layer(min(case.tokens[dist.get_rank()], most))  # what is new is agreed on by all hosts
    with mock.patch.object(Workspace, "_raise_note"), shorter_timeout(5.0):
        if dist.get_rank() == offender:
            error = failure_of(layer, case.tokens[offender])
            assert type(error) is ValueError and "more tokens than max_tokens_per_rank" in str(error), repr(error)
        else:
            recv, y = layer(case.tokens[dist.get_rank()])
            if device().type == "cuda":
                torch.cuda.synchronize()
            assert not recv.splits.any() and not y.any()
    error = failure_of(tdkernels.synchronize)
    assert type(error) is ValueError and f"rank {offender} has" in str(error), repr(error)
    for _ in range(2):
        recv, handle = case.dispatch(config=config, max_tokens_per_rank=most + 1)
        case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), recv.x.shape[0]), handle))


def refuses():
    case = case_of(2, 2, 2, 8)
    for most in (0, -1, 1.0, True, "2", 1 << 29):
        error = failure_of(case.dispatch, max_tokens_per_rank=most)
        assert type(error) is ValueError and "max_tokens_per_rank must be a positive integer" in str(error), repr(error)
    there_and_back(case)
