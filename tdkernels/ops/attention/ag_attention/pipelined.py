"""ag_attention by the attention kernels that torch brings, cuDNN's or flash attention's, on one rank's keys at a time.

Own keys come first: causal, a rank's queries and keys are one triangle, whether it has one piece of the sequence or
two. Those of the ranks below follow, rank by rank, as the copy engine brings them (``AsyncAllGather``), and what our
queries see of them is a rectangle. Attention to some of the keys is merged with that to others by their lse, in fp32.

Backward, keys and values are gathered again and the same triangle and rectangles gone through; with o and lse of all
keys a part of them is enough for its share of the gradients. Ours of k and v of another rank are sent there while the
next ones are made (``collectives.async_reduce_scatter``), and added up by the owner, in fp32 and in rank order.
"""

from contextlib import nullcontext

import torch

from tdkernels.ops.attention.ag_attention.launch import problem_fields
from tdkernels.ops.attention.ag_attention.launch_merge import merge
from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.collectives.async_reduce_scatter import AsyncReduceScatter
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import round_up
from tdkernels.symm.group import group_state
from tdkernels.symm.workspace import refuse_nodes


def seen(rows, causal, sharding, rank, source):
    """(first, count): our queries from ``first`` on see the first ``count`` keys of another rank, and no others."""
    if not causal:
        return 0, rows
    if sharding == "contiguous":
        return (0, rows) if source < rank else (rows, 0)
    piece = (rows + 1) // 2
    return (0, piece) if source < rank else (piece, rows if rows > piece else 0)


class _Keys:
    """All ranks' keys and values: a context in which those ``of`` what is ``far`` can be read, in its order.

    ``far``: for each rank of which we see some, as they come: (step, rank, our first query, how many keys)
    """

    def __init__(self, k, v, causal, sharding, group, fields):
        self._heads, self._rows, self._d = k.shape[2], k.shape[1], k.shape[3]
        self._gather, self.far = None, []
        if group.size() > 1:
            # Side by side, for a gather has one tensor.
            lines = torch.cat([k.flatten(2), v.flatten(2)], 2).flatten(0, 1)
            self._gather = AsyncAllGather("ag_attention", fields, lines, group, lines.shape[0], copies=True)
            sources = ((step, self._gather.source(step)) for step in range(1, group.size()))
            spans = ((*at, *seen(self._rows, causal, sharding, group.rank(), at[1])) for at in sources)
            self.far = [span for span in spans if span[3]]

    def __enter__(self):
        if self._gather is not None:
            self._gather.__enter__()
            self._gather.copy(own=False)
        return self

    def __exit__(self, *error):
        if self._gather is not None:
            self._gather.__exit__(*error)

    def of(self, step, source, count):
        """The first keys and values of a rank, for which the current stream waits."""
        self._gather.wait(step)
        lines = self._gather.gathered[source].unflatten(0, (-1, self._rows))[:, :count]
        return [x.unflatten(2, (self._heads, -1)) for x in lines.split(self._heads * self._d, 2)]


def _of_one_width(*tensors):
    """The tensors, with heads of as many elements, a multiple of 8: of zeros past their ends. Rows are aligned."""
    width = round_up(max(x.shape[3] for x in tensors), 8)
    return [_aligned(gemm_operands.widened(x, width)) for x in tensors]


def _aligned(x):
    """x, copied unless every row of a head is memory of its own, and begins at a multiple of 16 bytes."""
    steps = [stride * x.element_size() for stride, size in zip(x.stride()[:3], x.shape) if size > 1]
    signature = x.stride(3) == 1 and all(steps) and not any(step % 16 for step in (x.data_ptr(), *steps))
    return x if signature else x.clone(memory_format=torch.contiguous_format)


def _fields(what, q, k, v, causal, sharding, scale, config):
    return {"by parts": what, **with_config(problem_fields(q, k, v, causal, sharding, scale), config)}


def forward(q, k, v, causal, sharding, scale, group, config):
    """(o, lse) of q, k and v [B, S / W, ·, ·] that are not empty; ``config`` is complete."""
    # Keys could be gathered across nodes, but the sums of the backward have no form for them yet.
    refuse_nodes("ag_attention", group_state(group))
    kernel, dv = KERNELS[config.method], v.shape[3]
    fields = _fields("forward", q, k, v, causal, sharding, scale, config)
    q, k, v = _of_one_width(q, k, v)
    with _Keys(k, v, causal, sharding, group, fields) as keys:
        o, lse = kernel.forward(q, k, v, causal, scale)
        for number, (step, source, first, count) in enumerate(keys.far, 1):
            part = kernel.forward(q[:, first:], *keys.of(step, source, count), False, scale)
            o, lse = merge(o, lse, *part, first, q.dtype if number == len(keys.far) else torch.float32)
    return o[..., :dv].contiguous(), lse


def backward(q, k, v, o, lse, do, wanted, causal, sharding, scale, group, config):
    """(dq, dk, dv), those that are ``wanted`` or None."""
    kernel = KERNELS[config.backward]
    fields = _fields("backward", q, k, v, causal, sharding, scale, config)
    widths = q.shape[3], k.shape[3], v.shape[3]
    q, k, v, o, do = _of_one_width(q, k, v, o, do)
    keys = _Keys(k, v, causal, sharding, group, fields)
    sums = _KeySums(k, v, causal, sharding, group, fields) if wanted[1] or wanted[2] else None

    def gradients(first, k, v, is_causal):
        queries = q[:, first:], o[:, first:], lse[:, first:], do[:, first:]
        return kernel.backward(*queries, k, v, is_causal, scale)

    with keys, sums or nullcontext():
        dq, *own = gradients(0, k, v, causal)
        total = dq.float() if len(keys.far) > 1 else dq  # a single addition rounds once, whatever it adds to
        for step, source, first, count in keys.far:
            dq, *of_source = gradients(first, *keys.of(step, source, count), False)
            if sums is not None:
                sums.send(source, *of_source)
            total[:, first:] += dq
        dk, dv = sums.of(*own) if sums is not None else (None, None)
    found = zip((total.to(q.dtype), dk, dv), widths, wanted, strict=True)
    return tuple(x[..., :width] if need else None for x, width, need in found)


class _KeySums:
    """Gradients of keys and values, of which every rank that sees them makes a part: a context for ``send`` and ``of``.

    A part [B, n, Hkv, D + Dv] is of the owner's first n keys, gradients of k and v side by side.
    """

    def __init__(self, k, v, causal, sharding, group, fields):
        self._rank, self._ranks = group.rank(), group.size()
        self._rows, self._d = k.shape[1], k.shape[3]
        self._call = causal, sharding
        self._scatter = nullcontext()
        if self._ranks > 1:
            fields = {"sums": True, **fields}
            self._scatter = AsyncReduceScatter("ag_attention", fields, k.nbytes + v.nbytes, group, k.device)

    def __enter__(self):
        self._scatter.__enter__()

    def __exit__(self, *error):
        self._scatter.__exit__(*error)

    def send(self, owner, dk, dv):
        self._scatter.send(owner, torch.cat([dk, dv], 3))

    def of(self, dk, dv):
        """Our (dk, dv), with what the others have sent of them."""
        parts = [(dk, dv) if source == self._rank else self._from(source, dk) for source in range(self._ranks)]
        return [_sum(own, of_all) for own, of_all in zip((dk, dv), zip(*filter(None, parts)), strict=True)]

    def _from(self, source, dk):
        """The (dk, dv) of another rank, if its queries see any of our keys."""
        _, count = seen(self._rows, *self._call, source, self._rank)
        if not count:
            return None
        shape = (dk.shape[0], count, dk.shape[2], 2 * self._d)
        return self._scatter.wait(source, shape, dk.dtype).split(self._d, 3)


def _sum(own, parts):
    """Parts added in fp32 and in their order; of two, one of them ours, a single addition rounds once, as that does."""
    if len(parts) > 2:
        total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        for part in parts:
            total[:, : part.shape[1]] += part
        return total.to(own.dtype)
    for part in parts:
        if part is not own:
            own[:, : part.shape[1]] += part
    return own
