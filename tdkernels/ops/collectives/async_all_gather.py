"""Asynchronous all-gather: gather the shards of all ranks into a buffer of every rank, concurrently with other work.

``begin`` waits until all ranks have reached the call. Then a few programs (``push``), the copy engine (``copy``), or
the kernel of ag_gemm send the shards. ``finish`` waits for all shards. In between, the caller launches the work to
overlap. The buffer has a fixed address (``async_collective``), so that cuBLAS can read it.

On several nodes no copy engine reaches all ranks. There ``copy`` also uses programs, and shards arrive in another order
(``source``). The pushing programs also relay shards, and wait for other nodes (``kernel_async_multinode``). The
overlapped work does not depend on them and can run on the SMs that they leave, so it ends on every rank. Then the
programs that had no SM start, and no wait lasts forever.

Example:
    with AsyncAllGather("my_op", fields, x, group, chunk_rows=256, copies=True) as gather:
        gather.copy()
        ...                                     # launch other work
        gather.finish()
        y = f(gather.gathered)                  # [W, rows, K]
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.collectives.async_collective import AsyncCollective
from tdkernels.ops.collectives.kernel_async_all_gather import await_kernel, push_kernel
from tdkernels.ops.collectives.kernel_async_multinode import await_nodes_kernel, num_pieces, push_nodes_kernel
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.rounding import cdiv, round_up

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.symm.workspace import Workspace

_SLOT_ROWS = 8  # shards begin at multiples of this many rows, so that every slot is aligned for 16-byte copies
_COPY_WORDS = 4096
_CHUNK_ROWS = 256
_PUSH_PROGRAMS = 8  # as many saturate the rate that programs reach over NVLink


def slot_rows_of(rows: int) -> int:
    """Return the number of rows per slot for a shard of ``rows`` rows."""
    return round_up(rows, _SLOT_ROWS)


def rows_of_buffer(workspace: "Workspace", x: torch.Tensor) -> torch.Tensor:
    """Return the first row of this rank's buffer, [1, K], with the width and dtype of x; for tensor descriptors."""
    data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :].view(x.dtype)
    return data.as_strided((1, x.shape[1]), (x.shape[1], 1))


class AsyncAllGather(AsyncCollective):
    """All-gather of ``x`` [rows, K] in chunks of rows. Every rank makes the same call.

    Attributes:
        gathered: The result, [W, rows, K].

    Args:
        operator: As for ``Workspace.prepare``.
        fields: As for ``Workspace.prepare``.
        x: This rank's shard, contiguous and 16-byte aligned.
        group: The resolved group.
        chunk_rows: Rows per chunk.
        copies: Whether ``copy`` will be called.
        signals_of_chunk: Consecutive signals of a chunk. ``push`` and ``copy`` set one. A kernel that sends the shard
            may set several, for example one for each part of the columns.
        num_flags: Private words for a kernel that sends the shard.
    """

    def __init__(
        self, operator: str, fields: Mapping[str, Any], x: torch.Tensor, group: "dist.ProcessGroup", chunk_rows: int,
        copies: bool = False, signals_of_chunk: int = 1, num_flags: int = 0,
    ) -> None:
        super().__init__("gather", group, x.device, across_nodes=True)
        self.x = x.detach()
        self.rows, self.width = x.shape
        self.chunk_rows = chunk_rows
        self.num_chunks = cdiv(self.rows, chunk_rows)
        self.signals_of_chunk = signals_of_chunk
        self._has_received = False
        self.slot_rows = slot_rows_of(self.rows)
        self.row_bytes = self.width * x.element_size()
        self.slot_bytes = self.slot_rows * self.row_bytes
        self.plan = self.workspace.prepare(
            operator, fields, self.world_size * self.slot_bytes,
            self.world_size * self.num_chunks * signals_of_chunk, num_flags,
        )
        if copies and not self.spans_nodes:
            self.workspace.expect_copies()

    @classmethod
    def start(
        cls, operator: str, x: torch.Tensor, group: "dist.ProcessGroup", copies: bool = False
    ) -> "AsyncAllGather":
        """Begin an all-gather of x and send the shard concurrently with the work that the caller launches next.

        Args:
            operator, x, group: As for the class. x may have any layout.
            copies: Whether the copy engine sends the shard, for callers that wait for all shards with ``finish``. It
                takes no SM from the other work.
        """
        x = rows_contiguous(x)
        fields = {"rows": x.shape[0], "width": x.shape[1], "dtype": str(x.dtype), "by copies": copies}
        gather = cls(operator, fields, x, group, max(x.shape[0], 1) if copies else _CHUNK_ROWS, copies)
        gather.begin()
        if copies:
            gather.copy(in_order=False)
        else:
            gather.push()
        return gather

    def push(self, num_programs: int | None = None) -> None:
        """Send this rank's shard with ``num_programs`` programs on the side stream.

        On several nodes as many programs relay the shards of other nodes.
        """
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

    def copy(self, own: bool = True, in_order: bool = True) -> None:
        """Send this rank's shard with the copy engine on the side stream, which takes no SM.

        Args:
            own: Also copy it into this rank's slot. Only readers of ``gathered`` need this.
            in_order: Send and signal one chunk after the other. Without it, the host needs fewer calls, and all signals
                follow the last chunk. Use this if all ranks wait for whole shards with ``finish``.
        """
        if self.spans_nodes:
            self.push()
            return
        self._beside(lambda: self._copy_to_all(own) if in_order else self._copy_at_once(own))

    def copy_out(self, out: torch.Tensor, source: int) -> None:
        """Copy the shard of rank ``source``, which has been waited for, to ``out[source]`` on the side stream.

        ``out`` is valid after ``close``.
        """
        shard = self.x if source == self.rank else self.gathered[source]
        self._beside(lambda: out[source].copy_(shard.view(out.shape[1:]), non_blocking=True))

    def source(self, step: int) -> int:
        """Return the rank whose shard arrives in position ``step``. Position 0 is this rank."""
        local, elsewhere = self.topology.local_world_size, self.topology.num_nodes - 1
        down, nodes_down = step, 0
        if step >= local:  # see source_at
            down, nodes_down = divmod(step - local, elsewhere)
            nodes_down += 1
        node = (self.topology.node_rank - nodes_down) % self.topology.num_nodes
        return node * local + (self.topology.local_rank - down) % local

    def wait(self, step: int, chunk: int | None = None, until: int | None = None) -> None:
        """Make the current stream wait for the shard of rank ``source(step)``, or for one chunk of it.

        Only for ``step`` > 0: this rank's shard is x. With ``until`` wait for all steps before it.
        """
        self._await(step, step + 1 if until is None else until, chunk)

    def finish(self) -> None:
        """Make the current stream wait for all shards, including the copy of this rank's. Then ``gathered`` is valid.
        """
        self._join()
        if not self._has_received:
            self._await(1, self.world_size)

    def mark_received(self) -> None:
        """Declare that work on the current stream has waited for all shards, so that ``finish`` does not wait again."""
        self._has_received = True

    def _await(self, first_step, last_step, chunk=None):
        kernel = await_nodes_kernel if self.spans_nodes else await_kernel
        first_chunk, last_chunk = (0, self.num_chunks) if chunk is None else (chunk, chunk + 1)
        count = self.signals_of_chunk
        signals = self.num_chunks * count, first_chunk * count, last_chunk * count
        self._launch(kernel, *signals, first_step, last_step, self.plan)
        self._check()

    @property
    def storage(self) -> torch.Tensor:
        """The buffer as [W, slot_rows, K]. The rows after the last row of a shard are undefined."""
        shape = self.world_size, self.slot_rows, self.width
        return self._cached((shape, self.x.dtype), lambda: self._storage(shape))

    def _storage(self, shape):
        workspace = self.workspace
        data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :][: self.world_size * self.slot_bytes]
        return data.view(self.x.dtype).view(shape)

    @property
    def gathered(self) -> torch.Tensor:
        """The gathered tensor [W, rows, K]: valid for shards waited for, and for all from ``finish`` to ``close``."""
        return self.storage[:, : self.rows]

    def _copy_to_all(self, own):
        shard = self.x.view(torch.uint8).view(-1)
        for slot, start, stop, peer, index, word in self._destinations:
            if peer == self.rank and not own:
                continue
            self._copy(slot, shard[start:stop])
            if peer != self.rank:
                self._announce(peer, index, word)

    def _copy_at_once(self, own):
        shard = self.x.view(torch.uint8).view(-1)
        found = self._destinations if own else self._destinations[: -self.num_chunks]
        key = own, *self._layout
        find = lambda: [(slot, *signal) for slot, _, _, *signal in found]  # noqa: E731
        self._copy_to_peers(key, find, [shard[start:stop] for _, start, stop, *_ in found])

    @property
    def _destinations(self):
        """[(slot, first byte, last byte + 1, peer, number of the signal, signal)] of all chunks and peers in order.

        The slot and the signal are memory of the peer. This rank is the last peer.
        """
        return self._cached(("destinations", *self._layout), self._all_destinations)

    @property
    def _layout(self):
        """(bytes of a slot, of the shard, of a chunk), which determine ``_destinations``."""
        return self.slot_bytes, self.rows * self.row_bytes, self.chunk_rows * self.row_bytes

    def _all_destinations(self):
        workspace, rank, found = self.workspace, self.rank, []
        _, size, chunk_bytes = self._layout
        first = workspace.data_offset + rank * self.slot_bytes
        for step in range(1, self.world_size + 1):
            peer = (rank + step) % self.world_size
            for chunk in range(self.num_chunks):
                start, stop = chunk * chunk_bytes, min((chunk + 1) * chunk_bytes, size)
                index = rank * self.num_chunks + chunk
                slot = workspace.buffer.tensor(peer)[first + start : first + stop]
                found.append((slot, start, stop, peer, index, workspace.signal_word(peer, index)))
        return found
