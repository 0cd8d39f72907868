"""Which ranks of a group reach each other's memory: its nodes.

A node is a host, found by its name, whose devices reach each other. ``TDKERNELS_LOCAL_WORLD_SIZE`` splits one host into
simulated nodes of so many ranks each, between which addresses are withheld: whatever goes from one to another has to
take the network, or what stands for it.
"""

import json
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

VARIABLE = "TDKERNELS_LOCAL_WORLD_SIZE"


@dataclass(frozen=True)
class Topology:
    """Rank r of a group is on node ``r // local_world_size``, and there it is number ``r % local_world_size``.

    A group whose nodes have different numbers of its ranks, or whose ranks are not in the order of the nodes, counts as
    one node a rank: all that they exchange takes the network then, which is right, if slow.
    """

    rank: int
    world_size: int
    local_world_size: int

    @property
    def num_nodes(self):
        return self.world_size // self.local_world_size

    @property
    def node_rank(self):
        return self.rank // self.local_world_size

    @property
    def local_rank(self):
        return self.rank % self.local_world_size

    def is_local(self, peer):
        """Whether ``peer`` is on our node."""
        return peer // self.local_world_size == self.node_rank


def simulated_local_world_size():
    """Ranks of a simulated node, or None.

    Raises:
        ValueError: when the variable is not a positive integer
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


def likely_size(world_size):
    """Ranks of a node of a group of so many, as far as one rank knows by itself: simulated, or what torchrun says."""
    size = simulated_local_world_size() or int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    return size if size < world_size and world_size % size == 0 else world_size


def offer():
    """What this rank tells the others of where it is, as text."""
    size = simulated_local_world_size()
    part = None if size is None else dist.get_rank() // size
    return json.dumps({"host": [socket.gethostname(), _boot_id()], "part": part, **_device()})


def topology_of(rank, texts):
    """The Topology seen by ``rank`` of all ranks' offers, in rank order."""
    offers = [json.loads(text) for text in texts]
    nodes = [[offer["host"], offer["part"]] for offer in offers]
    size = _even_size(nodes)
    if any(not _reach(offers[i], offers[j]) for i in range(len(offers)) for j in range(i) if i // size == j // size):
        size = 1
    return Topology(rank, len(offers), size)


def _even_size(nodes):
    """How many ranks each node has, if they follow each other in runs of that length, else 1."""
    size = next((i for i, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    starts = nodes[::size]
    expected = [node for node in starts for _ in range(size)]
    distinct = {json.dumps(node) for node in starts}
    return size if nodes == expected and len(distinct) == len(starts) else 1


def _reach(a, b):
    """Whether two devices of a host reach each other; those that do not see each other are taken to."""
    return b["device"] not in a["out of reach"] and a["device"] not in b["out of reach"]


def _device():
    """This rank's GPU, and those on this host which it sees and does not reach."""
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
