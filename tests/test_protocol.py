"""Protocol between ranks, for all operators: memory reuse, groups, disagreeing calls and failing peers."""

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
PUSH, COPY_ENGINE, ONE_SHOT_TRANSPORT = {"transport": "push"}, {"transport": "copy_engine"}, {"transport": "one_shot"}
FORWARD, DIRECT = {"transport": "forward"}, {"transport": "direct"}
TWO_SHOT, ONE_SHOT = {"exchange": "two_shot"}, {"exchange": "one_shot"}
PIPELINED = {"method": "parts", "pieces": 2}
# All variants of data transfer between ranks: operator and changes to the config.
VARIANTS = [
    ("ag_gemm", PUSH),
    ("ag_gemm", COPY_ENGINE),
    ("ag_gemm", ONE_SHOT_TRANSPORT),
    ("ag_gemm", PIPELINED),
    ("gemm_rs", FORWARD),
    ("gemm_rs", DIRECT),
    ("gemm_rs", ONE_SHOT_TRANSPORT),
    ("gemm_rs", PIPELINED),
    ("gemm_ar", TWO_SHOT),
    ("gemm_ar", TWO_SHOT | DIRECT),
    ("gemm_ar", ONE_SHOT),
]
each_variant = pytest.mark.parametrize("operator, changes", VARIANTS, ids=str)


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
    """Return the exception of a call, including failures found on synchronization; None if it succeeds."""
    try:
        fn(*args, **kwargs)
        tdkernels.synchronize()
    except Exception as error:
        copy = pickle.loads(pickle.dumps(error))
        # The frames of the tracebacks keep the group alive.
        for link in (error, error.__cause__, error.__context__):
            if link is not None:
                link.__traceback__ = None
        return copy
    return None


# ---- memory reuse across calls ----

# operator, dtype, (rows, n, k), changes to the config; the workspace has to grow, then fits, then grows again.
CALLS = [
    ("ag_gemm", BF16, (5, 3, 7), {}),
    ("gemm_rs", FP32, (5, 3, 7), {}),
    ("ag_gemm", FP32, (66, 20, 70), {}),
    ("ag_gemm", FP16, (9, 70, 3), COPY_ENGINE),
    ("gemm_ar", BF16, (5, 3, 7), TWO_SHOT),
    ("gemm_ar", FP32, (9, 70, 33), ONE_SHOT),
    ("gemm_ar", BF16, (66, 70, 20), TWO_SHOT | DIRECT),
    ("gemm_rs", BF16, (66, 70, 20), {}),
    ("gemm_rs", FP16, (1, 5, 9), {**FORWARD, "item_tiles": 1}),
    ("gemm_ar", FP16, (140, 70, 20), {**TWO_SHOT, "item_tiles": 1}),
    ("gemm_ar", BF16, (1, 5, 70), {**ONE_SHOT, "split_k": 2}),
    ("ag_gemm", FP16, (1, 3, 7), {}),
    ("ag_gemm", BF16, (70, 5, 33), COPY_ENGINE),
    ("gemm_rs", BF16, (9, 70, 33), DIRECT),
    ("gemm_rs", FP32, (70, 33, 40), {}),
    ("gemm_rs", BF16, (70, 33, 40), PIPELINED),
    ("ag_gemm", BF16, (70, 33, 40), PIPELINED),
    ("gemm_ar", FP32, (70, 33, 40), TWO_SHOT),
    ("gemm_ar", FP16, (9, 70, 33), TWO_SHOT | DIRECT),
    ("gemm_ar", FP16, (66, 20, 7), ONE_SHOT),
]


def poison(group=None):
    """Fill this rank's data in all workspaces with NaN, between two barriers so that no peer reads or writes it."""
    group = resolve_group(group)
    synchronize()
    dist.barrier(group)
    for workspace in group_state(group).workspaces.values():
        if workspace.buffer is None:  # no launch has used it yet
            continue
        data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :]
        data.fill_(0xFF)  # NaN in every dtype
    synchronize()
    dist.barrier(group)


def reuse_poisoned_memory():
    for turn in range(2):
        for i, (operator, dtype, shape, changes) in enumerate(CALLS):
            case = Case(operator, dtype, *shape, exact=True, seed=turn * len(CALLS) + i)
            results = case.run(config=config_for(case, **changes))
            poison()  # the results are not views of the workspace
            case.check(results)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=thorough), 3, pytest.param(4, marks=thorough)])
def test_memory_is_reused_by_other_shapes_and_dtypes(world_size):
    on_ranks(world_size, reuse_poisoned_memory)


def in_any_order(seed):
    """Run CPU ranks and their programs in an order derived from a seed that is equal on all ranks; collective."""
    return schedule(seed) if device().type == "cpu" else contextlib.nullcontext()


def run_ahead_of_peers(operator, changes, shape, calls):
    """Make calls with different data and no synchronization between them, so that ranks run ahead of each other."""
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


# With one tile a peer soon sends the data of the next call; with several tiles it does so during the current call.
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
        (3, "gemm_rs", {**FORWARD, "item_tiles": 1}, FOUR_TILES, 3),
        (3, "gemm_rs", DIRECT, FOUR_TILES, 3),
        (3, "gemm_ar", {**TWO_SHOT, "item_tiles": 1}, FOUR_TILES, 3),
        (3, "gemm_ar", {**ONE_SHOT, "split_k": 2}, FOUR_TILES, 3),
    ],
    ids=str,
)
def test_no_rank_overtakes_its_peers_data(world_size, operator, changes, shape, calls):
    on_ranks(world_size, run_ahead_of_peers, operator, changes, shape, calls)


def wait_for_slow_rank(operator, changes):
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


@each_variant
def test_slow_rank(operator, changes):
    on_ranks(3, wait_for_slow_rank, operator, changes)


def run_out_of_memory_while_growing():
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
    assert "could not grow" in str(small_failed), "the call used a freed buffer"


def test_out_of_memory_while_growing():
    on_ranks(2, run_out_of_memory_while_growing)


def grow_with_late_peer():
    """Rank 1 allocates late, so rank 0 posts a notice in each workspace; one of them has no buffer at that time."""
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
    on_ranks(2, grow_with_late_peer)


def use_more_plans_than_8_bits():
    with a_group() as group:
        case = Case("ag_gemm", FP32, 5, 3, 7, exact=True)
        case.run(group=group)
        workspace = get_workspace(group, device(), "ag_gemm")
        for i in range(300):  # more plan ids than fit in 8 bits
            workspace.prepare("ag_gemm", {"i": i}, 1, 1)
        other = Case("ag_gemm", FP32, 9, 4, 6, exact=True)
        for _ in range(2):
            for c in (case, other):
                c.check(c.run(group=group))


def test_more_plans_than_8_bits():
    on_ranks(2, use_more_plans_than_8_bits)


# ---- groups ----

# How a variant finds its peers does not depend on the kind of the group.
ONE_OF_EACH = VARIANTS if THOROUGH else [("ag_gemm", PUSH), ("gemm_rs", FORWARD), ("gemm_ar", TWO_SHOT)]


def computes_in_group(group, rank, world_size, seed, variants=VARIANTS):
    """Run every operator in one group; concurrent groups use different shapes."""
    for operator, changes in variants:
        case = Case(operator, BF16, 9 + 5 * seed, 7, 11 + seed, rank=rank, world_size=world_size, seed=seed)
        case.check(case.run(group=group, config=config_for(case, **changes)))


def use_subgroups(divisions):
    """Each division splits the world into concurrent groups; this rank uses its groups of all divisions in turn."""
    mine = []
    with contextlib.ExitStack() as stack:
        for division in divisions:
            for number, ranks in enumerate(division):
                group = stack.enter_context(a_group(ranks))
                if dist.get_rank() in ranks:
                    mine.append((group, ranks.index(dist.get_rank()), len(ranks), number))
        for variants in (VARIANTS, ONE_OF_EACH):
            for group, rank, world_size, number in mine:
                computes_in_group(group, rank, world_size, number, variants)
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
    on_ranks(4, use_subgroups, divisions)


def use_mesh_dimension():
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(2):
        for name, other in (("tp", "dp"), ("dp", "tp")):
            number = mesh.get_local_rank(other)
            computes_in_group(mesh[name], mesh.get_local_rank(name), 2, number, ONE_OF_EACH)


def test_dimension_of_a_mesh():
    on_ranks(4, use_mesh_dimension)


def use_one_dimensional_mesh():
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device().type, (world_size,))
    computes_in_group(mesh, dist.get_rank(), world_size, 0, ONE_OF_EACH)


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_dimensional_mesh(world_size):
    on_ranks(world_size, use_one_dimensional_mesh)


def destroy_group():
    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:tdkernels")

    gc.collect()
    before = mapped()
    group = dist.new_group()
    for operator, changes in VARIANTS:
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
    case.check(case.run())  # the world is still usable


def test_destroyed_group_is_rejected_and_its_memory_freed():
    on_ranks(2, destroy_group)


def destroy_broken_group():
    group = dist.new_group()
    case, other = (Case("ag_gemm", FP32, rows, 3, 7, exact=True) for rows in (5, 6))
    for cached in (case, other):
        cached.check(cached.run(group=group))
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


def test_destroyed_group_is_freed_with_its_errors():
    on_ranks(2, destroy_broken_group)


def reuse_group_name():
    """Reuse a group name at the same store, as after destroy_process_group and init_process_group under torchrun."""
    rank = dist.get_rank()
    with a_group() as group:
        for which in ("first", "second"):
            state = GroupState(group)
            for turn in range(3):
                time.sleep(0.2 * rank)  # the keys of the previous state are already in the store
                texts = state.exchange("op", f"{which} {turn} {rank}")
                assert texts == [f"{which} {turn} 0", f"{which} {turn} 1"]
        del group


def test_keys_of_an_earlier_group_of_the_same_name_are_not_read():
    on_ranks(2, reuse_group_name)


def use_default_device():
    """Workspaces are allocated on the operands' device, for any default device at the first call of a group."""
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
    on_ranks(2, use_default_device)


def call_in_forked_process():
    """A forked child, such as a data loader worker, shares the rank's memory; its calls would count as the rank's."""
    cases = [Case("ag_gemm", FP32, rows, 3, 7, exact=True) for rows in (5, 6)]
    with a_group() as group, a_group() as unused:
        for _ in range(2):
            cases[0].check(cases[0].run(group=group))
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                cached, new = (failure_of(case.call, group=group) for case in cases)
                first = failure_of(cases[0].call, group=unused)
                os.write(write_end, pickle.dumps([repr(error) for error in (cached, new, first)]))
            finally:
                os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        with open(read_end, "rb") as pipe:
            errors = pickle.loads(pipe.read())
        expected = f"RuntimeError('process {child} was forked from rank {dist.get_rank()} of this group and is no rank"
        assert [error[: len(expected)] for error in errors] == [expected] * 3, errors
        for case in cases:
            case.check(case.run(group=group))
        cases[0].check(cases[0].run(group=unused))
        del group, unused


@pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.device_count() > 0, reason="CUDA itself rejects forked processes")
def test_calls_in_a_forked_process_are_rejected():
    on_ranks(2, call_in_forked_process)


def test_without_a_process_group():
    assert not dist.is_initialized()
    for operator in OPERATORS:
        with pytest.raises(ValueError, match="init_process_group"):
            getattr(tdkernels, operator)(torch.ones(2, 3), torch.ones(4, 3))


# ---- disagreeing ranks ----

# Arguments that differ on rank 1 of three; the field that the error names; its values there and on the other ranks, or
# a function of a case that returns the value. The other ranks make a call with rows, n, k = 6, 4, 8 in fp32.
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
    """Return the name of a field in the error; M, N and K are divided by W if the operand is sharded along them."""
    divided = {DIVIDED[operator].get("x"), DIVIDED[operator].get("weight")}
    return f"{field}/W" if field in divided else field


def disagree(operator, what):
    arguments, field, values = DISAGREEMENTS[what]
    arguments = dict(arguments)
    changes = arguments.pop("config", {})
    if what == "operator":
        arguments["operator"] = OPERATORS[OPERATORS.index(operator) - 1]
    call = {"operator": operator, "dtype": FP32, "rows": 6, "n": 4, "k": 8}
    there, elsewhere = (Case(**call | different, exact=True) for different in (arguments, {}))
    case, changes = (there, changes) if dist.get_rank() == 1 else (elsewhere, {})
    there, elsewhere = values if isinstance(values, tuple) else (values(there), values(elsewhere))
    with a_group() as group:
        error = failure_of(case.call, group=group, config=config_for(case, **changes))
        assert type(error) is ValueError, repr(error)
        text = str(error)
        expected = [f"{field_name(operator, field)} is ", f"{elsewhere}", "on ranks 0, 2", f"{there}", "on rank 1"]
        assert all(part in text for part in expected), f"{expected} in {text}"
        # No rank has launched anything, so the group is still usable.
        after = Case(operator, FP32, 6, 4, 8, exact=True)
        after.check(after.run(group=group))
        del group


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_disagreement_is_named_on_every_rank(operator, what):
    on_ranks(3, disagree, operator, what)


def mismatch_cached_plans(operator, shapes, changes):
    """Both shapes and configs are cached, so no consensus check runs; only the signals reveal the mismatch."""
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
        # The group stays broken: the contents of its workspaces are unknown.
        again = failure_of(cases[number].call, group=group, config=configs[number])
        assert type(again) is type(error) and str(again) == str(error), repr(again)
        del group
    after = Case(operator, FP32, *shapes[0], exact=True)
    after.check(after.run())


@pytest.mark.parametrize(
    "operator, changes, other",
    turns(VARIANTS, [((140, 6, 5),), ((71, 6, 5),), ((70, 7, 5),), ((70, 6, 9),)], everything=THOROUGH), ids=str,
)
def test_different_cached_shapes_never_give_a_result(operator, changes, other):
    on_ranks(3, mismatch_cached_plans, operator, [(70, 6, 5), other], [changes, changes])


@pytest.mark.parametrize(
    "operator, changes",
    [
        ("ag_gemm", [{"transport": "push"}, COPY_ENGINE]),
        ("gemm_rs", [{**FORWARD, "item_tiles": 1}, {**FORWARD, "item_tiles": 2}]),
        ("gemm_ar", [{**TWO_SHOT, "item_tiles": 1}, {**TWO_SHOT, "item_tiles": 2}]),
        ("gemm_ar", [{**ONE_SHOT, "split_k": 1}, {**ONE_SHOT, "split_k": 2}]),
        ("gemm_ar", [TWO_SHOT, ONE_SHOT]),
    ],
    ids=str,
)
def test_different_cached_configs_never_give_a_result(operator, changes):
    on_ranks(3, mismatch_cached_plans, operator, [(70, 6, 5), (70, 6, 5)], changes)


def call_again_after_timeout(operator, changes):
    """Rank 0 is late to an AG-GEMM, so rank 1 has no result; rank 1's next call, launched before it checks, is void."""
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
            patch.setattr(Workspace, "check", lambda self, in_call=True: None)  # so that it launches both calls
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
            # It may be a PeerFailedError: rank 1 reports its failure before its copies, which the host always makes.
            assert isinstance(error, PeerTimeoutError) and (error.operator, error.peer) == (operator, 1), repr(error)
        del group


@pytest.mark.parametrize("operator, changes", [("gemm_rs", {}), ("ag_gemm", COPY_ENGINE)], ids=str)
def test_call_after_a_timeout_sends_nothing(operator, changes):
    on_ranks(3, call_again_after_timeout, operator, changes)


def call_with_new_shape(operator):
    """Rank 0 waits in the consensus check of a shape that is new to it alone; the other ranks wait for its data."""
    with a_group() as group:
        cached, new = (Case(operator, FP32, rows, 4, 8, exact=True) for rows in (6, 7))
        cached.check(cached.run(group=group))
        dist.barrier()
        start = time.monotonic()
        with timeout(60.0):
            error = failure_of((new if dist.get_rank() == 0 else cached).call, group=group)
            again = failure_of(cached.call, group=group)
        assert time.monotonic() - start < 20.0, "the ranks waited for the timeout"
        # Every rank's error names both calls: the new one by its rows, and the cached one.
        assert type(error) is PlanMismatchError and type(again) is PlanMismatchError, (error, again)
        field = field_name(operator, "M")
        rows = [str(case.x.shape[0]) for case in (new, cached)]
        waits = "rank 0 waits in the consensus check of a new call"
        assert re.search(rf"{waits}, .*{field}={rows[0]}", str(error)), str(error)
        assert re.search(rf"rank [12] makes {operator}\(.*{field}={rows[1]}", str(error)), str(error)
        del group


@pytest.mark.parametrize("operator", OPERATORS)
def test_new_shape_on_one_rank_only(operator):
    on_ranks(3, call_with_new_shape, operator)


# ---- missing ranks ----


# Variants, and whether the shape of the call that rank 1 misses is cached.
LOST = [("ag_gemm", {}, True), ("gemm_rs", {}, True), ("gemm_ar", TWO_SHOT, True), ("gemm_ar", ONE_SHOT, True)]
LOST += [("ag_gemm", {}, False), ("ag_gemm", PIPELINED, True), ("gemm_rs", PIPELINED, True)]


def lose_rank_1(variants):
    calls = []
    for operator, changes, cached in variants:
        group = dist.new_group()  # one per variant: after a timeout a group does not wait again
        case, new = (Case(operator, FP32, rows, 4, 8, exact=True) for rows in (6, 7))
        config = config_for(case, **changes)
        for _ in range(2):
            case.check(case.run(group=group, config=config))
        calls.append((case, case if cached else new, {"group": group, "config": config}))
    survivors = dist.new_group([0, 2])
    tdkernels.set_timeout(TIMEOUT_S)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for case, late, options in calls:
        dist.barrier(survivors)  # without it the ranks drift apart, and on a loaded machine one times out on the other
        start = time.monotonic()
        errors.append(failure_of(late.call, **options))
        assert time.monotonic() - start < TIMEOUT_S + 5.0
        again = failure_of(case.call, **options)
        assert again is not None
        if late is case:
            assert str(again) == str(errors[-1])
    return errors


@pytest.mark.parametrize("variants", at_once(LOST), ids=str)
def test_killed_rank(variants):
    with fresh_ranks(3, grace_s=60.0) as pool, pytest.raises(RankError) as caught:
        pool.run(lose_rank_1, variants)
    assert isinstance(caught.value.exceptions[1], ChildProcessError)
    for rank in (0, 2):
        for (operator, changes, cached), error in zip(variants, caught.value.results[rank], strict=True):
            assert type(error) is PeerTimeoutError, f"{operator} {changes}: {error!r}"
            assert (error.operator, error.rank, error.timeout_s) == (operator, rank, TIMEOUT_S)
            # In two-shot mode rank 0 reduces the only tile: it waits for rank 1, while rank 2 waits for the sum.
            assert error.peer == 1 or (changes == TWO_SHOT and (rank, error.peer) == (2, 0))
            assert error.seen < error.expected
            assert (error.signal == "agreement") == (not cached)
            for part in (operator, f"rank {rank} waited", f"rank {error.peer}", "TDKERNELS_TIMEOUT_S"):
                assert part in str(error)


# ---- timeouts ----


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
