"""Benchmark all_reduce_rms_norm and all_reduce_layer_norm against NCCL, an addition and torch's norm.

A shape is rows x hidden of x on each rank. Methods:

    sequence             NCCL's all-reduce, an addition, torch's norm: three calls
    sequence-compiled    NCCL's all-reduce, then the addition and the norm in one kernel of torch.compile
    tdkernels            the fused operator with the best known config
    tdkernels-default    with the heuristic config; tdkernels-one-shot and -two-shot: with this exchange
    all-reduce           ``tdkernels.all_reduce`` alone: the fused operator takes longer by the cost of the norm
"""

import dataclasses
import functools
import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tdkernels
from bench.core import graphs, harness
from bench.core.measure import timed
from bench.dense.operators import DTYPE
from tdkernels.launch import rank_device
from tdkernels.ops.collectives.norm.config import default_config
from tdkernels.ops.collectives.norm.reference import norm_ref
from tdkernels.ops.common.torch_collectives import all_reduce

OPERATORS = ["all_reduce_rms_norm", "all_reduce_layer_norm"]
ROWS, HIDDEN = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048), (4096, 8192, 16384)
SHAPES = [(rows, hidden) for hidden in HIDDEN for rows in ROWS]
REHEARSAL_SHAPES = [(1, 64), (5, 48)]
BASELINE, ALONE = "sequence", "all-reduce"
_EPS = 1e-5
_COLD_BYTES = 256 << 20  # total size of the input sets that calls cycle through: several times any L2 cache
_MAX_SETS = 8


def parse_shapes(text):
    """Parse comma-separated shapes such as 16x8192 into (rows, hidden); without text return SHAPES."""
    if text is None:
        return SHAPES
    shapes = []
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
        if match is None:
            raise ValueError(f"--shapes: all_reduce_*_norm takes ROWSxHIDDEN such as 16x8192, not {word!r}")
        shapes.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(shapes))


@dataclass(frozen=True)
class Case:
    """One benchmark case: an operator with x [rows, hidden] on ``ranks`` ranks."""

    operator: str
    rows: int
    hidden: int
    ranks: int

    def __str__(self):
        return f"{self.operator} {self.rows}x{self.hidden}"

    @property
    def nbytes(self):
        return self.rows * self.hidden * DTYPE.itemsize

    @property
    def wire_bytes(self):
        """Minimum number of bytes that a GPU receives from its peers, as for all_reduce."""
        return 2 * (self.nbytes * (self.ranks - 1) // self.ranks)

    @property
    def is_layer_norm(self):
        return self.operator == "all_reduce_layer_norm"

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        return None

    def inputs(self, seed):
        """Return this rank's x, and residual, weight and bias (of LayerNorm), which are equal on all ranks."""
        own = torch.Generator(rank_device()).manual_seed(seed * self.ranks + dist.get_rank())
        shared = torch.Generator(rank_device()).manual_seed(seed)

        def draw(*size, generator=shared):
            return torch.randn(size, generator=generator, dtype=DTYPE, device=rank_device())

        x = draw(self.rows, self.hidden, generator=own)
        bias = draw(self.hidden) if self.is_layer_norm else None
        return SimpleNamespace(x=x, residual=draw(self.rows, self.hidden), weight=draw(self.hidden), bias=bias)

    def ours(self, s, config=None):
        """Call the fused operator on inputs: (y, r)."""
        if self.is_layer_norm:
            return tdkernels.all_reduce_layer_norm(s.x, s.residual, s.weight, s.bias, _EPS, config=config)
        return tdkernels.all_reduce_rms_norm(s.x, s.residual, s.weight, _EPS, config=config)

    def after(self, total, s, function=None):
        """Compute (y, r) from the sum of all ranks' x, with ``_add_and_norm`` or its compiled form."""
        return (function or _add_and_norm)(total, s.residual, s.weight, s.bias, self.is_layer_norm)

    def sequence(self, s):
        """Compute (y, r) with NCCL and torch, without changing x."""
        return self.after(all_reduce(s.x.clone()), s)

    def default(self, exchange=None):
        return default_config(self.rows, self.hidden, DTYPE, self.ranks, rank_device(), exchange)


def _add_and_norm(total, residual, weight, bias, is_layer_norm):
    r = total + residual
    return norm_ref(r, weight, bias, _EPS, is_layer_norm), r


@functools.lru_cache(1)
def _compiled(is_layer_norm, hidden):
    """Return ``_add_and_norm`` compiled: for one row, and for any other number of rows."""
    torch._dynamo.reset()  # otherwise hidden would become dynamic, too
    return torch.compile(_add_and_norm)


def cases(operators, shapes, ranks):
    """Return the cases of some operators."""
    return [Case(operator, *shape, ranks) for operator in operators for shape in shapes]


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. Returns the same as ``bench.core.measure.measure``."""
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // (2 * case.nbytes))))
    sets = [case.inputs(seed) for seed in range(count)]
    methods, configs, absent = _methods(case, plan)
    references = _references(case, sets[:2])  # two, because workspaces are double-buffered
    for name in list(methods):
        _, checked = methods[name]
        reason = harness.failure_reason(checked, sets[0])
        if reason is None and name != ALONE:
            reason = harness.mismatch_reason(checked, references)
        if reason and name.startswith("tdkernels"):
            raise RuntimeError(f"{name}: {reason}")
        if reason:
            absent[name] = reason
            del methods[name]
    if "tdkernels" in methods:
        configs["tdkernels"] = tdkernels.explain(case.operator, sets[0].x).config
    calls = {name: call for name, (call, _) in methods.items()}
    captured, not_captured = {}, {}
    if plan.cuda_graph:
        unchecked = [name for name, (call, checked) in methods.items() if call is not checked or name == ALONE]
        captured, not_captured = graphs.capture_all(calls, sets, references, unchecked)
    del references
    return timed(calls, captured, sets, plan, configs, absent, not_captured)


def _references(case, sets):
    """Return references in the form of ``measure._references``."""
    found = []
    for s in sets:
        wide = SimpleNamespace(**{name: t if t is None else t.float() for name, t in vars(s).items()})
        exact = case.sequence(wide)
        found.append((s, exact, harness.errors(case.sequence(s), exact)))
    return found


def _methods(case, plan):
    """Return ({name: (call to time, call to check)}, {name: config}, {name: reason for absence})."""
    absent, configs = {}, {"tdkernels-default": case.default()}
    # The sum is in place, without a copy, and is repeated; values other than zero would overflow.
    zeros = torch.zeros(case.rows, case.hidden, dtype=DTYPE, device=rank_device())
    methods = {
        BASELINE: (lambda s: case.after(all_reduce(zeros), s), case.sequence),
        ALONE: (lambda s: tdkernels.all_reduce(s.x),) * 2,
        "tdkernels": (case.ours,) * 2,
    }
    if rank_device().type == "cuda":
        compiled = _compiled(case.is_layer_norm, case.hidden)
        methods["sequence-compiled"] = (
            lambda s: case.after(all_reduce(zeros), s, compiled),
            lambda s: case.after(all_reduce(s.x.clone()), s, compiled),
        )
    else:
        absent["sequence-compiled"] = "inductor's kernels need GPUs"
    for exchange in ("one_shot", "two_shot"):
        configs[f"tdkernels-{exchange.replace('_', '-')}"] = case.default(exchange)
    for number, override in enumerate(plan.overrides, 1):
        try:
            configs[f"tdkernels c{number} {json.dumps(override)}"] = dataclasses.replace(case.default(), **override)
        except TypeError as err:  # a field of another operator
            absent[f"c{number} {json.dumps(override)}"] = str(err)
    for name, config in configs.items():
        methods[name] = (lambda s, config=config: case.ours(s, config),) * 2
    return methods, configs, absent


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per method, with the measured times and the derived values."""
    base = {graph: times.get("ms") for method, graph, times in found if method == BASELINE}
    floor_ms = case.wire_bytes / link_gbps / 1e6 if link_gbps else None
    table = []
    for method, graph, times in found:
        ms = times.get("ms")
        is_whole = ms is not None and method != ALONE
        table.append({
            "op": case.operator, "what": "norm", "pass": "forward", "rows": case.rows, "hidden": case.hidden,
            "shape": f"{case.rows}x{case.hidden}", "name": "", "dtype": str(DTYPE).removeprefix("torch."),
            "method": method, "graph": graph, "absent": times.get("absent"),
            "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"), "tflops": None,
            "wire_gbps": case.wire_bytes / ms / 1e6 if is_whole else None,
            "speedup": base[graph] / ms if is_whole and base.get(graph) else None,
            "floor_ms": floor_ms, "efficiency": floor_ms / ms if is_whole and floor_ms else None,
            "link_gbps": link_gbps, "config": times.get("config"),
        })
    return table
