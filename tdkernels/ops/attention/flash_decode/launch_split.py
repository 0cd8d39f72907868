"""Launch method "split" of flash_decode: one kernel computes parts, a second one merges them and the ranks' results.

The parts of a latent cache (MLA) are computed by ``latent_kernel`` on Hopper. For other caches and GPUs, and on CPU
ranks, ``kernel_split`` computes them.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tdkernels.ops.attention.flash_decode import launch as launcher
from tdkernels.ops.attention.flash_decode.config import (
    LATENT_BLOCK,
    LATENT_D,
    LATENT_DV,
    LATENT_ROWS,
    DecodeShape,
    can_split,
    has_latent_kernel,
    num_programs,
)
from tdkernels.ops.attention.flash_decode.kernel_split import flash_decode_join_kernel, flash_decode_parts_kernel
from tdkernels.ops.attention.flash_decode.kernel_work import MAX_CHUNKS
from tdkernels.ops.attention.flash_decode.operands import Operands
from tdkernels.ops.attention.tile import LOG2_E
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu
from tdkernels.runtime.gluon import descriptor, optional_kernel
from tdkernels.runtime.kernel_launch import Launch, local_workspace_of, operand_signature, output_spec
from tdkernels.symm.group import group_state
from tdkernels.symm.shared_settings import batch_invariance

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from tdkernels.ops.attention.flash_decode.config import FlashDecodeConfig



class _Parts(NamedTuple):
    """How the first launch divides the work.

    Attributes:
        latent: Whether ``latent_kernel`` computes the parts.
        rows: Query rows of a part.
        block_n: Keys of a block; those of two blocks of ``latent_kernel``.
        shares: Number of equal shares of the blocks of all entries.
        tiles: Tiles of an entry.
        chunk: Minimum blocks per chunk, or 0 without chunks.
        slots: Most chunks of an entry.
    """

    latent: bool
    rows: int
    block_n: int
    shares: int
    tiles: int
    chunk: int
    slots: int

    def of_tile(self, shape: DecodeShape) -> int:
        """Return the number of parts for which a tile has scratch memory, as in ``kernel_split``."""
        return shape.batch * self.slots if self.chunk else shape.batch + self.shares

    def scratch_size(self, shape: DecodeShape) -> int:
        """Return the fp32 elements of scratch memory: o and lse of all parts."""
        return self.tiles * self.of_tile(shape) * self.rows * (shape.padded_dv + 1)


def supports(q: torch.Tensor, window: int | None, group: "dist.ProcessGroup | None") -> bool:
    """Return whether a call can use method "split", with q [B, Tq, Hq, D]. The result is the same on all ranks.

    Its kernels do not skip keys before a window. For the other limits see ``can_split``.
    """
    if not q.numel() or window is not None:
        return False
    if group is None or group.size() == 1:
        return True
    return can_split(q.shape[1], group.size(), group_state(group).topology.num_nodes)


@optional_kernel("flash_decode: the kernel for latent caches")
def _latent_kernel():
    from tdkernels.ops.attention.flash_decode.latent.kernel import latent_kernel

    return latent_kernel


def _uses_latent_kernel(operands, shape, options):
    """Return whether ``latent_kernel`` computes the parts of a call: the cache has its form, and TMA can address it."""
    q, k_cache, k_rope, (scale, soft_cap, _) = operands.q, operands.k_cache, operands.k_rope, options
    if shape.paged and k_cache.shape[1] % LATENT_BLOCK:
        return False
    if scale <= 0 or soft_cap is not None or not has_latent_kernel(shape, q.device) or _latent_kernel() is None:
        return False
    caches = [k_cache] if k_rope is None else [k_cache, k_rope]
    strides = [stride * cache.element_size() for cache in caches for stride in cache.stride()[:2]]
    addresses = [tensor.data_ptr() for tensor in (q, *caches)]
    return k_cache.numel() > 0 and min(strides) > 0 and not any(number % 16 for number in (*addresses, *strides))


def _overlaps(device):
    """Return whether the second launch is a programmatic dependent launch."""
    return gpu.capability(device) >= (9, 0)


def _divide_work(shape, latent, capacity, config, device):
    """Return the _Parts of a call, with ``latent`` from ``_uses_latent_kernel``."""
    rows, block_n = (LATENT_ROWS, 2 * LATENT_BLOCK) if latent else (shape.rows_of_tile, config.block_n)
    tiles = shape.heads * cdiv(shape.rows, rows)
    if latent:
        programs = config.num_programs or gpu.num_sms(device)
    else:
        programs = num_programs(config, shape, capacity, device)
    chunk = max(config.chunk_keys // block_n, 1) if config.chunk_keys else 0
    slots = min(max(cdiv(capacity, chunk * block_n), 1), MAX_CHUNKS.value) if chunk else 0
    return _Parts(latent, rows, block_n, max(programs // tiles, 1), tiles, chunk, slots)


class PairOfLaunches:
    """Both launches of a call, cached as one, because each look-up costs the host time.

    Args:
        parts: The first launch.
        join: The second launch.
        scratch_size: fp32 elements of scratch memory between them.
        latent: Whether ``latent_kernel`` computes the parts.
    """

    def __init__(self, parts: Launch, join: Launch, scratch_size: int, latent: bool) -> None:
        self._parts, self._join, self._scratch_size, self.latent = parts, join, scratch_size, latent

    def __call__(self, operands: "Sequence[Any]") -> list[torch.Tensor]:
        """Launch on operands of the same signature, in the order of ``launch``. Return the outputs."""
        scratch = operands[0].new_empty(self._scratch_size, dtype=torch.float32)
        self._parts((*operands, scratch))
        return self._join((scratch, operands[3]))

    def is_current(self) -> bool:
        """Return whether the workspace still has the buffer that the launches were prepared for."""
        return self._join.is_current()


def launch(
    operands: Operands, options: tuple, group: "dist.ProcessGroup | None", config: "FlashDecodeConfig",
    keep: bool = False,
) -> Any:
    """Launch both kernels on validated operands of a call that ``supports`` accepts. As ``launch.launch``."""
    kind, operands = launcher.fp8_kind(operands.k_cache), launcher.as_read(operands)
    o, lse, *kept = _pair_of(operands, kind, options, group, config, keep)(operands)
    return o, lse, *(kept or [None])  # type: ignore[list-item]


def bind_call(
    operands: Operands, options: tuple, group: "dist.ProcessGroup | None", config: "FlashDecodeConfig"
) -> PairOfLaunches | None:
    """Return the launches that ``launch`` uses for these operands.

    The result is None for fp8 caches, which are passed as views.
    """
    if operands.k_cache.dtype == launcher.FP8:
        return None
    return _pair_of(operands, launcher.FP8_NONE.value, options, group, config, False)


def compile(operands: Operands, options: tuple, config: "FlashDecodeConfig") -> None:
    """Compile the kernel that computes parts for these operands into Triton's cache, without launching it.

    ``latent_kernel`` is not compiled in advance, because only one candidate of the tuner runs it.
    """
    q, shape = operands.q, config.tiled(launcher.shape_of_call(operands))
    if _uses_latent_kernel(operands, shape, options):
        return
    scratch, kind = q.new_empty(1, dtype=torch.float32), launcher.fp8_kind(operands.k_cache)
    parts = _divide_work(shape, False, operands.capacity(), config, q.device)
    args, constants = _parts_arguments(launcher.as_read(operands), scratch, kind, options, shape, parts, config)
    flash_decode_parts_kernel.warmup(*args, grid=(1,), **constants)


def _pair_of(operands, kind, options, group, config, keep):
    """Return the PairOfLaunches of a call."""
    q, k_cache, v_cache, *_ = operands
    workspace, alone = launcher.workspace_of(q, group)
    key = (
        "split", config, options, keep, kind, launcher.value_is_key(k_cache, v_cache), launcher.precision_of(q),
        batch_invariance(), *operand_signature(operands),
    )
    pair = workspace.launches[key]
    if pair is None:
        detached = Operands(*(None if operand is None else operand.detach() for operand in operands))
        pair = _prepare(workspace, alone, detached, kind, options, config, keep)
        workspace.launches[key] = pair  # in the current cache: ``_prepare`` may have replaced the buffer
    return pair


def _prepare(workspace, alone, operands, kind, options, config, keep):
    """Return the PairOfLaunches of a call. The first call of several ranks with a config checks that they agree."""
    q, kv_lens = operands.q, operands.kv_lens
    shape = config.tiled(launcher.shape_of_call(operands))
    capacity = operands.capacity()
    latent = _uses_latent_kernel(operands, shape, options)
    parts = _divide_work(shape, latent, capacity, config, q.device)
    scratch = output_spec(q, parts.scratch_size(shape), dtype=torch.float32)
    fields = None if alone else with_config(launcher.problem_fields(q, shape, options), config)
    return PairOfLaunches(
        _prepare_parts(operands, scratch, kind, options, shape, parts, config),
        _prepare_join(workspace, fields, (scratch, kv_lens), q, shape, parts, capacity, keep),
        parts.scratch_size(shape), latent,
    )


# ---- the first launch ----


def _prepare_parts(operands, scratch, kind, options, shape, parts, config):
    """Return the Launch of the kernel that computes the parts."""
    if parts.latent:
        kernel = _latent_kernel()
        args, constants = _latent_arguments(operands, scratch, options[0], shape, parts)
    else:
        kernel = flash_decode_parts_kernel
        args, constants = _parts_arguments(operands, scratch, kind, options, shape, parts, config)
    grid, workspace = (parts.shares * parts.tiles,), local_workspace_of(operands.q.device)
    return Launch(workspace, kernel, grid, args, constants, (*operands, scratch), [], [])


def _parts_arguments(operands, scratch, kind, options, shape, parts, config):
    """Return (args, constants) of ``flash_decode_parts_kernel``."""
    given, num_pages, score_scale, cap, strides, forms = launcher.cache_arguments(
        operands, shape, kind, config, options
    )
    args = (
        *given, scratch, shape.batch, shape.heads, operands.capacity(), num_pages, parts.shares, parts.slots,
        score_scale, cap, strides,
    )
    constants = {
        "BP": next_power_of_2(shape.batch), **forms, "CHUNK": parts.chunk, "PDL": _overlaps(operands.q.device),
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }
    return args, constants


def _latent_arguments(operands, scratch, scale, shape, parts):
    """Return (args, constants) of ``latent_kernel``."""
    q, k_cache, _, kv_lens, block_table, k_scale, v_scale, k_rope = operands

    def keys(cache, width):
        sizes, strides = [*cache.shape[:2], cache.shape[3]], [*cache.stride()[:2], 1]
        return descriptor(cache, sizes, strides, [1, LATENT_BLOCK, width])

    rotary = keys(k_cache if k_rope is None else k_rope, LATENT_D - LATENT_DV)
    queries = descriptor(
        q, [shape.batch * shape.rows, LATENT_D], [LATENT_D, 1], [LATENT_ROWS, LATENT_DV // 2]
    )
    table = (kv_lens, 0, 0) if block_table is None else (block_table, block_table.stride(0), k_cache.shape[0])
    lse_at = parts.tiles * parts.of_tile(shape) * parts.rows * shape.padded_dv
    args = (
        q, keys(k_cache, LATENT_DV // 2), rotary, queries, kv_lens, *table, k_scale, v_scale, scratch, lse_at,
        scale * LOG2_E.value, shape.batch, operands.capacity(), parts.shares, parts.slots, parts.tiles,
    )
    constants = {
        "TQ": shape.queries, "GROUP": shape.group, "BP": next_power_of_2(shape.batch),
        "PAGE": 0 if block_table is None else k_cache.shape[1], "CHUNK": parts.chunk,
        "FP8": (1 if k_scale is None else 2) if shape.cache_bytes == 1 else 0,
        "ROPE_AT": LATENT_DV if k_rope is None else 0, "num_warps": 4,
    }
    return args, constants


# ---- the second launch ----


def _join_tile(shape: DecodeShape, in_chunks: bool) -> tuple[int, int, int]:
    """Return (query rows merged by a program at a time, columns, parts loaded at a time).

    They depend on q and the config alone, so they are the same on all ranks. With chunks, which are for results that do
    not depend on the batch, they do not depend on it either.

    Fewest rows fill the GPU best if there are few of them. Measured on H100 with 512 columns, in us: 128 rows of 66
    parts 6.3 with (1, 128, 16), 16 with (2, 512, 4); 4096 rows of 2 parts 5.5 with (4, 512, 2), 13 with (1, 512, 16).
    The limits of 512 and 2048 rows and the result between them are estimates.
    """
    rows = shape.batch * shape.heads * shape.rows
    most = next_power_of_2(shape.rows)
    if rows <= 512 or in_chunks:
        return 1, min(shape.padded_dv, 128), 16
    if rows <= 2048:
        return min(2, most), shape.padded_dv, 4
    return min(4, most), shape.padded_dv, 2


def _prepare_join(workspace, fields, operands, q, shape, parts, capacity, keep):
    """Return the Launch of the kernel that merges the parts, and with ``fields`` the results of the ranks."""
    scratch, kv_lens = operands
    rows, columns, step = _join_tile(shape, parts.chunk > 0)
    joined = replace(shape, tile_rows=rows)
    outputs = launcher.outputs_of(q, shape, keep)
    ctx, plan, ranks = None, 0, 1
    grid: tuple[int, ...] = joined.tiles, shape.padded_dv // columns
    if fields is not None:
        ranks, columns = workspace.world_size, shape.padded_dv
        plan = workspace.prepare("flash_decode", fields, *launcher.half_sizes(joined, ranks, 1))
        ctx = workspace.ctx
        # (An estimate.) On CPU ranks few programs, because the interpreter is slow.
        grid = (min(joined.tiles, 4 if q.device.type == "cpu" else 4 * gpu.num_sms(q.device)),)
    tile = launcher.tile_of(joined, joined.block_m, parts.block_n, (1.0, None, None), q.dtype)
    args = (
        ctx, scratch, kv_lens, *outputs, shape.batch, shape.heads, capacity, parts.shares, parts.slots, plan,
    )
    constants = {
        "RANKS": ranks, "BP": next_power_of_2(shape.batch), "TILE": tile, "PART_ROWS": parts.rows,
        "BLOCK_N": parts.block_n, "COLUMNS": columns, "STEP": step, "CHUNK": parts.chunk,
        "num_warps": max(min(rows * columns // 128, 4), 1),
    }
    if _overlaps(q.device):
        constants |= {"PDL": True, "launch_pdl": True}
    made = [output for output in outputs if output is not None]
    return Launch(workspace, flash_decode_join_kernel, grid, args, constants, operands, made, [ctx])
