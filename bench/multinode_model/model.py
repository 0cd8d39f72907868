"""What the operators would take on several nodes: a cost model, made of pieces measured on one. Nothing here was run.

A rank is node * L + local: N nodes of L ranks, W = N * L in all. NVLink joins the ranks of a node; a network card of
its own joins each rank to those of other nodes that have its local rank. The operators are hierarchical: what is for
another node crosses the network once, between ranks of one local rank, and goes on or is added up inside the node.

Products with communication are here, tokens and decoding in `token_model.py`.

Every number that is not a size of the problem is a field of `Machine`, which says of each where it was measured or why
it is assumed. Times are ms and sizes bytes, unless a name says otherwise; rates are GB/s each way of one GPU.
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
    """All that the model knows besides sizes. What is measured comes from rows, by `nodes_measured.machine`."""

    # ---- measured: medians and extremes of rows under results/, never typed ----
    products: object = _measured("tuning.jsonl: GEMMs of cuBLAS alone, at any number of GPUs; see Products")
    best_link_gbps: float = _measured("copy engine, best pair of GPUs; for floors only")
    link_gbps: float = _measured("tuning.jsonl, most GPUs: NVLink bytes / ours where the wire is what counts, median")
    ag_share: float = _measured("the same rows: (ours - GEMM) / NVLink time of ag_gemm with a longer GEMM, median")
    rs_share: float = _measured("the same of gemm_rs: what pushing and adding up take from the product")
    ar_share: float = _measured("the same of gemm_ar, whose rows are of fewer GPUs")
    nccl_gather_gbps: float = _measured("the same rows: bytes / (sequence - GEMM) of ag_gemm, median")
    nccl_scatter_gbps: float = _measured("the same of gemm_rs")
    nccl_reduce_gbps: float = _measured("the same of gemm_ar, whose rows are of fewer GPUs")
    exchange_us: float = _measured("all_gather.jsonl: ours of 1 KiB in a CUDA graph: a launch, a push, a signal")
    dispatch_us: float = _measured("ep_dispatch.jsonl, fewest GPUs: fewest tokens in a CUDA graph, counts included")
    dispatch_memory_gbps: float = _measured("the same: most tokens, traffic of memory / what they take beyond that")
    combine_us: float = _measured("ep_combine.jsonl, fewest GPUs: fewest tokens in a CUDA graph")
    combine_memory_gbps: float = _measured("the same: most tokens, traffic of memory / what they take beyond that")
    attention: object = _measured("flash_decode.jsonl: a rank alone, in a CUDA graph; batch 1, 96 / 12 heads of 128")
    torch_attention: object = _measured("the same: the fastest attention of torch")
    decode_exchange_us: float = _measured("the same, fewest GPUs: what ours takes beyond a rank alone, median")
    decode_sequence_us: float = _measured("the same: what NCCL and the merge in torch take beyond that, median")

    # ---- assumed: nobody here has had a network ----
    network_gbps: float = _assumed(50.0, "400 Gb/s of network for each GPU, each way")
    network_efficiency: float = _assumed(0.9, "of that, for large puts; DeepEP publishes 43 GB/s over such a card")
    network_us: float = _assumed(5.0, "from a put with a signal to its arrival, through one switch")
    network_byte_cost: float = _assumed(1.0, "what a byte on the network costs multiprocessors, against one on NVLink")
    count_trips: int = _assumed(1, "trips over the network before tokens leave: ep_dispatch says how many will come")

    # ---- chosen: constants of the GPU, and configs that the tuner mostly took on one node ----
    num_sms: int = _chosen(132, "multiprocessors of an H200")
    tile: tuple = _chosen((128, 256), "rows and columns of the product's tiles; the tuner's, mostly")
    chunk_rows: int = _chosen(128, "rows of ag_gemm's chunks, which have a signal each; the tuner's, mostly")
    item_tiles: int = _chosen(4, "tiles of one transfer of gemm_rs and gemm_ar; the tuner's, mostly")

    @property
    def network_rate(self):
        return self.network_gbps * self.network_efficiency


def with_links(machine, gbps):
    """The same GPUs with other NVLinks: all rates are gbps, and a byte costs the product what it did."""
    shares = ("ag_share", "rs_share", "ar_share")
    rates = ("best_link_gbps", "link_gbps", "nccl_gather_gbps", "nccl_scatter_gbps", "nccl_reduce_gbps")
    scaled = {name: getattr(machine, name) * gbps / machine.link_gbps for name in shares}
    return replace(machine, **scaled, **dict.fromkeys(rates, gbps))


def provenance():
    """[(field, kind, source)] of a Machine."""
    return [(one.name, one.metadata["kind"], one.metadata["source"]) for one in fields(Machine)]


def ms(nbytes, gbps):
    """bytes / rate."""
    return nbytes / gbps / 1e6


def line(known, size):
    """Through the two known points (size, ms) beside a size, straight; beyond the last ones the same way on."""
    known = sorted(known)
    if len(known) < 2:
        raise ValueError(f"line: a line needs two points, not {len(known)}")
    right = next((i for i, (x, _) in enumerate(known) if i and size <= x), len(known) - 1)
    (x0, y0), (x1, y1) = known[right - 1], known[right]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


@dataclass(frozen=True)
class Products:
    """Times of products that were measured, and by their rates those of others.

    known:  {(m, n, k) of one GPU: ms}
    """

    known: dict
    nearest = 3
    softening = 0.1  # of distances, in octaves, so that no single neighbour outweighs the others much

    def ms(self, m, n, k):
        """2 m n k over a rate, that of the three nearest products (in octaves of m, n, k), the nearer the more.

        A product that was measured has the time that it took. Waves of tiles that do not come out even are in the
        neighbours' rates only.
        """
        if (m, n, k) in self.known:
            return self.known[m, n, k]
        near = sorted(self.known, key=lambda sizes: (octaves(sizes, (m, n, k)), sizes))[: self.nearest]
        weights = [1 / (octaves(sizes, (m, n, k)) + self.softening) for sizes in near]
        rates = [2 * math.prod(sizes) / self.known[sizes] for sizes in near]
        return 2 * m * n * k / (sum(w * rate for w, rate in zip(weights, rates)) / sum(weights))

    def is_far(self, m, n, k):
        """Whether the nearest product that was measured is more than an octave away."""
        return min(octaves(sizes, (m, n, k)) for sizes in self.known) > 1

    def without(self, sizes):
        """As if one had not been measured: what the others say of it is how far the rest can be trusted."""
        return Products({known: time for known, time in self.known.items() if known != sizes})


def octaves(some, others):
    """The distance of two products: the root of the sum of log2(a / b) squared, of m, n and k."""
    return math.dist([math.log2(size) for size in some], [math.log2(size) for size in others])


# ---- products with communication ----


@dataclass(frozen=True)
class Bytes:
    """What a rank sends: over the network, and over NVLink, what it passes on included."""

    network: float
    link: float


def ag_gemm_bytes(m, k, world):
    """A shard of m k 2 / W bytes: N - 1 times over the network; those of all N nodes to L - 1 local peers.

    network = (N - 1) shard, link = N (L - 1) shard
    """
    shard = m * k * ITEM / world.ranks
    return Bytes((world.nodes - 1) * shard, world.nodes * (world.local - 1) * shard)


def gemm_rs_bytes(m, n, world):
    """Blocks of m n 2 / W bytes: N (L - 1) partials to local peers, N - 1 sums of the node to other nodes.

    network = (N - 1) block, link = N (L - 1) block
    """
    block = m * n * ITEM / world.ranks
    return Bytes((world.nodes - 1) * block, world.nodes * (world.local - 1) * block)


def gemm_ar_bytes(m, n, world, once=False):
    """An owner has m n 2 / L bytes of tiles: its sums to N - 1 owners, partials and results to L - 1 local peers.

    network = (N - 1) owned, or where one owner of a tile adds for all, ``once``, 2 (N - 1) / N owned
    link = 2 (L - 1) owned
    """
    owned = m * n * ITEM / world.local
    times = 2 / world.nodes if once else 1
    return Bytes(times * (world.nodes - 1) * owned, 2 * (world.local - 1) * owned)


@dataclass(frozen=True)
class Cost:
    """ms of one operator: the product alone, what is sent at the rates of the model, and what comes of it.

    sequence:   NCCL's collective and cuBLAS, one after the other
    floor:      the largest of the product, the network at its full rate and NVLink at its best; of the network as
                little as either of ours and NCCL's sends
    far:        whether no product that was measured is near this one
    """

    world: World
    sent: Bytes
    product: float
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
        """product / ours: 1 is communication that costs nothing."""
        return self.product / self.ours

    @property
    def bound(self):
        """What takes longest by itself."""
        times = {"product": self.product, "NVLink": self.link, "network": self.network}
        return max(times, key=times.get)


def ag_gemm(machine, m, n, k, world):
    """x [M / W, K] of all ranks times our weight [N / W, K].

    ours = max(stall + product + share, communication + last)
        stall           of the product after its own node's shards until the first chunk from the network has come:
                        max(0, network_us + chunk / network + exchange_us - product / N), nothing on one node
        communication   max(network, link)
        last            the last chunk: on several nodes network_us, passing it on and exchange_us; and its tiles
    """
    sent, product = ag_gemm_bytes(m, k, world), machine.products.ms(m, n // world.ranks, k)
    network, link = wire(machine, sent)
    rows = min(machine.chunk_rows, m / world.ranks)
    chunk = rows * k * ITEM
    far_away = trip(machine, world)
    stall = max(0.0, far_away + ms(chunk, machine.network_rate) - product / world.nodes) if far_away else 0.0
    passed_on = ms(chunk * (world.local - 1), machine.link_gbps) if far_away else 0.0
    computing = stall + product + _share(machine, machine.ag_share, sent)
    ours = max(computing, max(network, link) + far_away + passed_on + product * rows / m)
    far = machine.products.is_far(m, n // world.ranks, k)
    return _cost(machine, world, sent, product, machine.nccl_gather_gbps, ours, far)


def gemm_rs(machine, m, n, k, world):
    """x [M, K / W] times weight [N, K / W], added up inside the nodes and then between them; see `_adding_up`."""
    sent, product = gemm_rs_bytes(m, n, world), machine.products.ms(m, n, k // world.ranks)
    ours = _adding_up(machine, product, sent, m, n, machine.rs_share, world)
    far = machine.products.is_far(m, n, k // world.ranks)
    return _cost(machine, world, sent, product, machine.nccl_scatter_gbps, ours, far)


def gemm_ar(machine, m, n, k, world, once=None):
    """The same for all ranks: an owner sends its node's sum to the N - 1 owners of the tile on other nodes.

    Args:     once: instead of that, which costs a second trip over the network, the owner of the tile on one of the
              nodes adds up and sends the result to the others: 2 (N - 1) / N as many bytes instead of N - 1, which is
              also what NCCL sends. As the operator chooses, if not told
    """
    if once is None:
        once = adds_once(world.nodes, m * n * ITEM / world.local)
    sent, product = gemm_ar_bytes(m, n, world, once), machine.products.ms(m, n, k // world.ranks)
    second = trip(machine, world) if once else 0.0
    ours = second + _adding_up(machine, product, sent, m, n, machine.ar_share, world)
    far = machine.products.is_far(m, n, k // world.ranks)
    nccl = gemm_ar_bytes(m, n, world, once=True)
    return _cost(machine, world, sent, product, machine.nccl_reduce_gbps, ours, far, nccl)


def _adding_up(machine, product, sent, m, n, share, world):
    """ours = max(product + share, wave + max(network, link)) + last

    wave    the first tiles, before which there is nothing to send: product / ceil(tiles / multiprocessors)
    last    on several nodes the last transfer: exchange_us, network_us and its bytes over the network
    """
    tiles = math.ceil(m / machine.tile[0]) * math.ceil(n / machine.tile[1])
    wave = product / math.ceil(tiles / machine.num_sms)
    far_away = trip(machine, world)
    item = machine.item_tiles * math.prod(machine.tile) * ITEM
    last = far_away + ms(min(item, m * n * ITEM), machine.network_rate) if far_away else 0.0
    return max(product + _share(machine, share, sent), wave + max(wire(machine, sent))) + last


def wire(machine, sent):
    """(network, link) at the rates of the model."""
    return ms(sent.network, machine.network_rate), ms(sent.link, machine.link_gbps)


def _share(machine, share, sent):
    """What the product loses to communication: multiprocessors that push and add up, and memory that they share.

    share (link bytes + network_byte_cost network bytes) / link rate
    """
    return share * ms(sent.link + machine.network_byte_cost * sent.network, machine.link_gbps)


def trip(machine, world):
    """From a rank of another node to a local peer of ours: network_us + exchange_us; 0 on one node."""
    return (machine.network_us + machine.exchange_us) / 1e3 if world.nodes > 1 else 0.0


def _cost(machine, world, sent, product, nccl_gbps, ours, far, nccl=None):
    """Args:     nccl: what NCCL's collective sends, if that is not what ours does."""
    nccl = nccl or sent
    network, link = wire(machine, sent)
    least = min(sent.network, nccl.network)
    floor = max(product, ms(least, machine.network_gbps), ms(sent.link, machine.best_link_gbps))
    sequence = product + collective(machine, nccl, nccl_gbps, world)
    return Cost(world, sent, product, network, link, sequence, ours, floor, far)


def collective(machine, sent, nccl_gbps, world):
    """NCCL: max(network bytes / our network rate, link bytes / its rate on one node) + (N - 1) network_us.

    Assumed: NCCL fills the network as well as we do, and hides the smaller of both behind the larger.
    """
    hops = (world.nodes - 1) * machine.network_us / 1e3
    return max(ms(sent.network, machine.network_rate), ms(sent.link, nccl_gbps)) + hops
