"""Launches of the kernels of wire compression: rows of ag_gemm and gemm_rs, and the quantized all_reduce."""

import torch

from tdkernels.ops.collectives import launch_quantized
from tdkernels.ops.collectives.config import CollectiveConfig
from tdkernels.ops.collectives.kernel_async_reduce_scatter import add_quantized_parts_kernel
from tdkernels.ops.collectives.kernel_quantized import all_reduce_quantized_kernel
from tdkernels.ops.common.fp8_groups import packed_row_bytes, row_block
from tdkernels.ops.dense.kernel_wire import pack_rows_kernel, unpack_rows_kernel
from tests.support.aot import PLAN, pointer

CONVERTING = ("sm_90", "sm_100")  # see ``gpu.converts_to_e4m3``


def wire_launches(arch, dtype, k, ranks=4):
    """Return launches (kernel, args, kwargs) for rows of ``k`` elements, and of all_reduce for as many elements."""
    ctx, packed, x = pointer(torch.int64), pointer(torch.uint8), pointer(dtype)
    block, num_warps = row_block(k, torch.device("cuda"))
    rows = {"ALIGNED": k % 16 == 0, "CONVERTS": arch in CONVERTING, "BLOCK": block, "num_warps": num_warps}
    sizes = 1 << 10, k, packed_row_bytes(k)
    bias = x if k % 16 == 0 else None
    adding = {**rows, "RANKS": ranks, "HAS_BIAS": bias is not None}
    config = CollectiveConfig(exchange="two_shot", block_bytes=16384, num_warps=16)
    args, kwargs = launch_quantized.arguments(ctx, x, x, k * dtype.itemsize, PLAN, config)
    return [
        (pack_rows_kernel, [x, packed, *sizes], rows),
        (unpack_rows_kernel, [packed, x, *sizes], rows),
        (add_quantized_parts_kernel, [ctx, x, bias, *sizes, 1 << 24], adding),
        (all_reduce_quantized_kernel, list(args), {**kwargs, "CONVERTS": arch in CONVERTING}),
    ]
