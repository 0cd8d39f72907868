"""Words for peers whose memory cannot be mapped, because they are on another node: the network brings things there.

On NVIDIA the network is NVSHMEM, on AMD rocSHMEM, in the interpreter an emulated one; the names are theirs. Everything
that is sent lies in our own symmetric buffer, and arrives where the peer keeps the same. Nothing waits: a signal comes
after the data of its own put, and otherwise in any order, unless ``fence`` comes between; what is being sent must stay
as it is until the peer is known to have it, or until ``quiet``. A peer on our own node may be named as well.
"""

import triton.language as tl

from tdkernels.lang import nvshmem, rocshmem
from tdkernels.lang.context import CTX_BASES, CTX_STATE, PLAN_BITS, num_ranks
from tdkernels.lang.emulation import interpreter_fence, interpreter_put, interpreter_quiet, interpreter_signal
from tdkernels.lang.failure_record import failed_for_all
from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import fence_acquire_release, fence_before_tma_load
from tdkernels.lang.signals import _wide, wait_plan
from tdkernels.lang.targets import target


@jit
def _pe(ctx, peer):
    """What the network calls ``peer``."""
    return tl.load(ctx + CTX_BASES + num_ranks(ctx) + peer).to(tl.int32)


@jit
def _publish():
    """Let what the whole program has stored be seen by whatever reads it for the network."""
    if target() == "cuda":
        fence_acquire_release()
    tl.debug_barrier()


@jit
def is_first_thread():
    """Whether this is the first of the program's threads, for what one of them does; differs by thread. NVIDIA only."""
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], tl.int32, is_pure=False, pack=1) == 0


@jit
def put_nbi(ctx, dst, src, num_bytes, peer):
    """Send ``num_bytes`` from address ``src`` to where ``peer`` keeps what we keep at address ``dst`` (int64)."""
    num_bytes = _wide(num_bytes)
    if target() == "interpreter":
        interpreter_put(tl.load(ctx + CTX_STATE), dst, src, num_bytes, 0, 0, peer)
    elif target() == "hip":
        rocshmem.put_nbi_block(dst, src, num_bytes, _pe(ctx, peer))
    else:
        _publish()
        nvshmem.put_nbi_block(dst, src, num_bytes, _pe(ctx, peer))


@jit
def put_signal(ctx, dst, src, num_bytes, signal_ptr, value, peer, CHECK_FAILED: tl.constexpr = False):
    """``put_nbi``, and when all of it is there, set the signal that ``peer`` keeps where we keep ``signal_ptr``.

    ``CHECK_FAILED``: as for ``notify``.
    """
    num_bytes = _wide(num_bytes)
    value = _wide(value)
    goes = True
    if CHECK_FAILED:
        goes = failed_for_all(ctx) == 0
    if target() == "interpreter":
        if goes:
            interpreter_put(
                tl.load(ctx + CTX_STATE), dst, src, num_bytes, signal_ptr.to(tl.int64), value, peer
            )
    elif target() == "hip":
        if goes:
            rocshmem.put_signal_nbi_block(dst, src, num_bytes, signal_ptr.to(tl.int64), value, _pe(ctx, peer))
    else:
        _publish()
        if goes:
            nvshmem.put_signal_nbi_block(dst, src, num_bytes, signal_ptr.to(tl.int64), value, _pe(ctx, peer))


@jit
def signal(ctx, signal_ptr, value, peer, CHECK_FAILED: tl.constexpr = False):
    """Set the signal that ``peer`` keeps where we keep ``signal_ptr``: after what was put before a ``fence``."""
    value = _wide(value)
    goes = True
    if CHECK_FAILED:
        goes = failed_for_all(ctx) == 0
    if target() == "interpreter":
        if goes:
            interpreter_signal(tl.load(ctx + CTX_STATE), signal_ptr.to(tl.int64), value, peer)
    elif target() == "hip":
        if goes:
            rocshmem.signal_set(signal_ptr.to(tl.int64), value, _pe(ctx, peer))
    else:
        _publish()
        if goes & is_first_thread():
            nvshmem.signal_set(signal_ptr.to(tl.int64), value, _pe(ctx, peer))
        tl.debug_barrier()


@jit
def fence(ctx):
    """Let nothing that is put after it arrive before what this program has put before it, at the same peer."""
    if target() == "interpreter":
        interpreter_fence(tl.load(ctx + CTX_STATE))
    elif target() == "hip":
        rocshmem.fence()
    else:
        tl.debug_barrier()
        if is_first_thread():
            nvshmem.fence()
        tl.debug_barrier()


@jit
def quiet(ctx):
    """Return when all that this program has put has arrived."""
    if target() == "interpreter":
        interpreter_quiet(tl.load(ctx + CTX_STATE))
    elif target() == "hip":
        rocshmem.quiet()
    else:
        tl.debug_barrier()
        if is_first_thread():
            nvshmem.quiet()
        tl.debug_barrier()


@jit
def await_put(ctx, signal_ptr, expected, peer, FOR_TMA: tl.constexpr = False):
    """``wait_plan`` for a signal that has come by the network, with data that must be seen after it."""
    seen = wait_plan(ctx, signal_ptr, expected, peer)
    if target() == "cuda":
        start = (_wide(expected) >> PLAN_BITS) << PLAN_BITS
        if seen >= start:  # else it would wait without end
            nvshmem.signal_wait_until(signal_ptr.to(tl.int64), start)
        tl.debug_barrier()
        if FOR_TMA:
            fence_before_tma_load()  # the library's wait, too, comes before those loads
    return seen
