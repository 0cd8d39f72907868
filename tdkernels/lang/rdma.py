"""One-sided communication with ranks on other nodes, whose memory cannot be mapped into this process.

The network library is NVSHMEM on NVIDIA, rocSHMEM on AMD, and an emulated network in the interpreter. The functions
have the names of these libraries. They need a kernel made by ``jit(network=True)``, on a workspace made with
``across_nodes=True``, and all threads of a program call them together.

The source of a transfer lies in this rank's symmetric buffer, and its destination is in the peer's buffer. Transfers do
not block. A signal arrives after the data of its own put. Otherwise puts and signals arrive in any order, unless a
``fence`` separates them. Source data must not change until the peer is known to have received it, or until ``quiet``.
The peer may also be on this rank's node.
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
    """Return the id of ``peer`` in the network library."""
    return tl.load(ctx + CTX_BASES + num_ranks(ctx) + peer).to(tl.int32)


@jit
def _publish():
    """Make all earlier stores of the program visible to the network hardware."""
    if target() == "cuda":
        fence_acquire_release()
    tl.debug_barrier()


@jit
def is_first_thread():
    """Return whether this is the first thread of the program; differs between threads. NVIDIA only."""
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], tl.int32, is_pure=False, pack=1) == 0


@jit
def put_nbi(ctx, dst, src, num_bytes, peer):
    """Send bytes to a peer, after all earlier stores of the program.

    Args:
        dst: address in this rank's symmetric buffer, int64. The bytes arrive at the same offset in the peer's buffer.
        src: source address in this rank's symmetric buffer, int64.
        num_bytes: number of bytes.
        peer: the destination rank.
    """
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
    """Send bytes to a peer as ``put_nbi`` does, then set a signal of the peer when all bytes have arrived.

    Args:
        dst: as for ``put_nbi``.
        src: as for ``put_nbi``.
        num_bytes: as for ``put_nbi``.
        signal_ptr: the signal, in this rank's buffer. The same word is set in the peer's buffer.
        value: the value to set.
        peer: the destination rank.
        CHECK_FAILED: as for ``notify``; if this rank has failed, neither data nor signal is sent.
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
    """Set a signal of a peer. Earlier puts arrive before it only if there is a ``fence`` between them.

    Args:
        signal_ptr: the signal, in this rank's buffer. The same word is set in the peer's buffer.
        value: the value to set.
        peer: the destination rank.
        CHECK_FAILED: as for ``notify``.
    """
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
    """Order this program's earlier puts before its later puts and signals, at each peer."""
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
    """Wait until all puts of this program have arrived."""
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
    """``wait_plan`` for a signal sent through the network, after which the data put with it is visible.

    Args:
        signal_ptr: the signal, in this rank's buffer.
        expected: the signal value, from ``call``.
        peer: the source rank.
        FOR_TMA: the data is read through a tensor descriptor.

    Returns:
        The value seen.
    """
    seen = wait_plan(ctx, signal_ptr, expected, peer)
    if target() == "cuda":
        start = (_wide(expected) >> PLAN_BITS) << PLAN_BITS
        if seen >= start:  # otherwise the library's wait would be unbounded
            nvshmem.signal_wait_until(signal_ptr.to(tl.int64), start)
        tl.debug_barrier()
        if FOR_TMA:
            fence_before_tma_load()  # orders the library's wait before the TMA loads, too
    return seen
