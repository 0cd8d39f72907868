"""Benchmark tp_moe, the tensor-parallel MoE layer, against NCCL, torch's grouped GEMM and permutes.

    python -m tdkernels bench tp_moe --backward [--shapes mixtral-8x7b,TxIxHxExk] [--routing skewed] [--cuda-graph]

The parts are the gate-up stage, the down stage, the whole forward, and forward plus backward. All parts and methods of
a shape are interleaved in one run. The floor of a part is the larger of its grouped GEMMs alone and the transferred
bytes over the best rate of a link.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

from bench.core import harness, multi_method
from bench.core.measure import _override
from bench.dense.operators import DTYPE
from bench.experts import permute_baseline
from bench.experts.dispatch import drawn_ids
from bench.experts.moe_shapes import TpShape
from bench.experts.tp_moe_methods import ALONE, BOTH, FORWARDS, add_alone, in_fp32, loop_over_experts, ours, sequences
from tdkernels.launch import rank_device
from tdkernels.ops.experts.tp_moe import config as tp_moe_config

OPERATORS = ["tp_moe"]
_COLD_BYTES = 256 << 20  # total size of the input sets that calls cycle through: several times any L2 cache
_MAX_SETS = 8
_WEIGHT_SEED = 1000  # offset that separates the seeds of weights from the seeds of tokens
_ALIGNMENT = 8  # elements; torch's grouped GEMM needs rows of a multiple of 16 bytes


@dataclass(frozen=True)
class Case:
    """One benchmark case: all ``parts`` of a shape on ``ranks`` ranks."""

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
        """Rows of the grouped GEMMs."""
        return self.shape.tokens * self.shape.choices

    @property
    def inner(self):
        """Inner size per rank."""
        return self.shape.inner // self.ranks

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        shape = self.shape
        if shape.tokens % self.ranks:
            return f"{shape.tokens} tokens are not divisible by {self.ranks} ranks"
        if shape.inner % (self.ranks * _ALIGNMENT) or shape.hidden % _ALIGNMENT:
            return f"I / W = {shape.inner} / {self.ranks} and H = {shape.hidden} must be multiples of {_ALIGNMENT}"
        if shape.choices > shape.experts:
            return f"k = {shape.choices} is more than E = {shape.experts}"
        return None

    def flops(self, part):
        """FLOP per rank."""
        down = 2 * self.rows * self.inner * self.shape.hidden
        return {"ag_gemm": 2 * down, "gemm_rs": down, "forward": 3 * down, BOTH: 9 * down}[part]

    def wire_bytes(self, part):
        """Minimum number of bytes that a GPU receives."""
        shards = self.shape.tokens * self.shape.hidden * DTYPE.itemsize * (self.ranks - 1) // self.ranks
        return shards * {"forward": 2, BOTH: 4}.get(part, 1)

    def weights(self, seed):
        """Return (w_gate_up, w_down) of this rank."""
        shape, draw = self.shape, self._draw(_WEIGHT_SEED + seed)
        w_gate_up = draw(shape.experts, 2 * self.inner, shape.hidden).mul_(shape.hidden**-0.5)
        return w_gate_up, draw(shape.experts, shape.hidden, self.inner).mul_(shape.inner**-0.5)

    def inputs(self, seed, weights):
        """Return this rank's operands with ``weights``, drawn with ``seed``."""
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
    """Yield the cases of a run."""
    for _ in operators:
        yield from (Case(shape, ranks, routing, backward) for shape in shapes)


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. See ``multi_method.measure``."""
    sets = _input_sets(case)
    add_up = permute_baseline.fastest_sum(case.shape.tokens, case.shape.hidden, sets[0].weights.repeat(case.ranks, 1))
    return multi_method.measure(
        case.parts, sets, plan,
        methods_of=lambda part: _methods(case, part, sets, plan, add_up),
        alone_of=ALONE.get,
        references_of=lambda part: _references(part, sets[:2], add_up),  # two, because workspaces are double-buffered
        config_of=lambda part: _default_config(case, part, sets[0]),
    )


def _input_sets(case):
    """Return at least two sets of tokens, and enough sets of weights to exceed the caches."""
    weights = [case.weights(0)]
    nbytes = sum(w.nbytes for w in weights[0])
    count = max(1, min(_MAX_SETS, -(-_COLD_BYTES // nbytes))) if rank_device().type == "cuda" else 1
    weights += [case.weights(seed) for seed in range(1, count)]
    sets = [case.inputs(seed, weights[seed % count]) for seed in range(max(2, count))]
    for s in sets:
        add_alone(s)
    return sets


def _methods(case, part, sets, plan, add_up):
    """Return ({name: Method}, {name: reason for absence})."""
    methods = {"sequence": sequences(add_up)[part], "tdkernels": ours(part, sets, None)}
    default = _default_config(case, part, sets[0])
    overrides, absent = multi_method.overridden(plan, default, _override, lambda config: ours(part, sets, config))
    return methods | overrides, absent


def _default_config(case, part, s):
    """Return the heuristic config. The stages of a whole layer have separate configs; return the gate-up stage's."""
    w = s.w_down if part == "gemm_rs" else s.w_gate_up
    shape = case.shape
    return tp_moe_config.default_config(shape.tokens, shape.choices, *w.shape, DTYPE, rank_device())


def _references(part, sets, add_up):
    """Return [(operands, fp32 results, errors of torch + NCCL in the operands' dtype)], one entry per input set."""
    exact, plain = sequences(add_up, loop_over_experts)[part], sequences(add_up)[part]
    found = []
    for s in sets:
        expected = exact.plain(exact.call(in_fp32(s)))
        found.append((s, expected, harness.errors(plain.plain(plain.call(s)), expected)))
    return found


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per part and method, with the measured times and the derived values."""
    shape = case.shape
    common = {
        "op": case.operator, "what": "tp_moe", "shape": str(shape), "name": f"{shape.name} {case.routing}".strip(),
        "tokens": shape.tokens, "inner": shape.inner, "hidden": shape.hidden, "experts": shape.experts,
        "choices": shape.choices, "routing": case.routing, "dtype": str(DTYPE).removeprefix("torch."),
    }
    return [{**common, **fields} for fields in multi_method.derived(found, case.flops, case.wire_bytes, link_gbps)]
