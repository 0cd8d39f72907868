"""What the tests of the warp-specialized kernels share."""

import contextlib

import pytest
import torch

from tdkernels.ops.common.specialized import launch_split_k
from tdkernels.runtime import gpu
from tdkernels.symm import get_workspace, resolve_group
from tests.support.ranks import DEVICE, device

ON_HOPPER = DEVICE != "cpu" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")


def pretend_hopper(monkeypatch):
    """Pretend that the operands are on a Hopper GPU."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)


def forget_launches(*workspaces):
    """Clear the cached launches of (name, halves) of workspaces, so that the next calls prepare theirs again.

    A rank can have prepared the launch of a call for an earlier test.
    """
    for name, halves in workspaces:
        get_workspace(resolve_group(), device(), name, halves=halves, across_nodes=True).launches.clear()


@contextlib.contextmanager
def chosen_splits():
    """Return a list of what ``choose`` of split-K returns for the launches that are prepared in a ``with`` block."""
    found, choose = [], launch_split_k.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_split_k, "choose", lambda *args: found.append(choose(*args)) or found[-1])
        yield found


def replays_in_a_graph(renew, specialized, plain):
    """Check replays of a CUDA graph of three calls of ``specialized``, which has run once, with new operands.

    ``renew`` changes the operands in place. A call returns a tensor or a tuple of tensors.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = [specialized() for _ in range(3)]
    for _ in range(4):
        renew()
        graph.replay()
        expected = plain()
        torch.testing.assert_close(found, [expected] * len(found), rtol=0, atol=0)
