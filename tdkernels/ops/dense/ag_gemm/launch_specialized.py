"""Launch the warp-specialized kernel of ag_gemm."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common.gemm_operands import scale_operands, scale_pointers, weight_layout
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.specialized import launch as specialized
from tdkernels.ops.common.tile_config import SPECIALIZED_TILE, STEP_BYTES, num_parts
from tdkernels.ops.dense.ag_gemm.config import MAX_WEIGHTS, has_tiles_across, num_chunks
from tdkernels.ops.dense.ag_gemm.output import as_planes, has_whole_tiles
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.gluon import descriptor, optional_kernel
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

_BLOCK_M, _BLOCK_N = SPECIALIZED_TILE
SLICE_K = 1024  # columns of a shard that are announced with one signal
# Columns that a GEMM multiplies (720 TFLOP/s in 16 bits) while a row arrives (380 GB/s), both measured on H200.
_COLUMNS_OF_LINK = 1900


@optional_kernel("ag_gemm: the warp-specialized kernel")
def _kernel():
    from tdkernels.ops.dense.ag_gemm.specialized.kernel import ag_gemm_specialized_kernel

    return ag_gemm_specialized_kernel


def supports(
    x: torch.Tensor, weights: Sequence[torch.Tensor], config: Any, segment_rows: int, num_nodes: int = 1,
    scales: Scales | None = None,
) -> bool:
    """Return whether the kernel runs these operands. Ranks may run different kernels, see its docstring."""
    if scales is not None and config.transport != "push":  # the scales are pushed with their rows
        return False
    if num_nodes > 1 or x.shape[0] == 0 or not has_whole_tiles(x.shape[0], segment_rows, _BLOCK_M):
        return False
    return all(specialized.supports(x, weight, config, scales) for weight in weights) and _kernel() is not None


def num_slices(k: int, config: Any, num_nodes: int = 1) -> int:
    """Return the number of signals of a chunk with ``k`` columns, on whatever rank the kernel runs.

    The copy engine and the kernels for several nodes set one.
    """
    if num_nodes > 1 or config.transport != "push" or not specialized.is_enabled(config):
        return 1
    return max(cdiv(k, SLICE_K), 1)


def num_flags(rows: int, k: int, world_size: int, config: Any, num_nodes: int = 1) -> int:
    """Return the private words that the kernel needs for a shard [rows, k], on whatever rank it runs."""
    if num_nodes > 1 or config.transport != "push" or not specialized.is_enabled(config):
        return 0
    return num_chunks(rows, config) * num_slices(k, config) if world_size > 1 else 0


def is_bound_by_link(n: int, world_size: int) -> bool:
    """Return whether gathering x takes longer than its GEMM with a weight [n, K] on Hopper, for any M and K.

    Each row of a peer has 2 * K bytes and 2 * n * K flops.
    """
    return n * world_size < _COLUMNS_OF_LINK * (world_size - 1)


def whole_tiles(tiles: int, programs: int, bound_by_link: bool) -> int:
    """Return how many of ``tiles`` tiles are not divided into halves.

    If the last wave has at most half of the tiles that fit, it takes half of the time with halves, since these occupy
    more SMs. If the link is the bottleneck, few tiles are left when the last rows arrive, so half a wave is divided.
    8192 x 8192 x 28672 on 8 ranks takes 1.11 instead of 1.18 ms with it (computed, ``bench.dense.tile_queue``). But a
    single wave stays one: 80 tiles of 2048 x 10240 x 8192 on 8 ranks take 0.099 ms, and with 65 of them in halves 0.129
    ms (solo mode, H200).
    """
    left = programs // 2 if bound_by_link and tiles > programs else tiles % programs
    return max(tiles - left, 0) if 2 * left <= programs else tiles


def _is_across(x, world_size, segment_rows, fixed):
    """Return ``has_tiles_across`` for operands, if the kernel supports it for them."""
    return not fixed and segment_rows == x.shape[0] and has_tiles_across(x.shape[0], world_size)


def _grid(x, weights, world_size, num_comm, config, across):
    """Return (number of programs, number of whole tiles, number of work items with tiles)."""
    shards, rows = (1, world_size * x.shape[0]) if across else (world_size, x.shape[0])
    tiles = shards * sum(config.tiles.count(rows, weight.shape[0]) for weight in weights)
    n = sum(weight.shape[0] for weight in weights)
    bound_by_link = is_bound_by_link(n, world_size)
    available = gpu.available_sms(x.device)
    whole = whole_tiles(tiles, available, bound_by_link)
    items = 2 * tiles - whole
    return max(min(items, available), num_comm), whole, items


def _num_pushes(x, world_size, config, copies_own):
    """Return the number of work items of ``push_partition``."""
    rows, k = x.shape
    slices = num_slices(k, config)
    chunk_rows = min(config.chunk_tiles * _BLOCK_M, rows)
    parts = num_parts(chunk_rows, _slice_steps(k * x.itemsize, slices) * STEP_BYTES, world_size)
    return num_chunks(rows, config) * slices * parts if world_size > 1 or copies_own else 0


def _slice_steps(row_bytes, slices):
    """Return the steps of K of a slice. Slices have about the same size."""
    return cdiv(cdiv(row_bytes, STEP_BYTES), slices)


def _output_descriptor(y, segment_rows):
    """Return the descriptor of an output for a quarter of a tile."""
    return descriptor(y, *as_planes(y, segment_rows), [1, _BLOCK_M // 2, _BLOCK_N // 2])


def _arguments(
    ctx, x, gathered, weights, biases, ys, slot_rows, plan, num_comm, num_whole, config, segment_rows, fixed,
    scales=None, across=False,
):
    """Return the arguments and constants of the kernel.

    ``gathered`` describes the gathered rows: (first row as [1, K], planes, rows per plane, elements between planes).
    """
    rows, k = x.shape
    layouts = [weight_layout(weight) for weight in weights]
    is_kn = layouts[0][2]
    y_rows = ys[0].shape[0] if across else segment_rows
    of_weights = [
        (specialized.weight_descriptor(weight, is_kn), bias, _output_descriptor(y, y_rows))
        for (weight, _, _), bias, y in zip(layouts, biases, ys, strict=True)
    ]
    unused = MAX_WEIGHTS - len(weights)
    slice_steps = _slice_steps(k * x.itemsize, num_slices(k, config))
    sizes = [weight.shape[0] for weight in weights] + [0] * unused
    args = (
        ctx, x, specialized.rows_descriptor(x, 1, rows, rows * k), specialized.rows_descriptor(*gathered),
        *chain.from_iterable([*of_weights, *[(None, None, None)] * unused]), *scale_pointers(scales),
        rows, *sizes, k, slot_rows, plan, num_comm, num_whole, config.chunk_tiles, config.tiles.group_m, segment_rows,
        slice_steps,
    )
    constants = {"FIXED_HALF": fixed, "W_IS_KN": is_kn, **specialized.scale_constants(scales), "num_warps": 4}
    return args, constants | ({"ACROSS": True} if across else {})


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
    scales: Scales | None = None,
) -> None:
    """Compile the kernel for operands that ``supports`` accepts into Triton's cache, without launching it."""
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    y = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype_of(x, scales))
    gathered, fixed = (x, 1, x.shape[0], x.numel()), config.transport == "copy_engine"
    across = _is_across(x, world_size, x.shape[0], fixed)
    args, constants = _arguments(
        ctx, x, gathered, [weight], [bias], [y], x.shape[0], 0, 0, 0, config, x.shape[0], fixed, scales, across
    )
    _kernel().warmup(*args, grid=(1,), **constants)


def prepare(
    order: Any, workspace: "Workspace", memory: tuple[Any, int, int, bool], num_comm: int, x: torch.Tensor,
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], config: Any, segment_rows: int,
    scales: Scales | None = None,
) -> Launch:
    """Return the Launch for operands that ``supports`` accepts.

    Args:
        order: Checks and orders the launch: the workspace, or WithinCall of it.
        workspace: The workspace.
        memory: (gathered as in ``_arguments``, rows per slot, plan id, whether the call uses one fixed half).
        num_comm: Number of programs that push.
        x: This rank's rows.
        weights: Weights of one layout.
        biases: Their biases.
        config: The config.
        segment_rows: Rows of a segment.
        scales: The scales of scaled operands; transport is "push" then.
    """
    gathered, slot_rows, plan, fixed = memory
    rows, dtype = workspace.world_size * x.shape[0], out_dtype_of(x, scales)
    ys = [output_spec(x, rows, weight.shape[0], dtype=dtype) for weight in weights]
    ranks = workspace.world_size
    across = _is_across(x, ranks, segment_rows, fixed)
    programs, num_whole, items = _grid(x, weights, ranks, num_comm, config, across)
    args, constants = _arguments(
        workspace.ctx, x, gathered, weights, biases, ys, slot_rows, plan, num_comm, num_whole, config, segment_rows,
        fixed, scales, across,
    )
    pushes = _num_pushes(x, ranks, config, fixed or across) if num_comm else 0
    # Halves of tiles without columns do not run.
    constants["trace_ptr"] = recorder.buffer(x.device, items + pushes, all_run=False, by_warps=True)
    operands = x, *weights, *biases, *scale_operands(scales)
    return Launch(order, _kernel(), (programs,), args, constants, operands, ys, (workspace.ctx, gathered[0]))
