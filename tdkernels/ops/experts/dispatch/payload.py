"""Operands and outputs of a dispatch or a combine, and the element types with which a kernel moves them.

A kernel moves a row in the largest words that divide its size in bytes, whatever its dtype is. Only a kernel that
quantizes, or that multiplies a gradient, needs to know the dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from tdkernels.ops.experts.dispatch import layout
from tdkernels.ops.experts.dispatch.kernel_payload import BY_INSTRUCTION, BY_INTEGERS, QUANTUM, Payload
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu, recorder

if TYPE_CHECKING:
    from tdkernels.ops.experts.dispatch.config import EpConfig

MAX_CHUNKS = layout.MAX_CHUNKS.value
FLOATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


@dataclass
class DispatchTensors:
    """Tensors of a dispatch, kept from its send phase to its receive phase.

    Attributes:
        x: [T, H].
        scales: [T] or [T, S], or None.
        weights: [T, K] fp32, or None.
        rows: Output [R, H].
        row_scales: Output [R] or [R, S], or None.
        row_weights: Output [R] fp32, or None.
        expert_rows: [R, H], for the dot products of ``Routing.dispatch_gradient``, or None.
        dots: Output [R] fp32, these dot products, or None.
        quantize: Whether rows are quantized to float8_e4m3fn.
        gradient: Whether x is the gradient of a weighted sum of rows, see ``kernel_payload``.
        first: Whether this is the first dispatch of a routing, which completes the tables and the received-slot map.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    rows: torch.Tensor
    row_scales: torch.Tensor | None
    row_weights: torch.Tensor | None
    expert_rows: torch.Tensor | None = None
    dots: torch.Tensor | None = None
    quantize: bool = False
    gradient: bool = False
    first: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, in the order of the fields."""
        return (
            self.x, self.scales, self.weights, self.rows, self.row_scales, self.row_weights, self.expert_rows, self.dots
        )

    def with_tensors(self, tensors: Sequence[Any]) -> "DispatchTensors":
        """Return a copy with other ``tensors``."""
        return DispatchTensors(
            *tensors, quantize=self.quantize, gradient=self.gradient, first=self.first,  # type: ignore[misc]
        )


@dataclass
class CombineTensors:
    """Tensors of a combine, kept from its send phase to its receive phase.

    Attributes:
        rows: [R, H].
        weights: [T, K] fp32, or None.
        row_weights: The same weights by rows, [R], or None.
        row_numbers: A number for each row to send along, [R] fp32, or None.
        y: Output [T, H].
        numbers: Output [T, K] fp32, the row numbers by assignments, or None.
        per_expert: Whether all rows are sent, not their sums.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    row_weights: torch.Tensor | None
    row_numbers: torch.Tensor | None
    y: torch.Tensor
    numbers: torch.Tensor | None
    per_expert: bool

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, in the order of the fields."""
        return self.rows, self.weights, self.row_weights, self.row_numbers, self.y, self.numbers

    def with_tensors(self, tensors: Sequence[Any]) -> "CombineTensors":
        """Return a copy with other ``tensors``."""
        return CombineTensors(*tensors, self.per_expert)  # type: ignore[call-arg]


def pieces_trace(device: torch.device, world_size: int) -> torch.Tensor | None:
    """Return the buffer for a trace of a launch, or None: work items of this rank's chunks, then of all ranks' chunks.

    The host does not know the number of chunks, so there is space for the maximum.
    """
    return recorder.buffer(device, (1 + world_size) * MAX_CHUNKS, all_run=False)


def as_memory(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor for a kernel that casts the pointer. One-byte dtypes become uint8: not all GPUs support fp8."""
    if tensor is None or tensor.dtype.itemsize > 1 or tensor.dtype == torch.uint8:
        return tensor
    return tensor.view(torch.uint8)


def as_memories(tensors: Sequence[Any]) -> list[torch.Tensor | None]:
    """Return ``as_memory`` of each tensor, without a function call per tensor."""
    found = []
    for tensor in tensors:
        is_byte = tensor is not None and tensor.dtype.itemsize == 1
        found.append(tensor.view(torch.uint8) if is_byte and tensor.dtype != torch.uint8 else tensor)
    return found


def or_else(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or ``other`` if it is None, for a kernel argument that must be a pointer even if unused."""
    return other if tensor is None else tensor


def _word(nbytes):
    """Return (Triton's type, its bytes) of the largest word that divides ``nbytes``."""
    size = next(size for size in _WORDS if nbytes % size == 0)
    return _WORDS[size], size


def size_of(dtype: tl.dtype) -> int:
    """Return the bytes of an element of a Triton type."""
    return dtype.primitive_bitwidth // 8


def block_of(items: int, item_bytes: int, block_bytes: int, least: int = 1) -> int:
    """Return the items that a program moves at a time: a power of two, limited by block_bytes, at least ``least``."""
    return max(min(next_power_of_2(max(items, 1)), block_bytes // item_bytes), least)


def scale_bytes_of(tensors: DispatchTensors) -> int:
    """Return the bytes of a token's scales."""
    return 0 if tensors.scales is None else tensors.scales.shape[1:].numel() * tensors.scales.element_size()


def _quantize_mode(quantize, device):
    """Return ``Payload.quantize``."""
    if not quantize:
        return 0
    return (BY_INSTRUCTION if gpu.converts_to_e4m3(device) else BY_INTEGERS).value


def parts_of(tensors: DispatchTensors, config: "EpConfig") -> tuple[int, int, Payload]:
    """Return (items of a row, words of its scales, the Payload for which the kernel is compiled)."""
    x, quantize, gradient, scale_bytes = tensors.x, tensors.quantize, tensors.gradient, scale_bytes_of(tensors)
    width = x.shape[1]
    nbytes = width * x.element_size()
    if quantize or gradient:
        source, source_bytes, items = FLOATS[x.dtype], x.element_size(), width
    else:
        source, source_bytes = _word(nbytes)
        items = nbytes // source_bytes
    item, item_bytes = (tl.uint8, 1) if quantize else (source, source_bytes)
    block = block_of(items, source_bytes, config.block_bytes, QUANTUM.value if quantize else 1)
    if quantize:
        scale, scale_size, scale_words, scale_block = tl.float32, 4, cdiv(width, QUANTUM.value), block // QUANTUM.value
    else:
        scale, scale_size = _word(scale_bytes) if scale_bytes else (tl.uint8, 1)
        scale_words = scale_bytes // scale_size
        scale_block = next_power_of_2(max(scale_words, 1))
    aligned = items * item_bytes % 16 == 0
    payload = Payload(source, item, scale, _quantize_mode(quantize, x.device), gradient, aligned, block, scale_block)
    return items, scale_words, payload
