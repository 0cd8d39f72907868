"""The seeded scheduler: a seed replays exactly, programs share the work queue, and a deadlock is an error."""

import pytest
import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.launch import RankError
from tdkernels.sanitizer import schedule
from tdkernels.symm import get_workspace, resolve_group
from tests.fuzz import fuzz
from tests.ops.dense.cases import config_for
from tests.sanitizer.mutants import MUTANTS
from tests.support.dense_oracle import Case
from tests.support.ranks import DEVICE, on_ranks
from tests.support.variants import WAYS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the scheduler runs on CPU ranks")
SEEDS = range(2)


@pytest.mark.parametrize("name", WAYS)
def test_values_are_right_in_any_order(name):
    way = WAYS[name]
    for points in on_ranks(way.world_size, fuzz, way, SEEDS):
        assert min(points) > 0, "no rank could be interrupted"


def is_replayed(way, seeds):
    way.run(2)
    logs = []
    for seed in seeds:
        with schedule(seed) as scheduled:
            way.run()
        logs.append(scheduled.events)
    return logs


@pytest.mark.parametrize("name", ["gemm_rs forward", "tp_moe"])
def test_a_seed_is_replayed(name):
    for first, again, other in on_ranks(3, is_replayed, WAYS[name], [5, 5, 6]):
        assert first == again != other and len(first) > 10


@td.jit
def items_kernel(ctx, taken_ptr):
    """Each program leaves its id at the items that it takes."""
    item = td.await_work_item(td.fetch_work_item(ctx))
    while item < 12:
        tl.store(taken_ptr + item, tl.program_id(0))
        item = td.await_work_item(td.fetch_work_item(ctx))
    td.finish(ctx)


def shares_a_work_queue(seeds):
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
    for shared in on_ranks(2, shares_a_work_queue, range(8)):
        assert max(shared) > 2, shared


def wrong_values(mutant, seeds):
    """The seeds whose schedule gives this rank a wrong value; no rank stops at one, as the others would wait for it."""
    operator, shape, changes = WAYS[mutant.way].args
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


def test_an_order_that_the_interpreter_never_takes_shows_a_missing_wait():
    # Without a schedule program 0 takes all items one after the other, and the values are right.
    mutant = MUTANTS["H: gemm_rs forwards without waiting for its own tiles"]
    assert any(on_ranks(3, wrong_values, mutant, range(20)))


@td.jit
def waits_kernel(ctx):
    """Waits for a signal that no rank raises."""
    td.wait(ctx, td.signal_at(ctx, 0, 0), td.epoch(ctx) + 1, 0)
    td.finish(ctx)


def waits_for_ever():
    workspace = get_workspace(resolve_group(), torch.device("cpu"), "test_schedule")
    workspace.prepare("test_schedule", {}, 256, 1)
    with schedule(0):
        workspace.before_launch()
        waits_kernel[(1,)](workspace.ctx)


def test_a_deadlock_is_an_error_that_names_the_waits():
    with pytest.raises(RankError) as caught:
        on_ranks(2, waits_for_ever)
    for rank, error in enumerate(caught.value.exceptions):
        text = f"rank {rank}: deadlock: program 0 waits for signal 0 of half 0 in workspace 'test_schedule' of rank"
        assert type(error).__name__ == "DeadlockError" and text in str(error), repr(error)
