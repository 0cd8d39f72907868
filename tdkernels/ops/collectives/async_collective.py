"""What travels beside other work, in steps that the host launches: opened behind a barrier, ended by ``close``.

Unlike the forward operators, which alternate between two halves of their workspace, it has memory at one fixed
address, so that other libraries' kernels can read it: that is what the barrier in ``begin`` is for. What is sent goes
by a stream of its own, beside what the caller launches meanwhile.

A copy by the host cannot look whether the wait in ``begin`` has failed. So ``begin`` tells the peers if it has, before
the copies may overwrite what a peer still reads, and a peer's ``close`` looks for that after it has read.
"""

import contextlib

import torch

from tdkernels.ops.collectives.kernel_async_all_gather import begin_kernel, end_kernel, notify_kernel
from tdkernels.ops.collectives.kernel_async_multinode import begin_nodes_kernel
from tdkernels.runtime.gpu import side_stream
from tdkernels.runtime.kernel_launch import pointer_signature
from tdkernels.runtime.triton_launcher import BoundLaunch
from tdkernels.symm import get_workspace


class AsyncCollective:
    """One call's use of the group's workspace of that name; every rank makes the same one.

    A subclass sets ``plan``, by ``workspace.prepare``, before ``begin``. As a context it is closed whatever happens:
    what is still being sent would tell a later call's peers that it had come.
    """

    def __init__(self, name, group, device, across_nodes=False):
        self.device = device
        self.workspace = get_workspace(group, device, name, halves=1, across_nodes=across_nodes)
        self.topology = self.workspace.group.topology
        self.rank, self.world_size = self.workspace.rank, self.workspace.world_size
        self._stream = None  # that the caller launches on, once begun
        self._last_sent = None  # on the side stream

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, _kind, error, _traceback):
        if error is None:
            self.close()
            return
        self.workspace.group.end_abruptly(self.workspace.name, error)
        with contextlib.suppress(RuntimeError, ValueError):  # of the group; the caller gets that of the block
            self.close()

    def begin(self):
        """Wait, on the device, until every peer has come to this call."""
        self._stream = self.workspace.before_launch()
        try:
            self._launch(begin_nodes_kernel if self.spans_nodes else begin_kernel, self.plan)
        except BaseException as error:  # the peers may have been told that this rank has come
            self.workspace.break_off(error)
            raise
        self._check()

    def close(self):
        """Say that what has arrived was read for the last time; what was sent may change after it, in stream order."""
        self._join()
        if self.workspace.may_be_overwritten():
            self._launch(end_kernel)
        self.workspace.after_launch(self._stream)

    @property
    def spans_nodes(self):
        return self.topology.num_nodes > 1

    def _beside(self, enqueue):
        """Let ``enqueue`` launch after what the current stream has now, and beside what comes after."""
        if self.device.type == "cpu":
            enqueue()
            return
        side = side_stream(self.device)
        side.wait_stream(self._stream)
        current = torch.cuda.current_device()
        torch.cuda.set_stream(side)  # torch.cuda.stream() would ask for the current one again, which takes long
        try:
            enqueue()
        finally:
            torch.cuda.set_stream(self._stream)
            if current != self.device.index:  # tensors may be on another GPU than the current one, which that selects
                torch.cuda.set_device(current)
        self._last_sent = side.record_event()

    def _join(self):
        """Make the current stream wait until all has been sent, but not for what others send after it."""
        if self._last_sent is not None:
            self._stream.wait_event(self._last_sent)
            self._last_sent = None

    def _copy(self, dst, src):
        """Copy by the copy engine, as a part of what goes ``_beside``."""
        dst.copy_(src, non_blocking=True)

    def _announce(self, peer, index):
        """Raise our signal number ``index`` at a peer, as a part of what goes ``_beside``.

        By a copy: a kernel might never find room beside others that wait for it.
        """
        workspace = self.workspace
        if self.device.type == "cpu":
            self._launch(notify_kernel, index, peer, self.plan, CHECK_FAILED=False)
        else:
            word = self._kept((peer, index), lambda: workspace.signal_word(peer, index))
            self._copy(word, self._kept("signal", workspace.signal_value))

    def _launch(self, kernel, *args, **constants):
        """Launch one program of a kernel, which takes integers that are never compiled for."""
        places = range(1, 1 + len(args))
        make = lambda: BoundLaunch((1, 1, 1), (self.workspace.ctx, *args), places, {"num_warps": 1, **constants})  # noqa: E731
        bound_launch = self._kept((kernel, *constants.items()), make)
        kernel.launch_bound(bound_launch, args)

    def _launch_on(self, tensors, kernel, programs, *numbers, **constants):
        """Launch a kernel of (ctx, tensors or None, numbers); it is kept for the same numbers and other tensors.

        Of a tensor the kernel takes no more than where it begins. All else that a launch follows from, the plan among
        it, is in the numbers and constants: as they are compiled for, large ones otherwise than small ones, too.
        """
        places = range(1, 1 + len(tensors))
        make = lambda: BoundLaunch((programs, 1, 1), (self.workspace.ctx, *tensors, *numbers), places, constants)  # noqa: E731
        key = kernel, programs, *numbers, *pointer_signature(tensors), *constants.items()
        kernel.launch_bound(self._kept(key, make), tensors)

    def _kept(self, key, make):
        """What ``make`` gave when it was first asked for: a tensor takes the host longer to make than to copy.

        Nobody may hand a tensor that requires a gradient to what is kept: its history would be kept, too.
        """
        launches = self.workspace.launches
        found = launches.get(key)
        if found is None:
            with torch.inference_mode(False):  # it is written to later, whatever mode this call is in
                launches[key] = found = make()
        return found

    def _check(self):
        """On the CPU a launch has ended: raise what it recorded."""
        if self.device.type == "cpu":
            self.workspace.check()
