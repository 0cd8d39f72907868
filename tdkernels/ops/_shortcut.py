"""Calls that are one launch: from the third one on they go to it without asking how their tensors lie.

``_calls`` knows a call again by that already. So the second one is watched, for what it launches (``_launch``).
"""

import threading

from tdkernels.ops import _trace

watch = None  # of the one call of this process that is watched


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
    if watch is not None or _trace.is_recording():  # another thread's, or one with a trace: the next call will do
        return run(), None
    mine = watch = _Watch()
    try:
        y = run()
    finally:
        watch = None
    if len(mine.launched) != 1:
        return y, None
    launch, operands, made = mine.launched[0]
    same = list(map(_address, operands)) == list(map(_address, tensors))
    whole = made and y.is_contiguous() and (y.data_ptr(), y.shape.numel()) == (made[0].data_ptr(), made[0].numel())
    return y, Shortcut(launch, tensors, made[0], y) if same and whole else None


def _address(tensor):
    return None if tensor is None else tensor.data_ptr()


class Shortcut:
    """The launch that a call was: it is found without asking how tensors lie, of which the caller knows that.

    Args:     tensors: of the call, as the launch took them; made, y: its first output, and that of the call
    """

    def __init__(self, launch, tensors, made, y):
        self._launch, self._kept = launch, launch.workspace.launches
        self._misaligned = [_misalignment(tensor) for tensor in tensors]
        self._shape = None if y.shape == made.shape else y.shape

    def serves(self, tensors):
        """Whether it is the launch still: the workspace may have grown, or a tensor begin elsewhere."""
        if self._launch.workspace.launches is not self._kept or _trace.is_recording():
            return False
        return [_misalignment(tensor) for tensor in tensors] == self._misaligned

    def __call__(self, tensors):
        y = self._launch(tensors)[0]
        return y if self._shape is None else y.view(self._shape)


def _misalignment(tensor):
    return 0 if tensor is None else tensor.data_ptr() % 16
