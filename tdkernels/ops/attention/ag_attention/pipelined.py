"""Methods "cudnn" and "flash" of ag_attention: torch's attention kernels, called on the keys of one rank at a time.

Forward. Own keys come first. With a causal mask, the rank's own queries and keys form one triangle, for one piece of
the sequence per rank and for two. The keys of the other ranks follow, beginning with the rank below, in the order in
which the copy engine brings them (``AsyncAllGather``). The part of them that this rank's queries attend to is a
rectangle. Results over different keys are merged by their lse, in fp32.

Backward. Keys and values are gathered again, and processed as the same triangle and rectangles. With o and lse over all
keys, the kernels compute the contribution of each set of keys. A contribution to dk and dv of another rank is sent to
this rank while the next one is computed (``AsyncReduceScatter``). The owner sums all contributions in fp32 and in rank
order.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.attention.ag_attention.config import AgAttentionConfig


def seen(rows: int, causal: bool, sharding: str, rank: int, source: int) -> tuple[int, int]:
    """Return (first, count): queries of ``rank`` from ``first`` on attend to the first ``count`` keys of ``source``.

    The other queries of ``rank`` attend to no key of ``source``.
    """
    if not causal:
        return 0, rows
    if sharding == "contiguous":
        return (0, rows) if source < rank else (rows, 0)
    piece = (rows + 1) // 2
    return (0, piece) if source < rank else (piece, rows if rows > piece else 0)


class _Keys:
    """Context manager that gathers keys and values. Inside it, ``of`` returns the keys of the ranks in ``far``.

    Attributes:
        far: One (step, rank, first query, number of keys) for each other rank whose keys this rank attends to, in the
            order of arrival. ``of`` must be called in this order.
    """

    def __init__(self, k, v, causal, sharding, group, fields):
        self._heads, self._rows, self._d = k.shape[2], k.shape[1], k.shape[3]
        self._gather, self.far = None, []
        if group.size() > 1:
            # Concatenated, since AsyncAllGather gathers one tensor.
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
        """Return the first ``count`` keys and values of a rank; the current stream waits for them."""
        self._gather.wait(step)
        lines = self._gather.gathered[source].unflatten(0, (-1, self._rows))[:, :count]
        return [x.unflatten(2, (self._heads, -1)) for x in lines.split(self._heads * self._d, 2)]


def _pad_to_common_width(*tensors):
    """Return the tensors zero-padded to one common head dimension, a multiple of 8, with aligned rows."""
    width = round_up(max(x.shape[3] for x in tensors), 8)
    return [_aligned(gemm_operands.widened(x, width)) for x in tensors]


def _aligned(x):
    """Return x, or a copy if rows of heads overlap or do not begin at a multiple of 16 bytes."""
    steps = [stride * x.element_size() for stride, size in zip(x.stride()[:3], x.shape) if size > 1]
    is_aligned = x.stride(3) == 1 and all(steps) and not any(step % 16 for step in (x.data_ptr(), *steps))
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _fields(what, q, k, v, causal, sharding, scale, config):
    return {"by parts": what, **with_config(problem_fields(q, k, v, causal, sharding, scale), config)}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sharding: str, scale: float,
    group: "dist.ProcessGroup", config: "AgAttentionConfig",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of non-empty q, k and v [B, S / W, ·, ·]; ``config`` is complete."""
    # AsyncAllGather supports several nodes, but AsyncReduceScatter of the backward does not.
    refuse_nodes("ag_attention", group_state(group))
    kernel, dv = KERNELS[config.method], v.shape[3]
    fields = _fields("forward", q, k, v, causal, sharding, scale, config)
    q, k, v = _pad_to_common_width(q, k, v)
    with _Keys(k, v, causal, sharding, group, fields) as keys:
        o, lse = kernel.forward(q, k, v, causal, scale)
        for number, (step, source, first, count) in enumerate(keys.far, 1):
            part = kernel.forward(q[:, first:], *keys.of(step, source, count), False, scale)
            o, lse = merge(  # type: ignore[call-arg]
                o, lse, *part, first, q.dtype if number == len(keys.far) else torch.float32
            )
    return o[..., :dv].contiguous(), lse


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    wanted: Sequence[bool], causal: bool, sharding: str, scale: float, group: "dist.ProcessGroup",
    config: "AgAttentionConfig",
) -> tuple[torch.Tensor | None, ...]:
    """Return (dq, dk, dv), with None for each gradient that is not ``wanted``."""
    kernel = KERNELS[config.backward]
    fields = _fields("backward", q, k, v, causal, sharding, scale, config)
    widths = q.shape[3], k.shape[3], v.shape[3]
    q, k, v, o, do = _pad_to_common_width(q, k, v, o, do)
    keys = _Keys(k, v, causal, sharding, group, fields)
    sums = _KeySums(k, v, causal, sharding, group, fields) if wanted[1] or wanted[2] else None

    def gradients(first, k, v, is_causal):
        queries = q[:, first:], o[:, first:], lse[:, first:], do[:, first:]
        return kernel.backward(*queries, k, v, is_causal, scale)

    with keys, sums or nullcontext():
        dq, *own = gradients(0, k, v, causal)
        total = dq.float() if len(keys.far) > 1 else dq  # a single addition rounds once in any dtype
        for step, source, first, count in keys.far:
            dq, *of_source = gradients(first, *keys.of(step, source, count), False)  # type: ignore[call-arg]
            if sums is not None:
                sums.send(source, *of_source)
            total[:, first:] += dq
        dk, dv = sums.of(*own) if sums is not None else (None, None)
    found = zip((total.to(q.dtype), dk, dv), widths, wanted, strict=True)
    return tuple(x[..., :width] if need else None for x, width, need in found)


class _KeySums:
    """Context manager that sums the contributions of all ranks to dk and dv, with ``send`` and ``of``.

    A contribution [B, n, Hkv, D + Dv] covers the first n keys of their owner. It has dk and dv concatenated.
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
        """Return this rank's [dk, dv]: its own contribution plus those received from the peers."""
        parts = [(dk, dv) if source == self._rank else self._received_from(source, dk) for source in range(self._ranks)]
        return [_sum(own, of_all) for own, of_all in zip((dk, dv), zip(*filter(None, parts)), strict=True)]

    def _received_from(self, source, dk):
        """Return the (dk, dv) received from a rank, or None if its queries attend to no key of this rank."""
        _, count = seen(self._rows, *self._call, source, self._rank)
        if not count:
            return None
        shape = (dk.shape[0], count, dk.shape[2], 2 * self._d)
        return self._scatter.wait(source, shape, dk.dtype).split(self._d, 3)


def _sum(own, parts):
    """Sum parts in fp32 and in their order. Two parts need no fp32: a single addition to ``own`` also rounds once."""
    if len(parts) > 2:
        total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        for part in parts:
            total[:, : part.shape[1]] += part
        return total.to(own.dtype)
    for part in parts:
        if part is not own:
            own[:, : part.shape[1]] += part
    return own
