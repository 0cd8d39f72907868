"""Attention over a sequence that the ranks share: ours, torch's alone, and torch's behind NCCL's all-gathers.

    python -m tdkernels bench ag_attention --backward [--tokens 8192,32768] [--sharding zigzag] [--shapes h32-kv8]

Causal, one sequence, both passes of a problem in one run. The floor is the larger of the fastest attention alone and
of what has to cross the wire, over the best rate of a link. Of long sequences some heads are checked: what they are
compared with is in fp32, and takes far longer than what is measured.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tdkernels
from bench.attention import ag_attention_methods as methods
from bench.attention.shapes import AttentionShape
from bench.core import harness, multi_method
from bench.core.measure import _override
from bench.dense.operators import DTYPE
from tdkernels.launch import rank_device
from tdkernels.ops.attention.ag_attention.config import completed

OPERATORS = ["ag_attention"]
PEERS = tuple(methods.PEERS)
SHARDINGS = ("zigzag", "contiguous")
_SCORES = 1 << 33  # about as many are checked


@dataclass(frozen=True)
class Case:
    """One shape to measure on ``ranks`` ranks, a sharding at a time."""

    shape: AttentionShape
    ranks: int
    sharding: str
    backward: bool = False
    operator: str = "ag_attention"

    def __str__(self):
        return f"ag_attention {self.shape} {self.shape.name} {self.sharding}"

    @property
    def parts(self):
        return ("forward", "backward") if self.backward else ("forward",)

    @property
    def rows(self):
        """Of a rank."""
        return self.shape.tokens // self.ranks

    @property
    def checked(self):
        """How many kv heads are."""
        group = self.shape.heads // self.shape.kv_heads
        return min(self.shape.kv_heads, max(1, _SCORES // (group * self.shape.tokens**2)))

    def why_not(self):
        """Why it cannot be measured, or None."""
        shape, pieces = self.shape, self.ranks * (2 if self.sharding == "zigzag" else 1)
        if shape.tokens % pieces:
            return f"{shape.tokens} tokens are not divisible by {pieces} pieces"
        if shape.heads % shape.kv_heads:
            return f"{shape.heads} query heads are not divisible by {shape.kv_heads} kv heads"
        if self.ranks == 1 and self.sharding == "zigzag":
            return "one rank has both pieces"
        return None

    def flops(self, part):
        """Of the mean rank."""
        forward = 2 * self.shape.tokens**2 * self.shape.heads * self.shape.dim // self.ranks
        return forward if part == "forward" else 5 * forward // 2

    def wire_bytes(self, part):
        """What some GPU receives at least: keys and values of the others; of the backward sums of their gradients."""
        shard = self.rows * self.shape.kv_heads * self.shape.dim * DTYPE.itemsize
        return 2 * shard * (self.ranks - 1)

    def inputs(self, seed):
        """This rank's operands; others for another seed."""
        shape, device = self.shape, rank_device()
        generator = torch.Generator(device).manual_seed(seed * self.ranks + dist.get_rank())

        def draw(heads):
            return torch.randn(1, self.rows, heads, shape.dim, generator=generator, dtype=DTYPE, device=device)

        s = SimpleNamespace(q=draw(shape.heads), k=draw(shape.kv_heads), v=draw(shape.kv_heads), do=draw(shape.heads))
        methods.add_alone(self, s)
        return s


def cases(operators, shapes, shardings, ranks, backward):
    """The cases of a run."""
    for _ in operators:
        for shape in shapes:
            yield from (Case(shape, ranks, sharding, backward) for sharding in shardings)


# ---- On the ranks ----


@harness.measurement
def measure(case, plan):
    """As ``measure.measure``, of methods (part, name)."""
    sets = [case.inputs(seed) for seed in range(2)]  # two: our workspaces have two halves
    attentions = methods.attentions(case, plan.peers)
    return multi_method.measure(
        case.parts, sets, plan,
        methods_of=lambda part: _methods(case, part, plan, attentions),
        alone_of=lambda part: {"collective": methods.collective(part)} if case.ranks > 1 else {},
        references_of=lambda part: _references(case, part, sets),
        config_of=lambda part: _config(case, sets[0]),
    )


def _methods(case, part, plan, attentions):
    """({name: Method}, {name: why it is absent})."""
    found = {f"attention {name}": methods.alone(case, part, attend) for name, attend in attentions.items()}
    found |= {f"sequence {name}": methods.sequence(case, part, attend) for name, attend in attentions.items()}
    found["tdkernels"] = methods.ours(case, part, None)
    tries, absent = multi_method.overridden(
        plan, _default_config(case), _override, lambda config: methods.ours(case, part, config)
    )
    return found | tries, absent


def _config(case, s):
    """What a call without one takes."""
    if case.ranks == 1:
        return _default_config(case)
    return tdkernels.explain("ag_attention", s.q, s.k, s.v, layout=f"causal {case.sharding}").config


def _default_config(case):
    return completed(None, case.rows, case.shape.dim, DTYPE, rank_device())


def _references(case, part, sets):
    """Per set it, the outputs in fp32, and how far off torch is in the dtype."""
    found = []
    for s in sets:
        wanted = methods.exact(case, part, s)
        found.append((s, wanted, harness.errors(methods.plain(case, part, s), wanted)))
    return found


# ---- In the calling process ----


def rows(case, found, link_gbps):
    """One row a part and method: what was measured and what follows from it."""
    shape, name = case.shape, f"{case.shape.name} {case.sharding}".strip()
    common = {
        "op": case.operator, "what": "ag_attention", "shape": str(shape), "name": name,
        "tokens": shape.tokens, "heads": shape.heads, "kv_heads": shape.kv_heads, "dim": shape.dim,
        "sharding": case.sharding, "dtype": str(DTYPE).removeprefix("torch."),
    }
    return [{**common, **fields} for fields in multi_method.derived(found, case.flops, case.wire_bytes, link_gbps)]
