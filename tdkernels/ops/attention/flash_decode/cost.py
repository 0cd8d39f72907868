"""Estimated time of flash_decode, with which the tuner orders its candidates."""

from typing import TYPE_CHECKING

from tdkernels.ops.attention.flash_decode import torch_attention
from tdkernels.ops.attention.flash_decode.config import (
    LATENT_ROWS,
    DecodeShape,
    FlashDecodeConfig,
    has_latent_sizes,
)
from tdkernels.ops.attention.flash_decode.kernel_merge import MOST_PARTS, NUMBERS_OF_WARP, PARTS_AT_A_TIME
from tdkernels.ops.attention.flash_decode.problem import path_of_problem, shape_of_problem
from tdkernels.ops.common import costs
from tdkernels.rounding import cdiv

if TYPE_CHECKING:
    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem
    from tdkernels.autotune.tunable import Floors

_LAUNCH_S = 5e-6
_JOIN_S = 4e-6  # the second launch of method "split"
_IN_FLIGHT = 32 << 10  # bytes in flight per SM that saturate the memory bandwidth (H200)
_BLOCK_S = 0.3e-6  # overhead per block of keys, in addition to its loads and products
_MERGE_STEP_S = 1e-6  # for a program of "fused" to read some rows of all parts of a tile
# Share of the memory bandwidth that "fused" reaches compared with "split", whose programs read neighbouring heads of
# the same keys at the same time (H200, 4 sequences of 40,000 keys of 8 heads, 1 sequence of 500,000).
_FUSED_SHARE = 0.95
# Kernel launches of the torch baseline, counted on CPUs plus 4 within flash attention: attention in fp32, flash
# attention, its page tables, its completion if there are several query tokens, and the merge of the ranks.
_PLAIN_STEPS, _FLASH_STEPS, _PAGES_STEPS, _LAST_KEYS_STEPS, _MERGE_STEPS = 34, 11, 19, 57, 10
# Share of the memory bandwidth that torch's flash attention reaches in bench/results/h200x2/flash_decode.jsonl without
# lengths: 0.82 to 0.97 of long sequences, 0.63 for 128 sequences of 1K keys. For lengths on the device, an estimate.
_FLASH_SHARE = 0.85
# Share of the peak rate that products of the portable kernels reach for heads of more than 256 elements. With merging,
# the default of "fused" reaches 0.13 to 0.15 for 8 sequences of 32K and 32 of 4K latent keys on H100.
_WIDE_SHARE = 0.2
# Share of the peak rate that products of ``latent_kernel`` reach on H100 and H200 (8 sequences of 32K keys).
_LATENT_SHARE = 0.5
_FLASH_ROWS = 64  # query rows per tile of torch's flash attention, to which rows are padded


def seconds(config: FlashDecodeConfig, problem: "Problem", floors: "Floors", hardware: "Hardware") -> float:
    """Estimate the time of a call.

    Args:
        config: Any legal config.
        problem: The problem.
        floors: The floors of the problem.
        hardware: Rates of the GPU and its links.
    """
    if config.method == "torch":
        return _torch_s(problem, floors, hardware)
    shape = config.tiled(shape_of_problem(problem))
    if config.method == "split" and has_latent_sizes(shape):
        return _latent_s(config, shape, problem, floors, hardware)
    resident = hardware.num_sms * max(1, 8 // config.num_warps)
    programs = config.num_programs or resident
    total = _LAUNCH_S + _parts_s(config, shape, programs, resident, problem, floors, hardware)
    blocks = shape.tiles * cdiv(problem.shape[-1], config.block_n)
    total += _JOIN_S if config.method == "split" else _merge_s(config, shape, min(programs, blocks))
    return total + _exchange_s(shape, programs, problem, hardware)


def _parts_s(config, shape, programs, resident, problem, floors, hardware):
    """Return the seconds of attention over all parts, and of writing and reading those of shared tiles."""
    keys, num_sms = problem.shape[-1], hardware.num_sms
    blocks = shape.tiles * cdiv(keys, config.block_n)
    share = cdiv(blocks, programs)
    # Bytes in flight per SM: all stages of all resident programs except the block being computed.
    of_program = config.blocks_in_flight(shape) * config.block_n * shape.bytes_of_key
    asked = of_program * min(programs, resident) / num_sms
    memory = hardware.memory * min(1.0, asked / _IN_FLIGHT) * (1.0 if config.method == "split" else _FUSED_SHARE)
    read = floors.memory_bytes * share * programs / blocks  # programs with a smaller share count as full
    padded = 2 * shape.tiles * shape.block_m * keys * (sum(shape.parts_of_d) + shape.padded_dv)
    flops = (_WIDE_SHARE if shape.is_wide else 1.0) * hardware.flops * min(1.0, programs / num_sms)
    steps = cdiv(programs, resident) * share * _BLOCK_S
    parts = 2 * programs * shape.rows_of_tile * (shape.padded_dv + 1) * 4 / hardware.memory
    return max(read / memory, padded / flops) + steps + parts


def _merge_s(config, shape, parts_of_all):
    """Return the seconds in which one program of "fused" merges the parts of a tile."""
    parts = parts_of_all / shape.tiles
    if parts <= 1:
        return 0.0
    at_a_time = PARTS_AT_A_TIME.value // (2 if shape.is_wide else 1)
    rows = max(1, NUMBERS_OF_WARP * config.num_warps // (at_a_time * shape.padded_dv))
    groups = 2 if parts > MOST_PARTS.value else 1  # many parts are merged in two steps
    return groups * cdiv(shape.rows_of_tile, rows) * _MERGE_STEP_S


def _exchange_s(shape: DecodeShape, programs, problem, hardware):
    """Return the seconds of sending all tiles to the peers."""
    sent = (problem.world_size - 1) * shape.tiles * shape.rows_of_tile * (shape.padded_dv + 1) * 4
    return 2 * costs.SIGNAL_S + sent / costs.push_rate(programs, hardware) if sent else 0.0


def _latent_s(config, shape, problem, floors, hardware):
    """Return the seconds of method "split" for a latent cache. Its programs merge few rows each."""
    keys, rows = problem.shape[-1], cdiv(shape.rows, LATENT_ROWS) * LATENT_ROWS
    padded = 2 * shape.batch * shape.heads * rows * keys * (shape.d + shape.padded_dv)
    busy = max(floors.memory_bytes / hardware.memory, padded / (_LATENT_SHARE * hardware.flops))
    tiles = shape.batch * shape.heads * rows // LATENT_ROWS
    parts = 2 * (tiles + (config.num_programs or hardware.num_sms)) * LATENT_ROWS * shape.padded_dv * 4
    return 2 * _LAUNCH_S + busy + parts / hardware.memory + _exchange_s(shape, hardware.num_sms, problem, hardware)


# ---- method "torch" ----


def _torch_s(problem, floors, hardware):
    """Return the seconds of the torch baseline."""
    batch, queries, heads, _, _, dv, _ = problem.shape
    if path_of_problem(problem) == torch_attention.PLAIN:
        attention, steps = _plain_s(problem, floors, hardware), _PLAIN_STEPS
    else:
        attention, more = _flash_s(problem, hardware), _LAST_KEYS_STEPS * (queries > 1)
        steps = _FLASH_STEPS + _PAGES_STEPS * ("paged" in problem.layout) + more
    if problem.world_size == 1:
        return attention + steps * _LAUNCH_S
    # Each rank sends fp32 results and their lse to all others. With several query tokens it also sends lengths.
    sent = (problem.world_size - 1) * batch * queries * heads * (dv + 1) * 4
    lengths = costs.collective_s(0, hardware) if queries > 1 else 0.0
    return attention + lengths + costs.collective_s(sent, hardware) + (steps + _MERGE_STEPS) * _LAUNCH_S


def _plain_s(problem, floors, hardware):
    """Return the seconds of attention that converts keys and values to fp32 and materializes scores."""
    batch, queries, heads, kv_heads, d, dv, keys = problem.shape
    moved = floors.memory_bytes + 16 * batch * keys * kv_heads * (d + dv) + 40 * batch * queries * heads * keys
    return max(moved / hardware.memory, 16 * floors.flops / hardware.flops)  # without tensor cores


def _flash_s(problem, hardware):
    """Return the seconds of torch's flash attention, and of copying pages that it cannot read in place."""
    batch, queries, heads, kv_heads, d, dv, keys = problem.shape
    read = batch * keys * kv_heads * (d + dv) * problem.torch_dtype.itemsize
    copied = 2 * read if path_of_problem(problem) == torch_attention.FLASH_COPIED else 0
    rows = cdiv(queries * heads // kv_heads, _FLASH_ROWS) * _FLASH_ROWS
    padded = 2 * batch * kv_heads * rows * keys * (d + dv)
    attention = max(read / (_FLASH_SHARE * hardware.memory), padded / hardware.flops)
    return copied / hardware.memory + attention
