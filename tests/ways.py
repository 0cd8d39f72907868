"""Every operator in every variant, as calls with small uneven shapes that check their own results.

For what is asked of all of them: the race checker (``tests/sanitizer``) and the fuzzer (``tests/fuzz.py``). The
functions are those that the operators' own tests use; each makes one call or a few, forward and backward where there is
a backward, and compares the results with the reference.
"""

import torch

from tests.nodes import on_nodes
from tests.ops import (
    across_nodes,
    attention,
    collective,
    decode_nodes,
    decoding,
    dense,
    expert_direct,
    expert_layer,
    expert_parallel,
    rows_to_all,
    rows_to_all_direct,
    sequence_parallel,
    tensor_experts,
)
from tests.ops.decode import many as of_sequences
from tests.ops.sharded import many as of_shards
from tests.ops.test_collectives import WAYS as COLLECTIVES
from tests.ops.test_moe_ep import CONFIGS as EXPERTS
from tests.test_protocol import WAYS as DENSE

FP32 = torch.float32
_DENSE = (20, 9, 7)  # rows, n, k of a rank
_TOKENS = [3, 0, 7, 1]
_EXPERTS = dict(tokens=_TOKENS, k=2, experts_each=2, width=33, dtype=FP32, seed=1)
_LAYER = dict(tokens=_TOKENS, k=2, experts_each=2, width=20, hidden=12, dtype=FP32, seed=3)
_SLICED = dict(tokens=9, k=2, experts=3, width=19, hidden=7, dtype=FP32, seed=4)
_DECODE = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6, tokens=2, dtype=FP32, seed=9)
_ATTENTION = dict(rows=21, heads=2, kv_heads=1, d=16, dv=24, dtype=FP32, sharding="zigzag", seed=2)
_ULYSSES = dict(dtype=FP32, positions=11, k=9, n=7, exact=True)
_ROWS = [(FP32, 7)]


def _exact(operator, shape, changes):
    dense.computes(operator, FP32, [shape], exact=True, **changes)


def _exact_across_nodes(operator, local, changes):
    """The group is the world's scratch state, so that all calls share workspaces, as in one group."""
    on_nodes(local, _exact, operator, (5, 9, 7), changes)


def _name(operator, changes):
    return " ".join([operator, *(str(value) for value in (changes or {}).values())])


# name -> (operator, world size, function, arguments)
ONE_NODE = {
    **{_name(op, changes): (op, 3, _exact, (op, _DENSE, changes)) for op, changes in DENSE},
    **{
        _name(op, changes): (op, 3, collective.has_a_gradient, (op, FP32, changes))
        for op, changes in COLLECTIVES
    },
    "all_to_all": ("all_to_all", 3, rows_to_all.moves, (_ROWS, 2, None)),
    "all_to_all low latency": ("all_to_all", 3, rows_to_all_direct.moves, (_ROWS, 2, None)),
    **{
        f"ep_dispatch ep_combine {config}": ("ep_dispatch", 3, expert_parallel.computes, (_EXPERTS, EXPERTS[config]))
        for config in ("small", "per expert")
    },
    "ep_dispatch ep_combine low latency": ("ep_dispatch", 3, expert_direct.computes, (_EXPERTS, EXPERTS["small"], 2)),
    "ep_moe": ("ep_moe", 3, expert_layer.computes, (_LAYER, "default")),
    "ep_moe fused": ("ep_moe", 3, expert_layer.computes, (_LAYER, "fused")),
    "tp_moe": ("tp_moe", 3, tensor_experts.computes, (_SLICED, "default")),
    "tp_moe three stages": ("tp_moe", 3, tensor_experts.computes, (_SLICED, "three stages")),
    "flash_decode": ("flash_decode", 3, decoding.computes, (of_sequences(_DECODE), "small blocks")),
    "ag_attention": ("ag_attention", 3, attention.computes, (of_shards(_ATTENTION), "small blocks")),
    "ag_attention large chunks": ("ag_attention", 3, attention.computes, (of_shards(_ATTENTION), "large chunks")),
    **{
        f"ulysses {config}": ("ulysses", 3, sequence_parallel.computes, (_ULYSSES, config))
        for config in ("pulled at once", "pushed")
    },
}  # fmt: skip
ACROSS_NODES = {
    **{
        f"{op} across nodes of {local}": (op, world_size, _exact_across_nodes, (op, local, {}))
        for op in ("ag_gemm", "gemm_rs", "gemm_ar") for world_size, local in ((3, 1), (4, 2))
    },
    "all_to_all across nodes": ("all_to_all", 4, on_nodes, (2, rows_to_all.moves, _ROWS, 2, None)),
    "ep_dispatch ep_combine across nodes": (
        "ep_dispatch", 4, on_nodes, (2, expert_parallel.computes, _EXPERTS, EXPERTS["small"])
    ),
    "flash_decode across nodes": ("flash_decode", 4, decode_nodes.computes, (_DECODE, "small blocks", 2)),
}  # fmt: skip
WAYS = ONE_NODE | ACROSS_NODES
