"""Primitives that address all peers at once, and ``is_last_arriver`` among the programs of a rank."""

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError
from tdkernels import lang as td
from tdkernels.symm import get_workspace
from tests.lang.test_primitives import TIMEOUT_S, a_group, error_of, launch, prepared, run, signal_value, words
from tests.support.ranks import device, on_ranks

BLOCK = 1024  # 64-bit words that each rank sends to each peer


@td.jit
def exchange_kernel(ctx, sent_ptr, got_ptr, signal, expected, BLOCK: tl.constexpr):
    """Send a block to every peer, wait for the blocks of all peers, and copy them out."""
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    half = ((td.epoch(ctx) + 1) % 2).to(tl.int32)
    signal = signal + tl.full((), 0, tl.int64)
    slot = tl.cast(me, tl.int64) * (BLOCK * 8)
    for step in range(1, ranks):
        td.put(td.data_at(ctx, half, (me + step) % ranks) + slot, sent_ptr.to(tl.int64), BLOCK * 8, BLOCK)
    td.notify_all(ctx, td.signal_at(ctx, half, 2 * me + 1), signal)  # waiter: every peer, below
    td.wait_plan_all(ctx, td.signal_at(ctx, half, 1), 2, expected + tl.full((), 0, tl.int64))  # producer: see above
    offs = tl.arange(0, BLOCK)
    for source in range(ranks):
        if source != me:
            received = td.pointer_to(td.data_at(ctx, half, me) + tl.cast(source, tl.int64) * (BLOCK * 8), tl.int64)
            tl.store(got_ptr + source * BLOCK + offs, tl.load(received + offs))
    td.finish(ctx)


def exchange(workspace, call, signal, expected):
    """Run the exchange; return the received data [W, BLOCK], in which this rank's row is not written, and the error."""
    sent = 1000 * call + 100 * dist.get_rank() + torch.arange(BLOCK, device=device()) % 100
    got = words(workspace.world_size * BLOCK)
    error = error_of(launch, workspace, exchange_kernel, 1, sent, got, signal, expected, BLOCK=BLOCK)
    return got.view(-1, BLOCK), error


def exchange_workspace(group):
    workspace = get_workspace(group, device(), "exchange")
    world_size = workspace.world_size
    plans = [workspace.prepare("op", {"rows": rows}, world_size * BLOCK * 8, 2 * world_size) for rows in (6, 7)]
    assert plans == [0, 1]
    return workspace


def check_exchange():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with a_group() as group:
        workspace = exchange_workspace(group)
        for call in range(1, 8):
            got, error = exchange(workspace, call, signal_value(call, call % 2), signal_value(call, call % 2))
            assert error is None
            for source in range(world_size):
                expected = 1000 * call + 100 * source + torch.arange(BLOCK) % 100
                assert torch.equal(got[source].cpu(), expected if source != rank else torch.full((BLOCK,), -1))
            # Only those signals are set, and only on the peers.
            half = call % 2
            signals = [workspace.signal_word(rank, half * workspace.half_signals + i) for i in range(2 * world_size)]
            seen = [word.view(torch.int64).item() for word in signals]
            assert seen == [
                signal_value(call, call % 2) if i % 2 and i // 2 != rank else 0 for i in range(2 * world_size)
            ]
            workspace.buffer.barrier()
        del workspace, group


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_notify_and_wait_for_all_peers(world_size):
    on_ranks(world_size, check_exchange)


@td.jit
def series_kernel(ctx, seen_ptr, count, signal, WITH_OWN: tl.constexpr):
    """Set ``count`` signals on every peer (or every rank), wait for those of the peers, and read all signals back."""
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    half = ((td.epoch(ctx) + 1) % 2).to(tl.int32)
    signal = signal + tl.full((), 0, tl.int64)
    stride = count + 1  # one signal of each rank is never set
    own = td.signal_at(ctx, half, me * stride)
    td.notify_all(ctx, own, signal, count=count, WITH_OWN=WITH_OWN)  # waiter: every peer, below
    # producer: see above
    td.wait_plan_all(ctx, td.signal_at(ctx, half, 0), stride, signal, count=count, WITH_OWN=WITH_OWN)
    for i in range(ranks * stride):
        tl.store(seen_ptr + i, tl.load(td.signal_at(ctx, half, i)))
    td.finish(ctx)


def check_series(count, with_own):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with a_group() as group:
        workspace = get_workspace(group, device(), "series")
        workspace.prepare("op", {"count": count}, 16, world_size * (count + 1))
        for call in range(1, 5):
            seen = words(world_size * (count + 1))
            assert error_of(launch, workspace, series_kernel, 1, seen, count, signal_value(call, 0), with_own) is None
            sources = [source for source in range(world_size) if with_own or source != rank]
            arrived = [[int(source in sources and i < count) for i in range(count + 1)] for source in range(world_size)]
            assert seen.view(world_size, -1).tolist() == [
                [one * signal_value(call, 0) for one in row] for row in arrived
            ]
            workspace.buffer.barrier()
        del workspace, group


@pytest.mark.parametrize("world_size, count, with_own", [(2, 1, False), (3, 50, False), (2, 70, False), (3, 50, True)])
def test_series_of_signals_to_all_peers(world_size, count, with_own):
    on_ranks(world_size, check_series, count, with_own)


def send_other_signal(case):
    """Rank 1 is late, ahead, or uses another plan; the errors on the other ranks must name rank 1."""
    rank = dist.get_rank()
    with a_group() as group:
        workspace = exchange_workspace(group)
        for call in (1, 2):
            assert exchange(workspace, call, signal_value(call, 0), signal_value(call, 0))[1] is None
            workspace.buffer.barrier()
        tdkernels.set_timeout(TIMEOUT_S)
        other = {"ahead": signal_value(4, 1), "other plan": signal_value(3, 1), "late": signal_value(2, 0)}[case]
        _, error = exchange(workspace, 3, other if rank == 1 else signal_value(3, 0), signal_value(3, 0))
        if rank == 1 or case == "ahead":
            assert error is None
        elif case == "other plan":
            assert type(error) is PlanMismatchError
            assert str(error).startswith(f"op: rank 1 made call 3 with another shape, dtype or config than rank {rank}")
        else:
            assert type(error) is PeerTimeoutError
            assert (error.operator, error.rank, error.peer) == ("op", rank, 1)
            assert (error.expected, error.seen, error.signal) == (3, 2, "3 of half 1")
        tdkernels.set_timeout(None)
        workspace.buffer.barrier()
        del workspace, group
    tdkernels.synchronize()


@pytest.mark.parametrize("case", ["ahead", "other plan", "late"])
def test_error_names_the_missing_peer(case):
    on_ranks(3, send_other_signal, case)


@td.jit
def arrive_kernel(ctx, values_ptr, totals_ptr, count):
    """Each program of a group of ``count`` stores a number; the last arriver of the group adds them up."""
    pid = tl.program_id(0)
    group = pid // count
    tl.store(values_ptr + pid, tl.load(values_ptr + pid) + pid)
    if td.is_last_arriver(td.flag_at(ctx, group), count):
        total = tl.full((), 0, tl.int64)
        for i in range(count):
            total += tl.load(values_ptr + group * count + i)
        tl.store(totals_ptr + group, tl.load(totals_ptr + group) + total)
    td.finish(ctx)


def sum_in_last_arriver():
    with a_group() as group:
        workspace = prepared("is_last_arriver", num_flags=64, group=group)
        for call, count in enumerate([1, 2, 5, 16, 1, 3]):  # each launch must leave the flags reset
            programs = 40 // count * count
            values, totals = 1000 * call + words(programs) * 0, words(40) * 0
            run(workspace, arrive_kernel, programs, values, totals, count)
            sums = (1000 * call + torch.arange(programs)).view(-1, count).sum(1).tolist()
            assert totals.tolist() == sums + [0] * (40 - len(sums)), (call, count)
        del workspace, group


def test_is_last_arriver():
    on_ranks(2, sum_in_last_arriver)


@td.jit
def failed_wait_kernel(ctx, CHECK_FAILED: tl.constexpr):
    """Rank 1 waits for a signal that is never set; then all ranks signal, by ``notify`` and by ``notify_all``."""
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    call = td.epoch(ctx) + 1
    if me == 1:
        td.wait(ctx, td.signal_at(ctx, 0, 2 * ranks), call, 0)  # producer: none
    signal = td.signal_at(ctx, 0, me)
    for step in range(1, ranks):
        td.notify(ctx, signal, (me + step) % ranks, call, CHECK_FAILED=CHECK_FAILED)  # waiter: the host
    td.notify_all(ctx, signal + ranks, call, CHECK_FAILED=CHECK_FAILED)  # waiter: the host
    td.finish(ctx)


def signal_after_failed_wait(check_failed):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with a_group() as group:
        workspace = prepared("garbage", half_signals=2 * world_size + 1, group=group)
        tdkernels.set_timeout(0.3)
        error = error_of(launch, workspace, failed_wait_kernel, 1, CHECK_FAILED=check_failed)
        assert type(error) is (PeerTimeoutError if rank == 1 else type(None))
        tdkernels.set_timeout(None)
        workspace.buffer.barrier()
        seen = [workspace.signal_word(rank, i).view(torch.int64).item() for i in range(2 * world_size)]
        signaled = {source for source in range(world_size) if source != rank and not (check_failed and source == 1)}
        assert seen == [int(i % world_size in signaled) for i in range(2 * world_size)]
        workspace.buffer.barrier()
        del workspace, group


@pytest.mark.parametrize("check_failed", [False, True])
def test_no_signals_after_a_failed_wait(check_failed):
    on_ranks(3, signal_after_failed_wait, check_failed)
