"""Topology of a group: its nodes, which are the sets of ranks that can access each other's memory.

A node is a host, identified by its name, whose devices can access each other. ``TDKERNELS_LOCAL_WORLD_SIZE`` splits one
host into simulated nodes with that number of ranks each. Ranks of different simulated nodes get no addresses of each
other, so transfers between them use the network or the emulated network.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

VARIABLE = "TDKERNELS_LOCAL_WORLD_SIZE"


@dataclass(frozen=True)
class Topology:
    """Rank r of a group is on node ``r // local_world_size``, with local rank ``r % local_world_size``.

    If the nodes have different numbers of ranks, or if the ranks are not ordered by node, every rank counts as a node.
    Then all transfers use the network, which is correct but slow.

    Attributes:
        rank: This process's rank in the group.
        world_size: The number of ranks.
        local_world_size: The number of ranks on a node.
    """

    rank: int
    world_size: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_world_size

    def is_local(self, peer: int) -> bool:
        """Return whether ``peer`` is on this rank's node."""
        return peer // self.local_world_size == self.node_rank


def simulated_local_world_size() -> int | None:
    """Return the number of ranks of a simulated node, or None if nodes are not simulated.

    Raises:
        ValueError: If the environment variable is not a positive integer.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError(f"{VARIABLE} must be a positive integer, not {text!r}")
    return size


def likely_size(world_size: int) -> int:
    """Estimate the number of ranks of a node for a group of ``world_size`` ranks, without communication.

    The estimate is the simulated size or the ``LOCAL_WORLD_SIZE`` of torchrun.
    """
    size = simulated_local_world_size() or int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    return size if size < world_size and world_size % size == 0 else world_size


def offer() -> str:
    """Return this rank's host, simulated node and device as text, to be exchanged with the other ranks."""
    size = simulated_local_world_size()
    part = None if size is None else dist.get_rank() // size
    return json.dumps({"host": [socket.gethostname(), _boot_id()], "part": part, **_device()})


def topology_of(rank: int, texts: Sequence[str]) -> Topology:
    """Return the Topology for ``rank`` from the offers of all ranks, in rank order."""
    offers = [json.loads(text) for text in texts]
    nodes = [[offer["host"], offer["part"]] for offer in offers]
    size = _even_size(nodes)
    if any(not _reach(offers[i], offers[j]) for i in range(len(offers)) for j in range(i) if i // size == j // size):
        size = 1
    return Topology(rank, len(offers), size)


def _even_size(nodes):
    """Return the number of ranks of each node if it is uniform and the ranks are ordered by node, otherwise 1."""
    size = next((i for i, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    starts = nodes[::size]
    expected = [node for node in starts for _ in range(size)]
    distinct = {json.dumps(node) for node in starts}
    return size if nodes == expected and len(distinct) == len(starts) else 1


def _reach(a, b):
    """Return whether two devices of a host can access each other. It is assumed if no process sees both of them."""
    return b["device"] not in a["out of reach"] and a["device"] not in b["out of reach"]


def _device():
    """Return this rank's GPU and the visible GPUs of this host that it cannot access."""
    if not torch.cuda.is_available():
        return {"device": None, "out of reach": []}
    own, names = torch.cuda.current_device(), [_name(i) for i in range(torch.cuda.device_count())]
    others = [i for i in range(len(names)) if i != own and not torch.cuda.can_device_access_peer(own, i)]
    return {"device": names[own], "out of reach": [names[i] for i in others]}


def _name(index):
    properties = torch.cuda.get_device_properties(index)
    return str(getattr(properties, "uuid", index))


def _boot_id():
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return ""
