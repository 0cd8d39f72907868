"""What holds between the ranks, whatever the operator: reuse of memory, groups, disagreement, and peers that fail."""

import contextlib
import gc
import os
import pickle
import re
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tdkernels
import tdkernels.symm.workspace as workspace_module
from tdkernels import PeerTimeoutError, PlanMismatchError
from tdkernels.launch import RankError
from tdkernels.sanitizer import schedule
from tdkernels.symm import get_timeout, get_workspace, resolve_group
from tdkernels.symm import timeout as timeout_module
from tdkernels.symm.group import GroupState, group_state
from tdkernels.symm.workspace import Workspace
from tests.ops.dense.cases import config_for
from tests.support.dense_oracle import DIVIDED, OPERATORS, Case
from tests.support.ranks import DEVICE, a_group, device, fresh_ranks, on_ranks
from tests.support.simulated_nodes import thorough
from tests.support.subset import EVERYTHING, THOROUGH, at_once, turns

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TIMEOUT_S = 2.0 if EVERYTHING else 1.0  # a GPU may have to load a kernel first
PUSH, COPY_ENGINE, AT_ONCE = {"transport": "push"}, {"transport": "copy_engine"}, {"transport": "one_shot"}
FORWARD, DIRECT = {"transport": "forward"}, {"transport": "direct"}
TWO_SHOT, ONE_SHOT = {"exchange": "two_shot"}, {"exchange": "one_shot"}
PARTS = {"method": "parts", "pieces": 2}
# Every way in which data goes between the ranks: operator and changes to the config.
WAYS = [
    ("ag_gemm", PUSH),
    ("ag_gemm", COPY_ENGINE),
    ("ag_gemm", AT_ONCE),
    ("ag_gemm", PARTS),
    ("gemm_rs", FORWARD),
    ("gemm_rs", DIRECT),
    ("gemm_rs", AT_ONCE),
    ("gemm_rs", PARTS),
    ("gemm_ar", TWO_SHOT),
    ("gemm_ar", ONE_SHOT),
]
each_way = pytest.mark.parametrize("operator, changes", WAYS, ids=str)


def synchronize():
    if device().type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def timeout(seconds):
    tdkernels.set_timeout(seconds)
    try:
        yield
    finally:
        tdkernels.set_timeout(None)


def failure_of(fn, *args, **kwargs):
    """What a call raises, on a GPU at the latest when the host waits for it; None if nothing."""
    try:
        fn(*args, **kwargs)
        tdkernels.synchronize()
    except Exception as error:
        copy = pickle.loads(pickle.dumps(error))
        # The tracebacks hold on to the group through their frames.
        for link in (error, error.__cause__, error.__context__):
            if link is not None:
                link.__traceback__ = None
        return copy
    return None


# ---- the same memory for many calls ----

# operator, dtype, (rows, n, k), changes to the config: growing, shrinking, growing again.
CALLS = [
    ("ag_gemm", BF16, (5, 3, 7), {}),
    ("gemm_rs", FP32, (5, 3, 7), {}),
    ("ag_gemm", FP32, (66, 20, 70), {}),
    ("ag_gemm", FP16, (9, 70, 3), COPY_ENGINE),
    ("gemm_ar", BF16, (5, 3, 7), TWO_SHOT),
    ("gemm_ar", FP32, (9, 70, 33), ONE_SHOT),
    ("gemm_rs", BF16, (66, 70, 20), {}),
    ("gemm_rs", FP16, (1, 5, 9), {"item_tiles": 1}),
    ("gemm_ar", FP16, (140, 70, 20), {**TWO_SHOT, "item_tiles": 1}),
    ("gemm_ar", BF16, (1, 5, 70), {**ONE_SHOT, "split_k": 2}),
    ("ag_gemm", FP16, (1, 3, 7), {}),
    ("ag_gemm", BF16, (70, 5, 33), COPY_ENGINE),
    ("gemm_rs", BF16, (9, 70, 33), DIRECT),
    ("gemm_rs", FP32, (70, 33, 40), {}),
    ("gemm_rs", BF16, (70, 33, 40), PARTS),
    ("ag_gemm", BF16, (70, 33, 40), PARTS),
    ("gemm_ar", FP32, (70, 33, 40), TWO_SHOT),
    ("gemm_ar", FP16, (66, 20, 7), ONE_SHOT),
]


def poison(group=None):
    """Fill our own part of all workspaces with NaNs, at a moment when no peer reads or writes it."""
    group = resolve_group(group)
    synchronize()
    dist.barrier(group)
    for workspace in group_state(group).workspaces.values():
        if workspace.buffer is None:  # nobody has launched anything there yet
            continue
        data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :]
        data.fill_(0xFF)  # NaN in every dtype
    synchronize()
    dist.barrier(group)


def reuses_poisoned_memory():
    for turn in range(2):
        for i, (operator, dtype, shape, changes) in enumerate(CALLS):
            case = Case(operator, dtype, *shape, exact=True, seed=turn * len(CALLS) + i)
            results = case.run(config=config_for(case, **changes))
            poison()  # what we got is ours and does not change with the workspace
            case.check(results)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=thorough), pytest.param(3, marks=thorough), 4])
def test_memory_is_reused_by_other_shapes_and_dtypes(world_size):
    on_ranks(world_size, reuses_poisoned_memory)


def in_any_order(seed):
    """CPU ranks and their programs run in an order that follows from a seed, the same on all ranks; collective."""
    return schedule(seed) if device().type == "cpu" else contextlib.nullcontext()


def outruns_its_peers(operator, changes, shape, calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other."""
    cases = [Case(operator, FP32, *shape, exact=True, seed=i) for i in range(calls)]
    config = config_for(cases[0], **changes)
    Case(operator, FP32, *shape).run(config=config)
    with in_any_order(seed=calls):
        outputs = [case.call(config=config) for case in cases]
        for case, output in zip(cases, outputs, strict=True):
            output.backward(case.dy)
    for case, output in zip(cases, outputs, strict=True):
        case.check({"output": output, **case.gradients()})


ONE_TILE, FOUR_TILES = (20, 9, 7), (70, 66, 7)


# With one tile a peer is soon back with the data of the next call; with several it is back in the middle of this one.
@pytest.mark.parametrize(
    "world_size, operator, changes, shape, calls",
    [
        (2, "ag_gemm", {}, ONE_TILE, 12),
        (2, "ag_gemm", COPY_ENGINE, ONE_TILE, 12),
        (2, "gemm_rs", {}, ONE_TILE, 16),
        (2, "gemm_ar", TWO_SHOT, ONE_TILE, 12),
        (2, "gemm_ar", ONE_SHOT, ONE_TILE, 12),
        (3, "ag_gemm", {}, FOUR_TILES, 3),
        (3, "ag_gemm", COPY_ENGINE, FOUR_TILES, 3),
        (3, "gemm_rs", {"item_tiles": 1}, FOUR_TILES, 3),
        (3, "gemm_rs", DIRECT, FOUR_TILES, 3),
        (3, "gemm_ar", {**TWO_SHOT, "item_tiles": 1}, FOUR_TILES, 3),
        (3, "gemm_ar", {**ONE_SHOT, "split_k": 2}, FOUR_TILES, 3),
    ],
    ids=str,
)
def test_no_rank_overtakes_its_peers_data(world_size, operator, changes, shape, calls):
    on_ranks(world_size, outruns_its_peers, operator, changes, shape, calls)


def waits_for_a_slow_rank(operator, changes):
    for slow in range(dist.get_world_size()):
        case = Case(operator, BF16, 20, 9, 33, seed=slow)
        config = config_for(case, **changes)
        if dist.get_rank() == slow:
            time.sleep(0.1)
        output = case.call(config=config)
        if dist.get_rank() == slow:
            time.sleep(0.1)
        output.backward(case.dy)
        case.check({"output": output, **case.gradients()})


@each_way
def test_slow_rank(operator, changes):
    on_ranks(3, waits_for_a_slow_rank, operator, changes)


def has_no_memory_to_grow():
    small, large = Case("gemm_rs", BF16, 5, 3, 7), Case("gemm_rs", BF16, 300, 70, 7)
    with a_group() as group, pytest.MonkeyPatch.context() as patch:
        small.check(small.run(group=group, config=config_for(small, **FORWARD)))

        def no_memory(*args):
            raise torch.OutOfMemoryError("not this much")

        patch.setattr(workspace_module, "make_buffer", no_memory)
        large_failed = failure_of(large.call, group=group, config=config_for(large, **FORWARD))
        patch.undo()
        small_failed = failure_of(small.call, group=group, config=config_for(small, **FORWARD))
        del group
    assert "not this much" in str(large_failed)
    assert "could not grow" in str(small_failed), "it went on with a buffer that is gone"


def test_no_memory_to_grow():
    on_ranks(2, has_no_memory_to_grow)


def waits_for_a_late_peer_to_grow():
    """Rank 1 allocates late, so rank 0 posts a notice in each workspace, of which one has no buffer at that time."""
    small, large = Case("gemm_rs", BF16, 5, 3, 7), Case("gemm_rs", BF16, 300, 70, 7)
    with a_group() as group, pytest.MonkeyPatch.context() as patch:
        small.check(small.run(group=group, config=config_for(small, **FORWARD)))

        def late(*args, make=workspace_module.make_buffer):
            time.sleep(2.0 * (dist.get_rank() == 1))
            return make(*args)

        patch.setattr(workspace_module, "make_buffer", late)
        for case in (large, small):
            case.check(case.run(group=group, config=config_for(case, **FORWARD)))
        del group


def test_late_peer_while_a_workspace_grows():
    on_ranks(2, waits_for_a_late_peer_to_grow)


def has_more_plans_than_numbers():
    with a_group() as group:
        case = Case("ag_gemm", FP32, 5, 3, 7, exact=True)
        case.run(group=group)
        workspace = get_workspace(group, device(), "ag_gemm")
        for i in range(300):  # a signal has room for 256
            workspace.prepare("ag_gemm", {"i": i}, 1, 1)
        other = Case("ag_gemm", FP32, 9, 4, 6, exact=True)
        for _ in range(2):
            for c in (case, other):
                c.check(c.run(group=group))


def test_more_plans_than_numbers():
    on_ranks(2, has_more_plans_than_numbers)


# ---- groups ----


def computes_in_group(group, rank, world_size, seed):
    """Every operator in one group; groups that run at the same time have other shapes."""
    for operator, changes in WAYS:
        case = Case(operator, BF16, 9 + 5 * seed, 7, 11 + seed, rank=rank, world_size=world_size, seed=seed)
        case.check(case.run(group=group, config=config_for(case, **changes)))


def uses_two_kinds_of_groups(divisions):
    """Each division splits the world into groups, all of which run at once; this rank goes through its own in turn."""
    mine = []
    with contextlib.ExitStack() as stack:
        for division in divisions:
            for number, ranks in enumerate(division):
                group = stack.enter_context(a_group(ranks))
                if dist.get_rank() in ranks:
                    mine.append((group, ranks.index(dist.get_rank()), len(ranks), number))
        for _ in range(2):
            for group, rank, world_size, number in mine:
                computes_in_group(group, rank, world_size, seed=number)
        mine.clear()
        del group


@pytest.mark.parametrize(
    "divisions",
    [
        [[[0, 1], [2, 3]], [[0, 2], [1, 3]]],
        [[[0, 1, 2], [3]], [[0], [1, 2, 3]]],
    ],
    ids=["tensor parallel in data parallel", "uneven"],
)
def test_subgroups(divisions):
    on_ranks(4, uses_two_kinds_of_groups, divisions)


def uses_a_mesh():
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(2):
        for name, other in (("tp", "dp"), ("dp", "tp")):
            computes_in_group(mesh[name], mesh.get_local_rank(name), 2, seed=mesh.get_local_rank(other))


def test_dimension_of_a_mesh():
    on_ranks(4, uses_a_mesh)


def uses_a_one_dimensional_mesh():
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device().type, (world_size,))
    computes_in_group(mesh, dist.get_rank(), world_size, seed=0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_dimensional_mesh(world_size):
    on_ranks(world_size, uses_a_one_dimensional_mesh)


def frees_a_destroyed_group():
    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:tdkernels")

    gc.collect()
    before = mapped()
    group = dist.new_group()
    for operator, changes in WAYS:
        case = Case(operator, FP32, 5, 3, 7, exact=True)
        case.check(case.run(group=group, config=config_for(case, **changes)))
    names = [workspace.name for workspace in group_state(group).workspaces.values()]
    for operator in OPERATORS:
        assert {operator, f"{operator} one shot"} <= set(names)
    workspaces = [weakref.ref(get_workspace(group, device(), name)) for name in names]
    assert device().type != "cpu" or mapped() > before
    dist.destroy_process_group(group)
    error = failure_of(case.call, group=group)
    assert isinstance(error, ValueError) and "destroyed" in str(error), repr(error)
    del group
    gc.collect()
    assert [ref() for ref in workspaces] == [None] * len(names)
    assert mapped() == before
    case.check(case.run())  # the world is as it was


def test_destroyed_group_is_refused_and_its_memory_freed():
    on_ranks(2, frees_a_destroyed_group)


def forgets_a_destroyed_group_that_broke():
    group = dist.new_group()
    case, other = (Case("ag_gemm", FP32, rows, 3, 7, exact=True) for rows in (5, 6))
    for known in (case, other):
        known.check(known.run(group=group))
    broken = False
    with timeout(TIMEOUT_S):
        dist.barrier()
        try:
            (case if dist.get_rank() else other).call(group=group)
            tdkernels.synchronize()
        except (PlanMismatchError, PeerTimeoutError):
            broken = True
    assert broken
    dist.destroy_process_group(group)
    workspace = weakref.ref(get_workspace(group, device(), "ag_gemm"))
    del group
    gc.collect()
    kept = workspace() is not None
    if kept:
        workspace().group._failures.clear()  # later tests share this process
    assert not kept
    tdkernels.synchronize()


def test_destroyed_group_is_forgotten_with_its_errors():
    on_ranks(2, forgets_a_destroyed_group_that_broke)


def meets_where_others_have_met():
    """As after destroy_process_group and init_process_group under torchrun: the same name at the same store again."""
    rank = dist.get_rank()
    with a_group() as group:
        for which in ("first", "second"):
            state = GroupState(group)
            for turn in range(3):
                time.sleep(0.2 * rank)  # what was left by the one before is there already
                texts = state.exchange("op", f"{which} {turn} {rank}")
                assert texts == [f"{which} {turn} 0", f"{which} {turn} 1"]
        del group


def test_what_another_group_of_the_name_has_left_is_not_read():
    on_ranks(2, meets_where_others_have_met)


def has_its_memory_where_it_belongs():
    """Whatever torch.set_default_device says, or a block of torch.device, when a group makes its first calls."""
    x, w = (torch.randn(*shape, device=device()) for shape in ((4, 16), (2, 8, 16)))
    splits = torch.tensor([1, 3], device=device())
    for where in ("meta", device().type):
        with a_group() as group:
            with torch.device(where):
                rows, *_ = tdkernels.all_to_all(x, splits, group=group)
                y = tdkernels.group_gemm(x, w, splits)
            assert torch.equal(rows, tdkernels.all_to_all_ref(x, splits, group=group)[0])
            torch.testing.assert_close(y, tdkernels.group_gemm_ref(x, w, splits), rtol=1e-3, atol=1e-3)
            del group


def test_the_default_device_does_not_matter():
    on_ranks(2, has_its_memory_where_it_belongs)


def is_refused_where_it_was_forked():
    """A child of a rank, as a data loader's worker is: it has the rank's memory, and its calls would count as ours."""
    cases = [Case("ag_gemm", FP32, rows, 3, 7, exact=True) for rows in (5, 6)]
    with a_group() as group, a_group() as unused:
        for _ in range(2):
            cases[0].check(cases[0].run(group=group))
        told, tells = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                known, new = (failure_of(case.call, group=group) for case in cases)
                first = failure_of(cases[0].call, group=unused)
                os.write(tells, pickle.dumps([repr(error) for error in (known, new, first)]))
            finally:
                os._exit(0)
        os.close(tells)
        os.waitpid(child, 0)
        with open(told, "rb") as pipe:
            errors = pickle.loads(pipe.read())
        words = f"RuntimeError('process {child} was forked from rank {dist.get_rank()} of this group and is no rank"
        assert [error[: len(words)] for error in errors] == [words] * 3, errors
        for case in cases:
            case.check(case.run(group=group))
        cases[0].check(cases[0].run(group=unused))
        del group, unused


@pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.device_count() > 0, reason="CUDA refuses forked processes itself")
def test_a_forked_process_is_no_rank():
    on_ranks(2, is_refused_where_it_was_forked)


def test_without_a_process_group():
    assert not dist.is_initialized()
    for operator in OPERATORS:
        with pytest.raises(ValueError, match="init_process_group"):
            getattr(tdkernels, operator)(torch.ones(2, 3), torch.ones(4, 3))


# ---- ranks that do not agree ----

# What rank 1 of three does otherwise; which field says so; and its values there and elsewhere, or how they are had from
# a case. Everybody else makes a call with rows, n, k = 6, 4, 8 in fp32.
DISAGREEMENTS = {
    "rows": (dict(rows=9), "M", lambda case: case.x.shape[0]),
    "n": (dict(n=5), "N", lambda case: case.weight.shape[0]),
    "k": (dict(k=7), "K", lambda case: case.weight.shape[1]),
    "dtype": (dict(dtype=FP16), "dtype", lambda case: f'"{case.dtype}"'),
    "method": (dict(config={"method": "torch"}), "config", ("method=torch", "left to autotune (off)")),
    "no rows": (dict(rows=0), "M", lambda case: case.x.shape[0]),
    "operator": ({}, "operator", lambda case: case.operator),
}


def field_name(operator, field):
    """M, N or K as a rank has it in its operands; any other field has but one name."""
    divided = {DIVIDED[operator].get("x"), DIVIDED[operator].get("weight")}
    return f"{field}/W" if field in divided else field


def disagrees(operator, what):
    otherwise, field, values = DISAGREEMENTS[what]
    otherwise = dict(otherwise)
    changes = otherwise.pop("config", {})
    if what == "operator":
        otherwise["operator"] = OPERATORS[OPERATORS.index(operator) - 1]
    call = {"operator": operator, "dtype": FP32, "rows": 6, "n": 4, "k": 8}
    there, elsewhere = (Case(**call | different, exact=True) for different in (otherwise, {}))
    case, changes = (there, changes) if dist.get_rank() == 1 else (elsewhere, {})
    there, elsewhere = values if isinstance(values, tuple) else (values(there), values(elsewhere))
    with a_group() as group:
        error = failure_of(case.call, group=group, config=config_for(case, **changes))
        assert type(error) is ValueError, repr(error)
        text = str(error)
        expected = [f"{field_name(operator, field)} is ", f"{elsewhere}", "on ranks 0, 2", f"{there}", "on rank 1"]
        assert all(part in text for part in expected), f"{expected} in {text}"
        # Nobody has launched anything, so the group is as good as before.
        after = Case(operator, FP32, 6, 4, 8, exact=True)
        after.check(after.run(group=group))
        del group


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_disagreement_is_named_on_every_rank(operator, what):
    on_ranks(3, disagrees, operator, what)


def is_not_fooled_by_a_known_plan(operator, shapes, changes):
    """Both shapes and configs have been used before, so nobody asks the others; only the signals can tell."""
    with a_group() as group:
        cases = [Case(operator, FP32, *shape, exact=True, seed=i) for i, shape in enumerate(shapes)]
        configs = [config_for(case, **change) for case, change in zip(cases, changes)]
        for case, config in [*zip(cases, configs)] * 2:
            case.check(case.run(group=group, config=config))
        dist.barrier()
        number = int(dist.get_rank() == 1)
        with timeout(1.0):
            error = failure_of(cases[number].call, group=group, config=configs[number])
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        assert operator in str(error)
        # There is no way back for this group: the ranks no longer know what is in their memory.
        again = failure_of(cases[number].call, group=group, config=configs[number])
        assert type(again) is type(error) and str(again) == str(error), repr(again)
        del group
    after = Case(operator, FP32, *shapes[0], exact=True)
    after.check(after.run())


@pytest.mark.parametrize(
    "operator, changes, other",
    turns(WAYS, [((140, 6, 5),), ((71, 6, 5),), ((70, 7, 5),), ((70, 6, 9),)], everything=THOROUGH), ids=str,
)
def test_known_but_different_shapes_never_give_a_result(operator, changes, other):
    on_ranks(3, is_not_fooled_by_a_known_plan, operator, [(70, 6, 5), other], [changes, changes])


@pytest.mark.parametrize(
    "operator, changes",
    [
        ("ag_gemm", [{"transport": "push"}, COPY_ENGINE]),
        ("gemm_rs", [{"item_tiles": 1}, {"item_tiles": 2}]),
        ("gemm_ar", [{**TWO_SHOT, "item_tiles": 1}, {**TWO_SHOT, "item_tiles": 2}]),
        ("gemm_ar", [{**ONE_SHOT, "split_k": 1}, {**ONE_SHOT, "split_k": 2}]),
        ("gemm_ar", [TWO_SHOT, ONE_SHOT]),
    ],
    ids=str,
)
def test_known_but_different_configs_never_give_a_result(operator, changes):
    on_ranks(3, is_not_fooled_by_a_known_plan, operator, [(70, 6, 5), (70, 6, 5)], changes)


def sends_on_nothing_after_giving_up(operator, changes):
    """Rank 1 has no result of an AG-GEMM, as rank 0 comes late to it; its next call, made before it looks, is void."""
    rank = dist.get_rank()
    with a_group() as group, pytest.MonkeyPatch.context() as patch:
        first, second = (Case(name, FP32, 6, 4, 8, exact=True) for name in ("ag_gemm", operator))
        config = config_for(second, **changes)
        for _ in range(2):
            first.check(first.run(group=group))
            second.check(second.run(group=group, config=config))
        dist.barrier()
        if rank == 0:
            time.sleep(0.6)
        if rank == 1:
            patch.setattr(Workspace, "check", lambda self, in_call=True: None)  # both are launched
        with timeout(0.2 if rank == 1 else 1.5):
            missed = failure_of(first.call, group=group)
            error = failure_of(second.call, group=group, config=config)
        patch.undo()
        if rank == 1:
            error = failure_of(first.call, group=group)
            assert type(error) is PeerTimeoutError and (error.operator, error.peer) == ("ag_gemm", 0), repr(error)
            again = failure_of(second.call, group=group, config=config)
            assert type(again) is PeerTimeoutError and str(again) == str(error), repr(again)
        else:
            assert missed is None, repr(missed)
            # PeerFailedError: rank 1 says so before its copies, which come in any case.
            assert isinstance(error, PeerTimeoutError) and (error.operator, error.peer) == (operator, 1), repr(error)
        del group


@pytest.mark.parametrize("operator, changes", [("gemm_rs", {}), ("ag_gemm", COPY_ENGINE)], ids=str)
def test_what_a_rank_could_not_compute_reaches_nobody_by_its_next_call(operator, changes):
    on_ranks(3, sends_on_nothing_after_giving_up, operator, changes)


def meets_a_new_shape(operator):
    """Rank 0 waits for the agreement on a shape that the others do not know; they wait for its data."""
    with a_group() as group:
        known, new = (Case(operator, FP32, rows, 4, 8, exact=True) for rows in (6, 7))
        known.check(known.run(group=group))
        dist.barrier()
        start = time.monotonic()
        with timeout(60.0):
            error = failure_of((new if dist.get_rank() == 0 else known).call, group=group)
            again = failure_of(known.call, group=group)
        assert time.monotonic() - start < 20.0, "they waited for the timeout"
        # Both calls are named on every rank: the new one by its rows, and the known one.
        assert type(error) is PlanMismatchError and type(again) is PlanMismatchError, (error, again)
        field = field_name(operator, "M")
        rows = [str(case.x.shape[0]) for case in (new, known)]
        waits = "rank 0 waits in the consensus check of a new call"
        assert re.search(rf"{waits}, .*{field}={rows[0]}", str(error)), str(error)
        assert re.search(rf"rank [12] makes {operator}\(.*{field}={rows[1]}", str(error)), str(error)
        del group


@pytest.mark.parametrize("operator", OPERATORS)
def test_new_shape_on_one_rank_only(operator):
    on_ranks(3, meets_a_new_shape, operator)


# ---- ranks that do not come ----


# Ways, each with whether the ranks know the shape of the call that rank 1 does not come to.
LOST = [("ag_gemm", {}, True), ("gemm_rs", {}, True), ("gemm_ar", TWO_SHOT, True), ("gemm_ar", ONE_SHOT, True)]
LOST += [("ag_gemm", {}, False), ("ag_gemm", PARTS, True), ("gemm_rs", PARTS, True)]


def loses_rank_1(ways):
    calls = []
    for operator, changes, known in ways:
        group = dist.new_group()  # one each, as who has lost a peer once waits for nobody in that group
        case, new = (Case(operator, FP32, rows, 4, 8, exact=True) for rows in (6, 7))
        config = config_for(case, **changes)
        for _ in range(2):
            case.check(case.run(group=group, config=config))
        calls.append((case, case if known else new, {"group": group, "config": config}))
    tdkernels.set_timeout(TIMEOUT_S)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for case, late, options in calls:
        start = time.monotonic()
        errors.append(failure_of(late.call, **options))
        assert time.monotonic() - start < TIMEOUT_S + 5.0
        again = failure_of(case.call, **options)
        assert again is not None
        if late is case:
            assert str(again) == str(errors[-1])
    return errors


@pytest.mark.parametrize("ways", at_once(LOST), ids=str)
def test_killed_rank(ways):
    with fresh_ranks(3, grace_s=60.0) as pool, pytest.raises(RankError) as caught:
        pool.run(loses_rank_1, ways)
    assert isinstance(caught.value.exceptions[1], ChildProcessError)
    for rank in (0, 2):
        for (operator, changes, known), error in zip(ways, caught.value.results[rank], strict=True):
            assert type(error) is PeerTimeoutError, f"{operator} {changes}: {error!r}"
            assert (error.operator, error.rank, error.timeout_s) == (operator, rank, TIMEOUT_S)
            # In two shots rank 0 sums up the only tile: it misses rank 1, while rank 2 misses the sum.
            assert error.peer == 1 or (changes == TWO_SHOT and (rank, error.peer) == (2, 0))
            assert error.seen < error.expected
            assert (error.signal == "agreement") == (not known)
            for words in (operator, f"rank {rank} waited", f"rank {error.peer}", "TDKERNELS_TIMEOUT_S"):
                assert words in str(error)


# ---- how long to wait ----


@pytest.fixture
def default_timeout(monkeypatch):
    monkeypatch.delenv("TDKERNELS_TIMEOUT_S", raising=False)
    tdkernels.set_timeout(None)
    yield
    tdkernels.set_timeout(None)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300])
def test_timeout_has_to_be_a_positive_finite_number(seconds, default_timeout, monkeypatch):
    with pytest.raises(ValueError, match="positive"):
        tdkernels.set_timeout(seconds)
    assert get_timeout() == 300.0
    monkeypatch.setenv("TDKERNELS_TIMEOUT_S", str(seconds))
    with pytest.raises(ValueError, match=r"TDKERNELS_TIMEOUT_S.*positive"):
        get_timeout()


@pytest.mark.parametrize("text", ["", "soon", "1 s"])
def test_timeout_variable_has_to_be_a_number(text, default_timeout, monkeypatch):
    monkeypatch.setenv("TDKERNELS_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="TDKERNELS_TIMEOUT_S"):
        get_timeout()


def test_launches_read_the_variable_once(default_timeout, monkeypatch):
    monkeypatch.setenv("TDKERNELS_TIMEOUT_S", "2.5")
    assert timeout_module.find_timeout() == timeout_module.in_force_s == 2.5
    monkeypatch.setenv("TDKERNELS_TIMEOUT_S", "3")
    assert timeout_module.in_force_s == 2.5
    tdkernels.set_timeout(7)
    assert timeout_module.in_force_s == 7.0
    with timeout_module.shorter_timeout(5):
        assert timeout_module.in_force_s == 5.0
    assert timeout_module.in_force_s == 7.0
    tdkernels.set_timeout(None)
    assert timeout_module.in_force_s is None and timeout_module.find_timeout() == 3.0


def test_timeout_is_the_call_then_the_variable_then_five_minutes(default_timeout, monkeypatch):
    assert get_timeout() == 300.0
    monkeypatch.setenv("TDKERNELS_TIMEOUT_S", "2.5")
    assert get_timeout() == 2.5
    tdkernels.set_timeout(7)
    assert get_timeout() == 7.0
    tdkernels.set_timeout(None)
    assert get_timeout() == 2.5
