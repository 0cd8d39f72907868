"""Multi-node cost model: bytes compared with simulated transfers, limits, inputs, and its section of the report."""

import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from bench.core import points
from bench.dense.operators import Case
from bench.dense.shapes import Shape
from bench.multinode_model import measured_inputs, model, token_model
from bench.multinode_model import published as nodes_published
from bench.multinode_model import report as nodes_report
from bench.multinode_model.model import ITEM, World

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
SMALL = [World(*sizes) for sizes in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 2), (2, 4), (4, 3))]
REAL = [World(count) for count in (1, 2, 4, 8)]
DENSE = ("ag_gemm", "gemm_rs", "gemm_ar")


@pytest.fixture(scope="module")
def rows():
    readers = points.read_collectives, points.read_ep, points.read_decode
    return points.read(RESULTS), *(read(RESULTS) for read in readers)


@pytest.fixture(scope="module")
def machine(rows):
    return measured_inputs.machine(*rows)


# ---- bytes, compared with a simulation of every transfer ----


class Traffic:
    """Count the bytes that each rank sends. The network connects only ranks with equal local rank."""

    def __init__(self, world):
        self.world = world
        self.network = [0] * world.ranks
        self.link = [0] * world.ranks

    def send(self, source, target, nbytes):
        assert source != target
        (node, local), (to_node, to_local) = (divmod(rank, self.world.local) for rank in (source, target))
        if node == to_node:
            self.link[source] += nbytes
        else:
            assert local == to_local, "the network connects equal local ranks"
            self.network[source] += nbytes

    def per_rank(self):
        """Return the model.Bytes of a rank; all ranks must send the same number."""
        assert len(set(self.network)) == 1 and len(set(self.link)) == 1
        return model.Bytes(self.network[0], self.link[0])

    def mean(self):
        return sum(self.network) / self.world.ranks, sum(self.link) / self.world.ranks


def ranks_of(world):
    return itertools.product(range(world.nodes), range(world.local))


@pytest.mark.parametrize("world", SMALL, ids=str)
def test_ag_gemm_sends_each_shard_once_to_every_rank(world):
    m, k, L = 6 * world.ranks, 5, world.local
    traffic, shard = Traffic(world), 6 * 5 * ITEM
    has = {rank: [rank] for rank in range(world.ranks)}
    for node, local in ranks_of(world):
        for other in range(world.nodes):
            holder = other * L + local
            if other != node:
                traffic.send(node * L + local, holder, shard)
                has[holder].append(node * L + local)
            for peer in set(range(L)) - {local}:  # the holder forwards it; in its own node, the owner
                traffic.send(holder, other * L + peer, shard)
                has[other * L + peer].append(node * L + local)
    assert all(sorted(shards) == list(range(world.ranks)) for shards in has.values())
    assert model.ag_gemm_bytes(m, k, world) == traffic.per_rank()


@pytest.mark.parametrize("world", SMALL, ids=str)
def test_gemm_rs_reduces_within_nodes_then_between_nodes(world):
    m, n, L = 6 * world.ranks, 5, world.local
    traffic, block = Traffic(world), 6 * 5 * ITEM
    for target_node, target in ranks_of(world):
        final = []
        for node in range(world.nodes):
            node_sum = []
            for local in range(L):
                if local != target:
                    traffic.send(node * L + local, node * L + target, block)
                node_sum.append(node * L + local)
            if node != target_node:
                traffic.send(node * L + target, target_node * L + target, block)
            final += node_sum
        assert final == list(range(world.ranks)), "each rank once, node by node in rank order"
    assert model.gemm_rs_bytes(m, n, world) == traffic.per_rank()


def all_reduce(world, tile_bytes, parts):
    """Simulate the transfers of gemm_ar; return the bytes per rank.

    With ``parts`` == 1, all owners of a tile exchange their sums. With one part per node, the owner in the part's node
    reduces it and sends the result back.
    """
    traffic, L = Traffic(world), world.local
    results = {rank: 0 for rank in range(world.ranks)}
    for owner in range(L):
        for node in range(world.nodes):
            for local in set(range(L)) - {owner}:
                traffic.send(node * L + local, node * L + owner, tile_bytes)  # partials
                traffic.send(node * L + owner, node * L + local, tile_bytes)  # results
                results[node * L + local] += tile_bytes
            results[node * L + owner] += tile_bytes
        pairs = itertools.permutations(range(world.nodes), 2)
        for node, other in pairs:
            traffic.send(node * L + owner, other * L + owner, tile_bytes // parts)  # to the rank that reduces this part
            if parts > 1:
                traffic.send(other * L + owner, node * L + owner, tile_bytes // parts)  # and back
    assert set(results.values()) == {tile_bytes * L}
    return traffic.per_rank()


@pytest.mark.parametrize("world", SMALL, ids=str)
def test_gemm_ar_exchanges_node_sums_between_owners(machine, world):
    m, n = 4 * world.ranks, 8
    tile_bytes = m * n * ITEM // world.local
    assert model.gemm_ar_bytes(m, n, world) == all_reduce(world, tile_bytes, 1)
    if world.nodes > 1:
        once = model.gemm_ar(machine, m, n, 4096 * world.ranks, world, once=True)
        assert once.sent == all_reduce(world, tile_bytes, world.nodes)


def test_gemm_ar_selects_the_same_method_as_the_operator(machine):
    large, small = (8192, 8192), (1, 8192)
    for world, shape, once in ((World(4), large, True), (World(4), small, False), (World(2), large, False)):
        selected, explicit = (
            model.gemm_ar(machine, *shape, 8192, world, **options) for options in ({}, {"once": once})
        )
        assert selected == explicit and selected.sent == model.gemm_ar_bytes(*shape, world, once)


@pytest.mark.parametrize("world", SMALL, ids=str)
def test_flash_decode_merges_within_nodes_then_between_nodes(world):
    traffic, heads, dim = Traffic(world), 3, 16
    L = world.local
    for node, local in ranks_of(world):
        for peer in set(range(L)) - {local}:
            traffic.send(node * L + local, node * L + peer, 4 * heads * (dim + 1))
        for other in set(range(world.nodes)) - {node}:
            traffic.send(node * L + local, other * L + local, 4 * heads * (dim + 1))
    assert token_model.decode_bytes(heads, dim, world) == traffic.per_rank()


def send_token(traffic, source, ranks, nbytes, back=False):
    """Send a token once to each node of ``ranks`` and there to each of them; return the ranks that received it.

    ``back`` reverses every transfer.
    """
    L = traffic.world.local
    node, local = divmod(source, L)
    send = (lambda a, b: traffic.send(b, a, nbytes)) if back else (lambda a, b: traffic.send(a, b, nbytes))
    reached = []
    for other in sorted({rank // L for rank in ranks}):
        relay = other * L + local
        if other != node:
            send(source, relay)
        for rank in sorted(r for r in ranks if r // L == other):
            if rank != relay:
                send(relay, rank)
            reached.append(rank)
    return reached


@pytest.mark.parametrize("back", (False, True), ids=("dispatch", "combine"))
@pytest.mark.parametrize("world", [w for w in SMALL if w.ranks <= 8], ids=str)
def test_tokens_cross_once_per_node(world, back):
    """Enumerate all top-k choices of E experts on every rank, so that the mean is exact."""
    experts, choices = {1: 4, 2: 4, 4: 8, 6: 6, 8: 8}[world.ranks], 3
    experts_per_rank = experts // world.ranks
    traffic, samples = Traffic(world), list(itertools.combinations(range(experts), choices))
    for source in range(world.ranks):
        for chosen in samples:
            ranks = {expert // experts_per_rank for expert in chosen}
            assert send_token(traffic, source, ranks, 1, back) == sorted(ranks)
    network, link = (total / len(samples) for total in traffic.mean())
    routing = token_model.routed(experts, choices, world)
    assert (routing.nodes, routing.nvlink_rows) == pytest.approx((network, link), rel=1e-12)
    assert len(set(traffic.network)) == len(set(traffic.link)) == 1, "no rank relays more than others"


@pytest.mark.parametrize("world", SMALL, ids=str)
def test_rows_are_sent_directly_to_their_rank(world):
    traffic = Traffic(world)
    for source, target in itertools.product(range(world.ranks), repeat=2):
        send_token(traffic, source, {target}, 1)
    routing = token_model.rows_straight(1, world)
    assert (routing.nodes, routing.nvlink_rows) == pytest.approx([total / world.ranks for total in traffic.mean()])


@pytest.mark.parametrize("experts, held, choices", [(8, 2, 3), (8, 4, 3), (6, 1, 1), (5, 5, 2), (7, 3, 7), (6, 0, 2)])
def test_hit_is_the_share_of_choices_with_a_held_expert(experts, held, choices):
    samples = list(itertools.combinations(range(experts), choices))
    assert token_model.hit(experts, held, choices) == Fraction(sum(min(c) < held for c in samples), len(samples))


def test_routing_of_deepseek_by_sampling():
    world, random, tokens = World(4), Random(0), 4000
    samples = [random.sample(range(256), 8) for _ in range(tokens)]
    found = sum(len({e // 64 for e in chosen} - {0}) for chosen in samples) / tokens  # nodes other than the first
    ranks = sum(len({e // 8 for e in chosen}) for chosen in samples) / tokens
    routing = token_model.routed(256, 8, world)
    assert routing.nodes == pytest.approx(found, rel=0.02)
    # One rank of each node is reached without NVLink.
    assert routing.nvlink_rows == pytest.approx(ranks * (world.local - 1) / world.local, rel=0.02)


def test_invalid_sizes_are_rejected():
    for call, message in (
        (lambda: World(0), "nodes and local must be at least 1, not 0 and 8"),
        (lambda: token_model.routed(10, 2, World(2)), "10 experts are not divisible by 16 ranks"),
        (lambda: token_model.hit(4, 5, 1), "held 5 of 4"),
        (lambda: token_model.hit(4, 1, 5), "5 choices"),
        (lambda: model.line([(1, 1.0)], 2), "two points"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# ---- one node ----


@pytest.mark.parametrize("ranks", (2, 4, 8))
def test_one_node_bytes_equal_those_of_the_benchmarks(ranks):
    shape, world = Shape(8192, 4096, 6144), World(1, ranks)
    found = {
        "ag_gemm": model.ag_gemm_bytes(shape.m, shape.k, world),
        "gemm_rs": model.gemm_rs_bytes(shape.m, shape.n, world),
        "gemm_ar": model.gemm_ar_bytes(shape.m, shape.n, world),
    }
    for operator, sent in found.items():
        assert sent == model.Bytes(0, Case(operator, shape, ranks).wire_bytes), operator


def test_one_node_gemms_follow_the_one_node_formulas(machine):
    m, n, k, world = 8192, 8192, 28672, World(1)
    for operator, share in zip(DENSE, (machine.ag_share, machine.rs_share, machine.ar_share)):
        cost = getattr(model, operator)(machine, m, n, k, world)
        wire = cost.sent.link / machine.link_gbps / 1e6
        local = (m, n // 8, k) if operator == "ag_gemm" else (m, n, k // 8)
        product = machine.gemms.known[local]
        tiles = 64 * 32
        edge = product * 128 / m if operator == "ag_gemm" else product / -(-tiles // 132)
        assert cost.gemm == product and not cost.network and not cost.far
        assert cost.ours == pytest.approx(max(product + share * wire, edge + wire)), operator
        rates = {"ag_gemm": "gather", "gemm_rs": "scatter", "gemm_ar": "reduce"}
        nccl = getattr(machine, f"nccl_{rates[operator]}_gbps")
        assert cost.sequence == pytest.approx(product + cost.sent.link / nccl / 1e6), operator
        assert cost.floor == pytest.approx(max(product, cost.sent.link / machine.best_link_gbps / 1e6)), operator


def simple_machine(machine, **pieces):
    """Return a machine with round numbers: NVLink 100 GB/s, network 10 GB/s, 40 us per network trip."""
    simple = replace(model.with_links(machine, 100.0), network_gbps=20.0, network_efficiency=0.5, network_us=30.0)
    shares = {"ag_share": 0.5, "rs_share": 0.5, "ar_share": 0.5}
    return replace(simple, exchange_us=10.0, **{**shares, **pieces})


@pytest.mark.parametrize("product", (0.01, 1.0, 100.0))
def test_two_nodes_ag_gemm_by_hand(machine, product):
    """M = 4096, K = 10000: shards of 1024 rows, 20.48 MB; chunks of 128 rows, 2.56 MB."""
    cost = model.ag_gemm(
        simple_machine(machine, gemms=model.GemmTimes({(4096, 64, 10000): product})), 4096, 256, 10000, World(2, 2)
    )
    assert (cost.network, cost.link) == pytest.approx((2.048, 0.4096))
    stall = max(0.0, 0.040 + 0.256 - product / 2)
    share = 0.5 * (20.48 + 40.96) / 100
    last = 0.040 + 0.0256 + product * 128 / 4096
    assert cost.ours == pytest.approx(max(stall + product + share, 2.048 + last))
    assert cost.sequence == pytest.approx(product + 2.048 + 0.030)


def test_gemm_waits_for_the_first_remote_chunk(machine):
    """One chunk of 2.56 MB per shard: the local half of the GEMM takes 0.25 ms, the chunk arrives after 0.296 ms."""
    simple = simple_machine(machine, gemms=model.GemmTimes({(512, 64, 10000): 0.5}))
    cost = model.ag_gemm(simple, 512, 256, 10000, World(2, 2))
    share = 0.5 * (2.56 + 5.12) / 100
    assert cost.ours == pytest.approx(0.040 + 0.256 - 0.25 + 0.5 + share)


@pytest.mark.parametrize("product", (0.01, 1.0, 100.0))
def test_two_nodes_gemm_rs_and_gemm_ar_by_hand(machine, product):
    """M = N = 4096: blocks of 8.39 MB in gemm_rs, owned tiles of 16.8 MB in gemm_ar, tile groups of 262 KB, 4 waves."""
    simple, world = simple_machine(machine, gemms=model.GemmTimes({(4096, 4096, 64): product})), World(2, 2)
    owned, item = 4096 * 4096 * 2 / 2 / 1e6, 4 * 128 * 256 * 2 / 1e6
    for operator, network, link in (("gemm_rs", owned / 2, owned), ("gemm_ar", owned, 2 * owned)):
        cost = getattr(model, operator)(simple, 4096, 4096, 256, world)
        wire = max(network / 10, link / 100)
        computing, last = product + 0.5 * (network + link) / 100, 0.040 + item / 10
        assert cost.ours == pytest.approx(max(computing, product / 4 + wire) + last), operator
        assert cost.sequence == pytest.approx(product + wire + 0.030), operator
    once = model.gemm_ar(simple, 4096, 4096, 256, world, once=True)
    assert once.ours == pytest.approx(cost.ours + 0.040), "the same bytes on 2 nodes, and one more trip"


def test_two_nodes_tokens_and_decoding_by_hand(machine):
    """Top-4 of 4 experts: each token goes to the other node once, and to one local peer in each node."""
    simple, world = simple_machine(machine, dispatch_us=100.0, combine_us=200.0, dispatch_memory_gbps=1e9), World(2, 2)
    there = token_model.ep_dispatch(simple, 1000, 100, 4, 4, 100, world)
    assert (there.network, there.link) == pytest.approx((0.010, 0.002))
    assert there.ours == pytest.approx(0.100 + 0.030 + 0.040 + 0.010)
    back = token_model.ep_combine(replace(simple, combine_memory_gbps=1.0), 1000, 100, 4, 4, world)
    assert back.memory == pytest.approx(1000 * 200 * (4 + 2 * (1 + 2) + 1) / 1e6)
    assert back.ours == pytest.approx(0.200 + 0.040 + back.memory)
    rows = token_model.all_to_all(replace(simple, dispatch_memory_gbps=1.0), 1000, 100, 4, 100, world)
    assert (rows.network, rows.link) == pytest.approx((0.020, 0.002))
    assert rows.memory == pytest.approx(1000 * 100 * (4 + 4 + 2 * 2) / 1e6)
    assert rows.ours == pytest.approx(0.100 + 0.030 + 0.040 + rows.memory)
    simple = replace(simple, attention=((0, 0.0), (100, 1.0)), torch_attention=((0, 0.0), (100, 2.0)),
                   decode_exchange_us=5.0, decode_sequence_us=50.0)
    step = token_model.flash_decode(simple, 200, 10, 24, world)  # partials of 1000 bytes
    assert step.ours == pytest.approx(0.5 + 0.005 + 1e-5 + 0.030 + 1e-4 + 0.005)
    assert step.sequence == pytest.approx(1.0 + 0.050 + 0.030 + 1e-4)


def test_one_node_is_independent_of_the_network(machine):
    other = replace(machine, network_gbps=1e-3, network_us=1e9, count_trips=9)
    for call in every_call():
        assert call(machine, World(1)) == call(other, World(1))
        assert call(machine, World(2)).ours < call(other, World(2)).ours


def test_one_node_tokens_equal_those_of_the_benchmark(machine):
    """The sent rows are tokens times the expected number of remote ranks, as in the benchmark."""
    cost = token_model.ep_dispatch(machine, 4096, 7168, 256, 8, 7392, World(1, 2))
    assert cost.sent.link == pytest.approx(4096 * 7392 * float(token_model.hit(256, 128, 8)))
    assert cost.ours == pytest.approx(machine.dispatch_us / 1e3 + max(cost.link, cost.memory))


# ---- limits ----


def every_call():
    """Return the model's operators as functions of a machine and a world."""
    calls = [
        lambda machine, world, op=op, m=m: getattr(model, op)(machine, m, 8192, 28672, world)
        for op in DENSE
        for m in (2048, 8192)
    ]
    return [
        *calls,
        lambda machine, world: model.gemm_ar(machine, 8192, 8192, 28672, world, once=world.nodes > 1),
        lambda machine, world: token_model.ep_dispatch(machine, 128, 7168, 256, 8, 7392, world),
        lambda machine, world: token_model.ep_combine(machine, 4096, 7168, 256, 8, world),
        lambda machine, world: token_model.all_to_all(machine, 128, 7168, 8, 7392, world),
        lambda machine, world: token_model.flash_decode(machine, 2**18, 96, 128, world),
    ]


@pytest.mark.parametrize("name, factor", [
    ("network_gbps", 0.5), ("network_efficiency", 0.5), ("network_us", 3), ("link_gbps", 0.5), ("exchange_us", 3),
    ("ag_share", 3), ("rs_share", 3), ("ar_share", 3), ("network_byte_cost", 3), ("count_trips", 3),
    ("dispatch_us", 3), ("combine_us", 3), ("dispatch_memory_gbps", 0.1), ("combine_memory_gbps", 0.1),
    ("decode_exchange_us", 3), ("chunk_rows", 2), ("item_tiles", 2),
])
def test_worse_machine_is_never_faster(machine, name, factor):
    worse = replace(machine, **{name: getattr(machine, name) * factor})
    worlds = [World(count) for count in (1, 2, 8)]
    ratios = [call(worse, w).ours / call(machine, w).ours for call in every_call() for w in worlds]
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) > 1, "it must affect some operator"


def test_more_nodes_send_more_and_larger_problems_take_longer(machine):
    for call in every_call():
        if call(machine, World(2)).sent.network:
            sent = [call(machine, world).sent.network for world in REAL]
            assert sent == sorted(sent) and sent[0] == 0 < sent[1]
    for world in REAL:
        for tokens in (8, 128, 4096):
            counts = 2 * tokens, tokens
            more, less = (token_model.ep_dispatch(machine, t, 7168, 256, 8, 7392, world).ours for t in counts)
            assert more > less
        for operator in DENSE:
            costs = [getattr(model, operator)(machine, m, 8192, 28672, world).ours for m in (1024, 4096, 16384, 65536)]
            assert costs == sorted(costs)
        times = [token_model.flash_decode(machine, keys, 96, 128, world).ours for keys in (2**14, 2**16, 2**18, 2**20)]
        assert times == sorted(times)


def test_no_estimate_is_below_its_floor(machine):
    for operator, shapes in nodes_report._SHAPES.items():
        for sizes, world in itertools.product(shapes, REAL):
            cost = getattr(model, operator)(machine, *sizes, world)
            assert 0 < cost.hidden <= cost.efficiency <= 1, (operator, sizes, world)
            assert cost.ours >= max(cost.gemm, cost.network, cost.link)
    for call in every_call()[-4:-1]:
        assert all(0 < call(machine, world).efficiency < 1 for world in REAL)


def test_communication_longer_than_the_gemm_is_not_hidden(machine):
    cost = model.ag_gemm(machine, 8192, 28672, 8192, World(8))
    assert cost.bound == "NVLink" and cost.hidden < 0.5 and cost.efficiency < 0.8
    slow = model.ag_gemm(replace(machine, network_gbps=5.0), 8192, 28672, 8192, World(8))
    assert slow.bound == "network" and slow.hidden < 0.1
    free = model.with_links(replace(machine, ag_share=0.0), 1e9)
    free = replace(free, network_gbps=1e9, network_us=0.0, exchange_us=0.0)
    cost = model.ag_gemm(free, 8192, 28672, 8192, World(8))
    assert cost.bound == "GEMM" and cost.hidden == pytest.approx(1, rel=1e-2)
    assert cost.speedup == pytest.approx(1, rel=1e-3), "free communication leaves nothing to hide"


def test_link_rate_does_not_change_the_cost_per_byte(machine):
    slow = model.with_links(machine, machine.link_gbps / 2)
    sent = model.Bytes(0, 10**9)
    assert model._share(slow, slow.ag_share, sent) == pytest.approx(model._share(machine, machine.ag_share, sent))
    assert slow.nccl_gather_gbps == slow.best_link_gbps == machine.link_gbps / 2


# ---- GEMM times, interpolation ----


def test_gemm_times_are_measured_or_estimated_from_rates():
    known = {(8192, 2**i, 4096): 2 * 8192 * 2**i * 4096 / 700e9 for i in range(9, 14)}
    table = model.GemmTimes({**known, (64, 64, 64): 1.0})
    assert table.ms(8192, 1024, 4096) == known[8192, 1024, 4096]
    assert table.ms(64, 64, 64) == 1.0
    assert table.ms(8192, 1500, 4096) == pytest.approx(2 * 8192 * 1500 * 4096 / 700e9)
    assert table.without((64, 64, 64)).ms(64, 64, 64) == pytest.approx(2 * 64**3 / 700e9)
    assert not table.is_far(8192, 1500, 4096) and table.is_far(8192, 100, 4096)
    assert (64, 64, 64) in table.known, "without() returns a copy"


def test_line_interpolates_and_extrapolates():
    known = [(4, 30.0), (1, 10.0), (2, 20.0)]
    assert [model.line(known, size) for size in (1, 1.5, 2, 3, 4, 6, 0)] == [10, 15, 20, 25, 30, 40, 0]


# ---- inputs measured by the benchmarks ----


def test_inputs_are_taken_from_the_rows(rows, machine):
    found, alone, ep, decode = rows
    small = [r["ms"] * 1e3 for r in alone if (r["op"], r["bytes"], r["graph"], r["method"])
             == ("all_gather", 1024, True, "tdkernels")]
    assert machine.exchange_us in small
    shape = Shape(8192, 49152, 12288)
    (point,) = [p for p in found if p.tuner and (p.machine, p.operator, p.shape.n) == ("h200x8", "ag_gemm", shape.n)]
    assert machine.gemms.ms(8192, 49152 // 8, 12288) == point.gemm
    assert 0.5 < machine.link_gbps / machine.best_link_gbps < 1 and machine.nccl_gather_gbps < machine.best_link_gbps
    assert all(0 < share < 1 for share in (machine.ag_share, machine.rs_share, machine.ar_share))
    for name, kind, source in model.provenance():
        assert kind in ("measured", "assumed", "chosen") and source
        value = getattr(machine, name)
        assert not isinstance(value, float) or value > 0, name


def test_one_node_predictions_match_the_rows_within_the_reported_spread(rows, machine):
    for operator in DENSE:
        ratios = [nodes_report._predicted_over_measured(machine, point)[0]
                  for point in measured_inputs.widest(measured_inputs.usable(rows[0]), operator)]
        assert 0.9 < points.geometric_mean(ratios) < 1.1 and 0.7 < min(ratios) and max(ratios) < 1.4, operator
    # 2 GPUs, 4096 tokens, fp8 and bf16: the inputs are means of both.
    for payload, us in (("fp8", 163), ("bf16", 255)):
        row_bytes = measured_inputs.row_bytes(7168, payload)
        cost = token_model.ep_dispatch(machine, 4096, 7168, 256, 8, row_bytes, World(1, 2))
        assert cost.ours == pytest.approx(us / 1e3, rel=0.1)


def test_token_and_decode_inputs_are_taken_from_the_fewest_gpus(rows, machine):
    """With few GPUs memory matters most, and the wire hides no other cost."""
    found, alone, ep, decode = rows
    slower = [[{**row, "num_gpus": 8, "ms": row["ms"] and 9 * row["ms"]} for row in some] for some in (ep, decode)]
    assert measured_inputs.machine(found, alone, ep + slower[0], decode + slower[1]) == machine


def test_missing_rows_are_named_and_the_section_is_omitted(rows):
    found, alone, ep, decode = rows
    without = {
        "of gemm_ar": ([p for p in found if p.operator != "gemm_ar"], alone, ep, decode),
        "with a link rate": (found, [], ep, decode),
        "of ep_dispatch": (found, alone, [], decode),
        "of ep_combine": (found, alone, [r for r in ep if r["op"] != "ep_combine"], decode),
        "of flash_decode": (found, alone, ep, []),
    }
    for message, some in without.items():
        with pytest.raises(measured_inputs.Missing, match=f"no rows {message}"):
            measured_inputs.machine(*some)
        assert nodes_report.text(*some) == ""


# ---- the section ----


def test_section_in_the_report_is_up_to_date(rows):
    page = (ROOT / "bench" / "tables" / "predicted.md").read_text()
    text = nodes_report.text(*rows).partition("\n")[2].strip()  # the title of the page replaces the heading
    assert text in page, "bench/tables/predicted.md is stale: python -m tdkernels bench --report"


def test_section_names_predictions_and_their_inputs(rows):
    text = nodes_report.text(*rows)
    assert "## Predicted multi-node performance" in text and "**Nothing in this section was run.**" in text
    titles = [line for line in text.splitlines() if line.startswith("### ")]
    multi_node = [t for t in titles if "one node" not in t and "inputs" not in t]
    assert len(multi_node) == 6 and all("redicted" in title for title in multi_node)
    for name, kind, source in model.provenance():
        assert f"| {name} | " in text and f"| {kind} | {source} |" in text
    for published in ("137", "182", "1.07", "1.69", "README.md"):
        assert published in text
    assert "▼" in text, "losses are marked"


def test_published_results_are_listed_with_predictions(rows, machine):
    text = nodes_report.text(*rows)
    for operator, bars in nodes_published.TWO_NODES.items():
        for sizes, bar in bars.items():
            (line,) = [s for s in text.splitlines() if s.startswith(f"| {operator} | {'x'.join(map(str, sizes))}")]
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            cost = getattr(model, operator)(machine, *sizes, World(2))
            assert cells[2] == f"{cost.speedup:.2f}" and cells[-1] == f"{bar:.2f}"


def test_command_prints_the_section_or_the_missing_rows(rows, tmp_path, capsys):
    assert nodes_report.main(RESULTS) == 0
    assert capsys.readouterr().out == nodes_report.text(*rows) + "\n"
    assert nodes_report.main(tmp_path) == 1
    assert "no rows of ag_gemm" in capsys.readouterr().err
