"""The ways to dispatch and combine that are measured: ours, and NCCL with the permutes that a user would write.

The sequence is as quick as plain torch makes it (``permute_baseline``): tokens are quantized before they are
multiplied, and what goes beside the rows goes in one piece. The host waits once, for the sizes that
all_to_all_single needs; "sequence-known-splits" is told them and never waits.
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
    """``call``: of one set of operands. ``plain``: what it returns, as the references have it: see ``ep._references``.

    host_waits: for sizes, so that it cannot be captured in a graph
    """

    call: Callable
    plain: Callable
    host_waits: bool = False
    config: object = None


# ---- what all of them need ----


def quantized(x):
    """(float8_e4m3fn [T, H], fp32 [T, H / 128]) in plain torch."""
    parts = x.float().view(x.shape[0], -1, QUANTUM)
    scales = parts.abs().amax(2) / _E4M3_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    return (parts / scales.unsqueeze(2)).view(x.shape).to(torch.float8_e4m3fn), scales


def dequantized(rows, scales):
    """In fp32."""
    if scales is None:
        return rows.float()
    return (rows.float().view(rows.shape[0], -1, QUANTUM) * scales.unsqueeze(2)).view(rows.shape)


def _rows_of(operator):
    """``Method.plain`` of a dispatch that returns (rows, scales, splits, weights), of a combine, of an all-to-all."""

    def of_dispatch(outputs):
        rows, scales, splits, weights = outputs
        number = int(splits.sum())
        rows = dequantized(rows[:number], None if scales is None else scales[:number])
        return rows, splits.float(), weights[:number]

    def of_all_to_all(outputs):
        out, splits = outputs
        return out[: int(splits.sum())].float(), splits.float()

    return {"ep_dispatch": of_dispatch, "all_to_all": of_all_to_all}.get(operator, lambda y: (y.float(),))


def _sorted(numbers, bound):
    """The stable order of integers below a bound."""
    return permute_baseline.sort(numbers, bound)[1]


def _all_to_all(rows, sent, received):
    words = permute_baseline.words(rows)
    out = words.new_empty(sum(received), words.shape[1])
    dist.all_to_all_single(out, words, received, sent)
    return out.view(rows.dtype)


# ---- NCCL and permutes ----


def add_known(case, s):
    """Add to a set of operands what a sequence may know of its routing beforehand."""
    ranks = dist.get_world_size()
    counts = s.counts.view(ranks, -1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    s.sizes = counts.sum(1).tolist(), theirs.sum(1).tolist()
    if case.operator in ("ep_combine", "ep_latency"):
        s.to_choices = torch.argsort(_sorted(s.ids.flatten(), case.experts))
        s.to_sources = torch.argsort(_order_of(theirs.flatten(), sum(s.sizes[1])))


def _order_of(their_counts, rows):
    """Rows that came by source and expert, as they are by expert and source."""
    ranks = dist.get_world_size()
    local = their_counts.shape[0] // ranks
    experts = torch.arange(local, device=their_counts.device).repeat(ranks)
    return _sorted(experts.repeat_interleave(their_counts, output_size=rows), local)


def _sequence_dispatch(case, s, sizes=None):
    """Without ``sizes`` the host waits for them."""
    experts, k, ranks = case.experts, case.choices, dist.get_world_size()
    ids = s.ids.flatten()
    by_expert = _sorted(ids, experts)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids.long(), torch.ones_like(ids, dtype=torch.int64))
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    if sizes is None:
        sizes = torch.stack((counts.view(ranks, -1).sum(1), theirs.view(ranks, -1).sum(1))).tolist()
    x, scales = quantized(s.x) if case.payload == "fp8" else (s.x, s.scales)
    token = by_expert // k
    beside = s.weights.flatten().index_select(0, by_expert).unsqueeze(1)
    if scales is not None:
        beside = torch.cat((beside, scales.index_select(0, token)), 1)
    rows = _all_to_all(permute_baseline.taken(x, token), *sizes)
    beside = _all_to_all(beside, *sizes)
    order = _order_of(theirs, rows.shape[0])
    beside = beside.index_select(0, order)
    splits = theirs.view(ranks, -1).sum(0)
    return permute_baseline.taken(rows, order), None if scales is None else beside[:, 1:], splits, beside[:, 0]


def _sequence_combine(case, s, add_up):
    rows = permute_baseline.taken(s.expert_out[: s.rows], s.to_sources)
    choices = permute_baseline.taken(_all_to_all(rows, s.sizes[1], s.sizes[0]), s.to_choices)
    return add_up(choices.view(case.tokens, case.choices, -1), s.weights)


def _sequence_all_to_all(case, s, sizes=None):
    counts = s.counts
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    if sizes is None:
        sizes = torch.stack((counts, theirs)).tolist()
    return _all_to_all(s.x, *sizes), theirs


def sequences(case, sets):
    """{name: Method} of NCCL and torch."""
    plain = _rows_of(case.operator)
    if case.operator in ("ep_combine", "ep_latency"):
        add_up = permute_baseline.quicker_sum(case.tokens, case.hidden, sets[0].weights)
    if case.operator == "ep_combine":  # all sizes are known since the dispatch
        return {"sequence": Method(lambda s: _sequence_combine(case, s, add_up), plain)}

    def call(s, sizes=None):
        if case.operator == "all_to_all":
            return _sequence_all_to_all(case, s, sizes)
        found = _sequence_dispatch(case, s, sizes)
        return found if case.operator == "ep_dispatch" else _sequence_combine(case, s, add_up)

    known = Method(lambda s: call(s, s.sizes), plain)
    return {"sequence": Method(call, plain, host_waits=True), "sequence-known-splits": known}


# ---- ours ----

MOST_DIRECT = 256  # tokens of a rank up to which a bound on them, known to all, is tried


def ours(case, room, sets):
    """{name: Method} of ours as it comes, with the best config that is known; ``room``: max_tokens."""
    with_room = ours_with(case, room, sets, None)
    methods = {"tdkernels": with_room}
    if case.operator in ("ep_dispatch", "all_to_all"):
        methods = {"tdkernels": _ours_without_room(case), "tdkernels-max-tokens": with_room}
    if case.operator in ("ep_dispatch", "ep_latency", "all_to_all") and case.tokens <= MOST_DIRECT:
        methods["tdkernels-direct"] = _ours_direct(case, room)
    if case.operator == "ep_dispatch":
        methods["tdkernels-again"] = _ours_again(case, sets)
    return methods


def ours_with(case, room, sets, config):
    """Ours in a config, or None for the best known, with max_tokens, so that the host does not wait."""
    call = _dispatch_call(case, room, config)
    if case.operator == "all_to_all":
        call = _all_to_all_call(room, config)
    if case.operator == "ep_combine":
        call = _combine_call(case, room, sets, config)
    if case.operator == "ep_latency":
        call = _there_and_back_call(case, room, config)
    return Method(call, _rows_of(case.operator), config=config or known_config(case, "static"))


def known_config(case, layout):
    """What a call without a config runs with."""
    operator = "ep_dispatch" if case.operator == "ep_latency" else case.operator
    sizes = case.ranks * case.tokens, case.hidden, case.experts
    if operator != "all_to_all":
        sizes += (case.choices,)
    layout += "_fp8" * (operator == "ep_dispatch" and case.payload != "bf16")
    return tdkernels.explain(operator, *sizes, layout=layout, group=dist.group.WORLD).config


def _ours_without_room(case):
    call = _all_to_all_call(None, None) if case.operator == "all_to_all" else _dispatch_call(case, None, None)
    return Method(call, _rows_of(case.operator), host_waits=True, config=known_config(case, "exact"))


def _ours_direct(case, room):
    """Of few tokens: with a bound on those of each rank, so that nothing is counted before they leave."""
    bounds = {"max_tokens_per_rank": case.tokens}
    if case.operator == "all_to_all":
        call = _all_to_all_call(room, None, **bounds)
    elif case.operator == "ep_latency":
        call = _there_and_back_call(case, room, None, **bounds)
    else:
        call = _dispatch_call(case, room, None, **bounds)
    return Method(call, _rows_of(case.operator), config=known_config(case, "bounded"))


def _dispatch(case, s, ids, **how):
    quantize = "fp8" if case.payload == "fp8" else None
    return tdkernels.ep_dispatch(s.x, ids, s.weights, scales=s.scales, quantize=quantize, **how)


def _fields(recv):
    return recv.x, recv.scales, recv.splits, recv.topk_weights


def _dispatch_call(case, room, config, **bounds):
    how = {"num_experts": case.experts, "max_tokens": room, "config": config, **bounds}
    return lambda s: _fields(_dispatch(case, s, s.ids, **how)[0])


def _ours_again(case, sets):
    """By the handle of a dispatch before: nothing is counted or exchanged."""
    for s in sets:
        s.handle = _dispatch(case, s, s.ids, num_experts=case.experts)[1]
    return Method(lambda s: _fields(_dispatch(case, s, s.handle)[0]), _rows_of(case.operator))


def _all_to_all_call(room, config, **bounds):
    def call(s):
        return tdkernels.all_to_all(s.x, s.counts, max_tokens=room, config=config, **bounds)[:2]

    return call


def _combine_call(case, room, sets, config):
    handles = {
        id(s): tdkernels.ep_dispatch(
            s.x, s.ids, s.weights, num_experts=case.experts, max_tokens=room, config=config
        )[1]
        for s in sets
    }
    return lambda s: tdkernels.ep_combine(s.expert_out, handles[id(s)])


def _there_and_back_call(case, room, config, **bounds):
    how = {"num_experts": case.experts, "max_tokens": room, "config": config, **bounds}

    def call(s):
        _, handle = _dispatch(case, s, s.ids, **how)
        return tdkernels.ep_combine(s.expert_out, handle)

    return call
