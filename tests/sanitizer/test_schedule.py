"""The seeded scheduler: a seed replays exactly, programs share the work queue, and a deadlock raises an error."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

from tdkernels import lang as td
from tdkernels.launch import RankError
from tdkernels.sanitizer import lockstep as lockstep_module
from tdkernels.sanitizer import schedule
from tdkernels.sanitizer.lockstep import Lockstep
from tdkernels.symm import get_workspace, resolve_group
from tests.ops.dense.cases import config_for
from tests.sanitizer.mutants import MUTANTS
from tests.support.dense_oracle import Case
from tests.support.ranks import DEVICE, on_ranks
from tests.support.variants import VARIANTS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the scheduler runs on CPU ranks")


def replay(variant, seeds):
    variant.run(2)
    logs = []
    for seed in seeds:
        with schedule(seed) as scheduled:
            variant.run()
        logs.append(scheduled.events)
    return logs


@pytest.mark.parametrize("name", ["gemm_rs forward", "tp_moe"])
def test_seed_is_replayed(name):
    for first, again, other in on_ranks(3, replay, VARIANTS[name], [5, 5, 6]):
        assert first == again != other and len(first) > 10


@td.jit
def items_kernel(ctx, taken_ptr):
    """Each program stores its id at the work items that it fetches."""
    item = td.await_work_item(td.fetch_work_item(ctx))
    while item < 12:
        tl.store(taken_ptr + item, tl.program_id(0))
        item = td.await_work_item(td.fetch_work_item(ctx))
    td.finish(ctx)


def share_work_queue(seeds):
    workspace = get_workspace(resolve_group(), torch.device("cpu"), "test_schedule")
    workspace.prepare("test_schedule", {}, 256, 1)
    shared = []
    for seed in seeds:
        taken = torch.full((12,), -1, dtype=torch.int32)
        with schedule(seed):
            workspace.before_launch()
            items_kernel[(4,)](workspace.ctx, taken)
            workspace.after_launch()
        assert taken.min() >= 0, "an item was not taken"
        shared.append(len(taken.unique()))
    return shared


def test_programs_share_the_work_queue():
    for shared in on_ranks(2, share_work_queue, range(8)):
        assert max(shared) > 2, shared


def failing_seeds(mutant, seeds):
    """Return the seeds that give this rank a wrong value; all seeds run, since the other ranks wait for this one."""
    operator, shape, changes = VARIANTS[mutant.variant].args
    case = Case(operator, torch.float32, *shape, exact=True)
    config = config_for(case, **changes)
    case.run(config=config)
    found = []
    for seed in seeds:
        with mutant.planted(), schedule(seed):
            results = case.run(config=config)
        if any((got.reshape(case.expected[name].shape) != case.expected[name]).any() for name, got in results.items()):
            found.append(seed)
    return found


def test_schedule_reveals_a_missing_wait():
    # Without a schedule program 0 processes all items in turn, and the values are correct.
    mutant = MUTANTS["H: gemm_rs forwards without waiting for its own tiles"]
    assert any(on_ranks(3, failing_seeds, mutant, range(20)))


def broadcasts_with_slow_choices(seeds):
    """Broadcast with a pause in the choice of the next rank; return the choices of the last rank to leave."""
    choices, choose = [], Lockstep._next

    def slowly(lockstep):
        others = [rank for rank in range(lockstep._world_size) if rank != lockstep.rank]
        is_last_out = all(lockstep._status(rank) == lockstep_module._OUT for rank in (lockstep.rank, *others))
        time.sleep(0.02)  # ranks that are done with the collective must not return in the meantime
        chosen = choose(lockstep)
        if is_last_out:
            choices.append(chosen)
        return chosen

    with mock.patch.object(Lockstep, "_next", slowly):
        for seed in seeds:
            with schedule(seed):
                for source in range(3):
                    dist.broadcast(torch.zeros(4), source)
    return choices


def test_no_rank_runs_until_all_ranks_are_back_from_a_collective():
    # Otherwise two ranks run at a time, and the order is not that of the seed.
    results = sum(on_ranks(3, broadcasts_with_slow_choices, range(3)), [])
    assert results and set(results) == {None}


@td.jit
def wait_kernel(ctx):
    """Wait for a signal that no rank sends."""
    td.wait(ctx, td.signal_at(ctx, 0, 0), td.epoch(ctx) + 1, 0)
    td.finish(ctx)


def wait_forever():
    workspace = get_workspace(resolve_group(), torch.device("cpu"), "test_schedule")
    workspace.prepare("test_schedule", {}, 256, 1)
    with schedule(0):
        workspace.before_launch()
        wait_kernel[(1,)](workspace.ctx)


def test_deadlock_error_names_the_waits():
    with pytest.raises(RankError) as caught:
        on_ranks(2, wait_forever)
    for rank, error in enumerate(caught.value.exceptions):
        text = f"rank {rank}: deadlock: program 0 waits for signal 0 of half 0 in workspace 'test_schedule' of rank"
        assert type(error).__name__ == "DeadlockError" and text in str(error), repr(error)
