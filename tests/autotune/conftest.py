"""A GPU that is not there, for what asks no more of it than its properties."""

from types import SimpleNamespace

import pytest

from tdkernels.runtime import gpu


@pytest.fixture
def an_h200(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
    )
    monkeypatch.setattr(gpu, "_properties", lambda index: properties)
