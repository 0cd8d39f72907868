"""Placement of buffers in the SHMEM heap, and NVSHMEM on the host, against stand-ins for its modules."""

import json
import os
import sys
import types

import numpy
import pytest
import torch.distributed as dist

from tdkernels.symm.backends import nvshmem, shmem_heap
from tdkernels.symm.group import group_state, resolve_group
from tests.support.ranks import on_ranks


@pytest.mark.parametrize(
    "taken, nbytes, address",
    [
        ([], 10, 0),
        ([], 101, None),
        ([(0, 10)], 10, 10),
        ([(10, 20)], 10, 0),
        ([(10, 20)], 11, 20),
        ([(0, 50), (10, 20), (60, 70)], 10, 50),
        ([(0, 50), (10, 20), (60, 70)], 11, 70),
        ([(0, 100)], 1, None),
        ([(5, 95)], 6, None),
    ],
)
def test_first_fit(taken, nbytes, address):
    assert shmem_heap.first_fit(taken, nbytes, 100) == address


class _Runtime:
    """Stand-in for a SHMEM library whose PEs are the ranks in reverse order."""

    pe = property(lambda self: 10 - dist.get_rank() if dist.is_initialized() else 10)
    num_pes = 3

    def __init__(self):
        self.sizes = []

    def malloc(self, nbytes):
        self.sizes.append(nbytes)
        return len(self.sizes) << 20


def _allocations():
    """Return the addresses and PEs of buffers that groups take in turn, and the sizes of the allocated segments."""
    heap = shmem_heap.Heap(_Runtime(), 8192)
    pair, allocations = dist.new_group([0, 1]), []
    in_pair = dist.get_rank() < 2
    if in_pair:
        allocations.append(heap.take(group_state(pair), 1000))
    world = group_state(resolve_group(None))
    for nbytes in (3000, 1):
        allocations.append(heap.take(world, nbytes))
    heap.give_back(allocations[-2][0])
    for nbytes in (512, 5000, 9000):
        allocations.append(heap.take(world, nbytes))
    if in_pair:
        message = "no 0 MiB are free in .* on all ranks of the group; set TDKERNELS_HEAP_MB to more than 0"
        with pytest.raises(MemoryError, match=message):
            heap.take(group_state(pair), 9000)
        allocations.append(heap.take(group_state(pair), 3500))
    return allocations, heap.runtime.sizes


def test_groups_agree_on_addresses():
    one, two, three = 1 << 20, 2 << 20, 3 << 20  # addresses of the segments
    world = [(address, [10, 9, 8]) for address in (one + 1024, one + 4096, one + 1024, two, three)]
    first, last = [(one, [10, 9])], [(one + 4608, [10, 9])]
    sizes = [8192, 8192, 9216]
    assert on_ranks(3, _allocations) == [(first + world + last, sizes)] * 2 + [(world, sizes)]


OFFERS = [
    ({"pe": "0", "pieces": [[8192, []]]}, "pe of rank 0"),
    ({"pe": -1, "pieces": [[8192, []]]}, "pe of rank 0"),
    ({"pe": 0, "pieces": [["8192", []]]}, "a segment of the heap of rank 0"),
    ({"pe": 0, "pieces": [[8192, [[0, -4096]]]]}, "a segment of the heap of rank 0"),
    ({"pe": 0, "pieces": [[8192, [[0, 512.5]]]]}, "a segment of the heap of rank 0"),
]


@pytest.mark.parametrize("offer, what", OFFERS)
def test_invalid_numbers_are_rejected(offer, what):
    group = types.SimpleNamespace(exchange=lambda operator, text: [json.dumps(offer)])
    with pytest.raises(ValueError, match=f"{what} must be an integer from 0 to"):
        shmem_heap.Heap(_Runtime(), 8192).take(group, 1000)


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_invalid_heap_size_is_rejected(monkeypatch, text):
    monkeypatch.setenv(shmem_heap.VARIABLE, text)
    with pytest.raises(ValueError, match=f"{shmem_heap.VARIABLE} must be a positive number of MiB, not '{text}'"):
        shmem_heap.heap_bytes()


# ---- NVSHMEM ----


@pytest.mark.parametrize("names, expected", [
    (["libnvshmem_device.bc"], "libnvshmem_device.bc"),
    (["libnvshmem_device_sm_90.bc", "libnvshmem_device_sm_80.bc"], "libnvshmem_device_sm_90.bc"),
    (["libnvshmem_device_sm_80.bc"], None),
])
def test_device_library_of_a_gpu(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).touch()
    if expected is None:
        with pytest.raises(ImportError, match="device_sm_90.bc .* was not found"):
            nvshmem.device_library((9, 0), [tmp_path])
    else:
        assert nvshmem.device_library((9, 0), [tmp_path / "nowhere", tmp_path]) == str(tmp_path / expected)


def test_without_nvshmem4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    monkeypatch.setitem(sys.modules, "nvshmem.core", None)
    with pytest.raises(ImportError, match="groups across nodes need nvshmem4py, .* install"):
        nvshmem._modules()


@pytest.mark.parametrize("version, supported", [("3.4.5", True), ("4.0.0", True), ("3.3.9", False), ("2.11.0", False)])
def test_versions(version, supported):
    core = types.SimpleNamespace(get_version=lambda: types.SimpleNamespace(libnvshmem_version=version))
    if supported:
        assert nvshmem._checked_version(core) == version
    else:
        with pytest.raises(ImportError, match=f"NVSHMEM {version} is too old: install"):
            nvshmem._checked_version(core)


class _Library:
    """Stand-in for nvshmem.core, nvshmem.bindings and cuda.core that records calls."""

    def __init__(self, status):
        self.calls = []
        self.status = status
        self.uid = types.SimpleNamespace(_data=numpy.zeros(16, "u1"))

    def install(self):
        core, bindings, cuda = (types.ModuleType(name) for name in ("nvshmem.core", "nvshmem.bindings", "cuda.core"))
        core.get_version = lambda: types.SimpleNamespace(libnvshmem_version="3.4.5")
        core.init_status = lambda: self.status
        core.get_unique_id = self._unique_id
        core.init = lambda **how: self.calls.append(("init", bytes(how["uid"]._data)[:3], how["rank"], how["nranks"]))
        core.finalize = lambda: self.calls.append("finalize")
        core.my_pe, core.n_pes = dist.get_rank, dist.get_world_size
        bindings.malloc = lambda nbytes: 0 if nbytes > 100 else 4096
        bindings.ptr = lambda address, pe: 0 if pe else address
        cuda.Device = lambda index: types.SimpleNamespace(set_current=lambda: self.calls.append(("device", index)))
        packages = types.ModuleType("nvshmem"), types.ModuleType("cuda")
        return dict(zip(
            ("nvshmem", "cuda", "nvshmem.core", "nvshmem.bindings", "cuda.core"),
            (*packages, core, bindings, cuda), strict=True,
        ))

    def _unique_id(self, empty):
        if not empty:
            self.uid._data[:3] = [1, 2, 3]
        return self.uid


def _start(status, started_on, timeout_s):
    """Start the runtime with a library of this status on "rank 0" or "all" ranks; return the calls or the error."""
    import atexit
    from unittest import mock

    import tdkernels

    library = _Library(status)
    rank = dist.get_rank()
    with (
        mock.patch.dict(sys.modules, library.install()),
        mock.patch.dict(os.environ),
        mock.patch.object(nvshmem, "device_library", lambda capability: "bitcode"),
        mock.patch("torch.cuda.get_device_capability", lambda device: (9, 0)),
        mock.patch("torch.cuda.synchronize"),
        mock.patch.object(atexit, "register", lambda fn: library.calls.append("at exit")),
    ):
        if started_on == "rank 0" and rank:
            return None
        tdkernels.set_timeout(timeout_s)
        try:
            runtime = nvshmem.Runtime(types.SimpleNamespace(index=rank), 1 << 20)
            assert runtime.device_library() == {"nvshmem": "bitcode"} and runtime.version == "3.4.5"
            assert runtime.malloc(100) == 4096 and runtime.peer_address(4096, 0) == 4096
            assert runtime.peer_address(4096, 1) == 0
            with pytest.raises(MemoryError, match="NVSHMEM has no 0 MiB of symmetric memory"):
                runtime.malloc(101)
            runtime.finalize()
            runtime.finalize()
        except RuntimeError as error:
            return str(error)
        finally:
            tdkernels.set_timeout(None)
    return library.calls


def test_initialized_by_all_ranks_with_the_id_of_rank_0():
    for rank, calls in enumerate(on_ranks(2, _start, 0, "all", 20)):
        assert calls == [("device", rank), ("init", b"\1\2\3", rank, 2), "at exit", "finalize"]


def test_initialized_library_is_adopted():
    assert on_ranks(2, _start, 2, "all", 20) == [[], []]


def test_missing_rank():
    first, _ = on_ranks(2, _start, 0, "rank 0", 0.4)
    assert "NVSHMEM is initialised by all ranks of torch.distributed together" in first
    assert "rank 1 did not take part" in first
