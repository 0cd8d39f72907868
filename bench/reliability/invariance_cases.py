"""Calls whose time is measured inside and outside the batch-invariant mode. Inputs are those of other benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import tdkernels
from bench.attention import ag_attention, flash_decode, latent_methods
from bench.attention.shapes import AttentionShape
from bench.collectives import norm
from bench.dense import operators as dense
from bench.dense.shapes import Shape, select
from bench.experts import grouped_gemm

DEFAULT, INVARIANT, BASELINE = "default", "invariant", "torch"
RANKS = "invariant to ranks"  # the mode with ``max_ranks``
MAX_RANKS = 8  # of RANKS
DECODE, PREFILL = 16, 4096  # rows of the dense cases
_DENSE = ("ag_gemm", "gemm_rs", "gemm_ar")
_LAYERS = {"ag_gemm": "llama-70b gate-up", "gemm_rs": "llama-70b down", "gemm_ar": "llama-70b o"}
# (rows, hidden)
_COLLECTIVES = {"all_reduce": ((16, 8192), (1024, 8192)), "all_reduce_rms_norm": ((16, 8192), (512, 8192))}
_SUMS = "gemm_rs", "gemm_ar", "column_linear", *_COLLECTIVES  # operators with the method RANKS
_SHARDING = "zigzag"


@dataclass(frozen=True)
class Case:
    """One call.

    operator:   name of the operator
    problem:    the case of another benchmark, which makes the operands; for latent caches its shape
    shape:      the sizes as text
    name:       layer of a model, or kind of cache
    max_ranks:  of the method RANKS; None: the case has no such method
    """

    operator: str
    problem: object
    shape: str
    name: str = ""
    max_ranks: int | None = None

    def __str__(self):
        return f"{self.operator} {self.shape} {self.name}".strip()

    def inputs(self, seed):
        """Return this rank's operands, drawn with ``seed``."""
        if isinstance(self.problem, latent_methods.Shape):
            return latent_methods.inputs(self.problem, seed)
        return self.problem.inputs(seed)

    def call(self, s):
        return _CALLS[self.operator].call(self.problem, s)

    def methods(self):
        """Return {method: call on inputs}; dense operators have the unfused baseline, NCCL and torch's GEMM."""
        calls = {DEFAULT: _with_mode(self.call, False), INVARIANT: _with_mode(self.call, True)}
        if self.max_ranks is not None:
            # On one rank ``gemm_ar`` is the product of ``column_linear``, but with the reduction tree over K.
            call = _summed_by_tree if self.operator == "column_linear" else self.call
            calls[RANKS] = _with_mode(call, True, self.max_ranks)
        return calls | ({BASELINE: self.problem.direction.sequence} if self.operator in _DENSE else {})

    def nbytes(self, s):
        """Return the bytes of the operands of a call."""
        return sum(getattr(s, name).nbytes for name in _CALLS[self.operator].operands)

    def config(self, s):
        """Return the config that a call selects, or None for an operator without a config."""
        how = _CALLS[self.operator]
        if how.explained is None:
            return None
        operands = [getattr(s, name) for name in how.operands]
        return tdkernels.explain(self.operator, *operands, **how.explained).config


@dataclass(frozen=True)
class _Call:
    """An operator.

    call:       function (problem, inputs) that calls it
    operands:   names of its operands
    explained:  further arguments of ``explain``; None for an operator without a config
    """

    call: Callable
    operands: tuple
    explained: dict | None


def _with_mode(call, enabled, max_ranks=None):
    """Return ``call`` with the mode on or off. Both set the mode, so that eager times differ by the call alone."""

    def with_mode(s):
        with tdkernels.batch_invariant(enabled, max_ranks):
            return call(s)

    return with_mode


def _summed_by_tree(s):
    return tdkernels.gemm_ar(s.x, s.weight)


def _matmul(operator):
    return lambda problem, s: operator(s.x, s.weight)


def _decode(problem, s):
    return tdkernels.flash_decode(s.q, s.k, s.v, s.lens)


_CALLS = {
    **{name: _Call(_matmul(getattr(tdkernels, name)), ("x", "weight"), {}) for name in _DENSE},
    "column_linear": _Call(_matmul(tdkernels.column_linear), ("x", "weight"), None),
    "all_reduce": _Call(lambda problem, s: tdkernels.all_reduce(s.x), ("x",), {}),
    "all_reduce_rms_norm": _Call(lambda problem, s: problem.ours(s), ("x",), {}),
    "group_gemm": _Call(
        lambda problem, s: grouped_gemm.ours(problem, s, None), ("x", "w", "splits"), {"world_size": 1}
    ),
    "flash_decode": _Call(_decode, ("q", "k", "v", "lens"), {}),
    "ag_attention": _Call(
        lambda problem, s: tdkernels.ag_attention(s.q, s.k, s.v, sharding=_SHARDING), ("q", "k", "v"),
        {"layout": f"causal {_SHARDING}"},
    ),
}
OPERATORS = list(_CALLS)


def cases(ranks):
    """Return the cases for ``ranks`` GPUs. On one rank the dense operators are one linear without communication."""
    local = [
        _grouped(grouped_gemm.Shape(4096, 2048, 4096, 32)),
        *(_cached(flash_decode.Shape(*sizes), ranks) for sizes in ((16, 32, 8, 128, 4096), (1, 32, 8, 128, 65536))),
        _latent(latent_methods.Shape(8, 128, 8192)),
    ]
    if ranks == 1:
        found = [_linear(Shape(m, 8192, 8192, "llama-70b o")) for m in (DECODE, PREFILL)] + local
    else:
        found = [
            *(_dense(name, shape, ranks) for name in _DENSE for shape in _layer(name)),
            *(_reduced(name, *sizes, ranks) for name, shapes in _COLLECTIVES.items() for sizes in shapes),
            *local, _sharded(AttentionShape(8192, 32, 8, 128), ranks),
        ]
    return _with_max_ranks(found, ranks, MAX_RANKS)


def rehearsal(ranks):
    """Return small cases for CPU ranks: one of each operator, and one of a latent cache."""
    local = [
        _grouped(grouped_gemm.Shape(24, 16, 32, 3)), _cached(flash_decode.Shape(2, 4, 2, 16, 24), ranks),
        _latent(latent_methods.Shape(1, 16, 24, dim=72, dim_v=64)),
    ]
    if ranks == 1:
        found = [_linear(Shape(5, 32, 128)), *local]
    else:
        dense_cases = [_dense(name, Shape(4 * ranks, 16 * ranks, 64 * ranks), ranks) for name in _DENSE]
        reduced = [_reduced(name, 4, 64, ranks) for name in _COLLECTIVES]
        found = [*dense_cases, *reduced, *local, _sharded(AttentionShape(16 * ranks, 4, 2, 16), ranks)]
    return _with_max_ranks(found, ranks, max(ranks, 2))


def _with_max_ranks(found, ranks, max_ranks):
    """Return the cases with ``max_ranks`` for operators that add parts of ranks, if the mode supports the ranks."""
    if ranks > MAX_RANKS or ranks & (ranks - 1):
        return found
    return [replace(case, max_ranks=max_ranks) if case.operator in _SUMS else case for case in found]


def _layer(operator):
    """Return the shapes of the layer that represents a dense operator."""
    shapes = select(["llama-70b"], operator, [DECODE, PREFILL])
    return [shape for shape in shapes if shape.name == _LAYERS[operator]]


def _dense(operator, shape, ranks):
    return Case(operator, dense.Case(operator, shape, ranks), str(shape), shape.name)


def _linear(shape):
    return Case("column_linear", dense.Case("gemm_ar", shape, 1), str(shape), shape.name)


def _reduced(operator, rows, hidden, ranks):
    return Case(operator, norm.Case("all_reduce_rms_norm", rows, hidden, ranks), f"{rows}x{hidden}")


def _grouped(shape):
    return Case("group_gemm", grouped_gemm.Case(shape, "balanced", "forward"), str(shape))


def _cached(shape, ranks):
    return Case("flash_decode", flash_decode.Case(shape, ranks), str(shape))


def _latent(shape):
    text = f"{shape.batch}x{shape.heads}x1x{shape.dim}/{shape.dim_v}x{shape.keys}"
    return Case("flash_decode", shape, text, "latent cache")


def _sharded(shape, ranks):
    return Case("ag_attention", ag_attention.Case(shape, ranks, _SHARDING), str(shape), f"causal {_SHARDING}")
