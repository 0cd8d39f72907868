"""Dense operators for the benchmarks: operands, transfer volume, baselines and the tdkernels call.

To add an operator, add an entry to ``_ALL``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from bench.dense.shapes import Shape
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.launch import rank_device
from tdkernels.ops.common.torch_collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from tdkernels.symm import resolve_group

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Pass:
    """The forward or backward of an operator. Methods are functions of one operand set, a SimpleNamespace.

    gemms:          number of GEMMs of M x N x K
    received:       elements received per GPU times W / (W - 1), as a function of the shape
    operands:       function (Case, generator) that returns this rank's operands. Besides the operator's arguments,
                    ``full`` is the input of the GEMM alone and ``partial`` the input of the reduction alone
    gemm, collective, sequence:     cuBLAS alone, NCCL alone, both without overlap
    ours:           function (Case, config or None) that returns the tdkernels call
    """

    gemms: int
    received: Callable
    operands: Callable
    gemm: Callable
    collective: Callable
    sequence: Callable
    ours: Callable


@dataclass(frozen=True)
class Operator:
    """The passes of an operator. ``backward`` is None if the backward has no communication."""

    forward: Pass
    backward: Pass | None = None


@dataclass(frozen=True)
class Case:
    """One benchmark case: the forward or backward of an operator for one shape on ``ranks`` ranks."""

    operator: str
    shape: Shape
    ranks: int
    backward: bool = False

    def __str__(self):
        return f"{self.operator}{' backward' if self.backward else ''} {self.shape}"

    @property
    def direction(self):
        operator = _ALL[self.operator]
        return operator.backward if self.backward else operator.forward

    @property
    def flops(self):
        """FLOP per GPU."""
        return self.direction.gemms * 2 * self.shape.m * self.shape.n * self.shape.k // self.ranks

    @property
    def wire_bytes(self):
        """Bytes that a GPU receives from its peers."""
        return self.direction.received(self.shape) * DTYPE.itemsize * (self.ranks - 1) // self.ranks

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        if self.direction is None:
            return "the backward is a GEMM without communication"
        return tunable(self.operator).why_not(self.problem(torch.device("cpu")))

    def problem(self, device):
        """Return the tuner's Problem."""
        shape = self.shape.m, self.shape.n, self.shape.k
        return Problem.on(device, self.operator, shape, DTYPE, "nk", self.ranks, self.ranks)

    def inputs(self, seed):
        """Return this rank's operands, drawn with ``seed``."""
        generator = torch.Generator(rank_device()).manual_seed(seed * self.ranks + dist.get_rank())
        return self.direction.operands(self, generator)


# ---- operands ----


def _randn(generator, *shape, scale=1.0):
    return torch.randn(shape, generator=generator, dtype=DTYPE, device=generator.device).mul_(scale)


def _gathered(x):
    """All-gather x. In solo mode this gives W copies of it, the shards of the mirror images."""
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x)
    return torch.cat(shards)


def _of_ag(case, generator):
    shape, ranks = case.shape, case.ranks
    s = SimpleNamespace()
    s.x = _randn(generator, shape.m // ranks, shape.k)
    s.weight = _randn(generator, shape.n // ranks, shape.k, scale=shape.k**-0.5)
    s.full = _gathered(s.x)
    if case.backward:
        s.dy, s.partial = _randn(generator, shape.m, shape.n // ranks), _randn(generator, shape.m, shape.k)
    return s


def _of_row_parallel(case, generator):
    shape, ranks = case.shape, case.ranks
    x = _randn(generator, shape.m, shape.k // ranks)
    return SimpleNamespace(x=x, weight=_randn(generator, shape.n, shape.k // ranks, scale=shape.k**-0.5))


def _of_rs(case, generator):
    s, shape = _of_row_parallel(case, generator), case.shape
    if case.backward:
        s.dy = _randn(generator, shape.m // case.ranks, shape.n)
        s.full = _gathered(s.dy)
    else:
        s.partial = _randn(generator, shape.m, shape.n)
    return s


def _of_ar(case, generator):
    s = _of_row_parallel(case, generator)
    # The in-place all-reduce is repeated; values other than zero would grow until they overflow.
    s.partial = s.x.new_zeros(case.shape.m, case.shape.n)
    return s


# ---- methods ----


def _backward_of_rs(s):
    full = all_gather_rows(s.dy)
    return full @ s.weight, full.t() @ s.x


def _ours(case, config):
    operator = getattr(tdkernels, case.operator)
    return lambda s: operator(s.x, s.weight, config=config)


# The backwards call the torch ops directly, because the torch + NCCL baseline has no autograd overhead either. The
# empty config string lets the backward select its own configs.


def _ours_backward_of_ag(case, config):
    backward, group = torch.ops.tdkernels.ag_gemm_backward, resolve_group().group_name
    return lambda s: backward(s.dy, s.x, s.weight, [], True, True, group, "")


def _ours_backward_of_rs(case, config):
    backward, group = torch.ops.tdkernels.gemm_rs_backward, resolve_group().group_name
    return lambda s: backward(s.dy, s.x, s.weight, [], True, True, False, group, "")[:2]


_ALL = {
    "ag_gemm": Operator(
        forward=Pass(
            gemms=1,
            received=lambda shape: shape.m * shape.k,
            operands=_of_ag,
            gemm=lambda s: F.linear(s.full, s.weight),
            collective=lambda s: all_gather_rows(s.x),
            sequence=lambda s: tdkernels.ag_gemm_ref(s.x, s.weight),
            ours=_ours,
        ),
        backward=Pass(  # gathers x again and reduce-scatters dx
            gemms=2,
            received=lambda shape: 2 * shape.m * shape.k,
            operands=_of_ag,
            gemm=lambda s: (s.dy @ s.weight, s.dy.t() @ s.full),
            collective=lambda s: (reduce_scatter_rows(s.partial), all_gather_rows(s.x)),
            sequence=lambda s: (reduce_scatter_rows(s.dy @ s.weight), s.dy.t() @ all_gather_rows(s.x)),
            ours=_ours_backward_of_ag,
        ),
    ),
    "gemm_rs": Operator(
        forward=Pass(
            gemms=1,
            received=lambda shape: shape.m * shape.n,
            operands=_of_rs,
            gemm=lambda s: F.linear(s.x, s.weight),
            collective=lambda s: reduce_scatter_rows(s.partial),
            sequence=lambda s: tdkernels.gemm_rs_ref(s.x, s.weight),
            ours=_ours,
        ),
        backward=Pass(  # gathers dz
            gemms=2,
            received=lambda shape: shape.m * shape.n,
            operands=_of_rs,
            gemm=lambda s: (s.full @ s.weight, s.full.t() @ s.x),
            collective=lambda s: all_gather_rows(s.dy),
            sequence=_backward_of_rs,
            ours=_ours_backward_of_rs,
        ),
    ),
    "gemm_ar": Operator(
        forward=Pass(  # partial sums of this rank's rows, then the reduced rows of the other ranks
            gemms=1,
            received=lambda shape: 2 * shape.m * shape.n,
            operands=_of_ar,
            gemm=lambda s: F.linear(s.x, s.weight),
            collective=lambda s: all_reduce(s.partial),
            sequence=lambda s: tdkernels.gemm_ar_ref(s.x, s.weight),
            ours=_ours,
        ),
    ),
}

OPERATORS = list(_ALL)
