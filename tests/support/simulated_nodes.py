"""Groups on simulated nodes: ranks of one machine that communicate over the emulated network between nodes.

    with a_group_on_nodes(2) as group:      # nodes of two ranks each
        z = tdkernels.gemm_rs(x, weight, group=group)
"""

import contextlib
import gc
import os

import pytest
import torch.distributed as dist

import tdkernels
from tdkernels.symm import resolve_group, topology
from tdkernels.symm.backends import emulated_network
from tdkernels.symm.group import group_state, scratch_state
from tests.support.ranks import ASKED
from tests.support.subset import THOROUGH

needs_gpus = pytest.mark.skipif(ASKED == "shared", reason="NVSHMEM needs a GPU for each rank")
# For cases that add little: they run only if TDKERNELS_TEST_THOROUGH is set.
thorough = pytest.mark.skipif(not THOROUGH, reason="set TDKERNELS_TEST_THOROUGH=1 to run it")


@contextlib.contextmanager
def a_group_on_nodes(local_world_size, ranks=None):
    """Create a group of ``ranks`` (default: all) on nodes of ``local_world_size`` ranks, until exit. Collective."""
    before = os.environ.get(topology.VARIABLE)
    os.environ[topology.VARIABLE] = str(local_world_size)
    try:
        group = dist.new_group(ranks)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            _ = group_state(group).topology  # cached while the variable is set
    finally:
        if before is None:
            del os.environ[topology.VARIABLE]
        else:
            os.environ[topology.VARIABLE] = before
    try:
        yield group
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
        del group
        gc.collect()


@contextlib.contextmanager
def the_world_on_nodes(local_world_size):
    """Put the world itself on nodes of ``local_world_size`` ranks, for code that takes no group. Collective."""
    world = resolve_group()
    with scratch_state(world) as state:
        state._topology = topology.Topology(dist.get_rank(), dist.get_world_size(), local_world_size)
        yield
        tdkernels.synchronize()
        state.barrier("tests")


def on_nodes(local_world_size, fn, *args):
    """In a rank: call a function while the world is on simulated nodes."""
    with the_world_on_nodes(local_world_size):
        return fn(*args)


def reseed(seed):
    """Reset the order of messages in the emulated networks; no effect on GPUs."""
    emulated_network.reseed(seed)
