"""Which ranks are on a node, of what each of them tells, and of what one knows by itself."""

import json

import pytest

from tdkernels.symm import topology


def told(host="a", part=None, device="0", out_of_reach=()):
    return json.dumps({"host": [host, ""], "part": part, "device": device, "out of reach": list(out_of_reach)})


@pytest.mark.parametrize(
    "texts, size",
    [
        ([told()], 1),
        ([told(), told(), told()], 3),
        ([told("a"), told("a"), told("b"), told("b")], 2),
        ([told("a"), told("b"), told("a"), told("b")], 1),
        ([told("a"), told("a"), told("b")], 1),
        ([told("a"), told("b"), told("b")], 1),
        ([told("a"), told("a"), told("b"), told("b"), told("a"), told("a")], 1),
        ([told(part=0), told(part=0), told(part=1), told(part=1)], 2),
        ([told(device="0", out_of_reach=["1"]), told(device="1")], 1),
        ([told("a", device="0", out_of_reach=["1"]), told("b", device="1")], 1),
        ([told("a", device="0"), told("a", device="1", out_of_reach=["7"])], 2),
    ],
)
def test_nodes_of_what_ranks_tell(texts, size):
    found = topology.topology_of(len(texts) - 1, texts)
    assert found.local_world_size == size
    assert (found.num_nodes, found.node_rank) == (len(texts) // size, (len(texts) - 1) // size)
    assert [found.is_local(peer) for peer in range(len(texts))] == [p >= len(texts) - size for p in range(len(texts))]


@pytest.mark.parametrize("simulated, of_torchrun, size", [
    (None, None, 8), ("2", None, 2), ("2", "4", 2), (None, "4", 4), (None, "3", 8), (None, "16", 8), ("8", None, 8),
])
def test_what_one_rank_knows(monkeypatch, simulated, of_torchrun, size):
    for variable, value in ((topology.VARIABLE, simulated), ("LOCAL_WORLD_SIZE", of_torchrun)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert topology.likely_size(8) == size


@pytest.mark.parametrize("text", ["0", "-2", "two"])
def test_a_node_of_no_ranks(monkeypatch, text):
    monkeypatch.setenv(topology.VARIABLE, text)
    with pytest.raises(ValueError, match=f"{topology.VARIABLE} must be a positive integer, not '{text}'"):
        topology.simulated_local_world_size()
