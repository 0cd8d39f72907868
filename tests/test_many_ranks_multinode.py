"""Multi-node operators on 8 ranks: two nodes of four ranks, and four nodes of two."""

import pytest

from tests.ops.attention.flash_decode import multinode_cases as decode_nodes
from tests.ops.attention.flash_decode.oracle import enlarge
from tests.ops.attention.flash_decode.test_flash_decode import SPECS as DECODE
from tests.ops.dense import multinode_cases
from tests.ops.dense.cases import DTYPES
from tests.ops.dense.test_gemm_ar_multinode import SMALL
from tests.ops.experts.dispatch import all_to_all_cases
from tests.ops.experts.dispatch import cases as expert_parallel
from tests.ops.experts.dispatch.test_all_to_all import BITS
from tests.ops.experts.dispatch.test_dispatch import CONFIGS as EXPERTS
from tests.support.ranks import on_ranks
from tests.support.simulated_nodes import on_nodes

each_topology = pytest.mark.parametrize("world_size, local", [(8, 4), (8, 2)])
SHAPES = [(19, 33, 9), (2, 40, 24)]


@each_topology
@pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_dense(world_size, local, operator):
    on_ranks(world_size, multinode_cases.computes, operator, DTYPES[0], local, SHAPES)


@each_topology
def test_single_owner_reduction(world_size, local):
    # Several tiles for each owner, so that every node reduces some of them.
    args = (multinode_cases.computes, "gemm_ar", DTYPES[0], local, [(83, 70, 9), (19, 33, 9)])
    on_ranks(world_size, multinode_cases.adding_once, *args, **SMALL)


@each_topology
@pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_dense_in_any_network_order(world_size, local, operator):
    on_ranks(world_size, multinode_cases.computes_in_any_network_order, operator, local, 20, [(1, 9, 5), (2, 17, 3)])


@each_topology
@pytest.mark.parametrize("config", ["small", "per expert"])
def test_dispatch_and_combine(world_size, local, config):
    spec = dict(tokens=[3, 0, 7, 1, 2, 5, 0, 4], k=3, experts_each=2, width=33, seed=1)
    on_ranks(world_size, on_nodes, local, expert_parallel.computes, spec, EXPERTS[config])


@each_topology
def test_all_to_all(world_size, local):
    on_ranks(world_size, on_nodes, local, all_to_all_cases.moves, BITS[:3], 2, None)


@each_topology
def test_decode(world_size, local):
    on_ranks(world_size, decode_nodes.computes, enlarge(DECODE["GQA"]), "default", local)
