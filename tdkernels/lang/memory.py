"""Loads, stores and fences whose memory order is spelled out, once for each target.

On NVIDIA every thread of a program executes the inline PTX, so after ``load_acquire`` each of them has acquired for
itself and no barrier is needed. Elsewhere Triton's atomics do the same job: one thread performs them and the result is
handed to the others.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit
from tdkernels.lang.targets import interpreter_clock_ns, target

# As a default value: triton 3.6 does not make constants of plain strings there.
SYS = tl.constexpr("sys")


@jit
def load_acquire(ptr, SCOPE: tl.constexpr = SYS):
    """Read one 64-bit word; what was written before its release is visible to the loads that follow."""
    if target() == "cuda":
        ASM: tl.constexpr = "ld.acquire." + SCOPE + ".global.b64 $0, [$1];"
        return tl.inline_asm_elementwise(ASM, "=l,l,~{memory}", [ptr], tl.int64, is_pure=False, pack=1)
    else:
        return tl.atomic_add(ptr, tl.full((), 0, tl.int64), sem="acquire", scope=SCOPE)


@jit
def store_release(ptr, value, SCOPE: tl.constexpr = SYS):
    """Write one 64-bit word after everything that the whole program has stored so far."""
    tl.debug_barrier()
    store_release_if(ptr, value, tl.full((), 1, tl.int32), SCOPE)


@jit
def store_release_if(ptr, value, condition, SCOPE: tl.constexpr = SYS):
    """The store of ``store_release``, after its barrier and only where a condition (int32) is not zero.

    Not a branch around it: each thread reads a condition for itself, and those that differ would part at a barrier.
    """
    if target() == "cuda":
        # One thread publishes for all: the barrier orders the others' stores before it, and release is cumulative.
        STORE: tl.constexpr = "@first st.release." + SCOPE + ".global.b64 [$1], $2;"
        ASM: tl.constexpr = (
            "{ .reg .pred first; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 first, t, 0;"
            + " setp.ne.and.s32 first, $3, 0, first; "
            + STORE
            + " mov.b32 $0, 0; }"
        )
        tl.inline_asm_elementwise(
            ASM, "=r,l,l,r,~{memory}", [ptr, value, condition], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.atomic_xchg(ptr, value, mask=condition != 0, sem="release", scope=SCOPE)


@jit
def store_release_each(ptrs, value, mask):
    """``store_release`` of one value to many 64-bit words at system scope, by as many threads at the same time."""
    tl.debug_barrier()
    if target() == "cuda":
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.release.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r,~{memory}", [ptrs, value, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1,
        )
    else:
        tl.atomic_xchg(ptrs, value, mask=mask, sem="release", scope="sys")


@jit
def add_release(ptr, value, SCOPE: tl.constexpr = SYS):
    """Add to one 64-bit word after everything that the whole program has stored so far."""
    tl.debug_barrier()
    tl.atomic_add(ptr, value, sem="release", scope=SCOPE)


@jit
def fence_acquire_release():
    """Order what this thread has read before what it reads and writes from now on, at system scope."""
    if target() == "cuda":
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()


@jit
def fence_before_tma_load():
    """Order an acquire before loads of the bulk copy engine, which reads through another proxy (NVIDIA sm_90 on)."""
    if target() == "cuda":
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32, is_pure=False, pack=1
        )


@jit
def await_tma_stores():
    """Return when what this program has stored through tensor descriptors is in memory, and can be announced.

    Triton itself waits only until shared memory has been read. Each thread waits for the stores that it has started.
    """
    if target() == "cuda":
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32,
            is_pure=False, pack=1,
        )


@jit
def prefetch(addresses, num_bytes, there):
    """Bring ``num_bytes``, as far as they fill 16, from each address that is ``there`` into the L2 cache.

    Addresses (int64) are multiples of 16. On NVIDIA from sm_90 on, which the caller knows; elsewhere nothing is done.
    """
    if target() == "cuda":
        whole = num_bytes // 16 * 16
        there &= whole > 0
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r", [addresses, whole, there.to(tl.int32)], tl.int32, is_pure=False, pack=1,
        )


@jit
def pointer_to(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr = True):
    """The pointer to ``DTYPE`` at an address (int64) that is a multiple of 16 if ``ALIGNED``.

    The compiler is told so; of an address that was only cast it knows nothing, and moves one element at a time.
    """
    pointer = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@jit
def clock_ns():
    """Nanoseconds on a clock that all programs of this rank share."""
    if target() == "cuda":
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    elif target() == "hip":
        # A constant 100 MHz counter, whatever the core clock does.
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
        return ticks * 10
    else:
        return interpreter_clock_ns()
