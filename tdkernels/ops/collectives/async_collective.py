"""Asynchronous collectives: the host launches their steps while it launches other work.

A call begins with a barrier (``begin``) and ends with ``close``. Data is sent on a side stream, concurrently with the
work of the caller. The forward operators alternate between two halves of their workspace. An asynchronous collective
instead has memory at one fixed address, so that kernels of other libraries can read it; hence the barrier.

Copies by the host cannot check whether the wait in ``begin`` has failed. So if it has failed, ``begin`` tells the
peers, before the copies may overwrite data that a peer still reads. The peer's ``close`` checks for this after reading.
"""

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.collectives.kernel_async_all_gather import begin_kernel, end_kernel, notify_kernel
from tdkernels.ops.collectives.kernel_async_multinode import begin_nodes_kernel
from tdkernels.runtime.copy_batch import CopyBatch
from tdkernels.runtime.gpu import side_stream
from tdkernels.runtime.kernel_launch import pointer_signature
from tdkernels.runtime.triton_launcher import BoundLaunch
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist


class AsyncCollective:
    """Base class: one call of an asynchronous collective. Every rank makes the same call.

    As a context manager it calls ``begin``, and ``close`` even after an exception: otherwise data that is still being
    sent could be taken for data of a later call. A subclass sets ``plan`` (``workspace.prepare``) before ``begin``.

    Attributes:
        device: The device of the data.
        workspace: The workspace of the group.
        topology: The topology of the group.
        rank: This rank.
        world_size: Number of ranks.
        plan: The plan id of the call.

    Args:
        name: Name of the workspace.
        group: The resolved group.
        device: The device of the data.
        across_nodes: Whether the group may span several nodes.
    """

    if TYPE_CHECKING:
        plan: int

    def __init__(
        self, name: str, group: "dist.ProcessGroup", device: torch.device, across_nodes: bool = False
    ) -> None:
        self.device = device
        self.workspace = get_workspace(group, device, name, halves=1, across_nodes=across_nodes)
        self.topology = self.workspace.group.topology
        self.rank, self.world_size = self.workspace.rank, self.workspace.world_size
        self._stream: Any = None  # the caller's stream, set by ``begin``
        self._events: Any = None  # for the work of the caller so far, and for that on the side stream; set by ``begin``
        self._has_sent = False  # whether the side stream has work of this call that ``_join`` has not waited for

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, _kind, error, _traceback):
        if error is None:
            self.close()
            return
        self.workspace.group.end_abruptly(self.workspace.name, error)
        with contextlib.suppress(RuntimeError, ValueError):  # errors of the group; the caller gets the original one
            self.close()

    def begin(self) -> None:
        """Enqueue a barrier: wait on the device until every peer has reached this call."""
        self._stream = self.workspace.before_launch()
        if self.device.type == "cuda":
            # All calls record the same events, because creating one takes as long as recording it.
            self._events = self._cached("events", lambda: (torch.cuda.Event(), torch.cuda.Event()))
        try:
            self._launch(begin_nodes_kernel if self.spans_nodes else begin_kernel, self.plan)
        except BaseException as error:  # this rank may have signaled its peers already
            self.workspace.break_off(error)
            raise
        self._check()

    def close(self) -> None:
        """End the call. Afterwards, in stream order, received data is not read any more and sent data may change."""
        self._join()
        if self.workspace.may_be_overwritten():
            self._launch(end_kernel)
        self.workspace.after_launch(self._stream)

    @property
    def spans_nodes(self) -> bool:
        """Whether the group spans several nodes."""
        return self.topology.num_nodes > 1

    def _beside(self, enqueue):
        """Call ``enqueue`` on the side stream: after the work queued so far, concurrently with later work."""
        if self.device.type == "cpu":
            enqueue()
            return
        side = side_stream(self.device)
        queued, sent = self._events
        queued.record(self._stream)
        queued.wait(side)
        current = torch.cuda.current_device()
        torch.cuda.set_stream(side)  # torch.cuda.stream() would query the current stream again, which is slow
        try:
            enqueue()
        finally:
            torch.cuda.set_stream(self._stream)
            if current != self.device.index:  # set_stream selects the device of the stream
                torch.cuda.set_device(current)
        sent.record(side)
        self._has_sent = True

    def _join(self):
        """Make the current stream wait until this rank's data has been sent, but not for data of the peers."""
        if self._has_sent:
            self._events[1].wait(self._stream)
            self._has_sent = False

    def _copy(self, dst, src):
        """Copy with the copy engine; called within ``_beside``."""
        dst.copy_(src, non_blocking=True)

    def _announce(self, peer, index, word):
        """Set signal number ``index`` at a peer, where it is ``word``; called within ``_beside``.

        On a GPU this is a copy, because a kernel might never be scheduled next to kernels that wait for its signal.
        """
        if self.device.type == "cpu":
            self._launch(notify_kernel, index, peer, self.plan, CHECK_FAILED=False)
        else:
            self._copy(word, self._cached("signal", self.workspace.signal_value))

    def _copy_to_peers(self, key, find, sources):
        """Copy data to several peers, then set their signals; called within ``_beside``.

        The data arrives in any order, so this is for data that peers wait for as a whole.

        Args:
            key: Determines what ``find`` returns.
            find: Function that returns a list of (destination, peer, number of the signal, signal in the memory of the
                peer). If the peer is this rank, no signal is set.
            sources: For each destination a contiguous tensor with the same shape and dtype.
        """
        if self.device.type == "cpu":
            found = find()
            for (destination, *_), source in zip(found, sources, strict=True):
                self._copy(destination, source)
            for _, *signal in found:
                if signal[0] != self.rank:
                    self._announce(*signal)
            return
        data, words = self._cached(("batch", key), lambda: _batches(find(), self.rank))
        stream = side_stream(self.device)
        data.enqueue(sources, stream)
        words.enqueue([self._cached("signal", self.workspace.signal_value)] * len(words), stream)

    def _launch(self, kernel, *args, **constants):
        """Launch one program of a kernel whose arguments are integers that it is not specialized on."""
        places = range(1, 1 + len(args))
        make = lambda: BoundLaunch((1, 1, 1), (self.workspace.ctx, *args), places, {"num_warps": 1, **constants})  # noqa: E731
        bound_launch = self._cached((kernel, *constants.items()), make)
        kernel.launch_bound(bound_launch, args)

    def _launch_on(self, tensors, kernel, programs, *numbers, **constants):
        """Launch a kernel of (ctx, tensors or None, numbers); the bound launch is cached and reused for other tensors.

        The kernel uses only the address of a tensor. Everything else that the launch depends on, including the plan, is
        in the numbers and constants. They are part of the key because kernels are specialized on them, for example on
        whether a number fits in 32 bits.
        """
        places = range(1, 1 + len(tensors))
        make = lambda: BoundLaunch((programs, 1, 1), (self.workspace.ctx, *tensors, *numbers), places, constants)  # noqa: E731
        key = kernel, programs, *numbers, *pointer_signature(tensors), *constants.items()
        kernel.launch_bound(self._cached(key, make), tensors)

    def _cached(self, key, make):
        """Return the cached object for ``key``, created by ``make``.

        Creating a tensor takes the host longer than a copy. Cached objects must not be given tensors that require a
        gradient, because their autograd graph would be kept.
        """
        launches = self.workspace.launches
        found = launches.get(key)
        if found is None:
            with torch.inference_mode(False):  # later calls in other modes write to it
                launches[key] = found = make()
        return found

    def _check(self):
        """On the CPU, where a launch has ended, raise the error that it recorded."""
        if self.device.type == "cpu":
            self.workspace.check()


def _batches(found, rank):
    """Return (CopyBatch of the data, CopyBatch of the signals) of ``_copy_to_peers``."""
    return CopyBatch([slot for slot, *_ in found]), CopyBatch([word for _, peer, _, word in found if peer != rank])
