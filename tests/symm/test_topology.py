"""Node topology, derived from the descriptions of all ranks or from one rank's environment."""

import json

import pytest

from tdkernels.symm import topology


def rank_info(host="a", part=None, device="0", out_of_reach=()):
    return json.dumps({"host": [host, ""], "part": part, "device": device, "out of reach": list(out_of_reach)})


@pytest.mark.parametrize(
    "texts, size",
    [
        ([rank_info()], 1),
        ([rank_info(), rank_info(), rank_info()], 3),
        ([rank_info("a"), rank_info("a"), rank_info("b"), rank_info("b")], 2),
        ([rank_info("a"), rank_info("b"), rank_info("a"), rank_info("b")], 1),
        ([rank_info("a"), rank_info("a"), rank_info("b")], 1),
        ([rank_info("a"), rank_info("b"), rank_info("b")], 1),
        ([rank_info("a"), rank_info("a"), rank_info("b"), rank_info("b"), rank_info("a"), rank_info("a")], 1),
        ([rank_info(part=0), rank_info(part=0), rank_info(part=1), rank_info(part=1)], 2),
        ([rank_info(device="0", out_of_reach=["1"]), rank_info(device="1")], 1),
        ([rank_info("a", device="0", out_of_reach=["1"]), rank_info("b", device="1")], 1),
        ([rank_info("a", device="0"), rank_info("a", device="1", out_of_reach=["7"])], 2),
    ],
)
def test_topology_from_descriptions(texts, size):
    found = topology.topology_of(len(texts) - 1, texts)
    assert found.local_world_size == size
    assert (found.num_nodes, found.node_rank) == (len(texts) // size, (len(texts) - 1) // size)
    assert [found.is_local(peer) for peer in range(len(texts))] == [p >= len(texts) - size for p in range(len(texts))]


@pytest.mark.parametrize("simulated, torchrun_size, size", [
    (None, None, 8), ("2", None, 2), ("2", "4", 2), (None, "4", 4), (None, "3", 8), (None, "16", 8), ("8", None, 8),
])
def test_likely_node_size(monkeypatch, simulated, torchrun_size, size):
    for variable, value in ((topology.VARIABLE, simulated), ("LOCAL_WORLD_SIZE", torchrun_size)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert topology.likely_size(8) == size


@pytest.mark.parametrize("text", ["0", "-2", "two"])
def test_invalid_simulated_node_size_is_rejected(monkeypatch, text):
    monkeypatch.setenv(topology.VARIABLE, text)
    with pytest.raises(ValueError, match=f"{topology.VARIABLE} must be a positive integer, not '{text}'"):
        topology.simulated_local_world_size()
