"""Symmetric buffers and workspaces seen from the host: what is shared, who may ask for it, and where it goes."""

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

import tdkernels.symm.workspace as workspace_module
from tdkernels.symm import allocate, get_workspace, resolve_group
from tdkernels.symm.backends import shm
from tests.support.ranks import DEVICE, a_group, device, fresh_ranks, on_ranks

ROOT = Path(__file__).parent.parent.parent
# Never a multiple of what a page, a word or a vector holds, but for one.
SIZES = [1, 7, 4096, 70001]


def mapped():
    """How many parts of symmetric buffers this process has mapped; CPU only."""
    return Path("/proc/self/maps").read_text().count("memfd:tdkernels")


# ---- buffers ----


def pattern(writer, owner, nbytes):
    return (torch.arange(nbytes) * 7 + 50 * writer + 11 * owner + 1).to(torch.uint8).to(device())


def has_its_shape(buffer, nbytes, rank, world_size):
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


def is_shared(group, rank, world_size):
    """Every rank writes into every part, all see it; buffers of several sizes live side by side."""
    buffers = [allocate(nbytes, group, device()) for nbytes in SIZES]
    for buffer, nbytes in zip(buffers, SIZES):
        has_its_shape(buffer, nbytes, rank, world_size)
    buffers[0].barrier()  # all have seen the zeros
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
    # Each rank its own slice of every part, all at once.
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


def is_shared_in_the_world():
    is_shared(None, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_reaches_every_part(world_size):
    on_ranks(world_size, is_shared_in_the_world)


def is_shared_in_a_subgroup(ranks):
    with a_group(ranks) as group:
        if dist.get_rank() in ranks:
            is_shared(group, ranks.index(dist.get_rank()), len(ranks))
        else:
            with pytest.raises(ValueError, match=f"rank {dist.get_rank()} is not a member"):
                allocate(64, group, device())


def test_subgroup():
    on_ranks(3, is_shared_in_a_subgroup, [0, 2])


def meets_once_more_on_rank_0():
    """Rank 1 has to catch up, of which torch must see nothing: it names this kind of group by how many a rank has."""
    with a_group([0]) as group:
        if dist.get_rank() == 0:
            allocate(64, group, device()).close()
    allocate(64, device=device()).close()
    within = timedelta(seconds=20)
    group = dist.new_group([0, 1], timeout=within, backend="gloo", use_local_synchronization=True)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total, group=group)
    assert total.item() == 3


def test_who_has_met_less_often_makes_the_same_groups():
    with fresh_ranks(2) as pool:  # shared ones have groups of earlier tests, of which one may have more than another
        pool.run(meets_once_more_on_rank_0)


@contextlib.contextmanager
def offering(**fields):
    """This rank puts these values into the store in the place of what describes its memory."""
    dumps = json.dumps

    def altered(value):
        return dumps({**value, **fields} if isinstance(value, dict) and "fd" in value else value)

    with mock.patch("tdkernels.symm.backends.shm.json.dumps", altered):
        yield


def opens_no_file_of_others(folder):
    """Rank 1 offers paths, and numbers of files that are not its memory: all ranks refuse, and open nothing."""
    victim = Path(folder) / f"victim{dist.get_rank()}"
    victim.write_bytes(bytes(8192))
    opened, really_open = [], os.open
    with open(victim, "r+b") as file:
        file.read()
        no_number = "of rank 1 must be an integer"
        offers = [
            ({"pid": f"self/root/{victim}/..", "fd": victim.name}, f"pid {no_number}"),
            *(({"pid": pid}, f"pid {no_number}") for pid in (str(os.getpid()), -1, None)),
            *(({"fd": fd}, f"fd {no_number}") for fd in (f"../root{victim}", True, 1.5, None, 1 << 40)),
            ({"fd": file.fileno()}, "is not rank 1's memory"),
        ]
        for offer, message in offers:
            with a_group() as group, contextlib.ExitStack() as stack:
                stack.enter_context(
                    mock.patch.object(shm.os, "open", lambda *args: opened.append(args[0]) or really_open(*args))
                )
                if dist.get_rank() == 1:
                    stack.enter_context(offering(**offer))
                with pytest.raises(RuntimeError, match=f"cannot share memory.*{message}"):
                    allocate(4096, group, device())
    # Rank 0's memory is opened by rank 1, as ever; nothing that rank 1 has offered is opened by rank 0.
    assert len(opened) == (len(offers) if dist.get_rank() == 1 else 0), opened
    assert victim.read_bytes() == bytes(8192)


def test_values_of_the_store_name_no_file(tmp_path):
    if DEVICE == "cuda":
        pytest.skip("the memory of GPUs is shared by torch")
    on_ranks(2, opens_no_file_of_others, str(tmp_path))


def waits_at_the_barrier():
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


def test_barrier_waits_for_the_last():
    on_ranks(3, waits_at_the_barrier)


def closes():
    gc.collect()
    before = mapped()
    buffer = allocate(4097, device=device())
    part = buffer.tensor(dist.get_rank())
    assert device().type != "cpu" or mapped() == before + dist.get_world_size()
    part.fill_(9)
    buffer.barrier()
    buffer.close()
    buffer.close()  # harmless
    # Between processes, who still holds a tensor keeps its memory; a GPU's is gone.
    assert device().type != "cpu" or (part == 9).all()
    del part
    assert mapped() == before
    for _ in range(20):  # memory comes back: nothing but the last buffer stays mapped
        buffer = allocate(1 << 20, device=device())
        assert not buffer.tensor(dist.get_rank()).any()
        buffer.tensor(dist.get_rank()).fill_(1)
        buffer.barrier()
        buffer.close()
    assert mapped() == before


def test_close():
    on_ranks(2, closes)


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def keeps_no_descriptors():
    """Live buffers and workspaces take none, however many there are and however often these grow."""
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
        for buffer in kept:  # they are still shared
            buffer.tensor((rank + 1) % dist.get_world_size())[0] = 1 + rank
            buffer.barrier()
            assert buffer.tensor(rank)[0] == 1 + (rank - 1) % dist.get_world_size()
        for buffer in kept:
            buffer.close()


def test_live_workspaces_keep_no_descriptors():
    if DEVICE == "cuda":
        pytest.skip("the memory of GPUs is shared by torch")
    on_ranks(3, keeps_no_descriptors)


def test_a_file_that_is_too_short_is_not_mapped():
    from tdkernels.symm.backends.shm import _map

    with tempfile.TemporaryFile() as file:
        file.write(bytes(100))
        file.flush()
        with pytest.raises(ValueError):
            _map(file.fileno(), 101)
        assert bytes(_map(file.fileno(), 100)) == bytes(100)


# ---- bad arguments ----


def refuses_bad_arguments():
    for nbytes in (0, -1, 2.0, "8", None):
        with pytest.raises(ValueError, match="nbytes must be a positive integer"):
            allocate(nbytes, device=device())
    with pytest.raises(ValueError, match="no symmetric memory for device type 'meta'"):
        allocate(8, device="meta")
    with pytest.raises(TypeError, match="expected a ProcessGroup"):
        allocate(8, group=[0, 1], device=device())
    allocate(8, device=device()).close()  # the ranks are still in step


def test_bad_arguments():
    on_ranks(3, refuses_bad_arguments)


def names_who_disagrees():
    odd_one = dist.get_rank() == 1
    with a_group() as group:
        with pytest.raises(ValueError, match="nbytes is 128 on ranks 0, 2, 64 on rank 1"):
            allocate(64 if odd_one else 128, group, device())
        with pytest.raises(ValueError, match=f'device is "{device().type}" on ranks 0, 2, "meta" on rank 1') as caught:
            allocate(64, group, "meta" if odd_one else device())
        assert "nbytes" not in str(caught.value)
        is_shared(group, dist.get_rank(), dist.get_world_size())


def test_disagreement():
    on_ranks(3, names_who_disagrees)


# ---- workspaces ----


def grows():
    rank = dist.get_rank()
    with a_group() as group:
        workspace = get_workspace(group, device(), "grows")
        assert get_workspace(group, device(), "grows") is workspace
        assert get_workspace(group, device(), "another") is not workspace
        assert workspace.prepare("op", {"n": 1}, 100, 3) == 0
        buffer, ctx = workspace.buffer, workspace.ctx
        assert workspace.half_bytes >= 100 and workspace.half_signals >= 3
        assert buffer.nbytes >= workspace.data_offset + 2 * workspace.half_bytes
        # The same plan again, and others that fit: no new memory, and each plan has a number of its own.
        assert workspace.prepare("op", {"n": 1}, 100, 3) == 0
        assert workspace.prepare("op", {"n": 2}, 90, 2) == 1
        assert workspace.prepare("other", {"n": 1}, 100, 3) == 2
        assert workspace.buffer is buffer and workspace.ctx is ctx
        # More of any one of the three is a new buffer, zeroed, in which nothing has become smaller.
        for n, sizes in enumerate([(10_000, 1, 0), (1, 1000, 0), (1, 1, 500)], start=3):
            workspace.buffer.tensor(rank).fill_(0xFF)
            had = workspace.half_bytes, workspace.half_signals, workspace.num_flags
            old = weakref.ref(workspace.buffer)
            buffer = ctx = None
            assert workspace.prepare("op", {"n": n}, *sizes) == n
            has = workspace.half_bytes, workspace.half_signals, workspace.num_flags
            assert all(new >= max(*both) for new, *both in zip(has, had, sizes)), f"{had} -> {has}, asked for {sizes}"
            gc.collect()
            assert old() is None, "the smaller buffer is given back"
            assert not workspace.buffer.tensor(rank).any()
            assert workspace.buffer.nbytes >= workspace.data_offset + 2 * workspace.half_bytes
            workspace.buffer.barrier()
        # What the ranks do not agree on leaves everything as it was.
        buffer = workspace.buffer
        with pytest.raises(ValueError, match="op: the ranks disagree: n is 100 on rank 0, 101 on rank 1"):
            workspace.prepare("op", {"n": 100 + rank}, 1 << 20, 1)
        assert workspace.buffer is buffer
        assert workspace.prepare("op", {"n": 6}, 1, 1) == 6
        single = get_workspace(group, device(), "single", halves=1)
        single.prepare("op", {"n": 1}, 1000, 1)
        assert single.data_offset + single.half_bytes == single.buffer.nbytes


def test_workspace_grows_and_is_reused():
    on_ranks(2, grows)


def is_made_after_all():
    def no_memory(*_):
        raise torch.OutOfMemoryError("not even for these")

    with a_group() as group, pytest.MonkeyPatch.context() as patch:
        workspace = get_workspace(group, device(), "late")
        patch.setattr(workspace_module, "host_words", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="not even for these"):
            workspace.prepare("op", {"n": 1}, 100, 3)
        patch.undo()
        assert workspace.prepare("op", {"n": 1}, 100, 3) == 0
        assert workspace.half_bytes >= 100
        assert workspace.ctx.device == device() and workspace.note.tolist() == [0] * 5
        del group


def test_a_first_buffer_that_could_not_be_made_is_asked_for_again():
    on_ranks(2, is_made_after_all)


def goes_with_its_group(use):
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
    assert workspace.buffer is None and buffer() is None, "given back though somebody holds the workspace"
    assert mapped() == before


def test_workspace_goes_with_its_group():
    on_ranks(2, goes_with_its_group, use=True)
    on_ranks(2, goes_with_its_group, use=False)


# ---- nothing is left behind, however a process ends ----

# Ranks are forked, since importing torch takes seconds; the parent has started no thread and no group by then.
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
def test_nothing_is_left_in_dev_shm(tmp_path):
    before = set(os.listdir("/dev/shm"))
    codes = {"exit": 0, "raise": 1, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TDKERNELS_TIMEOUT_S": "60", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, tmp_path, *codes], capture_output=True, text=True, timeout=200, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{end} {code} {code}" for end, code in codes.items()], done.stderr
    assert "leaked" not in done.stderr  # what multiprocessing's resource tracker would say
    deadline = time.monotonic() + 5.0  # other processes of this machine have files there that come and go
    while left := set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < deadline, f"left in /dev/shm: {left}"
        time.sleep(0.1)
