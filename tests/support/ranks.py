"""Run a function on several ranks, from a test.

    def gathers(x):                       # a module-level function: it is pickled by name
        x = x.to(device())
        ...
        assert torch.equal(y, expected)   # an assert in a rank fails the test, with the rank's traceback

    def test_gathers():
        on_ranks(4, gathers, torch.ones(3))

Ranks are reused across tests, since starting them takes seconds. If they share GPUs, the pools of at most four world
sizes are kept, because each rank holds GPU memory. TDKERNELS_TEST_DEVICE selects their device: cpu, cuda (a test that
needs more GPUs than there are is skipped), shared (all ranks of a test share the GPUs) or auto, the default (such a
test runs on the CPU). TDKERNELS_TEST_TIMEOUT_S is the timeout of a call: 240 s by default.
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
from tests.support import forked_ranks, host_collectives

ASKED = os.environ.get("TDKERNELS_TEST_DEVICE") or "auto"
DEVICE = "cuda" if ASKED == "shared" else ASKED  # the device of the kernels
if ASKED == "shared":
    host_collectives.install()
if DEVICE == "cpu" or not torch.cuda.is_available():
    forked_ranks.install(["tests.support.preloaded"] if os.environ.get("CI") else [])

# Less than pytest's own timeout, so that the pool reports a hang with the rank and its stack.
TIMEOUT_S = float(os.environ.get("TDKERNELS_TEST_TIMEOUT_S") or 240.0)

# Number of calls on two or more ranks. conftest.py fails a whole suite without any.
multi_rank_runs = 0

_pools: dict[int, RankPool] = {}
# Each rank that shares a GPU holds half a GiB of its memory. Most tests alternate between world sizes 1 to 4, so four
# pools are kept.
_MAX_POOLS = 4 if ASKED == "shared" else sys.maxsize


def device():
    """In a rank: return its torch.device."""
    return rank_device()


@contextlib.contextmanager
def a_group(ranks=None, backend=None):
    """In a rank: create a group for one test, which may break it; destroy it on exit."""
    group = dist.new_group(ranks, backend=backend)
    try:
        yield group
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
        del group
        gc.collect()  # later tests must not report errors of a broken workspace


def on_ranks(world_size, fn, /, *args, **kwargs) -> list:
    """Call fn(*args, **kwargs) on ranks shared with other tests; return results in rank order, or raise RankError."""
    _count(world_size)
    pool = _pools.pop(world_size, None)
    if pool is None or not pool.usable:
        while len(_pools) >= _MAX_POOLS:
            _pools.pop(next(iter(_pools))).close()
        pool = RankPool(world_size, ASKED, timeout_s=TIMEOUT_S)
    _pools[world_size] = pool  # in the order of last use
    return pool.run(_call, fn, *args, **kwargs)


_modules_frozen = 0


def _call(fn, /, *args, **kwargs):
    """In a rank: make the call with earlier imports frozen, so that garbage collections skip them.

    Imported modules are nearly all objects; each group ends with a collection, and the ranks share cores.
    """
    if len(sys.modules) > _modules_frozen:
        freeze_imports()
    try:
        return fn(*args, **kwargs)
    finally:
        if ASKED == "shared":
            torch.cuda.empty_cache()  # the other ranks on this GPU need the memory


def freeze_imports():
    """Exclude the imported modules from garbage collections."""
    global _modules_frozen
    gc.collect()
    gc.freeze()
    _modules_frozen = len(sys.modules)


def fresh_ranks(world_size, *, timeout_s=TIMEOUT_S, grace_s=20.0) -> RankPool:
    """Return a pool for one test, for a `with`: if a test kills ranks, or sets environment variables for them."""
    _count(world_size)
    return RankPool(world_size, ASKED, timeout_s=timeout_s, grace_s=grace_s)


def dies():
    """In a rank: kill its process."""
    os.kill(os.getpid(), signal.SIGKILL)


def close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _count(world_size: int) -> None:
    global multi_rank_runs
    try:
        pick_device(ASKED, world_size)
    except ValueError as err:
        if ASKED != "cuda":  # an invalid value of the variable is an error, not a skip
            raise
        pytest.skip(str(err))
    multi_rank_runs += world_size >= 2
