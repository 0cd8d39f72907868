"""Test bodies for ep_dispatch and ep_combine: capacity, ids out of range and invalid arguments."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tests.ops.collectives.cases import same
from tests.ops.experts.dispatch.cases import UNEVEN, case_of, config_of, expected_gradients_of_combine
from tests.ops.experts.dispatch.oracle import FP32
from tests.support.ranks import device
from tests.test_protocol import failure_of

# ---- capacity ----


def respects_capacity(changes):
    """With an exact and with a larger capacity, the first rows are as without one; the other rows are ignored."""
    case = case_of(UNEVEN, 3, 3, 24, FP32, seed=8)
    combine = "per_rank" if changes is None else changes.get("combine", "per_rank")
    for capacity in (max(case.capacity()), 100):
        case.x.requires_grad_()
        case.weights.requires_grad_()
        recv, handle = case.dispatch(max_tokens=capacity, config=config_of(changes))
        case.check_received(recv, capacity=capacity)
        expert_out = torch.full((capacity, 24), torch.nan, device=device())
        expert_out[: case.num_rows] = case.expert_out()
        y = tdkernels.ep_combine(expert_out.requires_grad_(), handle)
        case.check_combined(y, combine=combine)

        all_dy = case.draw(sum(case.tokens), 24, FP32)
        d_out, dw = torch.autograd.grad(y, [expert_out, case.weights], all_dy[case.mine].to(device()))
        d_rows, exact, low = expected_gradients_of_combine(case, all_dy, case.all_weights)
        assert same(d_out[: case.num_rows], d_rows), "dexpert_out"
        assert not d_out[case.num_rows :].any(), "unused rows must not have a gradient"
        case.check_numbers("dtopk_weights of combine", dw, exact, low)

        d_assignments = case.draw(case.all_ids.numel(), 24, FP32)
        d_recv = torch.full((capacity, 24), torch.nan, device=device())
        d_recv[: case.num_rows] = d_assignments[case.order].to(device())
        d_weights = torch.full((capacity,), torch.nan, device=device())
        d_weights[: case.num_rows] = 3.0
        dx, dw = torch.autograd.grad([recv.x, recv.topk_weights], [case.x, case.weights], [d_recv, d_weights])
        tdkernels.synchronize()
        case.check_numbers("dx of dispatch", dx, *case.combined(d_assignments, None, combine))
        assert same(dw, torch.where(case.valid, 3.0, 0.0)[case.mine]), "dtopk_weights of dispatch"


def dispatch_error(case, **options):
    """Return the error of an invalid dispatch. On a GPU it may be raised after the call, which then sent no rows."""
    received = []
    error = failure_of(lambda: received.append(case.dispatch(**options)[0]))
    assert not any(recv.splits.any() for recv in received), "splits are not zero"
    return error


def rejects_overflow(spec, limit):
    """If the capacity is one row too small, every rank raises the error once, and the next call is correct."""
    case = case_of(**spec)
    rows, staged = case.capacity()
    needed = (rows, staged)[limit]
    assert needed > (rows, staged)[1 - limit], "only one of the two limits must be exceeded"
    for _ in range(2):  # both buffers of the workspace
        error = dispatch_error(case, max_tokens=needed - 1)
        assert type(error) is ValueError, repr(error)
        for message in (f"ep_dispatch: max_tokens={needed - 1} is too small", f"{rows} rows", f"{staged} tokens"):
            assert message in str(error), f"{message} in {error}"
        tdkernels.synchronize()  # does not raise the error again
    recv, handle = case.dispatch(max_tokens=needed)
    case.check_received(recv, capacity=needed)
    expert_out = torch.zeros(needed, case.all_x.shape[1], dtype=case.dtype, device=device())
    expert_out[: case.num_rows] = case.expert_out()
    case.check_combined(tdkernels.ep_combine(expert_out, handle))
    recv, _ = case.dispatch()
    case.check_received(recv)


def invalid_id_message(case, offender, wrong):
    """Return the message that this rank raises for an invalid id on rank ``offender``."""
    message = f"ep_dispatch: topk_ids of rank {offender} are out of range: "
    message += f"each must be from 0 to {case.experts - 1}, or -1 for none"
    mine = dist.get_rank() == offender
    return f"{message}; here topk_ids {list(case.ids.shape)} has {wrong}" if mine else message


def rejects_invalid_ids(wrong, where, id_dtype, changes):
    """If one rank has an invalid id, every rank raises an error that names the rank, once; the next call is correct."""
    case = case_of(UNEVEN, 3, 3, 8, seed=9)
    offender = [rank for rank, tokens in enumerate(case.tokens) if tokens][where]
    right = case.ids
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    for max_tokens in (None, 50):
        case.ids = right.to(id_dtype).clone()
        if dist.get_rank() == offender:
            case.ids[where, 1] = wrong
        error = dispatch_error(case, max_tokens=max_tokens, config=config)
        assert type(error) is ValueError, repr(error)
        assert str(error) == invalid_id_message(case, offender, wrong), str(error)
        tdkernels.synchronize()
        case.ids = right
        recv, handle = case.dispatch(config=config)
        case.check_received(recv)
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine=combine)


# ---- invalid arguments ----


def rejects_invalid_arguments():
    """Each rank rejects invalid arguments locally, before any launch; later calls are correct."""
    case = case_of(4, 2, 3, 8)
    x, ids, weights, experts = case.x, case.ids, case.weights, case.experts
    recv, handle = case.dispatch()
    rows = case.expert_out()
    world_size = dist.get_world_size()

    def dispatch(**changes):
        arguments = {"x": x, "topk_ids": ids, "topk_weights": weights, "num_experts": experts, **changes}
        return tdkernels.ep_dispatch(arguments.pop("x"), **arguments)

    def combine(**changes):
        arguments = {"expert_out": rows, "handle": handle, **changes}
        return tdkernels.ep_combine(arguments.pop("expert_out"), **arguments)

    table = [
        (dispatch, dict(x=[1.0]), TypeError, "x must be a torch.Tensor"),
        (dispatch, dict(x=x.int()), TypeError, "x is torch.int32"),
        (dispatch, dict(x=x.double()), TypeError, "x is torch.float64"),
        (dispatch, dict(x=x.to("meta")), ValueError, "x is on meta|topk_ids is on"),
        (dispatch, dict(x=x[0]), ValueError, r"x must have 2 dimensions \[rows, H\], its shape is \[8\]"),
        (dispatch, dict(x=x[:, :0]), ValueError, r"x \[4, 0\] has empty rows"),
        (dispatch, dict(x=x.to_sparse()), TypeError, "x must be a plain dense tensor"),
        (dispatch, dict(x=x[:3]), ValueError, r"topk_ids must be \[T, k\] with the T = 3 .*\[4, 2\]"),
        (dispatch, dict(topk_ids=None), TypeError, "topk_ids must be a torch.Tensor"),
        (dispatch, dict(topk_ids=ids.float()), TypeError, "topk_ids is torch.float32"),
        (dispatch, dict(topk_ids=ids.to(torch.int16)), TypeError, "topk_ids is torch.int16"),
        (dispatch, dict(topk_ids=ids[:, 0]), ValueError, r"topk_ids must be \[T, k\]"),
        (dispatch, dict(topk_ids=ids[:, :0]), ValueError, r"topk_ids \[4, 0\] must have from 1"),
        (dispatch, dict(topk_ids=ids[:, :1].expand(4, experts + 1)), ValueError, f"from 1 to num_experts = {experts}"),
        (dispatch, dict(topk_ids=ids.to("meta")), ValueError, "topk_ids is on meta"),
        (dispatch, dict(topk_weights=weights[:, :1]), ValueError, r"topk_weights \[4, 1\] .* topk_ids \[4, 2\]"),
        (dispatch, dict(topk_weights=weights.double()), TypeError, "topk_weights is torch.float64"),
        (dispatch, dict(topk_weights=ids), TypeError, "topk_weights is torch.int64"),
        (dispatch, dict(topk_weights=1.0), TypeError, "topk_weights must be a torch.Tensor"),
        (dispatch, dict(num_experts=None), ValueError, "num_experts must be a positive integer, not None"),
        (dispatch, dict(num_experts=0), ValueError, "num_experts must be a positive integer, not 0"),
        (dispatch, dict(num_experts=6.0), ValueError, "num_experts must be a positive integer, not 6.0"),
        (dispatch, dict(num_experts=True), ValueError, "num_experts must be a positive integer, not True"),
        (dispatch, dict(scales=weights[:3]), ValueError, r"scales must be \[T\] or \[T, S\] with the T = 4"),
        (dispatch, dict(scales=weights[:, :, None]), ValueError, r"scales must be .*\[4, 2, 1\]"),
        (dispatch, dict(scales=2.0), TypeError, "scales must be a torch.Tensor"),
        (dispatch, dict(quantize="fp4"), ValueError, "quantize must be None or \"fp8\", not 'fp4'"),
        (dispatch, dict(quantize=True), ValueError, "quantize must be None or \"fp8\", not True"),
        (dispatch, dict(quantize="fp8", scales=weights), ValueError, "quantize needs .* no scales"),
        (dispatch, dict(quantize="fp8", x=x.to(torch.float8_e5m2)), ValueError, "quantize needs an x in bf16"),
        (dispatch, dict(max_tokens=0), ValueError, "max_tokens must be a positive integer below .*, not 0"),
        (dispatch, dict(max_tokens=-1), ValueError, "max_tokens must be a positive integer below .*, not -1"),
        (dispatch, dict(max_tokens=1 << 30), ValueError, "max_tokens must be a positive integer below"),
        (dispatch, dict(max_tokens=8.0), ValueError, "max_tokens must be a positive integer below .*, not 8.0"),
        (dispatch, dict(config=tdkernels.CollectiveConfig()), TypeError, "config must be an EpConfig or None"),
        (dispatch, dict(config=EpConfig(combine="sum")), ValueError, "config cannot run: combine must be"),
        (dispatch, dict(group="world"), TypeError, "group"),
        (combine, dict(expert_out=rows[:-1]), ValueError, f"must have the {case.num_rows} rows of recv.x"),
        (combine, dict(expert_out=rows[0]), ValueError, "expert_out must have 2 dimensions"),
        (combine, dict(expert_out=rows[:, :0]), ValueError, "expert_out .* has empty rows"),
        (combine, dict(expert_out=rows.int()), TypeError, "expert_out is torch.int32"),
        (combine, dict(expert_out=recv.x.to(torch.float8_e4m3fn)), TypeError, "expert_out is torch.float8_e4m3fn"),
        (combine, dict(expert_out=rows.to("meta")), ValueError, "expert_out is on meta"),
        (combine, dict(expert_out=None), TypeError, "expert_out must be a torch.Tensor"),
        (combine, dict(handle=recv), TypeError, "handle must be the EpHandle of an ep_dispatch, not EpTokens"),
        (combine, dict(topk_weights=weights[:3]), ValueError, r"topk_weights \[3, 2\]"),
        (combine, dict(topk_weights=weights.double()), TypeError, "topk_weights is torch.float64"),
        (combine, dict(config=EpConfig(num_warps=3)), ValueError, "config cannot run: num_warps"),
    ]
    if world_size > 1:
        message = f"num_experts {experts + 1} must be divisible by the group's {world_size} ranks"
        table.append((dispatch, dict(num_experts=experts + 1), ValueError, message))
    for function, changes, kind, message in table:
        with pytest.raises(kind, match=message) as caught:
            function(**changes)
        assert "group" in changes or str(caught.value).startswith(f"ep_{function.__name__}: "), str(caught.value)
    with pytest.raises(ValueError, match="topk_weights"):
        tdkernels.ep_dispatch(x, handle, weights[:, :1])
    with pytest.raises(ValueError, match=r"x \[3, 8\] must have the 4 tokens of the handle"):
        tdkernels.ep_dispatch(x[:3], handle)
    with pytest.raises(TypeError, match="positional"):
        tdkernels.ep_dispatch(x, ids, weights, experts)
    recv, handle = case.dispatch()
    case.check_received(recv)
    case.check_combined(combine(handle=handle))
