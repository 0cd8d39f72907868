"""Launches of the helper kernels: begin a call, push, wait, sum partials, merge."""

import torch

from tdkernels.ops.attention.ag_attention import kernel_merge
from tdkernels.ops.collectives import kernel_async_all_gather as gather
from tdkernels.ops.collectives import kernel_async_multinode as gather_nodes
from tdkernels.ops.collectives import kernel_async_reduce_scatter
from tests.compiled.targets import BF16, FP32
from tests.support.aot import PLAN, pointer


def helper_launches():
    """Return {kernel: launches}. One launch of each kernel has as many arguments equal to 1 as possible."""
    ctx, x = pointer(torch.int64), pointer(BF16)
    push = {"COPY_WORDS": 4096, "num_warps": 16}
    add = {"BLOCK": 4096, "num_warps": 8}
    return {
        gather.begin_kernel: [([ctx, PLAN], {"num_warps": 1}), ([ctx, 1], {"num_warps": 1})],
        gather.push_kernel: [([ctx, x, 1 << 24, 1 << 20, 16, 1 << 24, PLAN], push), ([ctx, x, 2, 2, 1, 16, 1], push)],
        gather.end_kernel: [([ctx], {"num_warps": 1})],
        gather.notify_kernel: [
            ([ctx, 48, 2, PLAN], {"CHECK_FAILED": True, "num_warps": 1}), ([ctx, 1, 1, 1], {"CHECK_FAILED": False})
        ],
        gather.await_kernel: [
            ([ctx, 16, 0, 16, 1, 4, PLAN], {"num_warps": 1}), ([ctx, 1, 0, 1, 1, 2, 1], {"num_warps": 1})
        ],
        kernel_async_reduce_scatter.add_parts_kernel: [
            ([ctx, x, x, x, 1 << 24, 8192, 1 << 25], {**add, "RANKS": 4, "ALIGNED": True, "HAS_BIAS": True}),
            (
                [ctx, pointer(FP32), None, pointer(FP32), 1, 1, 256],
                {**add, "RANKS": 2, "ALIGNED": False, "HAS_BIAS": False},
            ),
        ],
        kernel_merge.merge_kernel: [_merge(BF16, 128, 1 << 20, 1 << 19, 1 << 18), _merge(FP32, 72, 1, 1, 1)],
    }


def _merge(dtype, d, *sizes):
    """Return the arguments of the log-sum-exp merge of two partial attention outputs into ``dtype``."""
    stats, o = pointer(FP32), pointer(BF16)
    constants = {"D": d, "BLOCK_D": 128, "BLOCK": 32, "num_warps": 4}
    return [pointer(dtype), stats, o, stats, o, stats, *sizes], constants


def multinode_helper_launches():
    ctx, x = pointer(torch.int64), pointer(BF16)
    narrow, wide = {"num_warps": 1}, {"COPY_WORDS": 4096, "num_warps": 16}
    return {
        gather_nodes.begin_nodes_kernel: ([ctx, PLAN], narrow),
        gather_nodes.push_nodes_kernel: ([ctx, x, 8, 1 << 24, 1 << 20, 16, 1 << 24, PLAN], wide),
        gather_nodes.await_nodes_kernel: ([ctx, 16, 0, 16, 1, 4, PLAN], narrow),
    }
