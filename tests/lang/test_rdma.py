"""Network primitives: delivery, ordering, and missing fences, on the emulated network and on NVSHMEM."""

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

import tdkernels
from tdkernels import PeerTimeoutError
from tdkernels import lang as td
from tdkernels.symm import get_workspace
from tdkernels.symm.group import group_state
from tests.support.ranks import DEVICE, device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, needs_gpus, reseed
from tests.support.subset import THOROUGH

SEEDS = 50 if THOROUGH else 20
WORDS = 128


@td.jit(network=True)
def exchange_kernel(
    ctx, out_ptr, num_bytes, seed, HOW: tl.constexpr, WAITS: tl.constexpr, WORDS: tl.constexpr
):
    """Send numbers derived from rank and seed to the same local rank of each other node, and store the received ones.

    The buffer has a slot to send from and one for each source.
    """
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    local = td.local_ranks(ctx)
    epoch = td.epoch(ctx) + 1
    half = (epoch % 2).to(tl.int32)
    signal = epoch << 16
    offs = tl.arange(0, WORDS)
    data = td.data_at(ctx, half, me)
    tl.store(td.pointer_to(data, tl.int64) + offs, (seed * 1000 + me).to(tl.int64) * 1000 + offs)
    place = data + (me + 1) * num_bytes
    for step in range(1, ranks // local):
        peer = (me + step * local) % ranks
        if HOW == "put_signal":
            td.put_signal(ctx, place, data, num_bytes, td.signal_at(ctx, half, me), signal, peer)
        else:
            td.put_nbi(ctx, place, data, num_bytes // 2, peer)
            td.put_nbi(ctx, place + num_bytes // 2, data + num_bytes // 2, num_bytes // 2, peer)
            if HOW == "fence":
                td.fence(ctx)
            td.signal(ctx, td.signal_at(ctx, half, me), signal, peer)
    if WAITS != "nothing":
        if WAITS == "quiet":
            td.quiet(ctx)
        tl.store(td.pointer_to(data, tl.int64) + offs, tl.full((WORDS,), -1, tl.int64))
    for step in range(1, ranks // local):
        source = (me + step * local) % ranks
        td.await_put(ctx, td.signal_at(ctx, half, source), signal, source)
        words = tl.load(td.pointer_to(data + (source + 1) * num_bytes, tl.int64) + offs, volatile=True)
        tl.store(out_ptr + source * WORDS + offs, words)
    td.finish(ctx)


def _failing_seeds(local_world_size, how, waits):
    """Return the seeds for which a rank received other data than was sent."""
    wrong = []
    with a_group_on_nodes(local_world_size) as group:
        world_size, rank = group.size(), dist.get_rank(group)
        workspace = get_workspace(group, device(), "exchange", across_nodes=True)
        nbytes = WORDS * 8
        for seed in range(SEEDS):
            workspace.prepare("exchange", {}, nbytes * (world_size + 1), world_size)
            reseed(seed)
            out = torch.full((world_size, WORDS), -7, dtype=torch.int64, device=device())
            workspace.before_launch()
            exchange_kernel[(1,)](workspace.ctx, out, nbytes, seed, HOW=how, WAITS=waits, WORDS=WORDS)
            workspace.after_launch()
            tdkernels.synchronize()
            expected = torch.full_like(out, -7)
            for source in range(world_size):
                if source != rank and source % local_world_size == rank % local_world_size:
                    expected[source] = (seed * 1000 + source) * 1000 + torch.arange(WORDS, device=out.device)
            if not torch.equal(out, expected):
                wrong.append(seed)
            workspace.buffer.barrier()
    return wrong


@pytest.mark.parametrize("how", ["put_signal", "fence"])
@pytest.mark.parametrize("world_size, local_world_size", [(2, 1), (4, 2)])
def test_signal_arrives_after_the_data(world_size, local_world_size, how):
    assert on_ranks(world_size, _failing_seeds, local_world_size, how, "nothing") == [[]] * world_size


def test_source_may_be_overwritten_after_quiet():
    assert on_ranks(2, _failing_seeds, 1, "put_signal", "quiet") == [[], []]


pytestmark = needs_gpus
emulated_only = pytest.mark.skipif(DEVICE == "cuda", reason="GPUs of one machine may preserve the order anyway")


@emulated_only
@pytest.mark.parametrize(
    "how, waits", [("no fence", "nothing"), ("put_signal", "overwrites without quiet")], ids=["no fence", "no quiet"]
)
def test_emulated_network_reveals_missing_fence_and_quiet(how, waits):
    for wrong in on_ranks(2, _failing_seeds, 1, how, waits):
        assert len(wrong) > SEEDS // 10


@td.jit(network=True)
def signal_kernel(ctx, peer, target, FAILS: tl.constexpr, CHECK_FAILED: tl.constexpr):
    """Set two signals on a peer, by ``signal`` and ``put_signal``, optionally after a failed wait."""
    me = td.rank(ctx)
    if FAILS:
        if me == 0:
            td.wait(ctx, td.signal_at(ctx, 0, 2), 1, peer)
    if me == 0:
        td.signal(ctx, td.signal_at(ctx, 0, 0), 5 << 16, target, CHECK_FAILED=CHECK_FAILED)
        td.put_signal(
            ctx, td.data_at(ctx, 0, me), td.data_at(ctx, 0, me), 8, td.signal_at(ctx, 0, 1), 6 << 16, target,
            CHECK_FAILED=CHECK_FAILED,
        )
        td.quiet(ctx)
    td.finish(ctx)


def _signals(fails, check_failed, target):
    """Return rank 1's first two signals after ``signal_kernel``, and the peer that the error names or None."""
    with a_group_on_nodes(1) as group:
        workspace = get_workspace(group, device(), "signals", across_nodes=True)
        workspace.prepare("signals", {}, 64, 4)
        tdkernels.set_timeout(0.3)
        error = None
        try:
            workspace.before_launch()
            signal_kernel[(1,)](workspace.ctx, 1, target, FAILS=fails, CHECK_FAILED=check_failed)
            workspace.after_launch()
            tdkernels.synchronize()
        except PeerTimeoutError as caught:
            error = caught.peer
        tdkernels.set_timeout(None)
        workspace.buffer.barrier()
        words = [workspace.signal_word(workspace.rank, i).view(torch.int64).item() for i in range(2)]
        workspace.buffer.barrier()
        return words, error


@pytest.mark.parametrize("check_failed", [False, True])
def test_signals_arrive(check_failed):
    assert on_ranks(2, _signals, False, check_failed, 1) == [([0, 0], None), ([5 << 16, 6 << 16], None)]


def test_signals_to_own_rank():
    assert on_ranks(2, _signals, False, True, 0) == [([5 << 16, 6 << 16], None), ([0, 0], None)]


def test_no_signals_after_a_failed_wait():
    assert on_ranks(2, _signals, True, True, 1) == [([0, 0], 1), ([0, 0], None)]


@td.jit(network=True)
def waiting_kernel(ctx, peer):
    td.await_put(ctx, td.signal_at(ctx, 0, 0), 1 << 16, peer)
    td.finish(ctx)


def _wait_for_missing_put():
    with a_group_on_nodes(1) as group:
        workspace = get_workspace(group, device(), "waiting", across_nodes=True)
        workspace.prepare("waiting", {}, 8, 1)
        tdkernels.set_timeout(0.3)
        try:
            workspace.before_launch()
            waiting_kernel[(1,)](workspace.ctx, 1 - workspace.rank)
            workspace.after_launch()
            tdkernels.synchronize()
        except PeerTimeoutError as error:
            return error.peer
        finally:
            tdkernels.set_timeout(None)


def test_await_put_times_out():
    assert on_ranks(2, _wait_for_missing_put) == [1, 0]


# ---- topology ----


def _reachable_peers(local_world_size, ranks=None):
    if ranks is not None:
        _reachable_peers(local_world_size)  # NVSHMEM must be initialized by all ranks first
    with a_group_on_nodes(local_world_size, ranks) as group:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        topology = group_state(group).topology
        workspace = get_workspace(group, device(), "seen", across_nodes=True)
        workspace.prepare("seen", {}, 8, 1)
        buffer = workspace.buffer
        reachable = [address != 0 for address in buffer.addresses]
        for peer, is_reachable in enumerate(reachable):
            if is_reachable:
                buffer.tensor(peer)
            else:
                with pytest.raises(ValueError, match=f"peer {peer} is on another node than rank {buffer.rank}"):
                    buffer.tensor(peer)
        return topology.num_nodes, topology.node_rank, topology.local_rank, reachable


def test_no_addresses_of_other_nodes():
    assert on_ranks(4, _reachable_peers, 2) == [
        (2, 0, 0, [True, True, False, False]), (2, 0, 1, [True, True, False, False]),
        (2, 1, 0, [False, False, True, True]), (2, 1, 1, [False, False, True, True]),
    ]


def test_group_with_one_rank_per_node():
    assert on_ranks(4, _reachable_peers, 2, [1, 2]) == [None, (2, 0, 0, [True, False]), (2, 1, 0, [False, True]), None]


def test_uneven_nodes_become_one_node_per_rank():
    seen = on_ranks(3, _reachable_peers, 2)
    assert seen == [(3, rank, 0, [peer == rank for peer in range(3)]) for rank in range(3)]


def _prepare_single_node_workspace():
    with a_group_on_nodes(1) as group:
        message = "plain: runs on one node, and the group's 2 ranks are on 2 nodes of 1"
        with pytest.raises(NotImplementedError, match=message):
            get_workspace(group, device(), "plain")


def test_single_node_workspace_is_rejected_across_nodes():
    on_ranks(2, _prepare_single_node_workspace)
