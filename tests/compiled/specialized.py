"""Launch of the warp-specialized kernel of gemm_rs."""

import torch

from tdkernels import Tiles
from tdkernels.ops.dense.gemm_rs import launch_specialized
from tdkernels.ops.dense.gemm_rs.specialized.kernel import gemm_rs_specialized_kernel
from tests.support.aot import PLAN

TILES = Tiles(128, 256, 64, num_stages=3)


def specialized_launch(ranks, dtype, w_is_kn=False, bias=False):
    """Return (kernel, args, kwargs)."""
    rows, n, k = 1024, 512, 448
    weight = torch.empty(n, k, dtype=dtype)
    x = torch.empty(ranks * rows, k, dtype=dtype)
    memory = x.new_empty(2 * TILES.block_m * TILES.block_n)
    descs = [launch_specialized._slots_descriptor(memory, memory.nbytes // 2, TILES, 1)] * ranks
    args, constants = launch_specialized._arguments(
        torch.empty(64, dtype=torch.int64), x, weight.t().contiguous().t() if w_is_kn else weight,
        torch.empty(n, dtype=dtype) if bias else None, torch.empty(64, dtype=dtype), descs, rows, PLAN, TILES, rows,
    )
    assert constants["W_IS_KN"] == w_is_kn
    return gemm_rs_specialized_kernel, args, constants
