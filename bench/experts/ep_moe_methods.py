"""The ways to run experts that are divided between the ranks, from tokens to their weighted sums.

    grouped         torch._grouped_mm alone, on rows that lie ready: the floor of the products
    collective      NCCL's all_to_all_single alone, there and back, a row for each choice
    sequence        both, with the permutes that a user would write (``permute_baseline``); the host knows all sizes
    parts           ep_dispatch, group_gemm and ep_combine one after the other, with max_tokens
    tdkernels       ep_moe as it comes, where the host waits for how many rows there are; -max-tokens: where it never
                    waits; -overlapped: that with method "fused", whose products overlap the ways there and back

The sequence finds out where rows belong while they are under way.
"""

import torch
import torch.distributed as dist

import tdkernels
from bench.experts import permute_baseline
from bench.experts.dispatch_methods import Method
from bench.experts.tp_moe_methods import both_ways, grouped
from tdkernels.ops.experts.grouped_gemm.dispatch import swiglu_ref

FORWARD, BOTH = "forward", "forward+backward"


# ---- NCCL and permutes ----


def add_known(s, experts):
    """Add to a set of operands what the host knows beforehand: rows to and from each rank."""
    ranks = dist.get_world_size()
    counts = torch.bincount(s.ids.flatten(), minlength=experts).view(ranks, -1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    s.sent, s.received = counts.sum(1).tolist(), theirs.sum(1).tolist()


class _Exchanged(torch.autograd.Function):
    """Rows to the ranks that they are for, once the work that is appended has been waited for."""

    @staticmethod
    def forward(ctx, rows, sent, received, works):
        ctx.sizes = sent, received
        out, work = _exchange(rows, sent, received)
        works.append(work)
        return out

    @staticmethod
    def backward(ctx, drows):
        sent, received = ctx.sizes
        out, work = _exchange(drows, received, sent)
        work.wait()
        return out, None, None, None


def _exchange(rows, sent, received):
    words = permute_baseline.words(rows.contiguous())
    out = words.new_empty(sum(received), words.shape[1])
    work = dist.all_to_all_single(out, words, received, sent, async_op=True)
    return out.view(rows.dtype), work


def layer(s, experts, add_up, product=grouped):
    """y [T, H]."""
    ranks, works, choices = dist.get_world_size(), [], s.ids.shape[1]
    values, order = permute_baseline.sort(s.ids.flatten(), experts)
    every = torch.arange(experts, dtype=values.dtype, device=values.device)
    ends = torch.searchsorted(values, every, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    theirs = torch.empty_like(counts)
    counting = dist.all_to_all_single(theirs, counts, async_op=True)
    places = permute_baseline.inverse(order)
    came = _Exchanged.apply(permute_baseline.Spread.apply(s.x, order, places, choices), s.sent, s.received, works)
    counting.wait()
    by_expert, ends = _by_expert(theirs.view(ranks, -1), sum(s.received))
    by_source = permute_baseline.inverse(by_expert)
    works.pop().wait()
    rows = permute_baseline.Taken.apply(came, by_expert, by_source)
    out = product(swiglu_ref(product(rows, s.w_gate_up, ends), "swiglu"), s.w_down, ends)
    back = _Exchanged.apply(permute_baseline.Taken.apply(out, by_source, by_expert), s.received, s.sent, works)
    works.pop().wait()
    return permute_baseline.WeightedSum.apply(back, s.weights, order, places, add_up)


def _by_expert(their_counts, rows):
    """Of rows that came by source and expert: (their order by expert and source, where each expert's end)."""
    ranks, local = their_counts.shape
    experts = torch.arange(local, device=their_counts.device).repeat(ranks)
    expert_of_row = experts.repeat_interleave(their_counts.flatten(), output_size=rows)
    return permute_baseline.sort(expert_of_row, local)[1], their_counts.sum(0).cumsum(0, dtype=torch.int32)


def _as_it_is(outputs):
    return outputs


def _method(part, forward, **fields):
    """The Method of a layer, or of it and its gradients."""
    if part == FORWARD:
        return Method(forward, _as_it_is, **fields)
    return Method(lambda s: both_ways(forward, s), _as_it_is, **fields)


def sequence(part, experts, add_up, product=grouped):
    return _method(part, lambda s: layer(s, experts, add_up, product))


# ---- one of the two alone ----


def add_alone(s, experts):
    """Add to a set of operands rows as they lie where they are multiplied."""
    ranks = dist.get_world_size()
    theirs = torch.empty(experts, dtype=torch.int64, device=s.ids.device)
    dist.all_to_all_single(theirs, torch.bincount(s.ids.flatten(), minlength=experts))
    s.ends = _by_expert(theirs.view(ranks, -1), sum(s.received))[1]
    s.to_send = torch.randn(sum(s.sent), s.x.shape[1], dtype=s.x.dtype, device=s.x.device)
    s.rows = torch.randn(sum(s.received), s.x.shape[1], dtype=s.x.dtype, device=s.x.device)
    s.pre = grouped(s.rows, s.w_gate_up, s.ends)
    s.h = swiglu_ref(s.pre, "swiglu")


def _products(s):
    return grouped(s.rows, s.w_gate_up, s.ends), grouped(s.h, s.w_down, s.ends)


def _products_and_gradients(s):
    dh = torch._grouped_mm(s.rows, s.w_down, offs=s.ends)
    dw_down = torch._grouped_mm(s.rows.t(), s.h, offs=s.ends)
    drows = torch._grouped_mm(s.pre, s.w_gate_up, offs=s.ends)
    dw_gate_up = torch._grouped_mm(s.pre.t(), s.rows, offs=s.ends)
    return *_products(s), dh, dw_down, drows, dw_gate_up


def _there_and_back(s):
    outputs = []
    for rows, sizes in ((s.to_send, (s.sent, s.received)), (s.rows, (s.received, s.sent))):
        out, work = _exchange(rows, *sizes)
        work.wait()
        outputs.append(out)
    return tuple(outputs)


ALONE = {  # {part: {name: call}}
    FORWARD: {"grouped": _products, "collective": _there_and_back},
    BOTH: {"grouped": _products_and_gradients, "collective": lambda s: (*_there_and_back(s), *_there_and_back(s))},
}


# ---- ours ----


def parts(part, experts, room):
    """Our operators one after the other."""

    def forward(s):
        recv, handle = tdkernels.ep_dispatch(s.x, s.ids, s.weights, num_experts=experts, max_tokens=room)
        hidden = tdkernels.group_gemm(recv.x, s.w_gate_up, recv.splits, activation="swiglu")
        return tdkernels.ep_combine(tdkernels.group_gemm(hidden, s.w_down, recv.splits), handle)

    return _method(part, forward)


def ours(part, experts, room=None, config=None):
    """ep_moe; ``room``: max_tokens."""

    def forward(s):
        return tdkernels.ep_moe(
            s.x, s.ids, s.weights, s.w_gate_up, s.w_down, num_experts=experts, max_tokens=room, config=config
        )

    return _method(part, forward, host_waits=room is None, config=config)
