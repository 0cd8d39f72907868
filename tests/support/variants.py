"""Every variant of every operator, as calls with small uneven shapes that check their own results.

The race checker (``tests/sanitizer``) and the fuzzer (``tests/fuzz.py``) run all of them. The functions are shared with
the operators' own tests. Each makes one or more calls, with a backward if there is one, and compares the results with
the reference.
"""

from dataclasses import dataclass

import torch

import tdkernels
from tdkernels import AgGemmConfig
from tdkernels.ops.common.tile_config import LARGE
from tests.ops.attention.ag_attention import cases as attention
from tests.ops.attention.ag_attention.oracle import enlarge as of_shards
from tests.ops.attention.flash_decode import cases as decoding
from tests.ops.attention.flash_decode.oracle import enlarge as of_sequences
from tests.ops.attention.ulysses import cases as sequence_parallel
from tests.ops.collectives import cases as collective
from tests.ops.collectives import norm_cases as norms
from tests.ops.collectives import quantized_cases as quantized
from tests.ops.collectives.test_collectives import VARIANTS as COLLECTIVES
from tests.ops.collectives.test_norm import VARIANTS as NORMS
from tests.ops.dense import cases as dense
from tests.ops.dense import gemm_ar_norm_cases as gemm_norms
from tests.ops.dense import scaled_cases as dense_scaled
from tests.ops.dense import test_dim_and_lists as dim_and_lists
from tests.ops.dense import test_main_grad as main_grad
from tests.ops.dense import test_scaled_calls as scaled_calls
from tests.ops.dense import wire_cases as wire
from tests.ops.experts.dispatch import all_to_all_cases, all_to_all_low_latency_cases, low_latency_cases
from tests.ops.experts.dispatch import cases as expert_parallel
from tests.ops.experts.dispatch.test_dispatch import CONFIGS as EXPERTS
from tests.ops.experts.ep_moe import cases as expert_layer
from tests.ops.experts.tp_moe import cases as tensor_experts
from tests.support.ranks import device
from tests.support.simulated_nodes import on_nodes
from tests.test_protocol import COPY_ENGINE, DIRECT, FORWARD, ONE_SHOT, ONE_SHOT_TRANSPORT, PUSH, TWO_SHOT
from tests.test_protocol import VARIANTS as DENSE

FP32 = torch.float32
_DENSE = (20, 9, 7)  # rows, n, k per rank
SCALED_SHAPE = (24, 9, 144)  # rows, n, k per rank
_TOKENS = [3, 0, 7, 1]
_EXPERTS = dict(tokens=_TOKENS, k=2, experts_each=2, width=33, dtype=FP32, seed=1)
_LAYER = dict(tokens=_TOKENS, k=2, experts_each=2, width=20, hidden=12, dtype=FP32, seed=3)
_SLICED = dict(tokens=9, k=2, experts=3, width=19, hidden=7, dtype=FP32, seed=4)
_DECODE = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6, tokens=2, dtype=FP32, seed=9)
_ATTENTION = dict(rows=21, heads=2, kv_heads=1, d=16, dv=24, dtype=FP32, sharding="zigzag", seed=2)
_ULYSSES = dict(dtype=FP32, positions=11, k=9, n=7, exact=True)
_ROWS = [(FP32, 7)]
# Each operator has one backward, which other configs would repeat.
WITH_BACKWARD = [PUSH, FORWARD, TWO_SHOT]
# The signals of the warp-specialized kernel, which the CPU does not run.
IN_SLICES = {"transport": "push", "warp_specialize": True, "tiles": LARGE}


def _exact(operator, shape, changes):
    backward = True if changes in WITH_BACKWARD else None
    dense.computes(operator, FP32, [shape], exact=True, backward=backward, **changes)


def scaled(operator, scaling, changes):
    """Call a dense operator with scaled fp8 operands."""
    dense_scaled.computes(operator, [SCALED_SHAPE], (scaling, scaling), **changes)


def _gathers_in_slices(rows, n, k):
    """Call ag_gemm with several signals of a chunk, and compare the gathered rows and y."""
    x, weight = (torch.randint(-2, 3, (size, k), device=device()).float() for size in (rows, n))
    config = AgGemmConfig(**IN_SLICES, num_comm_sms=2)
    y, full = tdkernels.ag_gemm(x, weight, return_gathered=True, config=config)
    expected, shards = tdkernels.ag_gemm_ref(x, weight, return_gathered=True)
    assert torch.equal(full, shards) and torch.equal(y, expected)


def _by_tree(operator):
    """Call a dense operator on two ranks, each of which adds two leaves of the reduction tree over K."""
    with tdkernels.batch_invariant(max_ranks=4):
        dense.computes(operator, FP32, [(20, 9, 128)], exact=True)


def _name(operator, changes):
    return " ".join([operator, *(str(value) for value in (changes or {}).values())])


@dataclass(frozen=True)
class Variant:
    """One variant of an operator.

    Attributes: operator; function and args, which make ``calls`` calls of it in each of ``world_size`` ranks; local,
    the number of ranks per simulated node, or None for a single node.
    """

    operator: str
    world_size: int
    function: object
    args: tuple
    calls: int = 1
    local: int | None = None

    def run(self, calls=1):
        """Make at least ``calls`` calls, all of them in one group."""
        if self.local is None:
            self.run_here(calls)
        else:
            on_nodes(self.local, self.run_here, calls)

    def run_here(self, calls):
        """Make the calls; the world is already on simulated nodes if ``local`` is set."""
        for _ in range(-(-calls // self.calls)):
            self.function(*self.args)


ONE_NODE = {
    **{_name(op, changes): Variant(op, 3, _exact, (op, _DENSE, changes)) for op, changes in DENSE},
    **{f"{op} tree": Variant(op, 2, _by_tree, (op,)) for op in ("gemm_rs", "gemm_ar")},
    "ag_gemm push in slices": Variant("ag_gemm", 3, _exact, ("ag_gemm", (20, 9, 1030), IN_SLICES)),
    "ag_gemm gathered rows in slices": Variant("ag_gemm", 3, _gathers_in_slices, (20, 9, 1030)),
    "ag_gemm of two weights": Variant(
        "ag_gemm", 3, dim_and_lists.computes, ([((2, 3), (4, 5), 8, 1)], FP32, "push"), 2
    ),
    **{
        f"{_name(op, changes)} scaled by {scaling}": Variant(op, 3, scaled, (op, scaling, changes), 2)
        for op, scaling, changes in (
            ("ag_gemm", "block", PUSH), ("ag_gemm", "row", COPY_ENGINE), ("ag_gemm", "row", ONE_SHOT_TRANSPORT),
            ("gemm_rs", "block", FORWARD), ("gemm_rs", "row", DIRECT), ("gemm_ar", "block", ONE_SHOT),
        )
    },
    "ag_gemm of two scaled weights": Variant("ag_gemm", 3, scaled_calls.gathers, ((2, 3), 1, (4, 5), 48, "row")),
    "column_linear pipelined backward": Variant("column_linear", 3, main_grad.pipelined_column_linear, (15,), 2),
    "gemm_ar one_shot split K": Variant(
        "gemm_ar", 3, _exact, ("gemm_ar", (5, 9, 140), {"exchange": "one_shot", "split_k": 2})
    ),
    **{
        _name(op, changes): Variant(op, 3, collective.computes_gradient, (op, FP32, changes), 3)
        for op, changes in COLLECTIVES
    },
    **{
        f"{op} wire": Variant(op, 3, wire.computes, (op, FP32, [(20, 9, 130)], 2), 2) for op in ("ag_gemm", "gemm_rs")
    },
    **{
        f"{op} {config}": Variant(op, 3, gemm_norms.computes, (op, FP32, [shape], config), 2)
        for op, shape, config in (
            ("gemm_ar_rms_norm", (18, 70, 7), "fused"), ("gemm_ar_layer_norm", (5, 33, 70), "fused, split K"),
            ("gemm_ar_layer_norm", (2, 33, 9), "fused, shared rows"), ("gemm_ar_rms_norm", (1, 1100, 3), "fused, wide"),
        )
    },
    "all_reduce quantized": Variant(
        "all_reduce", 3, quantized.computes, (FP32, [(3400,)], quantized.SMALL_CHUNKS), 2
    ),
    **{
        f"{op} {changes.get('exchange', 'one_shot')}": Variant(op, 3, norms.computes, (op, FP32, [(7, 70)], changes), 4)
        for op, changes in NORMS
    },
    "all_to_all": Variant("all_to_all", 3, all_to_all_cases.moves, (_ROWS, 2, None), 2),
    "all_to_all low latency": Variant("all_to_all", 3, all_to_all_low_latency_cases.moves, (_ROWS, 2, None), 2),
    **{
        f"ep_dispatch {config}": Variant("ep_dispatch", 3, expert_parallel.computes, (_EXPERTS, EXPERTS[config]))
        for config in ("small", "per expert")
    },
    "ep_dispatch low latency": Variant(
        "ep_dispatch", 3, low_latency_cases.computes, (_EXPERTS, EXPERTS["small"], 2), 4
    ),
    "ep_moe": Variant("ep_moe", 3, expert_layer.computes, (_LAYER, "default")),
    "ep_moe fused": Variant("ep_moe", 3, expert_layer.computes, (_LAYER, "fused")),
    "tp_moe": Variant("tp_moe", 3, tensor_experts.computes, (_SLICED, "default")),
    "tp_moe three stages": Variant("tp_moe", 3, tensor_experts.computes, (_SLICED, "three stages")),
    "flash_decode": Variant("flash_decode", 3, decoding.computes, (of_sequences(_DECODE), "small blocks")),
    "flash_decode in chunks": Variant(
        "flash_decode", 3, decoding.computes, (of_sequences(dict(_DECODE, keys=40)), "chunks"), 2
    ),
    **{
        f"flash_decode split, {ranks} ranks": Variant(
            "flash_decode", ranks, decoding.computes, (of_sequences(dict(_DECODE, tokens=1)), "split"), 2
        )
        for ranks in (2, 3)
    },
    "ag_attention": Variant("ag_attention", 3, attention.computes, (of_shards(_ATTENTION), "small blocks")),
    "ag_attention large chunks": Variant(
        "ag_attention", 3, attention.computes, (of_shards(_ATTENTION), "large chunks")
    ),
    **{
        f"ulysses {config}": Variant("ulysses", 3, sequence_parallel.computes, (_ULYSSES, config))
        for config in ("pulled at once", "pushed")
    },
}
ACROSS_NODES = {
    **{
        f"{op} across nodes of {local}": Variant(op, world_size, _exact, (op, (5, 9, 7), {}), local=local)
        for op in ("ag_gemm", "gemm_rs", "gemm_ar") for world_size, local in ((3, 1), (4, 2))
    },
    "ag_gemm wire across nodes": Variant("ag_gemm", 4, wire.computes, ("ag_gemm", FP32, [(20, 9, 130)], 2), 2, local=2),
    "all_to_all across nodes": Variant("all_to_all", 4, all_to_all_cases.moves, (_ROWS, 2, None), 2, local=2),
    "ep_dispatch across nodes": Variant(
        "ep_dispatch", 4, expert_parallel.computes, (_EXPERTS, EXPERTS["small"]), local=2
    ),
    "flash_decode across nodes": Variant(
        "flash_decode", 4, decoding.computes, (of_sequences(_DECODE), "small blocks"), local=2
    ),
}
VARIANTS = ONE_NODE | ACROSS_NODES
