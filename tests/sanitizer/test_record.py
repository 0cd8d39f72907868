"""``record``: cleanup, rejected devices, and happens-before edges that no operator exercises alone."""

import os

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from tdkernels import lang as td
from tdkernels import launch
from tdkernels.lang.kernel import Kernel
from tdkernels.launch import RankError
from tdkernels.ops.collectives.async_collective import AsyncCollective
from tdkernels.sanitizer import RaceError, record
from tdkernels.symm import get_workspace, resolve_group
from tests.support.ranks import DEVICE, fresh_ranks, on_ranks
from tests.support.simulated_nodes import on_nodes

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the race checker runs on CPU ranks")
WORDS = 16


@td.jit
def push_kernel(ctx, plan, SIGNALS: tl.constexpr, WAITS: tl.constexpr):
    """Program 0 stores into the next rank's memory; program 1 reads what the previous rank stored in this rank's."""
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    number, half, signal = td.call(ctx, plan)
    offs = tl.arange(0, 16)
    if tl.program_id(0) == 0:
        peer = (me + 1) % ranks
        tl.store(td.pointer_to(td.data_at(ctx, half, peer), tl.int64) + offs, offs.to(tl.int64))
        if SIGNALS:
            td.notify(ctx, td.signal_at(ctx, half, 0), peer, signal)
    else:
        if WAITS:
            td.wait_plan(ctx, td.signal_at(ctx, half, 0), signal, (me + ranks - 1) % ranks)
        tl.load(td.pointer_to(td.data_at(ctx, half, me), tl.int64) + offs)
    td.finish(ctx)


def push(signals=True, waits=True):
    workspace = get_workspace(resolve_group(), torch.device("cpu"), "test_record")
    plan = workspace.prepare("test_record", {}, 8 * WORDS, 1)
    workspace.before_launch()
    push_kernel[(2,)](workspace.ctx, plan, SIGNALS=signals, WAITS=waits)
    workspace.after_launch()


def record_push(*args):
    push()
    with record(check=False) as races:
        push(*args)
    return list(races)


@pytest.mark.parametrize("signals, waits, races", [(True, True, 0), (True, False, 1), (False, False, 1)])
def test_signal_and_wait_prevent_a_race(signals, waits, races):
    for found in on_ranks(2, record_push, signals, waits):
        assert len(found) == races, found
        if races:
            first, second = found[0].first, found[0].second
            assert (first.kind, second.kind, first.program, second.program) == ("write", "read", (0, 0, 0), (1, 0, 0))
            assert first.rank != second.rank and os.path.basename(first.file) == "test_record.py"
            assert "workspace 'test_record'" in found[0].workspace and "data of half" in found[0].place
            assert ("= " in found[0].released) == signals


def push_around_host_sync(sync):
    """Only host synchronization orders the third call's store after the first call's load on the peer."""
    push()
    with record(check=False) as races:
        push()
        if sync == "barrier":
            dist.barrier()
        if sync == "exchange":
            get_workspace(resolve_group(), torch.device("cpu"), "test_record").group.exchange("test", "")
        push()
        push()  # the same half as the first
    return len(races)


@pytest.mark.parametrize("sync", [None, "barrier", "exchange"])
def test_host_collectives_are_edges(sync):
    # Two ranks that push to each other wait for each other; a race between calls needs three ranks.
    assert on_ranks(3, push_around_host_sync, sync) == [int(sync is None)] * 3


# ---- the network ----


@td.jit
def put_kernel(ctx, plan, FENCE: tl.constexpr):
    """A put without a signal, then a signal; only the fence orders the signal after the put."""
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    number, half, signal = td.call(ctx, plan)
    offs = tl.arange(0, 16)
    own, there = td.data_at(ctx, half, me), td.data_at(ctx, half, me) + 128
    peer = (me + 1) % ranks
    if tl.program_id(0) == 0:
        tl.store(td.pointer_to(own, tl.int64) + offs, offs.to(tl.int64))
        td.put_nbi(ctx, there, own, 128, peer)
        if FENCE:
            td.fence(ctx)
        td.signal(ctx, td.signal_at(ctx, half, 0), signal, peer)
    else:
        td.await_put(ctx, td.signal_at(ctx, half, 0), signal, (me + ranks - 1) % ranks)
        tl.load(td.pointer_to(there, tl.int64) + offs)
    td.finish(ctx)


def record_put(fence):
    workspace = get_workspace(resolve_group(), torch.device("cpu"), "test_record_put", across_nodes=True)
    plan = workspace.prepare("test_record_put", {}, 256, 1)
    with record(check=False) as races:
        workspace.before_launch()
        put_kernel[(2,)](workspace.ctx, plan, FENCE=fence)
        workspace.after_launch()
    return list(races)


@pytest.mark.parametrize("fence", [True, False])
def test_fence_orders_a_signal_after_a_put(fence):
    for races in on_ranks(2, on_nodes, 1, record_put, fence):
        assert len(races) == (not fence), races
        assert fence or races[0].first.item == "put"


# ---- a session ----


def check_patches():
    patched = (
        (InterpreterBuilder, "create_masked_load"), (InterpreterBuilder, "create_atomic_rmw"),
        (GridExecutor, "__call__"), (Kernel, "run"), (Kernel, "__call__"), (AsyncCollective, "_copy"),
        (dist, "barrier"),
    )
    before = [getattr(owner, name) for owner, name in patched]
    with record():
        assert all(getattr(owner, name) is not old for (owner, name), old in zip(patched, before))
        push()
    with pytest.raises(ZeroDivisionError), record():
        _ = 1 / 0
    assert [getattr(owner, name) for owner, name in patched] == before


def test_patches_are_reverted():
    on_ranks(2, check_patches)


def raise_on_rank_1():
    with record() as races:
        if dist.get_rank() == 1:
            raise KeyError("the test's own")
    return list(races)


def test_exception_on_one_rank_is_raised():
    with pytest.raises(RankError) as caught:
        on_ranks(2, raise_on_rank_1)
    assert [type(error) for error in caught.value.exceptions] == [type(None), KeyError]
    assert caught.value.results[0] == []


def record_on_gpu():
    rank_device, launch._rank_device = launch._rank_device, torch.device("cuda", 0)
    try:
        with pytest.raises(RuntimeError, match=r'CPU ranks only.*RankPool\(world_size, device="cpu"\)'), record():
            pass
    finally:
        launch._rank_device = rank_device
    push()
    workspace = get_workspace(resolve_group(), torch.device("cpu"), "test_record")
    with pytest.raises(RuntimeError, match="CPU ranks only"), record():
        workspace.device = torch.device("cuda", 0)
        try:
            workspace.before_launch()
        finally:
            workspace.device = torch.device("cpu")


def test_gpus_are_rejected():
    on_ranks(2, record_on_gpu)


def test_environment_variable_records_every_run_of_a_pool(monkeypatch):
    monkeypatch.setenv("TDKERNELS_SANITIZE", "1")
    with fresh_ranks(2) as pool:
        pool.run(push)
        with pytest.raises(RankError) as caught:
            pool.run(push, True, False)
        assert [type(error) for error in caught.value.exceptions] == [RaceError] * 2
        assert "race in workspace 'test_record'" in str(caught.value)
        pool.run(push)
