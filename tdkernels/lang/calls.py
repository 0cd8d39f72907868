"""One call of a collective kernel: its number, half and signal, and the end of its launches.

The epoch counts the calls finished on a workspace. Call ``epoch + 1`` uses half ``number % 2`` of the signals and the
data, and its signals have the value ``number << PLAN_BITS | plan``.
"""

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
    """Return the number of collective kernels finished on this workspace (int64).

    The running one has number ``epoch + 1``. Read the epoch before ``finish``.
    """
    return tl.load(_state(ctx) + STATE_EPOCH)


@jit
def signal_of(ctx, number, plan):
    """Return the signal value of a call, or 0 in a void launch.

    A launch is void if an earlier launch of this group, or of any group on this device, has failed: its operands may
    hold data that the failed launch did not compute. A void launch sends no signals and waits for none. It must not
    store to memory that a peer can read: see ``is_void``. ``completed`` returns False for each of its waits.

    Args:
        number: the number of the call, int64.
        plan: the plan id that ``workspace.prepare`` returned.

    Returns:
        ``number << 16 | plan`` (int64), which ranks with the same plan send and wait for; 0 in a void launch.
    """
    over = tl.load(failed_at(ctx) + 1) | tl.load(device_failed_at(ctx))
    return tl.where(over == 0, (number << PLAN_BITS) | plan, 0)


@jit
def is_void(signal):
    """Return whether this launch is void, given its signal.

    Use it for masks: threads may disagree if a failure is recent.
    """
    return signal == 0


@jit
def is_void_for_all(signal):
    """Return ``is_void`` with the same result in all threads, for a branch or a loop bound. Contains a barrier."""
    if target() == "cuda":
        # Thread 0 decides, in its first element. No two threads share an element.
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
    """Return the number, half and signal of the running call of a collective kernel.

    Every program of the launch calls this once, and ``finish`` at its end.

    Args:
        plan: the plan id that ``workspace.prepare`` returned.
        COUNTS: count this program, see ``check_alone``. False if only some programs of the launch call this function.

    Returns:
        (number, half, signal): ``epoch + 1`` (int64), its parity (int32), and ``signal_of`` it (int64).
    """
    if COUNTS:
        check_alone(ctx)
    number = epoch(ctx) + 1
    return number, (number % 2).to(tl.int32), signal_of(ctx, number, plan)


@jit
def keep_signal(ctx, signal):
    """Store the signal value of this call where the copy engine can read it.

    A void launch leaves the last value.
    """
    tl.store(_state(ctx) + STATE_SIGNAL, signal, mask=signal != 0)


@jit
def check_alone(ctx):
    """Count this program of the launch, so that ``finish`` detects a concurrent launch on the same workspace.

    ``call`` does this.
    """
    started = _state(ctx) + STATE_STARTED
    if target() == "cuda":
        # One thread adds. No thread waits for the result.
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
    """End a collective kernel: the last program of the launch to arrive advances the epoch.

    This is the last statement of a collective kernel. Every program of the grid, which has one dimension, executes it
    once. It contains a barrier, then an acquire and a release at GPU scope.

    The epoch advances on the device, so a replayed CUDA graph keeps counting. Every program read the epoch before it
    arrived here, and the stream orders the next launch on this workspace after this one, so no program reads a word
    that changes.

    If ``call`` counted a different number of programs than this launch has, another launch of the workspace is in
    flight; this is recorded as an error. The work item counter is reset to zero. After a wait has failed, later
    launches are void (``signal_of``). A void launch marks its own group as failed.

    Args:
        ADVANCE: False for a launch in the middle of a call, which does not advance the epoch.
        step: number by which the epoch advances. 0 for a launch without communication, if all ranks know that.
    """
    state = _state(ctx)
    tl.debug_barrier()
    before = tl.atomic_add(state + STATE_FINISHED, tl.cast(1, tl.int64), sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        programs = tl.cast(tl.num_programs(0), tl.int64)
        started = tl.load(state + STATE_STARTED, volatile=True)
        overlaps = (started != 0) & (started != programs)
        follows_failure = tl.load(device_failed_at(ctx), volatile=True) != 0
        kind = tl.where(overlaps, RECORD_OVERLAP, RECORD_VOID)
        nothing = tl.cast(0, tl.int64)
        record_if(ctx, overlaps | follows_failure, kind, nothing, nothing, programs, started)
        end_wait(ctx)
        tl.store(state + STATE_STARTED, tl.cast(0, tl.int64))
        tl.store(state + STATE_FINISHED, tl.cast(0, tl.int64))
        tl.store(state + STATE_TICKETS, tl.cast(0, tl.int64))
        if ADVANCE:
            tl.store(state + STATE_EPOCH, tl.load(state + STATE_EPOCH) + step)
