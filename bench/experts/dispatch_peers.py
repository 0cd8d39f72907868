"""Dispatch and combine in other libraries: torch's all-to-all on NVSHMEM, and DeepEP. Both are untested.

A peer is a function of a case, max_tokens and the operand sets. It returns a ``dispatch_methods.Method``, or raises
Absent with the reason.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem  # defines torch.ops.symm_mem

from bench.experts.dispatch_methods import Method, dequantized, quantized
from tdkernels.launch import rank_device


class Absent(Exception):
    """A peer cannot be measured; the message is the reason."""


@dataclass(frozen=True)
class Peer:
    """``operators``: the operators it implements."""

    operators: tuple
    method: Callable


def _payload(case, s):
    return quantized(s.x) if case.payload == "fp8" else (s.x, s.scales)


# ---- torch.ops.symm_mem.all_to_all_vdev_2d ----


def _torch_vdev_2d(case, max_tokens, sets):
    """Send rows with their scales and weights in one message, grouped by expert; experts without rows leave gaps."""
    if rank_device().type != "cuda":
        raise Absent("torch's symmetric memory needs GPUs")
    if not symm_mem.is_nvshmem_available():
        raise Absent("torch has no NVSHMEM")
    backend = symm_mem.get_backend(rank_device())
    if backend != "NVSHMEM":
        raise Absent(f"torch's symmetric memory uses {backend} in this process: set TORCH_SYMMMEM=NVSHMEM")
    pieces = _pieces(case, sets[0])
    widths = [piece.shape[1] for piece in pieces]
    width = -(-sum(widths) // 16) * 16
    group, device = dist.group.WORLD.group_name, rank_device()
    local = case.experts // case.ranks
    # Double-buffered: peers may read the input of a call until the next call has synchronized with them.
    inputs = [_symmetric(case.tokens * case.choices, width, dtype=torch.uint8) for _ in range(2)]
    splits = [_symmetric(case.experts, dtype=torch.int64) for _ in range(2)]
    out = _symmetric(max_tokens + local, width, dtype=torch.uint8)
    places = _symmetric(2, case.experts, dtype=torch.int64)
    calls = [0]

    def call(s):
        turn = calls[0] = 1 - calls[0]
        ids = s.ids.flatten()
        by_expert = torch.sort(ids, stable=True)[1]
        splits[turn].zero_().scatter_add_(0, ids.long(), torch.ones_like(ids, dtype=torch.int64))
        start = 0
        for piece, columns in zip(_pieces(case, s, by_expert), widths, strict=True):
            inputs[turn][:, start : start + columns].copy_(piece)
            start += columns
        torch.ops.symm_mem.all_to_all_vdev_2d(inputs[turn], out, splits[turn], places, group)
        return out, places

    def plain(outputs):
        numbers, starts = outputs[1].tolist()
        rows = torch.cat([outputs[0][at : at + n] for n, at in zip(numbers, starts, strict=True)])
        received = torch.tensor(numbers, device=device).view(local, -1).sum(1)
        dtype = torch.bfloat16 if case.payload == "bf16" else torch.float8_e4m3fn
        x, *scales, weights = (part.contiguous() for part in rows[:, : sum(widths)].split(widths, 1))
        scales = scales[0].view(torch.float32) if scales else None
        return dequantized(x.view(dtype), scales), received.float(), weights.view(torch.float32).flatten()

    return Method(call, plain)


def _symmetric(*shape, dtype):
    tensor = symm_mem.empty(*shape, dtype=dtype, device=rank_device())
    symm_mem.rendezvous(tensor, dist.group.WORLD.group_name)
    return tensor


def _pieces(case, s, by_expert=None):
    """Return the bytes of tokens, scales (if any) and weights, one row per top-k assignment."""
    x, scales = _payload(case, s)
    if by_expert is None:
        by_expert = torch.arange(case.tokens * case.choices, device=s.ids.device)
    token = by_expert // case.choices
    pieces = [x.view(torch.uint8).index_select(0, token)]
    if scales is not None:
        pieces.append(scales.index_select(0, token).view(torch.uint8))
    return [*pieces, s.weights.flatten().index_select(0, by_expert).unsqueeze(1).view(torch.uint8)]


# ---- DeepEP ----

_buffers = {}  # {buffer size in bytes: deep_ep.Buffer}, reused as in an application


def _deep_ep(case, max_tokens, sets):
    """DeepEP's intra-node operators. A token has one row per destination rank, whatever its number of experts there.

    The times do not include the replication of rows to the experts and the sum of their results, left to the user.
    """
    if importlib.util.find_spec("deep_ep") is None:
        raise Absent("deep_ep is not installed")
    if rank_device().type != "cuda":
        raise Absent("DeepEP needs GPUs")
    import deep_ep

    configs = deep_ep.Buffer.get_dispatch_config(case.ranks), deep_ep.Buffer.get_combine_config(case.ranks)
    nbytes = max(config.get_nvl_buffer_size_hint(2 * case.hidden, case.ranks) for config in configs)
    if nbytes not in _buffers:
        _buffers[nbytes] = deep_ep.Buffer(dist.group.WORLD, nbytes, 0)
    buffer = _buffers[nbytes]
    for s in sets:
        s.long_ids = s.ids.long()

    def dispatch(s):
        x, scales = _payload(case, s)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(s.long_ids, case.experts)
        return buffer.dispatch(
            x if scales is None else (x, scales), topk_idx=s.long_ids, topk_weights=s.weights,
            num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        )

    def rows_of(ids):
        """Return (indices of the received tokens, indices of their assignments) of the rows, ordered by expert."""
        token, choice = (ids >= 0).nonzero(as_tuple=True)
        order = torch.sort(ids[token, choice], stable=True)[1]
        return token[order], choice[order]

    def plain(outputs):
        x, ids, weights = outputs[:3]
        rows = dequantized(*x) if isinstance(x, tuple) else x.float()
        token, choice = rows_of(ids)
        received = torch.bincount(ids[token, choice], minlength=case.experts // case.ranks)
        return rows[token], received.float(), weights[token, choice]

    if case.operator == "ep_dispatch":
        return Method(dispatch, plain, host_waits=True)
    for s in sets:
        _, ids, weights, _, s.deep_ep_handle, _ = dispatch(s)
        token, choice = rows_of(ids)
        sums = torch.zeros(ids.shape[0], case.hidden, dtype=torch.float32, device=ids.device)
        sums.index_add_(0, token, s.expert_out[: s.rows].float() * weights[token, choice].unsqueeze(1))
        s.partial = sums.to(s.expert_out.dtype)
    return Method(lambda s: buffer.combine(s.partial, s.deep_ep_handle)[0], lambda y: (y.float(),))


PEERS = {
    "torch-vdev-2d": Peer(("ep_dispatch",), _torch_vdev_2d),
    "deepep": Peer(("ep_dispatch", "ep_combine"), _deep_ep),
}
