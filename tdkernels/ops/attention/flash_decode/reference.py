"""Reference implementation of flash_decode with torch and torch.distributed, and the parts of it that others share."""

import math
from typing import TYPE_CHECKING

import torch

from tdkernels.ops.attention.flash_decode.operands import Operands, capacity_of
from tdkernels.ops.attention.flash_decode.validation import FP8
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.symm import GroupLike
from tdkernels.symm.group import resolve_group_if_any

if TYPE_CHECKING:
    import torch.distributed as dist


def dense_cache(
    cache: torch.Tensor, block_table: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    """Return a cache as a dense tensor [B, capacity, Hkv, D], dequantized, in fp32 or a wider dtype."""
    if block_table is not None:
        cache = cache[block_table.long().clamp(0, cache.shape[0] - 1)].flatten(1, 2)
    dense = cache.to(torch.promote_types(cache.dtype, torch.float32) if cache.dtype != FP8 else torch.float32)
    return dense if scale is None else dense * scale.view(-1, 1)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, in_cache: torch.Tensor, after: torch.Tensor,
    scale: float, soft_cap: float | None, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o [B, Tq, Hq, Dv], lse [B, Tq, Hq]) over this rank's keys only, in the dtype of k and v.

    Args:
        q: Queries [B, Tq, Hq, D].
        k: Keys [B, capacity, Hkv, D] from ``dense_cache``.
        v: Values [B, capacity, Hkv, Dv] from ``dense_cache``.
        lens: Number of keys of each sequence, [B].
        in_cache: Mask [B, capacity] from ``keys_in_cache``.
        after: Number of keys on later ranks, [B].
        scale: Factor of the scores.
        soft_cap: Bound of the scores, or None.
        window: Number of keys that a query attends to, or None.
    """
    batch, queries, q_heads, _ = q.shape
    scores = scores_of(q, k, lens, in_cache, after, scale, soft_cap, window)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    v = torch.where(in_cache[..., None, None], v, 0.0)  # memory beyond the length is uninitialized and may hold NaN
    o = torch.einsum("btgin,bngd->btgid", weights, v)
    return o.reshape(batch, queries, q_heads, -1), lse.reshape(batch, queries, q_heads)


def plain_attention(
    operands: Operands, lens: torch.Tensor, after: torch.Tensor, options: tuple[float, float | None, int | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) over this rank's keys only, in fp32 or a wider dtype, for any kind of cache.

    Args:
        operands: The tensors of the call. One of the scales may be None.
        lens: Lengths from ``lengths_of``.
        after: Number of keys on later ranks, [B].
        options: (scale, soft_cap, window).
    """
    q, k_cache, v_cache, _, block_table, k_scale, v_scale, k_rope = operands
    in_cache = keys_in_cache(lens, k_cache, block_table)
    k, v = dense_cache(k_cache, block_table, k_scale), dense_cache(v_cache, block_table, v_scale)
    if k_rope is not None:
        k = torch.cat((k, dense_cache(k_rope, block_table, None)), -1)
    return dense_attention(q, k, v, lens, in_cache, after, *options)


def merge(part_o: torch.Tensor, part_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over several sets of keys: part_o [sets, ..., Dv] and part_lse [sets, ...] to (o, lse)."""
    lse = part_lse.logsumexp(0)
    weights = torch.exp(part_lse - torch.where(lse.isinf(), 0.0, lse))
    return (part_o * weights.unsqueeze(-1)).sum(0), lse


def merge_ranks(
    o: torch.Tensor, lse: torch.Tensor, group: "dist.ProcessGroup"
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather (o [B, Tq, Hq, Dv], lse [B, Tq, Hq]) of each rank's keys and merge them in rank order."""
    parts = all_gather_rows(torch.cat([o, lse.unsqueeze(-1)], -1).unsqueeze(0), group)
    return merge(parts[..., :-1], parts[..., -1])


def keys_after(
    lens: torch.Tensor, queries: int, window: int | None, group: "dist.ProcessGroup | None"
) -> torch.Tensor:
    """Return the number of keys on later ranks, [B], for lengths from ``lengths_of``.

    For one query without a window it is unused: then it is 0, without communication.
    """
    if group is None or (queries == 1 and window is None):
        return torch.zeros_like(lens)
    return all_gather_rows(lens.unsqueeze(0), group)[torch.distributed.get_rank(group) + 1 :].sum(0, dtype=lens.dtype)


def lengths_of(
    kv_lens: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None
) -> torch.Tensor:
    """Return the lengths as int64, clamped to [0, capacity of the cache]."""
    return kv_lens.long().clamp(0, capacity_of(k_cache, block_table))


def keys_in_cache(
    lens: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None
) -> torch.Tensor:
    """Return a mask [B, capacity] of the keys that can be read: below the length, and in a page of the cache."""
    keys = torch.arange(capacity_of(k_cache, block_table), device=k_cache.device)
    there = keys < lens.view(-1, 1)
    if block_table is not None:
        pages = block_table.repeat_interleave(k_cache.shape[1], 1)
        there &= (pages >= 0) & (pages < k_cache.shape[0])
    return there


def scores_of(
    q: torch.Tensor, k: torch.Tensor, lens: torch.Tensor, in_cache: torch.Tensor, after: torch.Tensor,
    scale: float, soft_cap: float | None, window: int | None,
) -> torch.Tensor:
    """Return the scores [B, Tq, Hkv, Hq / Hkv, capacity], -inf for masked keys. ``after`` keys are on later ranks."""
    batch, queries, q_heads, _ = q.shape
    grouped = q.to(k.dtype).view(batch, queries, k.shape[2], q_heads // k.shape[2], -1)
    scores = torch.einsum("btgid,bngd->btgin", grouped, torch.where(in_cache[..., None, None], k, 0.0)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    keys = torch.arange(k.shape[1], device=q.device)
    steps = torch.arange(queries, device=q.device)
    behind = (lens + after - queries).view(-1, 1, 1) + steps.view(1, -1, 1) - keys
    seen = in_cache[:, None, :] & (behind >= 0)
    if window is not None:
        seen &= behind < window
    return scores.masked_fill(~seen[:, :, None, None, :], -math.inf)


@torch.no_grad()
def flash_decode_ref(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_lens: torch.Tensor, *,
    block_table: torch.Tensor | None = None, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None, scale: float | None = None, soft_cap: float | None = None,
    window: int | None = None, return_lse: bool = False, group: GroupLike = None, alone: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Reference of ``flash_decode``: attention over each rank's keys in fp32, then an all-gather and a merge by lse.

    Args:
        q: As for ``flash_decode``, like all arguments but ``alone``.
        k_cache: This rank's keys.
        v_cache: This rank's values.
        kv_lens: Number of keys of each sequence on this rank.
        block_table: Blocks of each sequence, for paged caches.
        k_scale: Dequantization factor of a float8 k_cache.
        v_scale: Dequantization factor of a float8 v_cache.
        k_rope: The other columns of the keys, or None.
        scale: Factor of the scores.
        soft_cap: Bound of the scores.
        window: Number of keys that a query attends to.
        return_lse: Also return the log-sum-exp of the scores.
        group: The group of ranks.
        alone: Use no group, even if torch.distributed is initialized.

    Returns:
        o, or (o, lse) with ``return_lse``, as ``flash_decode`` returns them.
    """
    group = None if alone else resolve_group_if_any("flash_decode_ref", group)
    q4 = q if q.dim() == 4 else q.unsqueeze(1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if group is not None and group.size() == 1:
        group = None
    lens = lengths_of(kv_lens, k_cache, block_table)
    after = keys_after(lens, q4.shape[1], window, group)
    options = scale, soft_cap, window
    operands = Operands(q4, k_cache, v_cache, kv_lens, block_table, k_scale, v_scale, k_rope)
    o, lse = plain_attention(operands, lens, after, options)
    if group is not None:
        o, lse = merge_ranks(o, lse, group)
    o, lse = (x if q.dim() == 4 else x.squeeze(1) for x in (o.to(q.dtype), lse.float()))
    return (o, lse) if return_lse else o
