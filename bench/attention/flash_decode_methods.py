"""Methods of the flash_decode benchmark, on this rank's keys alone and on all ranks' keys.

    local               flash_decode in a group of this rank alone
    tdkernels           flash_decode on all ranks
    torch-local NAME    torch's attention kernel NAME on this rank's keys
    sequence NAME       the unfused baseline: kernel NAME, NCCL's all-gather of the partial results, merge in torch
    … method-torch      both of these as flash_decode runs them with method "torch", which also is the tuner's baseline:
                        flash attention that reads the lengths on the device
    copy                torch's device-to-device copy, for the memory bandwidth

An attention is a function of one operand set that returns (o, shaped as q is, and the log-sum-exp of each query head).
If there is one query token, the query heads of one kv head are passed to torch as tokens, without a mask. The cache is
then read once for all of them, and all backends support it. Several query tokens need a causal mask that is aligned at
the end of the keys. Kernels without such a mask, and kernels that do not read pages, raise a ValueError.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tdkernels
from tdkernels.launch import rank_device
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.rounding import cdiv

METHOD_TORCH = "method-torch"
TORCH_CONFIG = tdkernels.FlashDecodeConfig(method="torch")
# Not a power of two: in a script on H200 copies of 512 MiB reached 2.75 TB/s, those of 164, 419 and 819 MB 4.2 TB/s.
# The cause is not known. In this benchmark copies of 512 MiB reached 4.2 TB/s, too.
_COPY_BYTES = {"cuda": 400 << 20, "cpu": 1 << 16}


# ---- torch's attention kernels ----


def _by_kv_head(s):
    """Return q as [B, Hkv, G, D] and the caches as [B, Hkv, S, D], the layout of torch's attention without a mask.

    Raises:
        ValueError: if there are several query tokens or pages.
    """
    if s.table is not None:
        raise ValueError("it does not read pages")
    if s.q.dim() == 4:
        raise ValueError("it has no mask for several query tokens")
    q = s.q.view(s.q.shape[0], s.k.shape[2], -1, s.q.shape[2])
    return q, s.k.transpose(1, 2), s.v.transpose(1, 2)


def _by_head(o, lse):
    """Reshape results by kv head to (o [B, Hq, D], lse [B, Hq])."""
    return o.flatten(1, 2), lse.reshape(o.shape[0], -1)


def math(s, later=0):
    """Attention in plain torch: two GEMMs, softmax in fp32, and the log-sum-exp.

    With several query tokens or pages, one sequence is computed at a time. This bounds the memory for scores and for
    gathered pages.

    Args:
        later: number of keys on later ranks. The query tokens are the last positions of the keys including these.
    """
    if s.table is not None or s.q.dim() == 4:
        parts = [_math_of_sequence(s, number, later) for number in range(len(s.q))]
        o, lse = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
        return o, lse
    q, k, v = _by_kv_head(s)
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    return _by_head(scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1))


def _math_of_sequence(s, number, later):
    """Return (o, log-sum-exp) of one sequence, shaped as its q is."""
    k, v = (_keys_of(s, cache, number) for cache in (s.k, s.v))
    q = s.q[number]
    tokens, kv_heads = 1 if q.dim() == 2 else len(q), len(k)
    rows = q.view(tokens, kv_heads, -1, q.shape[-1]).transpose(0, 1)  # [Hkv, Tq, G, D]
    scores = (rows.flatten(1, 2) @ k.transpose(1, 2)).float() * q.shape[-1] ** -0.5
    mask = torch.ones(tokens, s.keys, dtype=torch.bool, device=q.device).tril(later + s.keys - tokens)
    scores = scores.masked_fill(~mask.repeat_interleave(rows.shape[2], 0), float("-inf"))
    o, lse = (scores.softmax(-1).to(v.dtype) @ v).view(rows.shape), scores.logsumexp(-1).view(rows.shape[:3])
    return o.transpose(0, 1).reshape(q.shape), lse.transpose(0, 1).reshape(q.shape[:-1])


def _keys_of(s, cache, number):
    """Return the keys or values of one sequence as [Hkv, S, D]."""
    of_sequence = cache[number] if s.table is None else cache[s.table[number]].flatten(0, 1)
    return of_sequence[: s.keys].transpose(0, 1)


def _sdpa_flash(s):
    if s.q.dim() == 4 and s.table is None:  # the causal mask of this operator is aligned at the end of the keys
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            s.q, s.k, s.v, None, None, s.q.shape[1], s.keys, 0.0, True, False, scale=s.q.shape[-1] ** -0.5
        )
        return o, lse.transpose(1, 2)
    return _by_head(*torch.ops.aten._scaled_dot_product_flash_attention(*_by_kv_head(s))[:2])


def _sdpa_cudnn(s):
    return _by_head(*torch.ops.aten._scaled_dot_product_cudnn_attention(*_by_kv_head(s), None, True)[:2])


def _sdpa_efficient(s):
    q, k, v = _by_kv_head(s)
    o, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    return _by_head(o, lse[..., : q.shape[2]])  # lse is padded


def _flex():
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    torch._dynamo.reset()  # keep the compiled code of one shape only
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(s):
        o, aux = compiled(*_by_kv_head(s), return_aux=AuxRequest(lse=True))
        return _by_head(o, aux.lse)

    return attend


def _flash_attn():
    """Use the newest installed version of flash-attn."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from flash_attn import flash_attn_with_kvcache

    def attend(s):
        several = s.q.dim() == 4
        q = s.q if several else s.q[:, None]
        more = {"causal": True} if several else {}
        if s.table is not None:
            more["block_table"] = s.table
        o, lse = flash_attn_with_kvcache(q, s.k, s.v, cache_seqlens=s.lens, return_softmax_lse=True, **more)[:2]
        return (o, lse.transpose(1, 2)) if several else (o[:, 0], lse[..., 0])

    return attend


PEERS = {  # {name: function that returns an attention, or raises}
    "sdpa-flash": lambda: _sdpa_flash,
    "sdpa-cudnn": lambda: _sdpa_cudnn,
    "sdpa-efficient": lambda: _sdpa_efficient,
    "flex-attention": _flex,
    "flash-attn": _flash_attn,
}


def attentions(names):
    """Return ({name: attention}, {name: reason for absence}) of plain torch and the named peers."""
    found, absent = {"math": math}, {}
    for name in names:
        if rank_device().type != "cuda":
            absent[name] = "its kernels need a GPU"
            continue
        try:
            found[name] = PEERS[name]()
        except Exception as err:
            absent[name] = f"{type(err).__name__}: {err}".splitlines()[0][:200]
    return found, absent


# ---- caches ----


def rows_of_cache(shape, generator):
    """Return (the first two sizes of a cache, its block table) for a shape with ``batch``, ``keys`` and ``page``.

    The table is a random permutation of the pages; None for a dense cache.
    """
    if not shape.page:
        return (shape.batch, shape.keys), None
    pages = cdiv(shape.keys, shape.page)
    order = torch.randperm(shape.batch * pages, generator=generator, device=generator.device)
    return (shape.batch * pages, shape.page), order.int().view(shape.batch, pages)


# ---- attention on all ranks' keys ----


def of_all_ranks(attend):
    """Return an attention over this rank's keys as a part of all ranks' keys, for ``sequence``.

    Several query tokens are the last positions of all keys, so the mask of a rank depends on the keys of later ranks.
    Only ``math`` has such a mask.
    """
    def part(s):
        if attend is math:
            return math(s, s.keys * (dist.get_world_size() - 1 - dist.get_rank()))
        if s.q.dim() == 4:
            raise ValueError("its mask covers the keys of one rank only")
        return attend(s)

    return part


def sequence(attend, s):
    """Compute o, shaped as q is, for all ranks' keys: attention, one fp32 all-gather of o and log-sum-exp, merge."""
    o, lse = attend(s)
    partials = all_gather_rows(torch.cat([o, lse[..., None]], -1)[None])
    weights = partials[..., -1:].softmax(0)
    return (partials[..., :-1] * weights).sum(0).to(o.dtype)


def in_fp32(s):
    """Return the operands in fp32."""
    return SimpleNamespace(**vars(s) | {"q": s.q.float(), "k": s.k.float(), "v": s.v.float()})


# ---- tdkernels ----


@functools.cache
def own_group():
    """Return a group of this rank alone. Collective: all ranks create the groups of all ranks."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def ours(s, config=None, group=None):
    return tdkernels.flash_decode(s.q, s.k, s.v, s.lens, block_table=s.table, config=config, group=group)


# ---- memory bandwidth ----


def copy_on_device():
    """Return (a call that copies, the bytes that it reads and writes)."""
    source = torch.ones(_COPY_BYTES[rank_device().type], dtype=torch.uint8, device=rank_device())
    target = torch.empty_like(source)
    return lambda _: target.copy_(source), 2 * source.nbytes
