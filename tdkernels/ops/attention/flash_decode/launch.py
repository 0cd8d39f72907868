"""Launch the forward kernel of flash_decode."""

import functools
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import reject_invariant
from tdkernels.ops.attention.flash_decode.config import MAX_PROGRAMS, DecodeShape, fused_config, num_programs
from tdkernels.ops.attention.flash_decode.kernel import (
    TURNS_BEFORE_TILES,
    TURNS_OF_TILE,
    flash_decode_kernel,
    flash_decode_nodes_kernel,
)
from tdkernels.ops.attention.flash_decode.kernel_merge import LARGE_PARTS_OF_GROUP, NUMBERS_OF_WARP
from tdkernels.ops.attention.flash_decode.kernel_work import MAX_CHUNKS
from tdkernels.ops.attention.flash_decode.kv_cache import (
    FP8_BITS,
    FP8_NATIVE,
    FP8_NONE,
    CacheForm,
    DecodeTile,
)
from tdkernels.ops.attention.flash_decode.operands import Operands
from tdkernels.ops.attention.flash_decode.validation import FP8
from tdkernels.ops.attention.tile import LOG2_E
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import recorder
from tdkernels.runtime.kernel_launch import Launch, bind, launch_cached, local_workspace_of, output_spec
from tdkernels.runtime.local_workspace import local_flags
from tdkernels.symm import get_workspace
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.attention.flash_decode.config import FlashDecodeConfig


def fp8_kind(cache: torch.Tensor) -> int:
    """Return the format of a cache: FP8_NONE, FP8_NATIVE if the GPU converts e4m3 itself, or FP8_BITS."""
    if cache.dtype != FP8:
        return FP8_NONE.value
    if cache.device.type == "cpu" or torch.version.hip or torch.cuda.get_device_capability(cache.device) < (8, 9):
        return FP8_BITS.value
    return FP8_NATIVE.value


def in_pairs(shape, *caches):
    """Return whether the columns of fp8 caches are read in pairs.

    Even and odd columns are then separate operands of ``tl.dot``. Each part of the keys needs at least 32 columns,
    since a dot takes at least 16. Values need 64, otherwise all warps of a dot would compute the same columns. Tiles of
    64 rows do not need pairs, because Hopper's wgmma reads its operands from shared memory. Widths and strides must be
    even, and the caches aligned to 16 bytes.
    """
    wide = all(part >= 32 for part in shape.parts_of_d if part) and shape.padded_dv >= 64 and shape.block_m < 64
    numbers = [number for cache in caches for number in (cache.shape[3], *cache.stride()[:3])]
    return wide and all(cache.data_ptr() % 16 == 0 for cache in caches) and not any(number % 2 for number in numbers)


def value_is_key(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether v_cache is a view of the first columns of k_cache, as in multi-head latent attention (MLA).

    Their number must be the largest power of two in D.
    """
    return (
        v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
        and v_cache.dtype == k_cache.dtype and v_cache.shape[3] == 1 << (k_cache.shape[3].bit_length() - 1)
    )


_shape = functools.lru_cache(1024)(DecodeShape)  # cached because a call needs its shape more than once


def shape_of(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> DecodeShape:
    """Return the DecodeShape of operands with q [B, Tq, Hq, D]."""
    batch, queries, q_heads, d = q.shape
    heads = k_cache.shape[2]
    return _shape(
        batch, queries, heads, q_heads // heads, d, v_cache.shape[3], k_cache.element_size(),
        value_is_key(k_cache, v_cache), block_table is not None, 0 if k_rope is None else k_rope.element_size(),
    )


def shape_of_call(operands: Operands) -> DecodeShape:
    """Return the DecodeShape of the operands of a call."""
    return shape_of(operands.q, operands.k_cache, operands.v_cache, operands.block_table, operands.k_rope)


def half_sizes(shape: DecodeShape, ranks: int, nodes: int) -> tuple[int, int]:
    """Return (bytes, signals) of a half: tiles with o and lse in fp32, then lengths."""
    if nodes > 1:
        tiles = num_slots(shape.tiles, ranks, nodes)
        numbers = tiles * slot_numbers(shape.rows_of_tile, shape.padded_dv)
    else:
        tiles = ranks * shape.tiles
        numbers = tiles * shape.rows_of_tile * (shape.padded_dv + 1)
    return 4 * (numbers + ranks * next_power_of_2(shape.batch)), tiles + ranks


def problem_fields(q: torch.Tensor, shape: DecodeShape, options: tuple) -> dict:
    """Return the properties that must be the same on all ranks. The capacity of the caches may differ."""
    scale, soft_cap, window = options
    return {
        "q": tuple(q.shape), "heads": shape.heads, "Dv": shape.dv, "dtype": str(q.dtype), "scale": scale,
        "soft_cap": soft_cap, "window": window,
    }


def check_consensus(
    q: torch.Tensor, shape: DecodeShape, options: tuple, group: "dist.ProcessGroup | None",
    config: "FlashDecodeConfig | None",
) -> None:
    """Check that all ranks make the same call, for a call without a kernel launch. No check if ``group`` is None."""
    if group is not None:
        fields = with_config(problem_fields(q, shape, options), config)
        group_state(group).check_consensus_cached("flash_decode", fields)


def outputs_of(q, shape, keep):
    """Return output specs of (o, lse, lse to base 2 if ``keep`` else None)."""
    lse, *kept = (output_spec(q, *q.shape[:3], dtype=torch.float32) for _ in range(1 + keep))
    return output_spec(q, *q.shape[:3], shape.dv), lse, *(kept or [None])


def _scratch(q, shape, shares):
    """Return the output spec of the scratch memory: o and lse of partial tiles, whose indices are below this size."""
    return output_spec(q, (shape.tiles + shares) * shape.rows_of_tile * (shape.padded_dv + 1), dtype=torch.float32)


def _num_flags(shape, shares):
    """Return the number of flags of a launch with at most ``shares`` shares: for tiles, and for groups of parts."""
    return 2 * shape.tiles + cdiv(shape.tiles + shares, LARGE_PARTS_OF_GROUP.value)


def _num_shares(shape, config, programs, capacity=None):
    """Return the maximum number of shares of the work: chunks, or the shares of programs.

    ``capacity`` is the number of keys per sequence that the caches can hold; None: any number.
    """
    if not config.chunk_keys:
        return programs
    chunks = MAX_CHUNKS.value if capacity is None else min(max(cdiv(capacity, config.chunk_keys), 1), MAX_CHUNKS.value)
    return shape.tiles * chunks


def _turns(shape, config, capacity, programs):
    """Return the upper bound of numbered trace marks per program. A tile has at least one block of keys."""
    blocks = shape.tiles * max(cdiv(capacity, config.block_n), 1)
    tiles = min(cdiv(blocks, programs), shape.tiles)
    return TURNS_BEFORE_TILES.value + TURNS_OF_TILE.value * tiles


def as_read(operands: Operands) -> Operands:
    """Return operands with float8 caches as uint8, since not all GPUs support float8; others unchanged."""
    if operands.k_cache.dtype != FP8:
        return operands
    caches = operands.k_cache.view(torch.uint8), operands.v_cache.view(torch.uint8)
    return operands._replace(k_cache=caches[0], v_cache=caches[1])


def compile(
    operands: Operands, options: tuple, world_size: int, num_nodes: int, config: "FlashDecodeConfig"
) -> None:
    """Compile the kernel that ``launch`` would launch for these operands into Triton's cache, without launching it."""
    q, shape = operands.q, config.tiled(shape_of_call(operands))
    ctx = torch.empty(1, dtype=torch.int64, device=q.device) if world_size > 1 else None
    flags = None if ctx is not None else local_flags(q.device, 1)
    lse = q.new_empty(1, dtype=torch.float32)
    args, constants = arguments(
        ctx, as_read(operands), (q, lse, None), lse, flags, shape, fp8_kind(operands.k_cache), config, options, 0,
        world_size, num_nodes, 1,
    )
    _kernel(num_nodes).warmup(*args, grid=(1,), **constants)


def _kernel(num_nodes):
    return flash_decode_kernel if num_nodes == 1 else flash_decode_nodes_kernel


def launch(
    operands: Operands, options: tuple, group: "dist.ProcessGroup | None", config: "FlashDecodeConfig | None",
    keep: bool = False,
) -> Any:
    """Launch the forward kernel on validated operands.

    Args:
        operands: The tensors of the call.
        options: (scale, soft_cap, window).
        group: None for a single rank.
        keep: Whether to return lse to base 2 as well, which the backward needs.

    Returns:
        A sequence (o [B, Tq, Hq, Dv], lse [B, Tq, Hq], lse to base 2 [B, Tq, Hq] if ``keep`` else None).
    """
    q = operands.q
    if not q.numel():
        shape = shape_of_call(operands)
        check_consensus(q, shape, options, group, config or fused_config(shape, q.device))
        return [None if output is None else torch.empty_like(output, device=q.device)
                for output in outputs_of(q, shape, keep)]
    kind = fp8_kind(operands.k_cache)
    o, lse, *kept, _ = launch_cached(*_call(as_read(operands), kind, options, group, config, keep))
    return o, lse, *(kept or [None])  # type: ignore[list-item]


def bind_call(
    operands: Operands, options: tuple, group: "dist.ProcessGroup | None", config: "FlashDecodeConfig | None"
) -> Launch | None:
    """Return the Launch that ``launch`` uses for these operands.

    The result is None for an empty batch, for fp8 caches, which are passed as views, and for a single rank, because its
    flags belong to one stream.
    """
    if group is None or group.size() == 1 or not operands.q.numel() or operands.k_cache.dtype == FP8:
        return None
    return bind(*_call(operands, FP8_NONE.value, options, group, config, False))[0]


def workspace_of(q: torch.Tensor, group: "dist.ProcessGroup | None") -> tuple[Any, bool]:
    """Return (the workspace of calls with q in a group, whether it is that of a single rank)."""
    if group is None or group.size() == 1:
        return local_workspace_of(q.device), True
    return get_workspace(group, q.device, "flash_decode", across_nodes=True), False


def _call(operands, kind, options, group, config, keep):
    """Return the arguments of ``launch_cached``. Operands are from ``as_read``."""
    q, k_cache, v_cache, *_ = operands
    workspace, alone = workspace_of(q, group)
    key = config, options, keep, kind, value_is_key(k_cache, v_cache), precision_of(q)
    return workspace, key, operands, lambda *of: _prepare(workspace, alone, Operands(*of), kind, options, config, keep)


def _prepare(workspace, alone, operands, kind, options, config, keep):
    """Return the Launch of a call. Operands are from ``as_read``."""
    q, shape = operands.q, shape_of_call(operands)
    config = config or fused_config(shape, q.device)
    shape = config.tiled(shape)
    capacity = operands.capacity()
    programs = num_programs(config, shape, capacity, q.device)
    shares = _num_shares(shape, config, programs, capacity)
    ctx, plan, ranks, nodes, flags = None, 0, 1, 1, None
    if alone:
        flags = local_flags(q.device, _num_flags(shape, shares))
    else:
        ranks, nodes = workspace.world_size, workspace.group.topology.num_nodes
        if nodes > 1:
            reject_invariant("flash_decode", "a group on several nodes")
        # The number of shares depends on the capacity of each rank.
        num_flags = _num_flags(shape, _num_shares(shape, config, MAX_PROGRAMS))
        plan = workspace.prepare(
            "flash_decode", with_config(problem_fields(q, shape, options), config), *half_sizes(shape, ranks, nodes),
            num_flags=num_flags,
        )
        ctx = workspace.ctx
    outputs, scratch = outputs_of(q, shape, keep), _scratch(q, shape, shares)
    args, constants = arguments(
        ctx, operands, outputs, scratch, flags, shape, kind, config, options, plan, ranks, nodes, programs
    )
    constants["trace_ptr"] = recorder.buffer(q.device, programs, _turns(shape, config, capacity, programs))
    made = [tensor for tensor in (*outputs, scratch) if tensor is not None]
    return Launch(workspace, _kernel(nodes), (programs,), args, constants, operands, made, [ctx, flags])


def precision_of(q: torch.Tensor) -> str:
    """Return ``input_precision`` of ``tl.dot`` for queries, a setting of torch on which a launch depends."""
    return gemm_operands.dot_precision(q.dtype)


def tile_of(shape: DecodeShape, block_m: int, block_n: int, options: tuple, dtype: torch.dtype) -> DecodeTile:
    """Return the DecodeTile that a kernel is compiled for."""
    _, soft_cap, window = options
    return DecodeTile(
        shape.queries, shape.group, shape.d, *shape.parts_of_d, shape.dv, shape.padded_dv, shape.rows_of_tile, block_m,
        block_n, soft_cap is not None, window is not None, gemm_operands.dot_precision(dtype),
    )


def strides_of(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor | None
) -> tuple[int, ...]:
    """Return the strides of k_cache (batch or block, sequence, head), those of v_cache, and the table's row stride."""
    return *k_cache.stride()[:3], *v_cache.stride()[:3], 0 if block_table is None else block_table.stride(0)


def cache_arguments(operands, shape, kind, config, options):
    """Return (operands, num_pages, score_scale, cap, strides, {"TILE": …, "CACHE": …}) for the portable kernels.

    Arguments as for ``arguments``.
    """
    q, k_cache, v_cache, kv_lens, block_table, k_scale, v_scale, k_rope = operands
    scale, soft_cap, _ = options
    paged, has_rope = block_table is not None, k_rope is not None
    scale_kind = 0 if k_scale is None else 1 if k_scale.numel() == 1 else 2
    pairs = kind != FP8_NONE.value and in_pairs(shape, k_cache, v_cache)
    forms = {
        "TILE": tile_of(shape, shape.block_m, config.block_n, options, q.dtype),
        "CACHE": CacheForm(k_cache.shape[1] if paged else 0, kind, pairs, shape.value_is_key, scale_kind, has_rope),
    }
    # A pointer that is not used cannot be None, because Triton rejects functions that return None.
    given = (
        q, k_cache, v_cache, kv_lens, block_table if paged else kv_lens, k_scale, v_scale,
        k_rope if has_rope else k_cache,
    )
    *of_caches, of_table = strides_of(k_cache, v_cache, block_table)
    strides = *of_caches, *(k_rope.stride()[:3] if has_rope else (0, 0, 0)), of_table
    score_scale, cap = scale * LOG2_E.value, (soft_cap or 0.0) * LOG2_E.value
    return given, k_cache.shape[0] if paged else 0, score_scale, cap, strides, forms


def arguments(
    ctx, operands, outputs, scratch, flags, shape, kind, config, options, plan, ranks, nodes, programs
):
    """Return (args, constants) of the kernel. A single rank passes ``flags`` instead of ``ctx``.

    ``operands`` are from ``as_read``, ``kind`` is the ``fp8_kind`` of the caches, ``options`` is (scale, soft_cap,
    window), and ``outputs`` is (o, lse, lse to base 2 or None).
    """
    given, num_pages, score_scale, cap, strides, forms = cache_arguments(operands, shape, kind, config, options)
    args = (
        ctx, *given, *outputs, scratch, flags, shape.batch,
        shape.heads, operands.capacity(), num_pages, score_scale, cap, options[2] or 0, plan, strides,
    )
    constants = {
        "RANKS": ranks, "BP": next_power_of_2(shape.batch), **forms, "NUMBERS": NUMBERS_OF_WARP * config.num_warps,
        "NODES": nodes, "CHUNK": config.chunk_keys // config.block_n, "num_warps": config.num_warps,
        "num_stages": config.num_stages, "trace_ptr": None,
    }
    return args, constants


def num_slots(tiles: int, ranks: int, nodes: int) -> int:
    """Return the number of slots of a half, like ``kernel_multinode._num_slots``."""
    local = ranks // nodes
    return nodes * tiles if local == 1 else cdiv(tiles, local) * (local + nodes) + tiles


def slot_numbers(rows_of_tile: int, padded_dv: int) -> int:
    """Return the fp32 elements of a slot: a multiple of 16 bytes, for which network transfers are fast."""
    return rows_of_tile * padded_dv + max(rows_of_tile, 4)
