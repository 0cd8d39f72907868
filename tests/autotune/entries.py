"""Table entries and a temporary disk cache for tests."""

import contextlib

import pytest

from tdkernels.autotune import disk_cache
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.table import Entry

GPU = "NVIDIA Testing"
_PROBLEM_FIELDS = {"world_size": 4, "local_world_size": 4, "dtype": "bfloat16", "layout": "nk"}


def make_entry(operator="ag_gemm", gpu=GPU, shape=(8192, 4096, 4096), ms=1.0, config=None, versions=None, **changes):
    """Return an Entry; ``changes`` set further fields of the entry or of its problem."""
    rest = {name: changes.pop(name, value) for name, value in _PROBLEM_FIELDS.items()}
    config = {"method": "torch"} if config is None else config
    versions = {"torch": "2.13.0", "triton": "3.7.1"} if versions is None else versions
    return Entry(Problem(operator, gpu, shape=shape, **rest), versions, config, ms, **changes)


@contextlib.contextmanager
def cache_in(folder):
    """Use ``folder`` as the user's cache and drop tables that this process has read before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TDKERNELS_CACHE_DIR", str(folder))
        disk_cache.forget()
        try:
            yield folder
        finally:
            disk_cache.forget()
