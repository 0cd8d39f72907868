"""ag_gemm and AsyncAllGather in groups that span several nodes."""

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
from tests.autotune.support import candidates, equal_on_ranks
from tests.ops.collectives.test_async_all_gather import bits, shard_of
from tests.ops.dense import cases as dense
from tests.ops.dense import multinode_cases
from tests.support.dense_oracle import Case
from tests.support.ranks import device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, reseed, thorough
from tests.support.subset import THOROUGH
from tests.test_protocol import failure_of, poison, timeout

BF16, FP16, FP32 = dense.DTYPES
SEEDS = 50 if THOROUGH else 12  # delivery orders of the network
SMALL = {"tiles": Tiles(16, 16, 16, 1, 4, 2), "num_comm_sms": 2}
CHUNKS = {"tiles": Tiles(16, 64, 64, num_stages=2), "num_comm_sms": 3}
CONFIGS = {
    "small tiles, one program at a time": {**SMALL, "num_comm_sms": 1},
    "three programs, chunks of two tiles": {"tiles": Tiles(16, 64, 16), "num_comm_sms": 3, "chunk_tiles": 2},
    "chunks longer than a shard": {"tiles": Tiles(16, 128, 32, 2, 4, 1), "chunk_tiles": 9},
    "copy engine, replaced by push": {**SMALL, "transport": "copy_engine", "chunk_tiles": 2},
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
    on_ranks(4, multinode_cases.computes_subsets_of_gradients, "ag_gemm", 2)


def test_workspace_is_reused():
    on_ranks(4, multinode_cases.reuses_poisoned_memory, "ag_gemm", 2, [(5, 3, 7), (66, 70, 9), (5, 3, 7)])


@thorough
def test_slow_rank():
    on_ranks(4, multinode_cases.waits_for_a_slow_rank, "ag_gemm", 2)


@pytest.mark.parametrize("world_size, local, seeds, shapes, changes", [
    (4, 2, SEEDS, [(17, 1, 2)], SMALL), (3, 1, 12, [(1, 1, 1), (2, 3, 1)], {}),
], ids=["two chunks", "one rank a node"])
def test_any_network_order(world_size, local, seeds, shapes, changes):
    on_ranks(world_size, multinode_cases.computes_in_any_network_order, "ag_gemm", local, seeds, shapes, **changes)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)])
def test_determinism(world_size, local):
    on_ranks(world_size, multinode_cases.is_deterministic, "ag_gemm", local, BF16, **CHUNKS)


@pytest.mark.parametrize("missing", [1, 2])
def test_missing_rank(missing):
    # The error names the owner of the missing shard, whichever path it takes.
    expected = [None if rank == missing else missing for rank in range(4)]
    assert on_ranks(4, multinode_cases.misses_a_rank, "ag_gemm", 2, missing) == expected


def test_disagreement():
    on_ranks(2, multinode_cases.reports_disagreement, "ag_gemm", 1)


def _detects_mismatch_of_cached_plans(local):
    """Check that different cached calls fail. No consensus check runs for them; only the signals can detect it."""
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
def test_mismatch_of_cached_plans_is_detected(world_size, local):
    on_ranks(world_size, _detects_mismatch_of_cached_plans, local)


def _counts_transfers(rows, block_m):
    with a_group_on_nodes(2) as group:
        case = Case("ag_gemm", FP32, rows, 9, 7, exact=True)
        config = AgGemmConfig(tiles=Tiles(block_m, 16, 16, 1, 4, 2), num_comm_sms=2)
        with record(Recorder()) as recorder:
            case.check({"output": case.call(group=group, config=config).detach()})
        return recorder.events[NUM_KINDS.value :, :, 0].count_nonzero().item()


def test_trace_records_every_transfer():
    chunks = 3  # each sent, pushed, waited for and relayed once
    assert on_ranks(4, _counts_transfers, 16 * chunks, 16) == [4 * chunks] * 4


# ---- AsyncAllGather ----


def _new_gather(group, shard, chunk_rows):
    fields = {"rows": shard.shape[0], "width": shard.shape[1], "dtype": str(shard.dtype), "chunk_rows": chunk_rows}
    return AsyncAllGather("test of gather", fields, shard, group, chunk_rows)


def _gathers_shards(local, seeds, shapes, late_s, transport):
    """Check shards after each step, in the order of ``source``, and after `finish`; first on poisoned workspaces."""
    with a_group_on_nodes(local) as group:
        rank, world_size = group.rank(), group.size()
        for seed in range(seeds):
            reseed(seed)
            shape = shapes[seed % len(shapes)]
            gather = _new_gather(group, shard_of(rank, shape, BF16, seed), 16)
            if seed < 3:
                poison(group)
            if rank == seed % world_size:
                time.sleep(late_s)
            gather.begin()
            if rank == (seed + 1) % world_size:
                time.sleep(late_s)  # after `begin`, so the peers wait for the data itself
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
                time.sleep(late_s)  # peers in the next call must not send before this rank has read its data
            for source in range(world_size):
                assert torch.equal(bits(gather.gathered[source]), bits(shard_of(source, shape, BF16, seed))), seed
            gather.close()
        tdkernels.synchronize()


@thorough
@pytest.mark.parametrize("world_size, local, transport", [(4, 2, "push"), (2, 1, "copy")])
def test_gather(world_size, local, transport):
    on_ranks(world_size, _gathers_shards, local, 6, [(1, 1), (37, 5), (20, 24)], 0.03, transport)


def test_gather_in_any_network_order():
    on_ranks(4, _gathers_shards, 2, SEEDS, [(1, 1), (17, 3)], 0.0, "push")


@td.jit
def order_kernel(sources_ptr, relays_ptr, rank, ranks, local, relays):
    for step in range(ranks):
        tl.store(sources_ptr + step, source_at(step, rank, ranks, local))
    for item in range(relays):
        source, peer, chunk = relay_of(item, rank, ranks, local)
        tl.store(relays_ptr + 3 * item, source)
        tl.store(relays_ptr + 3 * item + 1, peer)
        tl.store(relays_ptr + 3 * item + 2, chunk)


@pytest.mark.parametrize("nodes, local", [(2, 3), (3, 2), (3, 3), (2, 8), (16, 8)])
def test_every_rank_gets_every_shard_once(nodes, local):
    """Check that the device order of shards equals the host order, and that relays follow the order of waits."""
    ranks, chunks = nodes * local, 2
    relays = chunks * (nodes - 1) * (local - 1)
    relayed = {rank: [] for rank in range(ranks)}  # (relay, chunk, source) by destination
    awaited = {}
    tested_ranks = range(ranks) if ranks < 20 else [*range(local), ranks - 1]
    for rank in tested_ranks:
        sources, relay_table = torch.zeros(ranks, dtype=torch.int32), torch.zeros(max(relays, 1), 3, dtype=torch.int32)
        order_kernel[(1,)](sources, relay_table, rank, ranks, local, relays)
        gather = AsyncAllGather.__new__(AsyncAllGather)
        gather.topology = Topology(rank, ranks, local)
        awaited[rank] = sources.tolist()
        assert awaited[rank] == [gather.source(step) for step in range(ranks)]
        assert awaited[rank][0] == rank and sorted(awaited[rank]) == list(range(ranks))
        assert all(Topology(rank, ranks, local).is_local(source) for source in awaited[rank][:local])
        assert all(source % local == rank % local for source in awaited[rank][local : local + nodes - 1])
        for source, peer, chunk in relay_table.tolist():
            assert source % local == rank % local and source // local != rank // local == peer // local and peer != rank
            relayed[peer].append((rank, chunk, source))
    for peer in tested_ranks[:local]:  # all ranks of one node are covered
        expected = {(chunk, source) for chunk in range(chunks) for source in awaited[peer][local + nodes - 1 :]}
        assert sorted((chunk, source) for _, chunk, source in relayed[peer]) == sorted(expected)
        for relay in {rank for rank, *_ in relayed[peer]}:
            order = [(chunk, awaited[peer].index(source)) for rank, chunk, source in relayed[peer] if rank == relay]
            assert order == sorted(order)


def _keeps_gathered_rows(local):
    """Check ``keep_gathered``, which gradients of gemm_rs use: the output, and the gathered rows of all ranks."""
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


def test_keep_gathered():
    on_ranks(4, _keeps_gathered_rows, 2)


def _multiplies_shards_on_arrival(local):
    """Check dweight without dx, which multiplies each shard on arrival."""
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


def test_weight_gradient_multiplies_shards_on_arrival():
    on_ranks(4, _multiplies_shards_on_arrival, 2)


def _misses_rank_at_begin(missing):
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
    assert on_ranks(4, _misses_rank_at_begin, 2) == expected


# ---- configs ----


@contextlib.contextmanager
def _check_poison_timing(folder):
    """Check that all ranks have finished the same calls when the tuner poisons a workspace; see ``_poison``."""
    finished = {rank: folder / f"ended{rank}" for rank in range(dist.get_world_size())}
    finished[dist.get_rank()].touch()
    run, original_poison = AgGemmTunable.run, tuner._Tuner._poison

    def counted_run(*call):
        output = run(*call)
        time.sleep(0.01 * dist.get_rank())
        with finished[dist.get_rank()].open("a") as file:
            file.write(".")
        return output

    def checked_poison(self):
        assert len({file.stat().st_size for file in finished.values()}) == 1
        original_poison(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgGemmTunable, "run", counted_run)
        patch.setattr(tuner._Tuner, "_poison", checked_poison)
        yield
    assert finished[dist.get_rank()].stat().st_size > 4


def _tunes_and_uses_best(folder, local):
    """Check that all candidates run, and that later calls use the best one."""
    with a_group_on_nodes(local) as group, cache_in(folder / f"rank{dist.get_rank()}"):
        shape = (48, 48, 48)
        configs = AgGemmConfig(**SMALL), AgGemmConfig(**{**SMALL, "num_comm_sms": 3})
        with _check_poison_timing(folder), candidates(*configs) as op:
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
    equal_on_ranks(on_ranks(world_size, _tunes_and_uses_best, tmp_path, local))
