"""Test bodies for ep_dispatch and ep_combine that apply only to multi-node groups. Every rank runs them.

``local`` is the number of ranks of a simulated node. The bodies in cases.py and rank_cases.py also run on simulated
nodes, without changes, through ``tests.support.simulated_nodes.on_nodes``.
"""

import collections
import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import PeerTimeoutError
from tdkernels.ops.experts.dispatch.multinode import kernel_combine, routing
from tdkernels.symm.backends.emulated_network import EmulatedNetwork
from tdkernels.symm.workspace import Workspace
from tests.ops.experts.dispatch.cases import SMALL, case_of, config_of
from tests.ops.experts.dispatch.oracle import BF16, FP32, Routed
from tests.ops.experts.dispatch.rank_cases import dispatch_and_combine
from tests.support.ranks import device
from tests.support.simulated_nodes import a_group_on_nodes, reseed
from tests.support.subset import THOROUGH
from tests.test_protocol import failure_of, poison, timeout

SEEDS = 50 if THOROUGH else 12  # delivery orders of the network


def is_correct_for_any_network_order(combine):
    """Make small calls back to back, each with another network order; some exchange the counts again."""
    config = config_of({**SMALL, "num_senders": 1, "num_receivers": 1, "combine": combine})
    cases = [case_of([2, 1, 0, 1], 1, 2, 3, FP32), case_of([1, 3, 2, 0], 1, 2, 3, FP32, ids="near")]
    handles = [case.dispatch(config=config)[1] for case in cases]
    rank_rng = random.Random(dist.get_rank())
    for seed in range(SEEDS):
        reseed(seed)
        case = cases[seed % 2]
        if seed % 10 > 7:
            handles[seed % 2] = case.dispatch(config=config)[1]
        recv, handle = tdkernels.ep_dispatch(case.x, handles[seed % 2], case.weights)
        y = tdkernels.ep_combine(case.expert_out(), handle)
        case.check_received(recv)
        case.check_combined(y, combine=combine)
        if rank_rng.random() < 0.2:
            time.sleep(rank_rng.uniform(0, 0.01))


def reuses_poisoned_memory():
    for seed in range(3):
        case = case_of([3, 0, 5, 2], 2, 2, 9, seed=seed)
        dispatch_and_combine(case, SMALL)
        poison()
        dispatch_and_combine(case, SMALL)


def is_bitwise_deterministic():
    """Forward and backward are bitwise equal for any network order."""
    case = case_of([3, 2, 0, 1], 3, 2, 40, values="normal", seed=7)
    rows = case.expert_out()
    dy = case.draw(sum(case.tokens), 40, BF16)[case.mine].to(device())
    first = None
    for seed in range(3):
        reseed(seed)
        x, weights, out = (tensor.clone().requires_grad_() for tensor in (case.x, case.weights, rows))
        recv, handle = tdkernels.ep_dispatch(x, case.ids, weights, num_experts=case.experts, config=config_of(SMALL))
        y = tdkernels.ep_combine(out, handle)
        gradients = torch.autograd.grad([recv.x.float().sum(), y], [x, out, weights], [None, dy])
        tdkernels.synchronize()
        results = [recv.x, y, *gradients]
        first = first or results
        for name, one, other in zip(("recv.x", "y", "dx", "dexpert_out", "dweights"), first, results, strict=True):
            assert torch.equal(one, other), f"{name} has other bits with seed {seed}"


@contextlib.contextmanager
def counted_bytes():
    """Count the bytes that this rank puts to each peer within this context: {peer: bytes}."""
    sent = collections.Counter()
    put = EmulatedNetwork.put

    def counting_put(network, dst, src, num_bytes, peer, *signal):
        sent[peer] += num_bytes
        put(network, dst, src, num_bytes, peer, *signal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedNetwork, "put", counting_put)
        yield sent


def sends_once_per_node(local):
    """Network traffic stays on rails, and each token is sent once per destination node, and returned once."""
    case = case_of([4, 3, 5, 2], 3, 2, 50, FP32, ids="distinct", seed=1)
    rank = dist.get_rank()
    source = torch.repeat_interleave(torch.arange(case.world_size), torch.tensor(case.tokens))
    with counted_bytes() as dispatched:
        handle = case.dispatch()[1]
    with counted_bytes() as combined:
        tdkernels.ep_combine(case.expert_out(), handle)
    for peer in range(case.world_size):
        if peer == rank or peer % local != rank % local:
            assert dispatched[peer] == combined[peer] == 0, (
                f"{dispatched[peer]} and {combined[peer]} bytes to rank {peer}"
            )
            continue
        tokens_for_peer = [
            (case.dest // local == other // local).logical_and(case.valid).any(1) & (source == own)
            for own, other in ((rank, peer), (peer, rank))
        ]
        outgoing, incoming = (int(tokens.sum()) for tokens in tokens_for_peer)
        counts = routing.line_bytes(case.experts, case.world_size, local)
        slot = routing.crossing_slot_memory(200, 0, 3, local)
        assert dispatched[peer] == counts + outgoing * slot, (
            f"{dispatched[peer]} bytes to rank {peer} for {outgoing} tokens"
        )
        slot = routing.sum_slot_memory(200, 3)
        assert combined[peer] == incoming * slot, f"{combined[peer]} bytes back to rank {peer} for {incoming} tokens"


# ---- late and missing ranks ----


def waits_for_all_chunks():
    """Rank 1 delays each chunk to its peer on the node; chunks with tokens of the node itself come last."""
    case = case_of([4, 3, 2, 2], 2, 2, 9, FP32, ids="near")
    handle = case.dispatch(config=config_of(SMALL))[1]
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))
    case.all_out = -case.all_out
    send = kernel_combine.send_chunk

    def delayed_send(*args):
        time.sleep(0.02)
        send(*args)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(kernel_combine, "send_chunk", delayed_send)
        for _ in range(2):
            case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))


def times_out_on_missing_rank(local, missing, when):
    """Return the peer on which this rank times out if one rank omits a call; None on the missing rank.

    Args:     missing: the rank that omits the call; when: the step of the call, "counts", "tokens" or "sums"
    """
    with a_group_on_nodes(local) as group:
        case = Routed([2] * dist.get_world_size(), 2, dist.get_world_size(), 8, local_world_size=local)
        handle = case.dispatch(group=group)[1]
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle, group=group))
        call = _calls(case, handle, group)[when]
        dist.barrier()
        error = None
        if dist.get_rank() != missing:
            with timeout(1.0):
                error = failure_of(call)
            assert type(error) is PeerTimeoutError, repr(error)
            assert error.rank == dist.get_rank() and error.seen < error.expected
            again = failure_of(call)
            assert str(again) == str(error), f"{again!r} after {error!r}"
        dist.barrier()
        del group, handle, call
    return error and error.peer


def _calls(case, handle, group):
    expert_out = case.expert_out()
    return {
        "counts": lambda: case.check_received(case.dispatch(group=group)[0]),
        "tokens": lambda: case.check_received(
            tdkernels.ep_dispatch(case.x, handle, case.weights, group=group)[0]
        ),
        "sums": lambda: case.check_combined(tdkernels.ep_combine(expert_out, handle, group=group)),
    }


def times_out_on_late_rank(local, late, short_timeout_rank, when):
    """Return this rank's outcome of a call if rank ``late`` is late and one rank has a shorter timeout."""
    rank = dist.get_rank()
    with a_group_on_nodes(local) as group:
        case = Routed([3] * dist.get_world_size(), 2, dist.get_world_size(), 8, ids="distinct", local_world_size=local)
        handle = case.dispatch(group=group)[1]
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle, group=group))
        call = _calls(case, handle, group)[when]
        dist.barrier()
        if rank == late:
            time.sleep(0.9)
        with timeout(0.3 if rank == short_timeout_rank else 2.0):
            try:
                call()
                answer = "right"
            except PeerTimeoutError as error:
                answer = f"missed {error.peer}"
                error.__traceback__ = None
        dist.barrier()
        del group, handle, call
    return answer


def reports_disagreement(local):
    """Every rank reports a disagreement about the width of x, and the group stays usable."""
    with a_group_on_nodes(local) as group:
        world_size, differs = dist.get_world_size(), dist.get_rank() == 1
        case = Routed([3] * world_size, 2, world_size, 24 if differs else 16, local_world_size=local)
        error = failure_of(case.dispatch, group=group)
        assert type(error) is ValueError, repr(error)
        assert "ep_dispatch: the ranks disagree: width is 16 on rank" in str(error), str(error)
        case = Routed([3] * world_size, 2, world_size, 16, local_world_size=local)
        dispatch_and_combine(case, group=group)
        del group


def sends_nothing_on_overflow():
    """If the capacity is too small and the host does not wait, the kernels run but send no rows."""
    case = case_of([3, 4, 2, 5], 2, 2, 8, ids="last", seed=4)
    local = case.local_world_size
    with counted_bytes() as sent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "_raise_note", lambda workspace, in_call: None)  # as on a GPU, where it is read later
        recv, handle = case.dispatch(max_tokens=3)
        assert not recv.splits.any()
        y = tdkernels.ep_combine(torch.full((3, 8), torch.nan, dtype=BF16, device=device()), handle)
        assert not y.any()
    counts = routing.line_bytes(case.experts, case.world_size, local)
    assert set(sent.values()) == {counts}, f"bytes other than the counts were sent: {sent}"
    error = failure_of(tdkernels.synchronize)
    assert type(error) is ValueError and "max_tokens=3 is too small" in str(error), repr(error)
    dispatch_and_combine(case)
