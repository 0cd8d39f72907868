"""Parts of what other ranks add up: each goes to its owner when it is made, beside what is made next.

Every rank has a slot for each source, in memory at a fixed address (``async_collective``). Signal number
``source * pieces + piece`` is raised when that piece of the source's part stands in its slot.
"""

import math

import triton

from tdkernels.ops.collectives.async_collective import AsyncCollective
from tdkernels.ops.collectives.kernel_async_all_gather import await_kernel, notify_kernel
from tdkernels.ops.collectives.kernel_async_reduce_scatter import add_parts_kernel
from tdkernels.rounding import round_up
from tdkernels.runtime.gpu import num_sms

_ALIGN = 256
_SUM_BLOCK = 4096


class AsyncReduceScatter(AsyncCollective):
    """One call's parts, of at most ``part_bytes``, inside one node; every rank makes the same one.

    Args:
        operator, fields: as for Workspace.prepare
        pieces: in which each part is sent
        passes_on: parts are made of what has come from peers, and must not be announced if it has not
    """

    def __init__(self, operator, fields, part_bytes, group, device, pieces=1, passes_on=True):
        super().__init__("scatter", group, device)
        self._slot_bytes = round_up(part_bytes, _ALIGN)
        self._pieces, self._passes_on = pieces, passes_on
        ranks = self.world_size
        self.plan = self.workspace.prepare(operator, fields, ranks * self._slot_bytes, ranks * pieces)
        self.workspace.expect_copies()
        self._parts = []

    def send(self, owner, part, piece=0, offset=0):
        """Copy a contiguous part to its owner, by the copy engine; it must not change before ``close``.

        Args:
            piece, offset: of the part this is piece number ``piece``, which begins at byte ``offset``
        """
        part = part.detach()
        self._parts.append(part)
        self._beside(lambda: self._copy_to(owner, part, piece, offset))

    def wait(self, source, shape, dtype):
        """The source's part, for which the current stream waits; it can be read until ``close``."""
        step = (self.rank - source) % self.world_size
        self._await(step, step + 1)
        return self._slot(self.rank, source, shape, dtype)

    def add_to(self, own, bias=None):
        """Add all others' parts to ours, contiguous [rows, n], in place; in fp32 and in rank order, then a bias [n]."""
        self._await(1, self.world_size)
        block = 1024 if self.device.type == "cpu" else _SUM_BLOCK
        programs = min(triton.cdiv(own.numel(), block), 4 * num_sms(self.device))
        bias = None if bias is None else bias.contiguous()
        self._launch_on(
            (own, bias), add_parts_kernel, programs, own.numel(), own.shape[1], self._slot_bytes,
            RANKS=self.world_size, ALIGNED=own.shape[1] % 8 == 0 and own.data_ptr() % 16 == 0,
            HAS_BIAS=bias is not None, BLOCK=block, num_warps=8,
        )
        return own

    def close(self):
        super().close()
        self._parts.clear()

    def _await(self, first_step, last_step):
        pieces = self._pieces, 0, self._pieces
        self._launch(await_kernel, *pieces, first_step, last_step, self.plan)
        self._check()

    def _slot(self, rank, source, shape, dtype, offset=0):
        """Where a part of the source stands, or shall, in the memory of a rank; of a piece, where that does."""
        first = self.workspace.data_offset + source * self._slot_bytes
        data = self.workspace.buffer.tensor(rank)[first + offset : first + self._slot_bytes]
        return data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _copy_to(self, owner, part, piece, offset):
        place = owner, self.rank, part.shape, part.dtype, offset
        self._copy(self._kept((self._slot_bytes, *place), lambda: self._slot(*place)), part)
        index = self.rank * self._pieces + piece
        if self._passes_on:
            # By a kernel, which looks for that. It may have to wait for room; of those that take it none waits for
            # this signal.
            self._launch(notify_kernel, index, owner, self.plan, CHECK_FAILED=True)
        else:
            self._announce(owner, index)
