"""Test bodies for the low-latency dispatch (``max_tokens_per_rank``). Every rank runs them."""

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
    quantize_ref,
)
from tests.ops.experts.dispatch.limit_cases import dispatch_error, invalid_id_message
from tests.ops.experts.dispatch.oracle import FP16, FP32
from tests.ops.experts.dispatch.rank_cases import padded
from tests.support.ranks import device
from tests.test_protocol import failure_of


def min_tokens_per_rank(case):
    """Return the smallest max_tokens_per_rank that a case allows."""
    return max(*case.tokens, 1)


def record_launches(call, **options):
    """Return the result of a call and, for each of its launches, whether it is a low-latency dispatch."""
    launched = []
    launch = Kernel.launch_bound

    def recorded(kernel, *args, **kwargs):
        launched.append(kernel is ep_direct_kernel)
        return launch(kernel, *args, **kwargs)

    with mock.patch.object(Kernel, "launch_bound", recorded):
        return call(**options), launched


def run_low_latency(dispatch, low_latency=True, **options):
    """Run a dispatch and check that it is a single low-latency launch, or none if not ``low_latency``."""
    result, launched = record_launches(dispatch, **options)
    assert launched == [True] if low_latency else launched and not any(launched), f"low-latency launches: {launched}"
    return result


def dispatch_and_combine(case, config=None, group=None, **options):
    """Run a low-latency dispatch and a combine and check the results."""
    options = {"max_tokens_per_rank": min_tokens_per_rank(case), **options}
    recv, handle = run_low_latency(case.dispatch, config=config, group=group, **options)
    capacity = recv.x.shape[0]
    y = tdkernels.ep_combine(padded(case.expert_out(), capacity), handle, group=group)
    case.check_received(recv, capacity=capacity)
    case.check_combined(y, combine=config.combine if config else "per_rank")


def computes(spec, changes, room=0):
    """Check forward and all gradients with the smallest bounds, and with bounds that are larger by ``room``."""
    case = case_of(**spec)
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    rows, _ = case.capacity()
    smallest = min_tokens_per_rank(case)
    # The default capacity assumes distinct experts for each token.
    default_capacity = case.world_size * smallest * min(case.k, case.experts // case.world_size)
    max_rows = None if rows <= default_capacity else rows
    for bound, max_tokens in ((smallest, max_rows), (smallest + room, max(rows, 1) + room)):
        case.x.requires_grad_()
        case.weights.requires_grad_()
        recv, handle = run_low_latency(case.dispatch, config=config, max_tokens_per_rank=bound, max_tokens=max_tokens)
        capacity = max_tokens or default_capacity
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
    assert not d_out[case.num_rows :].any(), "unused rows must not have a gradient"
    case.check_numbers("dtopk_weights of combine", dw, exact, low)

    d_assignments = case.draw(case.all_ids.numel(), width, case.dtype)
    d_weights = case.draw(case.all_ids.numel(), 1, FP32)
    d_recv = padded(d_assignments[case.order].to(device()), capacity)
    d_row_weights = padded(d_weights.flatten()[case.order].to(device()), capacity)
    dx, dw = torch.autograd.grad([recv.x, recv.topk_weights], [case.x, case.weights], [d_recv, d_row_weights])
    tdkernels.synchronize()
    case.check_numbers("dx of dispatch", dx, *case.combined(d_assignments, None, combine))
    expected = d_weights.view(case.valid.shape).where(case.valid, 0.0)[case.mine].to(case.weights.dtype)
    assert same(dw, expected), f"dtopk_weights of dispatch: {case.title}"


# ---- payloads and strategy ----


def moves_any_bits(dtypes):
    for seed, (dtype, width) in enumerate(dtypes):
        case = case_of([4, 0, 5, 2], 2, 2, width, dtype, values="bits", seed=seed)
        weighted = seed % 2 == 0
        all_scales = case.draw(sum(case.tokens), 5, FP16)
        scales = all_scales[case.mine].to(device()) if seed % 3 else None
        recv, _ = run_low_latency(case.dispatch, weighted=weighted, scales=scales, max_tokens_per_rank=7, max_tokens=40)
        case.check_received(recv, weighted=weighted, capacity=40)
        assert (recv.scales is None) == (scales is None)
        assert scales is None or same(recv.scales[: case.num_rows], case.received(all_scales))


def quantizes(width, dtype, changes):
    case = case_of([4, 0, 3, 5], 2, 2, width, dtype, values="normal", seed=width)
    recv, handle = run_low_latency(case.dispatch, quantize="fp8", config=config_of(changes), max_tokens_per_rank=5)
    tdkernels.synchronize()
    codes, scales = quantize_ref(case.all_x)
    assert same(recv.scales[: case.num_rows], case.received(scales)), f"scales: {case.title}"
    assert same(recv.x[: case.num_rows], case.received(codes)), f"codes: {case.title}"
    assert same(recv.topk_weights[: case.num_rows], case.by_row(case.all_weights)), f"topk_weights: {case.title}"
    case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), recv.x.shape[0]), handle))


def counts_many_assignments():
    """A token has more preceding assignments than one comparison covers, and there are more tokens than programs."""
    case = case_of([90, 37, 64, 5], 33, 33, 3, FP32, seed=9)
    dispatch_and_combine(case, EpConfig(**{**SMALL, "num_senders": 4, "num_receivers": 5, "num_warps": 4}))


def falls_back_to_two_phase(config, bound, k):
    """For many tokens, or if the config says so, a bounded call uses the two-phase dispatch without a host wait."""
    case = case_of(UNEVEN, k, 3, 16, seed=3)
    recv, handle = run_low_latency(case.dispatch, low_latency=False, config=config, max_tokens_per_rank=bound)
    capacity = case.world_size * bound * min(k, 3)
    case.check_received(recv, capacity=capacity)
    case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), capacity), handle))


def sends_and_receives_separately(config):
    case = case_of(UNEVEN, 3, 3, 33, FP16, seed=11)
    options = {"num_experts": case.experts, "max_tokens_per_rank": 8, "config": config}
    rank = dist.get_rank()
    for late_rank in range(3):
        time.sleep(0.1 if late_rank == rank else 0.0)
        sent = tdkernels.ep_dispatch_send(case.x, case.ids, case.weights, **options)
        error = failure_of(case.dispatch, max_tokens_per_rank=8)
        assert type(error) is RuntimeError and "sent and not yet received" in str(error), repr(error)
        time.sleep(0.1 if late_rank == rank + 1 else 0.0)
        recv, handle = sent.receive()
        case.check_received(recv, capacity=recv.x.shape[0])
        y = tdkernels.ep_combine(padded(case.expert_out(), recv.x.shape[0]), handle)
        case.check_combined(y)


# ---- errors ----


def rejects_overflow(spec):
    """If the capacity is one row too small, every rank raises the error once, and the next call is correct."""
    case = case_of(**spec)
    rows, _ = case.capacity()
    bound = min_tokens_per_rank(case)
    for _ in range(2):  # both buffers of the workspace
        error = dispatch_error(case, max_tokens=rows - 1, max_tokens_per_rank=bound)
        assert type(error) is ValueError, repr(error)
        for message in (f"ep_dispatch: max_tokens={rows - 1} is too small", f"{rows} rows"):
            assert message in str(error), f"{message} in {error}"
        tdkernels.synchronize()  # does not raise the error again
    dispatch_and_combine(case, max_tokens=rows)


def overflow_returns_no_rows(separate_phases):
    """After an overflow that the host has not noticed, a combine reads no rows and returns zeros.

    Rank 0 notices the error between dispatch and combine; the other ranks do not, as is usual on a GPU. All continue,
    and ``synchronize`` then raises the error on every rank.
    """
    case = case_of([3, 4, 2, 5], 2, 2, 8, ids="last")
    bound, (rows, _) = 5, case.capacity()
    bounds = {"max_tokens": rows - 1, "max_tokens_per_rank": bound}
    unread_mailbox = mock.patch.object(Workspace, "_raise_note")
    with unread_mailbox:
        if separate_phases:
            operands = case.x, case.ids, case.weights
            sent = tdkernels.ep_dispatch_send(*operands, num_experts=case.experts, **bounds)
        else:
            recv, handle = case.dispatch(**bounds)
    on_gpu = device().type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()  # the error is in the mailbox
    # Separate phases receive everything before a host reads the mailbox. Otherwise rank 0 reads it, on a GPU all ranks.
    is_raised = on_gpu or (dist.get_rank() == 0 and not separate_phases)
    with contextlib.nullcontext() if is_raised else unread_mailbox:
        if separate_phases:
            recv, handle = sent.receive()
        y = tdkernels.ep_combine(torch.full_like(recv.x, torch.nan), handle)
        again, _ = tdkernels.ep_dispatch(case.x, handle)
    assert not recv.splits.any() and not y.any(), "a sum of rows that were not sent"
    error = failure_of(tdkernels.synchronize)
    assert type(error) is ValueError and f"max_tokens={rows - 1} is too small" in str(error), repr(error)
    dispatch_and_combine(case)


def rejects_invalid_ids(wrong, where, id_dtype):
    case = case_of(UNEVEN, 3, 3, 8, seed=9)
    offender = [rank for rank, tokens in enumerate(case.tokens) if tokens][where]
    right = case.ids
    case.ids = right.to(id_dtype).clone()
    if dist.get_rank() == offender:
        case.ids[where, 1] = wrong
    error = dispatch_error(case, max_tokens_per_rank=7)
    assert type(error) is ValueError, repr(error)
    assert str(error) == invalid_id_message(case, offender, wrong), str(error)
    tdkernels.synchronize()
    case.ids = right
    dispatch_and_combine(case)


def rejects_too_many_tokens(config):
    """If a rank exceeds the bound, every rank raises an error that names the rank and its number of tokens."""
    case = case_of(UNEVEN, 3, 3, 8, seed=9)
    offender = max(range(case.world_size), key=case.tokens.__getitem__)
    bound = case.tokens[offender]
    for _ in range(2):
        error = dispatch_error(case, config=config, max_tokens_per_rank=bound - 1)
        assert type(error) is ValueError, repr(error)
        own_message = f"x [{bound}, 8] has more tokens than max_tokens_per_rank = {bound - 1}"
        peer_message = f"ep_dispatch: rank {offender} has {bound} tokens, more than max_tokens_per_rank"
        assert peer_message in str(error) or (dist.get_rank() == offender and own_message in str(error)), str(error)
        tdkernels.synchronize()  # does not raise the error again
    recv, handle = case.dispatch(config=config, max_tokens_per_rank=bound)
    case.check_received(recv, capacity=recv.x.shape[0])
    case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), recv.x.shape[0]), handle))


def keeps_other_ranks_in_step(config, how):
    """A rank with too many tokens raises and makes no further call, and the other ranks do not hang.

    Their hosts have not read the error yet. Their launches with that routing do not wait for peers and have no effect.
    """
    case = case_of(UNEVEN, 3, 3, 8, seed=9)
    offender = max(range(case.world_size), key=case.tokens.__getitem__)
    bound = case.tokens[offender] - 1

    def layer(tokens):
        x, ids, weights = case.x[:tokens], case.ids[:tokens], case.weights[:tokens]
        bounds = {"num_experts": case.experts, "config": config, "max_tokens_per_rank": bound}
        if how == "separate phases":
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

    layer(min(case.tokens[dist.get_rank()], bound))  # the consensus check of the first call involves all hosts
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
    if dist.get_rank() == offender:
        assert error is None, f"the rank has raised it already: {error!r}"
    else:
        assert type(error) is ValueError and f"rank {offender} has" in str(error), repr(error)
    for _ in range(2):
        recv, handle = case.dispatch(config=config, max_tokens_per_rank=bound + 1)
        case.check_combined(tdkernels.ep_combine(padded(case.expert_out(), recv.x.shape[0]), handle))


def rejects_invalid_arguments():
    case = case_of(2, 2, 2, 8)
    for bound in (0, -1, 1.0, True, "2", 1 << 29):
        error = failure_of(case.dispatch, max_tokens_per_rank=bound)
        assert type(error) is ValueError and "max_tokens_per_rank must be a positive integer" in str(error), repr(error)
    dispatch_and_combine(case)
