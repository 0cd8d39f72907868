"""Methods of the dispatch and combine benchmarks: tdkernels, and NCCL with permutes.

The baseline "sequence" is as fast as plain torch allows (``permute_baseline``): tokens are quantized before they are
replicated, and scales and weights are sent in one message. The host waits once, for the sizes that all_to_all_single
needs; "sequence-known-splits" gets them as arguments and never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import tdkernels
from bench.experts import permute_baseline
from tdkernels.ops.experts.dispatch.kernel_payload import QUANTUM as _QUANTUM

QUANTUM = int(_QUANTUM.value)  # channels under one scale
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Method:
    """An implementation to measure.

    call:           function of one operand set
    plain:          function that converts the result of ``call`` into the form of the references
    host_waits:     whether the host waits for sizes, so that the call cannot be captured in a graph
    """

    call: Callable
    plain: Callable
    host_waits: bool = False
    config: object = None


# ---- shared by all methods ----


def quantized(x):
    """Quantize x in plain torch. Return (float8_e4m3fn [T, H], fp32 scales [T, H / 128])."""
    blocks = x.float().view(x.shape[0], -1, QUANTUM)
    scales = blocks.abs().amax(2) / _E4M3_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    return (blocks / scales.unsqueeze(2)).view(x.shape).to(torch.float8_e4m3fn), scales


def dequantized(rows, scales):
    """Return the rows in fp32."""
    if scales is None:
        return rows.float()
    return (rows.float().view(rows.shape[0], -1, QUANTUM) * scales.unsqueeze(2)).view(rows.shape)


def _rows_of(operator):
    """Return ``Method.plain`` for an operator; a dispatch returns (rows, scales, splits, weights)."""

    def dispatch_rows(outputs):
        rows, scales, splits, weights = outputs
        number = int(splits.sum())
        rows = dequantized(rows[:number], None if scales is None else scales[:number])
        return rows, splits.float(), weights[:number]

    def all_to_all_rows(outputs):
        out, splits = outputs
        return out[: int(splits.sum())].float(), splits.float()

    return {"ep_dispatch": dispatch_rows, "all_to_all": all_to_all_rows}.get(operator, lambda y: (y.float(),))


def _argsort(values, bound):
    """Return the stable argsort of integers below ``bound``."""
    return permute_baseline.sort(values, bound)[1]


def _all_to_all(rows, sent, received):
    words = permute_baseline.words(rows)
    out = words.new_empty(sum(received), words.shape[1])
    dist.all_to_all_single(out, words, received, sent)
    return out.view(rows.dtype)


# ---- NCCL and permutes ----


def add_known_sizes(case, s):
    """Add to an operand set the sizes and permutations that the baseline may know in advance."""
    ranks = dist.get_world_size()
    counts = s.counts.view(ranks, -1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    s.sizes = counts.sum(1).tolist(), theirs.sum(1).tolist()
    if case.operator in ("ep_combine", "ep_latency"):
        s.to_choices = torch.argsort(_argsort(s.ids.flatten(), case.experts))
        s.to_sources = torch.argsort(_expert_order(theirs.flatten(), sum(s.sizes[1])))


def _expert_order(recv_counts, rows):
    """Return the permutation from rows ordered by (source, expert) to rows ordered by (expert, source)."""
    ranks = dist.get_world_size()
    local = recv_counts.shape[0] // ranks
    experts = torch.arange(local, device=recv_counts.device).repeat(ranks)
    return _argsort(experts.repeat_interleave(recv_counts, output_size=rows), local)


def _sequence_dispatch(case, s, sizes=None):
    """Dispatch by NCCL. If ``sizes`` is None, the host waits for them."""
    experts, k, ranks = case.experts, case.choices, dist.get_world_size()
    ids = s.ids.flatten()
    by_expert = _argsort(ids, experts)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids.long(), torch.ones_like(ids, dtype=torch.int64))
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    if sizes is None:
        sizes = torch.stack((counts.view(ranks, -1).sum(1), theirs.view(ranks, -1).sum(1))).tolist()
    x, scales = quantized(s.x) if case.payload == "fp8" else (s.x, s.scales)
    token = by_expert // k
    extra = s.weights.flatten().index_select(0, by_expert).unsqueeze(1)
    if scales is not None:
        extra = torch.cat((extra, scales.index_select(0, token)), 1)
    rows = _all_to_all(permute_baseline.take_rows(x, token), *sizes)
    extra = _all_to_all(extra, *sizes)
    order = _expert_order(theirs, rows.shape[0])
    extra = extra.index_select(0, order)
    splits = theirs.view(ranks, -1).sum(0)
    return permute_baseline.take_rows(rows, order), None if scales is None else extra[:, 1:], splits, extra[:, 0]


def _sequence_combine(case, s, add_up):
    rows = permute_baseline.take_rows(s.expert_out[: s.rows], s.to_sources)
    choices = permute_baseline.take_rows(_all_to_all(rows, s.sizes[1], s.sizes[0]), s.to_choices)
    return add_up(choices.view(case.tokens, case.choices, -1), s.weights)


def _sequence_all_to_all(case, s, sizes=None):
    counts = s.counts
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    if sizes is None:
        sizes = torch.stack((counts, theirs)).tolist()
    return _all_to_all(s.x, *sizes), theirs


def sequences(case, sets):
    """Return {name: Method} of the baselines by NCCL and torch."""
    plain = _rows_of(case.operator)
    if case.operator in ("ep_combine", "ep_latency"):
        add_up = permute_baseline.fastest_sum(case.tokens, case.hidden, sets[0].weights)
    if case.operator == "ep_combine":  # all sizes are known from the dispatch
        return {"sequence": Method(lambda s: _sequence_combine(case, s, add_up), plain)}

    def call(s, sizes=None):
        if case.operator == "all_to_all":
            return _sequence_all_to_all(case, s, sizes)
        found = _sequence_dispatch(case, s, sizes)
        return found if case.operator == "ep_dispatch" else _sequence_combine(case, s, add_up)

    known = Method(lambda s: call(s, s.sizes), plain)
    return {"sequence": Method(call, plain, host_waits=True), "sequence-known-splits": known}


# ---- tdkernels ----

LOW_LATENCY_TOKENS = 256  # largest number of tokens per rank for which max_tokens_per_rank is measured


def ours(case, max_tokens, sets):
    """Return {name: Method} of tdkernels with the best known config."""
    with_max_tokens = ours_with(case, max_tokens, sets, None)
    methods = {"tdkernels": with_max_tokens}
    if case.operator in ("ep_dispatch", "all_to_all"):
        methods = {"tdkernels": _exact(case), "tdkernels-max-tokens": with_max_tokens}
    if case.operator in ("ep_dispatch", "ep_latency", "all_to_all") and case.tokens <= LOW_LATENCY_TOKENS:
        methods["tdkernels-direct"] = _low_latency(case, max_tokens)
    if case.operator == "ep_dispatch":
        methods["tdkernels-again"] = _reused_handle(case, sets)
    return methods


def ours_with(case, max_tokens, sets, config):
    """Return the Method with max_tokens, where the host does not wait; ``config`` None uses the best known config."""
    call = _dispatch_call(case, max_tokens, config)
    if case.operator == "all_to_all":
        call = _all_to_all_call(max_tokens, config)
    if case.operator == "ep_combine":
        call = _combine_call(case, max_tokens, sets, config)
    if case.operator == "ep_latency":
        call = _round_trip_call(case, max_tokens, config)
    return Method(call, _rows_of(case.operator), config=config or known_config(case, "static"))


def known_config(case, layout):
    """Return the config that a call without an explicit config selects."""
    operator = "ep_dispatch" if case.operator == "ep_latency" else case.operator
    sizes = case.ranks * case.tokens, case.hidden, case.experts
    if operator != "all_to_all":
        sizes += (case.choices,)
    layout += "_fp8" * (operator == "ep_dispatch" and case.payload != "bf16")
    return tdkernels.explain(operator, *sizes, layout=layout, group=dist.group.WORLD).config


def _exact(case):
    """Return the Method without max_tokens: the host waits for the number of received rows."""
    call = _all_to_all_call(None, None) if case.operator == "all_to_all" else _dispatch_call(case, None, None)
    return Method(call, _rows_of(case.operator), host_waits=True, config=known_config(case, "exact"))


def _low_latency(case, max_tokens):
    """Return the low-latency Method: with max_tokens_per_rank no counts are exchanged before the tokens are sent."""
    bounds = {"max_tokens_per_rank": case.tokens}
    if case.operator == "all_to_all":
        call = _all_to_all_call(max_tokens, None, **bounds)
    elif case.operator == "ep_latency":
        call = _round_trip_call(case, max_tokens, None, **bounds)
    else:
        call = _dispatch_call(case, max_tokens, None, **bounds)
    return Method(call, _rows_of(case.operator), config=known_config(case, "bounded"))


def _dispatch(case, s, ids, **options):
    quantize = "fp8" if case.payload == "fp8" else None
    return tdkernels.ep_dispatch(s.x, ids, s.weights, scales=s.scales, quantize=quantize, **options)


def _fields(recv):
    return recv.x, recv.scales, recv.splits, recv.topk_weights


def _dispatch_call(case, max_tokens, config, **bounds):
    options = {"num_experts": case.experts, "max_tokens": max_tokens, "config": config, **bounds}
    return lambda s: _fields(_dispatch(case, s, s.ids, **options)[0])


def _reused_handle(case, sets):
    """Return the Method that reuses the handle of an earlier dispatch: no counts are exchanged."""
    for s in sets:
        s.handle = _dispatch(case, s, s.ids, num_experts=case.experts)[1]
    return Method(lambda s: _fields(_dispatch(case, s, s.handle)[0]), _rows_of(case.operator))


def _all_to_all_call(max_tokens, config, **bounds):
    def call(s):
        return tdkernels.all_to_all(s.x, s.counts, max_tokens=max_tokens, config=config, **bounds)[:2]

    return call


def _combine_call(case, max_tokens, sets, config):
    handles = {
        id(s): tdkernels.ep_dispatch(
            s.x, s.ids, s.weights, num_experts=case.experts, max_tokens=max_tokens, config=config
        )[1]
        for s in sets
    }
    return lambda s: tdkernels.ep_combine(s.expert_out, handles[id(s)])


def _round_trip_call(case, max_tokens, config, **bounds):
    options = {"num_experts": case.experts, "max_tokens": max_tokens, "config": config, **bounds}

    def call(s):
        _, handle = _dispatch(case, s, s.ids, **options)
        return tdkernels.ep_combine(s.expert_out, handle)

    return call
