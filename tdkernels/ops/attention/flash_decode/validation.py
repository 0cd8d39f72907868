"""Validation of the arguments of flash_decode. It runs before anything is launched."""

import math
import os
from typing import TYPE_CHECKING

import torch

from tdkernels.ops.attention.flash_decode.config import FlashDecodeConfig
from tdkernels.ops.common.config import check_config
from tdkernels.ops.common.validation import DTYPES, INTEGERS, check_device, check_tensor, shape_of
from tdkernels.rounding import cdiv

if TYPE_CHECKING:
    from tdkernels.ops.attention.flash_decode.operands import Operands

FP8 = torch.float8_e4m3fn
MAX_D = 1024
MAX_BATCH = 1 << 14


def check(
    operands: "Operands", scale: float | None, soft_cap: float | None, window: int | None,
    config: FlashDecodeConfig | None,
) -> None:
    """Raise TypeError or ValueError for invalid arguments. The message names the argument and its shape.

    ``operands`` are the arguments of the caller, before they are normalized.
    """
    q, k_cache, v_cache, kv_lens, block_table, k_scale, v_scale, k_rope = operands
    _check_q(q)
    _check_caches(q, k_cache, v_cache, k_rope)
    _check_lengths(q, k_cache, kv_lens, block_table)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(name, value, q, k_cache)
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"flash_decode: scale must be a finite number or None, not {scale!r}")
    if soft_cap is not None and not (isinstance(soft_cap, (int, float)) and 0 < soft_cap < math.inf):
        raise ValueError(f"flash_decode: soft_cap must be a number above 0 or None, not {soft_cap!r}")
    if window is not None and not (type(window) is int and window >= 1):
        raise ValueError(f"flash_decode: window must be an integer of at least 1 or None, not {window!r}")
    check_config("flash_decode", config, FlashDecodeConfig, q)


def _check_q(q):
    check_tensor("flash_decode", "q", q, DTYPES)
    check_device("flash_decode", "q", q)
    if q.dim() not in (3, 4):
        raise ValueError(f"flash_decode: q must be [B, Hq, D] or [B, Tq, Hq, D], its shape is {shape_of(q)}")
    if 0 in q.shape[1:]:
        raise ValueError(f"flash_decode: q {shape_of(q)} has an empty dimension")
    if q.shape[-1] > MAX_D:
        raise ValueError(f"flash_decode: q {shape_of(q)} has heads of {q.shape[-1]}, at most {MAX_D} are supported")
    if q.shape[0] > MAX_BATCH:
        raise ValueError(f"flash_decode: q {shape_of(q)} has {q.shape[0]} entries, at most {MAX_BATCH} are supported")


def _check_cache(name, cache, q, dtypes, words):
    """Check dtype, dimensions and strides of a cache."""
    check_tensor("flash_decode", name, cache, dtypes, q, "q", words)
    if cache.dim() != 4:
        raise ValueError(
            f"flash_decode: {name} must be [B, S, Hkv, D] or [blocks, block_size, Hkv, D], its shape is "
            f"{shape_of(cache)}"
        )
    if cache.stride(3) != 1 and cache.shape[3] > 1:
        raise ValueError(
            f"flash_decode: {name} {shape_of(cache)} must have a contiguous last dimension, its strides are "
            f"{list(cache.stride())}"
        )


def _check_rope(q, k_cache, k_rope):
    """Check k_rope, whose columns follow those of k_cache."""
    _check_cache("k_rope", k_rope, q, (q.dtype,), f"the type of q, {q.dtype}, is")
    if k_rope.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"flash_decode: k_rope {shape_of(k_rope)} and k_cache {shape_of(k_cache)} may differ in the last dimension "
            "only"
        )
    first, second = k_cache.shape[3], k_rope.shape[3]
    if first < 16 or first & (first - 1) or not 0 < second < first:
        raise ValueError(
            f"flash_decode: with k_rope, the last dimension of k_cache {shape_of(k_cache)} must be a power of two of "
            f"at least 16, and that of k_rope {shape_of(k_rope)} less than it and not 0"
        )
    if first + second != q.shape[-1]:
        raise ValueError(
            f"flash_decode: the last dimensions of k_cache {shape_of(k_cache)} and k_rope {shape_of(k_rope)} must add "
            f"up to that of q {shape_of(q)}"
        )


def _check_caches(q, k_cache, v_cache, k_rope):
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_cache(name, cache, q, (q.dtype, FP8), f"the type of q, {q.dtype}, and float8_e4m3fn are")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"flash_decode: k_cache is {k_cache.dtype} but v_cache is {v_cache.dtype}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"flash_decode: k_cache {shape_of(k_cache)} and v_cache {shape_of(v_cache)} may differ in the last "
            "dimension only"
        )
    if k_rope is not None:
        _check_rope(q, k_cache, k_rope)
    elif k_cache.shape[3] != q.shape[-1]:
        raise ValueError(
            f"flash_decode: the last dimension of q {shape_of(q)} and of k_cache {shape_of(k_cache)} must be the same D"
        )
    if 0 in (*k_cache.shape[2:], v_cache.shape[3]):
        raise ValueError(
            f"flash_decode: k_cache {shape_of(k_cache)} or v_cache {shape_of(v_cache)} has an empty dimension"
        )
    if v_cache.shape[3] > MAX_D:
        raise ValueError(f"flash_decode: v_cache {shape_of(v_cache)} has heads of more than {MAX_D}")
    if q.shape[-2] % k_cache.shape[2]:
        raise ValueError(
            f"flash_decode: the {q.shape[-2]} heads of q {shape_of(q)} must be a multiple of the {k_cache.shape[2]} of "
            f"k_cache {shape_of(k_cache)}"
        )


def _check_lengths(q, k_cache, kv_lens, block_table):
    check_tensor("flash_decode", "kv_lens", kv_lens, INTEGERS, q, "q")
    if tuple(kv_lens.shape) != (q.shape[0],):
        raise ValueError(
            f"flash_decode: kv_lens must be [B] with the {q.shape[0]} entries of q {shape_of(q)}, its shape is "
            f"{shape_of(kv_lens)}"
        )
    if block_table is None:
        if k_cache.shape[0] != q.shape[0]:
            raise ValueError(
                f"flash_decode: k_cache {shape_of(k_cache)} must have the {q.shape[0]} entries of q {shape_of(q)}; "
                "pass block_table if it is paged"
            )
        return
    check_tensor("flash_decode", "block_table", block_table, INTEGERS, q, "q")
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"flash_decode: block_table must be [B, max_blocks] with the {q.shape[0]} entries of q {shape_of(q)}, its "
            f"shape is {shape_of(block_table)}"
        )
    if 0 in k_cache.shape[:2]:
        raise ValueError(f"flash_decode: the paged k_cache {shape_of(k_cache)} has no blocks, or empty ones")


def _check_scale(name, value, q, k_cache):
    if k_cache.dtype != FP8:
        if value is not None:
            raise ValueError(f"flash_decode: {name} is for caches of float8_e4m3fn, k_cache is {k_cache.dtype}")
        return
    if value is None:
        return
    check_tensor("flash_decode", name, value, (torch.float32,), q, "q")
    if value.numel() != 1 and tuple(value.shape) != (k_cache.shape[2],):
        raise ValueError(
            f"flash_decode: {name} must have one element, or the Hkv = {k_cache.shape[2]} heads of k_cache "
            f"{shape_of(k_cache)}, its shape is {shape_of(value)}"
        )


def check_values(k_cache: torch.Tensor, kv_lens: torch.Tensor, block_table: torch.Tensor | None) -> None:
    """Raise ValueError for lengths and block numbers outside the cache.

    This synchronizes with the device, so it runs only with TDKERNELS_DEBUG=1.
    """
    if os.environ.get("TDKERNELS_DEBUG") != "1":
        return
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    for entry, length in enumerate(kv_lens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(f"flash_decode: kv_lens[{entry}] is {length}, the cache has room for {capacity}")
        if block_table is not None:
            for number, block in enumerate(block_table[entry, : cdiv(length, k_cache.shape[1])].tolist()):
                if not 0 <= block < k_cache.shape[0]:
                    raise ValueError(
                        f"flash_decode: block_table[{entry}, {number}] is {block}, k_cache {shape_of(k_cache)} has "
                        f"{k_cache.shape[0]} blocks"
                    )
