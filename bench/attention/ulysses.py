"""Benchmark the Ulysses projections against cuBLAS, NCCL's all-to-all, and both without overlap.

    python -m tdkernels bench ulysses_qkv ulysses_out --backward [--tokens 8192] [--shapes hidden-4096,MxNxK]

    gemm          cuBLAS alone, on already exchanged operands
    collective    all_to_all_single alone, on already permuted operands
    sequence      the unfused baseline: both, with the permutes that a user would write
    tdkernels     the operator with its default arguments

One sequence of M positions; both passes of a problem are measured in one run. The backward computes the gradients of
the input and of the weight. For ulysses_out both the baseline and tdkernels reuse the input that the forward gathered.
tdkernels runs the torch ops directly, because the baseline has no autograd overhead either.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from bench.core import harness, multi_method
from bench.core.measure import _override
from bench.dense.operators import DTYPE
from bench.dense.shapes import Shape
from bench.experts.dispatch_methods import Method
from tdkernels.launch import rank_device
from tdkernels.ops.attention.ulysses.config import completed
from tdkernels.ops.attention.ulysses.op import _to_heads, _to_positions
from tdkernels.ops.common.config import as_argument
from tdkernels.symm import resolve_group

OPERATORS = ["ulysses_qkv", "ulysses_out"]
_COLD_BYTES = 256 << 20  # total size of the input sets that calls cycle through: several times any L2 cache
_MAX_SETS = 8


@dataclass(frozen=True)
class Case:
    """One benchmark case: an operator and a shape on ``ranks`` ranks."""

    operator: str
    shape: Shape
    ranks: int
    backward: bool = False

    def __str__(self):
        return f"{self.operator} {self.shape} {self.shape.name}".strip()

    @property
    def parts(self):
        return ("forward", "backward") if self.backward else ("forward",)

    @property
    def divided(self):
        """The dimension that is divided between the ranks by heads."""
        return self.shape.n if self.operator == "ulysses_qkv" else self.shape.k

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        for name, size in (("M", self.shape.m), ("NK"[self.operator == "ulysses_out"], self.divided)):
            if size % self.ranks:
                return f"{name} = {size} is not divisible by {self.ranks} ranks"
        return "one rank has nothing to exchange" if self.ranks == 1 else None

    def flops(self, part):
        """FLOP per rank."""
        gemm = 2 * self.shape.m * self.shape.n * self.shape.k // self.ranks
        return gemm if part == "forward" else 2 * gemm

    def wire_bytes(self, part):
        """Bytes that a GPU receives from its peers."""
        return self.shape.m * self.divided * DTYPE.itemsize * (self.ranks - 1) // self.ranks**2

    def inputs(self, seed):
        """Return this rank's operands, drawn with ``seed``. Only the weights are the same on all ranks."""
        shape, ranks, device = self.shape, self.ranks, rank_device()

        def draw(seed, *sizes):
            generator = torch.Generator(device).manual_seed(seed)
            return torch.randn(*sizes, generator=generator, dtype=DTYPE, device=device)

        own = 1000 + 2 * (seed * ranks + dist.get_rank())
        s = SimpleNamespace(weight=draw(seed, shape.n, shape.k).mul_(shape.k**-0.5))
        heads_shard, positions = (shape.m, self.divided // ranks), shape.m // ranks
        if self.operator == "ulysses_qkv":
            s.x, s.dy = draw(own, positions, shape.k), draw(own + 1, *heads_shard)
        else:
            s.x, s.dy = draw(own, *heads_shard), draw(own + 1, positions, shape.n)
        s.parts = draw(own, ranks, positions, self.divided // ranks)
        s.rows = _to_positions(s.dy if self.operator == "ulysses_qkv" else s.x, 1, None)  # gathered
        return s


def cases(operators, shapes, ranks, backward):
    """Yield the cases of a run; ``shapes``: {operator: shapes}."""
    for operator in operators:
        yield from (Case(operator, shape, ranks, backward) for shape in shapes[operator])


# ---- methods: functions of an operand set with x, weight and, in the backward, dy ----


def _qkv(s):
    return _to_heads(F.linear(s.x, s.weight), 1, None)


def _qkv_backward(s):
    rows = _to_positions(s.dy, 1, None)
    return rows @ s.weight, rows.t() @ s.x


def _out(s):
    return F.linear(_to_positions(s.x, 1, None), s.weight)


def _out_backward(s):
    return _to_heads(s.dy @ s.weight, 1, None), s.dy.t() @ s.rows


_SEQUENCES = {
    ("ulysses_qkv", "forward"): _qkv, ("ulysses_qkv", "backward"): _qkv_backward,
    ("ulysses_out", "forward"): _out, ("ulysses_out", "backward"): _out_backward,
}
_GEMMS = {
    ("ulysses_qkv", "forward"): lambda s: F.linear(s.x, s.weight),
    ("ulysses_qkv", "backward"): lambda s: (s.rows @ s.weight, s.rows.t() @ s.x),
    ("ulysses_out", "forward"): lambda s: F.linear(s.rows, s.weight),
    ("ulysses_out", "backward"): lambda s: (s.dy @ s.weight, s.dy.t() @ s.rows),
}


def _exchange(s):
    received = torch.empty_like(s.parts)
    dist.all_to_all_single(received, s.parts)
    return received


def _ours(case, part, config):
    """Return the Method of tdkernels; ``config`` None uses the selected config."""
    call = 1, resolve_group().group_name, as_argument(config)
    ops = torch.ops.tdkernels

    def forward(s):
        return getattr(tdkernels, case.operator)(s.x, s.weight, config=config)

    def qkv_backward(s):
        return ops.ulysses_qkv_backward(s.dy, s.x, s.weight, True, True, False, *call)[:2]

    def out_backward(s):
        return ops.ulysses_out_backward(s.dy, s.weight, *call), s.dy.t() @ s.rows

    backward = qkv_backward if case.operator == "ulysses_qkv" else out_backward
    return Method(forward if part == "forward" else backward, _identity, config=config)


def _identity(outputs):
    return outputs


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. See ``multi_method.measure``."""
    sets = _input_sets(case)
    return multi_method.measure(
        case.parts, sets, plan,
        methods_of=lambda part: _methods(case, part, plan),
        alone_of=lambda part: {"gemm": _GEMMS[case.operator, part], "collective": _exchange},
        references_of=lambda part: _references(case, part, sets[:2]),  # two, because workspaces are double-buffered
        config_of=lambda part: _config(case, part),
    )


def _input_sets(case):
    sets = [case.inputs(0)]
    nbytes = sets[0].x.nbytes + sets[0].weight.nbytes
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // nbytes))) if rank_device().type == "cuda" else 2
    return sets + [case.inputs(seed) for seed in range(1, count)]


def _methods(case, part, plan):
    """Return ({name: Method}, {name: reason for absence})."""
    methods = {"sequence": Method(_SEQUENCES[case.operator, part], _identity), "tdkernels": _ours(case, part, None)}
    overrides, absent = multi_method.overridden(
        plan, _default_config(case, part), _override, lambda config: _ours(case, part, config)
    )
    return methods | overrides, absent


def _config(case, part):
    """Return the selected config. The backward of each operator runs the kernel of the other."""
    if case.ranks == 1:
        return _default_config(case, part)
    m, n, k = case.shape.m, case.shape.n, case.shape.k
    if part == "forward":
        return tdkernels.explain(case.operator, m, n, k, dtype=DTYPE).config
    (other,) = {*OPERATORS} - {case.operator}
    return tdkernels.explain(other, m, k, n, dtype=DTYPE, layout="kn").config


def _default_config(case, part):
    exchanges_first = (case.operator == "ulysses_out") == (part == "forward")
    n = case.shape.n if part == "forward" else case.shape.k
    return completed(None, case.shape.m // case.ranks, n if exchanges_first else n // case.ranks, DTYPE, rank_device())


def _references(case, part, sets):
    """Return [(operands, fp32 results, errors of NCCL + cuBLAS in the operands' dtype)], one entry per input set."""
    sequence = _SEQUENCES[case.operator, part]
    found = []
    for s in sets:
        exact = sequence(SimpleNamespace(**{name: value.float() for name, value in vars(s).items()}))
        found.append((s, exact, harness.errors(sequence(s), exact)))
    return found


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per part and method, with the measured times and the derived values."""
    shape = case.shape
    common = {
        "op": case.operator, "what": "ulysses", "shape": str(shape), "name": shape.name,
        "m": shape.m, "n": shape.n, "k": shape.k, "dtype": str(DTYPE).removeprefix("torch."),
    }
    return [{**common, **fields} for fields in multi_method.derived(found, case.flops, case.wire_bytes, link_gbps)]
