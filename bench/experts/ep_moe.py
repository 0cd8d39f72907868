"""Benchmark ep_moe, the expert-parallel MoE layer, against NCCL, torch's grouped GEMM and permutes, by tokens per rank.

    python -m tdkernels bench ep_moe --backward [--shapes deepseek-v3,HxIxExk] [--tokens 4096,128] [--routing skewed]

The floor is the larger of the grouped GEMMs alone and the transferred bytes over the best rate of a link, where a token
counts once per destination rank in each direction. If a GPU has too little memory for its experts and their references,
the number of experts is halved until they fit; rows contain this number and the number of experts of the model.
"""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

from bench.core import harness, multi_method
from bench.core.measure import _override
from bench.dense.operators import DTYPE
from bench.experts import ep_moe_methods, permute_baseline
from bench.experts.dispatch import capacity, drawn_ids, traffic
from bench.experts.ep_moe_methods import ALONE, BOTH, FORWARD
from bench.experts.moe_shapes import EP_TOKENS, EpShape
from bench.experts.tp_moe_methods import in_fp32, loop_over_experts
from tdkernels.launch import rank_device
from tdkernels.ops.experts.dispatch.config import default_config
from tdkernels.ops.experts.ep_moe.op import EpMoeConfig

OPERATORS = ["ep_moe"]
_WEIGHT_SEED = 1000  # differs from the seeds of the tokens
_ALIGNMENT = 8  # elements; torch's grouped GEMM needs rows of a multiple of 16 bytes
_MAX_WEIGHT_BYTES = 60e9  # per rank
# Required memory as a multiple of a rank's weights, without and with a backward: weights and their gradients, also in
# fp32 for the reference.
_MEMORY_FACTOR = {False: 3, True: 9}


@dataclass(frozen=True)
class Case:
    """One benchmark case: a shape with ``tokens`` tokens per rank on ``ranks`` ranks."""

    shape: EpShape
    tokens: int
    ranks: int
    routing: str = "balanced"
    backward: bool = False
    operator: str = "ep_moe"

    def __str__(self):
        name = f"{self.shape} {self.shape.name}".strip()
        return f"ep_moe {name} {self.tokens} tokens{' skewed' * (self.routing == 'skewed')}"

    @property
    def parts(self):
        return (FORWARD, BOTH) if self.backward else (FORWARD,)

    @property
    def experts(self):
        return self.shape.experts

    @property
    def choices(self):
        return self.shape.choices

    @property
    def weight_bytes(self):
        """Bytes of a rank's weights."""
        return 3 * self.experts // self.ranks * self.shape.inner * self.shape.hidden * DTYPE.itemsize

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        shape = self.shape
        if shape.experts % self.ranks:
            return f"E = {shape.experts} is not divisible by {self.ranks} ranks"
        if shape.inner % _ALIGNMENT or shape.hidden % _ALIGNMENT:
            return f"I = {shape.inner} and H = {shape.hidden} must be multiples of {_ALIGNMENT}"
        if shape.choices > shape.experts:
            return f"k = {shape.choices} is more than E = {shape.experts}"
        return None

    def fit_memory(self, nbytes):
        """Return the case with as many experts as fit into ``nbytes`` of GPU memory."""
        limit, case = min(_MAX_WEIGHT_BYTES, nbytes / _MEMORY_FACTOR[self.backward]), self
        while case.weight_bytes > limit:
            fewer = dataclasses.replace(case.shape, experts=case.experts // 2)
            smaller = dataclasses.replace(case, shape=fewer)
            if case.experts % 2 or smaller.why_not():
                break
            case = smaller
        return case

    def weights(self):
        """Return (w_gate_up, w_down) of this rank's experts."""
        shape, draw, local = self.shape, self._draw(_WEIGHT_SEED), self.experts // self.ranks
        w_gate_up = draw(local, 2 * shape.inner, shape.hidden).mul_(shape.hidden**-0.5)
        return w_gate_up, draw(local, shape.hidden, shape.inner).mul_(shape.inner**-0.5)

    def inputs(self, seed, weights):
        """Return this rank's operands with ``weights`` and the traffic of all ranks' routing, drawn with ``seed``."""
        shape, draw, me = self.shape, self._draw(seed), dist.get_rank()
        ids = drawn_ids(self.ranks, self.tokens, self.experts, self.choices, self.routing, seed)
        s = SimpleNamespace(ids=ids[me].int().contiguous(), w_gate_up=weights[0], w_down=weights[1])
        s.x, s.dy = draw(self.tokens, shape.hidden), draw(self.tokens, shape.hidden)
        s.weights = torch.softmax(draw(self.tokens, self.choices).float(), 1)
        _, s.most_rows, s.crossing, _ = traffic(ids // (self.experts // self.ranks), me)
        return s

    def _draw(self, seed):
        generator = torch.Generator(rank_device()).manual_seed(seed * self.ranks + dist.get_rank())
        return lambda *sizes: torch.randn(*sizes, generator=generator, dtype=DTYPE, device=rank_device())


def cases(operators, shapes, tokens, ranks, routing, backward):
    """Yield the cases of a run; ``tokens`` None uses the default token counts."""
    for _ in operators:
        for shape in shapes:
            yield from (Case(shape, count, ranks, routing, backward) for count in tokens or EP_TOKENS)


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. See ``multi_method.measure``; the times include the routing's traffic."""
    if rank_device().type == "cuda":
        torch.cuda.empty_cache()
        free_bytes = -harness.slowest([-torch.cuda.mem_get_info()[0]])[0]
        case = case.fit_memory(free_bytes)
    return _measure(case, plan)


def _measure(case, plan):
    weights = case.weights()  # larger than any cache
    sets = [case.inputs(seed, weights) for seed in range(2)]  # two, because workspaces are double-buffered
    for s in sets:
        ep_moe_methods.add_known_sizes(s, case.experts)
        ep_moe_methods.add_alone(s, case.experts)
    max_tokens = capacity(case, max(s.most_rows for s in sets))
    add_up = permute_baseline.fastest_sum(case.tokens, case.shape.hidden, sets[0].weights)
    found = multi_method.measure(
        case.parts, sets, plan,
        methods_of=lambda part: _methods(case, part, plan, max_tokens, add_up),
        alone_of=ALONE.get,
        references_of=lambda part: _references(case, part, sets, add_up),
        config_of=lambda part: EpMoeConfig(ep=default_config(rank_device())),
    )
    summary = {
        "experts": case.experts, "most_rows": max(s.most_rows for s in sets), "max_tokens": max_tokens,
        "crossing": sum(s.crossing for s in sets) / len(sets),
    }
    return [(key, graph, {**times, **summary}) for key, graph, times in found]


def _methods(case, part, plan, max_tokens, add_up):
    """Return ({name: Method}, {name: reason for absence})."""
    experts = case.experts
    methods = {
        "sequence": ep_moe_methods.sequence(part, experts, add_up),
        "parts": ep_moe_methods.parts(part, experts, max_tokens),
        "tdkernels": ep_moe_methods.ours(part, experts),
        "tdkernels-max-tokens": ep_moe_methods.ours(part, experts, max_tokens),
        "tdkernels-overlapped": ep_moe_methods.ours(part, experts, max_tokens, EpMoeConfig(method="fused")),
    }
    overrides, absent = multi_method.overridden(
        plan, default_config(rank_device()), _override,
        lambda config: ep_moe_methods.ours(part, experts, max_tokens, EpMoeConfig(ep=config)),
    )
    return methods | overrides, absent


def _references(case, part, sets, add_up):
    """Return [(operands, fp32 results, errors of torch + NCCL in the operands' dtype)], one entry per input set."""
    exact = ep_moe_methods.sequence(part, case.experts, add_up, loop_over_experts)
    plain = ep_moe_methods.sequence(part, case.experts, add_up)
    found = []
    for s in sets[: 1 if part == BOTH else None]:  # one set, because weight gradients are large
        expected = exact.call(in_fp32(s))
        found.append((s, expected, harness.errors(plain.call(s), expected)))
    return found


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per part and method, with the measured times and the derived values."""
    shape, summary = case.shape, found[0][2]
    wire_bytes = 2 * summary["crossing"] * shape.hidden * DTYPE.itemsize
    flops = 6 * summary["most_rows"] * shape.inner * shape.hidden

    def by_part(value, backward_factor):
        return lambda part: value * (backward_factor if part == BOTH else 1)

    common = {
        "op": case.operator, "what": "ep_moe", "shape": f"{case.tokens}x{shape}",
        "name": f"{shape.name} {case.routing}".strip(), "tokens": case.tokens, "inner": shape.inner,
        "hidden": shape.hidden, "experts": summary["experts"], "experts_of_model": shape.experts,
        "choices": shape.choices, "routing": case.routing, "dtype": str(DTYPE).removeprefix("torch."),
        "most_rows": summary["most_rows"], "max_tokens": summary["max_tokens"],
    }
    derived = multi_method.derived(found, by_part(flops, 3), by_part(wire_bytes, 2), link_gbps)
    return [{**common, **fields} for fields in derived]
