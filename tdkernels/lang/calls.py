"""One call of a collective kernel: its number and signal, whether it is void, and its end."""

import triton.language as tl

from tdkernels.lang.context import (
    MAX_THREADS,
    PLAN_BITS,
    STATE_EPOCH,
    STATE_FINISHED,
    STATE_SIGNAL,
    STATE_STARTED,
    STATE_TICKETS,
    _state,
)
from tdkernels.lang.failure_record import RECORD_OVERLAP, RECORD_VOID, device_failed_at, end_wait, failed_at, record_if
from tdkernels.lang.kernel import jit
from tdkernels.lang.reduce import max_of
from tdkernels.lang.targets import target


@jit
def epoch(ctx):
    """How many collective kernels have finished on this workspace: the running one is number ``epoch + 1``."""
    return tl.load(_state(ctx) + STATE_EPOCH)


@jit
def signal_of(ctx, number, plan):
    """Return the signal of call ``number`` (int64) by a plan, or 0 in a void launch.

    A launch is void if an earlier launch of this group, or of any group on this device, has failed: its operands may
    hold what that launch could not compute. A void launch announces nothing, waits for nothing, and must store
    nothing that a peer can read: see ``is_void``. ``completed`` holds for nothing in it.
    """
    over = tl.load(failed_at(ctx) + 1) | tl.load(device_failed_at(ctx))
    return tl.where(over == 0, (number << PLAN_BITS) | plan, 0)


@jit
def is_void(signal):
    """Return whether this launch is void, by its signal. For a mask: threads may differ if a failure is recent."""
    return signal == 0


@jit
def is_void_for_all(signal):
    """Return ``is_void`` with one answer for all threads, for a branch or the bound of a loop. A barrier."""
    if target() == "cuda":
        # The answer of thread 0, for its first element; no two threads share an element.
        answer = tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b32 t;
            mov.u32 t, %tid.x;
            or.b32 t, t, $2;
            setp.eq.u32 p, t, 0;
            setp.eq.and.s64 p, $1, 0, p;
            selp.b32 $0, 1, 0, p;
            }""",
            "=r,l,r", [signal, tl.arange(0, MAX_THREADS)], tl.int32, is_pure=False, pack=1,
        )
        return max_of(answer, 0) != 0
    else:
        return signal == 0


@jit
def call(ctx, plan, COUNTS: tl.constexpr = True):
    """Return (number, half, signal) of the running call of a collective kernel; see ``signal_of``.

    Every program of the launch comes here once, and to ``finish`` at its end. ``COUNTS=False``: only some programs do.
    """
    if COUNTS:
        check_alone(ctx)
    number = epoch(ctx) + 1
    return number, (number % 2).to(tl.int32), signal_of(ctx, number, plan)


@jit
def keep_signal(ctx, signal):
    """Leave the value of this call's signals where the copy engine can take it from; in a void launch the last one."""
    tl.store(_state(ctx) + STATE_SIGNAL, signal, mask=signal != 0)


@jit
def check_alone(ctx):
    """Count this program of the launch, so that ``finish`` notices another launch of the workspace in flight."""
    started = _state(ctx) + STATE_STARTED
    if target() == "cuda":
        # One thread adds, and no thread waits for the result.
        tl.inline_asm_elementwise(
            """{
            .reg .pred first; .reg .b32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 first, t, 0;
            @first red.relaxed.gpu.global.add.u64 [$1], 1;
            mov.b32 $0, 0;
            }""",
            "=r,l,~{memory}", [started], tl.int32, is_pure=False, pack=1,
        )
    else:
        tl.atomic_add(started, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")


@jit
def finish(ctx, ADVANCE: tl.constexpr = True, step=1):
    """Advance the epoch when the last program of the launch comes here; the last statement of a collective kernel.

    Done on the device so that a replayed CUDA graph counts on. Every program read the epoch before it came here, and
    the next launch on this workspace is ordered after this one by the stream, so no program reads a word that changes.
    If ``call`` has counted other programs than those of this launch, another launch of the workspace is in flight,
    which is recorded as an error. Tickets begin at zero again. ``ADVANCE=False`` does not count, for a launch in the
    middle of a call; nor does ``step`` 0, for one that had to do with no peer, as all ranks know. After a wait has
    given up, later launches are void (``signal_of``); a void launch marks its own group as failed.
    """
    state = _state(ctx)
    tl.debug_barrier()
    before = tl.atomic_add(state + STATE_FINISHED, tl.full((), 1, tl.int64), sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        programs = tl.full((), 0, tl.int64) + tl.num_programs(0)
        started = tl.load(state + STATE_STARTED, volatile=True)
        overlaps = (started != 0) & (started != programs)
        follows_failure = tl.load(device_failed_at(ctx), volatile=True) != 0
        kind = tl.where(overlaps, RECORD_OVERLAP, RECORD_VOID)
        nothing = tl.full((), 0, tl.int64)
        record_if(ctx, overlaps | follows_failure, kind, nothing, nothing, programs, started)
        end_wait(ctx)
        tl.store(state + STATE_STARTED, tl.full((), 0, tl.int64))
        tl.store(state + STATE_FINISHED, tl.full((), 0, tl.int64))
        tl.store(state + STATE_TICKETS, tl.full((), 0, tl.int64))
        if ADVANCE:
            tl.store(state + STATE_EPOCH, tl.load(state + STATE_EPOCH) + step)
