"""Products of rows grouped by expert, on one GPU, against torch's grouped product and a product for each expert.

    cublas-loop      torch.mm for each expert, the splits known to the host, each into its rows of one output
    torch-grouped    torch._grouped_mm, the splits on the device as in ours
    tdkernels        a call as it comes

SwiGLU is torch's silu and product after theirs, and inside ours. The passes "dx" and "dw" are the gradients of the
product alone. Speed-up is over the faster of the other two.

    python -m tdkernels bench group_gemm --backward --seconds 50 [--shapes mixtral-tp8,RxNxKxE] [--routing skewed]
"""

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
_COLD_BYTES = 256 << 20  # input sets take turns until this much has gone by: several times any L2 cache
_MAX_SETS = 8


@dataclass(frozen=True)
class Shape:
    """x [rows, k] times w [experts, n, k]."""

    rows: int
    n: int
    k: int
    experts: int
    activation: str | None = None
    name: str = ""

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
REHEARSAL_SHAPES = [Shape(24, 16, 24, 3, "swiglu", "rehearsal")]


def parse_shapes(text):
    """Shapes by name, or as RxNxKxE, with ',' between them; all of them if there is no text."""
    named, chosen = {shape.name: shape for shape in SHAPES}, []
    for word in text.split(",") if text else named:
        if word in named:
            chosen.append(named[word])
        elif re.fullmatch(r"([1-9]\d*x){3}[1-9]\d*", word):
            chosen.append(Shape(*map(int, word.split("x"))))
        else:
            raise ValueError(f"--shapes of group_gemm: {word!r} is neither RxNxKxE nor one of {', '.join(named)}")
    return chosen


@dataclass(frozen=True)
class Case:
    """One thing to measure: a pass, "forward", "dx" or "dw", of a shape."""

    shape: Shape
    routing: str
    direction: str
    operator: str = "group_gemm"

    def __str__(self):
        return f"group_gemm {self.direction} {self.shape} {self.shape.name} {self.routing}"

    @property
    def activation(self):
        """Gradients are those of the product alone."""
        return self.shape.activation if self.direction == "forward" else None

    @property
    def flops(self):
        return 2 * self.shape.rows * self.shape.n * self.shape.k

    def inputs(self, seed):
        """Operands, and the rows of each expert as the device and as the host know them; others for another seed."""
        shape, device = self.shape, rank_device()
        generator = torch.Generator(device).manual_seed(seed)
        of_routing = torch.Generator().manual_seed(seed)

        def draw(*sizes):
            return torch.randn(*sizes, generator=generator, dtype=DTYPE, device=device)

        wanted = torch.ones(shape.experts)
        if self.routing == "skewed":
            wanted = (torch.randperm(shape.experts, generator=of_routing) + 1.0) ** -_SKEW
        ids = torch.multinomial(wanted, shape.rows, replacement=True, generator=of_routing)
        counts = torch.bincount(ids, minlength=shape.experts)
        s = SimpleNamespace(splits=counts.int().to(device), offs=counts.cumsum(0).int().to(device))
        s.ends = counts.cumsum(0).tolist()
        s.x, s.w = draw(shape.rows, shape.k), draw(shape.experts, shape.n, shape.k) * shape.k**-0.5
        s.dy = None if self.direction == "forward" else draw(shape.rows, shape.n)
        return s


def cases(operators, shapes, routing, backward):
    """The cases of a run; forwards first, should the time run out."""
    for direction in ("forward", "dx", "dw") if backward else ("forward",):
        for _ in operators:
            yield from (Case(shape, routing, direction) for shape in shapes)


# ---- On the rank ----


@torch.no_grad()
def measure(case, plan):
    """As ``measure.measure``: [(method, whether in a CUDA graph, its times with "config", or {"absent": why})]."""
    first = case.inputs(0)
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // (first.x.nbytes + first.w.nbytes))))
    sets = [first, *(case.inputs(seed) for seed in range(1, count))]
    calls, configs, absent = _methods(case, plan, first)
    references = _references(case, sets[:2])
    for name in list(calls):
        reason = harness.why_it_fails(calls[name], first) or harness.why_it_is_wrong(calls[name], references)
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
        torch.cuda.empty_cache()  # the next shape may need all of it
    return found


def _methods(case, plan, first):
    """({name: call}, {name: config}, {name: why it is absent})."""
    calls = {"cublas-loop": lambda s: by_loop(case, s), "torch-grouped": lambda s: by_torch(case, s)}
    calls["tdkernels"] = lambda s: ours(case, s, None)
    configs, absent = {"tdkernels": _config_of_a_call(case, first)}, {}
    if case.direction != "forward":  # gradients take no other
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
    """What a pass is for the tuner: dx is a product of weights that lie the other way round."""
    shape = case.shape
    n, k = (shape.k, shape.n) if case.direction == "dx" else (shape.n, shape.k)
    layout = {"forward": case.activation or "none", "dx": KN, "dw": DW}[case.direction]
    return Problem.on(rank_device(), "group_gemm", (shape.rows, n, k, shape.experts), DTYPE, layout, 1, 1)


def _config_of_a_call(case, s):
    """What runs where no config is given: the one that is known, or the default."""
    problem = _problem(case)
    return known_config(s.x, problem.shape[1:], problem.layout) or _default(case)


def _default(case):
    return tunable("group_gemm").default(_problem(case), rank_device())


def ours(case, s, config):
    if case.direction == "forward":
        return tdkernels.group_gemm(s.x, s.w, s.splits, activation=case.activation, config=config)
    want_dx = case.direction == "dx"
    pre = s.x.new_empty(0)
    gradients = torch.ops.tdkernels.group_gemm_backward(s.dy, s.x, s.w, s.splits, pre, "", want_dx, not want_dx)
    return gradients[0 if want_dx else 1]


def by_torch(case, s):
    if case.direction == "dw":
        return torch._grouped_mm(s.dy.t(), s.x, offs=s.offs)
    if case.direction == "dx":
        return torch._grouped_mm(s.dy, s.w, offs=s.offs)
    return swiglu_ref(torch._grouped_mm(s.x, s.w.transpose(1, 2), offs=s.offs), case.activation)


def by_loop(case, s):
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
    """Per set it, the results in fp32, and how far off plain torch is in the dtype."""
    found = []
    for s in sets:
        dy = None if s.dy is None else s.dy.float()
        exact = by_loop(case, SimpleNamespace(x=s.x.float(), w=s.w.float(), dy=dy, ends=s.ends))
        found.append((s, exact, harness.errors(by_loop(case, s), exact)))
    return found


# ---- In the calling process ----


def rows(case, found, link_gbps):
    """One row a method: what was measured and what follows from it."""
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
