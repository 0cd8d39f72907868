"""Experts that are divided between the ranks, against NCCL, torch's grouped product and permutes, by tokens of a rank.

    python -m tdkernels bench ep_moe --backward [--shapes deepseek-v3,HxIxExk] [--tokens 4096,128] [--routing skewed]

The floor is the larger of the grouped products alone and of what has to cross the wire, each token once for a rank
there and back, over the best rate of a link. Where a GPU has no room for its experts and what they are checked against,
there are half as many of them, or a quarter: a row says how many, beside those of the model.
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
from bench.experts.tp_moe_methods import in_fp32, one_by_one
from tdkernels.launch import rank_device
from tdkernels.ops.experts.dispatch.config import default_config
from tdkernels.ops.experts.ep_moe.op import EpMoeConfig

OPERATORS = ["ep_moe"]
_OF_WEIGHTS = 1000  # a seed: other numbers than those of tokens
_ALIGNED = 8  # elements: torch's grouped product wants rows of a multiple of 16 bytes
_MOST_BYTES = 60e9  # of a rank's weights
# What has room beside a rank's weights, in their bytes: the weights in fp32, and gradients in both.
_TIMES_OF_WEIGHTS = {False: 3, True: 9}


@dataclass(frozen=True)
class Case:
    """One shape to measure, on ``tokens`` tokens of each of ``ranks`` ranks."""

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
        """Of a rank."""
        return 3 * self.experts // self.ranks * self.shape.inner * self.shape.hidden * DTYPE.itemsize

    def why_not(self):
        """Why it cannot be measured, or None."""
        shape = self.shape
        if shape.experts % self.ranks:
            return f"E = {shape.experts} is not divisible by {self.ranks} ranks"
        if shape.inner % _ALIGNED or shape.hidden % _ALIGNED:
            return f"I = {shape.inner} and H = {shape.hidden} must be multiples of {_ALIGNED}"
        if shape.choices > shape.experts:
            return f"k = {shape.choices} is more than E = {shape.experts}"
        return None

    def in_room(self, nbytes):
        """The same with as many experts as GPUs of ``nbytes`` of memory have room for."""
        most, case = min(_MOST_BYTES, nbytes / _TIMES_OF_WEIGHTS[self.backward]), self
        while case.weight_bytes > most:
            fewer = dataclasses.replace(case.shape, experts=case.experts // 2)
            smaller = dataclasses.replace(case, shape=fewer)
            if case.experts % 2 or smaller.why_not():
                break
            case = smaller
        return case

    def weights(self):
        """(w_gate_up, w_down) of this rank's experts."""
        shape, draw, local = self.shape, self._draw(_OF_WEIGHTS), self.experts // self.ranks
        w_gate_up = draw(local, 2 * shape.inner, shape.hidden).mul_(shape.hidden**-0.5)
        return w_gate_up, draw(local, shape.hidden, shape.inner).mul_(shape.inner**-0.5)

    def inputs(self, seed, weights):
        """This rank's operands with these weights, and what all ranks' routing comes to; others for another seed."""
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
    """The cases of a run; ``tokens`` None: the usual ones."""
    for _ in operators:
        for shape in shapes:
            yield from (Case(shape, count, ranks, routing, backward) for count in tokens or EP_TOKENS)


# ---- On the ranks ----


@harness.measurement
def measure(case, plan):
    """As ``measure.measure``, of methods (part, name); the times hold what the case's routing comes to, too."""
    if rank_device().type == "cuda":
        torch.cuda.empty_cache()
        room = -harness.slowest([-torch.cuda.mem_get_info()[0]])[0]
        case = case.in_room(room)
    return _measure(case, plan)


def _measure(case, plan):
    weights = case.weights()  # too large for any cache to keep them from call to call
    sets = [case.inputs(seed, weights) for seed in range(2)]  # two: our workspaces have two halves
    for s in sets:
        ep_moe_methods.add_known(s, case.experts)
        ep_moe_methods.add_alone(s, case.experts)
    room = capacity(case, max(s.most_rows for s in sets))
    add_up = permute_baseline.quicker_sum(case.tokens, case.shape.hidden, sets[0].weights)
    found = multi_method.measure(
        case.parts, sets, plan,
        methods_of=lambda part: _methods(case, part, plan, room, add_up),
        alone_of=ALONE.get,
        references_of=lambda part: _references(case, part, sets, add_up),
        config_of=lambda part: EpMoeConfig(ep=default_config(rank_device())),
    )
    summary = {
        "experts": case.experts, "most_rows": max(s.most_rows for s in sets), "max_tokens": room,
        "crossing": sum(s.crossing for s in sets) / len(sets),
    }
    return [(key, graph, {**times, **summary}) for key, graph, times in found]


def _methods(case, part, plan, room, add_up):
    """({name: Method}, {name: why it is absent})."""
    experts = case.experts
    methods = {
        "sequence": ep_moe_methods.sequence(part, experts, add_up),
        "parts": ep_moe_methods.parts(part, experts, room),
        "tdkernels": ep_moe_methods.ours(part, experts),
        "tdkernels-max-tokens": ep_moe_methods.ours(part, experts, room),
        "tdkernels-overlapped": ep_moe_methods.ours(part, experts, room, EpMoeConfig(method="fused")),
    }
    tries, absent = multi_method.overridden(
        plan, default_config(rank_device()), _override,
        lambda config: ep_moe_methods.ours(part, experts, room, EpMoeConfig(ep=config)),
    )
    return methods | tries, absent


def _references(case, part, sets, add_up):
    """Per set it, the results in fp32, and how far off NCCL and torch are in the dtype."""
    exact = ep_moe_methods.sequence(part, case.experts, add_up, one_by_one)
    plain = ep_moe_methods.sequence(part, case.experts, add_up)
    found = []
    for s in sets[: 1 if part == BOTH else None]:  # gradients of weights are large
        wanted = exact.call(in_fp32(s))
        found.append((s, wanted, harness.errors(plain.call(s), wanted)))
    return found


# ---- In the calling process ----


def rows(case, found, link_gbps):
    """One row a part and method: what was measured and what follows from it."""
    shape, summary = case.shape, found[0][2]
    there_and_back = 2 * summary["crossing"] * shape.hidden * DTYPE.itemsize
    products = 6 * summary["most_rows"] * shape.inner * shape.hidden

    def of_part(value, gradients):
        return lambda part: value * (gradients if part == BOTH else 1)

    common = {
        "op": case.operator, "what": "ep_moe", "shape": f"{case.tokens}x{shape}",
        "name": f"{shape.name} {case.routing}".strip(), "tokens": case.tokens, "inner": shape.inner,
        "hidden": shape.hidden, "experts": summary["experts"], "experts_of_model": shape.experts,
        "choices": shape.choices, "routing": case.routing, "dtype": str(DTYPE).removeprefix("torch."),
        "most_rows": summary["most_rows"], "max_tokens": summary["max_tokens"],
    }
    derived = multi_method.derived(found, of_part(products, 3), of_part(there_and_back, 2), link_gbps)
    return [{**common, **fields} for fields in derived]
