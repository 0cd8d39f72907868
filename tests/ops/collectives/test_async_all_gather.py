"""AsyncAllGather, used by gradients and the copy-engine transport: data arrives and is not read too early."""

import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.symm import resolve_group
from tests.support.ranks import device, on_ranks

SHAPES = [(1, 1), (37, 29), (64, 64), (300, 3)]


def shard_of(rank, shape, dtype, seed):
    """Draw the shard of a rank: random bits, including NaNs, since they are only moved."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    size = shape[0] * shape[1] * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape).to(device())


def begin_gather(shard, chunk_rows):
    fields = {"rows": shard.shape[0], "width": shard.shape[1], "dtype": str(shard.dtype), "chunk_rows": chunk_rows}
    gather = AsyncAllGather("test of gather", fields, shard, resolve_group(), chunk_rows)
    gather.begin()
    return gather


def bits(t):
    return t.contiguous().view(torch.uint8)


def gathers_with_late_rank(transport, dtype, chunk_rows):
    """Check the gathered data after `finish` if some rank is late."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for seed, shape in enumerate(SHAPES * 2):
        late = seed % (world_size + 1)  # world_size: no rank is late
        gather = begin_gather(shard_of(rank, shape, dtype, seed), chunk_rows)
        if rank == late:
            time.sleep(0.05)  # after `begin`, so the peers wait for the data itself
        gather.push(3) if transport == "push" else gather.copy()
        gather.finish()
        for source in range(world_size):
            got = gather.gathered[source]
            assert torch.equal(bits(got), bits(shard_of(source, shape, dtype, seed))), (shape, source)
        gather.close()
    tdkernels.synchronize()


@pytest.mark.parametrize("chunk_rows", [1000, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("transport", ["push", "copy"])
def test_late_sender(transport, dtype, chunk_rows):
    on_ranks(3, gathers_with_late_rank, transport, dtype, chunk_rows)


def measures_waits():
    """Return how long this rank waits for each shard, in the order of steps, if rank 0 is late."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shape = (20, 6)
    gather = begin_gather(shard_of(rank, shape, torch.float32, 0), 1000)
    if rank == 0:
        time.sleep(0.5)
    gather.push(1)
    wait_s = {}
    for step in range(1, world_size):
        source = (rank - step) % world_size
        start = time.monotonic()
        gather.wait(step)
        tdkernels.synchronize()
        wait_s[source] = time.monotonic() - start
        assert torch.equal(bits(gather.gathered[source]), bits(shard_of(source, shape, torch.float32, 0)))
    gather.close()
    return wait_s


def test_shards_are_awaited_individually():
    on_ranks(3, measures_waits)  # warm-up: a GPU compiles kernels
    wait_s = on_ranks(3, measures_waits)
    assert wait_s[2][1] < wait_s[2][0]  # rank 2 first waits for rank 1, which is on time
