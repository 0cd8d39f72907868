"""Signals: 64-bit words that only grow. ``notify`` raises one at a peer, ``wait`` waits for one of our own.

A wait is bounded. When the peer does not come it gives up, leaves a record that the host turns into a
``PeerTimeoutError``, and every other wait of this rank gives up with it, so that a kernel always ends.
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
# Timeouts that a wait for a program of our own may take. What that program does may take several waits for peers, each
# of them bounded; if one of these ends late it shall be the one that is recorded, for it knows which peer did not come.
_OWN_PATIENCE = tl.constexpr(4)


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
    """``value`` as int64, whatever integer it is: inline PTX takes registers as they come."""
    return tl.full((), 0, tl.int64) + value


@jit
def wait(ctx, signal_ptr, expected, peer, SCOPE: tl.constexpr = SYS, FOR_TMA: tl.constexpr = False):
    """Wait until the word at ``signal_ptr`` in our own memory is at least ``expected``; ``peer`` is who raises it.

    Acquire at ``SCOPE`` ("sys", or "gpu" for a producer on the same GPU). ``FOR_TMA``: what follows is read through a
    tensor descriptor. Returns the value seen, to be passed to ``consume_token``.

    For a producer on the same GPU, which may itself wait for peers, the bound is four timeouts.
    """
    expected = _wide(expected)
    seen = _spin(ctx, signal_ptr, expected, peer, SCOPE, 1 if SCOPE == SYS else _OWN_PATIENCE)
    _record_wait(ctx, seen < expected, RECORD_TIMEOUT, peer, signal_ptr, expected, seen)
    if FOR_TMA:
        fence_before_tma_load()
    return seen


@jit
def consume_token(value, token):
    """``value``, tied to the wait that returned ``token``: a load through it cannot be moved before that wait."""
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
    """Raise the signal that ``peer`` keeps where we keep ``signal_ptr``, after all that this program has stored.

    Release at ``SCOPE`` after the whole program's stores. ``OP``: "set" (one producer a word) or "add" (many).
    ``CHECK_FAILED``: the data that the signal announces depends on an earlier wait of this program. Once a wait of this
    rank has timed out, no such signal is sent, so that peers never consume invalid data. "set" only.
    """
    remote = symm_at(ctx, signal_ptr, peer)
    value = _wide(value)
    if OP == "set":
        # 0 is the signal of a void launch. The word may hold one of an earlier call that the peer has yet to see.
        tl.debug_barrier()
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
    """``notify`` every peer, by setting the signal that it keeps where we keep ``signal_ptr``, all at the same time.

    One after the other each release would wait until the signal before has arrived. ``count``: so many signals, which
    follow each other. ``WITH_OWN``: ourselves, too.
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
    """Set the words at some offsets of some peers' buffers, as many as there are, by a thread each."""
    bases = tl.load(ctx + CTX_BASES + peers, mask=there, other=0)
    there &= value != 0  # that of a void launch, as in notify
    if CHECK_FAILED:
        tl.debug_barrier()  # another thread may just have given up
        there &= failed(ctx) == 0
    store_release_each((bases + offsets).to(tl.pointer_type(tl.int64)), _wide(value), there)


@jit
def _lanes(ctx):
    """(a rank, a number below ``step``, step): all of them, for threads that each look at another signal."""
    lanes = tl.arange(0, MAX_RANKS)
    ranks = num_ranks(ctx)
    return lanes % ranks, lanes // ranks, tl.full((), MAX_RANKS, tl.int32) // ranks


@jit
def wait_plan_all(ctx, first_ptr, stride, expected, count=None, WITH_OWN: tl.constexpr = False):
    """``wait_plan`` for a signal of every peer at once; that of rank r is ``stride * r`` words behind ``first_ptr``.

    What all peers have stored before is visible to the loads that follow, tensor descriptors excepted. ``count``: so
    many signals of every peer, which follow each other. ``WITH_OWN``: and ours, which stand among them. Returns whether
    all have come in time, as ``completed``: one answer of all threads, which costs nothing where nobody asks for it.
    """
    me = rank(ctx)
    ranks = num_ranks(ctx)
    if target() == "cuda":
        missed = tl.full((MAX_RANKS,), 0, tl.int32)
        if count is None:
            peers = tl.arange(0, MAX_RANKS)
            is_peer = (peers < ranks) & (WITH_OWN | (peers != me))
            # A thread without a peer looks at a word of our own, which is always late enough for it.
            signal_ptrs = first_ptr + tl.where(is_peer, peers, me).to(tl.int64) * stride
            missed |= _wait_each(ctx, signal_ptrs, expected, peers, is_peer)
        else:
            peers, numbers, step = _lanes(ctx)
            for first in range(0, count, step):
                there = (numbers < step) & (first + numbers < count) & (WITH_OWN | (peers != me))
                offsets = tl.where(there, peers, me).to(tl.int64) * stride + tl.where(there, first + numbers, 0)
                missed |= _wait_each(ctx, first_ptr + offsets, expected, peers, there)
        tl.debug_barrier()  # each thread has acquired from one peer; now all of them have from all
        return max_of(missed, 0) == 0
    else:
        all_came = _wide(expected) > 0
        for number in range(1 if count is None else count):
            for source in range(ranks):
                if WITH_OWN or source != me:
                    all_came &= wait_plan(ctx, first_ptr + source * stride + number, expected, source) == expected
        return all_came


@jit
def _wait_each(ctx, signal_ptrs, expected, peers, there):
    """``wait_plan`` by each thread for a word of its own, where one is ``there``; other threads only look at it.

    Returns what is not 0 where a word did not come in time.
    """
    expected = tl.where(there, _wide(expected), NEVER)
    start = (expected >> PLAN_BITS) << PLAN_BITS
    seen = _spin(ctx, signal_ptrs, start, peers, SYS, 1)
    _record_wait(ctx, seen < start, RECORD_PLAN_TIMEOUT, peers, signal_ptrs, expected, seen)
    mismatch = (seen != expected) & ((seen >> PLAN_BITS) == (expected >> PLAN_BITS))
    _record_wait(ctx, mismatch, RECORD_PLAN_MISMATCH, peers, signal_ptrs, expected, seen)
    return (there & ((seen != expected) | (expected <= 0))).to(tl.int32)


@jit
def is_last_arriver(flag_ptr, count, mine=1):
    """Whether we are the last of ``count`` programs of this rank to come here; they share a private word, of zero.

    ``mine``: for so many of them, say pieces of work, of which a program has done several: each coming waits until all
    that was stored is in memory, at whatever rank.

    The last one sees all that the others have stored, and may speak for them in a ``notify``. It sets the word back to
    zero, for the next launch. Acquire and release at GPU scope, after the whole program's stores.
    """
    tl.debug_barrier()
    before = tl.atomic_add(flag_ptr, tl.full((), 0, tl.int64) + mine, sem="acq_rel", scope="gpu")
    is_last = before == count - mine
    if is_last:
        tl.store(flag_ptr, tl.full((), 0, tl.int64))
    return is_last


@jit
def wait_plan(ctx, signal_ptr, expected, peer, SCOPE: tl.constexpr = SYS, FOR_TMA: tl.constexpr = False):
    """``wait`` for a signal of an operator, ``epoch << PLAN_BITS | plan``, and refuse a peer that follows another plan.

    The same epoch with another plan means that the peer made this call with another shape or config: its data must not
    be used, and the record says so.
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
    """Tell every peer on this node if this rank has failed: from here on it may overwrite what it has sent them.

    For copies by the host, which cannot look. The peers' ``check_peers`` comes after they have read it.
    """
    me = rank(ctx)
    peers = tl.arange(0, MAX_RANKS)
    bases = tl.load(ctx + CTX_BASES + peers, mask=peers < num_ranks(ctx), other=0)
    words = (bases + 8 * (MAX_RANKS + me)).to(tl.pointer_type(tl.int64))
    has_failed = tl.load(failed_at(ctx), volatile=True) != 0
    store_release_each(words, tl.full((), STATUS_FAILED, tl.int64), (bases != 0) & (peers != me) & has_failed)


@jit
def check_peers(ctx):
    """Record a failure if a peer has failed: what it had sent may have been overwritten while this rank read it."""
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
    status = tl.load(status_at(ctx, peer), volatile=True)
    _record_wait(ctx, status == STATUS_FAILED, RECORD_PEER_FAILED, peer, status_at(ctx, peer), status, status)


@jit
def completed(seen, expected):
    """Whether a wait, which returned ``seen``, saw just what it expected: one answer of all threads, for a branch.

    Of that alone may hang what addresses are made of what has come: threads can give up each for itself. Never of a
    launch that expects nothing, see ``signal_of``.
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
def _spin(ctx, signal_ptr, expected, peer, SCOPE: tl.constexpr, PATIENCE: tl.constexpr):
    """Wait for a word to reach ``expected``; give up after the timeout, or if this rank or ``peer`` cannot go on."""
    timeout_ns = tl.load(ctx + CTX_TIMEOUT_NS) * PATIENCE
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
    # Each thread spins for itself: no barrier, no shared memory, and each has acquired what it goes on to read. The
    # scope is always sys: on a word that is in our own memory it costs the same as gpu. Threads of a warp leave the
    # loop one by one and need not come together again by themselves, but what follows wants them together: wgmma, whose
    # descriptors the warp holds in common, went astray. The address of the peer's status word is worked out only where
    # the signal is not there at once.
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
