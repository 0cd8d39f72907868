"""ag_attention: attention over a sharded sequence (context parallelism), overlapped with the gather of keys and values.

    q [B, S / W, Hq, D], k [B, S / W, Hkv, D], v [B, S / W, Hkv, Dv] on each rank  ->  o [B, S / W, Hq, Dv]

Method "fused" (``kernel``). Programs fetch work items from a queue. The first items push this rank's keys and values in
chunks to the peers that attend to them, and set one signal per chunk. Each following item is a tile, a block of queries
of one head. It attends to this rank's keys first, then to the keys of the rank below, and so on, in the order in which
they arrive. It waits for the signal of each chunk. The longest tiles come first. The softmax is online, in fp32, and
the order of its blocks is fixed, so the result does not depend on timing. The last item waits until every peer has
begun the call. With a causal mask a rank may need no data of a peer; without this wait, two halves of the workspace
would not be enough.

Methods "cudnn" and "flash" (``pipelined``). An attention kernel of torch processes the keys of one rank at a time, own
keys first, while the copy engine brings the others. The backward does the same. Long shards use cuDNN by default.

Balance. With a causal mask and contiguous shards, rank W - 1 has nearly twice the work of the average rank. With
"zigzag" the sequence has 2 W pieces, and rank r has pieces r and 2 W - 1 - r, so all ranks have the same work.

Backward. Only shards are saved.

    gradient  kernel        pushed                               a tile loops over
    dq        kernel_dq     keys and values, as in the forward   keys and values
    dk, dv    kernel_dkv    queries, do and statistics           queries of all ranks, so no sum over ranks is needed

Example:
    o = tdkernels.ag_attention(q, k, v)         # instead of all-gathers of k and v and an attention with a mask
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from tdkernels.autotune.invariance import check_invariant, is_batch_invariant, reject_invariant, reject_max_ranks
from tdkernels.autotune.modes import get_mode
from tdkernels.ops.attention.ag_attention import launch, launch_dq, pipelined
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

if TYPE_CHECKING:
    import torch.distributed as dist

# ---- reference with plain torch.distributed ----


class _AllGather(torch.autograd.Function):
    """All-gather shards [B, S / W, ·, ·] to [W, B, S / W, ·, ·], with gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather_rows(x, group).view(-1, *x.shape)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ag_attention")
        return reduce_scatter_rows(dy.flatten(0, 1), ctx.group), None


def _gather_sequence(x, sharding, group):
    """Return x of all ranks as [B, H, S, D], in sequence order."""
    shards = _AllGather.apply(x, group)
    if sharding == "zigzag":
        piece = (x.shape[1] + 1) // 2
        shards = [*shards[:, :, :piece], *shards[:, :, piece:].flip(0)]
    return torch.cat([*shards], dim=1).transpose(1, 2)


def pieces_of(rows: int, sharding: str, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Return the positions of a rank with ``rows`` positions, as (first position, count) of its one or two pieces."""
    if sharding == "contiguous":
        return [(rank * rows, rows)]
    piece = (rows + 1) // 2
    return [(rank * piece, piece), (ranks * piece + (ranks - 1 - rank) * (rows - piece), rows - piece)]


def attend_to_part(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, causal: bool, scale: float
) -> torch.Tensor:
    """Return o of queries [B, H, n, D] that begin at position ``first``, over all keys, with torch."""
    if not causal:
        return F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=True)
    end = first + q.shape[2]
    mask = causal_lower_right(q.shape[2], end)
    # On a CPU, torch's causal bias does not support grouped heads, so keys and values are repeated.
    group = q.shape[1] // keys.shape[1]
    keys, values = (x[:, :, :end].repeat_interleave(group, 1) if group > 1 else x[:, :, :end] for x in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)


def _torch_lse(q, keys, first, causal, scale):
    """Return the log-sum-exp of the scores, [B, H, n] fp32, computed for 1024 queries at a time to limit memory."""
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


def _query_pieces(q, sharding, group):
    """Return this rank's queries as a list of (queries [B, Hq, n, D] of a piece, position of the first)."""
    pieces = pieces_of(q.shape[1], sharding, group.rank(), group.size())
    queries = q.transpose(1, 2).split([count for _, count in pieces], dim=2)
    return [(part, first) for part, (first, count) in zip(queries, pieces, strict=True) if count]


def attend_by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, sharding: str,
    group: "dist.ProcessGroup", return_lse: bool = False, at_once: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather keys and values, attend with torch, and return (o, lse or None), with gradients.

    ``at_once`` limits the number of queries per torch call, if the scores of all queries do not fit into memory.
    """
    keys, values = _gather_sequence(k, sharding, group), _gather_sequence(v, sharding, group)
    parts = [
        (rows, first + number * (at_once or 0)) for part, first in _query_pieces(q, sharding, group)
        for number, rows in enumerate(part.split(at_once or part.shape[2], dim=2))
    ]
    o = torch.cat([attend_to_part(rows, keys, values, first, causal, scale) for rows, first in parts], dim=2)
    if not return_lse:
        return o.transpose(1, 2), None
    lse = torch.cat([_torch_lse(rows, keys, first, causal, scale) for rows, first in parts], dim=2)
    return o.transpose(1, 2), lse.transpose(1, 2)


def ag_attention_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None,
    sharding: str = "contiguous", return_lse: bool = False, group: GroupLike = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute ``ag_attention`` in plain torch: all-gathers of k and v, then attention. Supports gradients."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o, lse = attend_by_torch(q, k, v, causal, scale, sharding, resolve_group(group), return_lse)
    return (o, lse) if return_lse else o  # type: ignore[return-value]


# ---- torch.library operators, which torch.compile traces ----


def padded(x: torch.Tensor) -> torch.Tensor:
    """Return x with heads padded to a multiple of 16 bytes, as TMA needs. fp32 is not loaded by TMA and not padded."""
    return gemm_operands.widened(x, round_up(x.shape[3], 8)) if x.element_size() == 2 else x


def _normalize_operands(*tensors):
    return [gemm_operands.rows_contiguous(padded(x)) for x in tensors]


def _without_padding(x, width):
    """Return the first ``width`` elements of each head, without the padding."""
    return x if x.shape[3] == width else x[..., :width].contiguous()


def _select_config(q, k, v, causal, scale, sharding, group):
    """Select a config for a call without one; None means the heuristic."""
    if is_batch_invariant() and not spans_nodes(group):
        return AgAttentionConfig()  # the defaults of its open fields depend on S / W, and not on B
    if group.size() == 1 or not q.shape[1]:
        return None  # there is nothing to tune
    if spans_nodes(group):
        reject_invariant("ag_attention", "a group on several nodes")
        return AgAttentionConfig(method="torch")

    def describe():
        sizes = q.shape[0], group.size() * q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        layout = f"causal {sharding}" if causal else "full"  # without a mask the sharding does not matter
        return sizes, layout, launch.problem_fields(q, k, v, causal, sharding, scale)

    call = q.shape, k.shape, v.shape, causal, sharding, scale
    return select("ag_attention", q, group, call, describe).config


def _resolve_config(q, k, v, causal, scale, sharding, group, config):
    """Return the complete config of a call, after a consensus check of the call and the config."""
    reject_max_ranks("ag_attention")
    check_invariant("ag_attention", config)
    selected = config is None
    config = _select_config(q, k, v, causal, scale, sharding, group) if selected else config
    config = completed(config, q.shape[1], max(q.shape[3], v.shape[3]), q.dtype, q.device, selected)
    fields = with_config(launch.problem_fields(q, k, v, causal, sharding, scale), config)
    group_state(group).check_consensus_cached("ag_attention", fields)
    return config


def _by_name(q, k, v, causal, scale, sharding, group, config):
    """Return (group, complete config) of a torch.library call, which passes both as text."""
    group = torch_op.group_by_name(group)
    given = from_text(AgAttentionConfig, config) if config else None
    return group, _resolve_config(q, k, v, causal, scale, sharding, group, given)


@whole_call
def _forward(q, k, v, causal, scale, sharding, group, config):
    group, config = _by_name(q, k, v, causal, scale, sharding, group, config)
    if config.method == "torch" and q.shape[1]:
        with torch.no_grad():
            o, lse = attend_by_torch(q, k, v, causal, scale, sharding, group, return_lse=True)
        return o.contiguous(), lse.contiguous()
    return _overlapped(q, k, v, causal, scale, sharding, group, config)


def _overlapped(q, k, v, causal, scale, sharding, group, config):
    """Return (o, lse) for a complete config, which is ignored if S / W is 0."""
    if not q.shape[1]:
        return _fake_forward(q, k, v)
    if config.method in KERNELS:
        return pipelined.forward(q, k, v, causal, sharding, scale, group, config)
    o, lse = launch.launch(*_normalize_operands(q, k, v), causal, sharding, scale, group, config)
    return _without_padding(o, v.shape[3]), lse


@whole_call
def _backward(do, dlse, q, k, v, o, lse, need_dq, need_dk, need_dv, causal, scale, sharding, group, config):
    wanted = need_dq, need_dk, need_dv
    group, config = _by_name(q, k, v, causal, scale, sharding, group, config)
    if not q.shape[1]:
        return fake_gradients((q, k, v), wanted)
    do = torch.zeros_like(o) if do is None else do
    if config.method == "torch":
        gradients = _torch_gradients(q, k, v, do, dlse, causal, scale, sharding, group)
    elif config.backward in KERNELS and dlse is None:  # torch's kernels take no gradient of lse
        gradients = pipelined.backward(q, k, v, o, lse, do, wanted, causal, sharding, scale, group, config)
    else:
        dlse = None if dlse is None else dlse.contiguous()
        operands = *_normalize_operands(q, k, v, o), lse, *_normalize_operands(do), dlse
        gradients = launch_dq.launch(*operands, wanted, causal, sharding, scale, group, config)
    unpadded = (
        dx if dx is None else _without_padding(dx, x.shape[3]) for dx, x in zip(gradients, (q, k, v), strict=True)
    )
    return pack_gradients(unpadded, (q, k, v), wanted)


@torch.enable_grad()
def _torch_gradients(q, k, v, do, dlse, causal, scale, sharding, group):
    """Return (dq, dk, dv) computed with torch, which recomputes the forward."""
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
        dlse = dlse if ctx.returns_lse else None  # torch.compile passes zeros instead of None
        gradients = torch.ops.tdkernels.ag_attention_backward(do, dlse, *ctx.saved_tensors, *need, *ctx.call)
        return *unpack_gradients(gradients, need), *[None] * 6


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, sharding: str, return_lse: bool,
    group: "dist.ProcessGroup", config: AgAttentionConfig,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (o, lse) for a complete config. With method "torch", lse is None without ``return_lse``.

    In eager mode, torch also differentiates method "torch", so its backward does not recompute the attention.
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
    """Compute attention of this rank's queries over the keys and values of all ranks, and gather these concurrently.

    Args:
        q: Queries [B, S / W, Hq, D] in bf16, fp16 or fp32. S / W is arbitrary, but the same on all ranks. D is 16 to
            256.
        k: Keys [B, S / W, Hkv, D] in the dtype of q. Hq is a multiple of Hkv.
        v: Values [B, S / W, Hkv, Dv] in the dtype of q. Dv is 16 to 256.
        causal: If True, a query attends to its own position and the positions before it, otherwise to all positions.
        scale: Factor of the scores, positive. None means D ** -0.5.
        sharding: "contiguous": rank r has the r-th S / W positions. "zigzag": rank r has pieces r and 2 W - 1 - r of
            2 W pieces, concatenated, which balances causal work. If S / W is odd, the second piece is the shorter one.
        return_lse: Also return lse.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: AgAttentionConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune).

    Returns:
        o [B, S / W, Hq, Dv] in the dtype of q, accumulated in fp32. With ``return_lse`` (o, lse), where lse is
        [B, S / W, Hq] float32, the natural logarithm of each query's sum of exponentiated scores.

    Gradient:
        dq, dk and dv of this rank's shards, over the queries of all ranks and including the gradient of lse. They are
        deterministic, unless torch's kernels compute them (``AgAttentionConfig.backward``).

    Raises:
        TypeError, ValueError: If operands are invalid; the message has their shapes. Nothing has been launched.
        ValueError: On every rank, if the ranks disagree.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            tdkernels.synchronize().
        RuntimeError: In a backward with create_graph=True.

    Contract:
        Collective over ``group``, and so is the backward: all ranks must need gradients of the same operands, and all
        or none must have a gradient of lse. No host synchronization, but the first call with a shape communicates with
        the peers and allocates. Can be captured in a CUDA graph after one call outside. The caller owns the output.

    Source:
        Online softmax by blocks: FlashAttention-2 (https://arxiv.org/abs/2307.08691). Overlapped gather:
        Triton-distributed (https://arxiv.org/abs/2504.19442). Two pieces per rank: Llama 3
        (https://arxiv.org/abs/2407.21783).
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
            checked = _resolve_config(q, k, v, causal, scale, sharding, group, config)
            call_cache.insert(group, checked_key, checked)
        o, lse = attend(q, k, v, causal, scale, sharding, return_lse, group, checked)
        if call_cache.is_current(group, key):
            call_cache.insert(group, key, _known_call(q, v, causal, scale, sharding, return_lse, checked))
    return (o, lse) if return_lse else o


def _known_call(q, v, causal, scale, sharding, return_lse, config):
    """Return the CachedCall that computes (o, lse) with a complete config."""
    shapes = [torch.Size([*q.shape[:3], v.shape[3]]), q.shape[:3]]

    def run(group, q, k, v):
        return attend(q, k, v, causal, scale, sharding, return_lse, group, config)

    def bind(group, *operands):
        return launch.bind_call(operands, *_normalize_operands(*operands), causal, sharding, scale, group, config)

    is_launch = config.method == "fused" and q.shape[1] > 0
    return call_cache.CachedCall(run, bind if is_launch else None, shapes)


__all__ = ["AgAttentionConfig", "ag_attention", "ag_attention_ref"]
