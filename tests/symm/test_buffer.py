"""Symmetric buffers and workspaces on the host: sharing, growth, lifetime, and rejected arguments."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tdkernels.symm.mailbox as mailbox_module
from tdkernels.symm import allocate, get_workspace, resolve_group
from tdkernels.symm.backends import shm
from tests.support.ranks import DEVICE, a_group, device, fresh_ranks, on_ranks

ROOT = Path(__file__).parent.parent.parent
# Mostly no multiples of a page, a 64-bit word or a vector.
SIZES = [1, 7, 4096, 70001]


def mapped():
    """Return the number of mapped parts of symmetric buffers in this process; CPU only."""
    return Path("/proc/self/maps").read_text().count("memfd:tdkernels")


# ---- buffers ----


def pattern(writer, owner, nbytes):
    return (torch.arange(nbytes) * 7 + 50 * writer + 11 * owner + 1).to(torch.uint8).to(device())


def check_shape(buffer, nbytes, rank, world_size):
    assert (buffer.nbytes, buffer.rank, buffer.world_size) == (nbytes, rank, world_size)
    assert buffer.device == device()
    table = buffer.address_table()
    assert (table.dtype, table.shape, table.device) == (torch.int64, (world_size,), device())
    assert table.tolist() == buffer.addresses
    assert len(set(buffer.addresses)) == world_size
    for peer in range(world_size):
        part = buffer.tensor(peer)
        assert (part.dtype, part.shape, part.device) == (torch.uint8, (nbytes,), device())
        assert part.is_contiguous()
        assert device().type != "cpu" or part.data_ptr() == buffer.addresses[peer]
        assert not part.any(), "a new buffer is zeroed"


def check_sharing(group, rank, world_size):
    """Every rank writes to every part and all ranks read it, with buffers of several sizes at the same time."""
    buffers = [allocate(nbytes, group, device()) for nbytes in SIZES]
    for buffer, nbytes in zip(buffers, SIZES):
        check_shape(buffer, nbytes, rank, world_size)
    buffers[0].barrier()  # all ranks have read the zeros
    for writer in range(world_size):
        if writer == rank:
            for buffer, nbytes in zip(buffers, SIZES):
                for owner in range(world_size):
                    buffer.tensor(owner).copy_(pattern(writer, owner, nbytes))
        buffers[0].barrier()
        for buffer, nbytes in zip(buffers, SIZES):
            for owner in range(world_size):
                assert torch.equal(buffer.tensor(owner), pattern(writer, owner, nbytes)), f"{writer=} {owner=} {nbytes}"
        buffers[0].barrier()
    # All ranks write their slices of every part concurrently.
    buffer, share = buffers[-1], SIZES[-1] // world_size
    for owner in range(world_size):
        buffer.tensor(owner)[rank * share : (rank + 1) * share] = 16 * rank + owner
    buffer.barrier()
    for owner in range(world_size):
        for writer in range(world_size):
            assert (buffer.tensor(owner)[writer * share : (writer + 1) * share] == 16 * writer + owner).all()
    buffer.barrier()
    for buffer in buffers:
        buffer.close()


def check_sharing_in_the_world():
    check_sharing(None, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_accesses_every_part(world_size):
    on_ranks(world_size, check_sharing_in_the_world)


def check_sharing_in_a_subgroup(ranks):
    with a_group(ranks) as group:
        if dist.get_rank() in ranks:
            check_sharing(group, ranks.index(dist.get_rank()), len(ranks))
        else:
            with pytest.raises(ValueError, match=f"rank {dist.get_rank()} is not a member"):
                allocate(64, group, device())


def test_subgroup():
    on_ranks(3, check_sharing_in_a_subgroup, [0, 2])


def allocate_more_often_on_rank_0():
    """Rank 1 skips keys of groups that it is not in; torch names groups with local synchronization by their count."""
    with a_group([0]) as group:
        if dist.get_rank() == 0:
            allocate(64, group, device()).close()
    allocate(64, device=device()).close()
    within = timedelta(seconds=20)
    group = dist.new_group([0, 1], timeout=within, backend="gloo", use_local_synchronization=True)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total, group=group)
    assert total.item() == 3


def test_groups_are_equal_after_different_numbers_of_allocations():
    with fresh_ranks(2) as pool:  # in shared ranks earlier tests may have made different numbers of groups
        pool.run(allocate_more_often_on_rank_0)


@contextlib.contextmanager
def offering(**fields):
    """Replace fields of this rank's memory description in the store."""
    dumps = json.dumps

    def altered(value):
        return dumps({**value, **fields} if isinstance(value, dict) and "fd" in value else value)

    with mock.patch("tdkernels.symm.backends.shm.json.dumps", altered):
        yield


def reject_offered_files(folder):
    """Rank 1 offers paths, and file descriptors that are not its memory; all ranks raise, and rank 0 opens nothing."""
    victim = Path(folder) / f"victim{dist.get_rank()}"
    victim.write_bytes(bytes(8192))
    opened, original_open = [], os.open
    with open(victim, "r+b") as file:
        file.read()
        not_an_integer = "of rank 1 must be an integer"
        offers = [
            ({"pid": f"self/root/{victim}/..", "fd": victim.name}, f"pid {not_an_integer}"),
            *(({"pid": pid}, f"pid {not_an_integer}") for pid in (str(os.getpid()), -1, None)),
            *(({"fd": fd}, f"fd {not_an_integer}") for fd in (f"../root{victim}", True, 1.5, None, 1 << 40)),
            ({"fd": file.fileno()}, "is not rank 1's memory"),
        ]
        for offer, message in offers:
            with a_group() as group, contextlib.ExitStack() as stack:
                stack.enter_context(
                    mock.patch.object(shm.os, "open", lambda *args: opened.append(args[0]) or original_open(*args))
                )
                if dist.get_rank() == 1:
                    stack.enter_context(offering(**offer))
                with pytest.raises(RuntimeError, match=f"cannot share memory.*{message}"):
                    allocate(4096, group, device())
    # Rank 1 opens the memory of rank 0 as usual; rank 0 opens nothing that rank 1 has offered.
    assert len(opened) == (len(offers) if dist.get_rank() == 1 else 0), opened
    assert victim.read_bytes() == bytes(8192)


def test_values_in_the_store_cannot_name_files(tmp_path):
    if DEVICE == "cuda":
        pytest.skip("the memory of GPUs is shared by torch")
    on_ranks(2, reject_offered_files, str(tmp_path))


def wait_at_barrier():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = allocate(8, device=device())
    for slow in range(world_size):
        if rank == slow:
            time.sleep(0.1)
            for peer in range(world_size):
                buffer.tensor(peer).fill_(slow + 1)
        buffer.barrier()
        assert buffer.tensor(rank).tolist() == [slow + 1] * 8
        buffer.barrier()
    buffer.close()


def test_barrier_waits_for_the_slowest_rank():
    on_ranks(3, wait_at_barrier)


def close_buffers():
    gc.collect()
    before = mapped()
    buffer = allocate(4097, device=device())
    part = buffer.tensor(dist.get_rank())
    assert device().type != "cpu" or mapped() == before + dist.get_world_size()
    part.fill_(9)
    buffer.barrier()
    buffer.close()
    buffer.close()  # no effect
    # On the CPU a tensor keeps the memory of a closed buffer alive; on a GPU it does not.
    assert device().type != "cpu" or (part == 9).all()
    del part
    assert mapped() == before
    for _ in range(20):  # memory is freed: at most one buffer is mapped
        buffer = allocate(1 << 20, device=device())
        assert not buffer.tensor(dist.get_rank()).any()
        buffer.tensor(dist.get_rank()).fill_(1)
        buffer.barrier()
        buffer.close()
    assert mapped() == before


def test_close():
    on_ranks(2, close_buffers)


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def check_no_descriptors():
    """Live buffers and workspaces hold no file descriptors, independent of their number and growth."""
    rank = dist.get_rank()
    with a_group() as group:
        kept = [allocate(64, group, device())]
        get_workspace(group, device(), "first").prepare("an operator", {"size": 64}, 64, 1)
        before = num_descriptors()
        kept += [allocate(64 * (n + 1), group, device()) for n in range(10)]
        for n in range(10):
            for size in (64, 70001):
                workspace = get_workspace(group, device(), f"workspace {n}")
                workspace.prepare("an operator", {"size": size}, size, 1)
        assert num_descriptors() == before
        kept[0].barrier()
        for buffer in kept:  # still shared
            buffer.tensor((rank + 1) % dist.get_world_size())[0] = 1 + rank
            buffer.barrier()
            assert buffer.tensor(rank)[0] == 1 + (rank - 1) % dist.get_world_size()
        for buffer in kept:
            buffer.close()


def test_live_workspaces_hold_no_descriptors():
    if DEVICE == "cuda":
        pytest.skip("the memory of GPUs is shared by torch")
    on_ranks(3, check_no_descriptors)


def test_file_that_is_too_short_is_not_mapped():
    from tdkernels.symm.backends.shm import _map

    with tempfile.TemporaryFile() as file:
        file.write(bytes(100))
        file.flush()
        with pytest.raises(ValueError):
            _map(file.fileno(), 101)
        assert bytes(_map(file.fileno(), 100)) == bytes(100)


# ---- bad arguments ----


def reject_bad_arguments():
    for nbytes in (0, -1, 2.0, "8", None):
        with pytest.raises(ValueError, match="nbytes must be a positive integer"):
            allocate(nbytes, device=device())
    with pytest.raises(ValueError, match="no symmetric memory for device type 'meta'"):
        allocate(8, device="meta")
    with pytest.raises(TypeError, match="expected a ProcessGroup"):
        allocate(8, group=[0, 1], device=device())
    allocate(8, device=device()).close()  # the ranks are still synchronized


def test_bad_arguments():
    on_ranks(3, reject_bad_arguments)


def report_disagreement():
    is_rank_1 = dist.get_rank() == 1
    with a_group() as group:
        with pytest.raises(ValueError, match="nbytes is 128 on ranks 0, 2, 64 on rank 1"):
            allocate(64 if is_rank_1 else 128, group, device())
        with pytest.raises(ValueError, match=f'device is "{device().type}" on ranks 0, 2, "meta" on rank 1') as caught:
            allocate(64, group, "meta" if is_rank_1 else device())
        assert "nbytes" not in str(caught.value)
        check_sharing(group, dist.get_rank(), dist.get_world_size())


def test_disagreement():
    on_ranks(3, report_disagreement)


# ---- workspaces ----


def grow_workspace():
    rank = dist.get_rank()
    with a_group() as group:
        workspace = get_workspace(group, device(), "grows")
        assert get_workspace(group, device(), "grows") is workspace
        assert get_workspace(group, device(), "another") is not workspace
        assert workspace.prepare("op", {"n": 1}, 100, 3) == 0
        buffer, ctx = workspace.buffer, workspace.ctx
        assert workspace.half_bytes >= 100 and workspace.half_signals >= 3
        assert buffer.nbytes >= workspace.data_offset + 2 * workspace.half_bytes
        # The same plan and smaller ones need no new memory, and each plan has its own id.
        assert workspace.prepare("op", {"n": 1}, 100, 3) == 0
        assert workspace.prepare("op", {"n": 2}, 90, 2) == 1
        assert workspace.prepare("other", {"n": 1}, 100, 3) == 2
        assert workspace.buffer is buffer and workspace.ctx is ctx
        # If any of the three sizes exceeds the buffer, a new, zeroed buffer is allocated and no size shrinks.
        for n, sizes in enumerate([(10_000, 1, 0), (1, 1000, 0), (1, 1, 500)], start=3):
            workspace.buffer.tensor(rank).fill_(0xFF)
            sizes_before = workspace.half_bytes, workspace.half_signals, workspace.num_flags
            old = weakref.ref(workspace.buffer)
            buffer = ctx = None
            assert workspace.prepare("op", {"n": n}, *sizes) == n
            sizes_after = workspace.half_bytes, workspace.half_signals, workspace.num_flags
            grown = zip(sizes_after, sizes_before, sizes)
            message = f"{sizes_before} -> {sizes_after}, requested {sizes}"
            assert all(after >= max(before, size) for after, before, size in grown), message
            gc.collect()
            assert old() is None, "the smaller buffer must be freed"
            assert not workspace.buffer.tensor(rank).any()
            assert workspace.buffer.nbytes >= workspace.data_offset + 2 * workspace.half_bytes
            workspace.buffer.barrier()
        # A disagreement changes nothing.
        buffer = workspace.buffer
        with pytest.raises(ValueError, match="op: the ranks disagree: n is 100 on rank 0, 101 on rank 1"):
            workspace.prepare("op", {"n": 100 + rank}, 1 << 20, 1)
        assert workspace.buffer is buffer
        assert workspace.prepare("op", {"n": 6}, 1, 1) == 6
        # Fields that do not determine the sizes are found before a kernel leaves the buffer.
        for which in range(3):
            sizes = [workspace.half_bytes, workspace.half_signals, workspace.num_flags]
            assert workspace.prepare("op", {"n": 6}, *sizes) == 6
            sizes[which] += 1
            with pytest.raises(AssertionError, match="op: a bug in tdkernels: the fields of a plan do not"):
                workspace.prepare("op", {"n": 6}, *sizes)
        single = get_workspace(group, device(), "single", halves=1)
        single.prepare("op", {"n": 1}, 1000, 1)
        assert single.data_offset + single.half_bytes == single.buffer.nbytes


def test_workspace_grows_and_is_reused():
    on_ranks(2, grow_workspace)


def retry_first_allocation():
    def no_memory(*_):
        raise torch.OutOfMemoryError("not even for these")

    with a_group() as group, pytest.MonkeyPatch.context() as patch:
        workspace = get_workspace(group, device(), "late")
        patch.setattr(mailbox_module, "host_words", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="not even for these"):
            workspace.prepare("op", {"n": 1}, 100, 3)
        patch.undo()
        assert workspace.prepare("op", {"n": 1}, 100, 3) == 0
        assert workspace.half_bytes >= 100
        assert workspace.ctx.device == device() and workspace.note.tolist() == [0] * 5
        del group


def test_first_allocation_is_retried_after_out_of_memory():
    on_ranks(2, retry_first_allocation)


def destroy_group(use):
    gc.collect()
    before = mapped()
    group = dist.new_group()
    workspace = get_workspace(group, device(), "goes")
    if use:
        workspace.prepare("op", {}, 5000, 2)
        assert device().type != "cpu" or mapped() == before + dist.get_world_size()
    buffer = weakref.ref(workspace.buffer) if use else lambda: None
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="destroyed"):
        resolve_group(group)
    del group
    gc.collect()
    assert workspace.buffer is None and buffer() is None, "freed although the workspace is still referenced"
    assert mapped() == before


def test_workspace_is_freed_with_its_group():
    on_ranks(2, destroy_group, use=True)
    on_ranks(2, destroy_group, use=False)


# ---- no leaks at process exit ----

# Ranks are forked, since importing torch takes seconds; the parent has no threads and no groups at that time.
ENDS = """
import os, signal, sys
from datetime import timedelta
import torch.distributed as dist
from tdkernels.symm import allocate, get_workspace, resolve_group

def rank_main(end, rank, path):
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    buffer = allocate(1 << 20, device="cpu")
    workspace = get_workspace(resolve_group(), buffer.device, "ends")
    workspace.prepare("ends", {}, 1 << 20, 1)
    for peer in range(2):
        buffer.tensor(peer)[rank::2] = 1
    buffer.barrier()
    maps = open("/proc/self/maps").read()
    assert maps.count("memfd:tdkernels") == 4 and "/dev/shm" not in maps, maps
    buffer.barrier()
    if end == "raise":
        raise KeyError("as told")
    if end.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, end))
    sys.exit()

for end in sys.argv[2:]:
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            rank_main(end, rank, f"{sys.argv[1]}/{end}")
    print(end, *[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_no_files_are_left_in_dev_shm(tmp_path):
    before = set(os.listdir("/dev/shm"))
    codes = {"exit": 0, "raise": 1, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TDKERNELS_TIMEOUT_S": "60", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, tmp_path, *codes], capture_output=True, text=True, timeout=200, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{end} {code} {code}" for end, code in codes.items()], done.stderr
    assert "leaked" not in done.stderr  # a warning of multiprocessing's resource tracker
    deadline = time.monotonic() + 5.0  # other processes of this machine create and remove files there
    while left := set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < deadline, f"left in /dev/shm: {left}"
        time.sleep(0.1)
