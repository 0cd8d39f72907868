"""What a dispatch or a combine moves: its operands and outputs, and how a kernel takes them apart.

A row is moved in the largest words that its bytes are a multiple of, whatever numbers they are; only a kernel that
quantizes, or that multiplies a gradient, needs to know the type.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from tdkernels.ops.experts.dispatch import layout
from tdkernels.ops.experts.dispatch.kernel_payload import BY_INSTRUCTION, BY_INTEGERS, QUANTUM, Payload
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu, recorder

MAX_CHUNKS = layout.MAX_CHUNKS.value
FLOATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


@dataclass
class DispatchTensors:
    """Tensors of a dispatch, from its send phase to its receive phase."""

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
    def tensors(self):
        return (
            self.x, self.scales, self.weights, self.rows, self.row_scales, self.row_weights, self.expert_rows, self.dots
        )

    def with_tensors(self, tensors):
        return DispatchTensors(*tensors, quantize=self.quantize, gradient=self.gradient, first=self.first)


@dataclass
class CombineTensors:
    """Tensors of a combine, from its send phase to its receive phase."""

    rows: torch.Tensor
    weights: torch.Tensor | None  # [T, K]
    row_weights: torch.Tensor | None  # [R]
    row_numbers: torch.Tensor | None
    y: torch.Tensor
    numbers: torch.Tensor | None
    per_expert: bool

    @property
    def tensors(self):
        return self.rows, self.weights, self.row_weights, self.row_numbers, self.y, self.numbers

    def with_tensors(self, tensors):
        return CombineTensors(*tensors, self.per_expert)


def pieces_trace(device, world_size):
    """What records a launch: our chunks, then those of all ranks, of which the host does not know the number."""
    return recorder.buffer(device, (1 + world_size) * MAX_CHUNKS, all_run=False)


def as_memory(tensor):
    """What a kernel gets for memory to which it makes pointers of its own: not every GPU knows pointers to fp8."""
    if tensor is None or tensor.dtype.itemsize > 1 or tensor.dtype == torch.uint8:
        return tensor
    return tensor.view(torch.uint8)


def as_memories(tensors):
    """``as_memory`` of each tensor."""
    found = []
    for tensor in tensors:
        is_byte = tensor is not None and tensor.dtype.itemsize == 1
        found.append(tensor.view(torch.uint8) if is_byte and tensor.dtype != torch.uint8 else tensor)
    return found


def or_else(tensor, other):
    """What a kernel gets for a tensor that is not there and that it does not touch then."""
    return other if tensor is None else tensor


def _word(nbytes):
    """What rows of so many bytes are moved in: (Triton's type, its bytes)."""
    size = next(size for size in _WORDS if nbytes % size == 0)
    return _WORDS[size], size


def size_of(dtype):
    return dtype.primitive_bitwidth // 8


def block_of(items, item_bytes, block_bytes, least=1):
    return max(min(next_power_of_2(max(items, 1)), block_bytes // item_bytes), least)


def scale_bytes_of(tensors):
    """Bytes of a token's scales."""
    return 0 if tensors.scales is None else tensors.scales.shape[1:].numel() * tensors.scales.element_size()


def _how(quantize, device):
    """``Payload.quantize``."""
    if not quantize:
        return 0
    return (BY_INSTRUCTION if gpu.converts_to_e4m3(device) else BY_INTEGERS).value


def parts_of(tensors, config):
    """(items of a row, words of its scales, the Payload that the kernel is compiled for)."""
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
    payload = Payload(source, item, scale, _how(quantize, x.device), gradient, aligned, block, scale_block)
    return items, scale_words, payload
