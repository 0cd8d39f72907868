"""Tickets: each piece of work is taken once, by whoever comes, and the numbers begin anew with each launch."""

import pytest
import torch
import triton.language as tl

from tdkernels import lang as td
from tests.lang.test_primitives import launch, prepared, run, words
from tests.support.ranks import device, on_ranks


@td.jit(do_not_specialize=["pieces"])
def take_kernel(ctx, taken_ptr, by_ptr, pieces, ADVANCE: tl.constexpr):
    """Count how often each piece is taken, by an addition that would show it if two threads had different numbers."""
    piece = td.await_work_item(td.fetch_work_item(ctx))
    while piece < pieces:
        lanes = tl.arange(0, 256)  # as many places a piece: one for each thread, or several
        tl.atomic_add(taken_ptr + piece * 256 + lanes, tl.full((256,), 1, tl.int64))
        tl.store(by_ptr + piece, tl.program_id(0).to(tl.int64))
        answer = td.fetch_work_item(ctx)
        tl.debug_barrier()
        piece = td.await_work_item(answer)
    td.finish(ctx, ADVANCE=ADVANCE)


@td.jit
def epoch_kernel(ctx, epoch_ptr):
    tl.store(epoch_ptr, td.epoch(ctx))
    td.finish(ctx)


def epoch_of(workspace):
    """Of a launch that is counted in turn."""
    seen = words(1)
    launch(workspace, epoch_kernel, 1, seen)
    return seen.item()


def take_each_piece_once(num_warps):
    workspace = prepared(f"tickets of {num_warps} warps")
    launches = epoch_of(workspace) + 1  # more than one where the test has been repeated
    for pieces, programs in ((1, 1), (1, 7), (40, 3), (37, 300), (300, 37), (0, 5)):
        for advance in (True, False, True):
            taken = torch.zeros(max(pieces, 1) * 256, dtype=torch.int64, device=device())
            by = words(max(pieces, 1))
            run(workspace, take_kernel, programs, taken, by, pieces, ADVANCE=advance, num_warps=num_warps)
            launches += advance
            assert torch.equal(taken, torch.full_like(taken, 1 if pieces else 0))
            assert not pieces or (by.min() >= 0 and by.max() < programs)
    assert epoch_of(workspace) == launches


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 16])
def test_each_piece_is_taken_once(num_warps):
    on_ranks(2, take_each_piece_once, num_warps)
