"""What a kernel knows of its group: a small table of 64-bit words that the host fills and passes as ``ctx``.

Stock Triton has no hidden context to look ranks up in, so ``ctx`` is an explicit first argument of every word here.
The order of the words is shared with ``tdkernels.symm``, which writes them.
"""

import triton.language as tl

from tdkernels.lang._jit import jit
from tdkernels.lang._reduce import max_of

# Indices into the table; from CTX_BASES on follow the base addresses of all ranks, 0 for those on other nodes, then the
# numbers by which the network knows the ranks.
CTX_RANK = tl.constexpr(0)
CTX_NUM_RANKS = tl.constexpr(1)
CTX_TIMEOUT_NS = tl.constexpr(2)
CTX_STATE = tl.constexpr(3)  # address of this rank's private words: epoch, finished programs
CTX_FAILED = tl.constexpr(4)  # address of two words: a wait of the group has given up, and the launch it was in is over
CTX_RECORD = tl.constexpr(5)  # address of the group's error record, which the host can read
CTX_NOTE = tl.constexpr(6)  # address of the workspace's note, which the host can read
CTX_HALF_SIGNALS = tl.constexpr(7)  # how many signals a half holds
CTX_DATA = tl.constexpr(8)  # offset of the data area in a symmetric buffer
CTX_HALF_DATA = tl.constexpr(9)  # bytes of one half of the data area
CTX_LOCAL_RANKS = tl.constexpr(10)  # ranks on a node
CTX_BASES = tl.constexpr(11)

# A symmetric buffer begins with one "ready" word for each rank; two halves of signals and two of data follow.
MAX_RANKS = tl.constexpr(128)

# Of a program. Where each of them is to have an element of its own there are so many: one with more would share them.
MAX_THREADS = tl.constexpr(512)

STATE_EPOCH = tl.constexpr(0)
STATE_FINISHED = tl.constexpr(1)
STATE_SIGNAL = tl.constexpr(2)  # the signal value of the running call, for transports that copy it
STATE_TICKETS = tl.constexpr(3)  # how many pieces of work of the running call have been taken
STATE_FLAGS = tl.constexpr(16)  # from here on: flags between programs of this rank


@jit
def rank(ctx):
    """This process's rank in the group."""
    return tl.load(ctx + CTX_RANK).to(tl.int32)


@jit
def num_ranks(ctx):
    """The group's size W."""
    return tl.load(ctx + CTX_NUM_RANKS).to(tl.int32)


@jit
def local_ranks(ctx):
    """How many of the group's ranks are on a node: rank r is on node ``r // local_ranks``."""
    return tl.load(ctx + CTX_LOCAL_RANKS).to(tl.int32)


@jit
def symm_base(ctx, peer):
    """The address (int64) at which this rank reaches the symmetric buffer of ``peer``, which is on its node."""
    return tl.load(ctx + CTX_BASES + peer)


@jit
def symm_at(ctx, ptr, peer):
    """Where ``peer`` keeps what this rank keeps at ``ptr``; ``ptr`` points into this rank's symmetric buffer."""
    offset = ptr.to(tl.int64) - symm_base(ctx, rank(ctx))
    return (symm_base(ctx, peer) + offset).to(ptr.dtype)


@jit
def ready_at(ctx, peer):
    """Our own copy of the word by which ``peer`` says that it has come to a barrier."""
    return symm_base(ctx, rank(ctx)).to(tl.pointer_type(tl.int64)) + peer


@jit
def signal_at(ctx, half, index):
    """Pointer to signal number ``index`` of a half (0 or 1), in our own symmetric buffer."""
    first = symm_base(ctx, rank(ctx)).to(tl.pointer_type(tl.int64)) + MAX_RANKS
    return first + half * tl.load(ctx + CTX_HALF_SIGNALS) + index


@jit
def data_at(ctx, half, peer):
    """Address (int64) of a half of the data area in the symmetric buffer of ``peer``."""
    return symm_base(ctx, peer) + tl.load(ctx + CTX_DATA) + half * tl.load(ctx + CTX_HALF_DATA)


@jit
def _state(ctx):
    return tl.load(ctx + CTX_STATE).to(tl.pointer_type(tl.int64))


@jit
def failed_at(ctx):
    """Pointer to the word that is not zero when a wait of this rank has given up, in whatever launch of the group.

    The next word is not zero when that launch is over.
    """
    return tl.load(ctx + CTX_FAILED).to(tl.pointer_type(tl.int64))


@jit
def flag_at(ctx, index):
    """Pointer to private word number ``index``, for signals between programs of this rank."""
    return _state(ctx) + STATE_FLAGS + index


@jit
def epoch(ctx):
    """How many collective kernels have finished on this workspace: the running one is number ``epoch + 1``."""
    return tl.load(_state(ctx) + STATE_EPOCH)


@jit
def signal_of(ctx, number, plan):
    """What the ranks tell each other in call ``number`` (int64) by a plan; 0 if an earlier launch of this rank gave up.

    Then the operands may be what an earlier launch could not compute. 0 is below every signal: nobody waits for it, and
    no peer that hears it goes on. The launch itself waits for nothing, and ``in_time`` holds for nothing.
    """
    return tl.where(tl.load(failed_at(ctx) + 1) == 0, (number << 8) | plan, 0)


@jit
def call(ctx, plan):
    """(number, half, signal) of the running call of a collective kernel; see ``signal_of``."""
    number = epoch(ctx) + 1
    return number, (number % 2).to(tl.int32), signal_of(ctx, number, plan)


@jit
def failed(ctx):
    """Whether a wait of this rank has given up, so that what it computes must not be passed on as right.

    Each thread reads it for itself: for a mask, not for a branch with a barrier in it.
    """
    return tl.load(failed_at(ctx), volatile=True) != 0


@jit
def failed_for_all(ctx):
    """``failed``: one answer of all threads, for a branch."""
    words = failed_at(ctx) + tl.full((MAX_THREADS,), 0, tl.int32)
    return max_of((tl.load(words, volatile=True) != 0).to(tl.int32), 0) != 0


@jit
def keep_signal(ctx, signal):
    """Leave the value of this call's signals where the copy engine can take it from."""
    tl.store(_state(ctx) + STATE_SIGNAL, signal)


@jit
def finish(ctx, ADVANCE: tl.constexpr = True, step=1):
    """Advance the epoch when the last program of the launch comes here; the last statement of a collective kernel.

    Done on the device so that a replayed CUDA graph counts on. Every program read the epoch before it came here, and
    the next launch on this workspace is ordered after this one by the stream, so nobody reads a word that changes.
    Tickets begin at zero again. ``ADVANCE=False`` does not count, for a launch in the middle of a call; nor does
    ``step`` 0, for one that had to do with no peer, as all ranks know. After a wait has given up, later launches are
    void (``signal_of``).
    """
    state = _state(ctx)
    tl.debug_barrier()
    before = tl.atomic_add(state + STATE_FINISHED, tl.full((), 1, tl.int64), sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(state + STATE_FINISHED, tl.full((), 0, tl.int64))
        tl.store(state + STATE_TICKETS, tl.full((), 0, tl.int64))
        words = failed_at(ctx)
        tl.store(words + 1, tl.full((), 1, tl.int64), mask=tl.load(words, volatile=True) != 0)
        if ADVANCE:
            tl.store(state + STATE_EPOCH, tl.load(state + STATE_EPOCH) + step)
