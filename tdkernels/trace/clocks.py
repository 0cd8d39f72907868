"""Ranks that begin together, and how far their clocks are apart: each GPU counts nanoseconds for itself.

Rank 0 asks each peer for its time, again and again. The peer looked at its clock after rank 0 asked and before rank 0
had the answer; each round bounds the difference of the clocks from both sides, and all rounds together bound it well.
"""

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.symm import get_workspace

_ROUNDS = 32  # a few microseconds each; the luckiest ones count
_LEAD_NS = 3_000_000  # longer than the host needs to launch what is to begin together (GPUs)


@td.jit(do_not_specialize=["lead_ns"])
def meet_kernel(ctx, lead_ns):
    """Return ``lead_ns`` after the start at the earliest, and when every peer's stream has come here."""
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
    """Leave [ranks, rounds, 2] times: rank 0 when it asked a peer and when it was answered, a peer when it was asked.

    Signal number ``rank`` of half 0 is raised by whom that rank talks with: in its own memory by rank 0, which asks,
    and in the memory of rank 0 by the rank, which answers.
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
    """One rank's part; made, and used, by all ranks of a group together."""

    def __init__(self, group, device):
        self._workspace = get_workspace(group, device, "trace")
        ranks = self._workspace.world_size
        self._workspace.prepare("trace", {"rounds": _ROUNDS}, 1, ranks)
        self._lead_ns = _LEAD_NS if device.type == "cuda" else 0
        self.times = torch.zeros(ranks, _ROUNDS, 2, dtype=torch.int64, device=device)

    def meet(self):
        """Let the streams of all ranks come together, after giving the hosts time to launch what follows."""
        self._launch(meet_kernel, self._lead_ns)

    def compare(self):
        """Fill ``times``."""
        self._launch(clocks_kernel, self.times, _ROUNDS)

    def _launch(self, kernel, *args):
        self._workspace.before_launch()
        kernel[(1,)](self._workspace.ctx, *args, num_warps=1)
        self._workspace.after_launch()


def offsets(times):
    """For each rank (ns by which its clock is ahead of rank 0's, at most so many ns wrong), from all ``times``."""
    found = [(0, 0.0)]
    for rank in range(1, len(times)):
        asked, answered = times[0][rank].T
        there = times[rank][rank].T[0]
        least, most = (there - answered).max(), (there - asked).min()
        found.append((int(least + most) // 2, abs(int(most - least)) / 2))
    return found
