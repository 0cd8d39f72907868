"""Other libraries' ways to dispatch and combine: torch's all-to-all on NVSHMEM, and DeepEP. Neither was ever run here.

A peer is a function of a case, max_tokens and the sets of operands. It returns a ``dispatch_methods.Method``, or raises
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
    """Why a peer cannot be measured."""


@dataclass(frozen=True)
class Peer:
    """``operators``: those that it has anything for."""

    operators: tuple
    method: Callable


def _payload(case, s):
    return quantized(s.x) if case.payload == "fp8" else (s.x, s.scales)


# ---- torch.ops.symm_mem.all_to_all_vdev_2d ----


def _torch_vdev_2d(case, room, sets):
    """Rows, their scales and weights in one piece, to where the experts have them; gaps for experts without any."""
    if rank_device().type != "cuda":
        raise Absent("torch's symmetric memory needs GPUs")
    if not symm_mem.is_nvshmem_available():
        raise Absent("torch finds no NVSHMEM")
    backend = symm_mem.get_backend(rank_device())
    if backend != "NVSHMEM":
        raise Absent(f"torch's symmetric memory is that of {backend} in this process: set TORCH_SYMMMEM=NVSHMEM")
    pieces = _pieces(case, sets[0])
    widths = [piece.shape[1] for piece in pieces]
    width = -(-sum(widths) // 16) * 16
    group, device = dist.group.WORLD.group_name, rank_device()
    local = case.experts // case.ranks
    # Two, in turn: peers read what is sent until they have done with the call, and the next call is what tells.
    inputs = [_symmetric(case.tokens * case.choices, width, dtype=torch.uint8) for _ in range(2)]
    splits = [_symmetric(case.experts, dtype=torch.int64) for _ in range(2)]
    out = _symmetric(room + local, width, dtype=torch.uint8)
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
        came = torch.tensor(numbers, device=device).view(local, -1).sum(1)
        dtype = torch.bfloat16 if case.payload == "bf16" else torch.float8_e4m3fn
        x, *scales, weights = (part.contiguous() for part in rows[:, : sum(widths)].split(widths, 1))
        scales = scales[0].view(torch.float32) if scales else None
        return dequantized(x.view(dtype), scales), came.float(), weights.view(torch.float32).flatten()

    return Method(call, plain)


def _symmetric(*shape, dtype):
    tensor = symm_mem.empty(*shape, dtype=dtype, device=rank_device())
    symm_mem.rendezvous(tensor, dist.group.WORLD.group_name)
    return tensor


def _pieces(case, s, by_expert=None):
    """Bytes of tokens, of scales if there are any, and of weights, all by choice."""
    x, scales = _payload(case, s)
    if by_expert is None:
        by_expert = torch.arange(case.tokens * case.choices, device=s.ids.device)
    token = by_expert // case.choices
    pieces = [x.view(torch.uint8).index_select(0, token)]
    if scales is not None:
        pieces.append(scales.index_select(0, token).view(torch.uint8))
    return [*pieces, s.weights.flatten().index_select(0, by_expert).unsqueeze(1).view(torch.uint8)]


# ---- DeepEP ----

_buffers = {}  # by the bytes of a row: kept, as a program would


def _deep_ep(case, room, sets):
    """Its operators for one host. A token has one row on a rank, whatever the number of its experts there: spreading it
    to them, and adding up what they made of it, are the user's and not in these times."""
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
        to_rank, _, to_expert, is_there, _ = buffer.get_dispatch_layout(s.long_ids, case.experts)
        return buffer.dispatch(
            x if scales is None else (x, scales), topk_idx=s.long_ids, topk_weights=s.weights,
            num_tokens_per_rank=to_rank, is_token_in_rank=is_there, num_tokens_per_expert=to_expert,
        )

    def rows_of(ids):
        """(numbers of the received tokens, of their choices), row by row as experts have them."""
        token, choice = (ids >= 0).nonzero(as_tuple=True)
        order = torch.sort(ids[token, choice], stable=True)[1]
        return token[order], choice[order]

    def plain(outputs):
        x, ids, weights = outputs[:3]
        rows = dequantized(*x) if isinstance(x, tuple) else x.float()
        token, choice = rows_of(ids)
        came = torch.bincount(ids[token, choice], minlength=case.experts // case.ranks)
        return rows[token], came.float(), weights[token, choice]

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
