"""Cost model of the operators on several nodes, from single-node measurements. All results are predictions.

There are N nodes of L ranks, W = N * L ranks in total; rank = node * L + local rank. NVLink connects the ranks of a
node. Each rank has its own network card, which connects it to the ranks of other nodes with the same local rank. The
operators are hierarchical: data for another node crosses the network once, between ranks of equal local rank, and is
forwarded or reduced inside the node.

This file has the dense operators; `token_model.py` has dispatch, combine and decoding.

All parameters other than problem sizes are fields of `Machine`, which documents where each was measured or why it is
assumed. Times are in ms and sizes in bytes unless the name says otherwise; rates are GB/s per direction and GPU.
"""

import math
from dataclasses import dataclass, field, fields, replace

from tdkernels.ops.dense.gemm_ar.launch_multinode import adds_once

ITEM = 2  # bytes of bf16


@dataclass(frozen=True)
class World:
    """N nodes of L ranks."""

    nodes: int
    local: int = 8

    def __post_init__(self):
        if self.nodes < 1 or self.local < 1:
            raise ValueError(f"World: nodes and local must be at least 1, not {self.nodes} and {self.local}")

    @property
    def ranks(self):
        return self.nodes * self.local


def _measured(where):
    return field(metadata={"kind": "measured", "source": where})


def _assumed(value, why):
    return field(default=value, metadata={"kind": "assumed", "source": why})


def _chosen(value, what):
    return field(default=value, metadata={"kind": "chosen", "source": what})


@dataclass(frozen=True)
class Machine:
    """Parameters of the model. ``measured_inputs.machine`` computes the measured ones from rows."""

    # ---- measured: medians and extremes of rows under results/ ----
    gemms: object = _measured("tuning.jsonl: cuBLAS alone, any number of GPUs; see GemmTimes")
    best_link_gbps: float = _measured("copy engine, best pair of GPUs; used for floors only")
    link_gbps: float = _measured("tuning.jsonl, most GPUs: NVLink bytes / tdkernels of wire-bound shapes, median")
    ag_share: float = _measured("same rows: (tdkernels - GEMM) / NVLink time of GEMM-bound ag_gemm, median")
    rs_share: float = _measured("same for gemm_rs: slowdown of the GEMM by pushing and reducing")
    ar_share: float = _measured("same for gemm_ar, from rows with fewer GPUs")
    nccl_gather_gbps: float = _measured("same rows: bytes / (torch + NCCL - GEMM) of ag_gemm, median")
    nccl_scatter_gbps: float = _measured("same for gemm_rs")
    nccl_reduce_gbps: float = _measured("same for gemm_ar")
    exchange_us: float = _measured("all_gather.jsonl: tdkernels, 1 KiB in a CUDA graph: one launch, push and signal")
    dispatch_us: float = _measured("ep_dispatch.jsonl, fewest GPUs: fewest tokens in a CUDA graph, with the counts")
    dispatch_memory_gbps: float = _measured("same: most tokens, memory traffic / (time - dispatch_us)")
    combine_us: float = _measured("ep_combine.jsonl, fewest GPUs: fewest tokens in a CUDA graph")
    combine_memory_gbps: float = _measured("same: most tokens, memory traffic / (time - combine_us)")
    attention: object = _measured("flash_decode.jsonl: one rank alone, in a CUDA graph; batch 1, 96 / 12 heads of 128")
    torch_attention: object = _measured("same: torch's fastest attention")
    decode_exchange_us: float = _measured("same, fewest GPUs: tdkernels minus one rank alone, median")
    decode_sequence_us: float = _measured("same: torch + NCCL with the merge, minus torch's attention, median")

    # ---- assumed: there are no measurements on a network ----
    network_gbps: float = _assumed(50.0, "400 Gb/s of network per GPU and direction")
    network_efficiency: float = _assumed(0.9, "fraction of it for large puts; DeepEP publishes 43 GB/s on such a card")
    network_us: float = _assumed(5.0, "latency of a put with a signal through one switch")
    network_byte_cost: float = _assumed(1.0, "SM time per network byte, relative to an NVLink byte")
    count_trips: int = _assumed(1, "network trips before tokens are sent: ep_dispatch exchanges counts")

    # ---- chosen: constants of the GPU, and typical tuned configs on one node ----
    num_sms: int = _chosen(132, "SMs of an H200")
    tile: tuple = _chosen((128, 256), "rows and columns of a GEMM tile, as mostly tuned")
    chunk_rows: int = _chosen(128, "rows of ag_gemm's chunks, each with a signal, as mostly tuned")
    item_tiles: int = _chosen(4, "tiles per transfer of gemm_rs and gemm_ar, as mostly tuned")

    @property
    def network_rate(self):
        return self.network_gbps * self.network_efficiency


def with_links(machine, gbps):
    """Return the machine with another NVLink rate; the slowdown of a GEMM per byte is unchanged."""
    shares = ("ag_share", "rs_share", "ar_share")
    rates = ("best_link_gbps", "link_gbps", "nccl_gather_gbps", "nccl_scatter_gbps", "nccl_reduce_gbps")
    scaled = {name: getattr(machine, name) * gbps / machine.link_gbps for name in shares}
    return replace(machine, **scaled, **dict.fromkeys(rates, gbps))


def provenance():
    """Return [(field, kind, source)] of a Machine."""
    return [(one.name, one.metadata["kind"], one.metadata["source"]) for one in fields(Machine)]


def ms(nbytes, gbps):
    """Return the ms of a transfer."""
    return nbytes / gbps / 1e6


def line(known, size):
    """Interpolate ms linearly between the two nearest known points (size, ms); extrapolate beyond the ends."""
    known = sorted(known)
    if len(known) < 2:
        raise ValueError(f"line: a line needs two points, not {len(known)}")
    right = next((i for i, (x, _) in enumerate(known) if i and size <= x), len(known) - 1)
    (x0, y0), (x1, y1) = known[right - 1], known[right]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


@dataclass(frozen=True)
class GemmTimes:
    """Measured GEMM times, and estimates for other sizes.

    known:  {(m, n, k) of one GPU: ms}
    """

    known: dict
    nearest = 3
    softening = 0.1  # octaves added to distances, which limits the weight of a single neighbour

    def ms(self, m, n, k):
        """Return the measured time, or 2 m n k over the distance-weighted mean rate of the three nearest GEMMs.

        Distances are in octaves of m, n and k. Wave quantization enters only through the neighbours' rates.
        """
        if (m, n, k) in self.known:
            return self.known[m, n, k]
        near = sorted(self.known, key=lambda sizes: (octaves(sizes, (m, n, k)), sizes))[: self.nearest]
        weights = [1 / (octaves(sizes, (m, n, k)) + self.softening) for sizes in near]
        rates = [2 * math.prod(sizes) / self.known[sizes] for sizes in near]
        return 2 * m * n * k / (sum(w * rate for w, rate in zip(weights, rates)) / sum(weights))

    def is_far(self, m, n, k):
        """Whether the nearest measured GEMM is more than an octave away."""
        return min(octaves(sizes, (m, n, k)) for sizes in self.known) > 1

    def without(self, sizes):
        """Return the times without one size, for leave-one-out validation."""
        return GemmTimes({known: time for known, time in self.known.items() if known != sizes})


def octaves(a, b):
    """Return the distance of two GEMMs: the Euclidean norm of log2(a / b) over m, n and k."""
    return math.dist([math.log2(size) for size in a], [math.log2(size) for size in b])


# ---- dense operators ----


@dataclass(frozen=True)
class Bytes:
    """Bytes that a rank sends over the network and over NVLink, including forwarded data."""

    network: float
    link: float


def ag_gemm_bytes(m, k, world):
    """Return the bytes sent by a rank. A shard has 2 m k / W bytes.

    A rank sends its shard to the N - 1 other nodes, and one shard of each of the N nodes to its L - 1 local peers.

    network = (N - 1) shard, link = N (L - 1) shard
    """
    shard = m * k * ITEM / world.ranks
    return Bytes((world.nodes - 1) * shard, world.nodes * (world.local - 1) * shard)


def gemm_rs_bytes(m, n, world):
    """Return the bytes sent by a rank. A block has 2 m n / W bytes.

    A rank sends N (L - 1) partial blocks to its local peers, and N - 1 reduced blocks of its node to other nodes.

    network = (N - 1) block, link = N (L - 1) block
    """
    block = m * n * ITEM / world.ranks
    return Bytes((world.nodes - 1) * block, world.nodes * (world.local - 1) * block)


def gemm_ar_bytes(m, n, world, once=False):
    """Return the bytes sent by a rank. A rank owns 2 m n / L bytes of tiles.

    It sends its node's sums to the N - 1 other owners, and partials and results to its L - 1 local peers.

    network = (N - 1) owned; if one owner of a tile reduces it for all nodes (``once``), 2 (N - 1) / N owned
    link = 2 (L - 1) owned
    """
    owned = m * n * ITEM / world.local
    times = 2 / world.nodes if once else 1
    return Bytes(times * (world.nodes - 1) * owned, 2 * (world.local - 1) * owned)


@dataclass(frozen=True)
class Cost:
    """Predicted ms of one operator.

    gemm:           the GEMM alone
    network, link:  transfer times at the rates of the model
    sequence:       the unfused baseline, NCCL's collective and cuBLAS
    floor:          the largest of the GEMM, the network at its full rate and NVLink at its best rate; for the network
                    the smaller volume of tdkernels and NCCL
    far:            whether no measured GEMM is near this one
    """

    world: World
    sent: Bytes
    gemm: float
    network: float
    link: float
    sequence: float
    ours: float
    floor: float
    far: bool

    @property
    def speedup(self):
        return self.sequence / self.ours

    @property
    def efficiency(self):
        return self.floor / self.ours

    @property
    def hidden(self):
        """GEMM / ours: 1 if the communication is fully hidden."""
        return self.gemm / self.ours

    @property
    def bound(self):
        """The longest of GEMM, NVLink and network."""
        times = {"GEMM": self.gemm, "NVLink": self.link, "network": self.network}
        return max(times, key=times.get)


def ag_gemm(machine, m, n, k, world):
    """Cost of all_gather(x [M / W, K]) @ weight.T with weight [N / W, K].

    ours = max(stall + GEMM + share, communication + last)
        stall           wait of the GEMM, after the shards of its own node, for the first chunk from the network:
                        max(0, network_us + chunk / network + exchange_us - GEMM / N); 0 on one node
        communication   max(network, link)
        last            the last chunk: its tiles and, on several nodes, network_us, its forwarding and exchange_us
    """
    sent, gemm = ag_gemm_bytes(m, k, world), machine.gemms.ms(m, n // world.ranks, k)
    network, link = wire(machine, sent)
    rows = min(machine.chunk_rows, m / world.ranks)
    chunk = rows * k * ITEM
    trip_ms = trip(machine, world)
    stall = max(0.0, trip_ms + ms(chunk, machine.network_rate) - gemm / world.nodes) if trip_ms else 0.0
    forwarding = ms(chunk * (world.local - 1), machine.link_gbps) if trip_ms else 0.0
    computing = stall + gemm + _share(machine, machine.ag_share, sent)
    ours = max(computing, max(network, link) + trip_ms + forwarding + gemm * rows / m)
    far = machine.gemms.is_far(m, n // world.ranks, k)
    return _cost(machine, world, sent, gemm, machine.nccl_gather_gbps, ours, far)


def gemm_rs(machine, m, n, k, world):
    """Cost of reduce_scatter(x [M, K / W] @ weight.T), reduced in the nodes and then between them; see `_reducing`."""
    sent, gemm = gemm_rs_bytes(m, n, world), machine.gemms.ms(m, n, k // world.ranks)
    ours = _reducing(machine, gemm, sent, m, n, machine.rs_share, world)
    far = machine.gemms.is_far(m, n, k // world.ranks)
    return _cost(machine, world, sent, gemm, machine.nccl_scatter_gbps, ours, far)


def gemm_ar(machine, m, n, k, world, once=None):
    """Cost of all_reduce(x [M, K / W] @ weight.T). Owners of a tile exchange the sums of their nodes.

    Args:
        once: instead, the owner on one node reduces the tile and sends the result to the other nodes. This sends
            2 (N - 1) / N times the tile instead of N - 1 times, as NCCL does, and needs a second network trip.
            None uses the choice of the operator.
    """
    if once is None:
        once = adds_once(world.nodes, m * n * ITEM / world.local)
    sent, gemm = gemm_ar_bytes(m, n, world, once), machine.gemms.ms(m, n, k // world.ranks)
    second = trip(machine, world) if once else 0.0
    ours = second + _reducing(machine, gemm, sent, m, n, machine.ar_share, world)
    far = machine.gemms.is_far(m, n, k // world.ranks)
    nccl = gemm_ar_bytes(m, n, world, once=True)
    return _cost(machine, world, sent, gemm, machine.nccl_reduce_gbps, ours, far, nccl)


def _reducing(machine, gemm, sent, m, n, share, world):
    """Return ours = max(GEMM + share, wave + max(network, link)) + last.

    wave    the first wave of tiles, before which there is nothing to send: GEMM / ceil(tiles / SMs)
    last    on several nodes the last transfer: exchange_us, network_us and its bytes over the network
    """
    tiles = math.ceil(m / machine.tile[0]) * math.ceil(n / machine.tile[1])
    wave = gemm / math.ceil(tiles / machine.num_sms)
    trip_ms = trip(machine, world)
    item = machine.item_tiles * math.prod(machine.tile) * ITEM
    last = trip_ms + ms(min(item, m * n * ITEM), machine.network_rate) if trip_ms else 0.0
    return max(gemm + _share(machine, share, sent), wave + max(wire(machine, sent))) + last


def wire(machine, sent):
    """Return the transfer times (network, link) in ms at the rates of the model."""
    return ms(sent.network, machine.network_rate), ms(sent.link, machine.link_gbps)


def _share(machine, share, sent):
    """Return the slowdown of the GEMM in ms by communication, which uses SMs and memory bandwidth.

    share (link bytes + network_byte_cost network bytes) / link rate
    """
    return share * ms(sent.link + machine.network_byte_cost * sent.network, machine.link_gbps)


def trip(machine, world):
    """Return the latency from another node to a local peer: network_us + exchange_us; 0 on one node."""
    return (machine.network_us + machine.exchange_us) / 1e3 if world.nodes > 1 else 0.0


def _cost(machine, world, sent, gemm, nccl_gbps, ours, far, nccl=None):
    """Return the Cost. ``nccl`` is the bytes sent by NCCL's collective, if they differ from ``sent``."""
    nccl = nccl or sent
    network, link = wire(machine, sent)
    least = min(sent.network, nccl.network)
    floor = max(gemm, ms(least, machine.network_gbps), ms(sent.link, machine.best_link_gbps))
    sequence = gemm + collective(machine, nccl, nccl_gbps, world)
    return Cost(world, sent, gemm, network, link, sequence, ours, floor, far)


def collective(machine, sent, nccl_gbps, world):
    """NCCL: max(network bytes / network rate, link bytes / NCCL's rate on one node) + (N - 1) network_us.

    Assumption: NCCL reaches the same network rate as tdkernels, and overlaps network and NVLink.
    """
    hops = (world.nodes - 1) * machine.network_us / 1e3
    return max(ms(sent.network, machine.network_rate), ms(sent.link, nccl_gbps)) + hops
