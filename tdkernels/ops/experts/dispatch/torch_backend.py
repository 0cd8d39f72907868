"""all_to_all, ep_dispatch and ep_combine by torch's collectives, for ``EpConfig(method="torch")``.

What a user would write: rows in the order of their experts, ``all_to_all_single``, rows in the order of ours. It needs
no symmetric memory, so it also runs where ranks cannot reach each other's, and it is what the tuner compares with.
Every rank learns all counts first, by an all-gather for which the host waits, whether there is a max_tokens or not.

A ``Routing`` that was found here has ``by_torch``, and every call with it comes here, gradients included.
"""

import functools
import hashlib
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.experts.dispatch.device_errors import TopkIds, too_many_tokens
from tdkernels.ops.experts.dispatch.kernel_dispatch import QUANTUM
from tdkernels.ops.experts.dispatch.routing import Routing
from tdkernels.symm.group import group_state

_E4M3_MAX = 448.0
_LEAST_MAGNITUDE = 2.0**-118  # below it 448 / magnitude would be infinite
_KNOWN = {
    torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.uint16: torch.int16,
    torch.uint32: torch.int32, torch.uint64: torch.int64,
}


@dataclass
class ByTorch:
    """How rows go.

    sent:    [S] the choices that we send, by the experts they go to; number t * K + j is choice j of token t
    came:    [S'] where the rows that come, as they come, are put
    counts:  (how many we send to each rank, how many come from each)
    """

    sent: torch.Tensor
    came: torch.Tensor
    counts: tuple[list[int], list[int]]


def route(
    operator, ids, num_experts, group, config, x, *, max_tokens=None, by_source=False, bad=None,
    max_tokens_per_rank=None, quantize=None, given=None,
):
    """The Routing of ids [T, K] of x, as ``ep_routing.route``; the host waits for it in any case.

    Raises:   ValueError on every rank, for wrong ids, for more rows than ``max_tokens``, for more tokens of a rank than
              ``max_tokens_per_rank``, and when the ranks disagree; RuntimeError while a CUDA graph is captured
    """
    k, world_size, state = ids.shape[1], group.size(), group_state(group)
    if ids.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f'{operator}: method "torch" waits for the host, which a CUDA graph cannot capture')
    fields = {
        "num_experts": num_experts, "k": k, "max_tokens": max_tokens, "max_tokens_per_rank": max_tokens_per_rank,
        "dtype": str(x.dtype), "width": x.shape[1], "quantize": quantize, "config": as_argument(config),
    }
    state.agree_once(operator, fields)
    experts, wrong = _experts_of(ids, num_experts)
    if bad is not None:
        wrong = torch.where(bad != 0, bad.long(), wrong)
    lines = torch.zeros(num_experts + 3, dtype=torch.int64, device=ids.device)
    lines.scatter_add_(0, experts, torch.ones_like(experts))
    lines[-2], lines[-1] = wrong, _digest(str(fields))
    lines = all_gather_rows(lines[None], group)
    told = lines.cpu()  # the host waits
    if (told[:, -1] != told[0, -1]).any():
        state.agree(operator, fields)  # who has known its own all along hears here that others differ
    told, lines, wrong = told[:, :num_experts], lines[:, :num_experts], told[:, -2].tolist()
    for rank, number in enumerate(wrong):
        if number < 0:
            raise too_many_tokens(operator, rank, -number)
        if number:
            raise (given or TopkIds(ids, num_experts)).refused(operator, rank, group.rank())
    most = int(told.sum(0).view(world_size, -1).sum(1).max())
    if max_tokens is not None and most > max_tokens:
        words = f"max_tokens={max_tokens} is too small: a rank receives {most} rows; nothing was sent"
        raise ValueError(f"{operator}: {words}")
    by_torch, splits, rows = _ways(experts, told, lines, group, by_source)
    return Routing(
        group, config, operator, ids.shape[0], k, num_experts, max_tokens, rows if max_tokens is None else max_tokens,
        staged=0, most_staged=0, tables=splits, splits=splits, most_tokens=max_tokens_per_rank, by_torch=by_torch,
    )


def routed(routing, ids, by_source=False):
    """The same of a Routing that our kernels have found without ``max_tokens``: its counts are those of all ranks."""
    world_size, num_experts = routing.world_size, routing.num_experts
    columns = num_experts + world_size + 2
    lines = routing.tables[: world_size * columns].view(world_size, columns)[:, :num_experts].long()
    experts, _ = _experts_of(ids, num_experts)
    by_torch, splits, _ = _ways(experts, lines.cpu(), lines, routing.group, by_source)
    return replace(routing, staged=0, most_staged=0, tables=splits, splits=splits, by_torch=by_torch)


def _experts_of(ids, num_experts):
    """([T * K] the expert of each choice, ``num_experts`` for none, whether any id is out of range)."""
    ids = ids.flatten().long()
    wrong = ((ids < -1) | (ids >= num_experts)).any().long()
    return torch.where((ids < 0) | (ids >= num_experts), num_experts, ids), wrong


def _ways(experts, told, lines, group, by_source):
    """(ByTorch, splits, how many rows come) of all ranks' counts [W, E], on the host and on the device."""
    world_size, rank = group.size(), dist.get_rank(group)
    table = told.view(world_size, world_size, -1)  # from a rank to a rank, of each of its experts
    to_ranks, from_ranks = table[rank].sum(1).tolist(), table[:, rank].sum(1).tolist()
    ours, rows = lines.reshape(world_size, world_size, -1)[:, rank], sum(from_ranks)
    came = torch.arange(rows, device=experts.device) if by_source else _by_expert(ours, rows)
    sent = torch.argsort(experts, stable=True)[: sum(to_ranks)]
    return ByTorch(sent, came, (to_ranks, from_ranks)), (ours if by_source else ours.sum(0)).to(torch.int32), rows


@functools.lru_cache(4096)
def _digest(text):
    """A number of 63 bits that differs where a text does."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _by_expert(counts, rows):
    """[rows] where rows, which come by source and within it by expert, lie by expert; counts [W, E / W]."""
    expert = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    order = torch.argsort(expert.repeat_interleave(counts.flatten(), output_size=rows), stable=True)
    came = torch.empty_like(order)
    came[order] = torch.arange(rows, device=counts.device)
    return came


def dispatch(routing, x, *, scales=None, weights=None, quantize=False):
    """x [T, H] of each rank as rows [R, H]; returns (rows, scales [R, S] or None, weights [R] or None)."""
    _agree(
        routing, "there", dtype=str(x.dtype), width=x.shape[1], quantize=quantize, weighted=weights is not None,
        scales=None if scales is None else f"{scales.dtype} {list(scales.shape[1:])}",
    )
    if quantize:
        x, scales = quantized(x)
    rows = _there(routing, x, x.new_empty)
    row_scales = None if scales is None else _there(routing, scales, scales.new_empty)
    row_weights = None
    if weights is not None:
        row_weights = _weights_there(routing, weights, weights.new_empty)
    return rows, row_scales, row_weights


def dispatch_gradient(routing, dy, expert_rows, weights, want_dots):
    """(gradient of the rows [R, H], of their weights [R] or None) of a sum of rows, times ``weights`` [T, K] or 1."""
    _agree(routing, "gradient there", dtype=str(dy.dtype), width=dy.shape[1], weighted=weights is not None)
    # With a capacity some rows belong to no token, and have no part in any sum.
    rows = _there(routing, dy, dy.new_zeros)
    dots = None
    if want_dots:
        came = routing.by_torch.came
        dots = dy.new_zeros(routing.rows, dtype=torch.float32)
        dots[came] = (rows[came].float() * expert_rows[came].float()).sum(1)
    if weights is not None:
        row_weights = _weights_there(routing, weights, dy.new_zeros)
        rows = (rows.float() * row_weights[:, None]).to(dy.dtype)
    return rows, dots


def combine(routing, rows, *, weights=None, row_numbers=None):
    """rows [R, H] as y [T, H], and numbers [T, K] of ``row_numbers`` [R]; as ``ep_launch.combine``.

    In fp32 over the choices in order, rounded once.
    """
    _agree(routing, "back", dtype=str(rows.dtype), width=rows.shape[1], numbers=row_numbers is not None)
    sent, k = routing.by_torch.sent, routing.choices
    choices = rows.new_zeros(routing.tokens * k, rows.shape[1])
    choices[sent] = _back(routing, rows)
    choices = choices.view(routing.tokens, k, rows.shape[1])
    if weights is not None:  # that of a choice of no expert may be anything
        chosen = torch.zeros(routing.tokens * k, dtype=torch.bool, device=rows.device).index_fill_(0, sent, True)
        weights = torch.where(chosen.view(routing.tokens, k), weights.float(), 0.0)
    y = rows.new_zeros(routing.tokens, rows.shape[1], dtype=torch.float32)
    for j in range(k):
        choice = choices[:, j].float()
        y += choice if weights is None else choice * weights[:, j, None]
    numbers = None
    if row_numbers is not None:
        numbers = rows.new_zeros(routing.tokens * k, dtype=torch.float32)
        numbers[sent] = _back(routing, row_numbers.float())
        numbers = numbers.view(routing.tokens, k)
    return y.to(rows.dtype), numbers


def _agree(routing, what, **fields):
    """Raise ValueError on every rank unless all of them send the same kind of rows: torch would hang or mix them up.

    That is asked once of each kind, for the host has nothing to compare here: ranks that differ in what each of them
    has seen before are not told. ``route``, where it waits anyway, asks each time.
    """
    group_state(routing.group).agree_once(routing.operator, {"way": what, **fields, "k": routing.choices})


def quantized(x):
    """(codes, scales) of rows [T, H] in float8_e4m3fn, to the bit as ``ep_dispatch_kernel`` makes them."""
    width = x.shape[1]
    quanta = torch.nn.functional.pad(x.float(), (0, -width % QUANTUM.value)).unflatten(1, (-1, QUANTUM.value))
    most = torch.where(quanta.isnan(), 0.0, quanta).abs().amax(2)
    most = torch.where(most > 0, most.clamp(min=_LEAST_MAGNITUDE), _E4M3_MAX)
    largest = torch.full_like(most, _E4M3_MAX)  # a tensor: a GPU would multiply by the reciprocal of a number
    codes = (quanta * (largest / most)[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :width], most / largest


# ---- on the wire ----


def _there(routing, x, new):
    """What a token has, [T, …], by the rows [R, …] of its choices; ``new`` makes what nothing comes to."""
    ways = routing.by_torch
    rows = new(routing.rows, *x.shape[1:], dtype=x.dtype)
    _put(rows, ways.came, _exchange(_take(x, ways.sent // routing.choices), *ways.counts, routing.group))
    return rows


def _weights_there(routing, weights, new):
    """Each choice's number [T, K] by rows [R], in fp32."""
    ways = routing.by_torch
    rows = new(routing.rows, dtype=torch.float32)
    rows[ways.came] = _exchange(weights.flatten().float()[ways.sent], *ways.counts, routing.group)
    return rows


def _back(routing, rows):
    """What rows [R, …] have, by the choices that we sent."""
    ways = routing.by_torch
    to_ranks, from_ranks = ways.counts
    return _exchange(rows[ways.came], from_ranks, to_ranks, routing.group)


def _exchange(rows, sent, received, group):
    """Rows to ranks, ``sent`` to each, as bytes: no backend knows all dtypes."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    if rows.shape[1:].numel():  # the same on all ranks
        dist.all_to_all_single(_as_bytes(out), _as_bytes(rows), received, sent, group=group)
    return out


def _take(x, numbers):
    """Rows of x [T, …], whatever its dtype."""
    return _as_known(x)[numbers].view(x.dtype)


def _put(rows, numbers, values):
    """Let rows [R, …] have values, whatever their dtype."""
    _as_known(rows)[numbers] = _as_known(values)


def _as_known(x):
    """The same bits in a dtype that torch takes rows of."""
    return x.view(_KNOWN.get(x.dtype, x.dtype))


def _as_bytes(rows):
    """[R, …] as [R, bytes of a row]."""
    return rows.reshape(rows.shape[0], rows.shape[1:].numel()).contiguous().view(torch.uint8)
