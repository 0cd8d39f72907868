"""Launch the kernels that quantize rows for the wire and dequantize them."""

import torch

from tdkernels.ops.common.fp8_groups import packed_row_bytes, row_block
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.ops.dense.kernel_wire import pack_rows_kernel, unpack_rows_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime.gpu import converts_to_e4m3, num_sms
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

_PROGRAMS_PER_SM = 8


def pack_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, K] in bf16, fp16 or fp32 as packed rows, uint8 [rows, packed_row_bytes(K)].

    The bytes between the codes and the scales of a row, and after its scales, are undefined.
    """
    workspace = local_workspace_of(x.device)
    (packed,) = launch_cached(
        workspace, ("pack rows",), (x,), lambda x: _prepare_pack(workspace, x), lambda x: (rows_contiguous(x),)
    )
    return packed


def unpack_rows(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Store the values of packed rows, which are 16-byte aligned, in ``out``, contiguous [rows, K]."""
    workspace = local_workspace_of(out.device)
    launch_cached(workspace, ("unpack rows",), (packed, out), lambda *of: _prepare_unpack(workspace, *of))


def _prepare_pack(workspace, x):
    packed = output_spec(x, x.shape[0], packed_row_bytes(x.shape[1]), dtype=torch.uint8)
    return _launch(workspace, pack_rows_kernel, (x, packed), x, (x,), (packed,))


def _prepare_unpack(workspace, packed, out):
    return _launch(workspace, unpack_rows_kernel, (packed, out), out, (packed, out), ())


def _launch(workspace, kernel, tensors, values, operands, outputs):
    """Return the Launch of a kernel; ``values`` is the tensor [rows, K] of its two tensors."""
    rows, k = values.shape
    block, num_warps = row_block(k, values.device)
    constants = {
        "ALIGNED": k % 16 == 0 and values.data_ptr() % 16 == 0, "CONVERTS": converts_to_e4m3(values.device),
        "BLOCK": block, "num_warps": num_warps,
    }
    grid = (min(rows * cdiv(k, block), _PROGRAMS_PER_SM * num_sms(values.device)),)
    return Launch(workspace, kernel, grid, (*tensors, rows, k, packed_row_bytes(k)), constants, operands, outputs, [])
