"""Host side of the host error mailbox (``lang.host_error``): notes of kernels, and the calls to which they belong."""

import time
from collections import OrderedDict
from collections.abc import Callable

from tdkernels.symm.early_error import can_wait
from tdkernels.symm.failure import host_words
from tdkernels.symm.group import in_step
from tdkernels.symm.timeout import get_timeout

_NOTE_WORDS = 5  # see lang.host_error
_MAX_CALLS = 64  # to which a note may belong: far more than a host runs ahead of its GPU


class Mailbox:
    """Base class of ``Workspace``: the mailbox, and the functions that convert its notes to exceptions.

    Attributes:
        note: The words of the mailbox in host memory, or None before ``_make_note``.
        error_of_note: Converts a kernel's note to an exception: called with the workspace's name, the kind and three
            numbers. It is used for calls without ``expect_note``.
        note_call: The number of the latest call of ``expect_note``, which kernels store in their notes.
        may_have_early_errors: Whether a note may be an error that a peer has raised at once, see ``early_error``.
    """

    def __init__(self, state, device, name):
        self.group = state
        self.device = device
        self.name = name
        self.rank, self.world_size = state.rank, state.world_size
        self.error_of_note = None
        self.note = None
        self.note_call = 0
        self.may_have_early_errors = False
        self._notes_of_calls = OrderedDict()
        self._awaits_dismissed = False  # whether the note of a dismissed call may still arrive
        self._captured = False

    def _make_note(self):
        """Allocate the mailbox. There is one for all buffers, so that growing loses no note."""
        if self.note is None:
            self.note = host_words(_NOTE_WORDS, self.device)
            self._note_words = self.note.numpy()

    def check(self, in_call: bool = True) -> None:
        """Raise the error that a kernel of the group has recorded, see ``Workspace.check``."""
        raise NotImplementedError

    def expect_note(self, error_of_note: Callable[..., Exception], may_be_early: bool = False) -> None:
        """Begin a call whose kernel may write a note (``lang.host_error``), and raise the note of an earlier call.

        ``error_of_note`` is called as the attribute of that name. On a GPU the note may arrive after later calls, so it
        is kept for the latest 64 calls. The kernel receives ``note_call`` as an argument and stores it in its note.
        ``may_be_early``: whether a rank may raise the error at once, see ``early_error``.
        """
        self.note_call += 1
        self.may_have_early_errors |= may_be_early
        self._notes_of_calls[self.note_call] = error_of_note
        # A captured CUDA graph may be replayed at any time.
        if len(self._notes_of_calls) > _MAX_CALLS and not self._captured:
            self._notes_of_calls.popitem(last=False)
        if self._awaits_dismissed and can_wait(self.device):
            # The mailbox holds one note. A note that this rank ignores must not displace one that all ranks raise.
            self.group.stream_order(self.device).wait_for_last(time.monotonic() + get_timeout() / 2)
            self._awaits_dismissed = False
        self.check()

    def dismiss_note(self, call: int) -> None:
        """Ignore the note of a call, which may arrive later, because this rank has raised an error for that call."""
        if call in self._notes_of_calls:
            self._notes_of_calls[call] = _no_error
            self._awaits_dismissed = True

    def raise_early_error(self, call: int) -> None:
        """Raise the error of a kernel's note if it is an early error of this call. Otherwise keep the note."""
        if self.note is not None and self._note_words[0]:
            error, number = self._read_note()
            if number == call and getattr(error, "is_early", False):
                # Launches of a later call of this workspace may wait for the rank that has left the call.
                self._raise_note(call if call == self.note_call else 0)

    def _read_note(self):
        """Return the exception for a kernel's note, or None if it was dismissed, and the number of its call."""
        kind, *numbers, number = self._note_words.tolist()
        error = self._notes_of_calls.get(number, self.error_of_note)(self.name, kind, *numbers)
        return None if error is None else in_step(error), number

    def _raise_note(self, call):
        """Raise the exception for a kernel's note, once. It does nothing for a note that was dismissed.

        If all ranks raise it in its own call, or between two calls, the group stays usable. A rank that raises the note
        of an earlier call does not make its current call. Its peers may have made it, and would pair it with this
        rank's next call, so the group becomes unusable.

        ``call``: the number of the call that raises it, 0 for a call without a number, or None between two calls.
        """
        try:
            error, number = self._read_note()
        finally:
            self._note_words[0] = 0
        if error is None:
            self._awaits_dismissed = False
            return
        if call is not None and call != number and self.world_size > 1:
            self.group.break_off(
                RuntimeError(
                    f"{error}; rank {self.rank} raised that in place of a later call, which its peers may have made. "
                    "Destroy the process group and make a new one. tdkernels.synchronize() raises such an error "
                    "between two calls, after which the group can be used"
                )
            )
        raise error


def _no_error(*_):
    """Return None: the error of a note that was dismissed."""
