"""Every operator on more ranks than the other tests have: an odd number, and as many as a host has GPUs."""

import pytest

from tests.nodes import thorough
from tests.ops import (
    attention,
    collective,
    decoding,
    dense,
    expert_direct,
    expert_layer,
    expert_parallel,
    rows_to_all,
    sequence_parallel,
    tensor_experts,
)
from tests.ops.decode import many as of_many_sequences
from tests.ops.sharded import many as of_many_shards
from tests.ops.test_ag_attention import SPECS as ATTENTION
from tests.ops.test_all_to_all import BITS
from tests.ops.test_collectives import WAYS
from tests.ops.test_dense import CONFIGS as DENSE
from tests.ops.test_dense import HASTY
from tests.ops.test_flash_decode import SPECS as DECODE
from tests.ops.test_moe_ep import CONFIGS as EXPERTS
from tests.ops.test_moe_tp import SPECS as SLICED
from tests.ops.test_ulysses import SPECS as ULYSSES
from tests.ranks import on_ranks

UNEVEN = [3, 0, 7, 1, 2, 5, 0, 4]  # tokens of ranks

# CPU ranks that share few cores take long to begin: usually they are asked the first config of each at 8.
each_size = pytest.mark.parametrize("world_size", [8, pytest.param(5, marks=thorough)])


def first(cases):
    """The cases, of which all but the first are left to those who ask for all."""
    others = (case if isinstance(case, tuple) else (case,) for case in cases[1:])
    return [cases[0], *(pytest.param(*case, marks=thorough) for case in others)]


@each_size
@pytest.mark.parametrize("operator, config", [
    case for name in HASTY for case in first([(name, config) for config in HASTY[name]])
])  # fmt: skip
def test_dense(world_size, operator, config):
    shapes = [(19, 33, 9), (2, 40, 24)]
    on_ranks(world_size, dense.computes, operator, dense.DTYPES[0], shapes, **DENSE[operator][config])


@each_size
@pytest.mark.parametrize("operator, changes", WAYS, ids=str)
def test_collectives(world_size, operator, changes):
    on_ranks(world_size, collective.computes, operator, dense.DTYPES[1], [(5, 7), (150,)], changes)


@each_size
@pytest.mark.parametrize("config", first(["small", "per expert", "torch"]))
def test_dispatch_and_combine(world_size, config):
    spec = dict(tokens=UNEVEN, k=3, experts_each=2, width=33, seed=1)
    on_ranks(world_size, expert_parallel.computes, spec, EXPERTS[config])


@each_size
def test_dispatch_in_one_launch(world_size):
    spec = dict(tokens=UNEVEN, k=3, experts_each=3, width=33, seed=2)
    on_ranks(world_size, expert_direct.computes, spec, EXPERTS["small"], 1)


@each_size
def test_all_to_all(world_size):
    on_ranks(world_size, rows_to_all.moves, BITS[:3], 2, None)


@each_size
@pytest.mark.parametrize("config", first(["fused", "default"]))
def test_layer_of_divided_experts(world_size, config):
    spec = dict(tokens=UNEVEN, k=2, experts_each=2, width=33, hidden=13, seed=3)
    on_ranks(world_size, expert_layer.computes, spec, config)


@each_size
@pytest.mark.parametrize("config", first(["three stages", "default"]))
def test_layer_of_sliced_experts(world_size, config):
    on_ranks(world_size, tensor_experts.computes, SLICED["odd"] | {"tokens": 9}, config)


@each_size
@pytest.mark.parametrize("config, spec", first([("default", "GQA"), ("small blocks", "pages, all at once")]))
def test_decode(world_size, config, spec):
    on_ranks(world_size, decoding.computes, of_many_sequences(DECODE[spec]), config)


@each_size
@pytest.mark.parametrize("config, spec", first([("default", "odd, zigzag"), ("flash", "grouped")]))
def test_attention(world_size, config, spec):
    on_ranks(world_size, attention.computes, of_many_shards(ATTENTION[spec] | {"rows": 9}), config)


@each_size
@pytest.mark.parametrize("config", first(["default", "pushed"]))
def test_ulysses(world_size, config):
    on_ranks(world_size, sequence_parallel.computes, ULYSSES["odd"] | {"positions": 11}, config)
