"""Methods of the ag_attention benchmark.

    attention NAME      torch's attention kernel NAME alone, for this rank's queries and gathered keys and values
    collective          NCCL alone: all-gathers of k and v; in the backward the reduce-scatters of their gradients
    sequence NAME       the unfused baseline: NCCL's all-gathers, then attention kernel NAME
    tdkernels           ag_attention with its default arguments

The unfused baseline is written as a user would write it. It saves the gathered keys and values for the backward;
ag_attention saves shards and gathers again. The baseline stores the two chunks of a zigzag rank as separate tensors, so
that no copy is needed to split queries or to concatenate outputs.
"""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

import tdkernels
from bench.core.linear_function import LinearFunction
from bench.experts.dispatch_methods import Method
from tdkernels.launch import rank_device
from tdkernels.ops.attention.ag_attention.op import attend_to_part, pieces_of
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows

_ROWS = 1024  # queries per step of the reference, so that the scores fit into memory


# ---- conversion between rank order and sequence order ----


def chunk_starts(case):
    """Return the first position of each chunk of this rank."""
    return [first for first, _ in pieces_of(case.rows, case.sharding, dist.get_rank(), case.ranks)]


def order_of(case):
    """Return the chunks in sequence order, as indices into the concatenation of all ranks' chunks."""
    if case.sharding == "contiguous":
        return list(range(case.ranks))
    return [*range(0, 2 * case.ranks, 2), *range(2 * case.ranks - 1, 0, -2)]


def _reordered(x, order):
    """Permute the ``len(order)`` chunks of x [S, …]; return x itself if the order is the identity."""
    if order == sorted(order):
        return x
    pieces = x.view(len(order), -1, *x.shape[1:])
    return torch.cat([pieces[number] for number in order])


def gathered(x, order):
    """All-gather x [1, S / W, H, D] to [1, H, S, D] in sequence order."""
    return _reordered(all_gather_rows(x[0]), order)[None].transpose(1, 2)


def scattered(dy, order):
    """Return the gradient of x: reduce-scatter the ranks' gradients of the gathered tensor."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return reduce_scatter_rows(_reordered(dy.transpose(1, 2)[0].contiguous(), back))[None]


# ---- torch's attention kernels ----


class _Kernel(NamedTuple):
    """A torch attention kernel: ``forward`` and ``backward`` for a rectangular block of scores, causal or not.

    lower_right: whether its causal mask is aligned to the lower right corner, so that one call per chunk suffices
    """

    forward: object
    backward: object
    lower_right: bool

    def spans(self, first, count):
        """Return the key ranges for ``count`` queries from position ``first`` on, as (begin, end, causal)."""
        if self.lower_right or not first:
            return [(0, first + count, True)]
        return [(0, first, False), (first, first + count, True)]


def _flash_forward(q, k, v, causal):
    o, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return o, lse, rest


def _flash_backward(do, q, k, v, o, lse, rest, causal):
    cum_q, cum_k, max_q, max_k, seed, offset = rest[:6]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset
    )


def _cudnn_forward(q, k, v, causal):
    o, lse, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return o, lse, rest


def _cudnn_backward(do, q, k, v, o, lse, rest, causal):
    cum_q, cum_k, max_q, max_k, seed, offset = rest[:6]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal
    )


def _merged(parts):
    """Merge (o, lse) of disjoint key ranges into (o, lse) of all keys."""
    (o, lse), *others = parts
    for other, other_lse in others:
        total = torch.logaddexp(lse, other_lse)
        scale, other_scale = ((each - total).exp().view(*o.shape[:3], 1) for each in (lse, other_lse))
        o, lse = torch.addcmul(o * scale, other, other_scale).to(o.dtype), total
    return o, lse


class _Attention(torch.autograd.Function):
    """Attention of query chunks [1, Hq, n, D] that start at the positions ``first``; returns o of each chunk.

    The gradient for a key range needs o and lse of all keys; the kernel's backward is called with these.
    """

    @staticmethod
    def forward(ctx, kernel, first, keys, values, *queries):
        outputs, stats, ctx.rest = [], [], []
        for q, position in zip(queries, first, strict=True):
            parts = [
                kernel.forward(q, keys[:, :, begin:end], values[:, :, begin:end], causal)
                for begin, end, causal in kernel.spans(position, q.shape[2])
            ]
            o, lse = _merged([part[:2] for part in parts])
            outputs.append(o)
            stats.append(lse)
            ctx.rest.append([rest for *_, rest in parts])
        ctx.save_for_backward(keys, values, *queries, *outputs, *stats)
        ctx.kernel, ctx.first = kernel, first
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        keys, values, *saved = ctx.saved_tensors
        count, dqs = len(ctx.first), []
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for piece, (do, position) in enumerate(zip(gradients, ctx.first, strict=True)):
            q, o, lse = saved[piece::count]
            dq = None
            spans = ctx.kernel.spans(position, q.shape[2])
            for (begin, end, causal), rest in zip(spans, ctx.rest[piece], strict=True):
                part, dk_part, dv_part = ctx.kernel.backward(
                    do, q, keys[:, :, begin:end], values[:, :, begin:end], o, lse, rest, causal
                )
                dq = part if dq is None else dq + part
                dk[:, :, begin:end] += dk_part
                dv[:, :, begin:end] += dv_part
            dqs.append(dq)
        return None, None, dk, dv, *dqs


def _by_kernel(*kernel):
    return lambda first, keys, values, queries: _Attention.apply(_Kernel(*kernel), first, keys, values, *queries)


def _by_any(first, keys, values, queries):
    """Use the kernel that torch selects for a causal bias."""
    scale = keys.shape[3] ** -0.5
    return tuple(attend_to_part(q, keys, values, at, True, scale) for q, at in zip(queries, first, strict=True))


PEERS = {
    "sdpa-flash": _by_kernel(_flash_forward, _flash_backward, True),
    "sdpa-cudnn": _by_kernel(_cudnn_forward, _cudnn_backward, False),
}


def attentions(case, names):
    """Return {name: function (keys, values, queries)} of the named kernels, or of one that runs on any device."""
    chosen = {name: PEERS[name] for name in names if name in PEERS} if rank_device().type == "cuda" else {}
    first = chunk_starts(case)
    return {name: functools.partial(attend, first) for name, attend in (chosen or {"sdpa": _by_any}).items()}


# ---- methods: checked outputs are (o,) or (dq, dk, dv) of the checked heads ----


def add_alone(case, s):
    """Add the chunks of q and do, and the gathered keys and values, to an operand set."""
    pieces = {"contiguous": 1, "zigzag": 2}[case.sharding]
    s.queries, s.dos = ([*x.transpose(1, 2).chunk(pieces, 2)] for x in (s.q, s.do))
    s.keys, s.values = (gathered(x, order_of(case)) for x in (s.k, s.v))


def collective(part):
    if part == "forward":
        return lambda s: (all_gather_rows(s.k[0]), all_gather_rows(s.v[0]))
    return lambda s: tuple(reduce_scatter_rows(x.transpose(1, 2)[0]) for x in (s.keys, s.values))


def alone(case, part, attend):
    """Return the Method of attention alone on gathered keys. Gradients are reduced over ranks only for the check."""

    def differentiable(s):
        leaves = _leaves(*s.queries, s.keys, s.values)
        return leaves, attend(*leaves[-2:], leaves[:-2])

    def complete(gradients):
        *dqs, dk, dv = gradients
        return _joined(dqs), scattered(dk, order_of(case)), scattered(dv, order_of(case))

    if part == "forward":
        return Method(lambda s: attend(s.keys, s.values, s.queries), lambda outs: _checked(case, _joined(outs)))
    return Method(_backward(differentiable, lambda s: s.dos), lambda found: _checked(case, *complete(found)))


def sequence(case, part, attend):
    """Return the Method of the unfused baseline."""
    order = order_of(case)

    def differentiable(s):
        leaves = _leaves(*s.queries, s.k, s.v)
        both_ways = functools.partial(gathered, order=order), functools.partial(scattered, order=order)
        keys, values = (LinearFunction.apply(x, *both_ways) for x in leaves[-2:])
        return leaves, attend(keys, values, leaves[:-2])

    def forward(s):
        return attend(gathered(s.k, order), gathered(s.v, order), s.queries)

    if part == "forward":
        return Method(forward, lambda outs: _checked(case, _joined(outs)))
    back = _backward(differentiable, lambda s: s.dos)
    return Method(back, lambda found: _checked(case, _joined(found[:-2]), *found[-2:]))


def ours(case, part, config):
    """Return the Method of ag_attention; ``config`` None uses the selected config."""

    def call(q, k, v):
        return tdkernels.ag_attention(q, k, v, sharding=case.sharding, config=config)

    def differentiable(s):
        leaves = _leaves(s.q, s.k, s.v)
        return leaves, (call(*leaves),)

    if part == "forward":
        return Method(lambda s: call(s.q, s.k, s.v), lambda o: _checked(case, o), config=config)
    back = _backward(differentiable, lambda s: [s.do])
    return Method(back, lambda found: _checked(case, *found), config=config)


def _leaves(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


def _backward(forward, gradients):
    """Return a call that repeats the backward of one forward; ``forward`` returns (leaves, outputs)."""
    cached = {}

    def call(s):
        if id(s) not in cached:
            with torch.enable_grad():
                cached[id(s)] = forward(s)
        leaves, outputs = cached[id(s)]
        return torch.autograd.grad(outputs, leaves, gradients(s), retain_graph=True)

    return call


def _joined(pieces):
    """Concatenate chunks [1, H, n, D] to [1, S / W, H, D]."""
    return torch.cat([*pieces], 2).transpose(1, 2)


def _checked(case, *tensors):
    """Return the checked heads of tensors [1, S / W, ·, D], the last ones."""
    return tuple(x[:, :, -(x.shape[2] * case.checked // case.shape.kv_heads) :] for x in tensors)


# ---- references ----


def exact(case, part, s):
    """Compute the outputs in fp32, in blocks of queries whose scores fit into memory."""
    heads = case.checked * case.shape.heads // case.shape.kv_heads
    keys, values = (x[:, -case.checked :].float() for x in (s.keys, s.values))
    outputs, dqs, dk, dv = [], [], torch.zeros_like(keys), torch.zeros_like(values)
    for q, do, first in zip(s.queries, s.dos, chunk_starts(case), strict=True):
        for start in range(0, q.shape[2], _ROWS):
            rows = slice(start, start + _ROWS)
            leaves = _leaves(q[:, -heads:, rows].float(), keys, values)
            with torch.set_grad_enabled(part == "backward"):
                o = attend_to_part(*leaves, first + start, True, case.shape.dim**-0.5)
            if part == "forward":
                outputs.append(o)
                continue
            dq, dk_part, dv_part = torch.autograd.grad(o, leaves, do[:, -heads:, rows].float())
            dqs.append(dq)
            dk += dk_part
            dv += dv_part
    if part == "forward":
        return (_joined(outputs),)
    return _joined(dqs), scattered(dk, order_of(case)), scattered(dv, order_of(case))


def plain(case, part, s):
    """Compute the outputs with ag_attention_ref in the operands' dtype."""
    leaves = [x.detach().requires_grad_() for x in _checked(case, s.q, s.k, s.v)]
    with torch.set_grad_enabled(part == "backward"):
        o = tdkernels.ag_attention_ref(*leaves, sharding=case.sharding)
    return torch.autograd.grad(o, leaves, *_checked(case, s.do)) if part == "backward" else (o,)
