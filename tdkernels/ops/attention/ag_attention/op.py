"""Attention over a sequence that is sharded between the ranks: the gather of keys and values hides behind the products.

    q [B, S / W, Hq, D], k [B, S / W, Hkv, D], v [B, S / W, Hkv, Dv] on each rank  ->  o [B, S / W, Hq, Dv]

Fused (``ag_attention_kernel``). Programs take pieces of work from a list. The first pieces push our keys and values
in chunks to the peers that see them and raise one signal for each chunk. Every other one is a tile, a block of queries
of one head, which attends to our own keys first and then to those of the peers in the order in which they arrive,
waiting for each chunk's signal; the longest tiles come first. The softmax is online, in fp32, and the order of its
blocks is fixed, so the result does not depend on time. A last piece waits until every peer has begun the call: causal,
a rank may need nothing of a peer, and without it the two halves of the workspace would not be enough.

By parts (``pipelined``). Kernels that torch brings attend to one rank's keys at a time, own keys first, while
the copy engine brings the others; so do they backwards. Long shards take cuDNN's unless told or tuned otherwise.

Causal, rank W - 1 of contiguous shards has nearly twice the work of the mean rank. "zigzag" cuts the sequence into 2 W
pieces, of which rank r has r and 2 W - 1 - r: then all have the same.

The fused backward (``kernel_dq``, ``ag_attention_dkv_kernel``). Only shards are saved. The gradient
of q goes through keys and values like the forward; those of k and v through queries, which are pushed with the
gradients of o, and are complete on the rank that has the keys: nothing is added up between ranks.

Example:
    o = tdkernels.ag_attention(q, k, v)         # instead of all-gathers of k and v and an attention with a mask
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.attention.ag_attention import launch, launch_dq
from tdkernels.ops.attention.ag_attention import pipelined as parts
from tdkernels.ops.attention.ag_attention.config import AgAttentionConfig, completed
from tdkernels.ops.attention.ag_attention.validation import check_attention
from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import as_argument, from_text, with_config
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops.common.tunable_base import select
from tdkernels.rounding import round_up
from tdkernels.runtime import autograd, call_cache, torch_op
from tdkernels.runtime.autograd import fake_gradients, pack_gradients, unpack_gradients
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

# ---- the specification, in plain torch.distributed ----


class _AllGather(torch.autograd.Function):
    """All ranks' shards [B, S / W, ·, ·] as [W, B, S / W, ·, ·]."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather_rows(x, group).view(-1, *x.shape)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ag_attention")
        return reduce_scatter_rows(dy.flatten(0, 1), ctx.group), None


def _whole(x, sharding, group):
    """[B, H, S, D] of all ranks' x, in the order of the sequence."""
    shards = _AllGather.apply(x, group)
    if sharding == "zigzag":
        piece = (x.shape[1] + 1) // 2
        shards = [*shards[:, :, :piece], *shards[:, :, piece:].flip(0)]
    return torch.cat([*shards], dim=1).transpose(1, 2)


def pieces_of(rows, sharding, rank, ranks):
    """The positions of this rank, as (first, count) of one piece or two."""
    if sharding == "contiguous":
        return [(rank * rows, rows)]
    piece = (rows + 1) // 2
    return [(rank * piece, piece), (ranks * piece + (ranks - 1 - rank) * (rows - piece), rows - piece)]


def attend_to_part(q, keys, values, first, causal, scale):
    """o of queries [B, H, n, D] that begin at a position, by torch."""
    if not causal:
        return F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=True)
    end = first + q.shape[2]
    mask = causal_lower_right(q.shape[2], end)
    # Without repeats the causal bias of torch has no grouped heads on a CPU.
    group = q.shape[1] // keys.shape[1]
    keys, values = (x[:, :, :end].repeat_interleave(group, 1) if group > 1 else x[:, :, :end] for x in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)


def _lse_by_torch(q, keys, first, causal, scale):
    """The logarithms [B, H, n] of the sums of weights, fp32, by so many queries at a time that memory holds them."""
    lse = []
    keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)
    for start in range(0, q.shape[2], 1024):
        rows = q[:, :, start : start + 1024]
        scores = (rows.float() @ keys.float().transpose(2, 3)) * scale
        if causal:
            ends = first + start + torch.arange(rows.shape[2], device=q.device)
            scores = scores.masked_fill(torch.arange(keys.shape[2], device=q.device) > ends[:, None], float("-inf"))
        lse.append(scores.logsumexp(3))
    return torch.cat(lse, dim=2)


def _parts(q, sharding, group):
    """This rank's queries [B, Hq, n, D] as [(those of a piece, position of the first)]."""
    pieces = pieces_of(q.shape[1], sharding, group.rank(), group.size())
    queries = q.transpose(1, 2).split([count for _, count in pieces], dim=2)
    return [(part, first) for part, (first, count) in zip(queries, pieces, strict=True) if count]


def attend_by_torch(q, k, v, causal, scale, sharding, group, return_lse=False, at_once=None):
    """(o, lse or None) by torch; of ``at_once`` queries at a time where memory does not hold the scores of all."""
    keys, values = _whole(k, sharding, group), _whole(v, sharding, group)
    parts = [
        (rows, first + number * (at_once or 0)) for part, first in _parts(q, sharding, group)
        for number, rows in enumerate(part.split(at_once or part.shape[2], dim=2))
    ]
    o = torch.cat([attend_to_part(rows, keys, values, first, causal, scale) for rows, first in parts], dim=2)
    if not return_lse:
        return o.transpose(1, 2), None
    lse = torch.cat([_lse_by_torch(rows, keys, first, causal, scale) for rows, first in parts], dim=2)
    return o.transpose(1, 2), lse.transpose(1, 2)


def ag_attention_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None,
    sharding: str = "contiguous", return_lse: bool = False, group: GroupLike = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The specification of ``ag_attention``: keys and values are gathered, then torch attends; with gradients."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o, lse = attend_by_torch(q, k, v, causal, scale, sharding, resolve_group(group), return_lse)
    return (o, lse) if return_lse else o


# ---- torch.library: what torch.compile sees ----


def padded(x):
    """x with heads of a multiple of 16 bytes: what TMA can fetch. fp32 is not fetched so."""
    return gemm_operands.widened(x, round_up(x.shape[3], 8)) if x.element_size() == 2 else x


def _ready(*tensors):
    return [gemm_operands.rows_contiguous(padded(x)) for x in tensors]


def _cut(x, width):
    """x without what was padded."""
    return x if x.shape[3] == width else x[..., :width].contiguous()


def _chosen(q, k, v, causal, scale, sharding, group):
    """The config of a call that was given none."""
    ranks = group.size()
    if ranks == 1 or not q.shape[1]:
        return None  # there is nothing to tune: the default
    if spans_nodes(group):
        return AgAttentionConfig(method="torch")

    def describe():
        sizes = q.shape[0], ranks * q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        layout = f"causal {sharding}" if causal else "full"  # without a mask it does not matter which rank has what
        return sizes, layout, launch.problem_fields(q, k, v, causal, sharding, scale)

    call = q.shape, k.shape, v.shape, causal, sharding, scale
    return select("ag_attention", q, group, call, describe).config


def _settled(q, k, v, causal, scale, sharding, group, config):
    """The complete config of a call, on which all ranks have agreed as on the rest of it."""
    chosen_for_it = config is None
    if chosen_for_it:
        config = _chosen(q, k, v, causal, scale, sharding, group)
    config = completed(config, q.shape[1], max(q.shape[3], v.shape[3]), q.dtype, q.device, chosen_for_it)
    fields = with_config(launch.problem_fields(q, k, v, causal, sharding, scale), config)
    group_state(group).check_consensus_cached("ag_attention", fields)
    return config


def _by_name(q, k, v, causal, scale, sharding, group, config):
    """(the group, its config) of a call that has come through torch.library, where both are text."""
    group = torch_op.group_by_name(group)
    given = from_text(AgAttentionConfig, config) if config else None
    return group, _settled(q, k, v, causal, scale, sharding, group, given)


@whole_call
def _forward(q, k, v, causal, scale, sharding, group, config):
    group, config = _by_name(q, k, v, causal, scale, sharding, group, config)
    if config.method == "torch" and q.shape[1]:
        with torch.no_grad():
            o, lse = attend_by_torch(q, k, v, causal, scale, sharding, group, return_lse=True)
        return o.contiguous(), lse.contiguous()
    return _overlapped(q, k, v, causal, scale, sharding, group, config)


def _overlapped(q, k, v, causal, scale, sharding, group, config):
    """(o, lse) with a complete config, which says nothing where there are no positions."""
    if not q.shape[1]:
        return _fake_forward(q, k, v)
    if config.method in KERNELS:
        return parts.forward(q, k, v, causal, sharding, scale, group, config)
    o, lse = launch.launch(*_ready(q, k, v), causal, sharding, scale, group, config)
    return _cut(o, v.shape[3]), lse


@whole_call
def _backward(do, dlse, q, k, v, o, lse, need_dq, need_dk, need_dv, causal, scale, sharding, group, config):
    wanted = need_dq, need_dk, need_dv
    group, config = _by_name(q, k, v, causal, scale, sharding, group, config)
    if not q.shape[1]:
        return fake_gradients((q, k, v), wanted)
    do = torch.zeros_like(o) if do is None else do
    if config.method == "torch":
        gradients = _torch_gradients(q, k, v, do, dlse, causal, scale, sharding, group)
    elif config.backward in KERNELS and dlse is None:  # what they are given has no place for it
        gradients = parts.backward(q, k, v, o, lse, do, wanted, causal, sharding, scale, group, config)
    else:
        dlse = None if dlse is None else dlse.contiguous()
        operands = *_ready(q, k, v, o), lse, *_ready(do), dlse
        gradients = launch_dq.launch(*operands, wanted, causal, sharding, scale, group, config)
    cut = (dx if dx is None else _cut(dx, x.shape[3]) for dx, x in zip(gradients, (q, k, v), strict=True))
    return pack_gradients(cut, (q, k, v), wanted)


@torch.enable_grad()
def _torch_gradients(q, k, v, do, dlse, causal, scale, sharding, group):
    """(dq, dk, dv) by torch, for which it attends once more."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    outputs = attend_by_torch(*inputs, causal, scale, sharding, group, return_lse=dlse is not None)
    if dlse is None:
        return torch.autograd.grad(outputs[0], inputs, do)
    return torch.autograd.grad(outputs, inputs, (do, dlse))


def _fake_forward(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


_OPERANDS, _TAIL = "Tensor q, Tensor k, Tensor v", "bool causal, float scale, str sharding, str group, str config"


def _fake_ag_attention_backward(do, dlse, q, k, v, o, lse, need_dq, need_dk, need_dv, *_call):
    return fake_gradients((q, k, v), (need_dq, need_dk, need_dv))


torch_op.register(f"ag_attention({_OPERANDS}, {_TAIL}) -> (Tensor, Tensor)", _forward, _fake_forward)
torch_op.register(
    f"ag_attention_backward(Tensor? do, Tensor? dlse, {_OPERANDS}, Tensor o, Tensor lse, bool need_dq, bool need_dk,"
    f" bool need_dv, {_TAIL}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_ag_attention_backward,
)


class _AgAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, returns_lse, *call):
        o, lse = torch.ops.tdkernels.ag_attention(q, k, v, *call)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call, ctx.returns_lse = call, returns_lse
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        autograd.reject_second_derivatives("ag_attention")
        need = ctx.needs_input_grad[:3]
        dlse = dlse if ctx.returns_lse else None  # torch.compile makes zeros of None
        gradients = torch.ops.tdkernels.ag_attention_backward(do, dlse, *ctx.saved_tensors, *need, *ctx.call)
        return *unpack_gradients(gradients, need), *[None] * 6


def attend(q, k, v, causal, scale, sharding, return_lse, group, config):
    """(o, lse, or None where nobody wants it) with a complete config.

    What torch computes it differentiates too, without attending a second time.
    """
    if config.method == "torch" and q.shape[1]:
        return attend_by_torch(q, k, v, causal, scale, sharding, group, return_lse)
    if autograd.may_be_differentiated([q, k, v]):
        return _AgAttention.apply(q, k, v, return_lse, causal, scale, sharding, group.group_name, as_argument(config))
    return _overlapped(q, k, v, causal, scale, sharding, group, config)


def ag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None,
    sharding: str = "contiguous", return_lse: bool = False, group: GroupLike = None,
    config: AgAttentionConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys and values of all ranks, which travel meanwhile.

    Args:
        q: [B, S / W, Hq, D] bf16, fp16 or fp32; any S / W, the same on all ranks; D from 16 to 256
        k: [B, S / W, Hkv, D], v: [B, S / W, Hkv, Dv], Hq a multiple of Hkv; same dtype; Dv from 16 to 256
        causal: a query sees its own position and those before it, else all
        scale: of the scores, positive; None takes D ** -0.5
        sharding: "contiguous": rank r has the r-th S / W positions; "zigzag": of 2 W pieces it has r and 2 W - 1 - r,
            one after the other, which balances causal work; where S / W is odd, each rank's second piece is the shorter
            one
        return_lse: return lse too
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: AgAttentionConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune

    Returns:
        o: [B, S / W, Hq, Dv], dtype of q, accumulated in fp32; with return_lse also lse: [B, S / W, Hq] fp32, the
        natural logarithm of each query's sum of exponentiated scores

    Gradient:
        dq, dk, dv, each of its shard, over the queries of all ranks; dlse counts too. The same bits each time, unless
        they are made by torch's kernels (config.backward; see AgAttentionConfig)

    Raises:
        TypeError or ValueError: for operands that do not fit, with their shapes, before anything is launched
        ValueError: on every rank when the ranks disagree
        PeerTimeoutError: when a peer does not come (on a GPU at the next call or at tdkernels.synchronize())
        RuntimeError: in a backward with create_graph=True

    Contract:
        collective over group, and so is the backward: all ranks must want gradients of the same operands, and of lse or
        not; host sync: no (the first call with a shape agrees with the peers and allocates); CUDA graph: yes, after one
        call outside; the caller owns the output

    Source:
        online softmax by blocks: FlashAttention-2 (https://arxiv.org/abs/2307.08691); the gather beside it:
        Triton-distributed (https://arxiv.org/abs/2504.19442); two pieces a rank: Llama 3
        (https://arxiv.org/abs/2407.21783)
    """
    group = resolve_group(group)
    settings = causal, scale, sharding, return_lse, config, get_mode()
    known, key = call_cache.lookup_run("ag_attention", group, (q, k, v), settings)
    if known is not None:
        o, lse = known(group, q, k, v)
        return (o, lse) if return_lse else o
    q, k, v = autograd.apply_autocast(q, k, v)
    checked, checked_key = call_cache.lookup("ag_attention config", group, (q, k, v), settings)
    if checked is None:
        check_attention("ag_attention", q, k, v, causal, scale, sharding, config)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if torch.compiler.is_compiling():
        call = causal, scale, sharding, group.group_name, as_argument(config)
        if autograd.may_be_differentiated([q, k, v]):
            o, lse = _AgAttention.apply(q, k, v, return_lse, *call)
        else:
            o, lse = torch.ops.tdkernels.ag_attention(q, k, v, *call)
    else:
        if checked is None:
            checked = _settled(q, k, v, causal, scale, sharding, group, config)
            call_cache.insert(group, checked_key, checked)
        o, lse = attend(q, k, v, causal, scale, sharding, return_lse, group, checked)
        if call_cache.is_current(group, key):
            call_cache.insert(group, key, _known_call(q, v, causal, scale, sharding, return_lse, checked))
    return (o, lse) if return_lse else o


def _known_call(q, v, causal, scale, sharding, return_lse, config):
    """A CachedCall of (o, lse), with a complete config."""
    shapes = [torch.Size([*q.shape[:3], v.shape[3]]), q.shape[:3]]

    def run(group, q, k, v):
        return attend(q, k, v, causal, scale, sharding, return_lse, group, config)

    def bind(group, *operands):
        return launch.bind_call(operands, *_ready(*operands), causal, sharding, scale, group, config)

    is_launch = config.method == "fused" and q.shape[1] > 0
    return call_cache.CachedCall(run, bind if is_launch else None, shapes)


__all__ = ["AgAttentionConfig", "ag_attention", "ag_attention_ref"]
