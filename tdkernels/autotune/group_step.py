"""Synchronized steps of a group: a step succeeds or fails on all ranks together, even if only one rank has an error.

Each step ends with an exchange of results between all ranks, so a failure on one rank is a failure for all. Launches
within a step use scratch workspaces. These are discarded after a failure, so that it affects neither the next step nor
the group's own workspaces.
"""

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tdkernels.autotune.timing import synchronize
from tdkernels.symm.group import group_state, scratch_state
from tdkernels.symm.timeout import shorter_timeout

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class TuningError(RuntimeError):
    """A problem could not be tuned. The error is raised on every rank of the group, with the same text."""


class GroupStep:
    """One rank's side of the synchronized steps. Use it as a context manager.

    Args:
        title: First part of the error messages.
        group: The group whose ranks execute the steps.
        device: The device of this rank.

    Attributes:
        state: The group's own state.
        scratch: The scratch state that launches use; None before ``renew_scratch``.
    """

    def __init__(self, title: object, group: "dist.ProcessGroup", device: "torch.device") -> None:
        self.title, self.group, self.device = title, group, device
        self.state = group_state(group)
        self.scratch = None
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._stack.close()

    def attempt(self, do: Callable[[], Any], limit_s: float) -> tuple[list | None, str | None]:
        """Call ``do``, which may fail, on all ranks.

        Args:
            do: Function without arguments. It returns a value that JSON can represent.
            limit_s: Limit in seconds for each wait of a kernel for a peer.

        Returns:
            (values of all ranks, None), or after a failure (None, reason). In the latter case ``scratch`` is new.

        Raises:
            TuningError: If the device of a rank cannot be used any more.
        """
        with shorter_timeout(limit_s):
            value, reason = _try(do)
        lost = reason is not None and not self._quiet()
        replies = self._exchange("tune", [value, reason, lost])
        failure = _first_failure(replies)
        if any(lost for *_, lost in replies):
            raise TuningError(f"{self.title}: a device is lost: {failure}")
        if failure is None:
            return [value for value, *_ in replies], None
        self.renew_scratch()
        return None, failure

    def must(self, what: str, do: Callable[[], Any]) -> list:
        """Call ``do``, without which tuning is impossible, on all ranks, and return their values.

        Raises:
            TuningError: If it fails on any rank.
        """

        def and_wait():
            value = do()
            synchronize(self.device)
            return value

        replies = self._exchange(f"tune: {what}", _try(and_wait))
        failure = _first_failure(replies)
        if failure is not None:
            raise TuningError(f"{self.title}: {what}: {failure}")
        return [value for value, _ in replies]

    def all_say(self, what: str, value: Any) -> list:
        """Exchange a value with all ranks and return the values in rank order."""
        return self._exchange(f"tune: {what}", value)

    def settle(self) -> None:
        """Wait until the devices of all ranks are idle."""
        synchronize(self.device)
        self.state.barrier("tune")

    def renew_scratch(self) -> None:
        """Release the scratch state when no rank uses it any more, and create a new one."""
        self.settle()
        self._stack.close()
        self.scratch = self._stack.enter_context(scratch_state(self.group))

    def _quiet(self):
        """Wait for the remaining work on the device after a failure. Return False if the device is unusable."""
        try:
            synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def _exchange(self, what, value):
        # Use the group's own state: the failure may have left the scratch state unusable.
        return [json.loads(text) for text in self.state.exchange(what, json.dumps(value))]


def one_line(error: BaseException) -> str:
    """Return the first line of an error, at most 300 characters. Unlike the error, a text keeps no frames alive."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _try(do):
    try:
        return do(), None
    except Exception as error:
        return None, one_line(error)


def _first_failure(replies):
    for rank, (_, reason, *_) in enumerate(replies):
        if reason is not None:
            return f"rank {rank}: {reason}"
    return None
