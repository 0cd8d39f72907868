"""CopyBatch, with a function in place of the driver's that copies host memory."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from tdkernels.runtime import copy_batch
from tdkernels.runtime.copy_batch import CopyBatch

STREAM = SimpleNamespace(cuda_stream=5)


@pytest.fixture
def tensors():
    destinations = [torch.zeros(3), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(0)]
    sources = [[torch.randn(3), torch.randint(9, (2, 4)), torch.zeros(0)] for _ in range(2)]
    return destinations, sources


def of_driver(patch, code, capturing=False):
    """Replace the driver's function; return the list of its calls as (number of copies, stream)."""
    calls = []

    def function(destinations, sources, sizes, count, attributes, first, num_attributes, stream):
        calls.append((count.value, stream.value))
        assert (list(first), num_attributes.value) == ([0], 1)
        assert attributes._obj.source_access_order == 1
        if code == 0:
            for to, start, size in zip(destinations, sources, sizes, strict=True):
                ctypes.memmove(to, start, size)
        return code

    patch.setattr(copy_batch, "_batch_function", lambda: function)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return calls


@pytest.mark.parametrize("code, capturing, calls", [(0, False, 2), (801, False, 2), (0, True, 0)])
def test_each_call_copies_its_sources(monkeypatch, tensors, code, capturing, calls):
    """Also if the driver refuses the batch, and in a CUDA graph."""
    found = of_driver(monkeypatch, code, capturing)
    destinations, sources = tensors
    batch = CopyBatch(destinations)
    for of_call in sources:
        batch.enqueue(of_call, STREAM)
        assert all(map(torch.equal, destinations, of_call))
    assert found == [(3, 5)] * calls


def test_without_a_driver(monkeypatch, tensors):
    monkeypatch.setattr(copy_batch, "_batch_function", lambda: None)
    destinations, (sources, _) = tensors
    CopyBatch(destinations).enqueue(sources, STREAM)
    assert all(map(torch.equal, destinations, sources))


@pytest.mark.parametrize("number", [2, 4])
def test_each_destination_needs_a_source(monkeypatch, tensors, number):
    found = of_driver(monkeypatch, 0)
    with pytest.raises(ValueError, match="zip"):
        CopyBatch(tensors[0]).enqueue((tensors[1][0] * 2)[:number], STREAM)
    assert not found
