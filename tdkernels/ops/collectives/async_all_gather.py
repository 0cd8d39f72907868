"""A gather that runs beside other work: every rank's shard ends up, whole, in one buffer of every rank.

It is opened by ``begin``, which waits until all ranks have come to this call; fed by ``push`` (a few programs), by
``copy`` (the copy engine) or by AG-GEMM's own kernel; and ended by ``finish``. In between the caller launches what it
wants to overlap. The buffer is at a fixed address (``collectives.async_collective``), so that cuBLAS can read it.

On several nodes there is no copy engine that reaches everybody, so ``copy`` pushes there, too, and the shards come in
another order (``source``). Programs that push relay there, and wait for other nodes (``kernel_async_multinode``). What
runs beside them does not depend on them and can do with the room that they leave, so it ends on every rank; then those
that found no room begin, and none waits in vain.
"""

import torch

from tdkernels.ops.collectives.async_collective import AsyncCollective
from tdkernels.ops.collectives.kernel_async_all_gather import await_kernel, push_kernel
from tdkernels.ops.collectives.kernel_async_multinode import await_nodes_kernel, num_pieces, push_nodes_kernel
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.rounding import cdiv, round_up

_SLOT_ROWS = 8  # shards begin at multiples of this many rows, so that every slot is aligned for 16-byte copies
_COPY_WORDS = 4096
_CHUNK_ROWS = 256
_PUSH_PROGRAMS = 8  # as many saturate what programs reach over NVLink


def slot_rows_of(rows):
    return round_up(rows, _SLOT_ROWS)


def rows_of_buffer(workspace, x):
    """This rank's buffer as the first of rows like those of x."""
    data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :].view(x.dtype)
    return data.as_strided((1, x.shape[1]), (x.shape[1], 1))


class AsyncAllGather(AsyncCollective):
    """One call's gather of ``x`` [rows, K], in chunks of ``chunk_rows`` rows; every rank makes the same one.

    Args:
        operator, fields: as for Workspace.prepare
        x: contiguous, 16-byte aligned
        copies: ``copy`` will be called
    """

    def __init__(self, operator, fields, x, group, chunk_rows, copies=False):
        super().__init__("gather", group, x.device, across_nodes=True)
        self.x = x.detach()
        self.rows, self.width = x.shape
        self.chunk_rows = chunk_rows
        self.num_chunks = cdiv(self.rows, chunk_rows)
        self.slot_rows = slot_rows_of(self.rows)
        self.row_bytes = self.width * x.element_size()
        self.slot_bytes = self.slot_rows * self.row_bytes
        self.plan = self.workspace.prepare(
            operator, fields, self.world_size * self.slot_bytes, self.world_size * self.num_chunks
        )
        if copies and not self.spans_nodes:
            self.workspace.expect_copies()

    @classmethod
    def start(cls, operator, x, group):
        """Begin a gather of x and push it beside what the caller launches next."""
        x = rows_contiguous(x)
        fields = {"rows": x.shape[0], "width": x.shape[1], "dtype": str(x.dtype)}
        gather = cls(operator, fields, x, group, _CHUNK_ROWS)
        gather.begin()
        gather.push()
        return gather

    def push(self, num_programs=None):
        """Send our shard by ``num_programs`` programs beside the current stream, and relay others by as many."""
        if num_programs is None:
            num_programs = 2 if self.x.device.type == "cpu" else _PUSH_PROGRAMS
        sizes = (
            self.rows * self.row_bytes, self.chunk_rows * self.row_bytes, self.num_chunks, self.slot_bytes, self.plan
        )
        options = {"COPY_WORDS": _COPY_WORDS, "num_warps": 16}

        def launch():
            if self.spans_nodes:
                send, relay = num_pieces(num_programs, self.num_chunks, self.topology.local_world_size)
                self._launch_on((self.x,), push_nodes_kernel, send + relay, send, *sizes, **options)
            else:
                self._launch_on((self.x,), push_kernel, num_programs, *sizes, **options)

        self._beside(launch)

    def copy(self, own=True):
        """Send our shard by the copy engine, which takes no multiprocessor, beside the current stream.

        ``own``: copy it into our own slot too, which only ``gathered`` needs.
        """
        if self.spans_nodes:
            self.push()
            return
        self._beside(lambda: self._copy_to_all(own))

    def source(self, step):
        """The rank whose shard comes as number ``step``; ours is number 0."""
        local, elsewhere = self.topology.local_world_size, self.topology.num_nodes - 1
        down, nodes_down = step, 0
        if step >= local:  # see source_at
            down, nodes_down = divmod(step - local, elsewhere)
            nodes_down += 1
        node = (self.topology.node_rank - nodes_down) % self.topology.num_nodes
        return node * local + (self.topology.local_rank - down) % local

    def wait(self, step, chunk=None):
        """Make the current stream wait for the shard of the rank ``source(step)``, or a chunk; ours itself is in x."""
        self._await(step, step + 1, chunk)

    def finish(self):
        """Make the current stream wait for all shards, the copy of our own included: ``gathered`` is whole then."""
        self._join()
        self._await(1, self.world_size)

    def _await(self, first_step, last_step, chunk=None):
        kernel = await_nodes_kernel if self.spans_nodes else await_kernel
        chunks = (0, self.num_chunks) if chunk is None else (chunk, chunk + 1)
        self._launch(kernel, self.num_chunks, *chunks, first_step, last_step, self.plan)
        self._check()

    @property
    def storage(self):
        """The buffer as [W, slot_rows, K]; the rows past a shard's last hold anything."""
        shape = self.world_size, self.slot_rows, self.width
        return self._kept((shape, self.x.dtype), lambda: self._storage(shape))

    def _storage(self, shape):
        workspace = self.workspace
        data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :][: self.world_size * self.slot_bytes]
        return data.view(self.x.dtype).view(shape)

    @property
    def gathered(self):
        """What was gathered, [W, rows, K]: the shards waited for, or all between ``finish`` and ``close``."""
        return self.storage[:, : self.rows]

    def _copy_to_all(self, own):
        rank = self.rank
        shard = self.x.view(torch.uint8).view(-1)
        for step in range(1, self.world_size + own):
            peer = (rank + step) % self.world_size
            for chunk in range(self.num_chunks):
                start = chunk * self.chunk_rows * self.row_bytes
                stop = min(start + self.chunk_rows * self.row_bytes, self.rows * self.row_bytes)
                self._copy(self._slot_on(peer, start, stop), shard[start:stop])
                if peer != rank:
                    self._announce(peer, rank * self.num_chunks + chunk)

    def _slot_on(self, peer, start, stop):
        """Bytes ``start`` to ``stop`` of our slot in the memory of a peer."""
        workspace, first = self.workspace, self.workspace.data_offset + self.rank * self.slot_bytes
        make = lambda: workspace.buffer.tensor(peer)[first + start : first + stop]  # noqa: E731
        return self._kept((peer, self.slot_bytes, start, stop), make)
