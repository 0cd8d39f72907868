"""Host error mailbox: a kernel reports an error in the user's request, and the workspace stays usable.

In contrast to a failed wait, all ranks detect the error in the same data and stay in step. The host raises the error
once, at its next call or in ``synchronize``.
"""

import triton.language as tl

from tdkernels.lang.context import CTX_NOTE
from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import store_release_if


@jit
def report_if(ctx, condition, kind, first, second, third, call=0):
    """Write an error to the host error mailbox if ``condition`` holds and the mailbox is empty.

    One program of a launch calls it, with plain stores. ``check`` of the workspace raises, once, the exception that the
    workspace's ``error_of_note`` makes of the error.

    Args:
        condition: whether there is an error, such as more rows than the capacity.
        kind: the kind of error, at least 1.
        first: an integer for the message.
        second: an integer for the message.
        third: an integer for the message.
        call: the workspace's ``note_call``, which tells the host the call that the error belongs to.
    """
    note = tl.load(ctx + CTX_NOTE).to(tl.pointer_type(tl.int64))  # kind (nonzero), three integers, call
    if condition:
        unread = tl.load(note, volatile=True) != 0
        tl.store(note + 1, first.to(tl.int64), mask=unread == 0)
        tl.store(note + 2, second.to(tl.int64), mask=unread == 0)
        tl.store(note + 3, third.to(tl.int64), mask=unread == 0)
        tl.store(note + 4, tl.cast(call, tl.int64), mask=unread == 0)
        tl.debug_barrier()
        store_release_if(note, tl.full((), 0, tl.int64) + kind, (unread == 0).to(tl.int32))
