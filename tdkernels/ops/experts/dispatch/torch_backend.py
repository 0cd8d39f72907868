"""TorchRouting: all_to_all, ep_dispatch and ep_combine by torch's collectives, for ``EpConfig(method="torch")``.

What a user would write: rows in the order of their experts, ``all_to_all_single``, rows in the order of ours. It needs
no symmetric memory, so it also runs where ranks cannot reach each other's, and it is what the tuner compares with.
Every rank learns all counts first, by an all-gather for which the host waits, whether there is a max_tokens or not.
"""

import functools
import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.experts.dispatch.device_errors import TopkIds, too_many_tokens
from tdkernels.ops.experts.dispatch.kernel_payload import QUANTUM
from tdkernels.ops.experts.dispatch.routing import Routing
from tdkernels.symm.group import group_state

_E4M3_MAX = 448.0
_LEAST_MAGNITUDE = 2.0**-118  # below it 448 / magnitude would be infinite
_KNOWN = {
    torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.uint16: torch.int16,
    torch.uint32: torch.int32, torch.uint64: torch.int64,
}


@dataclass(eq=False, kw_only=True)
class TorchRouting(Routing):
    """A routing by torch's collectives. Ranks stage no tokens: ``staged`` is 0.

    Attributes:
        sent: [S] the choices that this rank sends, by the experts they go to; number t * K + j is choice j of token t
        came: [S'] where the rows that come, as they come, are put
        counts: (how many this rank sends to each rank, how many come from each)
    """

    sent: torch.Tensor
    came: torch.Tensor
    counts: tuple[list[int], list[int]]

    method = "torch"

    def dispatch(self, x, *, scales=None, weights=None, quantize=False):
        self._agree(
            "there", dtype=str(x.dtype), width=x.shape[1], quantize=quantize, weighted=weights is not None,
            scales=None if scales is None else f"{scales.dtype} {list(scales.shape[1:])}",
        )
        if quantize:
            x, scales = quantized(x)
        rows = self._there(x, x.new_empty)
        row_scales = None if scales is None else self._there(scales, scales.new_empty)
        row_weights = None if weights is None else self._weights_there(weights, weights.new_empty)
        return rows, row_scales, row_weights

    def send_dispatch(self, x, *, scales=None, weights=None, quantize=False):
        """All of the dispatch: torch's collectives have no phases here."""
        received = self.dispatch(x, scales=scales, weights=weights, quantize=quantize)
        return lambda: received

    def dispatch_gradient(self, dy, expert_rows, weights, want_dots):
        self._agree("gradient there", dtype=str(dy.dtype), width=dy.shape[1], weighted=weights is not None)
        # With a capacity some rows belong to no token, and have no part in any sum.
        rows = self._there(dy, dy.new_zeros)
        dots = None
        if want_dots:
            dots = dy.new_zeros(self.rows, dtype=torch.float32)
            dots[self.came] = (rows[self.came].float() * expert_rows[self.came].float()).sum(1)
        if weights is not None:
            row_weights = self._weights_there(weights, dy.new_zeros)
            rows = (rows.float() * row_weights[:, None]).to(dy.dtype)
        return rows, dots

    def combine(self, rows, *, weights=None, row_weights=None, row_numbers=None, config=None):
        """As ``Routing.combine``; in fp32 over the choices in order, rounded once."""
        self._agree("back", dtype=str(rows.dtype), width=rows.shape[1], numbers=row_numbers is not None)
        tokens, k = self.shape.tokens, self.shape.choices
        choices = rows.new_zeros(tokens * k, rows.shape[1])
        choices[self.sent] = self._back(rows)
        choices = choices.view(tokens, k, rows.shape[1])
        if weights is not None:  # that of a choice of no expert may be anything
            chosen = torch.zeros(tokens * k, dtype=torch.bool, device=rows.device).index_fill_(0, self.sent, True)
            weights = torch.where(chosen.view(tokens, k), weights.float(), 0.0)
        y = rows.new_zeros(tokens, rows.shape[1], dtype=torch.float32)
        for j in range(k):
            choice = choices[:, j].float()
            y += choice if weights is None else choice * weights[:, j, None]
        numbers = None
        if row_numbers is not None:
            numbers = rows.new_zeros(tokens * k, dtype=torch.float32)
            numbers[self.sent] = self._back(row_numbers.float())
            numbers = numbers.view(tokens, k)
        return y.to(rows.dtype), numbers

    def send_combine(self, rows, *, weights=None, row_weights=None, config=None):
        """All of the combine: torch's collectives have no phases here."""
        y, _ = self.combine(rows, weights=weights)
        return lambda: y

    def weighs_rows(self, config):
        return False  # the sums are made at home

    def _agree(self, way, **fields):
        """Raise ValueError on every rank unless all send the same kind of rows: torch would hang or mix them up.

        That is asked once of each kind, for the host has nothing to compare here: ranks that differ in what each of
        them has seen before are not told. ``route``, where it waits anyway, asks each time.
        """
        fields = {"way": way, **fields, "k": self.shape.choices}
        group_state(self.group).check_consensus_cached(self.shape.operator, fields)

    def _there(self, x, new):
        """What a token has, [T, …], by the rows [R, …] of its choices; ``new`` makes what nothing comes to."""
        rows = new(self.rows, *x.shape[1:], dtype=x.dtype)
        sent = _take(x, self.sent // self.shape.choices)
        _put(rows, self.came, _exchange(sent, *self.counts, self.group))
        return rows

    def _weights_there(self, weights, new):
        """Each choice's number [T, K] by rows [R], in fp32."""
        rows = new(self.rows, dtype=torch.float32)
        rows[self.came] = _exchange(weights.flatten().float()[self.sent], *self.counts, self.group)
        return rows

    def _back(self, rows):
        """What rows [R, …] have, by the choices that this rank sent."""
        to_ranks, from_ranks = self.counts
        return _exchange(rows[self.came], from_ranks, to_ranks, self.group)


def route_by_torch(plan, request):
    """The TorchRouting of a DispatchRequest by a RoutePlan whose config names this method.

    The host waits for it in any case.

    Raises:
        ValueError: on every rank, for invalid ids, for more rows than max_tokens, for more tokens of a rank than
            max_tokens_per_rank, and when the ranks disagree
        RuntimeError: while a CUDA graph is captured
    """
    shape, ids, group, x = plan.shape, request.ids, request.group, request.x
    operator, num_experts, max_tokens = shape.operator, shape.num_experts, shape.max_tokens
    if ids.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f'{operator}: method "torch" waits for the host, which a CUDA graph cannot capture')
    fields = {
        "num_experts": num_experts, "k": shape.choices, "max_tokens": max_tokens,
        "max_tokens_per_rank": shape.max_tokens_per_rank, "dtype": str(x.dtype), "width": x.shape[1],
        "quantize": request.quantize, "config": as_argument(plan.config),
    }
    experts, wrong = _experts_of(ids, num_experts)
    if request.error_code is not None:
        wrong = torch.where(request.error_code != 0, request.error_code.long(), wrong)
    counts, lines, codes = _exchange_counts(shape, fields, experts, wrong, group)
    for rank, code in enumerate(codes):
        if code < 0:
            raise too_many_tokens(operator, rank, -code)
        if code:
            raise (request.operand or TopkIds(ids, num_experts)).refused(operator, rank, group.rank())
    most = int(counts.sum(0).view(shape.world_size, -1).sum(1).max())
    if max_tokens is not None and most > max_tokens:
        words = f"max_tokens={max_tokens} is too small: a rank receives {most} rows; nothing was sent"
        raise ValueError(f"{operator}: {words}")
    return _routing_of(shape, group, plan.config, plan.config_is_given, experts, counts, lines)


def routing_by_torch(counted, ids, config):
    """The TorchRouting of ids that kernels have counted without max_tokens, with a config that no call has named.

    The counts are those of all ranks already.
    """
    shape = counted.shape
    columns = shape.num_experts + shape.world_size + 2
    lines = counted.tables[: shape.world_size * columns].view(shape.world_size, columns)[:, : shape.num_experts].long()
    experts, _ = _experts_of(ids, shape.num_experts)
    return _routing_of(shape, counted.group, config, False, experts, lines.cpu(), lines)


def _exchange_counts(shape, fields, experts, wrong, group):
    """(counts [W, E] of all ranks on the host, the same on the device, each rank's error code)

    Raises ValueError on every rank when the ranks disagree about the ``fields`` of a call.
    """
    state, num_experts = group_state(group), shape.num_experts
    state.check_consensus_cached(shape.operator, fields)
    lines = torch.zeros(num_experts + 3, dtype=torch.int64, device=experts.device)
    lines.scatter_add_(0, experts, torch.ones_like(experts))
    lines[-2], lines[-1] = wrong, _digest(str(fields))
    lines = all_gather_rows(lines[None], group)
    told = lines.cpu()  # the host waits
    if (told[:, -1] != told[0, -1]).any():
        state.check_consensus(shape.operator, fields)  # a rank whose own fields are equal hears here that others differ
    return told[:, :num_experts], lines[:, :num_experts], told[:, -2].tolist()


def _experts_of(ids, num_experts):
    """([T * K] the expert of each choice, ``num_experts`` for none, whether any id is out of range)."""
    ids = ids.flatten().long()
    wrong = ((ids < -1) | (ids >= num_experts)).any().long()
    return torch.where((ids < 0) | (ids >= num_experts), num_experts, ids), wrong


def _routing_of(shape, group, config, config_is_given, experts, counts, lines):
    """The TorchRouting of all ranks' counts [W, E], on the host and on the device."""
    world_size, rank = group.size(), dist.get_rank(group)
    table = counts.view(world_size, world_size, -1)  # from a rank to a rank, of each of its experts
    to_ranks, from_ranks = table[rank].sum(1).tolist(), table[:, rank].sum(1).tolist()
    ours, rows = lines.reshape(world_size, world_size, -1)[:, rank], sum(from_ranks)
    came = torch.arange(rows, device=experts.device) if shape.by_source else _by_expert(ours, rows)
    return TorchRouting(
        shape=shape, group=group, config=config, config_is_given=config_is_given,
        rows=rows if shape.max_tokens is None else shape.max_tokens, staged=0,
        splits=(ours if shape.by_source else ours.sum(0)).to(torch.int32),
        sent=torch.argsort(experts, stable=True)[: sum(to_ranks)], came=came, counts=(to_ranks, from_ranks),
    )


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
