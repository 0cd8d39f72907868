"""Implementations of the dense operators in other libraries ("peers"). The ranks detect availability by running them.

A peer is a function of a Case. It returns a function of one operand set, or raises Absent with the reason. A peer is
also absent if its call fails or returns wrong results; the reason is stored in the row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem  # defines torch.ops.symm_mem

from bench.core import harness
from bench.dense.operators import DTYPE
from tdkernels.launch import rank_device
from tdkernels.ops.common.torch_collectives import all_gather_beside, reduce_scatter_beside

_SMALL_M = 2048
_ONE_SHOT_BYTES = 512 << 10  # for larger messages two-shot is faster


class Absent(Exception):
    """A peer cannot be measured; the message is the reason."""


_NEEDS_GPUS = "torch's symmetric memory needs GPUs"


@dataclass(frozen=True)
class Peer:
    """``operators``: the operators it implements. ``call``: function of a Case that returns a function of operands."""

    operators: tuple
    call: Callable


def _torch_fused(case):
    """Use torch's fused operators, which implement its asynchronous tensor parallelism."""
    if case.backward:
        raise Absent("measured for the forward only")
    if rank_device().type != "cuda":
        raise Absent(_NEEDS_GPUS)
    name = dist.group.WORLD.group_name
    if case.operator == "ag_gemm":
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        # For small M the operator uses multicast, unless it returns the gathered input.
        return_gathered = case.shape.m <= _SMALL_M
        return lambda s: fused(s.x, [s.weight.t()], 0, name, return_A=return_gathered)[1][0]
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return lambda s: fused(s.x, s.weight.t(), "sum", 0, name)


def _nccl_async(case):
    """Overlap NCCL's collectives of the backward with cuBLAS's GEMMs on two streams, as Megatron-LM does."""
    if not case.backward:
        raise Absent("measured for the backward only")

    def call(s):
        full = s.x.new_empty(case.ranks * s.x.shape[0], s.x.shape[1])
        gathered = all_gather_beside(full, s.x)
        partial = s.dy @ s.weight
        gathered.wait()
        dx = torch.empty_like(s.x)
        scattered = reduce_scatter_beside(dx, partial)
        dweight = s.dy.t() @ full
        scattered.wait()
        return dx, dweight

    return call


def _torch_symm_all_reduce(case):
    """cuBLAS into symmetric memory, then torch's one-shot or two-shot all-reduce."""
    if rank_device().type != "cuda":
        raise Absent(_NEEDS_GPUS)
    name = dist.group.WORLD.group_name
    z = symm_mem.empty(case.shape.m, case.shape.n, dtype=DTYPE, device=rank_device())
    symm_mem.rendezvous(z, name)
    one_shot = z.nbytes <= _ONE_SHOT_BYTES

    def call(s):
        torch.mm(s.x, s.weight.t(), out=z)
        if one_shot:
            return torch.ops.symm_mem.one_shot_all_reduce(z, "sum", name)
        return torch.ops.symm_mem.two_shot_all_reduce_(z, "sum", name)

    return call


PEERS = {
    "torch-fused": Peer(("ag_gemm", "gemm_rs"), _torch_fused),
    "nccl-async": Peer(("ag_gemm",), _nccl_async),
    "torch-symm-all-reduce": Peer(("gemm_ar",), _torch_symm_all_reduce),
}


def calls(case, names):
    """Return ({name: call}, {name: reason for absence}) of the named peers that implement the operator."""
    found, absent = {}, {}
    for name in names:
        if name not in PEERS or case.operator not in PEERS[name].operators:
            continue
        call, reason = _call_of(PEERS[name], case)
        if harness.slowest([reason is not None])[0]:  # failed on some rank: all ranks must measure the same peers
            absent[name] = reason or "failed on another rank"
        else:
            found[name] = call
    return found, absent


def _call_of(peer, case):
    """Return (call, None) or (None, reason)."""
    try:
        return peer.call(case), None
    except Absent as reason:
        return None, str(reason)
    except Exception as err:
        return None, f"{type(err).__name__}: {err}".splitlines()[0]
