"""Tokens to experts and back, and steps of decoding: the other half of the cost model in `model.py`."""

import math
from dataclasses import dataclass
from fractions import Fraction

from bench.multinode_model.model import ITEM, Bytes, World, line, ms, trip, wire

# ---- experts ----


def hit(experts, held, choices):
    """How likely a token whose k choices are drawn from E experts, all different, has one of these: a Fraction.

    1 - C(E - held, k) / C(E, k)
    """
    if not 0 <= held <= experts or not 0 < choices <= experts:
        raise ValueError(f"hit: held {held} of {experts} experts, {choices} choices")
    return 1 - Fraction(math.comb(experts - held, choices), math.comb(experts, choices))


@dataclass(frozen=True)
class Routing:
    """What uniform routing makes of a token, on average. The busiest rank has more.

    nodes:      other nodes that it goes to
    passed:     rows that cross NVLink for it, in all nodes
    """

    nodes: float
    passed: float


def routed(experts, choices, world):
    """A token goes once to each other node that has an expert of it, and there or at home to each rank that has.

    nodes = (N - 1) hit(E / N), passed = N (L - 1) hit(E / W): the rank by which it comes to a node needs no NVLink
    """
    if experts % world.ranks:
        raise ValueError(f"routed: {experts} experts are not divisible by {world.ranks} ranks")
    node, rank = (hit(experts, experts // parts, choices) for parts in (world.nodes, world.ranks))
    return Routing(float((world.nodes - 1) * node), float(world.nodes * (world.local - 1) * rank))


def rows_straight(rows, world):
    """Rows of which each is for one rank, all equally likely (all_to_all): (N - 1) / N cross the network, by the rank
    of the other node that has the sender's local rank, and (L - 1) / L of them cross NVLink.
    """
    return Routing(rows * (world.nodes - 1) / world.nodes, rows * (world.local - 1) / world.local)


@dataclass(frozen=True)
class TokenCost:
    """ms of a transport of tokens: its parts alone, and in all. ``floor``: network and NVLink at their best rates."""

    world: World
    routing: Routing
    sent: Bytes
    network: float
    link: float
    memory: float
    ours: float
    floor: float

    @property
    def efficiency(self):
        return self.floor / self.ours if self.floor else None


def ep_dispatch(machine, tokens, hidden, experts, choices, row_bytes, world):
    """Tokens of each rank to the ranks of their experts.

    ours = dispatch_us + trips + max(network, link, memory)
        trips   on several nodes: (1 + count_trips) network_us + exchange_us
        memory  see `dispatch_memory`
    """
    routing = routed(experts, choices, world)
    memory = ms(dispatch_memory(tokens, hidden, choices, row_bytes, routing), machine.dispatch_memory_gbps)
    return _transport(machine, tokens, row_bytes, routing, memory, machine.dispatch_us, machine.count_trips, world)


def ep_combine(machine, tokens, hidden, experts, choices, world):
    """What experts made of them back the same ways, as bf16: sums of a rank, of a node, then over the network."""
    routing, row_bytes = routed(experts, choices, world), hidden * ITEM
    memory = ms(combine_memory(tokens, hidden, choices, routing), machine.combine_memory_gbps)
    return _transport(machine, tokens, row_bytes, routing, memory, machine.combine_us, 0, world)


def all_to_all(machine, tokens, hidden, choices, row_bytes, world):
    """tokens * choices rows, each straight to the rank that it is for; pieces as measured of ep_dispatch."""
    routing = rows_straight(choices, world)
    nbytes = tokens * row_bytes * (2 * choices + 2 * routing.nodes)
    memory = ms(nbytes, machine.dispatch_memory_gbps)
    return _transport(machine, tokens, row_bytes, routing, memory, machine.dispatch_us, machine.count_trips, world)


def dispatch_memory(tokens, hidden, choices, row_bytes, routing):
    """Bytes of memory: x is read, what comes by network or NVLink is written and read, and k rows are written."""
    return tokens * (hidden * ITEM + row_bytes * (choices + 2 * (routing.nodes + routing.passed)))


def combine_memory(tokens, hidden, choices, routing):
    """Bytes of memory: k rows are read, sums that come are written and read, and a token is written."""
    return tokens * hidden * ITEM * (choices + 2 * (routing.nodes + routing.passed) + 1)


def _transport(machine, tokens, row_bytes, routing, memory, start_us, counts, world):
    sent = Bytes(tokens * row_bytes * routing.nodes, tokens * row_bytes * routing.passed)
    network, link = wire(machine, sent)
    trips = trip(machine, world) + (counts * machine.network_us / 1e3 if world.nodes > 1 else 0.0)
    floor = max(ms(sent.network, machine.network_gbps), ms(sent.link, machine.best_link_gbps))
    ours = start_us / 1e3 + trips + max(network, link, memory)
    return TokenCost(world, routing, sent, network, link, memory, ours, floor)


# ---- decoding ----


@dataclass(frozen=True)
class DecodeCost:
    """ms of a step of decoding: a rank's own keys alone, with torch and NCCL, and ours."""

    world: World
    sent: Bytes
    local: float
    sequence: float
    ours: float

    @property
    def speedup(self):
        return self.sequence / self.ours

    @property
    def hidden(self):
        return self.local / self.ours


def decode_bytes(heads, dim, world):
    """A partial is 4 (D + 1) bytes a head: to L - 1 local peers, then the node's, which all have, to N - 1 nodes."""
    partial = 4 * heads * (dim + 1)
    return Bytes((world.nodes - 1) * partial, (world.local - 1) * partial)


def flash_decode(machine, keys, heads, dim, world):
    """A query of each head against keys / W keys of each rank, for the batch and heads whose times are known.

    ours = local + decode_exchange_us + link + (on several nodes) network_us + network + decode_exchange_us
    sequence = torch's local + decode_sequence_us + (N - 1) network_us + network: NCCL brings the partials of all ranks
    of the other nodes, by all cards of a node, (N - 1) for each card
    """
    sent, own = decode_bytes(heads, dim, world), keys / world.ranks
    network, link = wire(machine, sent)
    local = line(machine.attention, own)
    between = (machine.network_us + machine.decode_exchange_us) / 1e3 + network if world.nodes > 1 else 0.0
    ours = local + machine.decode_exchange_us / 1e3 + link + between
    hops = (world.nodes - 1) * machine.network_us / 1e3
    sequence = line(machine.torch_attention, own) + machine.decode_sequence_us / 1e3 + hops + network
    return DecodeCost(world, sent, local, sequence, ours)
