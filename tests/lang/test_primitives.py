"""Every primitive of tdkernels.lang in a small kernel, on CPU ranks and, unchanged, on GPUs."""

import contextlib
import gc
import pickle
import time

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError
from tdkernels import lang as td
from tdkernels.symm import get_workspace, resolve_group
from tests.support.ranks import DEVICE, device, on_ranks

TIMEOUT_S = 1.5
POISON = 0xA5


@contextlib.contextmanager
def a_group():
    """Create a group that the test may break: a broken workspace stays broken, and `synchronize` reports it."""
    group = dist.new_group()
    try:
        yield group
    finally:
        tdkernels.set_timeout(None)
        dist.destroy_process_group(group)
        del group
        gc.collect()


def prepared(name, *, half_bytes=8, half_signals=1, num_flags=0, group=None):
    workspace = get_workspace(resolve_group(group), device(), name)
    workspace.prepare(name, {"bytes": half_bytes}, half_bytes, half_signals, num_flags)
    return workspace


def launch(workspace, kernel, grid, *args, **constants):
    workspace.before_launch()
    kernel[(grid,)](workspace.ctx, *args, **constants)
    workspace.after_launch()


def run(workspace, kernel, grid, *args, **constants):
    """Launch, and return after the kernels of all ranks have finished."""
    launch(workspace, kernel, grid, *args, **constants)
    tdkernels.synchronize()
    workspace.buffer.barrier()


def error_of(fn, *args, **kwargs):
    """Return the error of a call, including errors found on synchronization; None if it succeeds."""
    try:
        fn(*args, **kwargs)
        tdkernels.synchronize()
    except (PeerTimeoutError, PlanMismatchError) as error:
        copy = pickle.loads(pickle.dumps(error))
        error.__traceback__ = None  # its frames keep the group alive
        return copy


def words(n):
    return torch.full((n,), -1, dtype=torch.int64, device=device())


def data(workspace, half):
    start = workspace.data_offset + half * workspace.half_bytes
    return workspace.buffer.tensor(workspace.rank)[start : start + workspace.half_bytes]


# ---- rank and addresses ----


@td.jit
def addresses_kernel(ctx, out_ptr, sent):
    me = td.rank(ctx)
    tl.store(out_ptr, me)
    tl.store(out_ptr + 1, td.num_ranks(ctx))
    tl.store(out_ptr + 2, td.flag_at(ctx, 3).to(tl.int64) - td.flag_at(ctx, 0).to(tl.int64))
    tl.store(out_ptr + 3, td.ready_at(ctx, 1).to(tl.int64) - td.symm_base(ctx, me))
    td.keep_signal(ctx, sent)
    own = td.signal_at(ctx, 1, 5)
    here = tl.load(td.data_at(ctx, 1, me).to(tl.pointer_type(tl.int64)) + 2)
    for peer in range(td.num_ranks(ctx)):
        row = out_ptr + 8 + peer * 8
        there = td.symm_at(ctx, own, peer)
        base = td.symm_base(ctx, peer)
        tl.store(row, base)
        tl.store(row + 1, there.to(tl.int64) - base)
        tl.store(row + 2, td.signal_at(ctx, 0, 5).to(tl.int64) - td.symm_base(ctx, me))
        for half in range(2):
            tl.store(row + 3 + half, td.data_at(ctx, half, peer) - base)
        # The peer's value at the offset of `here`, reached through a pointer and through an address.
        pointer = td.data_at(ctx, 1, me).to(tl.pointer_type(tl.int64)) + 2
        tl.store(row + 5, tl.load(td.symm_at(ctx, pointer, peer)) - here)
        address = td.symm_at(ctx, td.data_at(ctx, 1, me), peer)
        tl.store(row + 6, tl.load(address.to(tl.pointer_type(tl.int64)) + 2) - here)
    td.finish(ctx)


def check_rank_and_addresses():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workspace = prepared("summary", half_bytes=1000, half_signals=130, num_flags=4)
    data(workspace, 1)[:256].view(torch.int64)[2] = 100 * rank
    workspace.buffer.barrier()
    out = words(8 + 8 * world_size)
    run(workspace, addresses_kernel, 1, out, (1 << 40) + rank)
    out = out.tolist()
    assert out[:4] == [rank, world_size, 3 * 8, 8]
    signal = (256 + 5) * 8
    for peer in range(world_size):
        assert out[8 + 8 * peer : 15 + 8 * peer] == [
            workspace.buffer.addresses[peer],
            signal + workspace.half_signals * 8,
            signal,
            workspace.data_offset,
            workspace.data_offset + workspace.half_bytes,
            100 * (peer - rank),
            100 * (peer - rank),
        ]
    assert workspace.data_offset >= (256 + 2 * workspace.half_signals) * 8
    assert workspace.signal_value().view(torch.int64).item() == (1 << 40) + rank


@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_and_addresses(world_size):
    on_ranks(world_size, check_rank_and_addresses)


@td.jit
def epoch_kernel(ctx, seen_ptr):
    tl.store(seen_ptr + tl.program_id(0), td.epoch(ctx))
    td.finish(ctx)


def count_launches():
    grids = [1, 5, 1, 33, 2, 7]
    seen = [words(grid + 1) for grid in grids]
    with a_group() as group:  # a workspace without launches, also if the test is repeated
        workspace = prepared("epoch", group=group)
        for grid, out in zip(grids, seen):  # without synchronization between them
            launch(workspace, epoch_kernel, grid, out)
        tdkernels.synchronize()
        del workspace, group
    for call, (grid, out) in enumerate(zip(grids, seen)):
        assert out.tolist() == [call] * grid + [-1]


def test_finish_counts_launches_of_any_grid():
    on_ranks(2, count_launches)


# ---- put ----

PUT_SIZES = [*range(0, 18), 31, 32, 33, 63, 511, 512, 513, 519, 1000, 1023, 1024, 1025, 4088, 4095, 4096, 4097]
SLOT, MARGIN = 4096 + 128, 64


@td.jit
def put_kernel(ctx, src_ptr, sizes_ptr, SLOT: tl.constexpr, MARGIN: tl.constexpr, BLOCK_WORDS: tl.constexpr):
    """Program i puts sizes[i] bytes into slot i of the right neighbor, and waits for the signal of the left one."""
    me, ranks, pid = td.rank(ctx), td.num_ranks(ctx), tl.program_id(0)
    call = td.epoch(ctx) + 1
    right, left = (me + 1) % ranks, (me + ranks - 1) % ranks
    offset = pid.to(tl.int64) * SLOT
    dst = td.data_at(ctx, 0, right) + offset + MARGIN
    td.put(dst, src_ptr.to(tl.int64) + offset, tl.load(sizes_ptr + pid), BLOCK_WORDS)
    td.notify(ctx, td.signal_at(ctx, 0, pid), right, call)  # waiter: right's program of the same id
    td.wait(ctx, td.signal_at(ctx, 0, pid), call, left)  # producer: left's program of the same id
    td.finish(ctx)


@td.jit
def put_one_kernel(ctx, src_ptr, num_bytes, MARGIN: tl.constexpr):
    """The size is an argument: Triton specializes on 1 and on multiples of 16."""
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    call = td.epoch(ctx) + 1
    right, left = (me + 1) % ranks, (me + ranks - 1) % ranks
    td.put(td.data_at(ctx, 0, right) + MARGIN, src_ptr.to(tl.int64), num_bytes)
    td.notify(ctx, td.signal_at(ctx, 0, 0), right, call)  # waiter: right
    td.wait(ctx, td.signal_at(ctx, 0, 0), call, left)  # producer: left
    td.finish(ctx)


def random_bytes(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n,), dtype=torch.uint8, generator=generator).to(device())


def check_arrived(slot, source, size):
    """Check that the slot holds the first `size` bytes of source after the margin, and is otherwise unchanged."""
    expected = torch.full_like(slot, POISON)
    expected[MARGIN : MARGIN + size] = source[:size]
    assert torch.equal(slot, expected), f"{size} bytes"


def check_put():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left = (rank - 1) % world_size
    count, large = len(PUT_SIZES), 3 * 4096 * 8 + 20
    workspace = prepared("put", half_bytes=max(count * SLOT, large + 2 * MARGIN), half_signals=count)
    sizes = torch.tensor(PUT_SIZES, dtype=torch.int32, device=device())

    def poison():
        workspace.buffer.tensor(rank)[workspace.data_offset :].fill_(POISON)
        workspace.buffer.barrier()

    for block_words in (64, 4096):
        poison()
        source = random_bytes(count * SLOT, seed=10 * block_words + rank)
        run(workspace, put_kernel, count, source, sizes, SLOT=SLOT, MARGIN=MARGIN, BLOCK_WORDS=block_words)
        expected = random_bytes(count * SLOT, seed=10 * block_words + left)
        slots = data(workspace, 0)
        for i, size in enumerate(PUT_SIZES):
            check_arrived(slots[i * SLOT : (i + 1) * SLOT], expected[i * SLOT :], size)
        assert (data(workspace, 1) == POISON).all()
    for size in (0, 1, 8, 15, 16, 4097, large):
        poison()
        source = random_bytes(large, seed=100 + rank)
        run(workspace, put_one_kernel, 1, source, size, MARGIN=MARGIN)
        check_arrived(data(workspace, 0), random_bytes(large, seed=100 + left), size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_put(world_size):
    on_ranks(world_size, check_put)


# ---- signals ----


@td.jit
def signals_kernel(ctx, seen_ptr, OP: tl.constexpr, SCOPE: tl.constexpr, FOR_TMA: tl.constexpr):
    """The first 3 W programs set or add to a signal of each peer; the last program waits for all of this rank's."""
    me, ranks, pid = td.rank(ctx), td.num_ranks(ctx), tl.program_id(0)
    call = td.epoch(ctx) + 1
    if pid < 3 * ranks:
        peer = pid % ranks
        if OP == "set":
            # Word 3 * me + i, by one program each. Waiter: the peer's last program.
            td.notify(ctx, td.signal_at(ctx, 0, 3 * me + pid // ranks), peer, call * 100 + me, "set", SCOPE)
        else:
            # Word 0, by all. Waiter: the peer's last program.
            td.notify(ctx, td.signal_at(ctx, 0, 0), peer, (me + 1).to(tl.int64), OP="add", SCOPE=SCOPE)
    elif OP == "set":
        for i in range(3 * ranks):  # producer: the first programs of rank i // 3
            seen = td.wait(ctx, td.signal_at(ctx, 0, i), call * 100 + i // 3, i // 3, SCOPE, FOR_TMA)
            tl.store(seen_ptr + i, seen)
    else:
        total = call * 3 * (ranks * (ranks + 1) // 2)
        seen = td.wait(ctx, td.signal_at(ctx, 0, 0), total, 0, SCOPE, FOR_TMA)  # producer: the first of all ranks
        tl.store(seen_ptr, seen)
    td.finish(ctx)


def check_signals():
    scopes = ["sys", "gpu"] if dist.get_world_size() == 1 else ["sys"]  # "gpu" is for a producer on the same GPU
    for scope in scopes:
        for op in ("set", "add"):
            with a_group() as group:  # its signals are zero
                check_signals_of(op, scope, prepared("signals", half_signals=3 * dist.get_world_size(), group=group))
                del group


def check_signals_of(op, scope, workspace):
    world_size = workspace.world_size
    for call in (1, 2, 3):
        seen = words(3 * world_size + 1)
        run(workspace, signals_kernel, 3 * world_size + 1, seen, OP=op, SCOPE=scope, FOR_TMA=call == 2)
        if op == "set":
            expected = [100 * call + i // 3 for i in range(3 * world_size)]
        else:
            expected = [call * 3 * world_size * (world_size + 1) // 2]
        assert seen.tolist() == expected + [-1] * (3 * world_size + 1 - len(expected)), f"{op} {scope} {call=}"
        for i, value in enumerate(expected):  # read by the host, on every rank
            for peer in range(world_size):
                assert workspace.signal_word(peer, i).view(torch.int64).item() == value
        workspace.buffer.barrier()


@pytest.mark.parametrize("world_size", [1, 3])
def test_notify_and_wait(world_size):
    on_ranks(world_size, check_signals)


@td.jit
def chain_kernel(ctx, values_ptr, ADD: tl.constexpr):
    """Program p waits for program p - 1 and adds one to the value that it stored."""
    me, pid = td.rank(ctx), tl.program_id(0)
    call = td.epoch(ctx) + 1
    address = values_ptr.to(tl.int64)
    if pid > 0:
        seen = td.wait(ctx, td.flag_at(ctx, pid - 1), call, me, SCOPE="gpu")  # producer: program pid - 1
        address = td.consume_token(address, seen)
    here = address.to(tl.pointer_type(tl.int64)) + pid
    tl.store(here + 1, tl.load(here) + 1)
    # Waiter: program pid + 1.
    if ADD:
        td.add_release(td.flag_at(ctx, pid), tl.full((), 1, tl.int64), SCOPE="gpu")
    else:
        td.store_release(td.flag_at(ctx, pid), call, SCOPE="gpu")
    td.finish(ctx)


def check_chain():
    for add in (False, True):
        workspace = prepared(f"chain {add}", num_flags=40)
        for call in range(3):
            values = words(42)
            values[0] = 1000 * call
            run(workspace, chain_kernel, 40, values, ADD=add)
            assert values.tolist() == [1000 * call + i for i in range(41)] + [-1]


def test_flags_between_programs():
    on_ranks(2, check_chain)


# ---- missing peers ----


@td.jit
def missing_kernel(ctx, out_ptr, half, index, reached, expected, peer):
    """This rank sets the signal to `reached`; all programs wait for `expected`, which is never set."""
    me, pid = td.rank(ctx), tl.program_id(0)
    if pid == 0:
        td.notify(ctx, td.signal_at(ctx, half, index), me, reached + tl.full((), 0, tl.int64))
    seen = td.wait(ctx, td.signal_at(ctx, half, index), reached, me)  # producer: program 0 of this rank
    tl.store(out_ptr + 2 * pid, seen)
    seen = td.wait(ctx, td.signal_at(ctx, half, index), expected, peer)  # producer: none
    tl.store(out_ptr + 2 * pid + 1, seen)
    td.finish(ctx)


def wait_for_missing_signal(half, index, reached, expected):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    peer = (rank + 1) % world_size
    with a_group() as group:
        good = prepared("good")  # in another group
        other = prepared("other", group=group)
        workspace = prepared("missing", half_signals=200, group=group)
        # With a reached signal nothing is missing; this launch also compiles the kernel.
        run(workspace, missing_kernel, 2, words(4), half, index, reached - 1, reached - 2, peer)
        run(good, epoch_kernel, 2, words(2))
        tdkernels.set_timeout(TIMEOUT_S)
        out = words(20)
        start = time.monotonic()
        error = error_of(launch, workspace, missing_kernel, 10, out, half, index, reached, expected, peer)
        took = time.monotonic() - start
        assert 0.9 * TIMEOUT_S < took < 5 * TIMEOUT_S, f"programs wait concurrently, not in turn: {took}"
        assert type(error) is PeerTimeoutError
        assert (error.operator, error.rank, error.peer) == ("missing", rank, peer)
        assert (error.expected, error.seen, error.timeout_s) == (expected, reached, TIMEOUT_S)
        assert error.signal == f"{index} of half {half}"
        text = f"missing: rank {rank} waited 1.5 s for rank {peer}: signal {index} of half {half} should have reached"
        assert str(error).startswith(text) and f"epoch {expected}, it stands at {reached}" in str(error)
        assert out.tolist() == [reached] * 20, "the kernel must run to its end"
        # The group stays broken in all its workspaces, with the same error and without waiting; other groups do not.
        start = time.monotonic()
        for again in (
            error_of(launch, workspace, missing_kernel, 10, out, half, index, reached, reached, peer),
            error_of(launch, other, epoch_kernel, 2, words(2)), error_of(other.check),
        ):
            assert type(again) is PeerTimeoutError and str(again) == str(error)
        assert str(error_of(tdkernels.synchronize)) == str(error)
        assert time.monotonic() - start < TIMEOUT_S
        launch(good, epoch_kernel, 2, words(2))
        good.check()
        tdkernels.set_timeout(None)
        good.buffer.barrier()
        del group
    tdkernels.synchronize()  # the error is gone with its group


def test_wait_times_out():
    on_ranks(2, wait_for_missing_signal, half=1, index=3, reached=5, expected=7)
    on_ranks(3, wait_for_missing_signal, half=0, index=150, reached=(1 << 33) + 1, expected=(1 << 33) + 2)


@td.jit
def missing_flag_kernel(ctx):
    td.wait(ctx, td.flag_at(ctx, 1), 1, td.rank(ctx), "gpu")  # producer: none
    td.finish(ctx)


def wait_for_missing_flag():
    with a_group() as group:
        workspace = prepared("missing flag", num_flags=2, group=group)
        tdkernels.set_timeout(0.3)
        start = time.monotonic()
        error = error_of(launch, workspace, missing_flag_kernel, 1)
        assert time.monotonic() - start > 1.0, "a wait for a peer must time out before a wait for another program"
        assert type(error) is PeerTimeoutError
        assert (error.rank, error.peer, error.expected, error.seen) == (0, 0, 1, 0)
        assert error.signal == "between programs of this rank"
        assert "rank 0 waited for several times 0.3 s for another program of its own" in str(error)
        del group


def test_wait_for_a_flag_times_out():
    on_ranks(1, wait_for_missing_flag)


@td.jit
def indirect_kernel(ctx, peer, later_ns):
    """Program 0 waits for program 1, which later starts to wait for a peer."""
    pid = tl.program_id(0)
    if pid == 0:
        td.wait(ctx, td.flag_at(ctx, 0), 1, td.rank(ctx), "gpu")  # producer: program 1
    else:
        begin = td.clock_ns()
        now = begin
        while now - begin < later_ns:
            now = td.clock_ns()
        td.wait(ctx, td.signal_at(ctx, 0, 0), 1, peer)  # producer: none
        td.add_release(td.flag_at(ctx, 0), tl.full((), 1, tl.int64), SCOPE="gpu")
    td.finish(ctx)


def wait_for_missing_peer_indirectly():
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    with a_group() as group:
        workspace = prepared("indirect", num_flags=1, half_signals=1, group=group)
        tdkernels.set_timeout(0.3)
        error = error_of(launch, workspace, indirect_kernel, 2, peer, 200_000_000)
        assert type(error) is PeerTimeoutError and (error.rank, error.peer) == (rank, peer)
        del group


@pytest.mark.skipif(DEVICE != "cuda", reason="needs programs that run concurrently")
def test_error_of_an_indirect_wait_names_the_peer():
    on_ranks(2, wait_for_missing_peer_indirectly)


# ---- plans ----


@td.jit
def plan_kernel(ctx, seen_ptr, sent, expected):
    """Send `sent` to the right neighbor, wait for `expected` from the left one; both are call << 16 | plan."""
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    right, left = (me + 1) % ranks, (me + ranks - 1) % ranks
    td.notify(ctx, td.signal_at(ctx, 0, 2), right, sent + tl.full((), 0, tl.int64))  # waiter: right
    seen = td.wait_plan(ctx, td.signal_at(ctx, 0, 2), expected + tl.full((), 0, tl.int64), left)  # producer: left
    tl.store(seen_ptr, seen)
    td.finish(ctx)


def signal_value(call, plan):
    return call << 16 | plan


def check_plans(case):
    """Rank 1 sends another signal than the other ranks, which all send call 4 with plan 0."""
    rank = dist.get_rank()
    left = (rank - 1) % dist.get_world_size()
    with a_group() as group:
        workspace = get_workspace(group, device(), "plans")
        plans = [workspace.prepare("op", {"rows": rows, "dtype": "fp8"}, 8, 3) for rows in (6, 7)]
        assert plans == [0, 1]
        seen = words(1)
        for call, plan in ((1, 0), (2, 1), (3, 0)):
            run(workspace, plan_kernel, 1, seen, signal_value(call, plan), signal_value(call, plan))
            assert seen.item() == signal_value(call, plan)
        tdkernels.set_timeout(TIMEOUT_S)
        other = {"ahead": signal_value(5, 1), "other plan": signal_value(4, 1), "late": signal_value(3, 0)}[case]
        sent = {r: other if r == 1 else signal_value(4, 0) for r in range(dist.get_world_size())}
        expected = signal_value(4, 0)
        error = error_of(launch, workspace, plan_kernel, 1, seen, sent[rank], expected)
        assert seen.item() == sent[left]
        if left != 1 or case == "ahead":  # a peer may be ahead, with any plan
            assert error is None
        elif case == "other plan":
            assert type(error) is PlanMismatchError
            assert str(error) == (
                f"op: rank 1 made call 4 with another shape, dtype or config than rank {rank}: "
                "op(rows=7, dtype=fp8) there, op(rows=6, dtype=fp8) here"
            )
            assert str(error_of(tdkernels.synchronize)) == str(error)
        else:
            assert type(error) is PeerTimeoutError
            assert (error.operator, error.rank, error.peer) == ("op", rank, 1)
            assert (error.expected, error.seen, error.signal) == (4, 3, "2 of half 0")
        tdkernels.set_timeout(None)
        workspace.buffer.barrier()
        del group
    tdkernels.synchronize()


def test_wait_plan():
    for case in ("ahead", "other plan", "late"):
        on_ranks(3, check_plans, case)


# ---- conversions, dot and prefetch ----


@td.jit
def from_float32_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, td.from_float32(tl.load(x_ptr + offs), y_ptr.dtype.element_ty))


@td.jit
def to_float32_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, td.to_float32(tl.load(x_ptr + offs)))


@td.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr
):
    offs_m, offs_n, offs_k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, STEP)
    acc = tl.full((M, N), 0.25, tl.float32)
    for start in range(0, K, STEP):
        a = tl.load(a_ptr + offs_m * K + start + offs_k[None, :])
        b = tl.load(b_ptr + (start + offs_k[:, None]) * N + offs_n)
        acc = td.dot(a, b, acc, PRECISION)
    tl.store(c_ptr + offs_m * N + offs_n, acc)


BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def same_bits(result, expected):
    """Compare bits, except the payload of NaNs."""
    assert result.dtype == expected.dtype
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(0.0), expected.nan_to_num(0.0))
    number = ~expected.isnan()
    assert torch.equal(result.view(BITS[result.dtype])[number], expected.view(BITS[result.dtype])[number])


def floats_to_round():
    """Return every bf16 and fp16 number, the midpoints between neighbors and their neighbors, and random bits."""
    everything = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    bf16 = everything.view(torch.bfloat16).float().view(torch.int32)
    fp16 = everything.view(torch.float16).float().view(torch.int32)
    bits = [bf16 + offset for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    bits += [fp16 + offset for offset in (0, 0x0FFF, 0x1000, 0x1001)]
    generator = torch.Generator().manual_seed(0)
    bits += [torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator).to(torch.int32)]
    return torch.cat(bits).view(torch.float32)


def check_conversions():
    block = 1 << 13
    x = floats_to_round()
    assert x.numel() % block == 0
    assert x.isnan().any() and x.isinf().any() and ((x != 0) & (x.abs() < 1e-38)).any()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = torch.empty(x.shape, dtype=dtype, device=device())
        from_float32_kernel[(x.numel() // block,)](x.to(device()), y, BLOCK=block)
        same_bits(y.cpu(), x.to(dtype))
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
        y = torch.empty(x.shape, dtype=torch.float32, device=device())
        to_float32_kernel[(x.numel() // block,)](x.to(device()), y, BLOCK=block)
        same_bits(y.cpu(), x.float())


def test_conversions_equal_torch():
    on_ranks(1, check_conversions)


def check_dot():
    """The integers are just exact in the dtype, so every order of summation gives the same bits, and TF32 does not."""
    m, n, k = 32, 16, 96
    generator = torch.Generator().manual_seed(0)
    for dtype, limit in ((torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, 1 << 15)):
        a = torch.randint(-limit, limit + 1, (m, k), generator=generator)
        b = torch.randint(-3, 4, (k, n), generator=generator)
        c = torch.empty((m, n), dtype=torch.float32, device=device())
        operands = (t.to(dtype).to(device()) for t in (a, b))
        dot_kernel[(1,)](*operands, c, M=m, N=n, K=k, STEP=32, PRECISION="ieee")
        assert torch.equal(c.cpu(), (a @ b).float() + 0.25), dtype


@td.jit
def prefetch_kernel(x_ptr, y_ptr, width, num_bytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    td.prefetch(x_ptr.to(tl.int64) + rows.to(tl.int64) * width * 4, num_bytes, rows < ROWS - 1)
    offs = rows[:, None] * width + cols[None, :]
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


def check_prefetch(sizes):
    x = torch.randn(16, 64, device=device())
    for num_bytes in sizes:
        y = torch.full_like(x, torch.nan)
        prefetch_kernel[(1,)](x, y, 64, num_bytes, ROWS=16, COLUMNS=64)
        assert torch.equal(x, y)


def test_prefetch_changes_nothing():
    """Prefetch zero, negative and odd numbers of bytes."""
    if DEVICE != "cpu" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm_90 or later")
    on_ranks(1, check_prefetch, [256, 16, 40, 8, 0, -2048])


def test_dot():
    on_ranks(1, check_dot)


def test_dot_in_the_interpreter_does_not_depend_on_the_cpu():
    """It computes in fp64 and rounds once, so that the order of the sum does not matter."""
    m, n, k = 16, 32, 64
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator) for shape in ((m, k), (k, n)))
    c = torch.empty(m, n)
    dot_kernel[(1,)](a, b, c, M=m, N=n, K=k, STEP=k, PRECISION="ieee")
    assert torch.equal(c, (a.double() @ b.double()).float() + 0.25)
