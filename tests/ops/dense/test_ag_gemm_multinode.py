"""ag_gemm, and the gather beside it, in groups on several nodes."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

import tdkernels
from tdkernels import AgGemmConfig, PeerTimeoutError, PlanMismatchError, Tiles, explain
from tdkernels import lang as td
from tdkernels.autotune import mode, tune, tuner
from tdkernels.lang.profile import NUM_KINDS
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.collectives.kernel_async_multinode import relay_of, source_at
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.dense.ag_gemm import launch as ag_gemm_launch
from tdkernels.ops.dense.ag_gemm.tuning import AgGemmTunable
from tdkernels.ops.dense.backward import gathered_weight_gradient
from tdkernels.runtime.recorder import Recorder, record
from tdkernels.symm.group import group_state
from tdkernels.symm.topology import Topology
from tests.autotune.entries import cache_in
from tests.autotune.support import candidates, same_everywhere
from tests.ops.collectives.test_async_all_gather import bits, shard_of
from tests.ops.dense import cases as dense
from tests.ops.dense import multinode_cases
from tests.support.dense_oracle import Case
from tests.support.ranks import device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, reseed, thorough
from tests.test_protocol import failure_of, poison, timeout

BF16, FP16, FP32 = dense.DTYPES
SEEDS = 50
SMALL = {"tiles": Tiles(16, 16, 16, 1, 4, 2), "num_comm_sms": 2}
CHUNKS = {"tiles": Tiles(16, 64, 64, num_stages=2), "num_comm_sms": 3}
CONFIGS = {
    "small tiles, one program at a time": {**SMALL, "num_comm_sms": 1},
    "three programs, chunks of two tiles": {"tiles": Tiles(16, 64, 16), "num_comm_sms": 3, "chunk_tiles": 2},
    "chunks longer than a shard": {"tiles": Tiles(16, 128, 32, 2, 4, 1), "chunk_tiles": 9},
    "copy engine, which pushes": {**SMALL, "transport": "copy_engine", "chunk_tiles": 2},
    "parts, in two pieces": {"method": "parts", "pieces": 2},
    "torch": {"method": "torch"},
}


@pytest.mark.parametrize("world_size, local, dtype, shapes", [
    (4, 2, BF16, [(5, 3, 7), (65, 10, 20)]), (2, 1, FP32, [(37, 29, 51)]), (3, 1, FP16, [(17, 21, 33)]),
], ids=str)
def test_shapes(world_size, local, dtype, shapes):
    on_ranks(world_size, multinode_cases.computes, "ag_gemm", dtype, local, shapes)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (3, 1)])
def test_every_element_of_minimal_shapes(world_size, local):
    on_ranks(
        world_size, multinode_cases.computes, "ag_gemm", BF16, local, dense.MINIMAL_SHAPES, bias=False, exact=True
    )


@thorough
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config):
    on_ranks(4, multinode_cases.computes, "ag_gemm", FP16, 2, [(41, 20, 24)], **CONFIGS[config])


@thorough
def test_each_gradient_alone():
    on_ranks(4, multinode_cases.computes_only_the_gradients_asked_for, "ag_gemm", 2)


def test_memory_is_reused():
    on_ranks(4, multinode_cases.reuses_poisoned_memory, "ag_gemm", 2, [(5, 3, 7), (66, 70, 9), (5, 3, 7)])


@thorough
def test_slow_rank():
    on_ranks(4, multinode_cases.waits_for_a_slow_rank, "ag_gemm", 2)


@pytest.mark.parametrize("world_size, local, seeds, shapes, changes", [
    (4, 2, SEEDS, [(17, 1, 2)], SMALL), (3, 1, 12, [(1, 1, 1), (2, 3, 1)], {}),
], ids=["two chunks", "one rank a node"])
def test_any_order_of_the_network(world_size, local, seeds, shapes, changes):
    on_ranks(world_size, multinode_cases.is_right_on_every_network, "ag_gemm", local, seeds, shapes, **changes)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)])
def test_same_bits_every_time(world_size, local):
    on_ranks(world_size, multinode_cases.repeats_its_bits, "ag_gemm", local, BF16, **CHUNKS)


@pytest.mark.parametrize("missing", [1, 2])
def test_missing_rank(missing):
    # By whichever way a shard does not come, its owner is named.
    expected = [None if rank == missing else missing for rank in range(4)]
    assert on_ranks(4, multinode_cases.misses_a_rank, "ag_gemm", 2, missing) == expected


def test_disagreement():
    on_ranks(2, multinode_cases.refuses_other_rows, "ag_gemm", 1)


def _makes_another_call(local):
    """Shapes that all ranks know, so that only the signals can tell."""
    with a_group_on_nodes(local) as group:
        cases = [Case("ag_gemm", FP32, rows, 6, 5, exact=True) for rows in (70, 140)]
        for case in cases:
            case.check({"output": case.call(group=group).detach()})
        dist.barrier()
        with timeout(1.0):
            error = failure_of(cases[dist.get_rank() == 1].call, group=group)
        dist.barrier()
        del group
    assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
    assert "ag_gemm" in str(error)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)])
def test_a_known_but_different_shape_never_gives_a_result(world_size, local):
    on_ranks(world_size, _makes_another_call, local)


def _is_traced(rows, block_m):
    with a_group_on_nodes(2) as group:
        case = Case("ag_gemm", FP32, rows, 9, 7, exact=True)
        config = AgGemmConfig(tiles=Tiles(block_m, 16, 16, 1, 4, 2), num_comm_sms=2)
        with record(Recorder()) as recorder:
            case.check({"output": case.call(group=group, config=config).detach()})
        return recorder.events[NUM_KINDS.value :, :, 0].count_nonzero().item()


def test_a_trace_shows_every_transfer():
    chunks = 3  # each sent, pushed, waited for and relayed once
    assert on_ranks(4, _is_traced, 16 * chunks, 16) == [4 * chunks] * 4


# ---- the gather by itself ----


def _begun(group, shard, chunk_rows):
    fields = {"rows": shard.shape[0], "width": shard.shape[1], "dtype": str(shard.dtype), "chunk_rows": chunk_rows}
    return AsyncAllGather("test of gather", fields, shard, group, chunk_rows)


def _gathers(local, seeds, shapes, late_s, transport):
    """Shards are here one by one, in the order of ``source``, and all at the end; the first on poisoned workspaces."""
    with a_group_on_nodes(local) as group:
        rank, world_size = group.rank(), group.size()
        for seed in range(seeds):
            reseed(seed)
            shape = shapes[seed % len(shapes)]
            gather = _begun(group, shard_of(rank, shape, BF16, seed), 16)
            if seed < 3:
                poison(group)
            if rank == seed % world_size:
                time.sleep(late_s)
            gather.begin()
            if rank == (seed + 1) % world_size:
                time.sleep(late_s)  # all have begun, so the others wait for the data itself
            gather.push(1 + seed % 3) if transport == "push" else gather.copy()
            sources = [gather.source(step) for step in range(world_size)]
            assert sources[0] == rank and sorted(sources) == list(range(world_size))
            for step in range(1, world_size if late_s else 2):
                gather.wait(step)
                tdkernels.synchronize()
                expected = shard_of(sources[step], shape, BF16, seed)
                assert torch.equal(bits(gather.gathered[sources[step]]), bits(expected)), (seed, step)
            gather.finish()
            tdkernels.synchronize()
            if rank == (seed + 2) % world_size:
                time.sleep(late_s)  # the others may be at the next call, and must not send before we have read this one
            for source in range(world_size):
                assert torch.equal(bits(gather.gathered[source]), bits(shard_of(source, shape, BF16, seed))), seed
            gather.close()
        tdkernels.synchronize()


@thorough
@pytest.mark.parametrize("world_size, local, transport", [(4, 2, "push"), (2, 1, "copy")])
def test_gather(world_size, local, transport):
    on_ranks(world_size, _gathers, local, 6, [(1, 1), (37, 5), (20, 24)], 0.03, transport)


def test_gather_in_any_order_of_the_network():
    on_ranks(4, _gathers, 2, SEEDS, [(1, 1), (17, 3)], 0.0, "push")


@td.jit
def way_kernel(sources_ptr, relays_ptr, me, ranks, local, relays):
    for step in range(ranks):
        tl.store(sources_ptr + step, source_at(step, me, ranks, local))
    for item in range(relays):
        source, peer, chunk = relay_of(item, me, ranks, local)
        tl.store(relays_ptr + 3 * item, source)
        tl.store(relays_ptr + 3 * item + 1, peer)
        tl.store(relays_ptr + 3 * item + 2, chunk)


@pytest.mark.parametrize("nodes, local", [(2, 3), (3, 2), (3, 3), (2, 8), (16, 8)])
def test_every_shard_comes_to_every_rank_once(nodes, local):
    """However many there are: in the order that the host knows, and relayed in the order in which it is awaited."""
    ranks, chunks = nodes * local, 2
    relays = chunks * (nodes - 1) * (local - 1)
    relayed = {rank: [] for rank in range(ranks)}  # what comes there, of each of those that relay
    awaited = {}
    some = range(ranks) if ranks < 20 else [*range(local), ranks - 1]
    for me in some:
        sources, ways = torch.zeros(ranks, dtype=torch.int32), torch.zeros(max(relays, 1), 3, dtype=torch.int32)
        way_kernel[(1,)](sources, ways, me, ranks, local, relays)
        gather = AsyncAllGather.__new__(AsyncAllGather)
        gather.topology = Topology(me, ranks, local)
        awaited[me] = sources.tolist()
        assert awaited[me] == [gather.source(step) for step in range(ranks)]
        assert awaited[me][0] == me and sorted(awaited[me]) == list(range(ranks))
        assert all(Topology(me, ranks, local).is_local(source) for source in awaited[me][:local])
        assert all(source % local == me % local for source in awaited[me][local : local + nodes - 1])
        for source, peer, chunk in ways.tolist():
            assert source % local == me % local and source // local != me // local == peer // local and peer != me
            relayed[peer].append((me, chunk, source))
    for peer in some[:local]:  # all of one node have been asked
        expected = {(chunk, source) for chunk in range(chunks) for source in awaited[peer][local + nodes - 1 :]}
        assert sorted((chunk, source) for _, chunk, source in relayed[peer]) == sorted(expected)
        for relay in {me for me, *_ in relayed[peer]}:
            order = [(chunk, awaited[peer].index(source)) for me, chunk, source in relayed[peer] if me == relay]
            assert order == sorted(order)


def _keeps_what_it_gathered(local):
    """What the gradients of gemm_rs use: the product, and the gathered rows, our own too, for who reads them after."""
    with a_group_on_nodes(local) as group:
        rank = group.rank()
        for seed in range(4):
            case = Case("ag_gemm", FP32, 19, 3, 6, bias=False, exact=True, seed=seed)
            x, weight = case.x.detach(), case.weight.detach()
            config = AgGemmConfig(**SMALL, transport=("push", "copy_engine")[seed % 2])
            if rank == seed:
                time.sleep(0.03)
            y, gather = ag_gemm_launch.launch(x, weight, None, group, config, keep_gathered=True)
            gather.finish()
            tdkernels.synchronize()
            case.check({"output": y})
            full = all_gather_rows(x, group)
            assert torch.equal(gather.gathered.reshape(full.shape), full)
            gather.close()


def test_a_product_that_keeps_what_it_gathered():
    on_ranks(4, _keeps_what_it_gathered, 2)


def _multiplies_what_arrives(local):
    """dweight without dx: each shard is multiplied as it comes."""
    with a_group_on_nodes(local) as group:
        case = Case("ag_gemm", BF16, 21, 9, 12, bias=False)
        results = []
        for seed in range(3):
            reseed(seed)
            gather = AsyncAllGather.start("test of gather", case.x.detach(), group)
            dweight = gathered_weight_gradient(gather, case.dy, gathered_on_left=False, overlapped=False)
            gather.close()
            results.append(dweight)
        case.check({"dweight": results[0]})
        assert all(torch.equal(result, results[0]) for result in results)


def test_a_gradient_that_multiplies_what_arrives():
    on_ranks(4, _multiplies_what_arrives, 2)


def _misses_a_rank_at_the_beginning(missing):
    with a_group_on_nodes(2) as group:
        _gather_ones(group)
        dist.barrier()
        error = None
        if dist.get_rank() != missing:
            with timeout(1.0):
                error = failure_of(_gather_ones, group)
            assert type(error) is PeerTimeoutError, repr(error)
        dist.barrier()
        del group
    return error and (error.peer, error.signal)


def _gather_ones(group):
    gather = AsyncAllGather.start("test of gather", torch.ones(3, 2, device=device()), group)
    gather.finish()
    gather.close()


def test_gather_without_a_rank():
    expected = [None if rank == 2 else (2, "ready[2]") for rank in range(4)]
    assert on_ranks(4, _misses_a_rank_at_the_beginning, 2) == expected


# ---- configs ----


@contextlib.contextmanager
def _nothing_is_poisoned_early(folder):
    """Whenever the tuner poisons a workspace, all ranks have ended the same number of calls: see ``_poison``."""
    ended = {rank: folder / f"ended{rank}" for rank in range(dist.get_world_size())}
    ended[dist.get_rank()].touch()
    run, poisons = AgGemmTunable.run, tuner._Tuner._poison

    def runs(*call):
        output = run(*call)
        time.sleep(0.01 * dist.get_rank())
        with ended[dist.get_rank()].open("a") as file:
            file.write(".")
        return output

    def poisons_in_time(self):
        assert len({file.stat().st_size for file in ended.values()}) == 1
        poisons(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgGemmTunable, "run", runs)
        patch.setattr(tuner._Tuner, "_poison", poisons_in_time)
        yield
    assert ended[dist.get_rank()].stat().st_size > 4


def _tunes(folder, local):
    """All candidates run, and the best one is what calls take from then on."""
    with a_group_on_nodes(local) as group, cache_in(folder / f"rank{dist.get_rank()}"):
        shape = (48, 48, 48)
        configs = AgGemmConfig(**SMALL), AgGemmConfig(**{**SMALL, "num_comm_sms": 3})
        with _nothing_is_poisoned_early(folder), candidates(*configs) as op:
            result = tune("ag_gemm", *shape, dtype=FP32, group=group, device=device())
            reasons = [trial.reason for trial in result.trials]
            assert reasons == [None] * 4, reasons
            assert result.entry.problem.num_nodes == group.size() // local
            assert f"on {group.size() // local} nodes of {local} x " in str(result.entry.problem)
            config = op.config_from_dict(result.entry.config)
        case = Case("ag_gemm", FP32, shape[0] // group.size(), shape[1] // group.size(), shape[2])
        with mode("cached"):
            case.check({"output": case.call(group=group).detach()})
            (choice,) = [c for (problem, _), c in group_state(group).choices.items() if problem.operator == "ag_gemm"]
            assert choice.config == config
            assert explain("ag_gemm", case.x, case.weight, group=group).config == config
        del group
    return result.entry.config


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)])
def test_tuning(world_size, local, tmp_path):
    same_everywhere(on_ranks(world_size, _tunes, tmp_path, local))
