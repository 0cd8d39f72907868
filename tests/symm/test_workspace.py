"""The order of a workspace's launches on several streams, without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from tdkernels.symm.workspace import Workspace


@pytest.mark.parametrize("device, capturing, expected", [
    ("cuda", False, [None]), ("cuda", True, []), ("cpu", False, []),
])
def test_extend_launch_records_the_current_stream(device, capturing, expected, monkeypatch):
    """Nothing is recorded while a CUDA graph is captured, and on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    recorded = []
    workspace = object.__new__(Workspace)
    workspace._on_cpu = device == "cpu"
    workspace.device = torch.device(device)
    workspace.group = SimpleNamespace(stream_order=lambda device: SimpleNamespace(after=recorded.append))
    workspace.extend_launch()
    assert recorded == expected
