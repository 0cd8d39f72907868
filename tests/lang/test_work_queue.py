"""The atomic work queue: each work item is fetched once, and the counter restarts with each launch."""

import pytest
import torch
import triton.language as tl

from tdkernels import lang as td
from tests.lang.test_primitives import launch, prepared, run, words
from tests.support.ranks import device, on_ranks


@td.jit(do_not_specialize=["items"])
def fetch_kernel(ctx, taken_ptr, by_ptr, items, ADVANCE: tl.constexpr):
    """Count how often each item is fetched, with an addition per lane that shows threads with different items."""
    item = td.await_work_item(td.fetch_work_item(ctx))
    while item < items:
        lanes = tl.arange(0, 256)  # several lanes per thread, or one
        tl.atomic_add(taken_ptr + item * 256 + lanes, tl.full((256,), 1, tl.int64))
        tl.store(by_ptr + item, tl.program_id(0).to(tl.int64))
        fetched = td.fetch_work_item(ctx)
        tl.debug_barrier()
        item = td.await_work_item(fetched)
    td.finish(ctx, ADVANCE=ADVANCE)


@td.jit
def epoch_kernel(ctx, epoch_ptr):
    tl.store(epoch_ptr, td.epoch(ctx))
    td.finish(ctx)


def epoch_of(workspace):
    """Return the epoch of a launch, which itself counts as one."""
    seen = words(1)
    launch(workspace, epoch_kernel, 1, seen)
    return seen.item()


def fetch_each_item_once(num_warps):
    workspace = prepared(f"tickets of {num_warps} warps")
    launches = epoch_of(workspace) + 1  # more than one if the test is repeated
    for items, programs in ((1, 1), (1, 7), (40, 3), (37, 300), (300, 37), (0, 5)):
        for advance in (True, False, True):
            taken = torch.zeros(max(items, 1) * 256, dtype=torch.int64, device=device())
            by = words(max(items, 1))
            run(workspace, fetch_kernel, programs, taken, by, items, ADVANCE=advance, num_warps=num_warps)
            launches += advance
            assert torch.equal(taken, torch.full_like(taken, 1 if items else 0))
            assert not items or (by.min() >= 0 and by.max() < programs)
    assert epoch_of(workspace) == launches


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 16])
def test_each_item_is_fetched_once(num_warps):
    on_ranks(2, fetch_each_item_once, num_warps)
