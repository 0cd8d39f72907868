"""Benchmark ag_attention: attention over a sharded sequence, against torch's attention with NCCL's all-gathers.

    python -m tdkernels bench ag_attention --backward [--tokens 8192,32768] [--sharding zigzag] [--shapes h32-kv8]

Causal attention over one sequence; both passes of a problem are measured in one run. The floor is the larger of the
fastest attention alone and the transferred bytes over the best rate of a link. For long sequences only some heads are
checked, because the fp32 reference takes far longer than the measured kernels.
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
_SCORES = 1 << 33  # approximate number of attention scores to check


@dataclass(frozen=True)
class Case:
    """One benchmark case: a shape and a sharding on ``ranks`` ranks."""

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
        """Tokens per rank."""
        return self.shape.tokens // self.ranks

    @property
    def checked(self):
        """Number of kv heads to check."""
        group = self.shape.heads // self.shape.kv_heads
        return min(self.shape.kv_heads, max(1, _SCORES // (group * self.shape.tokens**2)))

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        shape, pieces = self.shape, self.ranks * (2 if self.sharding == "zigzag" else 1)
        if shape.tokens % pieces:
            return f"{shape.tokens} tokens are not divisible by {pieces} chunks"
        if shape.heads % shape.kv_heads:
            return f"{shape.heads} query heads are not divisible by {shape.kv_heads} kv heads"
        if self.ranks == 1 and self.sharding == "zigzag":
            return "zigzag sharding needs at least two ranks"
        return None

    def flops(self, part):
        """FLOP per rank, averaged over the ranks."""
        forward = 2 * self.shape.tokens**2 * self.shape.heads * self.shape.dim // self.ranks
        return forward if part == "forward" else 5 * forward // 2

    def wire_bytes(self, part):
        """Minimum bytes received by the busiest GPU: keys and values, or in the backward sums of their gradients."""
        shard = self.rows * self.shape.kv_heads * self.shape.dim * DTYPE.itemsize
        return 2 * shard * (self.ranks - 1)

    def inputs(self, seed):
        """Return this rank's operands, drawn with ``seed``."""
        shape, device = self.shape, rank_device()
        generator = torch.Generator(device).manual_seed(seed * self.ranks + dist.get_rank())

        def draw(heads):
            return torch.randn(1, self.rows, heads, shape.dim, generator=generator, dtype=DTYPE, device=device)

        s = SimpleNamespace(q=draw(shape.heads), k=draw(shape.kv_heads), v=draw(shape.kv_heads), do=draw(shape.heads))
        methods.add_alone(self, s)
        return s


def cases(operators, shapes, shardings, ranks, backward):
    """Yield the cases of a run."""
    for _ in operators:
        for shape in shapes:
            yield from (Case(shape, ranks, sharding, backward) for sharding in shardings)


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. See ``multi_method.measure``."""
    sets = [case.inputs(seed) for seed in range(2)]  # two, because workspaces are double-buffered
    attentions = methods.attentions(case, plan.peers)
    return multi_method.measure(
        case.parts, sets, plan,
        methods_of=lambda part: _methods(case, part, plan, attentions),
        alone_of=lambda part: {"collective": methods.collective(part)} if case.ranks > 1 else {},
        references_of=lambda part: _references(case, part, sets),
        config_of=lambda part: _config(case, sets[0]),
    )


def _methods(case, part, plan, attentions):
    """Return ({name: Method}, {name: reason for absence})."""
    found = {f"attention {name}": methods.alone(case, part, attend) for name, attend in attentions.items()}
    found |= {f"sequence {name}": methods.sequence(case, part, attend) for name, attend in attentions.items()}
    found["tdkernels"] = methods.ours(case, part, None)
    overrides, absent = multi_method.overridden(
        plan, _default_config(case), _override, lambda config: methods.ours(case, part, config)
    )
    return found | overrides, absent


def _config(case, s):
    """Return the config that a call without an explicit config selects."""
    if case.ranks == 1:
        return _default_config(case)
    return tdkernels.explain("ag_attention", s.q, s.k, s.v, layout=f"causal {case.sharding}").config


def _default_config(case):
    return completed(None, case.rows, case.shape.dim, DTYPE, rank_device())


def _references(case, part, sets):
    """Return [(operands, fp32 outputs, errors of torch in the operands' dtype)], one entry per input set."""
    found = []
    for s in sets:
        expected = methods.exact(case, part, s)
        found.append((s, expected, harness.errors(methods.plain(case, part, s), expected)))
    return found


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per part and method, with the measured times and the derived values."""
    shape, name = case.shape, f"{case.shape.name} {case.sharding}".strip()
    common = {
        "op": case.operator, "what": "ag_attention", "shape": str(shape), "name": name,
        "tokens": shape.tokens, "heads": shape.heads, "kv_heads": shape.kv_heads, "dim": shape.dim,
        "sharding": case.sharding, "dtype": str(DTYPE).removeprefix("torch."),
    }
    return [{**common, **fields} for fields in multi_method.derived(found, case.flops, case.wire_bytes, link_gbps)]
