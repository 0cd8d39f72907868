"""Methods of the flash_decode benchmark, on this rank's keys alone and on all ranks' keys.

    local               flash_decode in a group of this rank alone
    tdkernels           flash_decode on all ranks
    torch-local NAME    torch's attention kernel NAME on this rank's keys
    sequence NAME       the unfused baseline: kernel NAME, NCCL's all-gather of the partial results, merge in torch
    … method-torch      both of these as flash_decode runs them with method "torch", which also is the tuner's baseline:
                        flash attention that reads the lengths on the device
    copy                torch's device-to-device copy, for the memory bandwidth

An attention is a function of one operand set that returns (o [B, Hq, D], log-sum-exp [B, Hq]). The query heads of one
kv head are passed to torch as tokens, without a mask. The cache is then read once for all of them, and all backends
support it.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tdkernels
from tdkernels.launch import rank_device
from tdkernels.ops.common.torch_collectives import all_gather_rows

METHOD_TORCH = "method-torch"
TORCH_CONFIG = tdkernels.FlashDecodeConfig(method="torch")
_COPY_BYTES = {"cuda": 512 << 20, "cpu": 1 << 16}


# ---- torch's attention kernels ----


def _by_kv_head(s):
    """Return q as [B, Hkv, G, D] and the caches as [B, Hkv, S, D], the layout of torch's attention."""
    q = s.q.view(s.q.shape[0], s.k.shape[2], -1, s.q.shape[2])
    return q, s.k.transpose(1, 2), s.v.transpose(1, 2)


def _by_head(o, lse):
    """Reshape results by kv head to (o [B, Hq, D], lse [B, Hq])."""
    return o.flatten(1, 2), lse.reshape(o.shape[0], -1)


def math(s):
    """Attention in plain torch: two GEMMs, softmax in fp32, and the log-sum-exp."""
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
        o, lse = flash_attn_with_kvcache(s.q[:, None], s.k, s.v, cache_seqlens=s.lens, return_softmax_lse=True)[:2]
        return o[:, 0], lse[..., 0]

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


# ---- attention on all ranks' keys ----


def sequence(attend, s):
    """Compute o [B, Hq, D] for all ranks' keys: attention, one fp32 all-gather of o and log-sum-exp, merge."""
    o, lse = attend(s)
    partials = all_gather_rows(torch.cat([o, lse[..., None]], -1)[None])
    weights = partials[..., -1:].softmax(0)
    return (partials[..., :-1] * weights).sum(0).to(o.dtype)


def in_fp32(s):
    """Return the operands in fp32."""
    return SimpleNamespace(q=s.q.float(), k=s.k.float(), v=s.v.float())


# ---- tdkernels ----


@functools.cache
def own_group():
    """Return a group of this rank alone. Collective: all ranks create the groups of all ranks."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def ours(s, config=None, group=None):
    return tdkernels.flash_decode(s.q, s.k, s.v, s.lens, config=config, group=group)


# ---- memory bandwidth ----


def copy_on_device():
    """Return (a call that copies, the bytes that it reads and writes)."""
    source = torch.ones(_COPY_BYTES[rank_device().type], dtype=torch.uint8, device=rank_device())
    target = torch.empty_like(source)
    return lambda _: target.copy_(source), 2 * source.nbytes
