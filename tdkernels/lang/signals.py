"""Signals: 64-bit words that only increase. ``notify`` sets one at a peer; ``wait`` waits for one of this rank.

Every wait is bounded. If a signal does not arrive in time, the wait gives up and leaves a record, from which the host
raises a ``PeerTimeoutError``. All other waits of this rank then give up as well, so a kernel always ends.
"""

import triton.language as tl

from tdkernels.lang.context import (
    CTX_BASES,
    CTX_RANK,
    CTX_TIMEOUT_NS,
    MAX_RANKS,
    MAX_THREADS,
    PLAN_BITS,
    STATUS_FAILED,
    num_ranks,
    rank,
    status_at,
    symm_at,
    symm_base,
)
from tdkernels.lang.failure_record import (
    RECORD_PEER_FAILED,
    RECORD_PLAN_MISMATCH,
    RECORD_PLAN_TIMEOUT,
    RECORD_TIMEOUT,
    end_wait,
    failed,
    failed_at,
    record_if,
)
from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import (
    SYS,
    add_release,
    barrier,
    clock_ns,
    fence_acquire_release,
    fence_before_tma_load,
    load_acquire,
    store_release_each,
    store_release_if,
)
from tdkernels.lang.reduce import max_of
from tdkernels.lang.targets import interpreter_yield, target

SET = tl.constexpr("set")
NEVER = tl.constexpr(-(1 << 62))  # below every signal
# Timeout multiplier of a wait for a program of the same GPU. That program may itself wait for peers several times, and
# each of these waits is bounded. If one of them times out, that wait must be recorded, since it knows the missing peer.
_SAME_GPU_TIMEOUTS = tl.constexpr(4)

_SPIN = tl.constexpr(
    f"""{{
    .reg .pred p, q; .reg .b64 start, now, failed, status, at;
    ld.acquire.sys.global.b64 $0, [$1];
    setp.ge.s64 p, $0, $2;
    @p bra REACHED;
    ld.global.b64 at, [$5+{8 * CTX_RANK.value}];
    mad.lo.s64 at, at, 8, $5;
    ld.global.b64 at, [at+{8 * CTX_BASES.value}];
    mad.lo.s64 at, $6, 8, at;
    mov.u64 start, %globaltimer;
    SPIN:
    nanosleep.u32 32;
    ld.acquire.sys.global.b64 $0, [$1];
    setp.ge.s64 p, $0, $2;
    @p bra REACHED;
    ld.relaxed.gpu.global.b64 failed, [$4];
    setp.ne.s64 p, failed, 0;
    @p bra REACHED;
    ld.relaxed.sys.global.b64 status, [at+{8 * MAX_RANKS.value}];
    setp.ne.s64 q, status, 0;
    setp.le.and.s64 q, status, $2, q;
    @q bra REACHED;
    mov.u64 now, %globaltimer;
    sub.s64 now, now, start;
    setp.lt.s64 p, now, $3;
    @p bra SPIN;
    REACHED:
    bar.warp.sync 0xffffffff;
    }}"""
)


@jit
def _wide(value):
    """Return an integer of any type as int64: inline PTX takes registers as they are."""
    return tl.cast(value, tl.int64)


@jit
def wait(ctx, signal_ptr, expected, peer, SCOPE: tl.constexpr = SYS, FOR_TMA: tl.constexpr = False):
    """Wait until a signal of this rank is at least ``expected``.

    Acquire at ``SCOPE`` (on NVIDIA always at system scope). The wait is bounded by the timeout, or by four timeouts for
    a producer on the same GPU, which may itself wait for peers. Returns the value seen, for ``consume_token``.

    Args:
        signal_ptr: the signal, in this rank's memory.
        expected: the value to wait for.
        peer: the rank that sets the signal.
        SCOPE: "sys", or "gpu" for a producer on the same GPU.
        FOR_TMA: the data is read through a tensor descriptor; adds a proxy fence.
    """
    expected = _wide(expected)
    seen = _spin(ctx, signal_ptr, expected, peer, SCOPE, 1 if SCOPE == SYS else _SAME_GPU_TIMEOUTS)
    _record_wait(ctx, seen < expected, RECORD_TIMEOUT, peer, signal_ptr, expected, seen)
    if FOR_TMA:
        fence_before_tma_load()
    return seen


@jit
def consume_token(value, token):
    """Return ``value``, tied to the wait that returned ``token``: loads through it cannot be moved before that wait."""
    if target() == "cuda":
        return tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l,l", [value.to(tl.int64), token], tl.int64, is_pure=False, pack=1
        ).to(value.dtype)
    else:
        return value


@jit
def notify(
    ctx, signal_ptr, peer, value, OP: tl.constexpr = SET, SCOPE: tl.constexpr = SYS, CHECK_FAILED: tl.constexpr = False
):
    """Set or increase a signal of a peer, after all earlier stores of this program.

    Release at ``SCOPE`` after a barrier. "set" sets nothing if ``value`` is 0, the signal of a void launch.

    Args:
        signal_ptr: the signal, in this rank's buffer. The same word is set in the peer's buffer.
        peer: the rank to signal.
        value: the value to set or to add.
        OP: "set" for one producer per word, "add" for many.
        SCOPE: "sys", or "gpu" for a waiter on the same GPU.
        CHECK_FAILED: the data that the signal announces depends on an earlier wait of this program. Once a wait of this
            rank has timed out, no such signal is sent, so that peers never consume invalid data. "set" only.
    """
    remote = symm_at(ctx, signal_ptr, peer)
    value = _wide(value)
    if OP == "set":
        # 0 is the signal of a void launch. The word may hold an earlier call's signal that the peer has not read yet.
        barrier()
        goes = value != 0
        if CHECK_FAILED:
            goes &= failed(ctx) == 0
        store_release_if(remote, value, goes.to(tl.int32), SCOPE)
    else:
        tl.static_assert(CHECK_FAILED == False)  # noqa: E712  a constexpr
        add_release(remote, value, SCOPE)


@jit
def notify_all(
    ctx, signal_ptr, value, CHECK_FAILED: tl.constexpr = False, count=None, WITH_OWN: tl.constexpr = False
):
    """Set a signal of every peer at once. With successive ``notify``, each release waits for the previous signal.

    Args:
        signal_ptr: the signal, in this rank's buffer. The same word is set in each peer's buffer.
        value: the value to set.
        CHECK_FAILED: as for ``notify``.
        count: number of consecutive signals to set; None: one.
        WITH_OWN: also set the signal of this rank.
    """
    me = rank(ctx)
    offset = signal_ptr.to(tl.int64) - symm_base(ctx, me)
    if count is None:
        peers = tl.arange(0, MAX_RANKS)
        _set_all(ctx, offset, peers, (peers < num_ranks(ctx)) & (WITH_OWN | (peers != me)), value, CHECK_FAILED)
    else:
        peers, numbers, step = _lanes(ctx)
        for first in range(0, count, step):
            there = (numbers < step) & (first + numbers < count) & (WITH_OWN | (peers != me))
            _set_all(ctx, offset + 8 * (first + numbers).to(tl.int64), peers, there, value, CHECK_FAILED)


@jit
def _set_all(ctx, offsets, peers, there, value, CHECK_FAILED: tl.constexpr):
    """Set one word in each selected peer's buffer, at the given byte offsets, with one thread per word."""
    bases = tl.load(ctx + CTX_BASES + peers, mask=there, other=0)
    there &= value != 0  # 0 in a void launch, as in notify
    if CHECK_FAILED:
        tl.debug_barrier()  # another thread's wait may just have failed
        there &= failed(ctx) == 0
    store_release_each((bases + offsets).to(tl.pointer_type(tl.int64)), _wide(value), there)


@jit
def _lanes(ctx):
    """Return (rank, number below ``step``, step) per thread: all pairs, so that each thread handles another signal."""
    lanes = tl.arange(0, MAX_RANKS)
    ranks = num_ranks(ctx)
    return lanes % ranks, lanes // ranks, tl.full((), MAX_RANKS, tl.int32) // ranks


@jit
def wait_plan_all(ctx, first_ptr, stride, expected, count=None, WITH_OWN: tl.constexpr = False):
    """``wait_plan`` for a signal of every peer at once.

    Data that the peers stored before their signal is visible to the loads that follow, except loads through tensor
    descriptors. Returns whether all signals arrived in time, with the same result in all threads, as ``completed``.
    This result costs nothing if it is not used.

    Args:
        first_ptr: the signal of rank 0, in this rank's buffer.
        stride: distance in words between the signals of consecutive ranks.
        expected: the signal value, from ``call``.
        count: number of consecutive signals of each peer; None: one.
        WITH_OWN: also wait for the signals of this rank.
    """
    me = rank(ctx)
    ranks = num_ranks(ctx)
    if target() == "cuda":
        missed = tl.full((MAX_RANKS,), 0, tl.int32)
        if count is None:
            peers = tl.arange(0, MAX_RANKS)
            is_peer = (peers < ranks) & (WITH_OWN | (peers != me))
            # A thread without a peer reads a word of this rank: any value satisfies its wait.
            signal_ptrs = first_ptr + tl.where(is_peer, peers, me).to(tl.int64) * stride
            missed |= _wait_each(ctx, signal_ptrs, expected, peers, is_peer)
        else:
            peers, numbers, step = _lanes(ctx)
            for first in range(0, count, step):
                there = (numbers < step) & (first + numbers < count) & (WITH_OWN | (peers != me))
                offsets = tl.where(there, peers, me).to(tl.int64) * stride + tl.where(there, first + numbers, 0)
                missed |= _wait_each(ctx, first_ptr + offsets, expected, peers, there)
        barrier()  # each thread has acquired from one peer; after the barrier, all threads have from all peers
        return max_of(missed, 0) == 0
    else:
        all_arrived = _wide(expected) > 0
        for number in range(1 if count is None else count):
            for source in range(ranks):
                if WITH_OWN or source != me:
                    all_arrived &= wait_plan(ctx, first_ptr + source * stride + number, expected, source) == expected
        return all_arrived


@jit
def _wait_each(ctx, signal_ptrs, expected, peers, there):
    """``wait_plan`` by each thread for its own word, if ``there``. Return nonzero if it did not see ``expected``."""
    expected = tl.where(there, _wide(expected), NEVER)  # the other threads only read their word
    start = (expected >> PLAN_BITS) << PLAN_BITS
    seen = _spin(ctx, signal_ptrs, start, peers, SYS, 1)
    _record_wait(ctx, seen < start, RECORD_PLAN_TIMEOUT, peers, signal_ptrs, expected, seen)
    mismatch = (seen != expected) & ((seen >> PLAN_BITS) == (expected >> PLAN_BITS))
    _record_wait(ctx, mismatch, RECORD_PLAN_MISMATCH, peers, signal_ptrs, expected, seen)
    return (there & ((seen != expected) | (expected <= 0))).to(tl.int32)


@jit
def is_last_arriver(flag_ptr, count, mine=1):
    """Return whether this program is the last of ``count`` programs of this rank to arrive.

    The last one sees all stores of the others and may signal for them with ``notify``. It resets the word to zero for
    the next launch. Contains a barrier after the program's stores, then an acquire and release at GPU scope.

    Args:
        flag_ptr: a private word that the programs share, initially zero.
        count: number of arrivals.
        mine: number of arrivals that this call counts for, such as the work items that the program has completed. Each
            call waits until all stores are in memory, on whatever rank, so fewer calls are cheaper.
    """
    tl.debug_barrier()
    before = tl.atomic_add(flag_ptr, tl.full((), 0, tl.int64) + mine, sem="acq_rel", scope="gpu")
    is_last = before == count - mine
    if is_last:
        tl.store(flag_ptr, tl.full((), 0, tl.int64))
    return is_last


@jit
def wait_plan(ctx, signal_ptr, expected, peer, SCOPE: tl.constexpr = SYS, FOR_TMA: tl.constexpr = False):
    """``wait`` for a signal ``call << PLAN_BITS | plan`` of a collective kernel, and reject a peer with another plan.

    The same call with another plan means that the peer made it with another shape or config. Its data must not be used,
    and the failure record says so (``PlanMismatchError``). Returns the value seen.

    Args:
        signal_ptr: the signal, in this rank's memory.
        expected: the signal value, from ``call``.
        peer: the rank that sets the signal.
        SCOPE: as for ``wait``.
        FOR_TMA: as for ``wait``.
    """
    expected = _wide(expected)
    start = (expected >> PLAN_BITS) << PLAN_BITS
    seen = _spin(ctx, signal_ptr, start, peer, SCOPE, 1)
    _record_wait(ctx, seen < start, RECORD_PLAN_TIMEOUT, peer, signal_ptr, expected, seen)
    mismatch = (seen != expected) & ((seen >> PLAN_BITS) == (expected >> PLAN_BITS))
    _record_wait(ctx, mismatch, RECORD_PLAN_MISMATCH, peer, signal_ptr, expected, seen)
    if FOR_TMA:
        fence_before_tma_load()
    return seen


@jit
def announce_failure(ctx):
    """If this rank has failed, set its status word at every peer on this node: it may overwrite data that it has sent.

    For copies by the host, which cannot check for a failure. The peers call ``check_peers`` after they have read the
    data.
    """
    me = rank(ctx)
    peers = tl.arange(0, MAX_RANKS)
    bases = tl.load(ctx + CTX_BASES + peers, mask=peers < num_ranks(ctx), other=0)
    words = (bases + 8 * (MAX_RANKS + me)).to(tl.pointer_type(tl.int64))
    has_failed = tl.load(failed_at(ctx), volatile=True) != 0
    store_release_each(words, tl.full((), STATUS_FAILED, tl.int64), (bases != 0) & (peers != me) & has_failed)


@jit
def check_peers(ctx):
    """Record a failure if a peer has failed: it may have overwritten data while this rank read it."""
    fence_acquire_release()
    if target() == "cuda":
        peers = tl.arange(0, MAX_RANKS)
        _check_peer(ctx, peers)
    else:
        for peer in range(num_ranks(ctx)):
            _check_peer(ctx, peer)
    end_wait(ctx)


@jit
def _check_peer(ctx, peer):
    """Record a failure if the status word of ``peer`` says that it has failed."""
    status = tl.load(status_at(ctx, peer), volatile=True)
    _record_wait(ctx, status == STATUS_FAILED, RECORD_PEER_FAILED, peer, status_at(ctx, peer), status, status)


@jit
def completed(seen, expected):
    """Return whether a wait saw exactly the signal that it expected, with the same result in all threads. A barrier.

    ``seen`` is the value that the wait returned. Each thread gives up for itself, so only a branch on this result is
    safe. Use it before computing addresses from received data. It is False if ``expected`` is 0 (a void launch,
    ``signal_of``).
    """
    if target() == "cuda":
        missed = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s64 p, $1, $2; setp.gt.and.s64 p, $2, 0, p; "
            "selp.b32 $0, 0, 1, p; or.b32 $0, $0, $3; }",
            "=r,l,l,r", [seen, _wide(expected), tl.full((MAX_THREADS,), 0, tl.int32)], tl.int32, is_pure=False, pack=1,
        )
        return max_of(missed, 0) == 0
    else:
        return (seen == expected) & (expected > 0)


@jit
def _spin(ctx, signal_ptr, expected, peer, SCOPE: tl.constexpr, TIMEOUTS: tl.constexpr):
    """Wait until a word reaches ``expected``. Give up after the timeout, or if this rank or ``peer`` has failed."""
    timeout_ns = tl.load(ctx + CTX_TIMEOUT_NS) * TIMEOUTS
    failed_ptr = failed_at(ctx)
    if target() == "cuda":
        return _spin_ptx(ctx, signal_ptr, expected, peer, timeout_ns, failed_ptr)
    else:
        seen = load_acquire(signal_ptr, SCOPE)
        deadline = clock_ns() + timeout_ns
        waiting = seen < expected
        while waiting:
            if target() == "interpreter":
                interpreter_yield(deadline - timeout_ns)
            seen = load_acquire(signal_ptr, SCOPE)
            status = tl.load(status_at(ctx, peer), volatile=True)
            is_hopeless = (status != 0) & (status <= expected)
            gave_up = (clock_ns() > deadline) | (tl.load(failed_ptr, volatile=True) != 0) | is_hopeless
            waiting = (seen < expected) & (gave_up == 0)
        return seen


@jit
def _spin_ptx(ctx, signal_ptr, expected, peer, timeout_ns, failed_ptr):
    # Each thread spins for itself: no barrier, no shared memory, and each thread has acquired the data that it reads
    # next. The scope is always sys: on a word in this rank's own memory it costs the same as gpu. Threads of a warp
    # leave the loop one by one and do not necessarily reconverge. The code that follows needs them converged: without
    # ``bar.warp.sync``, wgmma, whose descriptors are shared by the warp, misbehaved. The address of the peer's status
    # word is computed only if the signal has not arrived yet.
    return tl.inline_asm_elementwise(
        _SPIN,
        "=&l,l,l,l,l,l,l,~{memory}",
        [signal_ptr, expected, timeout_ns, failed_ptr, ctx, _wide(peer)],
        tl.int64,
        is_pure=False,
        pack=1,
    )


@jit
def _record_wait(ctx, condition, KIND: tl.constexpr, peer, signal_ptr, expected, seen):
    """``record_if`` for a wait for a signal of ``peer``."""
    record_if(ctx, condition, KIND, _wide(peer), signal_ptr.to(tl.int64), expected, seen)
