"""Errors that one rank raises at once, in the middle of a call, while its peers learn of them from their devices.

A rank with more tokens than max_tokens_per_rank sends an error code to its peers, raises, and launches nothing more of
the call. On a GPU the hosts of the peers do not know the error yet, and launch the rest of the call. The kernels do not
wait for the rank that has left. But a consensus check waits for it, and that rank next takes part in that of another
call.

So before a consensus check that is part of that call, a rank waits for its launches and raises such an error instead of
taking part. The wait costs time only in the first call with a shape, and only if the group has made calls that may have
such errors. In any other call all ranks take part in the consensus check, and the error is raised later.
"""

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any

import torch

from tdkernels.symm.timeout import get_timeout


def early(error: Exception) -> Exception:
    """Mark the error of a note as one that a rank has raised at once."""
    error.is_early = True  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def part_of_call(state: Any, workspace: str, number: int) -> Iterator[None]:
    """Declare that the ``with`` block is part of the call with this number (``Workspace.note_call``).

    A rank that has left the call does not run the block. Its peers raise the error in the block, so all ranks stay in
    step.

    Args:
        state: The GroupState.
        workspace: The name of the workspace whose notes report the errors of the call.
        number: The number of the call.
    """
    outer, state.call_in_progress = state.call_in_progress, (workspace, number)
    try:
        yield
    finally:
        state.call_in_progress = outer


def raise_early_errors(state: Any) -> None:
    """In ``part_of_call``, wait for the launches and raise the early error of the call. Otherwise do nothing.

    Outside ``part_of_call`` the rank that has raised the error may take part in the consensus check, so its peers must
    take part, too. Also raises an error of a launch that has failed during the wait.
    """
    own_name, number = state.call_in_progress
    for (name, device), workspace in list(state.workspaces.items()):
        if name == own_name and workspace.may_have_early_errors and can_wait(device):
            # At most half of the timeout: the launches may wait for a peer that waits for this rank in another group.
            state.stream_order(device).wait_for_last(time.monotonic() + get_timeout() / 2)
            failure = state.error_on(device)
            if failure is not None:
                raise copy.copy(failure)
            workspace.raise_early_error(number)


def can_wait(device: torch.device) -> bool:
    """Return whether the host may wait for a device: not while a CUDA graph is captured."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
