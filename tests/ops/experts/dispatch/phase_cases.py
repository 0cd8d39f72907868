"""Test bodies for ep_dispatch and ep_combine whose send and receive are separate calls."""

import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tests.ops.collectives.cases import same
from tests.ops.experts.dispatch.cases import UNEVEN, case_of, config_of
from tests.ops.experts.dispatch.oracle import FP16, FP32
from tests.support.ranks import device


def sends_and_receives_separately(changes, options):
    """Separate send and receive give the results of whole calls, with other work in between and late ranks."""
    case = case_of(UNEVEN, 3, 3, 33, FP16, seed=11)
    rank = dist.get_rank()
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    expected = case.dispatch(config=config, **options)[0]
    for late_rank in range(2):
        time.sleep(0.1 if late_rank == rank else 0.0)
        sent = tdkernels.ep_dispatch_send(
            case.x, case.ids, case.weights, num_experts=case.experts, config=config, **options
        )
        total = torch.ones(3, device=device())
        dist.all_reduce(total) if dist.get_world_size() > 1 else None
        assert total.tolist() == [dist.get_world_size()] * 3
        time.sleep(0.1 if late_rank == rank + 1 else 0.0)
        recv, handle = sent.receive()
        tdkernels.synchronize()
        for name, got, whole in zip(recv._fields, recv, expected, strict=True):
            assert got is None and whole is None or same(got[: case.num_rows], whole[: case.num_rows].cpu()), name

        expert_out = case.all_out.new_zeros(recv.x.shape[0], 33).to(device())
        expert_out[: case.num_rows] = case.expert_out()
        sent = tdkernels.ep_combine_send(expert_out, handle)
        between, _ = case.dispatch(config=config, **options)  # allowed, since no dispatch is pending
        y = sent.receive()
        case.check_combined(y, combine=combine)
        assert same(y, tdkernels.ep_combine(expert_out, handle).cpu()), "y"
        assert same(between.x[: case.num_rows], expected.x[: case.num_rows].cpu()), "dispatch between send and receive"


def requires_receive_before_next_send():
    """A pending dispatch (combine) must be received before the next dispatch (combine) is sent."""
    case = case_of(UNEVEN, 2, 3, 16, seed=12)
    recv, handle = case.dispatch()
    expert_out = case.expert_out()
    operands = (case.x, case.ids, case.weights)
    sent = tdkernels.ep_dispatch_send(*operands, num_experts=case.experts)
    for call in (
        lambda: tdkernels.ep_dispatch_send(*operands, num_experts=case.experts), lambda: case.dispatch(),
        lambda: tdkernels.ep_dispatch(case.x, handle),
    ):
        with pytest.raises(RuntimeError, match="ep_dispatch: an earlier dispatch of this group .* receive it first"):
            call()
    case.check_combined(tdkernels.ep_combine(expert_out, handle))
    recv, handle = sent.receive()
    case.check_received(recv)
    with pytest.raises(RuntimeError, match="nothing of this dispatch is left"):
        sent.receive()

    sent = tdkernels.ep_combine_send(expert_out, handle)
    for call in (tdkernels.ep_combine_send, tdkernels.ep_combine):
        with pytest.raises(RuntimeError, match="an earlier combine of this group .* receive it first"):
            call(expert_out, handle)
    case.check_received(case.dispatch()[0])
    case.check_combined(sent.receive())
    with pytest.raises(RuntimeError, match="nothing of this combine is left"):
        sent.receive()

    recv, handle = case.dispatch()
    case.check_received(recv)
    case.check_combined(tdkernels.ep_combine(expert_out, handle))


def receives_only_once():
    """A dispatch can be received only once, even if another one with the same routing is pending."""
    case = case_of(UNEVEN, 2, 3, 16, seed=13)
    handle = case.dispatch()[1]
    other = case.x + 1
    first = tdkernels.ep_dispatch_send(case.x, handle)
    recv, _ = first.receive()
    second = tdkernels.ep_dispatch_send(other, handle)
    with pytest.raises(RuntimeError, match="nothing of this dispatch is left"):
        first.receive()
    case.check_received(recv, weighted=False)
    recv, _ = second.receive()
    assert same(recv.x, case.received(case.all_x + 1))


def separate_phases_have_no_gradient():
    case = case_of(3, 2, 2, 8, FP32, seed=14)
    x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
    _, handle = case.dispatch()
    rows = case.expert_out().requires_grad_()
    for call in (
        lambda: tdkernels.ep_dispatch_send(x, case.ids, num_experts=case.experts),
        lambda: tdkernels.ep_dispatch_send(case.x, case.ids, weights, num_experts=case.experts),
        lambda: tdkernels.ep_combine_send(rows, handle),
        lambda: tdkernels.ep_combine_send(case.expert_out(), handle, weights),
    ):
        with pytest.raises(ValueError, match="_send: separate send and receive have no gradient"):
            call()
    with torch.no_grad():
        recv, handle = tdkernels.ep_dispatch_send(x, case.ids, weights, num_experts=case.experts).receive()
        y = tdkernels.ep_combine_send(rows, handle).receive()
    case.check_received(recv)
    case.check_combined(y)
    case.weights = weights
    handle = case.dispatch()[1]  # the combine would have a gradient, since the weights require one
    with pytest.raises(ValueError, match="_send: separate send and receive have no gradient"):
        tdkernels.ep_combine_send(case.expert_out(), handle)
