"""Method "torch" of flash_decode: torch's flash attention over this rank's keys, then an all-gather and a merge.

The lengths are on the device, so the host cannot slice the caches. torch's flash attention for sequences of several
lengths (``aten::_flash_attention_forward`` with ``seqused_k``) reads them there and reads no key beyond them. The query
tokens and query heads that share a head of the cache are passed as query heads of one token: keys are read once for all
of them, and the kernel splits long sequences among its programs.

There is no mask, so the kernel attends over the keys that all query tokens see. With Tq query tokens, these are all
keys but the last Tq - 1 of the sequence. Plain attention in fp32 over these completes the result.

``select_path`` names the cases in which flash attention cannot run. They use ``plain_attention`` of ``reference``.
CPU ranks run torch's flash attention for CPUs on the same operands.
"""

import functools
import math
from typing import TYPE_CHECKING

import torch

from tdkernels.ops.attention.ag_attention import vendor_attention
from tdkernels.ops.attention.flash_decode.operands import Operands, capacity_of
from tdkernels.ops.attention.flash_decode.reference import (
    dense_attention,
    dense_cache,
    keys_after,
    keys_in_cache,
    lengths_of,
    merge,
    merge_ranks,
    plain_attention,
    scores_of,
)
from tdkernels.ops.attention.tile import LOG2_E

if TYPE_CHECKING:
    import torch.distributed as dist

_aten = torch.ops.aten

FLASH, FLASH_PAGED, FLASH_COPIED, PLAIN = "flash", "flash-paged", "flash-copied", "plain"
_PAGE_MULTIPLE = 256  # flash attention reads pages in place if their size is a multiple of this
_ALIGNMENT = 16  # bytes; flash attention loads as many at a time and does not check addresses
# torch 2.11 does not read pages in place, torch 2.13 does.
_TAKES_PAGES = "block_table" in {argument.name for argument in _aten._flash_attention_forward.default._schema.arguments}


def select_path(
    dtype: torch.dtype, cache_dtype: torch.dtype, d: int, dv: int, *, on_gpu: bool, has_flash: bool = True,
    page: int | None = None, addressable: bool = True, soft_cap: float | None = None, window: int | None = None,
) -> str:
    """Return the path of a call of method "torch".

    Args:
        dtype: Dtype of q.
        cache_dtype: Dtype of the caches.
        d: Elements per head of the keys.
        dv: Elements per head of the values.
        on_gpu: Whether the tensors are on a GPU.
        has_flash: Whether torch has flash attention with lengths for this device.
        page: Keys per block of a paged cache; None for a cache by sequence.
        addressable: Whether the kernel can read the caches where they are. See ``_is_addressable``.
        soft_cap: Bound of the scores, or None.
        window: Number of keys that a query attends to, or None.

    Returns:
        "flash" (reads the caches in place), "flash-paged" (reads pages in place), "flash-copied" (first copies the
        caches to contiguous ones by sequence) or "plain".
    """
    if soft_cap is not None or window is not None or not has_flash:
        return PLAIN
    if cache_dtype != dtype or dtype not in (torch.bfloat16, torch.float16) or d != dv:
        return PLAIN
    if on_gpu and (d % 8 or d > vendor_attention.KERNELS["flash"].widest):
        return PLAIN
    if not addressable or (page is not None and (page % _PAGE_MULTIPLE or not _TAKES_PAGES)):
        return FLASH_COPIED
    return FLASH if page is None else FLASH_PAGED


@torch.no_grad()
def attend(
    operands: Operands, options: tuple[float, float | None, int | None], group: "dist.ProcessGroup | None"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_decode with torch's attention and all-gather. Does not synchronize with the device.

    Ranks may take different paths, for example if their caches have different strides.

    Args:
        operands: The tensors of the call.
        options: (scale, soft_cap, window).
        group: The group of ranks, or None for a single rank.

    Returns:
        (o [B, Tq, Hq, Dv] in the dtype of q, lse [B, Tq, Hq] fp32, natural log), both contiguous. For a query without
        visible keys, o is 0 and lse is -inf.
    """
    q, k_cache, v_cache, kv_lens, block_table, _, _, k_rope = operands
    path = PLAIN if k_rope is not None else _path_of(q, k_cache, v_cache, block_table, options)
    lens = kv_lens.clamp(0, operands.capacity()).int()
    if path == PLAIN:
        after = keys_after(lens, q.shape[1], options[2], group)
        o, lse = plain_attention(operands, lens, after, options)
    else:
        o, lse = _flash_attention(q, k_cache, v_cache, lens, block_table, options[0], path, group)
    if group is not None:
        o, lse = merge_ranks(o.float(), lse, group)
    return o.to(q.dtype).contiguous(), lse.contiguous()


# ---- selection ----


@functools.cache
def _has_flash(device):
    """Return whether torch has flash attention with lengths for a device. torch for AMD GPUs rejects lengths."""
    return not torch.version.hip and vendor_attention.KERNELS["flash"].why_not(device) is None


def _path_of(q, k_cache, v_cache, block_table, options):
    """Return the path of a call. q is [B, Tq, Hq, D]."""
    _, soft_cap, window = options
    if not q.shape[0] or not capacity_of(k_cache, block_table):
        return PLAIN
    return select_path(
        q.dtype, k_cache.dtype, q.shape[3], v_cache.shape[3], on_gpu=q.device.type != "cpu",
        has_flash=_has_flash(q.device), page=None if block_table is None else k_cache.shape[1],
        addressable=_is_addressable(k_cache, v_cache, block_table), soft_cap=soft_cap, window=window,
    )


def _is_addressable(k_cache, v_cache, block_table):
    """Return whether flash attention can read the caches where they are.

    All vectors must be aligned. A cache by sequence is addressed as rows [row, Hkv, D], where sequence b begins at the
    same row, an int32, of both caches. So the stride of the sequences must be a multiple of the stride of the keys.
    """
    if not _is_aligned(k_cache) or not _is_aligned(v_cache):
        return False
    if block_table is not None:
        return True
    steps = {_rows_of_sequence(cache) for cache in (k_cache, v_cache)}
    return len(steps) == 1 and None not in steps and max(steps) * k_cache.shape[0] < 1 << 31


def _is_aligned(cache):
    strides = [stride for stride, size in zip(cache.stride()[:3], cache.shape[:3], strict=True) if size > 1]
    steps = [cache.data_ptr(), *(stride * cache.element_size() for stride in strides)]
    return not any(step % _ALIGNMENT for step in steps)


def _rows_of_sequence(cache):
    """Return the distance of two sequences in a cache [B, S, Hkv, D], in rows of keys; None if it is not a number."""
    of_sequence, of_key = cache.stride()[:2]
    if cache.shape[0] == 1:
        return 0
    return of_sequence // of_key if of_key and of_sequence % of_key == 0 else None


# ---- flash attention over this rank's keys ----


def _flash_attention(q, k_cache, v_cache, lens, block_table, scale, path, group):
    """Return (o, lse) over this rank's keys, for lens [B] int32. o is fp32 if Tq > 1, else in the dtype of q."""
    later = q.shape[1] - 1  # the first query token does not see this many keys at the end of the sequence
    common = (lens - later).clamp(min=0) if later else lens
    caches = k_cache, v_cache
    o, lse = _over_first_keys(q, *caches, common, block_table, scale, path)
    if later == 0:
        return o, lse
    after = keys_after(lens, q.shape[1], None, group)
    k, v, there = _last_keys(*caches, common, lens, block_table, later)
    last_o, last_lse = dense_attention(q, k, v, lens - common, there, after, scale, None, None)
    return merge(torch.stack([o.float(), last_o]), torch.stack([lse, last_lse]))


def _over_first_keys(q, k_cache, v_cache, lens, block_table, scale, path):
    """Return (o [B, Tq, Hq, D], lse [B, Tq, Hq]) over the first ``lens`` keys of each sequence, without a mask."""
    batch, queries, _, d = q.shape
    kv_heads = k_cache.shape[2]
    rows = q.view(batch, queries, kv_heads, -1, d).transpose(1, 2)  # [B, Hkv, Tq, Hq / Hkv, D]
    shape, rows = rows.shape, rows.flatten(2, 3)
    if rows.shape[2] == 1:
        # The kernel splits the keys among programs only if a head of the cache has several query heads, so each row is
        # passed twice. Its tiles have 64 rows, so this adds no work.
        rows = rows.expand(-1, -1, 2, -1)
    if block_table is not None:
        block_table, lens = _readable_pages(block_table, lens, k_cache)
    if path == FLASH_COPIED:
        k_cache, v_cache = (_copied(cache, block_table) for cache in (k_cache, v_cache))
        block_table = None
    o, lse = _attend(rows, k_cache, v_cache, lens, block_table, scale)
    # The kernels disagree about the lse of a sequence without keys.
    empty = (lens == 0).view(-1, 1, 1)
    lse, o = lse.masked_fill(empty, -math.inf), o.masked_fill(empty.unsqueeze(-1), 0.0)
    count = shape[2] * shape[3]
    o, lse = o[:, :, :count].reshape(shape), lse[:, :, :count].reshape(shape[:-1])
    return o.transpose(1, 2).reshape(q.shape), lse.transpose(1, 2).reshape(q.shape[:-1])


def _attend(rows, k_cache, v_cache, lens, block_table, scale):
    """Return (o [B, Hkv, R, D], lse [B, Hkv, R]) of query rows [B, Hkv, R, D] over the first ``lens`` keys (int32)."""
    batch, kv_heads, count, _ = rows.shape
    capacity, step = capacity_of(k_cache, block_table), 0
    k, v = k_cache, v_cache
    if block_table is None:
        step = _rows_of_sequence(k_cache)
        k, v = (_as_rows(cache, step) for cache in (k_cache, v_cache))
    if step:
        begins = torch.arange(0, batch * step + 1, step, dtype=torch.int32, device=rows.device)
    else:
        begins = torch.zeros(batch + 1, dtype=torch.int32, device=rows.device)
    kernel = _attend_on_cpu if rows.device.type == "cpu" else _attend_on_gpu
    o, lse = kernel(rows.flatten(1, 2), k, v, begins, lens, capacity, block_table, scale)
    return o.reshape(batch, kv_heads, count, -1), lse.reshape(batch, kv_heads, count)


def _attend_on_gpu(q, k, v, begins, lens, capacity, block_table, scale):
    """Return (o [B, H, D], lse [B, H]) of one query token per sequence, q [B, H, D].

    k and v are rows [row, Hkv, D], of which sequence b has ``lens[b]`` from ``begins[b]`` on, or pages.
    """
    pages = {} if block_table is None else {"block_table": block_table}
    query_begins = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    o, lse, *_ = _aten._flash_attention_forward(
        q, k, v, query_begins, begins, 1, capacity, 0.0, False, False, scale=scale, seqused_k=lens, **pages
    )
    return o, lse.t().contiguous()


def _attend_on_cpu(q, k, v, begins, lens, capacity, block_table, scale):
    """Return the same as ``_attend_on_gpu``.

    torch's kernel for CPUs takes a mask instead of lengths. It multiplies masked keys by 0, so they must not be NaN.
    """
    keys = torch.arange(capacity)
    if block_table is None:
        index = begins[:-1, None].long() + keys
        dense = (cache[index.clamp(max=len(cache) - 1)] for cache in (k, v))
    else:
        dense = (cache[block_table.long()].flatten(1, 2) for cache in (k, v))
    seen = keys < lens.view(-1, 1)
    k, v = (x.where(seen[..., None, None], 0.0).transpose(1, 2) for x in dense)
    rows = q.unflatten(1, (k.shape[1], -1))
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[:, None, None].expand(-1, -1, rows.shape[2], -1)
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, attn_mask=mask, scale=scale)
    return o.reshape(q.shape), lse.reshape(q.shape[:-1])


# ---- caches ----


def _as_rows(cache, step):
    """Return a cache [B, S, Hkv, D] as a view [rows, Hkv, D] in which sequences begin ``step`` rows apart."""
    batch, capacity, *of_key = cache.shape
    return cache.as_strided(((batch - 1) * step + capacity, *of_key), cache.stride()[1:])


def _copied(cache, block_table):
    """Return a contiguous copy [B, capacity, Hkv, D] of a cache. Pages must be in the cache."""
    if block_table is None:
        return cache.clone(memory_format=torch.contiguous_format)
    return cache[block_table.long()].flatten(1, 2)


def _readable_pages(block_table, lens, cache):
    """Return (block table, lengths), both int32, without the pages that have no keys or are outside the cache.

    The remaining pages keep their order and come first; the other entries become page 0. Without a mask, the order of
    keys does not matter. Only the last page may be partly filled.
    """
    blocks, page = cache.shape[:2]
    starts = page * torch.arange(block_table.shape[1], device=cache.device)
    counts = (lens.view(-1, 1) - starts).clamp(0, page)
    counts = counts.masked_fill((block_table < 0) | (block_table >= blocks), 0)
    order = (counts == 0).int().argsort(dim=1, stable=True)
    table = block_table.masked_fill(counts == 0, 0).gather(1, order)
    return table.int(), counts.sum(1, dtype=torch.int32)


def _last_keys(k_cache, v_cache, begin, end, block_table, most):
    """Return (k, v [B, n, Hkv, D] fp32, mask [B, n]) of the keys from ``begin`` to ``end``, at most ``most`` of them.

    Keys outside the mask may be NaN.
    """
    capacity = capacity_of(k_cache, block_table)
    keys = begin.view(-1, 1) + torch.arange(min(most, capacity), device=begin.device)
    there, keys = keys < end.view(-1, 1), keys.clamp(max=capacity - 1)
    if block_table is None:
        place = torch.arange(len(begin), device=begin.device).view(-1, 1), keys
    else:
        blocks, page = k_cache.shape[:2]
        table = block_table.gather(1, keys // page).long()
        there &= (table >= 0) & (table < blocks)
        place = table.clamp(0, blocks - 1), keys % page
    return k_cache[place].float(), v_cache[place].float(), there


# ---- gradients ----


@torch.enable_grad()
def gradients(
    operands: Operands, after: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    options: tuple[float, float | None, int | None],
) -> tuple[torch.Tensor, ...]:
    """Return (dq, dk, dv) as the backward kernel does, computed by autograd of a scalar function.

    The function treats lse, to base 2, as a constant. Its gradients are those of attention.

    Args:
        operands: The tensors of the call.
        after: Number of keys on later ranks, [B].
        do: Gradient of o, [B, Tq, Hq, Dv] fp32.
        lse: Log-sum-exp over the keys of all ranks, to base 2, [B, Tq, Hq].
        delta: rowsum(do * o), minus the gradient of lse, [B, Tq, Hq].
        options: (scale, soft_cap, window).
    """
    q, k_cache, v_cache, kv_lens, block_table, *_ = operands
    inputs = q.float(), dense_cache(k_cache, block_table, None), dense_cache(v_cache, block_table, None)
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    lens = lengths_of(kv_lens, k_cache, block_table)
    in_cache = keys_in_cache(lens, k_cache, block_table)
    scores = scores_of(q, k, lens, in_cache, after, *options)
    lse = lse.view(scores.shape[:-1])
    weights = torch.exp2(scores * LOG2_E.value - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    o = torch.einsum("btgin,bngd->btgid", weights, torch.where(in_cache[..., None, None], v, 0.0))
    total = (o * do.view(o.shape)).sum() - (weights.sum(-1) * delta.view(lse.shape)).sum()
    return torch.autograd.grad(total, (q, k, v))
