"""Test bodies for ep_dispatch and ep_combine with torch's collectives."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tdkernels.ops.experts.dispatch import counting, low_latency, route
from tdkernels.ops.experts.dispatch import launch as ep_launch
from tdkernels.ops.experts.ep_moe import launch_dispatch_gemm as ep_moe_launch_dispatch_gemm
from tdkernels.ops.experts.ep_moe import launch_gemm_combine as ep_moe_launch_gemm_combine
from tests.ops.experts.dispatch.cases import SMALL, UNEVEN, case_of, computes
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.support.ranks import device
from tests.test_protocol import failure_of

TORCH = EpConfig(method="torch")


@contextlib.contextmanager
def without_symmetric_memory():
    """Fail if the operators for experts allocate a workspace within this context."""

    def fail(*_, **__):
        raise AssertionError("a workspace was requested")

    with pytest.MonkeyPatch.context() as patch:
        for module in (ep_launch, counting, low_latency, ep_moe_launch_dispatch_gemm, ep_moe_launch_gemm_combine):
            patch.setattr(module, "get_workspace", fail)
        yield


def needs_no_symmetric_memory(spec):
    """The torch backend needs no symmetric memory, and no NVSHMEM between nodes."""
    with without_symmetric_memory():
        computes(spec, {"method": "torch", "combine": "per_expert"})


def rejects_mixed_backends():
    """Each rank rejects a combine whose backend differs from that of the dispatch; the next call is correct."""
    case = case_of(UNEVEN, 2, 3, 16, seed=17)
    handles = {config: case.dispatch(config=config)[1] for config in (TORCH, EpConfig(**SMALL))}
    rows = case.expert_out()
    for config, other in zip(handles, reversed(handles), strict=True):
        message = f'ep_combine: config has method "{other.method}", but the dispatch .* went by "{config.method}"'
        with pytest.raises(ValueError, match=message):
            tdkernels.ep_combine(rows, handles[config], config=other)
        combine = "per_expert" if config is TORCH else "per_rank"
        case.check_combined(tdkernels.ep_combine(rows, handles[config], config=config), combine=combine)


def torch_backend_sends_and_receives_separately():
    """The send phase does all the work, for a call with a handle and for one that selects the torch backend."""
    case = case_of(UNEVEN, 2, 3, 16, seed=22)
    for handle in (case.dispatch(config=TORCH)[1], case.ids):
        options = {} if handle is not case.ids else {"num_experts": case.experts, "config": TORCH}
        recv, again = tdkernels.ep_dispatch_send(case.x, handle, case.weights, **options).receive()
        assert again._routing.method == "torch"
        case.check_received(recv)
        sent = tdkernels.ep_combine_send(case.expert_out(), again)
        case.check_combined(sent.receive(), combine="per_expert")


def torch_backend_quantizes_identically():
    """Both backends quantize to the same bits, for values of any magnitude and for NaN."""
    case = case_of(UNEVEN, 2, 3, 300, FP32, values="normal", seed=23)
    case.x *= 2.0 ** torch.randint(-140, 120, case.x.shape, generator=case.generator).float().to(device())
    case.x[:, 5::131] = torch.nan
    case.x[:, 256:] = 0.0
    ours, torchs = (case.dispatch(quantize="fp8", config=config)[0] for config in (EpConfig(**SMALL), TORCH))
    tdkernels.synchronize()
    numbers = ~ours.x.float().isnan()
    assert torch.equal(numbers, ~torchs.x.float().isnan()) and not numbers.all()
    assert torch.equal(ours.scales, torchs.scales)
    assert torch.equal(ours.x.view(torch.uint8)[numbers], torchs.x.view(torch.uint8)[numbers])


def torch_backend_reports_mixed_cached_calls():
    """A mismatch between calls that all ranks have cached is reported, since each dispatch exchanges counts."""
    case = case_of(UNEVEN, 2, 3, 16, seed=24)
    differs = dist.get_rank() == 1
    calls = {
        "max_tokens": lambda other: case.dispatch(config=TORCH, max_tokens=90 if other else 80),
        "dtype": lambda other: tdkernels.ep_dispatch(
            case.x.half() if other else case.x, case.ids, num_experts=case.experts, config=TORCH
        ),
    }
    for name, call in calls.items():
        call(False), call(True)
        error = failure_of(lambda call=call: call(differs))
        assert type(error) is ValueError and f"the ranks disagree: {name} is" in str(error), repr(error)
        call(True)


def torch_backend_reports_different_rows():
    """Rows of different sizes on different ranks are reported, where torch would hang or mix them up.

    None of these calls is cached. The next call is correct.
    """
    case = case_of(UNEVEN, 2, 3, 16, FP32, seed=21)
    differs = dist.get_rank() == 1
    _, handle = case.dispatch(config=TORCH)
    rows = case.expert_out()
    for call in (
        lambda: tdkernels.ep_dispatch(case.x[:, : 7 if differs else 9], handle),
        lambda: tdkernels.ep_dispatch(case.x[:, :5].to(BF16 if differs else FP16), handle),
        lambda: tdkernels.ep_dispatch(case.x[:, :3], handle, case.weights if differs else None),
        lambda: tdkernels.ep_combine(rows[:, :5].to(BF16 if differs else FP16), handle),
    ):
        error = failure_of(call)
        assert type(error) is ValueError and "the ranks disagree" in str(error), repr(error)
        case.check_combined(tdkernels.ep_combine(rows, handle), combine="per_expert")


def torch_backend_reports_errors_on_all_ranks():
    """Too many rows, too many tokens and a disagreement are reported on all ranks."""
    case = case_of(UNEVEN, 2, 3, 16, seed=18)
    rows, _ = case.capacity()
    too_many = max(case.tokens) - 1
    for options, message in (
        ({"max_tokens": rows - 1}, f"ep_dispatch: max_tokens={rows - 1} is too small: a rank receives {rows} rows"),
        ({"max_tokens_per_rank": too_many}, f"has {too_many + 1} tokens, more than max_tokens_per_rank"),
        ({"max_tokens": rows + dist.get_rank()}, "ep_dispatch: the ranks disagree"),
    ):
        if "disagree" in message and dist.get_world_size() == 1:
            continue
        error = failure_of(lambda options=options: case.dispatch(config=TORCH, **options))
        assert type(error) is ValueError and message in str(error), repr(error)
        recv, handle = case.dispatch(config=TORCH)
        case.check_received(recv)
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine="per_expert")


def torch_backend_takes_max_tokens_per_rank():
    case = case_of(UNEVEN, 2, 3, 16, seed=19)
    recv, handle = case.dispatch(config=TORCH, max_tokens_per_rank=max(case.tokens))
    capacity = dist.get_world_size() * max(case.tokens) * 2
    case.check_received(recv, capacity=capacity)
    expert_out = case.all_out.new_zeros(capacity, 16).to(device())
    expert_out[: case.num_rows] = case.expert_out()
    case.check_combined(tdkernels.ep_combine(expert_out, handle), combine="per_expert")


def uses_selected_torch_backend():
    """If tuning selected the torch backend, calls without an explicit config use it and still take any arguments.

    Separate send and receive, and calls without a host wait, still use the kernels.
    """
    case = case_of(UNEVEN, 2, 3, 16, seed=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "choose_config", lambda *_: TORCH)
        assert case.dispatch(max_tokens=60)[1]._routing.method == "fused"
        recv, handle = case.dispatch()
        assert handle._routing.method == "torch"
        case.check_received(recv)
        for config in (None, EpConfig(**SMALL, combine="per_expert")):
            y = tdkernels.ep_combine(case.expert_out(), handle, config=config)
            case.check_combined(y, combine="per_expert")
        case.check_combined(tdkernels.ep_combine_send(case.expert_out(), handle).receive(), combine="per_expert")
        recv, _ = tdkernels.ep_dispatch_send(case.x, handle, case.weights).receive()
        case.check_received(recv)
        recv, handle = tdkernels.ep_dispatch_send(case.x, case.ids, case.weights, num_experts=case.experts).receive()
        assert handle._routing.method == "fused"
        case.check_received(recv)
