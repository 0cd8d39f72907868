"""Parts of what other ranks add up: each goes to its owner when it is made, beside what is made next.

Every rank has a slot for each source, in memory at a fixed address (``_exchange``). Signal number ``source`` is raised
when the source's part stands in its slot.
"""

import math

from tdkernels.ops._exchange import Exchange
from tdkernels.ops._gather_kernels import await_kernel, notify_kernel

_ALIGN = 256


class Scatter(Exchange):
    """One call's parts, of at most ``part_bytes``, inside one node; every rank makes the same one.

    Args:     operator, fields: as for Workspace.prepare
    """

    def __init__(self, operator, fields, part_bytes, group, device):
        super().__init__("scatter", group, device)
        self._slot_bytes = -(-part_bytes // _ALIGN) * _ALIGN
        self.plan = self.workspace.prepare(operator, fields, self.world_size * self._slot_bytes, self.world_size)
        self._sent = []

    def send(self, owner, part):
        """Copy a contiguous part to its owner, by the copy engine; it must not change before ``close``."""
        self._sent.append(part)
        self._beside(lambda: self._copy_to(owner, part))

    def wait(self, source, shape, dtype):
        """The source's part, for which the current stream waits; it can be read until ``close``."""
        step = (self.rank - source) % self.world_size
        await_kernel[(1,)](self.workspace.ctx, 1, step, step + 1, self.plan, num_warps=1)
        self._check()
        return self._slot(self.rank, source, shape, dtype)

    def close(self):
        super().close()
        self._sent.clear()

    def _slot(self, rank, source, shape, dtype):
        """Where a part of the source stands, or shall, in the memory of a rank."""
        first = self.workspace.data_offset + source * self._slot_bytes
        data = self.workspace.buffer.tensor(rank)[first : first + self._slot_bytes].view(dtype)
        return data[: math.prod(shape)].view(shape)

    def _copy_to(self, owner, part):
        self._slot(owner, self.rank, part.shape, part.dtype).copy_(part, non_blocking=True)
        # By a kernel, since it must not announce a part that is made of what has not come. It may have to wait for
        # room; of those that take it none waits for this signal.
        notify_kernel[(1,)](self.workspace.ctx, 1, 0, owner, self.plan, PASSES_ON=True, num_warps=1)
