"""Benchmark group_gemm on one GPU against torch's grouped GEMM and a loop of cuBLAS GEMMs.

    cublas-loop      torch.mm per expert into its rows of one output; the splits are known to the host
    torch-grouped    torch._grouped_mm; the splits are on the device, as for tdkernels
    tdkernels        group_gemm with its default arguments

SwiGLU is fused in tdkernels, and is torch's silu and multiplication after the GEMM in the others. The passes "dx" and
"dw" are the gradients of the GEMM alone. The speed-up is over the faster of the other two methods.

    python -m tdkernels bench group_gemm --backward --seconds 50 [--shapes mixtral-tp8,RxNxKxE] [--routing skewed]

Shapes with scaled fp8 operands (``--shapes fp8``) are measured by ``bench.experts.scaled_grouped_gemm``.
"""

import dataclasses
import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch

import tdkernels
from bench.core import graphs, harness
from bench.core.measure import _override, timed
from bench.dense.operators import DTYPE
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.launch import rank_device
from tdkernels.ops.experts.grouped_gemm.dispatch import DW, KN, known_config, swiglu_ref

OPERATORS = ["group_gemm"]
ROUTINGS = ("balanced", "skewed")
PEERS = ("cublas-loop", "torch-grouped")
_SKEW = 0.6  # as in bench/experts/dispatch.py
_COLD_BYTES = 256 << 20  # total size of the input sets that calls cycle through: several times any L2 cache
_MAX_SETS = 8


@dataclass(frozen=True)
class Shape:
    """Grouped GEMM of x [rows, k] and w [experts, n, k]; ``fp8``: of scaled fp8 operands."""

    rows: int
    n: int
    k: int
    experts: int
    activation: str | None = None
    name: str = ""
    fp8: bool = False

    def __str__(self):
        return f"{self.rows}x{self.n}x{self.k}x{self.experts}"


SHAPES = [
    Shape(32768, 1024, 8192, 32, None, "tp-moe"),  # 8192 tokens of 4 experts, N = 8192 over 8 ranks
    Shape(4096, 3584, 4096, 8, "swiglu", "mixtral-tp8"),  # 2048 tokens of 2
    Shape(12288, 2816, 2048, 64, "swiglu", "deepseek-lite"),  # 2048 tokens of 6
    Shape(32768, 4096, 7168, 32, "swiglu", "deepseek-up"),  # 32 of 256 experts
    Shape(32768, 7168, 2048, 32, None, "deepseek-down"),
    Shape(8192, 8192, 8192, 1, None, "one-expert"),
]
FP8 = "fp8"  # the group of shapes with scaled operands, and the prefix of one of them
_FP8_NAMES = ("mixtral-tp8", "deepseek-up", "deepseek-down", "one-expert", "tp-moe", "deepseek-lite")
FP8_SHAPES = [
    Shape(512, 4096, 7168, 32, "swiglu", "deepseek-decode", fp8=True),  # 64 tokens of 8: bound by reading w
    *(dataclasses.replace(shape, fp8=True) for name in _FP8_NAMES for shape in SHAPES if shape.name == name),
]
REHEARSAL_SHAPES = [
    Shape(24, 16, 24, 3, "swiglu", "rehearsal"), Shape(24, 32, 32, 3, "swiglu", "rehearsal", fp8=True),
]


def parse_shapes(text):
    """Parse comma-separated shape names, or sizes as RxNxKxE; without text return all shapes without scales.

    "fp8" selects all shapes with scaled fp8 operands, the prefix "fp8:" the shape after it.
    """
    named, chosen = {shape.name: shape for shape in SHAPES}, []
    scaled = {shape.name: shape for shape in FP8_SHAPES}
    for word in text.split(",") if text else named:
        prefix, colon, size = word.rpartition(":")
        fp8 = prefix == FP8
        known = scaled if fp8 else named
        if word == FP8:
            chosen += FP8_SHAPES
        elif (fp8 or not colon) and size in known:
            chosen.append(known[size])
        elif (fp8 or not colon) and re.fullmatch(r"([1-9]\d*x){3}[1-9]\d*", size):
            chosen.append(Shape(*map(int, size.split("x")), fp8=fp8))
        else:
            names = ", ".join([*named, FP8, *(f"{FP8}:{name}" for name in scaled)])
            raise ValueError(f"--shapes of group_gemm: {word!r} is neither RxNxKxE nor one of {names}")
    return list(dict.fromkeys(chosen))


def rehearsal(shapes):
    """Return the shapes of a rehearsal of ``shapes``: with scaled operands, without them, or both."""
    return [shape for shape in REHEARSAL_SHAPES if shape.fp8 in {one.fp8 for one in shapes}]


@dataclass(frozen=True)
class Case:
    """One benchmark case: a shape and a pass, "forward", "dx" or "dw"."""

    shape: Shape
    routing: str
    direction: str
    operator: str = "group_gemm"

    def __str__(self):
        return f"group_gemm {self.direction} {self.shape} {self.shape.name} {self.routing}"

    @property
    def activation(self):
        """The activation of the forward; None for gradients, which are those of the GEMM alone."""
        return self.shape.activation if self.direction == "forward" else None

    @property
    def flops(self):
        return 2 * self.shape.rows * self.shape.n * self.shape.k

    def inputs(self, seed):
        """Return the operands and the rows per expert, on the device and on the host, drawn with ``seed``."""
        shape, device = self.shape, rank_device()
        generator = torch.Generator(device).manual_seed(seed)
        routing_generator = torch.Generator().manual_seed(seed)

        def draw(*sizes):
            return torch.randn(*sizes, generator=generator, dtype=DTYPE, device=device)

        probabilities = torch.ones(shape.experts)
        if self.routing == "skewed":
            probabilities = (torch.randperm(shape.experts, generator=routing_generator) + 1.0) ** -_SKEW
        ids = torch.multinomial(probabilities, shape.rows, replacement=True, generator=routing_generator)
        counts = torch.bincount(ids, minlength=shape.experts)
        s = SimpleNamespace(splits=counts.int().to(device), offs=counts.cumsum(0).int().to(device))
        s.ends = counts.cumsum(0).tolist()
        s.x, s.w = draw(shape.rows, shape.k), draw(shape.experts, shape.n, shape.k) * shape.k**-0.5
        s.dy = None if self.direction == "forward" else draw(shape.rows, shape.n)
        return s


def cases(operators, shapes, routing, backward):
    """Yield the cases of a run; forwards come first, in case the time runs out."""
    for direction in ("forward", "dx", "dw") if backward else ("forward",):
        for _ in operators:
            yield from (Case(shape, routing, direction) for shape in shapes if not shape.fp8)


# ---- on the rank ----


@torch.no_grad()
def measure(case, plan):
    """Check and time all methods of a case. Returns the same as ``measure.measure``."""
    first = case.inputs(0)
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // (first.x.nbytes + first.w.nbytes))))
    sets = [first, *(case.inputs(seed) for seed in range(1, count))]
    calls, configs, absent = _methods(case, plan, first)
    references = _references(case, sets[:2])
    for name in list(calls):
        reason = harness.failure_reason(calls[name], first) or harness.mismatch_reason(calls[name], references)
        if reason and name == "tdkernels":
            raise RuntimeError(f"{name}: {reason}")
        if reason:
            absent[name] = reason
            del calls[name]
    captured, not_captured = {}, {}
    if plan.cuda_graph:
        captured, not_captured = graphs.capture_all(calls, sets, references, unchecked=())
    del references
    found = timed(calls, captured, sets, plan, configs, absent, not_captured)
    if rank_device().type == "cuda":
        torch.cuda.empty_cache()  # the next shape may need all memory
    return found


def _methods(case, plan, first):
    """Return ({name: call}, {name: config}, {name: reason for absence})."""
    calls = {"cublas-loop": lambda s: cublas_loop(case, s), "torch-grouped": lambda s: torch_grouped(case, s)}
    calls["tdkernels"] = lambda s: ours(case, s, None)
    configs, absent = {"tdkernels": selected_config(case, first.x)}, {}
    if case.direction != "forward":  # the gradients take no config argument
        return calls, configs, absent
    for number, override in enumerate(plan.overrides, 1):
        name = f"c{number} {json.dumps(override)}"
        try:
            configs[name] = _override(_default(case), override)
        except TypeError as err:  # a field of another operator
            absent[name] = str(err)
        else:
            calls[name] = lambda s, config=configs[name]: ours(case, s, config)
    return calls, configs, absent


def _problem(case):
    """Return the tuner's Problem of a pass. dx is a GEMM with transposed weights."""
    shape = case.shape
    n, k = (shape.k, shape.n) if case.direction == "dx" else (shape.n, shape.k)
    layout = {"forward": case.activation or "none", "dx": KN, "dw": DW}[case.direction]
    return Problem.on(rank_device(), "group_gemm", (shape.rows, n, k, shape.experts), DTYPE, layout, 1, 1)


def selected_config(case, x):
    """Return the config that a call without an explicit config uses: the tuned one, or the heuristic."""
    problem = _problem(case)
    return known_config(x, problem.shape[1:], problem.layout) or _default(case)


def _default(case):
    return tunable("group_gemm").default(_problem(case), rank_device())


def ours(case, s, config):
    if case.direction == "forward":
        return tdkernels.group_gemm(s.x, s.w, s.splits, activation=case.activation, config=config)
    want_dx = case.direction == "dx"
    pre = s.x.new_empty(0)
    gradients = torch.ops.tdkernels.group_gemm_backward(s.dy, s.x, s.w, s.splits, pre, "", want_dx, not want_dx)
    return gradients[0 if want_dx else 1]


def torch_grouped(case, s):
    if case.direction == "dw":
        return torch._grouped_mm(s.dy.t(), s.x, offs=s.offs)
    if case.direction == "dx":
        return torch._grouped_mm(s.dy, s.w, offs=s.offs)
    return swiglu_ref(torch._grouped_mm(s.x, s.w.transpose(1, 2), offs=s.offs), case.activation)


def cublas_loop(case, s):
    parts = [slice(begin, end) for begin, end in zip([0, *s.ends], s.ends, strict=False)]
    if case.direction == "dw":
        dw = torch.empty_like(s.w)
        for expert, part in enumerate(parts):
            torch.mm(s.dy[part].t(), s.x[part], out=dw[expert])
        return dw
    rows, weights = (s.x, s.w.transpose(1, 2)) if case.direction == "forward" else (s.dy, s.w)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for expert, part in enumerate(parts):
        torch.mm(rows[part], weights[expert], out=out[part])
    return swiglu_ref(out, case.activation)


def _references(case, sets):
    """Return [(operands, fp32 results, error of plain torch in the operands' dtype)], one entry per input set."""
    found = []
    for s in sets:
        dy = None if s.dy is None else s.dy.float()
        exact = cublas_loop(case, SimpleNamespace(x=s.x.float(), w=s.w.float(), dy=dy, ends=s.ends))
        found.append((s, exact, harness.errors(cublas_loop(case, s), exact)))
    return found


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per method, with the measured times and the derived values."""
    peers = {graph: [] for graph in (False, True)}
    for method, graph, times in found:
        if method in PEERS and times.get("ms"):
            peers[graph].append(times["ms"])
    shape, table = case.shape, []
    for method, graph, times in found:
        ms = times.get("ms")
        table.append({
            "op": case.operator, "what": "group_gemm", "pass": case.direction, "shape": str(shape),
            "name": f"{shape.name} {case.routing}".strip(), "rows": shape.rows, "n": shape.n, "k": shape.k,
            "experts": shape.experts, "activation": case.activation, "routing": case.routing,
            "dtype": str(DTYPE).removeprefix("torch."), "method": method, "graph": graph,
            "absent": times.get("absent"), "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": case.flops / ms / 1e9 if ms else None, "wire_gbps": None,
            "speedup": min(peers[graph]) / ms if ms and peers[graph] else None,
            "floor_ms": None, "efficiency": None, "link_gbps": link_gbps, "config": times.get("config"),
        })
    return table
