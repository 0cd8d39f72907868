"""Notes: what a kernel has to tell the host when nothing is broken, but the user has asked for what cannot be done.

Not as in a wait that gives up: all ranks have seen the same and go on in step. The host raises what it reads as an
error once, at its next call or at ``synchronize``.
"""

import triton.language as tl

from tdkernels.lang.context import CTX_NOTE
from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import store_release_if


@jit
def report_if(ctx, condition, kind, first, second, third, call=0):
    """Leave a note if ``condition`` holds and the host has read the one before; by one program of a launch.

    ``call``: the workspace's ``note_call``, by which the host finds what the note is about.
    """
    note = tl.load(ctx + CTX_NOTE).to(tl.pointer_type(tl.int64))  # its kind, not zero, three numbers, and the call
    if condition:
        unread = tl.load(note, volatile=True) != 0
        tl.store(note + 1, first.to(tl.int64), mask=unread == 0)
        tl.store(note + 2, second.to(tl.int64), mask=unread == 0)
        tl.store(note + 3, third.to(tl.int64), mask=unread == 0)
        tl.store(note + 4, tl.cast(call, tl.int64), mask=unread == 0)
        tl.debug_barrier()
        store_release_if(note, tl.full((), 0, tl.int64) + kind, (unread == 0).to(tl.int32))
