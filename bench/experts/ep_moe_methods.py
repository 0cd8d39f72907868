"""Methods of the ep_moe benchmark.

    grouped         torch._grouped_mm alone, on already permuted rows: the floor of the compute
    collective      NCCL's all_to_all_single alone, dispatch and combine, one row per top-k assignment
    sequence        the unfused baseline: both, with permutes (``permute_baseline``); the host knows all sizes
    parts           ep_dispatch, group_gemm and ep_combine without overlap, with max_tokens
    tdkernels       ep_moe; the host waits for the number of received rows. -max-tokens: the host never waits.
                    -overlapped: also method "fused", whose GEMMs overlap dispatch and combine

The baseline computes the permutation of the received rows during their transfer.
"""

import torch
import torch.distributed as dist

import tdkernels
from bench.experts import permute_baseline
from bench.experts.dispatch_methods import Method
from bench.experts.tp_moe_methods import forward_backward, grouped
from tdkernels.ops.experts.grouped_gemm.dispatch import swiglu_ref

FORWARD, BOTH = "forward", "forward+backward"


# ---- NCCL and permutes ----


def add_known_sizes(s, experts):
    """Add to an operand set the sizes known to the host: the number of rows sent to and received from each rank."""
    ranks = dist.get_world_size()
    counts = torch.bincount(s.ids.flatten(), minlength=experts).view(ranks, -1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    s.sent, s.received = counts.sum(1).tolist(), theirs.sum(1).tolist()


class _Exchanged(torch.autograd.Function):
    """Asynchronous all-to-all of rows. The handle is appended to ``works``; wait for it before using the result."""

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


def layer(s, experts, add_up, gemm=grouped):
    """Compute y [T, H]."""
    ranks, works, choices = dist.get_world_size(), [], s.ids.shape[1]
    values, order = permute_baseline.sort(s.ids.flatten(), experts)
    every = torch.arange(experts, dtype=values.dtype, device=values.device)
    ends = torch.searchsorted(values, every, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    theirs = torch.empty_like(counts)
    counting = dist.all_to_all_single(theirs, counts, async_op=True)
    places = permute_baseline.inverse(order)
    recv = _Exchanged.apply(permute_baseline.Expanded.apply(s.x, order, places, choices), s.sent, s.received, works)
    counting.wait()
    by_expert, ends = _by_expert(theirs.view(ranks, -1), sum(s.received))
    by_source = permute_baseline.inverse(by_expert)
    works.pop().wait()
    rows = permute_baseline.Permuted.apply(recv, by_expert, by_source)
    out = gemm(swiglu_ref(gemm(rows, s.w_gate_up, ends), "swiglu"), s.w_down, ends)
    back = _Exchanged.apply(permute_baseline.Permuted.apply(out, by_source, by_expert), s.received, s.sent, works)
    works.pop().wait()
    return permute_baseline.WeightedSum.apply(back, s.weights, order, places, add_up)


def _by_expert(recv_counts, rows):
    """Return (permutation of rows from (source, expert) to (expert, source) order, end offset of each expert)."""
    ranks, local = recv_counts.shape
    experts = torch.arange(local, device=recv_counts.device).repeat(ranks)
    expert_of_row = experts.repeat_interleave(recv_counts.flatten(), output_size=rows)
    return permute_baseline.sort(expert_of_row, local)[1], recv_counts.sum(0).cumsum(0, dtype=torch.int32)


def _identity(outputs):
    return outputs


def _method(part, forward, **fields):
    """Return the Method of the forward, or of forward and backward."""
    if part == FORWARD:
        return Method(forward, _identity, **fields)
    return Method(lambda s: forward_backward(forward, s), _identity, **fields)


def sequence(part, experts, add_up, gemm=grouped):
    """Return the Method of the unfused baseline."""
    return _method(part, lambda s: layer(s, experts, add_up, gemm))


# ---- compute or communication alone ----


def add_alone(s, experts):
    """Add to an operand set the inputs of the grouped GEMMs alone and of the collectives alone."""
    ranks = dist.get_world_size()
    theirs = torch.empty(experts, dtype=torch.int64, device=s.ids.device)
    dist.all_to_all_single(theirs, torch.bincount(s.ids.flatten(), minlength=experts))
    s.ends = _by_expert(theirs.view(ranks, -1), sum(s.received))[1]
    s.to_send = torch.randn(sum(s.sent), s.x.shape[1], dtype=s.x.dtype, device=s.x.device)
    s.rows = torch.randn(sum(s.received), s.x.shape[1], dtype=s.x.dtype, device=s.x.device)
    s.pre = grouped(s.rows, s.w_gate_up, s.ends)
    s.h = swiglu_ref(s.pre, "swiglu")


def _gemms(s):
    return grouped(s.rows, s.w_gate_up, s.ends), grouped(s.h, s.w_down, s.ends)


def _gemms_and_gradients(s):
    dh = torch._grouped_mm(s.rows, s.w_down, offs=s.ends)
    dw_down = torch._grouped_mm(s.rows.t(), s.h, offs=s.ends)
    drows = torch._grouped_mm(s.pre, s.w_gate_up, offs=s.ends)
    dw_gate_up = torch._grouped_mm(s.pre.t(), s.rows, offs=s.ends)
    return *_gemms(s), dh, dw_down, drows, dw_gate_up


def _dispatch_and_combine(s):
    outputs = []
    for rows, sizes in ((s.to_send, (s.sent, s.received)), (s.rows, (s.received, s.sent))):
        out, work = _exchange(rows, *sizes)
        work.wait()
        outputs.append(out)
    return tuple(outputs)


ALONE = {  # {part: {name: call}}
    FORWARD: {"grouped": _gemms, "collective": _dispatch_and_combine},
    BOTH: {
        "grouped": _gemms_and_gradients,
        "collective": lambda s: (*_dispatch_and_combine(s), *_dispatch_and_combine(s)),
    },
}


# ---- tdkernels ----


def parts(part, experts, max_tokens):
    """Return the Method of ep_dispatch, group_gemm and ep_combine without overlap."""

    def forward(s):
        recv, handle = tdkernels.ep_dispatch(s.x, s.ids, s.weights, num_experts=experts, max_tokens=max_tokens)
        hidden = tdkernels.group_gemm(recv.x, s.w_gate_up, recv.splits, activation="swiglu")
        return tdkernels.ep_combine(tdkernels.group_gemm(hidden, s.w_down, recv.splits), handle)

    return _method(part, forward)


def ours(part, experts, max_tokens=None, config=None):
    """Return the Method of ep_moe."""

    def forward(s):
        return tdkernels.ep_moe(
            s.x, s.ids, s.weights, s.w_gate_up, s.w_down, num_experts=experts, max_tokens=max_tokens, config=config
        )

    return _method(part, forward, host_waits=max_tokens is None, config=config)
