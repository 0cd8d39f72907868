"""Steps that all ranks of a group take together, and from which they come back together, whatever fails on one of them.

Each step ends in an agreement: every rank says what came out, and hears it of the others. A step may fail; then it has
failed for all. What it launches uses scratch workspaces, which are thrown away after a failure, so that neither the
next step nor the group's own workspaces notice.
"""

import contextlib
import json

from tdkernels.autotune.timing import synchronize
from tdkernels.symm.group import group_state, scratch_state
from tdkernels.symm.timeout import shorter_timeout


class TuningError(RuntimeError):
    """A problem that could not be tuned at all; the same on every rank."""


class GroupStep:
    """One rank's part of the steps; ``title`` begins the errors. To be left as the context manager that it is.

    Attributes: ``state`` is the group's own, ``scratch`` the one that launches see; None before ``renew_scratch``.
    """

    def __init__(self, title, group, device):
        self.title, self.group, self.device = title, group, device
        self.state = group_state(group)
        self.scratch = None
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._stack.close()

    def attempt(self, do, limit_s):
        """Let all ranks do what may fail: (each rank's value, None), or (None, why not) with a new scratch.

        ``limit_s`` bounds each wait of a kernel for a peer. Values must be what JSON can hold.
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

    def must(self, what, do):
        """Let all ranks do something without which there is no tuning; each rank's value.

        Raises:
            TuningError
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

    def all_say(self, what, value):
        """Each rank's value."""
        return self._exchange(f"tune: {what}", value)

    def settle(self):
        """Return when no device of the group is at work."""
        synchronize(self.device)
        self.state.barrier("tune")

    def renew_scratch(self):
        """Give the scratch back, when nobody uses it any more, and begin a new one."""
        self.settle()
        self._stack.close()
        self.scratch = self._stack.enter_context(scratch_state(self.group))

    def _quiet(self):
        """After a failure: let what is still on the device end. False if the device is beyond help."""
        try:
            synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def _exchange(self, what, value):
        # By the group's own state: that of a scratch may be what has just failed.
        return [json.loads(text) for text in self.state.exchange(what, json.dumps(value))]


def one_line(error):
    """An error as text that fits a log and keeps no frames alive."""
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
