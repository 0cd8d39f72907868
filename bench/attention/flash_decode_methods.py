"""The ways to attend to a long cache that are measured, on this rank's keys alone and on those of all ranks.

    local               ours in a group of this rank alone
    tdkernels           ours on all ranks
    torch-local NAME    torch's attention NAME, on this rank's keys alone
    sequence NAME       the same, then NCCL's all-gather of what each rank has made of its keys, and its merge in torch
    copy                torch's copy on the device: how fast its memory is

An attention is a function of a set of operands that returns (o [B, Hq, D], its log-sum-exp [B, Hq]). The query heads
of one kv head are given to torch as so many tokens, without a mask: the cache is read once for all of them, and every
backend takes it.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tdkernels
from tdkernels.launch import rank_device
from tdkernels.ops.common.torch_collectives import all_gather_rows

_COPY_BYTES = {"cuda": 512 << 20, "cpu": 1 << 16}


# ---- attention by torch ----


def _by_kv_head(s):
    """q [B, Hkv, G, D] and the caches [B, Hkv, S, D] as torch has them."""
    q = s.q.view(s.q.shape[0], s.k.shape[2], -1, s.q.shape[2])
    return q, s.k.transpose(1, 2), s.v.transpose(1, 2)


def _by_head(o, lse):
    """(o [B, Hq, D], lse [B, Hq]) of what came by kv head."""
    return o.flatten(1, 2), lse.reshape(o.shape[0], -1)


def math(s):
    """Products, softmax in fp32 and the log-sum-exp, in plain torch."""
    q, k, v = _by_kv_head(s)
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    return _by_head(scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1))


def _sdpa_flash(s):
    return _by_head(*torch.ops.aten._scaled_dot_product_flash_attention(*_by_kv_head(s))[:2])


def _sdpa_cudnn(s):
    return _by_head(*torch.ops.aten._scaled_dot_product_cudnn_attention(*_by_kv_head(s), None, True)[:2])


def _sdpa_efficient(s):
    q, k, v = _by_kv_head(s)
    o, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    return _by_head(o, lse[..., : q.shape[2]])  # which is padded


def _flex():
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    torch._dynamo.reset()  # of one shape at a time
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(s):
        o, aux = compiled(*_by_kv_head(s), return_aux=AuxRequest(lse=True))
        return _by_head(o, aux.lse)

    return attend


def _flash_attn():
    """The newest of the library that can be imported."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from flash_attn import flash_attn_with_kvcache

    def attend(s):
        o, lse = flash_attn_with_kvcache(s.q[:, None], s.k, s.v, cache_seqlens=s.lens, return_softmax_lse=True)[:2]
        return o[:, 0], lse[..., 0]

    return attend


PEERS = {  # {name: what makes an attention, or raises}
    "sdpa-flash": lambda: _sdpa_flash,
    "sdpa-cudnn": lambda: _sdpa_cudnn,
    "sdpa-efficient": lambda: _sdpa_efficient,
    "flex-attention": _flex,
    "flash-attn": _flash_attn,
}


def attentions(names):
    """({name: attention}, {name: why it is absent}): torch's products, and those peers that are named."""
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


# ---- on all ranks' keys ----


def sequence(attend, s):
    """o [B, Hq, D] of all ranks' keys: attention, one all-gather of o and its log-sum-exp in fp32, the merge."""
    o, lse = attend(s)
    of_ranks = all_gather_rows(torch.cat([o, lse[..., None]], -1)[None])
    weights = of_ranks[..., -1:].softmax(0)
    return (of_ranks[..., :-1] * weights).sum(0).to(o.dtype)


def in_fp32(s):
    """The same operands."""
    return SimpleNamespace(q=s.q.float(), k=s.k.float(), v=s.v.float())


# ---- ours ----


@functools.cache
def own_group():
    """A group of this rank alone; every rank makes those of all."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def ours(s, config=None, group=None):
    return tdkernels.flash_decode(s.q, s.k, s.v, s.lens, config=config, group=group)


# ---- the memory ----


def copy_on_device():
    """(a call that copies, how many bytes it reads and writes)."""
    source = torch.ones(_COPY_BYTES[rank_device().type], dtype=torch.uint8, device=rank_device())
    target = torch.empty_like(source)
    return lambda _: target.copy_(source), 2 * source.nbytes
