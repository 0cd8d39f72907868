"""What a kernel knows of its group: a small table of 64-bit words that the host fills and passes as ``ctx``.

Stock Triton has no hidden context to look ranks up in, so ``ctx`` is an explicit first argument of every word here.
The order of the words is shared with ``tdkernels.symm``, which writes them.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit

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
CTX_DEVICE_FAILED = tl.constexpr(11)  # address of a word: a launch of any group on this device has failed
CTX_ID = tl.constexpr(12)  # number of this table, by which the host finds the workspace that a record belongs to
CTX_BASES = tl.constexpr(13)

# A symmetric buffer begins with one "ready" word and one "status" word for each rank; two halves of signals and two of
# data follow.
MAX_RANKS = tl.constexpr(128)
SIGNALS_BEGIN = tl.constexpr(256)  # words before the signals

# A signal is ``call number << PLAN_BITS | plan id``.
PLAN_BITS = tl.constexpr(16)

# Values of a status word. 0: nothing is known against the peer. From ``1 << PLAN_BITS`` on: the peer does not make the
# call of that signal, nor a later one, since its host waits for an agreement.
STATUS_FAILED = tl.constexpr(1)  # the peer has failed, and may overwrite what it has sent

# Of a program. Where each of them is to have an element of its own there are so many: one with more would share them.
MAX_THREADS = tl.constexpr(512)

STATE_EPOCH = tl.constexpr(0)
STATE_FINISHED = tl.constexpr(1)
STATE_SIGNAL = tl.constexpr(2)  # the signal value of the running call, for transports that copy it
STATE_TICKETS = tl.constexpr(3)  # how many pieces of work of the running call have been taken
STATE_STARTED = tl.constexpr(4)  # programs of the running launch that have started, see ``check_alone``
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
def status_at(ctx, peer):
    """Pointer to our own copy of the status word of ``peer``: not zero if the peer cannot serve later calls."""
    return symm_base(ctx, rank(ctx)).to(tl.pointer_type(tl.int64)) + MAX_RANKS + peer


@jit
def signal_at(ctx, half, index):
    """Pointer to signal number ``index`` of a half (0 or 1), in our own symmetric buffer."""
    first = symm_base(ctx, rank(ctx)).to(tl.pointer_type(tl.int64)) + SIGNALS_BEGIN
    return first + half * tl.load(ctx + CTX_HALF_SIGNALS) + index


@jit
def data_at(ctx, half, peer):
    """Address (int64) of a half of the data area in the symmetric buffer of ``peer``."""
    return symm_base(ctx, peer) + tl.load(ctx + CTX_DATA) + half * tl.load(ctx + CTX_HALF_DATA)


@jit
def _state(ctx):
    return tl.load(ctx + CTX_STATE).to(tl.pointer_type(tl.int64))


@jit
def flag_at(ctx, index):
    """Pointer to private word number ``index``, for signals between programs of this rank."""
    return _state(ctx) + STATE_FLAGS + index
