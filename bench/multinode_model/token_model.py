"""Cost model of dispatch, combine and decoding on several nodes; `model.py` has the dense operators."""

import math
from dataclasses import dataclass
from fractions import Fraction

from bench.multinode_model.model import ITEM, Bytes, World, line, ms, trip, wire

# ---- dispatch and combine ----


def hit(experts, held, choices):
    """Return the probability that a token with k distinct experts out of E has one of ``held`` experts, a Fraction.

    1 - C(E - held, k) / C(E, k)
    """
    if not 0 <= held <= experts or not 0 < choices <= experts:
        raise ValueError(f"hit: held {held} of {experts} experts, {choices} choices")
    return 1 - Fraction(math.comb(experts - held, choices), math.comb(experts, choices))


@dataclass(frozen=True)
class Routing:
    """Mean traffic per token under uniform routing. The busiest rank has more.

    nodes:          number of other nodes that receive the token
    nvlink_rows:    number of NVLink transfers of the token, in all nodes
    """

    nodes: float
    nvlink_rows: float


def routed(experts, choices, world):
    """Return the Routing if a token is sent once per node and, inside a node, once per rank with one of its experts.

    nodes = (N - 1) hit(E / N), nvlink_rows = N (L - 1) hit(E / W): the rank that receives a token from the network
    needs no NVLink transfer
    """
    if experts % world.ranks:
        raise ValueError(f"routed: {experts} experts are not divisible by {world.ranks} ranks")
    node, rank = (hit(experts, experts // parts, choices) for parts in (world.nodes, world.ranks))
    return Routing(float((world.nodes - 1) * node), float(world.nodes * (world.local - 1) * rank))


def rows_straight(rows, world):
    """Return the Routing of rows for single, equally likely ranks, as in all_to_all.

    (N - 1) / N of the rows cross the network, to the rank with the sender's local rank; (L - 1) / L cross NVLink.
    """
    return Routing(rows * (world.nodes - 1) / world.nodes, rows * (world.local - 1) / world.local)


@dataclass(frozen=True)
class TokenCost:
    """Predicted ms of a token exchange: network, NVLink and memory alone, and the total ``ours``.

    floor: the larger of network and NVLink at their best rates
    """

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
    """Cost of sending the tokens of each rank to the ranks of their experts.

    ours = dispatch_us + trips + max(network, link, memory)
        trips   on several nodes: (1 + count_trips) network_us + exchange_us
        memory  see `dispatch_memory`
    """
    routing = routed(experts, choices, world)
    memory = ms(dispatch_memory(tokens, hidden, choices, row_bytes, routing), machine.dispatch_memory_gbps)
    return _transport(machine, tokens, row_bytes, routing, memory, machine.dispatch_us, machine.count_trips, world)


def ep_combine(machine, tokens, hidden, experts, choices, world):
    """Cost of returning the expert outputs in bf16: summed per rank, then per node, then sent over the network."""
    routing, row_bytes = routed(experts, choices, world), hidden * ITEM
    memory = ms(combine_memory(tokens, hidden, choices, routing), machine.combine_memory_gbps)
    return _transport(machine, tokens, row_bytes, routing, memory, machine.combine_us, 0, world)


def all_to_all(machine, tokens, hidden, choices, row_bytes, world):
    """Cost of sending tokens * choices rows to single ranks, with the measured inputs of ep_dispatch."""
    routing = rows_straight(choices, world)
    nbytes = tokens * row_bytes * (2 * choices + 2 * routing.nodes)
    memory = ms(nbytes, machine.dispatch_memory_gbps)
    return _transport(machine, tokens, row_bytes, routing, memory, machine.dispatch_us, machine.count_trips, world)


def dispatch_memory(tokens, hidden, choices, row_bytes, routing):
    """Return the memory traffic: read x, write and read received rows, write k rows per token."""
    return tokens * (hidden * ITEM + row_bytes * (choices + 2 * (routing.nodes + routing.nvlink_rows)))


def combine_memory(tokens, hidden, choices, routing):
    """Return the memory traffic: read k rows per token, write and read received sums, write the token."""
    return tokens * hidden * ITEM * (choices + 2 * (routing.nodes + routing.nvlink_rows) + 1)


def _transport(machine, tokens, row_bytes, routing, memory, start_us, counts, world):
    sent = Bytes(tokens * row_bytes * routing.nodes, tokens * row_bytes * routing.nvlink_rows)
    network, link = wire(machine, sent)
    trips = trip(machine, world) + (counts * machine.network_us / 1e3 if world.nodes > 1 else 0.0)
    floor = max(ms(sent.network, machine.network_gbps), ms(sent.link, machine.best_link_gbps))
    ours = start_us / 1e3 + trips + max(network, link, memory)
    return TokenCost(world, routing, sent, network, link, memory, ours, floor)


# ---- decoding ----


@dataclass(frozen=True)
class DecodeCost:
    """Predicted ms of a decoding step: one rank without communication, torch + NCCL, and tdkernels."""

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
    """Return the bytes sent by a rank. A partial result has 4 (D + 1) bytes per head.

    It is sent to L - 1 local peers; each rank then sends its node's merged result to N - 1 nodes.
    """
    partial = 4 * heads * (dim + 1)
    return Bytes((world.nodes - 1) * partial, (world.local - 1) * partial)


def flash_decode(machine, keys, heads, dim, world):
    """Cost of one query per head with keys / W keys per rank, for the batch and heads with measured attention times.

    ours = local + decode_exchange_us + link + (on several nodes) network_us + network + decode_exchange_us
    sequence = torch's local + decode_sequence_us + (N - 1) network_us + network, where NCCL receives the partials of
    all ranks of the other nodes, N - 1 per network card
    """
    sent, own = decode_bytes(heads, dim, world), keys / world.ranks
    network, link = wire(machine, sent)
    local = line(machine.attention, own)
    between = (machine.network_us + machine.decode_exchange_us) / 1e3 + network if world.nodes > 1 else 0.0
    ours = local + machine.decode_exchange_us / 1e3 + link + between
    hops = (world.nodes - 1) * machine.network_us / 1e3
    sequence = line(machine.torch_attention, own) + machine.decode_sequence_us / 1e3 + hops + network
    return DecodeCost(world, sent, local, sequence, ours)
