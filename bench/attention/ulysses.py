"""The projections of Ulysses against cuBLAS alone, NCCL's all-to-all alone, and one after the other with permutes.

    python -m tdkernels bench ulysses_qkv ulysses_out --backward [--tokens 8192] [--shapes hidden-4096,MxNxK]

    gemm          cuBLAS alone, on operands that lie ready
    collective    all_to_all_single alone, of parts that lie ready
    sequence      both, with the permutes that a user would write
    tdkernels     a call as it comes

One sequence of M positions, both passes of a problem in one run. The backward gives the gradients of the rows and of
the weight; for that of ulysses_out both ways have kept what was gathered for the forward. As the sequence does not pay
for autograd, ours are the ops themselves.
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
_COLD_BYTES = 256 << 20  # input sets take turns until this much has gone by: several times any L2 cache
_MAX_SETS = 8


@dataclass(frozen=True)
class Case:
    """One operator and shape to measure on ``ranks`` ranks."""

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
        """The size of which a rank has so many heads."""
        return self.shape.n if self.operator == "ulysses_qkv" else self.shape.k

    def why_not(self):
        """Why it cannot be measured, or None."""
        for name, size in (("M", self.shape.m), ("NK"[self.operator == "ulysses_out"], self.divided)):
            if size % self.ranks:
                return f"{name} = {size} is not divisible by {self.ranks} ranks"
        return "one rank has nothing to exchange" if self.ranks == 1 else None

    def flops(self, part):
        """Of a rank."""
        product = 2 * self.shape.m * self.shape.n * self.shape.k // self.ranks
        return product if part == "forward" else 2 * product

    def wire_bytes(self, part):
        """What a GPU receives from its peers."""
        return self.shape.m * self.divided * DTYPE.itemsize * (self.ranks - 1) // self.ranks**2

    def inputs(self, seed):
        """This rank's operands; others for another seed. Only weights are the same on all ranks."""
        shape, ranks, device = self.shape, self.ranks, rank_device()

        def draw(seed, *sizes):
            generator = torch.Generator(device).manual_seed(seed)
            return torch.randn(*sizes, generator=generator, dtype=DTYPE, device=device)

        own = 1000 + 2 * (seed * ranks + dist.get_rank())
        s = SimpleNamespace(weight=draw(seed, shape.n, shape.k).mul_(shape.k**-0.5))
        of_heads, of_positions = (shape.m, self.divided // ranks), shape.m // ranks
        if self.operator == "ulysses_qkv":
            s.x, s.dy = draw(own, of_positions, shape.k), draw(own + 1, *of_heads)
        else:
            s.x, s.dy = draw(own, *of_heads), draw(own + 1, of_positions, shape.n)
        s.parts = draw(own, ranks, of_positions, self.divided // ranks)
        s.rows = _to_positions(s.dy if self.operator == "ulysses_qkv" else s.x, 1, None)  # gathered
        return s


def cases(operators, shapes, ranks, backward):
    """The cases of a run; ``shapes``: {operator: shapes}."""
    for operator in operators:
        yield from (Case(operator, shape, ranks, backward) for shape in shapes[operator])


# ---- methods: of operands (x, weight), or of these and dy; x is [positions or all of them, ·] ----


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
_PRODUCTS = {
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
    """The Method of ours in a config, None for a call as it comes."""
    call = 1, resolve_group().group_name, as_argument(config)
    ops = torch.ops.tdkernels

    def forward(s):
        return getattr(tdkernels, case.operator)(s.x, s.weight, config=config)

    def qkv_backward(s):
        return ops.ulysses_qkv_backward(s.dy, s.x, s.weight, True, True, False, *call)[:2]

    def out_backward(s):
        return ops.ulysses_out_backward(s.dy, s.weight, *call), s.dy.t() @ s.rows

    backward = qkv_backward if case.operator == "ulysses_qkv" else out_backward
    return Method(forward if part == "forward" else backward, _as_it_is, config=config)


def _as_it_is(outputs):
    return outputs


# ---- On the ranks ----


@harness.measurement
def measure(case, plan):
    """As ``measure.measure``, of methods (part, name)."""
    sets = _input_sets(case)
    return multi_method.measure(
        case.parts, sets, plan,
        methods_of=lambda part: _methods(case, part, plan),
        alone_of=lambda part: {"gemm": _PRODUCTS[case.operator, part], "collective": _exchange},
        references_of=lambda part: _references(case, part, sets[:2]),  # two: our workspaces have two halves
        config_of=lambda part: _config(case, part),
    )


def _input_sets(case):
    sets = [case.inputs(0)]
    nbytes = sets[0].x.nbytes + sets[0].weight.nbytes
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // nbytes))) if rank_device().type == "cuda" else 2
    return sets + [case.inputs(seed) for seed in range(1, count)]


def _methods(case, part, plan):
    """({name: Method}, {name: why it is absent})."""
    methods = {"sequence": Method(_SEQUENCES[case.operator, part], _as_it_is), "tdkernels": _ours(case, part, None)}
    tries, absent = multi_method.overridden(
        plan, _default_config(case, part), _override, lambda config: _ours(case, part, config)
    )
    return methods | tries, absent


def _config(case, part):
    """What a call without one takes; the backward of each is a call of the other."""
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
    """Per set it, the results in fp32, and how far off NCCL and cuBLAS are in the dtype."""
    sequence = _SEQUENCES[case.operator, part]
    found = []
    for s in sets:
        exact = sequence(SimpleNamespace(**{name: value.float() for name, value in vars(s).items()}))
        found.append((s, exact, harness.errors(sequence(s), exact)))
    return found


# ---- In the calling process ----


def rows(case, found, link_gbps):
    """One row a part and method: what was measured and what follows from it."""
    shape = case.shape
    common = {
        "op": case.operator, "what": "ulysses", "shape": str(shape), "name": shape.name,
        "m": shape.m, "n": shape.n, "k": shape.k, "dtype": str(DTYPE).removeprefix("torch."),
    }
    return [{**common, **fields} for fields in multi_method.derived(found, case.flops, case.wire_bytes, link_gbps)]
