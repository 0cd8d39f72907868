"""Run a function on several ranks, from a test.

    def gathers(x):                       # of the module, for it travels by name
        x = x.to(device())
        ...
        assert torch.equal(y, expected)   # an assert in a rank fails the test, with the rank's traceback

    def test_gathers():
        on_ranks(4, gathers, torch.ones(3))

The ranks are kept from test to test, since starting them takes seconds; those that share GPUs, whose memory they would
fill, until four pools of other sizes are in use. Where they run is TDKERNELS_TEST_DEVICE: cpu, cuda (a test that needs
more GPUs than there are is skipped), shared (all of its ranks share them) or auto, the default (such a test runs on the
CPU). How long they may take for one call is TDKERNELS_TEST_TIMEOUT_S: 240 s, which on borrowed GPUs is long for a hang.
"""

import contextlib
import gc
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from tdkernels.launch import RankPool, pick_device, rank_device
from tests.support import host_collectives

ASKED = os.environ.get("TDKERNELS_TEST_DEVICE") or "auto"
DEVICE = "cuda" if ASKED == "shared" else ASKED  # what the kernels run on
if ASKED == "shared":
    host_collectives.install()

# Less than pytest's own timeout, so that a hang is reported by the pool, which can say which rank hung and where.
TIMEOUT_S = float(os.environ.get("TDKERNELS_TEST_TIMEOUT_S") or 240.0)

# How often two ranks or more ran something. conftest.py fails a whole suite in which none did.
multi_rank_runs = 0

_pools: dict[int, RankPool] = {}
# Ranks that share a GPU have half a GiB of it each for as long as they live. Those of 1 to 4, which most tests ask for
# by turns, may stay.
_MOST_POOLS = 4 if ASKED == "shared" else sys.maxsize


def device():
    """In a rank: its torch.device."""
    return rank_device()


@contextlib.contextmanager
def a_group(ranks=None):
    """In a rank: a group of the test's own, which it may break."""
    group = dist.new_group(ranks)
    try:
        yield group
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
        del group
        gc.collect()  # the errors of a broken workspace must not come up in later tests


def on_ranks(world_size, fn, /, *args, **kwargs) -> list:
    """Call fn(*args, **kwargs) on ranks shared with other tests; the results in rank order, or launch.RankError."""
    _count(world_size)
    pool = _pools.pop(world_size, None)
    if pool is None or not pool.usable:
        while len(_pools) >= _MOST_POOLS:
            _pools.pop(next(iter(_pools))).close()
        pool = RankPool(world_size, ASKED, timeout_s=TIMEOUT_S)
    _pools[world_size] = pool  # the last of them is the one that was used last
    return pool.run(_call, fn, *args, **kwargs)


_modules_frozen = 0


def _call(fn, /, *args, **kwargs):
    """In a rank: the call, and no collection of garbage in it goes through what was imported before.

    That is nearly all there is, each group of a test's own ends with a collection, and the ranks share few cores.
    """
    global _modules_frozen
    if len(sys.modules) > _modules_frozen:
        gc.collect()
        gc.freeze()
        _modules_frozen = len(sys.modules)
    try:
        return fn(*args, **kwargs)
    finally:
        if ASKED == "shared":
            torch.cuda.empty_cache()  # what it keeps for later calls others cannot have


def fresh_ranks(world_size, *, timeout_s=TIMEOUT_S, grace_s=20.0) -> RankPool:
    """A pool of the test's own, for a `with`: where a test kills ranks, or sets environment variables for them."""
    _count(world_size)
    return RankPool(world_size, ASKED, timeout_s=timeout_s, grace_s=grace_s)


def dies():
    """In a rank: it is gone, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _count(world_size: int) -> None:
    global multi_rank_runs
    try:
        pick_device(ASKED, world_size)
    except ValueError as err:
        if ASKED != "cuda":  # a wrong value of the variable is no reason to skip
            raise
        pytest.skip(str(err))
    multi_rank_runs += world_size >= 2
