"""Tensor-parallel experts against NCCL, torch's grouped product and permutes: halves, the layer, its gradients.

    python -m tdkernels bench tp_moe --backward [--shapes mixtral-8x7b,TxIxHxExk] [--routing skewed] [--cuda-graph]

All parts and methods of a shape take turns in one run. The floor of a part is the larger of its grouped products alone
and of what has to cross the wire, over the best rate of a link.
"""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

from bench import graphs, harness, permutes
from bench.ep import drawn_ids
from bench.measure import _override, timed
from bench.moe_shapes import TpShape
from bench.operators import DTYPE
from bench.tp_moe_methods import ALONE, BOTH, FORWARDS, add_alone, one_by_one, ours, sequences
from tdkernels.launch import rank_device
from tdkernels.ops import moe_ag_gemm_kernel

OPERATORS = ["tp_moe"]
_COLD_BYTES = 256 << 20  # input sets take turns until this much has gone by: several times any L2 cache
_MAX_SETS = 8
_ALIGNED = 8  # elements: torch's grouped product wants rows of a multiple of 16 bytes


@dataclass(frozen=True)
class Case:
    """One shape to measure, in ``parts``, on ``ranks`` ranks."""

    shape: TpShape
    ranks: int
    routing: str = "balanced"
    backward: bool = False
    operator: str = "tp_moe"

    def __str__(self):
        return f"tp_moe {self.shape} {self.shape.name}{' skewed' * (self.routing == 'skewed')}"

    @property
    def parts(self):
        return (*FORWARDS, BOTH) if self.backward else FORWARDS

    @property
    def rows(self):
        """Of the grouped products."""
        return self.shape.tokens * self.shape.choices

    @property
    def inner(self):
        """Of this rank."""
        return self.shape.inner // self.ranks

    def why_not(self):
        """Why it cannot be measured, or None."""
        shape = self.shape
        if shape.tokens % self.ranks:
            return f"{shape.tokens} tokens are not divisible by {self.ranks} ranks"
        if shape.inner % (self.ranks * _ALIGNED) or shape.hidden % _ALIGNED:
            return f"I / W = {shape.inner} / {self.ranks} and H = {shape.hidden} must be multiples of {_ALIGNED}"
        if shape.choices > shape.experts:
            return f"k = {shape.choices} is more than E = {shape.experts}"
        return None

    def flops(self, part):
        """Of a rank."""
        down = 2 * self.rows * self.inner * self.shape.hidden
        return {"ag_gemm": 2 * down, "gemm_rs": down, "forward": 3 * down, BOTH: 9 * down}[part]

    def wire_bytes(self, part):
        """What a GPU receives at least."""
        shards = self.shape.tokens * self.shape.hidden * DTYPE.itemsize * (self.ranks - 1) // self.ranks
        return shards * {"forward": 2, BOTH: 4}.get(part, 1)

    def weights(self, seed):
        """(w_gate_up, w_down) of this rank."""
        shape, draw = self.shape, self._draw(seed)
        w_gate_up = draw(shape.experts, 2 * self.inner, shape.hidden).mul_(shape.hidden**-0.5)
        return w_gate_up, draw(shape.experts, shape.hidden, self.inner).mul_(shape.inner**-0.5)

    def inputs(self, seed, weights):
        """This rank's operands with these weights; others for another seed."""
        shape, draw, me = self.shape, self._draw(seed), dist.get_rank()
        tokens = shape.tokens // self.ranks
        ids = drawn_ids(self.ranks, tokens, shape.experts, shape.choices, self.routing, seed)
        s = SimpleNamespace(ids=ids[me].int().contiguous(), w_gate_up=weights[0], w_down=weights[1])
        s.x, s.dy = draw(tokens, shape.hidden), draw(tokens, shape.hidden)
        s.weights = torch.softmax(draw(tokens, shape.choices).float(), 1)
        return s

    def _draw(self, seed):
        generator = torch.Generator(rank_device()).manual_seed(seed * self.ranks + dist.get_rank())
        return lambda *sizes: torch.randn(*sizes, generator=generator, dtype=DTYPE, device=rank_device())


def cases(operators, shapes, ranks, routing, backward):
    """The cases of a run."""
    for _ in operators:
        yield from (Case(shape, ranks, routing, backward) for shape in shapes)


# ---- On the ranks ----


@torch.no_grad()
def measure(case, plan):
    """As ``measure.measure``, of methods (part, name)."""
    found = _measure(case, plan)
    if rank_device().type == "cuda":
        torch.cuda.empty_cache()  # symmetric memory does not come from torch's allocator
    return found


def _measure(case, plan):
    sets = _input_sets(case)
    add_up = permutes.quicker_sum(case.shape.tokens, case.shape.hidden, sets[0].weights.repeat(case.ranks, 1))
    calls, configs, absent, captured, not_captured = {}, {}, {}, {}, {}
    for part in case.parts:  # the references of one part at a time: those of the weights' gradients are large
        methods, of_part = _methods(case, part, sets, plan, add_up)
        references = _references(part, sets[:2], add_up)  # two: our workspaces have two halves
        for name in list(methods):
            if reason := _why_absent(name, methods[name], references):
                of_part[name] = reason
                del methods[name]
        checked = {(part, name): (lambda s, method=method: method.call(s)) for name, method in methods.items()}
        checked |= {(part, name): call for name, call in ALONE[part].items()}
        if plan.cuda_graph:
            graphs_, reasons = _in_graphs(part, methods, sets, references)
            captured, not_captured = captured | graphs_, not_captured | reasons
        calls |= checked
        configs |= {(part, name): method.config for name, method in methods.items()}
        configs[part, "tdkernels"] = _default_config(case, part, sets[0])
        absent |= {(part, name): reason for name, reason in of_part.items()}
        del references
    return timed(calls, captured, sets, plan, configs, absent, not_captured)


def _input_sets(case):
    """At least two sets of tokens; of the weights as many as it takes until they are in no cache."""
    weights = [case.weights(0)]
    nbytes = sum(w.nbytes for w in weights[0])
    count = max(1, min(_MAX_SETS, -(-_COLD_BYTES // nbytes))) if rank_device().type == "cuda" else 1
    weights += [case.weights(seed) for seed in range(1, count)]
    sets = [case.inputs(seed, weights[seed % count]) for seed in range(max(2, count))]
    for s in sets:
        add_alone(s)
    return sets


def _methods(case, part, sets, plan, add_up):
    """({name: Method}, {name: why it is absent})."""
    methods, absent = {"sequence": sequences(add_up)[part], "tdkernels": ours(part, sets, None)}, {}
    default = _default_config(case, part, sets[0])
    for number, override in enumerate(plan.overrides, 1):
        name = f"tdkernels c{number} {json.dumps(override)}"
        try:
            config = _override(default, override)
        except TypeError as err:  # a field of another operator
            absent[name] = str(err)
        else:
            methods[name] = ours(part, sets, config)
    return methods, absent


def _default_config(case, part, s):
    """What a call without one takes; of a whole layer, whose halves each have their own, the first half's."""
    w = s.w_down if part == "gemm_rs" else s.w_gate_up
    shape = case.shape
    return moe_ag_gemm_kernel.default_config(
        shape.tokens, shape.choices, shape.experts, w.shape[1], DTYPE, rank_device()
    )  # fmt: skip


def _references(part, sets, add_up):
    """Per set it, the results in fp32, and how far off NCCL and torch are in the dtype."""
    exact, plain = sequences(add_up, one_by_one)[part], sequences(add_up)[part]
    found = []
    for s in sets:
        wanted = exact.plain(exact.call(_in_fp32(s)))
        found.append((s, wanted, harness.errors(plain.plain(plain.call(s)), wanted)))
    return found


def _in_fp32(s):
    floats = {name: value.float() for name, value in vars(s).items() if name in _OPERANDS}
    return SimpleNamespace(**{**vars(s), **floats})


_OPERANDS = ("x", "dy", "weights", "w_gate_up", "w_down", "h")


def _why_absent(name, method, references):
    """None if a method can be timed; raises where ours is wrong, or fails in its default config."""
    reason = harness.why_it_fails(method.call, references[0][0])
    wrong = None if reason else harness.why_it_is_wrong(lambda s: method.plain(method.call(s)), references)
    if wrong or (reason and "{" not in name):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason


def _in_graphs(part, methods, sets, references):
    """As ``graphs.capture_all``, of (part, name)."""
    if part == BOTH:
        return {}, {(part, name): "a backward is not captured" for name in [*ALONE[part], *methods]}
    calls = {name: method.call for name, method in methods.items()} | ALONE[part]
    captured, reasons = graphs.capture_all(calls, sets, None, unchecked=calls)
    for name in [name for name in captured if name in methods]:
        outputs = captured[name].outputs
        wrong = harness.why_it_is_wrong(lambda _, o=outputs, m=methods[name]: m.plain(o), references[:1])
        if wrong:
            reasons[name] = wrong
            del captured[name]
    return tuple({(part, name): value for name, value in found.items()} for found in (captured, reasons))


# ---- In the calling process ----


def rows(case, found, link_gbps):
    """One row a part and method: what was measured and what follows from it."""
    ms_of = {(*key, graph): times.get("ms") for key, graph, times in found}
    shape, table = case.shape, []
    for (part, method), graph, times in found:
        ms, wire = times.get("ms"), case.wire_bytes(part)
        wire_ms = wire / link_gbps / 1e6 if link_gbps else 0.0
        products_ms = ms_of.get((part, "grouped", graph)) or ms_of[part, "grouped", False]
        both = ms is not None and method not in ("grouped", "collective")
        base = ms_of.get((part, "sequence", graph))
        floor_ms = max(products_ms, wire_ms)
        table.append({
            "op": case.operator, "what": "tp_moe", "pass": part, "shape": str(shape),
            "name": f"{shape.name} {case.routing}".strip(), "tokens": shape.tokens, "inner": shape.inner,
            "hidden": shape.hidden, "experts": shape.experts, "choices": shape.choices, "routing": case.routing,
            "dtype": str(DTYPE).removeprefix("torch."), "method": method, "graph": graph,
            "absent": times.get("absent"), "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": case.flops(part) / ms / 1e9 if both or (ms and method == "grouped") else None,
            "wire_bytes": wire, "wire_gbps": wire / ms / 1e6 if both or (ms and method == "collective") else None,
            "speedup": base / ms if both and base else None, "floor_ms": floor_ms, "wire_ms": wire_ms or None,
            "efficiency": floor_ms / ms if both else None, "link_gbps": link_gbps, "config": times.get("config"),
        })  # fmt: skip
    return table
