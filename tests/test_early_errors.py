"""One rank raises an error at once, and its peers learn of it from their devices (``symm.early_error``).

The last of three ranks has more tokens than max_tokens_per_rank. On a GPU the hosts of its peers continue with the
call. If they reach a consensus check, they must raise the error there, because the last rank does not take part. On CPU
ranks ``host_ahead`` suppresses the check for the error after each launch.
"""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, EpMoeConfig
from tdkernels.symm.early_error import raise_early_errors
from tdkernels.symm.group import group_state
from tdkernels.symm.streams import StreamOrder
from tests.ops.experts.ep_moe.cases import Layer
from tests.support.ranks import a_group, device, on_ranks
from tests.test_failures import host_ahead
from tests.test_protocol import failure_of, timeout

SMALL = {"num_senders": 1, "num_receivers": 1, "num_warps": 1}
LOW_LATENCY, TWO_PHASE = EpConfig(**SMALL), EpConfig(**SMALL, direct_tokens=0)
BOUND = 3


def dispatch_and_combine(config, exceeds, group):
    """Dispatch, combine and backward. ``exceeds``: whether the last rank has too many tokens."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    tokens = BOUND + (exceeds and is_last)
    x = torch.full((tokens, 8), dist.get_rank() + 1.0, device=device(), requires_grad=True)
    ids = torch.tensor([[0, 2]], device=device()).expand(tokens, -1)
    options = {"num_experts": 3, "max_tokens_per_rank": BOUND, "config": config, "group": group}
    recv, handle = tdkernels.ep_dispatch(x, ids, **options)
    return x, recv, handle


def combine(config, exceeds, group):
    x, recv, handle = dispatch_and_combine(config, exceeds, group)
    y = tdkernels.ep_combine(recv.x.detach(), handle, group=group)
    assert exceeds or torch.equal(y, 2 * x)


def backward(config, exceeds, group):
    x, recv, _ = dispatch_and_combine(config, exceeds, group)
    rows = torch.arange(len(recv.x), device=device()) < recv.splits.sum()
    recv.x[rows].sum().backward()
    assert exceeds or torch.equal(x.grad, torch.full_like(x, 2.0))


def all_to_all_backward(config, exceeds, group):
    tokens = BOUND + (exceeds and dist.get_rank() == 2)
    x = torch.ones(tokens, 8, device=device(), requires_grad=True)
    splits = torch.tensor([1, 0, tokens - 1], device=device())
    out, *_ = tdkernels.all_to_all(x, splits, max_tokens_per_rank=BOUND, config=config, group=group)
    out.sum().backward()
    assert exceeds or torch.equal(x.grad, torch.ones_like(x))


def ep_moe(config, exceeds, group):
    layer = Layer([BOUND, 1, BOUND + exceeds], 2, 1, 16, 8, torch.float32, group=group)
    results = layer.run(max_tokens_per_rank=BOUND, config=config, group=group)
    if not exceeds:
        layer.check(results)


def known_forward(config, exceeds, group):
    """Only the backward of ``ep_moe`` needs a consensus check."""
    if exceeds:
        layer = Layer(BOUND, 2, 1, 16, 8, torch.float32, group=group)
        with torch.no_grad():
            layer.call(max_tokens_per_rank=BOUND, config=config, group=group)
    ep_moe(config, exceeds, group)


CALLS = {
    "combine, low latency": (combine, LOW_LATENCY),
    "combine, two-phase": (combine, TWO_PHASE),
    "combine, config selected": (combine, None),
    "backward, low latency": (backward, LOW_LATENCY),
    "all_to_all backward": (all_to_all_backward, LOW_LATENCY),
    "ep_moe": (ep_moe, None),
    "fused ep_moe": (ep_moe, EpMoeConfig(method="fused")),
    "fused ep_moe, known forward": (known_forward, EpMoeConfig(method="fused")),
}


def raise_before_consensus(name):
    """Every rank raises the error once, none waits for another one, and the next call is correct."""
    call, config = CALLS[name]
    with a_group() as group:
        with host_ahead(), timeout(30.0):
            error = failure_of(call, config, True, group)
        assert type(error) is ValueError and "than max_tokens_per_rank" in str(error), repr(error)
        assert failure_of(tdkernels.synchronize) is None
        call(config, False, group)
        tdkernels.synchronize()
        assert group_state(group).interrupted is None
        del group


@pytest.mark.parametrize("name", list(CALLS))
def test_peers_raise_an_early_error_before_a_consensus_check(name):
    on_ranks(3, raise_before_consensus, name)


def raise_in_another_call():
    """The peers reach the consensus check of a call that the last rank may make later: the group becomes unusable."""
    with a_group() as group, timeout(5.0):
        x = torch.ones(2, 8, device=device())
        with host_ahead():
            if dist.get_rank() == 2:
                error = failure_of(dispatch_and_combine, LOW_LATENCY, True, group)
                lost = failure_of(tdkernels.all_gather, x, group=group)
                assert isinstance(lost, tdkernels.PeerTimeoutError), repr(lost)
            else:
                dispatch_and_combine(LOW_LATENCY, True, group)
                error = failure_of(tdkernels.all_gather, x, group=group)
        assert type(error) is ValueError and "than max_tokens_per_rank" in str(error), repr(error)
        if dist.get_rank() != 2:
            later = failure_of(tdkernels.all_gather, x, group=group)
            assert type(later) is RuntimeError and "in place of a later call" in str(later), repr(later)
        del group


def test_an_early_error_in_another_call_breaks_the_group():
    on_ranks(3, raise_in_another_call)


# ---- the wait for launches on a GPU ----


@pytest.mark.parametrize("queries", [3, None], ids=["launches end", "launches do not end"])
@pytest.mark.parametrize("capturing", [False, True], ids=["eager", "capture"])
def test_host_waits_for_launches(queries, capturing, monkeypatch):
    """The note is read after the last launch has ended, or after half of the timeout, and never during capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    asked, read_at = [], []
    order = StreamOrder(torch.device("cuda"))
    order._last_event = SimpleNamespace(query=lambda: asked.append(1) or len(asked) == queries)
    workspace = SimpleNamespace(
        may_have_early_errors=True, raise_early_error=lambda call: read_at.append((len(asked), call))
    )
    workspaces = {("counts", torch.device("cuda")): workspace}
    state = SimpleNamespace(call_in_progress=("counts", 7), workspaces=workspaces, stream_order=lambda device: order)
    start = time.monotonic()
    with timeout(1.0):
        raise_early_errors(state)
    seconds = time.monotonic() - start
    if capturing:
        assert not asked and not read_at
    elif queries is None:
        assert len(read_at) == 1 and 0.5 <= seconds < 10.0, seconds
    else:
        assert read_at == [(queries, 7)]
