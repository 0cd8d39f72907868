"""The calls of a fault campaign: every operator, with small operands whose results each rank can compute alone.

    problem = make_problem("gemm_rs forward", shape=0, seed=7, group=group)
    for _ in problem.steps(backward=True):   # one public call or one backward pass per step
        pass
    problem.check()                          # raises AssertionError for a wrong result

The operands of all ranks are derived from the seed, so a check needs no communication and works when a peer is dead.
"""

from tdkernels import EpMoeConfig
from tests.chaos import specialized
from tests.chaos.attention_problems import Attention, Decoding, Ulysses
from tests.chaos.dense_problems import Collective, Dense, ReducedNorm, ReducedProductNorm
from tests.chaos.expert_problems import (
    CAPACITY,
    MAX_TOKENS,
    AllToAll,
    ExpertParallelLayer,
    Experts,
    TensorParallelExperts,
)
from tests.chaos.specialized_problems import SpecializedDense, SpecializedExperts
from tests.ops.collectives.test_collectives import VARIANTS as COLLECTIVE_VARIANTS
from tests.ops.collectives.test_norm import VARIANTS as NORM_VARIANTS
from tests.ops.experts.tp_moe import cases as tensor_experts
from tests.test_protocol import VARIANTS as DENSE_VARIANTS


def _table():
    """Return {name: (class, operator, changes)}."""
    table = {}
    for operator, changes in DENSE_VARIANTS:
        table[f"{operator} {next(iter(changes.values()))}"] = Dense, operator, changes
    for operator, changes in COLLECTIVE_VARIANTS:
        table[f"{operator} {changes.get('exchange', 'one_shot')}"] = Collective, operator, changes
    for operator, changes in NORM_VARIANTS:
        table[f"{operator} {changes.get('exchange', 'one_shot')}"] = ReducedNorm, operator, changes
    table["gemm_ar_rms_norm fused"] = ReducedProductNorm, "gemm_ar_rms_norm", "fused"
    table["gemm_ar_layer_norm fused, split K"] = ReducedProductNorm, "gemm_ar_layer_norm", "fused, split K"
    capacity, bound = {"max_tokens": CAPACITY}, {"max_tokens_per_rank": MAX_TOKENS}
    table |= {
        "all_to_all": (AllToAll, "all_to_all", {}),
        "all_to_all bounded": (AllToAll, "all_to_all", capacity),
        "ep two-phase": (Experts, "ep_dispatch", {}),
        "ep two-phase bounded": (Experts, "ep_dispatch", capacity),
        "ep two-phase per_expert": (Experts, "ep_dispatch", {"combine": "per_expert"}),
        "ep low-latency": (Experts, "ep_dispatch", bound),
        "ep low-latency per_expert": (Experts, "ep_dispatch", {**bound, **capacity, "combine": "per_expert"}),
        "ep halves": (Experts, "ep_dispatch", {**capacity, "halves": True}),
        "ep halves low-latency": (Experts, "ep_dispatch", {**bound, "halves": True}),
    }
    for method in ("sequence", "fused"):
        config = {"config": EpMoeConfig(method=method)}
        table[f"ep_moe {method}"] = ExpertParallelLayer, "ep_moe", config
        table[f"ep_moe {method} bounded"] = ExpertParallelLayer, "ep_moe", {**config, **bound, **capacity}
    for name in ("default", "two stages"):
        table[f"tp_moe {name}"] = TensorParallelExperts, "tp_moe", tensor_experts.CONFIGS[name]
    table |= {f"flash_decode {name}": (Decoding, "flash_decode", name) for name in ("default", "small blocks", "split")}
    table |= {f"ag_attention {name}": (Attention, "ag_attention", name) for name in ("default", "small blocks")}
    table["ulysses_out default"] = Ulysses, "ulysses_out", "default"
    table["ulysses_out sources at once"] = Ulysses, "ulysses_out", "pulled at once"
    table["ulysses_qkv pull"] = Ulysses, "ulysses_qkv", "pulled at once"
    table["ulysses_qkv push"] = Ulysses, "ulysses_qkv", "pushed"
    return table


def specialized_table():
    """Return the entries of TABLE for the warp-specialized kernels.

    TABLE has them on Hopper GPUs only, so a seed is another case there than on other devices.
    """
    table = {name: (SpecializedDense, operator, changes) for name, (operator, *changes) in specialized.DENSE.items()}
    table["tp_moe specialized"] = SpecializedExperts, "tp_moe", specialized.EXPERTS_CONFIG
    return table


TABLE = _table() | (specialized_table() if specialized.on_hopper() else {})
OPERATORS = sorted({operator for _, operator, _ in TABLE.values()} | {"ep_combine", "moe_ag_gemm", "moe_gemm_rs"})


def make_problem(name, shape, seed, group):
    """Return the problem of a key of TABLE, with this rank's operands and expected results."""
    kind, operator, changes = TABLE[name]
    return kind(operator, changes, shape, seed, group)
