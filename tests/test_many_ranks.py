"""Every operator on more ranks than in other tests: an odd number, and the number of GPUs of a host."""

import pytest

from tests.ops.attention.ag_attention import cases as attention
from tests.ops.attention.ag_attention.oracle import enlarge as of_many_shards
from tests.ops.attention.ag_attention.test_ag_attention import SPECS as ATTENTION
from tests.ops.attention.flash_decode import cases as decoding
from tests.ops.attention.flash_decode.oracle import enlarge as of_many_sequences
from tests.ops.attention.flash_decode.test_flash_decode import SPECS as DECODE
from tests.ops.attention.ulysses import cases as sequence_parallel
from tests.ops.attention.ulysses.test_ulysses import SPECS as ULYSSES
from tests.ops.collectives import cases as collective
from tests.ops.collectives import norm_cases as norms
from tests.ops.collectives.test_collectives import VARIANTS
from tests.ops.collectives.test_norm import VARIANTS as NORMS
from tests.ops.dense import cases as dense
from tests.ops.dense.test_dense import CONFIGS as DENSE
from tests.ops.dense.test_dense import TIMING_SENSITIVE
from tests.ops.experts.dispatch import all_to_all_cases, low_latency_cases
from tests.ops.experts.dispatch import cases as expert_parallel
from tests.ops.experts.dispatch.test_all_to_all import BITS
from tests.ops.experts.dispatch.test_dispatch import CONFIGS as EXPERTS
from tests.ops.experts.ep_moe import cases as expert_layer
from tests.ops.experts.tp_moe import cases as tensor_experts
from tests.ops.experts.tp_moe.test_tp_moe import SPECS as SLICED
from tests.support.ranks import on_ranks
from tests.support.simulated_nodes import thorough

UNEVEN = [3, 0, 7, 1, 2, 5, 0, 4]  # tokens of ranks

# CPU ranks share few cores and are slow to start: by default only the first config of each test runs, on 8 ranks.
each_size = pytest.mark.parametrize("world_size", [8, pytest.param(5, marks=thorough)])


def first(cases):
    """Return the cases; all but the first are marked ``thorough``."""
    others = (case if isinstance(case, tuple) else (case,) for case in cases[1:])
    return [cases[0], *(pytest.param(*case, marks=thorough) for case in others)]


@each_size
@pytest.mark.parametrize("operator, config", [
    case for name in TIMING_SENSITIVE for case in first([(name, config) for config in TIMING_SENSITIVE[name]])
])
def test_dense(world_size, operator, config):
    shapes = [(19, 33, 9), (2, 40, 24)]
    on_ranks(world_size, dense.computes, operator, dense.DTYPES[0], shapes, **DENSE[operator][config])


@each_size
@pytest.mark.parametrize("operator, changes", VARIANTS, ids=str)
def test_collectives(world_size, operator, changes):
    on_ranks(world_size, collective.computes, operator, dense.DTYPES[1], [(5, 7), (150,)], changes)


@each_size
@pytest.mark.parametrize("operator, changes", NORMS, ids=str)
def test_norms(world_size, operator, changes):
    on_ranks(world_size, norms.computes, operator, dense.DTYPES[1], [(11, 70)], changes)


@each_size
@pytest.mark.parametrize("config", first(["small", "per expert", "torch"]))
def test_dispatch_and_combine(world_size, config):
    spec = dict(tokens=UNEVEN, k=3, experts_each=2, width=33, seed=1)
    on_ranks(world_size, expert_parallel.computes, spec, EXPERTS[config])


@each_size
def test_low_latency_dispatch(world_size):
    spec = dict(tokens=UNEVEN, k=3, experts_each=3, width=33, seed=2)
    on_ranks(world_size, low_latency_cases.computes, spec, EXPERTS["small"], 1)


@each_size
def test_all_to_all(world_size):
    on_ranks(world_size, all_to_all_cases.moves, BITS[1:2], 2, None)


@each_size
@pytest.mark.parametrize("config", first(["fused", "default"]))
def test_ep_moe(world_size, config):
    spec = dict(tokens=UNEVEN, k=2, experts_each=2, width=33, hidden=13, seed=3)
    on_ranks(world_size, expert_layer.computes, spec, config)


@each_size
@pytest.mark.parametrize("config", first(["three stages", "default"]))
def test_tp_moe(world_size, config):
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
