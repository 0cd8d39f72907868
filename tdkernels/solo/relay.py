"""Relay of signals in solo mode: a kernel that runs concurrently with a launch and delivers its signals to itself."""

import functools

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import PLAN_BITS
from tdkernels.lang.memory import fence_acquire_release
from tdkernels.rounding import next_power_of_2
from tdkernels.runtime.triton_launcher import BoundLaunch

_MOST_WORDS, _WORDS_PER_THREAD = 4096, 4  # that are inspected at a time
_LIMIT = 2_000_000  # scans, of 1 µs or more, in case that the launch fails
_SCANS_PER_CHECK = tl.constexpr(64)  # a check whether the rank has failed takes as long as a scan


@td.jit(do_not_specialize=["limit"])
def gate_kernel(calls_ptr, limit):
    """Wait until the relay of the next call runs. Otherwise programs that wait for it might leave no room for it."""
    begun_ptr = calls_ptr + 1
    call = tl.load(calls_ptr) + 1
    scans = tl.full((), 0, tl.int32)
    # producer: relay_kernel
    while (td.load_acquire(begun_ptr) < call) & (scans < limit):
        scans += 1


@td.jit
def _offsets_of_peers(ctx, RANKS: tl.constexpr):
    """Return the distances in bytes from this rank's memory to that of ranks 1, 2, ..., RANKS - 1.

    They are loaded before the scans: a fence makes the next load of a word read from the L2 cache.
    """
    offsets = ()
    for peer in tl.static_range(1, RANKS):
        offsets = offsets + (td.symm_base(ctx, peer) - td.symm_base(ctx, 0),)  # type: ignore[assignment]
    return offsets


@td.jit
def _word_pointers(lanes, first_word, offsets, per_source, RANKS: tl.constexpr):
    """Return pointers to the word of a peer in which each signal is set, and to the word that it is delivered to.

    Signals of one index at peers 1, 2, ... follow one another in ``lanes``. ``first_word``: address of this rank's
    signal 0
    """
    peer = 1 + lanes % (RANKS - 1)
    word = first_word + 8 * (lanes // (RANKS - 1)).to(tl.int64)
    there = word * 0
    for number in tl.static_range(RANKS - 1):
        there = tl.where(peer == 1 + number, offsets[number], there)
    mirrored = 8 * ((RANKS - peer) * per_source).to(tl.int64)
    return (word + there).to(tl.pointer_type(tl.int64)), (word + mirrored).to(tl.pointer_type(tl.int64))


@td.jit(do_not_specialize=["per_source", "picoseconds", "limit"])
def relay_kernel(
    ctx, calls_ptr, per_source, picoseconds, limit,
    RANKS: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr, SIGNALS_LAST: tl.constexpr,
):
    """Deliver the signals that rank 0 sets at its peers in one call to itself, as the signals of its mirror images.

    Signal i of source 0 at peer q is delivered as signal i of source RANKS - q. Each of them takes ``picoseconds`` of
    the link, and the link transfers one at a time. It begins with a signal when the signal is set. If SIGNALS_LAST, it
    begins when it is free: the data that the signal announces has been on its way since the call began.

    The kernel ends when it has delivered all, if the rank has failed, or after ``limit`` scans. Then it counts the call
    in the word at ``calls_ptr``: the epoch may already have been advanced by the call when this kernel begins. The next
    word holds the number of the call that has a relay.
    """
    PEERS: tl.constexpr = RANKS - 1
    epoch = tl.load(calls_ptr) + 1
    td.store_release(calls_ptr + 1, epoch)  # waiter: gate_kernel
    half = epoch % HALVES
    total = per_source * PEERS
    free = td.clock_ns() * 1000  # when the link is free
    left = total
    scans = total * 0
    # The condition is the same in all threads, as the barriers in the loop need.
    going = td.failed_for_all(ctx) == 0
    first_word = td.signal_at(ctx, half, 0).to(tl.int64)
    offsets = _offsets_of_peers(ctx, RANKS)
    while (left > 0) & (scans < limit) & going:
        scans += 1
        late = total * 0  # signals that have been set and not delivered
        for first in range(0, total, BLOCK):
            lanes = first + tl.arange(0, BLOCK)
            sent_ptrs, own_ptrs = _word_pointers(lanes, first_word, offsets, per_source, RANKS)
            valid = lanes < total
            # Volatile loads do not wait for each other, as loads with acquire order would.
            sent = tl.load(sent_ptrs, mask=valid, other=0, volatile=True)
            own = tl.load(own_ptrs, mask=valid, other=0, volatile=True)
            new = (valid & (sent > own) & (sent >> PLAN_BITS == epoch)).to(tl.int32)
            now = td.clock_ns() * 1000
            place = td.running_sum(new)
            arrived = (new > 0) & (free + place.to(tl.int64) * picoseconds <= now)
            count = td.sum_of(arrived.to(tl.int32), 0)
            if count > 0:
                fence_acquire_release("gpu")  # each thread delivers the signals that it has read
                tl.atomic_xchg(own_ptrs, sent, mask=arrived, sem="relaxed", scope="sys")
            free += count.to(tl.int64) * picoseconds
            left -= count
            late += td.sum_of(new, 0) - count
        if (late == 0) & (SIGNALS_LAST == 0):
            free = tl.maximum(free, td.clock_ns() * 1000)
        if scans % _SCANS_PER_CHECK == 0:
            going = td.failed_for_all(ctx) == 0
    tl.store(calls_ptr, epoch)


@functools.cache
def _stream(device, workspace_name):
    """Return the stream of the relays of a workspace.

    torch has 32 streams: with one per plan, one would soon be the current one. Calls of different workspaces overlap in
    a backward, so their relays must run at the same time.
    """
    return torch.cuda.Stream(device)


class NoRelay:
    """Stand-in for the relay of a workspace whose kernels neither send nor wait."""

    is_ready = True

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


class Relay:
    """Relay for the launches of one plan, on a GPU.

    Attributes:
        is_ready: Whether launches can use it. Set by the workspace.

    Args:
        workspace_name: The name of the workspace.
        ctx: The context table of the plan.
        calls: int64 [2] on the device: the number of calls of the workspace, and of the last call that has a relay.
        ranks: Number of ranks.
        per_source: Signals that a rank sets at each peer.
        halves: Halves of the workspace.
        slot_bytes: Bytes that these signals announce.
        link_rate: Bytes per second; None: no limit.
        signals_last: Whether data is sent from the beginning of a call on, and its signal follows.
    """

    def __init__(
        self, workspace_name: str, ctx: torch.Tensor, calls: torch.Tensor, ranks: int, per_source: int, halves: int,
        slot_bytes: int, link_rate: float | None, signals_last: bool,
    ) -> None:
        self.is_ready = False
        picoseconds = 0 if link_rate is None else round(1e12 * slot_bytes / per_source / link_rate)
        constants = {"RANKS": ranks, "HALVES": halves, "SIGNALS_LAST": signals_last}
        block = min(max(next_power_of_2(per_source * (ranks - 1)), 512), _MOST_WORDS)
        constants |= {"BLOCK": block, "num_warps": block // (32 * _WORDS_PER_THREAD)}
        numbers = per_source, picoseconds
        if ctx.device.type == "cuda":
            self._stream = _stream(ctx.device, workspace_name)
            self._numbers = *numbers, _LIMIT
            self._launch = BoundLaunch((1, 1, 1), (ctx, calls, *self._numbers), range(2, 5), constants)
            self._gate = BoundLaunch((1, 1, 1), (calls, _LIMIT), (1,), {"num_warps": 1})
            # Load the kernels: without scans.
            relay_kernel[(1,)](ctx, calls.clone(), *numbers, 0, **constants)
            gate_kernel[(1,)](calls, 0, num_warps=1)

    def start(self) -> None:
        """Launch the relay concurrently with what the caller launches next on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            relay_kernel.launch_bound(self._launch, self._numbers)
        gate_kernel.launch_bound(self._gate, (_LIMIT,))

    def join(self) -> None:
        """Make the current stream wait for the relay."""
        torch.cuda.current_stream().wait_stream(self._stream)
