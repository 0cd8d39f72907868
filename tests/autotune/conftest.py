"""Properties of an H200 for tests that run without a GPU."""

from types import SimpleNamespace

import pytest

from tdkernels.runtime import gpu


@pytest.fixture
def fake_h200(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448,
        warp_size=32,
    )
    monkeypatch.setattr(gpu, "_properties", lambda index: properties)
