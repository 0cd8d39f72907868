"""One rank raises an error at once, and its peers learn of it from their devices (``symm.early_error``).

The last of three ranks has more tokens than max_tokens_per_rank. On a GPU the hosts of its peers continue with the
call. If they reach a consensus check of that call, they must raise the error there, because the last rank does not take
part. On CPU ranks ``host_ahead`` suppresses the check for the error after each launch.
"""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, EpMoeConfig
from tdkernels.symm.early_error import early, raise_early_errors
from tdkernels.symm.group import group_state
from tdkernels.symm.mailbox import Mailbox
from tdkernels.symm.streams import StreamOrder
from tests.ops.experts.ep_moe.cases import Layer
from tests.support.ranks import a_group, device, on_ranks
from tests.test_failures import host_ahead
from tests.test_protocol import failure_of, timeout

SMALL = {"num_senders": 1, "num_receivers": 1, "num_warps": 1}
LOW_LATENCY, TWO_PHASE = EpConfig(**SMALL), EpConfig(**SMALL, direct_tokens=0)
BOUND = 3


def dispatch(config, exceeds, group):
    """Return x, the received tokens and the handle. ``exceeds``: whether the last rank has too many tokens."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    tokens = BOUND + (exceeds and is_last)
    x = torch.full((tokens, 8), dist.get_rank() + 1.0, device=device(), requires_grad=True)
    ids = torch.tensor([[0, 2]], device=device()).expand(tokens, -1)
    options = {"num_experts": 3, "max_tokens_per_rank": BOUND, "config": config, "group": group}
    recv, handle = tdkernels.ep_dispatch(x, ids, **options)
    return x, recv, handle


def combine(config, exceeds, group):
    x, recv, handle = dispatch(config, exceeds, group)
    y = tdkernels.ep_combine(recv.x.detach(), handle, group=group)
    assert exceeds or torch.equal(y, 2 * x)


def backward(config, exceeds, group):
    x, recv, _ = dispatch(config, exceeds, group)
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


def make_another_call(config):
    """All ranks make another new call before the peers read the error. Its consensus check does not raise the error."""
    is_last = dist.get_rank() == 2
    with a_group() as group, timeout(30.0):
        dispatch(config, False, group)  # the next dispatch needs no consensus check
        with host_ahead():
            error = failure_of(dispatch, config, True, group)
            gathered = tdkernels.all_gather(torch.full((2, 8), dist.get_rank() + 1.0, device=device()), group=group)
        assert gathered[::2, 0].tolist() == [1.0, 2.0, 3.0], gathered
        later = failure_of(tdkernels.synchronize)
        first, second = (error, later) if is_last else (later, error)
        message = "x [4, 8] has more tokens" if is_last else "rank 2 has 4 tokens, more"
        assert type(first) is ValueError and message in str(first) and second is None, (error, later)
        combine(config, False, group)
        tdkernels.synchronize()
        assert group_state(group).interrupted is None
        del group


@pytest.mark.parametrize("config", [LOW_LATENCY, TWO_PHASE], ids=["low latency", "two-phase"])
def test_another_call_does_not_raise_an_early_error(config):
    on_ranks(3, make_another_call, config)


# ---- the mailbox ----


class CheckedMailbox(Mailbox):
    def check(self, in_call=True):
        if self._note_words[0]:
            self._raise_note(self.note_call)


def new_mailbox(arriving):
    """Return (Mailbox, waits, errors that break its group). A wait for the launches writes the note ``arriving``."""
    waits, broken = [], []

    def wait_for_last(until):
        waits.append(until)
        mailbox._note_words[:] = arriving

    order = SimpleNamespace(wait_for_last=wait_for_last)
    group = SimpleNamespace(rank=2, world_size=3, break_off=broken.append, stream_order=lambda device: order)
    mailbox = CheckedMailbox(group, torch.device("cpu"), "counts")
    mailbox._make_note()
    return mailbox, waits, broken


def early_error(name, kind, first, second, third):
    return early(ValueError(f"rank {first}"))


def test_a_dismissed_note_does_not_displace_that_of_the_next_call():
    mailbox, waits, broken = new_mailbox(arriving=[1, 5, 0, 0, 1])
    mailbox.expect_note(early_error, may_be_early=True)
    mailbox.dismiss_note(1)
    mailbox.expect_note(early_error, may_be_early=True)
    assert len(waits) == 1 and mailbox._note_words[0] == 0, "the kernel of the second call may find the mailbox full"
    mailbox._note_words[:] = [1, 6, 0, 0, 2]
    with pytest.raises(ValueError, match="rank 6"):
        mailbox.check()
    mailbox.dismiss_note(2)
    mailbox._note_words[:] = [1, 6, 0, 0, 2]
    mailbox.check()
    mailbox.expect_note(early_error)
    assert len(waits) == 1, "the note had arrived"
    assert not broken


def test_an_early_error_is_raised_in_its_own_call_only():
    mailbox, _, broken = new_mailbox(arriving=None)
    for _ in range(2):
        mailbox.expect_note(early_error, may_be_early=True)
    mailbox._note_words[:] = [1, 5, 0, 0, 1]
    mailbox.raise_early_error(2)
    assert mailbox._note_words[0], "the note must be kept"
    with pytest.raises(ValueError, match="rank 5"):
        mailbox.raise_early_error(1)  # the launches of call 2 may wait for the rank that has left call 1
    assert len(broken) == 1


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
    state = SimpleNamespace(
        call_in_progress=("", 0), workspaces=workspaces, stream_order=lambda device: order,
        error_on=lambda device: None,
    )
    raise_early_errors(state)
    assert not asked and not read_at, "another call must not wait"
    state.call_in_progress = "counts", 7
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


def test_failure_during_the_wait_is_raised():
    """A launch fails while the host waits for it: the host does not take part in the consensus check."""
    failures = []
    order = SimpleNamespace(wait_for_last=lambda until: failures.append(tdkernels.PlanMismatchError("late")))
    workspace = SimpleNamespace(may_have_early_errors=True, raise_early_error=lambda call: None)
    state = SimpleNamespace(
        call_in_progress=("counts", 7), workspaces={("counts", torch.device("cpu")): workspace},
        stream_order=lambda device: order, error_on=lambda device: failures[0] if failures else None,
    )
    with pytest.raises(tdkernels.PlanMismatchError, match="late"):
        raise_early_errors(state)
