"""Context of a kernel: a table of 64-bit words that the host fills and passes as ``ctx``.

Stock Triton has no hidden context from which a kernel could read its rank, so ``ctx`` is an explicit first argument of
nearly every primitive. ``tdkernels.symm`` writes the table and uses the same order of words.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit

# Indices into the table. The base addresses of all ranks start at CTX_BASES, with 0 for ranks on other nodes. The ids
# of all ranks in the network library (PE numbers) follow.
CTX_RANK = tl.constexpr(0)
CTX_NUM_RANKS = tl.constexpr(1)
CTX_TIMEOUT_NS = tl.constexpr(2)
CTX_STATE = tl.constexpr(3)  # address of this rank's private words, see STATE_*
CTX_FAILED = tl.constexpr(4)  # address of the group's failure words, see ``failure_record``
CTX_RECORD = tl.constexpr(5)  # address of the group's failure record, in memory that the host can read
CTX_NOTE = tl.constexpr(6)  # address of the workspace's host error mailbox
CTX_HALF_SIGNALS = tl.constexpr(7)  # number of signals in a half
CTX_DATA = tl.constexpr(8)  # offset of the data area in a symmetric buffer
CTX_HALF_DATA = tl.constexpr(9)  # bytes of one half of the data area
CTX_LOCAL_RANKS = tl.constexpr(10)  # number of ranks on a node
CTX_DEVICE_FAILED = tl.constexpr(11)  # address of a word: nonzero if a launch of any group on this device failed
CTX_ID = tl.constexpr(12)  # id of this table: the host looks up the workspace of a record by it
CTX_BASES = tl.constexpr(13)

# A symmetric buffer begins with one "ready" word and one "status" word for each rank. Two halves of signals and two
# halves of data follow.
MAX_RANKS = tl.constexpr(128)
SIGNALS_BEGIN = tl.constexpr(256)  # words before the signals

# A signal is ``call number << PLAN_BITS | plan id``.
PLAN_BITS = tl.constexpr(16)

# Values of a status word. 0: no failure is known. From ``1 << PLAN_BITS`` on: the value is a signal, and the peer makes
# neither the call of that signal nor a later one, because its host waits in a consensus check.
STATUS_FAILED = tl.constexpr(1)  # the peer has failed and may overwrite data that it has sent

# Upper bound for the threads of a program. In a tensor of this size each thread owns at least one element; a program
# with more threads would share elements between threads.
MAX_THREADS = tl.constexpr(512)

STATE_EPOCH = tl.constexpr(0)
STATE_FINISHED = tl.constexpr(1)
STATE_SIGNAL = tl.constexpr(2)  # signal value of the running call, for transports that copy it
STATE_TICKETS = tl.constexpr(3)  # work items of the running call that have been fetched, of two queues in 32 bits each
STATE_STARTED = tl.constexpr(4)  # programs of the running launch that have started, see ``check_alone``
STATE_FLAGS = tl.constexpr(16)  # first of the flags between programs of this rank


@jit
def rank(ctx):
    """Return this process's rank in the group (int32)."""
    return tl.load(ctx + CTX_RANK).to(tl.int32)


@jit
def num_ranks(ctx):
    """Return the group's size W (int32), at most 128."""
    return tl.load(ctx + CTX_NUM_RANKS).to(tl.int32)


@jit
def local_ranks(ctx):
    """Return the number of ranks on a node (int32). Rank r is on node ``r // local_ranks``."""
    return tl.load(ctx + CTX_LOCAL_RANKS).to(tl.int32)


@jit
def symm_base(ctx, peer):
    """Return the address (int64) at which this rank can access the symmetric buffer of ``peer``; 0 for another node."""
    return tl.load(ctx + CTX_BASES + peer)


@jit
def symm_at(ctx, ptr, peer):
    """Translate a pointer into this rank's symmetric buffer to the same offset in the buffer of ``peer``.

    Args:
        ptr: a pointer into this rank's symmetric buffer.
        peer: a rank on the same node.

    Returns:
        A pointer of the same type.
    """
    offset = ptr.to(tl.int64) - symm_base(ctx, rank(ctx))
    return (symm_base(ctx, peer) + offset).to(ptr.dtype)


@jit
def ready_at(ctx, peer):
    """Return the pointer to this rank's copy of the ready word of ``peer``.

    ``peer`` sets the word when it reaches a barrier.
    """
    return symm_base(ctx, rank(ctx)).to(tl.pointer_type(tl.int64)) + peer


@jit
def status_at(ctx, peer):
    """Return the pointer to this rank's copy of the status word of ``peer``.

    The word is nonzero if the peer cannot serve later calls: it has failed, or its host waits in a consensus check.
    """
    return symm_base(ctx, rank(ctx)).to(tl.pointer_type(tl.int64)) + MAX_RANKS + peer


@jit
def signal_at(ctx, half, index):
    """Return the pointer to signal ``index`` of a half (0 or 1) in this rank's symmetric buffer."""
    first = symm_base(ctx, rank(ctx)).to(tl.pointer_type(tl.int64)) + SIGNALS_BEGIN
    return first + half * tl.load(ctx + CTX_HALF_SIGNALS) + index


@jit
def data_at(ctx, half, peer):
    """Return the address (int64) of a half (0 or 1) of the data area in the symmetric buffer of ``peer``."""
    return symm_base(ctx, peer) + tl.load(ctx + CTX_DATA) + half * tl.load(ctx + CTX_HALF_DATA)


@jit
def _state(ctx):
    """Return the pointer to this rank's private words."""
    return tl.load(ctx + CTX_STATE).to(tl.pointer_type(tl.int64))


@jit
def flag_at(ctx, index):
    """Return the pointer to private flag ``index``, for signals between programs of this rank.

    The host reserves flags with ``workspace.prepare(..., num_flags=...)``.
    """
    return _state(ctx) + STATE_FLAGS + index
