"""Launches of the warp-specialized kernels."""

from types import SimpleNamespace

import torch

from tdkernels import AgGemmConfig, GroupGemmConfig, MoeTpConfig, Tiles
from tdkernels.ops.common.scaling import Scales
from tdkernels.ops.common.specialized.launch_split_k import NO_SPLITS, LastWave, Splits
from tdkernels.ops.dense import launch_direct_specialized as launch_direct
from tdkernels.ops.dense.ag_gemm import launch_specialized as launch_ag_gemm
from tdkernels.ops.dense.ag_gemm.specialized.kernel import ag_gemm_specialized_kernel
from tdkernels.ops.dense.gemm_ar import launch_specialized as launch_gemm_ar
from tdkernels.ops.dense.gemm_ar.specialized.kernel import gemm_ar_specialized_kernel
from tdkernels.ops.dense.gemm_rs.specialized.kernel import gemm_rs_specialized_kernel
from tdkernels.ops.experts.grouped_gemm import launch_specialized as launch_group_gemm
from tdkernels.ops.experts.grouped_gemm import launch_weights as launch_group_gemm_weights
from tdkernels.ops.experts.grouped_gemm.layout import memory_layout
from tdkernels.ops.experts.grouped_gemm.specialized.kernel import group_gemm_specialized_kernel
from tdkernels.ops.experts.grouped_gemm.specialized.kernel_weights import group_gemm_weights_specialized_kernel
from tdkernels.ops.experts.tp_moe import launch_specialized as launch_tp_moe
from tdkernels.ops.experts.tp_moe.launch_ag_gemm import Launched
from tdkernels.ops.experts.tp_moe.launch_gemm_rs import sum_piece_of
from tdkernels.ops.experts.tp_moe.specialized.kernel_ag_gemm import moe_ag_gemm_specialized_kernel
from tdkernels.ops.experts.tp_moe.specialized.kernel_gemm_rs import moe_gemm_rs_specialized_kernel
from tdkernels.rounding import cdiv
from tests.support.aot import PLAN

TILES = Tiles(128, 256, 64, num_stages=3)
ROWS, N, K = 1024, 512, 448
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _weight(dtype, w_is_kn):
    weight = torch.empty(N, K, dtype=dtype)
    return weight.t().contiguous().t() if w_is_kn else weight


def _scales(dtype, rows, scaling, experts=()):
    """Return (scales of ``rows`` rows and of a weight [*experts, N, K] for an fp8 dtype or None, dtype of the output).

    ``scaling``: "fast" for row-wise scales with fast accumulation, or "row" or "block"
    """
    if dtype.itemsize > 1:
        return None, dtype
    blocks = -(-K // 128)
    by_block = torch.empty(rows, blocks), torch.empty(*experts, N // 128, blocks)
    of = by_block if scaling == "block" else (torch.empty(rows, 1), torch.empty(*experts, N, 1))
    return Scales(*of, "block" if scaling == "block" else "row", torch.bfloat16, scaling == "fast"), torch.bfloat16


def _direct_launch(arguments, rows, last, ranks, dtype, w_is_kn, bias, per_row, scaling, w_dtype, split_k):
    """Return (args, kwargs) of a kernel with transport "direct" for ``rows`` rows of x. ``last``: its last argument."""
    splits = Splits(torch.empty(1), LastWave(8, 4, 2), 0) if split_k else NO_SPLITS
    scales, out = _scales(dtype, rows if per_row else 1, scaling)
    ctx, x, z, descs = launch_direct.operands_to_compile(torch.empty(rows, K, dtype=dtype), TILES, ranks, scales)
    args, constants = arguments(
        ctx, x, _weight(w_dtype or dtype, w_is_kn), torch.empty(N, dtype=out) if bias else None, z, descs, ROWS, PLAN,
        TILES, last, scales=scales, splits=splits,
    )
    assert constants["W_IS_KN"] == w_is_kn
    return args, constants


def gemm_rs_launch(
    ranks, dtype, w_is_kn=False, bias=False, per_row=True, scaling="fast", w_dtype=None, split_k=False, pairs=False,
):
    """Return (kernel, args, kwargs). ``per_row``: whether each row of x has a scale, for fp8.

    split_k: whether tiles are split along K
    pairs: whether the halves of a tile may belong to two ranks
    """
    options = ranks, dtype, w_is_kn, bias, per_row, scaling, w_dtype, split_k
    args, constants = _direct_launch(launch_direct.arguments, ranks * ROWS, ROWS, *options)
    return gemm_rs_specialized_kernel, args, constants | {"PAIRS": pairs}


def gemm_ar_launch(ranks, dtype, w_is_kn=False, bias=False, per_row=True, scaling="fast", w_dtype=None, split_k=False):
    """Return (kernel, args, kwargs); arguments as for ``gemm_rs_launch``."""
    options = ranks, dtype, w_is_kn, bias, per_row, scaling, w_dtype, split_k
    return gemm_ar_specialized_kernel, *_direct_launch(launch_gemm_ar.arguments, ROWS, 1, *options)


def ag_gemm_launch(weights, dtype, w_is_kn=False, bias=False, fixed_half=False, scaling="fast", across=False):
    """Return (kernel, args, kwargs) for a number of weights."""
    scales, out = _scales(dtype, ROWS, scaling)
    x, y = torch.empty(ROWS, K, dtype=dtype), torch.empty(2 * ROWS, N, dtype=out)
    gathered = x, 2, 2 * ROWS, 4 * x.numel()
    args, constants = launch_ag_gemm._arguments(
        torch.empty(64, dtype=torch.int64), x, gathered, [_weight(dtype, w_is_kn)] * weights,
        [torch.empty(N, dtype=out) if bias else None] * weights, [y] * weights, ROWS, PLAN, 8, 132,
        AgGemmConfig(tiles=TILES), ROWS, fixed_half, scales, across,
    )
    assert constants["W_IS_KN"] == w_is_kn
    return ag_gemm_specialized_kernel, args, constants


def group_gemm_launch(experts, dtype, activation=None, w_is_kn=False, keep=False, scaling="fast"):
    """Return (kernel, args, kwargs)."""
    scales, out = _scales(dtype, ROWS, scaling, (experts,))
    x = torch.empty(ROWS, K, dtype=dtype)
    w = torch.empty(experts, K, N, dtype=dtype).transpose(1, 2) if w_is_kn else torch.empty(experts, N, K, dtype=dtype)
    layout = memory_layout(w, activation)
    y, pre = torch.empty(ROWS, layout[1], dtype=out), torch.empty(ROWS, N, dtype=out) if keep else None
    splits, counter = torch.empty(experts, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    config = GroupGemmConfig(tiles=TILES)
    args, constants = launch_group_gemm.arguments(x, ROWS, w, layout, splits, counter, y, pre, config, scales)
    assert constants["W_IS_KN"] == w_is_kn
    return group_gemm_specialized_kernel, args, constants


def group_gemm_weights_launch(experts, dtype):
    """Return (kernel, args, kwargs)."""
    dy, x, dw = (torch.empty(*size, dtype=dtype) for size in ((ROWS, N), (ROWS, K), (experts, N, K)))
    splits, counter = torch.empty(experts, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    args, constants = launch_group_gemm_weights.specialized_arguments(dy, x, ROWS, splits, counter, dw, 8)
    return group_gemm_weights_specialized_kernel, args, constants


def _moe_operands(ranks, experts, choices, dtype, w_is_kn, scaling):
    """Return (a stand-in for a MoeRouting, weight, scales or None, dtype of the output, two tensors of integers)."""
    scales, out = _scales(dtype, ranks * ROWS * choices, scaling, (experts,))
    w = torch.empty(experts, K, N, dtype=dtype).transpose(1, 2) if w_is_kn else torch.empty(experts, N, K, dtype=dtype)
    routing = SimpleNamespace(
        world_size=ranks, tokens=ROWS, slot_rows=ROWS, num_choices=choices, chunk_rows=256, num_stages=3,
        num_chunks=cdiv(ROWS, 256),
    )
    return routing, w, scales, out, torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int64)


def moe_ag_gemm_launch(choices, dtype, activation=None, w_is_kn=False, keep=False, scaling="fast"):
    """Return (kernel, args, kwargs) for 8 experts and 4 ranks."""
    routing, w, scales, out, numbers, words = _moe_operands(4, 8, choices, dtype, w_is_kn, scaling)
    rows, width = 4 * ROWS * choices, memory_layout(w, activation)[1]
    made = Launched(torch.empty(rows, width, dtype=out), torch.empty(rows, N, dtype=out) if keep else None)
    routed = numbers, torch.empty(rows, dtype=torch.int32), numbers, numbers
    args, constants = launch_tp_moe.ag_gemm_arguments(
        words, torch.empty(ROWS, K, dtype=dtype), w, routing, routed, made, PLAN, 64, MoeTpConfig(tiles=TILES),
        activation, scales,
    )
    assert constants["W_IS_KN"] == w_is_kn
    return moe_ag_gemm_specialized_kernel, args, constants


def moe_gemm_rs_launch(ranks, choices, dtype, w_is_kn=False, weighted=True, scaling="fast", narrow=False):
    """Return (kernel, args, kwargs) for 8 experts. ``narrow``: with the pieces of few tokens"""
    routing, w, scales, out, numbers, words = _moe_operands(ranks, 8, choices, dtype, w_is_kn, scaling)
    rows = ranks * ROWS * choices
    few = SimpleNamespace(**vars(routing) | {"tokens": 1}) if narrow else routing
    args, constants = launch_tp_moe.gemm_rs_arguments(
        words, torch.empty(rows, K, dtype=dtype), w, routing, (numbers, numbers, numbers),
        torch.empty(64) if weighted else None, words, torch.empty(rows, N, dtype=out),
        torch.empty(ROWS, N, dtype=out), PLAN, sum_piece_of(N, few), MoeTpConfig(tiles=TILES), scales,
    )
    assert constants["W_IS_KN"] == w_is_kn
    return moe_gemm_rs_specialized_kernel, args, constants
