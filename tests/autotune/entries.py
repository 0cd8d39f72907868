"""Entries of tables, and a cache of a test's own to keep them in."""

import contextlib

import pytest

from tdkernels.autotune import disk_cache
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.table import Entry

GPU = "NVIDIA Testing"
_OF_PROBLEMS = {"world_size": 4, "local_world_size": 4, "dtype": "bfloat16", "layout": "nk"}


def an_entry(operator="ag_gemm", gpu=GPU, shape=(8192, 4096, 4096), ms=1.0, config=None, versions=None, **changes):
    """An Entry; ``changes`` are of other fields, its own or its problem's."""
    rest = {name: changes.pop(name, value) for name, value in _OF_PROBLEMS.items()}
    config = {"method": "torch"} if config is None else config
    versions = {"torch": "2.13.0", "triton": "3.7.1"} if versions is None else versions
    return Entry(Problem(operator, gpu, shape=shape, **rest), versions, config, ms, **changes)


@contextlib.contextmanager
def cache_in(folder):
    """The user's cache is in this folder, and nothing is remembered from before; in this process or in a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TDKERNELS_CACHE_DIR", str(folder))
        disk_cache.forget()
        try:
            yield folder
        finally:
            disk_cache.forget()
