"""Start the ranks at the same time, and measure the offsets between their clocks. Each GPU has its own clock.

Rank 0 requests the time of each peer in many rounds. The peer reads its clock after the request and before rank 0
receives the reply, so each round gives a lower and an upper bound of the offset. The tightest bounds of all rounds are
used.
"""

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

_ROUNDS = 32  # a few microseconds each; the fastest ones give the tightest bounds
_LEAD_NS = 3_000_000  # on GPUs: longer than the host needs to launch the recorded call


@td.jit(do_not_specialize=["lead_ns"])
def meet_kernel(ctx, lead_ns):
    """Wait until ``lead_ns`` have passed and the streams of all peers have reached this kernel."""
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    signal = td.epoch(ctx) + 1
    begin = td.clock_ns()
    while td.clock_ns() - begin < lead_ns:
        pass
    for step in range(1, ranks):
        td.notify(ctx, td.ready_at(ctx, me), (me + step) % ranks, signal)  # waiter: the peer's meet_kernel
    for step in range(1, ranks):
        peer = (me + step) % ranks
        td.wait(ctx, td.ready_at(ctx, peer), signal, peer)  # producer: the peer's meet_kernel
    td.finish(ctx)


@td.jit(do_not_specialize=["rounds"])
def clocks_kernel(ctx, times_ptr, rounds):
    """Write times to ``times_ptr`` [ranks, rounds, 2].

    Rank 0 writes the times of each request and of its reply. A peer writes the time when it receives the request.

    Signal number ``peer`` of half 0 is used in both directions: rank 0 raises it in the peer's memory for the request,
    and the peer raises it in rank 0's memory for the reply.
    """
    me = td.rank(ctx)
    first = (td.epoch(ctx) + 1) << 16
    for peer in range(1, td.num_ranks(ctx)):
        signal_ptr = td.signal_at(ctx, 0, peer)
        for turn in range(rounds):
            signal = first + turn
            time_ptr = times_ptr + (peer * rounds + turn) * 2
            if me == 0:
                tl.store(time_ptr, td.clock_ns())
                td.notify(ctx, signal_ptr, peer, signal)  # waiter: the peer, below
                td.wait(ctx, signal_ptr, signal, peer)  # producer: the peer, below
                tl.store(time_ptr + 1, td.clock_ns())
            elif me == peer:
                td.wait(ctx, signal_ptr, signal, 0)  # producer: rank 0, above
                tl.store(time_ptr, td.clock_ns())
                td.notify(ctx, signal_ptr, 0, signal)  # waiter: rank 0, above
    td.finish(ctx)


class Clocks:
    """One rank's side of the clock comparison. Creating it and calling its methods is collective.

    Attributes:
        times: int64 [ranks, rounds, 2], as ``clocks_kernel`` writes them on this rank.
    """

    def __init__(self, group: "dist.ProcessGroup", device: torch.device) -> None:
        self._workspace = get_workspace(group, device, "trace")
        ranks = self._workspace.world_size
        self._workspace.prepare("trace", {"rounds": _ROUNDS}, 1, ranks)
        self._lead_ns = _LEAD_NS if device.type == "cuda" else 0
        self.times = torch.zeros(ranks, _ROUNDS, 2, dtype=torch.int64, device=device)

    def meet(self) -> None:
        """Synchronize the streams of all ranks, after a delay in which the hosts can launch the recorded call."""
        self._launch(meet_kernel, self._lead_ns)

    def compare(self) -> None:
        """Run the clock comparison and fill ``times``."""
        self._launch(clocks_kernel, self.times, _ROUNDS)

    def _launch(self, kernel, *args):
        self._workspace.before_launch()
        kernel[(1,)](self._workspace.ctx, *args, num_warps=1)
        self._workspace.after_launch()


class SoloClocks:
    """The clock comparison of a rank in solo mode, which has no peers. ``times``: as in ``Clocks``, with one rank."""

    def __init__(self, device: torch.device) -> None:
        self.times = torch.zeros(1, _ROUNDS, 2, dtype=torch.int64, device=device)

    def meet(self) -> None:
        """Do nothing: there is no other stream."""

    def compare(self) -> None:
        """Do nothing: there is no other clock."""


def offsets(times):
    """Return for each rank (ns by which its clock is ahead of rank 0's, maximum error in ns).

    Args:
        times: The ``times`` of all ranks as numpy arrays, in rank order.
    """
    found = [(0, 0.0)]
    for rank in range(1, len(times)):
        asked, answered = times[0][rank].T
        there = times[rank][rank].T[0]
        least, most = (there - answered).max(), (there - asked).min()
        found.append((int(least + most) // 2, abs(int(most - least)) / 2))
    return found
