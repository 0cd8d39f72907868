"""What a call of flash_decode launches."""

import functools

import torch
from triton import next_power_of_2

from tdkernels.ops import _operands
from tdkernels.ops._attention import LOG2_E
from tdkernels.ops._config import text_of
from tdkernels.ops._local_flags import local_flags
from tdkernels.ops.flash_decode_checks import FP8
from tdkernels.ops.flash_decode_config import DecodeShape, default_config, num_programs
from tdkernels.ops.flash_decode_kernel import (
    FP8_BITS,
    FP8_NATIVE,
    FP8_NONE,
    flash_decode_kernel,
    flash_decode_nodes_kernel,
)
from tdkernels.ops.flash_decode_nodes import num_slots, slot_numbers
from tdkernels.symm import get_workspace
from tdkernels.symm.group import group_state


def fp8_kind(cache):
    """How the kernel reads a cache: by the GPU's own conversion where it has one."""
    if cache.dtype != FP8:
        return FP8_NONE.value
    if cache.device.type == "cpu" or torch.version.hip or torch.cuda.get_device_capability(cache.device) < (8, 9):
        return FP8_BITS.value
    return FP8_NATIVE.value


def value_is_key(k_cache, v_cache):
    """Whether the values are the first columns of the keys' own memory, as those of multi-head latent attention."""
    return (
        v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
        and v_cache.dtype == k_cache.dtype and v_cache.shape[3] == 1 << (k_cache.shape[3].bit_length() - 1)
    )  # fmt: skip


_shape = functools.lru_cache(1024)(DecodeShape)  # a call asks for it more than once


def shape_of(q, k_cache, v_cache, block_table=None):
    batch, queries, q_heads, d = q.shape
    heads = k_cache.shape[2]
    return _shape(
        batch, queries, heads, q_heads // heads, d, v_cache.shape[3], k_cache.element_size(),
        value_is_key(k_cache, v_cache), block_table is not None,
    )  # fmt: skip


def half_sizes(shape, ranks, nodes):
    """(bytes, signals) of a half: of tiles, with o and lse in fp32, and of lengths."""
    if nodes > 1:
        tiles = num_slots(shape.tiles, ranks, nodes)
        numbers = tiles * slot_numbers(shape.rows_of_tile, shape.padded_dv)
    else:
        tiles = ranks * shape.tiles
        numbers = tiles * shape.rows_of_tile * (shape.padded_dv + 1)
    return 4 * (numbers + ranks * next_power_of_2(shape.batch)), tiles + ranks


def problem_fields(q, shape, options):
    """What all ranks must agree on before a config is chosen; how much room a cache has is each rank's own business."""
    scale, soft_cap, window = options
    return {
        "q": tuple(q.shape), "heads": shape.heads, "Dv": shape.dv, "dtype": str(q.dtype), "scale": scale,
        "soft_cap": soft_cap, "window": window,
    }  # fmt: skip


def _plan_fields(q, shape, options, config):
    """What all ranks must agree on."""
    return {**problem_fields(q, shape, options), "config": text_of(config)}


def capacity_of(k_cache, block_table=None):
    """For how many keys of a sequence a cache has room."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def agree(q, shape, options, group, config):
    """The same for a call that launches nothing of ours; None for a group is this rank alone."""
    if group is not None:
        group_state(group).agree_once("flash_decode", _plan_fields(q, shape, options, config))


def _outputs(q, shape, keep):
    """(o, lse, lse to base 2 if it is to be kept)"""
    o = q.new_empty(*q.shape[:3], shape.dv)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return o, lse, torch.empty_like(lse) if keep else None


def compile(q, k_cache, v_cache, kv_lens, block_table, options, world_size, num_nodes, config):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    shape = shape_of(q, k_cache, v_cache, block_table)
    ctx = torch.empty(1, dtype=torch.int64, device=q.device) if world_size > 1 else None
    args, constants = arguments(
        ctx, q, k_cache, v_cache, kv_lens, block_table, None, _outputs(q, shape, False), shape, config, options, 0,
        world_size, num_nodes, 1, capacity_of(k_cache, block_table),
    )  # fmt: skip
    _kernel(num_nodes).warmup(*args, grid=(1,), **constants)


def _kernel(num_nodes):
    return flash_decode_kernel if num_nodes == 1 else flash_decode_nodes_kernel


def launch(q, k_cache, v_cache, kv_lens, block_table, scales, options, group, config, keep=False):
    """(o [B, Tq, Hq, Dv], lse [B, Tq, Hq], the same to base 2 if a gradient is to ``keep`` it) of checked operands.

    Args:     q: [B, Tq, Hq, D]; scales: (k_scale, v_scale) or None; options: (scale, soft_cap, window)
              group: None for this rank alone
    """
    shape = shape_of(q, k_cache, v_cache, block_table)
    config = config or default_config(shape, q.device)
    outputs = _outputs(q, shape, keep)
    if not outputs[0].numel():
        agree(q, shape, options, group, config)
        return outputs
    ranks = 1 if group is None else group.size()
    capacity = capacity_of(k_cache, block_table)
    programs = num_programs(config, shape, capacity, q.device)
    workspace, plan, nodes = None, 0, 1
    if ranks > 1:
        workspace = get_workspace(group, q.device, "flash_decode", across_nodes=True)
        nodes = workspace.group.topology.num_nodes
        plan = workspace.prepare(
            "flash_decode", _plan_fields(q, shape, options, config), *half_sizes(shape, ranks, nodes),
            num_flags=shape.tiles,
        )  # fmt: skip
        workspace.before_launch()
    args, constants = arguments(
        None if workspace is None else workspace.ctx, q, k_cache, v_cache, kv_lens, block_table, scales, outputs,
        shape, config, options, plan, ranks, nodes, programs, capacity,
    )  # fmt: skip
    _kernel(nodes)[(programs,)](*args, **constants)
    if workspace is not None:
        workspace.after_launch()
    return outputs


def arguments(
    ctx, q, k_cache, v_cache, kv_lens, block_table, scales, outputs, shape, config, options, plan, ranks, nodes,
    programs, capacity,
):  # fmt: skip
    """The kernel's arguments; ``ctx`` is None for one rank."""
    scale, soft_cap, window = options
    kind = fp8_kind(k_cache)
    if kind:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    paged = block_table is not None
    scratch = q.new_empty(
        (shape.tiles + programs) * shape.rows_of_tile * (shape.padded_dv + 1), dtype=torch.float32
    )
    flags = local_flags(q.device, shape.tiles) if ctx is None else None
    of_scales, (k_scale, v_scale) = 0, scales or (None, None)
    if scales is not None:
        of_scales = 1 if k_scale.numel() == 1 else 2
    d1, d2 = shape.parts_of_d
    args = (
        ctx, q, k_cache, v_cache, kv_lens, block_table if paged else kv_lens, k_scale, v_scale, *outputs, scratch,
        flags, shape.batch, shape.heads, capacity, scale * LOG2_E.value, (soft_cap or 0.0) * LOG2_E.value,
        window or 0, plan, *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0) if paged else 0,
    )  # fmt: skip
    constants = {
        "RANKS": ranks, "BP": next_power_of_2(shape.batch), "TQ": shape.queries, "G": shape.group, "D": shape.d,
        "D1": d1, "D2": d2, "DV": shape.dv, "DVP": shape.padded_dv, "RP": shape.rows_of_tile,
        "BLOCK_M": shape.block_m, "BLOCK_N": config.block_n, "PAGE": k_cache.shape[1] if paged else 0, "FP8": kind,
        "V_IS_K": shape.value_is_key, "SCALES": of_scales, "SOFT_CAP": soft_cap is not None,
        "WINDOW": window is not None, "PRECISION": _operands.dot_precision(q.dtype), "NODES": nodes,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    return args, constants
