"""Asynchronous reduce-scatter: each part is sent to its owner as soon as it is computed, and the owner adds the parts.

Every rank has one slot per source, in memory at a fixed address (``async_collective``). Signal number
``source * pieces + piece`` is set when that chunk of the source's part has arrived in its slot.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton

from tdkernels.ops.collectives.async_collective import AsyncCollective
from tdkernels.ops.collectives.kernel_async_all_gather import await_kernel, notify_kernel
from tdkernels.ops.collectives.kernel_async_reduce_scatter import add_parts_kernel, add_quantized_parts_kernel
from tdkernels.ops.common.fp8_groups import packed_row_bytes, row_block
from tdkernels.rounding import round_up
from tdkernels.runtime.gpu import converts_to_e4m3, num_sms

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_ALIGN = 256
_SUM_BLOCK = 4096


class AsyncReduceScatter(AsyncCollective):
    """Reduce-scatter of parts, within one node. Every rank makes the same call.

    Args:
        operator: As for ``Workspace.prepare``.
        fields: As for ``Workspace.prepare``.
        part_bytes: Maximum bytes of a part.
        group: The resolved group.
        device: The device of the parts.
        pieces: Number of chunks in which each part is sent.
        passes_on: Whether parts are computed from data of peers. If so, their signals are suppressed after a timeout.
    """

    def __init__(
        self, operator: str, fields: Mapping[str, Any], part_bytes: int, group: "dist.ProcessGroup",
        device: "torch.device", pieces: int = 1, passes_on: bool = True,
    ) -> None:
        super().__init__("scatter", group, device)
        self._slot_bytes = round_up(part_bytes, _ALIGN)
        self._pieces, self._passes_on = pieces, passes_on
        ranks = self.world_size
        self.plan = self.workspace.prepare(operator, fields, ranks * self._slot_bytes, ranks * pieces)
        self.workspace.expect_copies()
        self._parts: list[torch.Tensor] = []

    def send(self, owner: int, part: "torch.Tensor", piece: int = 0, offset: int = 0) -> None:
        """Send a part, or one chunk of it, to its owner with the copy engine.

        Args:
            owner: The rank that adds the part.
            part: Contiguous. It must not be modified before ``close``.
            piece: Index of the chunk in the part.
            offset: Byte offset of the chunk in the part.
        """
        part = part.detach()
        self._parts.append(part)
        self._beside(lambda: self._copy_to(owner, part, piece, offset))

    def send_all(self, parts: "Mapping[int, torch.Tensor]") -> None:
        """Send whole parts of one shape to several owners, {owner: part} as for ``send``, with fewer calls of the host.

        The signals follow the last part.
        """
        assert not self._passes_on and self._pieces == 1
        if not parts:
            return
        detached = [part.detach() for part in parts.values()]
        self._parts.extend(detached)

        def find():
            found = [(owner, *self._to_owner(owner, part)) for owner, part in parts.items()]
            return [(slot, owner, index, word) for owner, index, slot, word in found]

        key = self._slot_bytes, *parts, detached[0].shape, detached[0].dtype
        self._beside(lambda: self._copy_to_peers(key, find, detached))

    def wait(self, source: int, shape: "torch.Size", dtype: "torch.dtype") -> "torch.Tensor":
        """Make the current stream wait for the part of a source, and return it. It can be read until ``close``."""
        step = (self.rank - source) % self.world_size
        self._await(step, step + 1)
        return self._slot(self.rank, source, shape, dtype)

    def add_to(
        self, own: "torch.Tensor", bias: "torch.Tensor | None" = None, out: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Add the parts of all peers to ``own``, in fp32 and in rank order, then the bias; return the sum.

        Args:
            own: This rank's part, contiguous [rows, n].
            bias: [n] or None.
            out: Like ``own``, for the sum. If None, the sum replaces ``own``.
        """
        out = own if out is None else out
        self._await(1, self.world_size)
        block = 1024 if self.device.type == "cpu" else _SUM_BLOCK
        programs = min(triton.cdiv(own.numel(), block), 4 * num_sms(self.device))
        bias = None if bias is None else bias.contiguous()
        self._launch_on(
            (own, bias, out), add_parts_kernel, programs, own.numel(), own.shape[1], self._slot_bytes,
            RANKS=self.world_size, ALIGNED=own.shape[1] % 8 == 0 and (own.data_ptr() | out.data_ptr()) % 16 == 0,
            HAS_BIAS=bias is not None, BLOCK=block, num_warps=8,
        )
        return out

    def add_quantized_to(self, own: "torch.Tensor", bias: "torch.Tensor | None" = None) -> "torch.Tensor":
        """Do the same as ``add_to`` for parts that are sent as packed rows, see ``ops.common.fp8_groups``."""
        self._await(1, self.world_size)
        rows, width = own.shape
        block, num_warps = row_block(width, self.device)
        programs = min(rows * triton.cdiv(width, block), 8 * num_sms(self.device))
        bias = None if bias is None else bias.contiguous()
        self._launch_on(
            (own, bias), add_quantized_parts_kernel, programs, rows, width, packed_row_bytes(width), self._slot_bytes,
            RANKS=self.world_size, ALIGNED=width % 16 == 0 and own.data_ptr() % 16 == 0, HAS_BIAS=bias is not None,
            CONVERTS=converts_to_e4m3(self.device), BLOCK=block, num_warps=num_warps,
        )
        return own

    def close(self) -> None:
        super().close()
        self._parts.clear()

    def _await(self, first_step, last_step):
        pieces = self._pieces, 0, self._pieces
        self._launch(await_kernel, *pieces, first_step, last_step, self.plan)
        self._check()

    def _slot(self, rank, source, shape, dtype, offset=0):
        """Return the slot of a source in the memory of a rank, from byte ``offset`` on, as a tensor."""
        first = self.workspace.data_offset + source * self._slot_bytes
        data = self.workspace.buffer.tensor(rank)[first + offset : first + self._slot_bytes]
        return data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _copy_to(self, owner, part, piece, offset):
        index, slot, word = self._to_owner(owner, part, piece, offset)
        self._copy(slot, part)
        if self._passes_on:
            # The kernel checks for a failure. It may have to wait for an SM, but no running kernel waits for this
            # signal.
            self._launch(notify_kernel, index, owner, self.plan, CHECK_FAILED=True)
        else:
            self._announce(owner, index, word)

    def _to_owner(self, owner, part, piece=0, offset=0):
        """Return (number of the signal, slot, signal) for a chunk of a part in the memory of its owner."""
        index = self.rank * self._pieces + piece
        key = self._slot_bytes, owner, index, part.shape, part.dtype, offset
        return index, *self._cached(key, lambda: self._destination(owner, index, part, offset))

    def _destination(self, owner, index, part, offset):
        """Return the slot for a chunk of a part, and its signal, in the memory of the owner."""
        slot = self._slot(owner, self.rank, part.shape, part.dtype, offset)
        return slot, self.workspace.signal_word(owner, index)
