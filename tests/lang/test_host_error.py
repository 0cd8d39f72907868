"""Host errors: an error that a kernel reports is raised once, and the workspace stays usable."""

import pytest
import torch
import triton.language as tl

import tdkernels
from tdkernels import lang as td
from tests.lang.test_primitives import launch, prepared, words
from tests.support.ranks import device, on_ranks


@td.jit
def report_kernel(ctx, numbers_ptr, conditions_ptr, seen_ptr, ERRORS: tl.constexpr):
    """Report an error of kind i + 1 for each condition that holds."""
    for i in range(ERRORS):
        first, second, third = (
            tl.load(numbers_ptr + 3 * i), tl.load(numbers_ptr + 3 * i + 1), tl.load(numbers_ptr + 3 * i + 2)
        )
        td.report_if(ctx, tl.load(conditions_ptr + i) != 0, i + 1, first, second, third)
    tl.store(seen_ptr, td.epoch(ctx))
    td.finish(ctx)


class ReportedError(Exception):
    pass


def report_errors(dtype, num_warps):
    workspace = prepared("notes")
    workspace.error_of_note = lambda name, kind, *numbers: ReportedError(name, kind, *numbers)
    large = 1 << (40 if dtype == torch.int64 else 30)
    numbers = torch.tensor([[1, -2, large], [4, 5, 6]], dtype=dtype, device=device())
    seen, epoch = words(1), None
    for conditions, kind, expected in (
        ([0, 0], None, None), ([1, 0], 1, [1, -2, large]), ([0, 1], 2, [4, 5, 6]), ([0, 0], None, None),
        ([1, 1], 1, [1, -2, large]), ([0, 1], 2, [4, 5, 6]),  # of two errors in one launch the first is kept
    ):
        flags = torch.tensor(conditions, dtype=torch.int32, device=device())

        def call(flags=flags):
            launch(workspace, report_kernel, 1, numbers, flags, seen, ERRORS=2, num_warps=num_warps)
            tdkernels.synchronize()

        if kind is None:
            call()
        else:
            with pytest.raises(ReportedError) as caught:
                call()
            assert caught.value.args == ("notes", kind, *expected), caught.value.args
        tdkernels.synchronize()  # does not raise the error again
        assert epoch is None or seen.item() == epoch + 1, "the workspace must stay usable"
        epoch = seen.item()


@pytest.mark.parametrize("num_warps", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_host_error_is_raised_once(dtype, num_warps):
    on_ranks(2, report_errors, dtype, num_warps)
