"""Notes: what a kernel tells the host is raised once, and the workspace is as good as before."""

import pytest
import torch
import triton.language as tl

import tdkernels
from tdkernels import lang as td
from tests.lang.test_primitives import launch, prepared, words
from tests.support.ranks import device, on_ranks


@td.jit
def note_kernel(ctx, numbers_ptr, conditions_ptr, seen_ptr, NOTES: tl.constexpr):
    """Leave a note of kind i + 1 for each condition that holds."""
    for i in range(NOTES):
        first, second, third = (
            tl.load(numbers_ptr + 3 * i), tl.load(numbers_ptr + 3 * i + 1), tl.load(numbers_ptr + 3 * i + 2)
        )
        td.report_if(ctx, tl.load(conditions_ptr + i) != 0, i + 1, first, second, third)
    tl.store(seen_ptr, td.epoch(ctx))
    td.finish(ctx)


class Told(Exception):
    pass


def tells(dtype, num_warps):
    workspace = prepared("notes")
    workspace.error_of_note = lambda name, kind, *numbers: Told(name, kind, *numbers)
    large = 1 << (40 if dtype == torch.int64 else 30)
    numbers = torch.tensor([[1, -2, large], [4, 5, 6]], dtype=dtype, device=device())
    seen, epoch = words(1), None
    for conditions, kind, expected in (
        ([0, 0], None, None), ([1, 0], 1, [1, -2, large]), ([0, 1], 2, [4, 5, 6]), ([0, 0], None, None),
        ([1, 1], 1, [1, -2, large]), ([0, 1], 2, [4, 5, 6]),  # of two that come at once the first is kept
    ):
        flags = torch.tensor(conditions, dtype=torch.int32, device=device())

        def call(flags=flags):
            launch(workspace, note_kernel, 1, numbers, flags, seen, NOTES=2, num_warps=num_warps)
            tdkernels.synchronize()

        if kind is None:
            call()
        else:
            with pytest.raises(Told) as caught:
                call()
            assert caught.value.args == ("notes", kind, *expected), caught.value.args
        tdkernels.synchronize()  # says it once
        assert epoch is None or seen.item() == epoch + 1, "nothing is broken, and launches go on"
        epoch = seen.item()


@pytest.mark.parametrize("num_warps", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_note_is_raised_once(dtype, num_warps):
    on_ranks(2, tells, dtype, num_warps)
