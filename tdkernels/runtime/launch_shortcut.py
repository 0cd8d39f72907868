"""Calls that are one launch: from the third one on they go to it without asking how their tensors lie.

``call_cache`` knows a call again by that already. So the second one is watched, for what it launches
(``kernel_launch``).
"""

import threading
import weakref

from tdkernels.runtime import recorder

watch = None  # of the one call of this process that is watched
_turn = threading.Lock()


class _Watch:
    """What one thread launches meanwhile: [(launch, operands, made)]."""

    def __init__(self):
        self.launched, self._thread = [], threading.get_ident()

    def note(self, *launched):
        if threading.get_ident() == self._thread:
            self.launched.append(launched)


def watched(run, tensors):
    """(what ``run()`` returns, the Shortcut for calls of tensors that lie as these do, or None if there is none)."""
    global watch
    # Not a call with a trace, nor while another thread watches.
    if recorder.is_recording() or not _turn.acquire(blocking=False):
        return run(), None
    mine = watch = _Watch()
    try:
        y = run()
    finally:
        watch = None
        _turn.release()
    if len(mine.launched) != 1:
        return y, None
    launch, operands, made = mine.launched[0]
    same = list(map(_address, operands)) == list(map(_address, tensors))
    return y, Shortcut(launch, tensors, made[0], y) if same and made and _is_all_of(y, made[0]) else None


def _address(tensor):
    return None if tensor is None else tensor.data_ptr()


def _is_all_of(y, made):
    """Whether y is the tensor that a launch made, or another shape of it."""
    return y.dtype == made.dtype and y.is_contiguous() and (y.data_ptr(), y.numel()) == (made.data_ptr(), made.numel())


class Shortcut:
    """The launch that a call was: it is found without asking how tensors lie, of which the caller knows that.

    It does not keep the launch, which goes with the buffer that it was for.

    Args:     tensors: of the call, as the launch took them; made, y: its first output, and that of the call
    """

    def __init__(self, launch, tensors, made, y):
        self._launch, self._ctx = weakref.ref(launch), launch.workspace.ctx
        self._misaligned = [_misalignment(tensor) for tensor in tensors]
        self._shape = None if y.shape == made.shape else y.shape

    def launch_for(self, tensors):
        """The launch; None if the workspace has grown since, or a tensor begins elsewhere in 16 bytes."""
        launch = self._launch()
        if launch is None or launch.workspace.ctx is not self._ctx or recorder.is_recording():
            return None
        return launch if [_misalignment(tensor) for tensor in tensors] == self._misaligned else None

    def output_of(self, made):
        return made[0] if self._shape is None else made[0].view(self._shape)


def _misalignment(tensor):
    return 0 if tensor is None else tensor.data_ptr() % 16
