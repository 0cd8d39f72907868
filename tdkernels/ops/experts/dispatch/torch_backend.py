"""TorchRouting: the torch backend of all_to_all, ep_dispatch and ep_combine, for ``EpConfig(method="torch")``.

It sorts the rows by expert, calls ``all_to_all_single``, and sorts the received rows by local expert. It needs no
symmetric memory, so it also runs if ranks cannot access each other's memory, and it is the baseline of the tuner. All
ranks exchange their counts first with an all-gather. The host waits for it, with max_tokens too.
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.experts.dispatch.device_errors import TopkIds, too_many_tokens
from tdkernels.ops.experts.dispatch.kernel_payload import QUANTUM
from tdkernels.ops.experts.dispatch.routing import Routing
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.counted import CountedRouting
    from tdkernels.ops.experts.dispatch.request import DispatchRequest, RoutePlan

_E4M3_MAX = 448.0
_LEAST_MAGNITUDE = 2.0**-118  # below it 448 / magnitude would be infinite
_INDEXABLE = {  # dtypes that torch cannot index -> dtypes of the same size that it can
    torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.uint16: torch.int16,
    torch.uint32: torch.int32, torch.uint64: torch.int64,
}


@dataclass(eq=False, kw_only=True)
class TorchRouting(Routing):
    """A routing for torch's collectives. Ranks stage no tokens: ``staged`` is 0.

    Attributes:
        sent: The assignments that this rank sends, [S], sorted by expert. Assignment t * K + j is the j-th of token t.
        recv_rows: Destination row of each received row, [S'], in the order of arrival.
        counts: (number of rows that this rank sends to each rank, number that it receives from each rank).
    """

    sent: torch.Tensor
    recv_rows: torch.Tensor
    counts: tuple[list[int], list[int]]

    method = "torch"

    def dispatch(self, x, *, scales=None, weights=None, quantize=False):
        self._agree(
            "there", dtype=str(x.dtype), width=x.shape[1], quantize=quantize, weighted=weights is not None,
            scales=None if scales is None else f"{scales.dtype} {list(scales.shape[1:])}",
        )
        if quantize:
            x, scales = quantized(x)
        rows = self._send_rows(x, x.new_empty)
        row_scales = None if scales is None else self._send_rows(scales, scales.new_empty)
        row_weights = None if weights is None else self._send_weights(weights, weights.new_empty)
        return rows, row_scales, row_weights

    def send_dispatch(self, x, *, scales=None, weights=None, quantize=False):
        """Run the whole dispatch. Torch's collectives are not split into phases here."""
        received = self.dispatch(x, scales=scales, weights=weights, quantize=quantize)
        return lambda: received

    def dispatch_gradient(self, dy, expert_rows, weights, want_dots):
        self._agree("gradient there", dtype=str(dy.dtype), width=dy.shape[1], weighted=weights is not None)
        # With max_tokens some rows belong to no token. They contribute to no sum, so their gradients are 0.
        rows = self._send_rows(dy, dy.new_zeros)
        dots = None
        if want_dots:
            dots = dy.new_zeros(self.rows, dtype=torch.float32)
            dots[self.recv_rows] = (rows[self.recv_rows].float() * expert_rows[self.recv_rows].float()).sum(1)
        if weights is not None:
            row_weights = self._send_weights(weights, dy.new_zeros)
            rows = (rows.float() * row_weights[:, None]).to(dy.dtype)
        return rows, dots

    def combine(self, rows, *, weights=None, row_weights=None, row_numbers=None, config=None):
        """Do the same as ``Routing.combine``: sum in fp32 over the assignments in order, and round once."""
        self._agree("back", dtype=str(rows.dtype), width=rows.shape[1], numbers=row_numbers is not None)
        tokens, k = self.shape.tokens, self.shape.choices
        choices = rows.new_zeros(tokens * k, rows.shape[1])
        choices[self.sent] = self._return_rows(rows)
        choices = choices.view(tokens, k, rows.shape[1])
        if weights is not None:  # the weight of a dropped assignment may be NaN
            chosen = torch.zeros(tokens * k, dtype=torch.bool, device=rows.device).index_fill_(0, self.sent, True)
            weights = torch.where(chosen.view(tokens, k), weights.float(), 0.0)
        y = rows.new_zeros(tokens, rows.shape[1], dtype=torch.float32)
        for j in range(k):
            choice = choices[:, j].float()
            y += choice if weights is None else choice * weights[:, j, None]
        numbers = None
        if row_numbers is not None:
            numbers = rows.new_zeros(tokens * k, dtype=torch.float32)
            numbers[self.sent] = self._return_rows(row_numbers.float())
            numbers = numbers.view(tokens, k)
        return y.to(rows.dtype), numbers

    def send_combine(self, rows, *, weights=None, row_weights=None, config=None):
        """Run the whole combine. Torch's collectives are not split into phases here."""
        y, _ = self.combine(rows, weights=weights)
        return lambda: y

    def weighs_rows(self, config):
        return False  # the tokens' ranks compute the sums

    def _agree(self, way, **fields):
        """Raise ValueError on every rank unless all send the same kind of rows. Torch would hang or mix up the rows.

        The consensus check is cached: it runs once for each kind of rows, because the host does not wait here. Later
        calls with kinds that are known on every rank but differ between ranks are not detected. ``route_by_torch``,
        where the host waits anyway, checks every call.
        """
        fields = {"way": way, **fields, "k": self.shape.choices}
        group_state(self.group).check_consensus_cached(self.shape.operator, fields)

    def _send_rows(self, x, new):
        """Send x [T, …] to the rows [R, …] of its assignments. ``new`` allocates the rows."""
        rows = new(self.rows, *x.shape[1:], dtype=x.dtype)
        sent = _take(x, self.sent // self.shape.choices)
        _put(rows, self.recv_rows, _exchange(sent, *self.counts, self.group))
        return rows

    def _send_weights(self, weights, new):
        """Send a number for each assignment, [T, K], to its row; return [R] in fp32."""
        rows = new(self.rows, dtype=torch.float32)
        rows[self.recv_rows] = _exchange(weights.flatten().float()[self.sent], *self.counts, self.group)
        return rows

    def _return_rows(self, rows):
        """Send rows [R, …] back; return them in the order of the assignments ``sent``."""
        to_ranks, from_ranks = self.counts
        return _exchange(rows[self.recv_rows], from_ranks, to_ranks, self.group)


def route_by_torch(plan: "RoutePlan", request: "DispatchRequest") -> TorchRouting:
    """Return the TorchRouting of a request whose plan has a config with this method. The host always waits.

    Raises:
        ValueError: On every rank: if ids are invalid, if there are more rows than max_tokens, if a rank has more tokens
            than max_tokens_per_rank, or if the ranks disagree.
        RuntimeError: If a CUDA graph is captured.
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


def routing_by_torch(counted: "CountedRouting", ids: torch.Tensor, config: "EpConfig | None") -> TorchRouting:
    """Return the TorchRouting of ids that kernels have counted without max_tokens, with a selected config.

    The tables of ``counted`` have the counts of all ranks, so nothing is exchanged again.
    """
    shape = counted.shape
    columns = shape.num_experts + shape.world_size + 2
    lines = counted.tables[: shape.world_size * columns].view(shape.world_size, columns)[:, : shape.num_experts].long()
    experts, _ = _experts_of(ids, shape.num_experts)
    return _routing_of(shape, counted.group, config, False, experts, lines.cpu(), lines)


def _exchange_counts(shape, fields, experts, wrong, group):
    """Return (counts [W, E] of all ranks on the host, the same on the device, error code of each rank).

    Raise ValueError on every rank if the ``fields`` of the call differ between the ranks.
    """
    state, num_experts = group_state(group), shape.num_experts
    state.check_consensus_cached(shape.operator, fields)
    lines = torch.zeros(num_experts + 3, dtype=torch.int64, device=experts.device)
    lines.scatter_add_(0, experts, torch.ones_like(experts))
    lines[-2], lines[-1] = wrong, _digest(str(fields))
    lines = all_gather_rows(lines[None], group)
    told = lines.cpu()  # the host waits
    if (told[:, -1] != told[0, -1]).any():
        state.check_consensus(shape.operator, fields)  # raises on every rank
    return told[:, :num_experts], lines[:, :num_experts], told[:, -2].tolist()


def _experts_of(ids, num_experts):
    """Return (expert of each assignment [T * K], ``num_experts`` if dropped; whether any id is out of range)."""
    ids = ids.flatten().long()
    wrong = ((ids < -1) | (ids >= num_experts)).any().long()
    return torch.where((ids < 0) | (ids >= num_experts), num_experts, ids), wrong


def _routing_of(shape, group, config, config_is_given, experts, counts, lines):
    """Return the TorchRouting for the counts [W, E] of all ranks: ``counts`` on the host, ``lines`` on the device."""
    world_size, rank = group.size(), dist.get_rank(group)
    table = counts.view(world_size, world_size, -1)  # [source, destination, local expert]
    to_ranks, from_ranks = table[rank].sum(1).tolist(), table[:, rank].sum(1).tolist()
    ours, rows = lines.reshape(world_size, world_size, -1)[:, rank], sum(from_ranks)
    recv_rows = torch.arange(rows, device=experts.device) if shape.by_source else _by_expert(ours, rows)
    return TorchRouting(
        shape=shape, group=group, config=config, config_is_given=config_is_given,
        rows=rows if shape.max_tokens is None else shape.max_tokens, staged=0,
        splits=(ours if shape.by_source else ours.sum(0)).to(torch.int32),
        sent=torch.argsort(experts, stable=True)[: sum(to_ranks)], recv_rows=recv_rows, counts=(to_ranks, from_ranks),
    )


@functools.lru_cache(4096)
def _digest(text):
    """Return a 63-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _by_expert(counts, rows):
    """Return the destination [rows] of rows that arrive by source, then expert, and are sorted by expert.

    ``counts`` is [W, E / W].
    """
    expert = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    order = torch.argsort(expert.repeat_interleave(counts.flatten(), output_size=rows), stable=True)
    recv_rows = torch.empty_like(order)
    recv_rows[order] = torch.arange(rows, device=counts.device)
    return recv_rows


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [T, H] to float8_e4m3fn. The result is bitwise equal to that of ``ep_dispatch_kernel``.

    Returns:
        (codes [T, H], scales [T, ceil(H / 128)] fp32).
    """
    width = x.shape[1]
    quanta = torch.nn.functional.pad(x.float(), (0, -width % QUANTUM.value)).unflatten(1, (-1, QUANTUM.value))
    most = torch.where(quanta.isnan(), 0.0, quanta).abs().amax(2)
    most = torch.where(most > 0, most.clamp(min=_LEAST_MAGNITUDE), _E4M3_MAX)
    largest = torch.full_like(most, _E4M3_MAX)  # a tensor: with a scalar, torch multiplies by the reciprocal on a GPU
    codes = (quanta * (largest / most)[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :width], most / largest


# ---- on the wire ----


def _exchange(rows, sent, received, group):
    """Exchange rows as bytes, ``sent`` to each rank, because no backend supports all dtypes."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    if rows.shape[1:].numel():  # the same condition on all ranks
        dist.all_to_all_single(_as_bytes(out), _as_bytes(rows), received, sent, group=group)
    return out


def _take(x, numbers):
    """Return rows of x [T, …] of any dtype."""
    return _as_indexable(x)[numbers].view(x.dtype)


def _put(rows, numbers, values):
    """Store values in rows [R, …] of any dtype."""
    _as_indexable(rows)[numbers] = _as_indexable(values)


def _as_indexable(x):
    """Return a view with a dtype that torch can index."""
    return x.view(_INDEXABLE.get(x.dtype, x.dtype))


def _as_bytes(rows):
    """Return rows [R, …] as bytes [R, bytes of a row]."""
    return rows.reshape(rows.shape[0], rows.shape[1:].numel()).contiguous().view(torch.uint8)
