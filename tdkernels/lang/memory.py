"""Loads, stores and fences with explicit memory order, implemented for each target.

On NVIDIA every thread of a program executes the inline PTX, so after ``load_acquire`` each thread has acquired for
itself and no barrier is needed. The other targets use Triton's atomics: one thread executes the atomic operation and
the result is broadcast to the other threads.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit
from tdkernels.lang.targets import interpreter_clock_ns, target

# For default values: triton 3.6 does not treat a plain string in that position as a constant.
SYS = tl.constexpr("sys")


@jit
def barrier():
    """Wait for all threads of the program, as ``tl.debug_barrier`` does, which Triton does not pipeline in a loop."""
    if target() == "cuda":
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()


@jit
def load_acquire(ptr, SCOPE: tl.constexpr = SYS):
    """Load one 64-bit word with acquire order.

    Data written before the matching release is visible to the loads that follow.
    """
    if target() == "cuda":
        ASM: tl.constexpr = "ld.acquire." + SCOPE + ".global.b64 $0, [$1];"
        return tl.inline_asm_elementwise(ASM, "=l,l,~{memory}", [ptr], tl.int64, is_pure=False, pack=1)
    else:
        return tl.atomic_add(ptr, tl.full((), 0, tl.int64), sem="acquire", scope=SCOPE)


@jit
def store_release(ptr, value, SCOPE: tl.constexpr = SYS):
    """Store one 64-bit word with release order, after all earlier stores of the whole program. Contains a barrier."""
    tl.debug_barrier()
    store_release_if(ptr, value, tl.full((), 1, tl.int32), SCOPE)


@jit
def store_release_if(ptr, value, condition, SCOPE: tl.constexpr = SYS):
    """Store one 64-bit word with release order if ``condition`` (int32) is nonzero.

    It has no barrier: the caller executes one before. The store is predicated instead of inside a branch. Each thread
    evaluates the condition for itself, and threads with different results would diverge at a barrier.
    """
    if target() == "cuda":
        # One thread releases for all: the barrier orders the others' stores before it, and release is cumulative.
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
    """Store one value to many 64-bit words with release order at system scope. Contains a barrier.

    Each word is written by a thread of its own, all at the same time.

    Args:
        ptrs: pointers to the words, one per element.
        value: the value, int64.
        mask: which of the words to write.
    """
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
    """Add to one 64-bit word with release order, after all earlier stores of the whole program. Contains a barrier."""
    tl.debug_barrier()
    tl.atomic_add(ptr, value, sem="release", scope=SCOPE)


@jit
def fence_acquire_release(SCOPE: tl.constexpr = SYS):
    """Order earlier reads of this thread before its later reads and writes."""
    if target() == "cuda":
        ASM: tl.constexpr = "fence.acq_rel." + SCOPE + "; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(ASM, "=r,~{memory}", [], tl.int32, is_pure=False, pack=1)
    else:
        tl.debug_barrier()


@jit
def fence_before_tma_load():
    """Order an acquire before TMA loads, which read through another proxy.

    For NVIDIA from sm_90 on; does nothing on other targets.
    """
    if target() == "cuda":
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32, is_pure=False, pack=1
        )


@jit
def await_tma_stores():
    """Wait until this program's stores through tensor descriptors are in memory and can be signaled.

    Triton itself only waits until shared memory has been read. Each thread waits for the stores that it started. For
    NVIDIA; does nothing on other targets.
    """
    if target() == "cuda":
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32,
            is_pure=False, pack=1,
        )


@jit
def prefetch(addresses, num_bytes, there):
    """Prefetch bytes at each selected address into the L2 cache.

    When compiled for NVIDIA it needs sm_90 or newer, which the caller checks. It does nothing on other targets.

    Args:
        addresses: int64, multiples of 16.
        num_bytes: number of bytes from each address, rounded down to a multiple of 16.
        there: mask of the addresses to prefetch.
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
    """Return the pointer to ``DTYPE`` at an address.

    Args:
        address: int64.
        DTYPE: the element type.
        ALIGNED: the address is a multiple of 16. This is passed to the compiler, which knows nothing about an address
            that was only cast and would move one element at a time.
    """
    pointer = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@jit
def clock_ns():
    """Return the time in nanoseconds, on a clock that all programs of this rank share (int64)."""
    if target() == "cuda":
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    elif target() == "hip":
        # A 100 MHz counter that does not depend on the core clock.
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
        return ticks * 10
    else:
        return interpreter_clock_ns()
