"""Errors after a failure: no call returns wrong results, and each error names the call that failed.

On a GPU the host runs ahead of the kernels, so it may launch later calls before it can see a failure. On CPU ranks a
launch has finished when the call returns; there ``host_ahead`` suppresses the check for recorded failures.
"""

import contextlib
import multiprocessing
import os
import pickle
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError
from tdkernels import lang as td
from tdkernels.lang import context
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.experts.dispatch import launch as ep_launch
from tdkernels.ops.experts.dispatch.counted import CountedRouting
from tdkernels.ops.experts.tp_moe import routing
from tdkernels.symm import get_workspace
from tdkernels.symm.failure import DeviceFailure
from tdkernels.symm.group import group_state
from tdkernels.symm.workspace import Workspace
from tests.ops.dense.cases import config_for
from tests.support.dense_oracle import Case
from tests.support.ranks import DEVICE, a_group, device, fresh_ranks, on_ranks
from tests.test_protocol import failure_of, timeout

FP32 = torch.float32
ON_CPU = DEVICE != "cuda"


@contextlib.contextmanager
def host_ahead():
    """Suppress the check for host errors and failures of earlier launches, as if these were still queued."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "check", lambda self, in_call=True: None)
        yield


def ones(rows=2, value=None, where=None):
    """Return operands of ``ag_gemm`` for which each element of y is 4 * ``value`` of the rank that owns the row."""
    value = dist.get_rank() + 1.0 if value is None else value
    where = where or device()
    return torch.full((rows, 4), value, device=where), torch.ones(3, 4, device=where)


# ---- recreated groups ----


def _new_world(store, rank, world_size):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))


def recreate_world():
    """Rank 1 raises in the first call; both ranks recreate the world as in the README and repeat the call correctly."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    # Both worlds share one store, as with a launcher whose store outlives them; gloo's own keys get a prefix per world.
    port = int(os.environ["TEST_STORE_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for world in range(3):
        _new_world(dist.PrefixStore(f"gloo{world}", store), rank, 2)
        x, weight = ones()
        with timeout(1.0 if world < 2 else 60.0):
            wrong = rank == 1 and world < 2
            error = failure_of(tdkernels.ag_gemm, x.double() if wrong else x, weight)
            if world < 2:
                assert isinstance(error, TypeError if wrong else PeerTimeoutError), repr(error)
            else:
                assert error is None, repr(error)
                y = tdkernels.ag_gemm(x, weight)
                assert torch.equal(y[:, 0], torch.tensor([4.0, 4.0, 8.0, 8.0], device=y.device)), y
        dist.destroy_process_group()
    _new_world(dist.PrefixStore("last", store), rank, 2)  # closed by the pool


@pytest.mark.skipif(not ON_CPU, reason="the pool's ranks have a world on their GPUs")
def test_recreated_world_after_an_error(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TEST_STORE_PORT", str(store.port))
    with fresh_ranks(2) as pool:
        pool.run(recreate_world)


def _surviving_rank(ports, results):
    """Run as rank 0 in two worlds; rank 1 dies between them."""
    x, weight = ones(value=1.0, where="cpu")
    for world, port in enumerate(ports):
        _new_world(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 0, 2)
        for _ in range(2):
            y = tdkernels.ag_gemm(x, weight)
        results.put((world, y[:, 0].tolist()))
        if world == 0:
            tdkernels.set_timeout(1.0)
            results.put(("lost", type(failure_of(tdkernels.ag_gemm, x, weight)).__name__))
            tdkernels.set_timeout(60.0)
        dist.destroy_process_group()


def _dying_or_replacement_rank(port, dies):
    _new_world(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), 1, 2)
    x, weight = ones(value=2.0 + (not dies), where="cpu")
    for _ in range(2):
        tdkernels.ag_gemm(x, weight)
    if dies:
        os._exit(0)
    dist.destroy_process_group()


@pytest.mark.skipif(not ON_CPU, reason="starts its own processes on the CPU")
def test_new_process_replaces_a_dead_rank():
    spawn = multiprocessing.get_context("spawn")
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    ports, results = [store.port for store in stores], spawn.Queue()
    survivor = spawn.Process(target=_surviving_rank, args=(ports, results), daemon=True)
    dead = spawn.Process(target=_dying_or_replacement_rank, args=(ports[0], True), daemon=True)
    new = spawn.Process(target=_dying_or_replacement_rank, args=(ports[1], False), daemon=True)
    for process in (survivor, dead, new):
        process.start()
    assert results.get(timeout=120) == (0, [4.0, 4.0, 8.0, 8.0])
    assert results.get(timeout=60) == ("lost", "PeerTimeoutError")
    assert results.get(timeout=60) == (1, [4.0, 4.0, 12.0, 12.0])
    for process in (survivor, dead, new):
        process.join(60)
        assert process.exitcode == 0


# ---- errors outlive the buffer of their workspace, and name their call ----


def dispatch(group, ids, experts=6, rows=2, **options):
    x = torch.ones(rows, 8, device=device())
    ids = torch.tensor(ids, device=device()).expand(rows, -1)
    return tdkernels.ep_dispatch(x, ids, num_experts=experts, group=group, **options)


def grow_after_host_error():
    with a_group() as group:
        dispatch(group, [1, 5], max_tokens=64)
        with host_ahead():
            wrong = [1, 77] if dist.get_rank() == 0 else [1, 5]
            dispatch(group, wrong, max_tokens=64)  # delivers no rows
            counts = get_workspace(group, device(), "ep_counts", across_nodes=True)
            before = counts.buffer
            dispatch(group, [1, 599], experts=600, max_tokens=64)
            assert counts.buffer is not before, "the workspace has not grown"
        error = failure_of(tdkernels.synchronize)
        assert type(error) is ValueError, repr(error)
        assert "ep_dispatch: topk_ids of rank 0 are out of range" in str(error)
        dispatch(group, [1, 5], max_tokens=64)  # the group is still usable
        del group


def test_host_error_survives_workspace_growth():
    on_ranks(2, grow_after_host_error)


def grow_after_failure(real_check):
    """Two cached shapes disagree; then both ranks make a larger call, which grows the workspace."""
    rank = dist.get_rank()
    with a_group() as group:
        small, other, large = (Case("ag_gemm", FP32, rows, 4, 8, exact=True) for rows in (5, 6, 90))
        config = config_for(small, transport="push")
        for _ in range(2):
            for case in (small, other):
                case.check(case.run(group=group, config=config))
        dist.barrier()
        end_use = Workspace._end_use
        with host_ahead(), pytest.MonkeyPatch.context() as patch, timeout(20.0):
            failure_of((small if rank == 0 else other).call, group=group, config=config)
            if real_check:  # the host sees the failure when it synchronizes in order to grow

                def checks(self):
                    with pytest.MonkeyPatch.context() as inner:
                        inner.setattr(Workspace, "check", CHECK)
                        end_use(self)

                patch.setattr(Workspace, "_end_use", checks)
            start = time.monotonic()
            grown = failure_of(large.call, group=group, config=config)
            assert time.monotonic() - start < 15.0
        assert (type(grown) is PlanMismatchError) == real_check, repr(grown)
        workspace = get_workspace(group, device(), "ag_gemm", across_nodes=True)
        for _ in range(2):
            error = failure_of(workspace.check)
            assert type(error) is PlanMismatchError and "M/W=5" in str(error) and "M/W=6" in str(error), repr(error)
        del group


CHECK = Workspace.check


@pytest.mark.parametrize("real_check", [False, True])
def test_failure_survives_workspace_growth(real_check):
    on_ranks(2, grow_after_failure, real_check)


def one_rank_fails_before_growing():
    """Only rank 0 has a failure to report when all ranks grow; the other ranks report it without a timeout."""
    rank = dist.get_rank()
    with a_group() as group:
        small, large = (Case("ag_gemm", FP32, rows, 4, 8, exact=True) for rows in (5, 90))
        config = config_for(small, transport="push")
        small.check(small.run(group=group, config=config))
        workspace = get_workspace(group, device(), "ag_gemm", across_nodes=True)
        end_use = Workspace._end_use

        def fails(self):
            if rank == 0:
                self.group.break_off(RuntimeError("a failure of rank 0"))
            end_use(self)

        with pytest.MonkeyPatch.context() as patch, timeout(60.0):
            patch.setattr(Workspace, "_end_use", fails)
            start = time.monotonic()
            error = failure_of(large.call, group=group, config=config)
            assert time.monotonic() - start < 20.0
        expected = "a failure of rank 0" if rank == 0 else "rank 0 has failed: RuntimeError: a failure of rank 0"
        assert type(error) is RuntimeError and expected in str(error), repr(error)
        again = failure_of(workspace.check)
        assert str(again) == str(error), repr(again)
        del group


def test_failure_found_while_growing_is_reported_on_all_ranks():
    on_ranks(3, one_rank_fails_before_growing)


def check_call_in_host_error(captured):
    rank = dist.get_rank()
    with a_group() as group:
        for rows in (3, 2):
            dispatch(group, [1, 5], rows=rows, max_tokens=64)
        ids = torch.tensor([[6, 2]] * 3, device=device())  # kept alive: the error shows its values
        x = torch.ones(3, 8, device=device())
        with host_ahead():
            if rank == 0:
                tdkernels.ep_dispatch(x, ids, num_experts=6, max_tokens=64, group=group)
            else:
                dispatch(group, [1, 5], rows=3, max_tokens=64)
            tdkernels.all_to_all(x, torch.tensor([2, 1], device=device()), max_tokens=64, group=group)
            dispatch(group, [0, 5], rows=2, max_tokens=64)
        error = failure_of(tdkernels.synchronize)
        text = "ep_dispatch: topk_ids of rank 0 are out of range: each must be from 0 to 5, or -1 for none"
        assert type(error) is ValueError and str(error).startswith(text), repr(error)
        assert str(error)[len(text) :] == ("; here topk_ids [3, 2] has 6" if rank == 0 else ""), str(error)
        del group


def test_host_error_names_the_operands_of_its_call():
    on_ranks(2, check_call_in_host_error, False)


def raise_host_error_in_later_call(operator):
    """The host of rank 0 sees the error about wrong ids one call earlier than rank 1, and continues to make calls.

    So rank 0 skips a call that rank 1 makes: no later call may return the result of a different call.
    """
    call = {"ep_dispatch": _dispatch_value, "low-latency": _dispatch_low_latency, "tp_moe": _tp_moe_value}[operator]
    rank, errors = dist.get_rank(), []
    with a_group() as group, timeout(3.0):
        for _ in range(2):
            call(group, 1.0)()
        with host_ahead():
            call(group, 2.0, wrong=True)
            if not ON_CPU:
                torch.cuda.synchronize()
            dist.barrier()
        with host_ahead() if rank == 1 else contextlib.nullcontext():
            errors.append(failure_of(call, group, 3.0))
        for value in (4.0, 5.0, 6.0):
            errors.append(failure_of(_call_and_check, call, group, value))
        errors = [_without_frames(error) for error in errors if error is not None]
        del group
    if rank == 0:
        assert type(errors[0]) is ValueError and "topk_ids" in str(errors[0]) and len(errors) == 4, errors
        for error in errors[1:]:
            assert type(error) is RuntimeError and "in place of a later call" in str(error), errors
            assert "topk_ids" in str(error), errors
    else:
        assert isinstance(errors[-1], PeerTimeoutError), errors


def _call_and_check(call, group, value):
    call(group, value)()


def _rows_with_value(value, wrong):
    ids = torch.tensor([[0, 77 if wrong else 5]] * 2, device=device())
    return torch.full((2, 8), value, device=device()), ids


def _dispatch_value(group, value, wrong=False, **bounds):
    """Make a dispatch; return a function that checks its result."""
    x, ids = _rows_with_value(value, wrong)
    recv, _ = tdkernels.ep_dispatch(x, ids, num_experts=6, group=group, **(bounds or {"max_tokens": 64}))

    def check():
        tdkernels.synchronize()
        rows = recv.x[: int(recv.splits.sum())]
        assert torch.equal(rows, torch.full_like(rows, value)), "a wrong result"

    return check


def _dispatch_low_latency(group, value, wrong=False):
    return _dispatch_value(group, value, wrong, max_tokens_per_rank=4)


def _tp_moe_value(group, value, wrong=False):
    x, ids = _rows_with_value(value, wrong)
    weights, w_gate_up = torch.ones(2, 2, device=device()), torch.ones(6, 4, 8, device=device())
    y = tdkernels.tp_moe(x, ids, weights, w_gate_up, torch.ones(6, 8, 4, device=device()), activation=None, group=group)

    def check():
        tdkernels.synchronize()
        assert torch.equal(y, torch.full_like(y, 2 * dist.get_world_size() * 4 * 8 * value)), "a wrong result"

    return check


@pytest.mark.parametrize("operator", ["ep_dispatch", "low-latency", "tp_moe"])
def test_host_error_raised_in_a_later_call_breaks_the_group(operator):
    on_ranks(2, raise_host_error_in_later_call, operator)


def raise_while_receiving():
    """Rank 1 runs out of memory when it receives a dispatch; its next call must not be paired with another one."""
    rank = dist.get_rank()
    with a_group() as group, timeout(3.0), torch.no_grad():
        errors = []
        for number in range(5):
            x, ids = _rows_with_value(float(number), False)
            sent = None
            try:
                sent = tdkernels.ep_dispatch_send(x, ids, num_experts=6, max_tokens=64, group=group)
                with pytest.MonkeyPatch.context() as patch:
                    if rank == 1 and number == 2:
                        patch.setattr(ep_launch, "launch_dispatch", _no_memory)
                    recv, _ = sent.receive()
                tdkernels.synchronize()
                rows = recv.x[: int(recv.splits.sum())]
                assert torch.equal(rows, torch.full_like(rows, float(number))), "a wrong result"
            except (RuntimeError, PeerTimeoutError) as error:
                errors.append(_without_frames(error))
        del group
    if rank == 1:
        assert isinstance(errors[0], torch.OutOfMemoryError) and len(errors) == 3, errors
        for error in errors[1:]:
            assert type(error) is RuntimeError and "ep_dispatch: OutOfMemoryError in the middle" in str(error), error
    else:
        assert isinstance(errors[-1], PeerTimeoutError), errors


def test_an_exception_while_receiving_breaks_the_group():
    on_ranks(2, raise_while_receiving)


# ---- exceptions in the middle of a call ----


class Interrupt(Exception):
    pass


def _without_frames(error):
    """Return a copy of ``error``; the frames of the original keep the group alive, and later tests would report it."""
    copy = pickle.loads(pickle.dumps(error))
    for link in (error, error.__cause__, error.__context__):
        if link is not None:
            link.__traceback__ = None
    return copy


def _notify_and_raise(notify, *args, **kwargs):
    notify(*args, **kwargs)
    raise Interrupt("a signal handler")


def raise_in_kernel():
    """An exception ends a kernel of rank 1 after it has sent part of its data; the caller continues."""
    rank = dist.get_rank()
    with a_group() as group, timeout(3.0):
        outcomes = []
        for number in range(6):
            x, weight = ones(value=float(number + 1))
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1 and number == 2:
                    patch.setattr(td, "notify", partial(_notify_and_raise, td.notify))
                try:
                    y = tdkernels.ag_gemm(x, weight, group=group, config=tdkernels.AgGemmConfig(transport="push"))
                    assert torch.equal(y, torch.full_like(y, 4.0 * (number + 1))), f"call {number} is wrong: {y}"
                    outcomes.append(None)  # correct
                except Exception as error:
                    outcomes.append(_without_frames(error))
        del group
    assert outcomes[:2] == [None, None]
    if rank == 1:
        assert "Interrupt" in repr(outcomes[2])  # the interpreter wraps it
        for error in outcomes[3:]:
            assert type(error) is RuntimeError and "in the middle of a call on rank 1: Interrupt" in str(error), error
    else:
        assert all(isinstance(error, PeerTimeoutError) for error in outcomes[3:]), outcomes


@pytest.mark.skipif(not ON_CPU, reason="an exception cannot end a kernel on a GPU")
def test_an_exception_in_a_kernel_breaks_the_group():
    on_ranks(2, raise_in_kernel)


def _operands():
    ids, weights = torch.tensor([[0, 1]] * 4, device=device()), torch.ones(4, 2, device=device())
    x, w_gate_up, w_down = (torch.ones(*shape, device=device()) for shape in ((4, 8), (2, 8, 8), (2, 8, 4)))
    return x, ids, weights, w_gate_up, w_down


def _compiled_tp_moe(group):
    return torch.ops.tdkernels.tp_moe(*_operands(), "swiglu", False, group.group_name, "")[0]


def _weight_gradient(group):
    recv, handle = dispatch(group, [1, 5])
    weights = torch.ones(2, 2, device=device(), requires_grad=True)
    tdkernels.ep_combine(recv.x, handle, weights, group=group).sum().backward()
    return weights.grad


def _no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("not this much")


_combine = CountedRouting.combine


def _no_memory_for_row_numbers(*args, row_numbers=None, **kwargs):
    return _combine(*args, **kwargs) if row_numbers is None else _no_memory()


CALLS = {  # call; the function that runs out of memory in it, after its first launch
    "ep_dispatch": (lambda group: dispatch(group, [1, 5])[0].x, ep_launch, "prepare_dispatch", _no_memory),
    "ep_combine backward": (_weight_gradient, CountedRouting, "combine", _no_memory_for_row_numbers),
    "tp_moe": (lambda group: tdkernels.tp_moe(*_operands(), group=group), routing, "_tile", _no_memory),
    "compiled tp_moe": (_compiled_tp_moe, routing, "_tile", _no_memory),
}


def raise_between_launches(operator):
    """Rank 1 runs out of memory for an output after the first launch of a call has sent data."""
    call, where, name, fails = CALLS[operator]
    with a_group() as group:
        expected = [call(group) for _ in range(2)][-1]
        dist.barrier()
        errors = []
        with timeout(3.0):
            for number in range(3):
                with pytest.MonkeyPatch.context() as patch:
                    if dist.get_rank() == 1 and number == 0:
                        patch.setattr(where, name, fails)
                    try:
                        result = call(group)
                        tdkernels.synchronize()  # on a GPU this call raises the error
                        assert torch.equal(result, expected), "a wrong result"
                    except (RuntimeError, ValueError) as error:
                        errors.append(_without_frames(error))
        if dist.get_rank() == 1:
            assert isinstance(errors[0], torch.OutOfMemoryError) and len(errors) == 3, errors
            for error in errors[1:]:
                assert type(error) is RuntimeError and "OutOfMemoryError in the middle of a call" in str(error), error
        else:
            assert isinstance(errors[-1], PeerTimeoutError), errors
        del group


@pytest.mark.parametrize("operator", list(CALLS))
def test_an_exception_between_launches_breaks_the_group(operator):
    on_ranks(2, raise_between_launches, operator)


# ---- plan ids ----


def use_plan_ids_256_apart():
    """Two shapes whose plan ids differ by 256, which would be equal modulo 8 bits."""
    with a_group() as group:
        cases = [Case("ag_gemm", FP32, rows, 3, 7, exact=True) for rows in (5, 6)]
        config = config_for(cases[0], transport="push")
        workspace = get_workspace(group, device(), "ag_gemm", across_nodes=True)
        cases[0].check(cases[0].run(group=group, config=config))
        for i in range(255):
            workspace.prepare("ag_gemm", {"i": i}, 1, 1)
        cases[1].check(cases[1].run(group=group, config=config))
        cases[0].check(cases[0].run(group=group, config=config))
        dist.barrier()
        with timeout(20.0):
            error = failure_of(cases[dist.get_rank()].call, group=group, config=config)
        assert type(error) is PlanMismatchError, repr(error)
        del group


def test_plan_ids_have_more_than_eight_bits():
    on_ranks(2, use_plan_ids_256_apart)


def exhaust_plan_ids():
    with a_group() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "max_plans", 4)
        cases = [Case("gemm_rs", FP32, rows, 3, 7, exact=True, seed=rows) for rows in range(4, 24, 2)]
        for _ in range(2):
            for case in cases:
                case.check(case.run(group=group, config=config_for(case, transport="forward")))
        workspace = get_workspace(group, device(), "gemm_rs")
        assert len(workspace._plans) <= 4
        error = failure_of(cases[dist.get_rank() - 2].call, group=group, config=config_for(cases[0]))
        assert error is not None, "ranks with different shapes have to disagree"
        del group


def test_exhausted_plan_ids_are_reassigned():
    on_ranks(2, exhaust_plan_ids)


# ---- several groups on a device ----


def use_missing_result_of_another_group():
    """Rank 0 is missing in group A; rank 1 passes the missing result to group B before it checks for errors."""
    rank = dist.get_rank()
    with a_group([0, 1]) as first, a_group([1, 2]) as second:
        if rank < 2:
            for _ in range(2):
                tdkernels.ag_gemm(*ones(), group=first)
        if rank > 0:
            for _ in range(2):
                tdkernels.ag_gemm(*ones(rows=4), group=second)
        dist.barrier()
        config = tdkernels.AgGemmConfig(transport="push")
        if rank == 1:
            with host_ahead(), timeout(0.5):
                y = tdkernels.ag_gemm(*ones(), group=first)
                tdkernels.ag_gemm(y.repeat(1, 2)[:, :4].contiguous(), ones()[1], group=second)
            error = failure_of(tdkernels.synchronize)
            assert isinstance(error, PeerTimeoutError) and error.peer == 0, repr(error)
            errors = [failure_of(tdkernels.ag_gemm, *ones(rows=4), group=group) for group in (first, second)]
            assert isinstance(errors[0], PeerTimeoutError), repr(errors)
            assert type(errors[1]) is RuntimeError and "after another group had failed" in str(errors[1]), repr(errors)
        elif rank == 2:
            with timeout(2.0):
                error = failure_of(tdkernels.ag_gemm, *ones(rows=4), group=second)
            assert isinstance(error, PeerTimeoutError) and error.peer == 0, repr(error)  # rank 0 of that group
        del config
        dist.barrier()
        # A group without launches after the failure is still usable.
        y = tdkernels.ag_gemm(*ones())
        assert torch.equal(y[::2, 0].cpu(), torch.tensor([4.0, 8.0, 12.0]))
        del first, second


def test_missing_result_of_one_group_is_not_sent_by_another():
    on_ranks(3, use_missing_result_of_another_group)


# ---- concurrent launches of one workspace ----


def detect_concurrent_launch():
    with a_group() as group:
        x, weight = ones()
        config = tdkernels.AgGemmConfig(transport="push")
        for _ in range(2):
            tdkernels.ag_gemm(x, weight, group=group, config=config)
        workspace = get_workspace(group, device(), "ag_gemm", across_nodes=True)
        workspace.state[context.STATE_STARTED.value] = 3  # the value while programs of another launch run
        error = failure_of(tdkernels.ag_gemm, x, weight, group=group, config=config)
        assert type(error) is RuntimeError and "in flight together" in str(error), repr(error)
        del group


def test_concurrent_launches_are_reported():
    on_ranks(2, detect_concurrent_launch)


# ---- the reported error is the cause ----


def raise_during_copies():
    """An exception between the copies of a gather is raised as it is, not replaced by the error of later calls."""
    with a_group() as group, timeout(5.0):
        x = torch.full((6, 4), dist.get_rank() + 1.0, device=device())
        config = tdkernels.CollectiveConfig(exchange="copy_engine")
        for _ in range(2):
            tdkernels.all_gather(x, group=group, config=config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AsyncAllGather, "wait", _no_memory)
            with pytest.raises(torch.OutOfMemoryError, match="not this much") as caught:
                tdkernels.all_gather(x, group=group, config=config)
        del caught
        again = failure_of(tdkernels.all_gather, x, group=group, config=config)
        assert type(again) is RuntimeError and "OutOfMemoryError in the middle of a call" in str(again), repr(again)
        del group


def test_exception_during_copies_is_raised_unchanged():
    on_ranks(2, raise_during_copies)


def report_old_and_new_failure():
    """Only a failure that was not reported before is the cause of void launches."""
    device_failure = DeviceFailure(torch.device("cpu"))
    old, new, void = (SimpleNamespace(error=None, is_void=False, read=lambda source: None) for _ in range(3))
    old.error = RuntimeError("reported long ago")
    causes = []
    new.read = lambda source: setattr(new, "error", RuntimeError("just now"))
    void.is_void, void.read = True, causes.append
    device_failure.failures = [void, old, new]
    assert str(device_failure.report()) == "just now" and [str(cause) for cause in causes] == ["just now"]


def test_reported_failure_is_not_the_cause_of_a_later_one():
    report_old_and_new_failure()


def check_store_keys():
    with a_group() as group:
        state = group_state(group)
        for turn in range(3):
            state.exchange("op", str(turn))
        dist.barrier()
        before = state._store.num_keys()
        for turn in range(20):
            state.exchange("op", str(turn))
        dist.barrier()
        assert state._store.num_keys() <= before, "each consensus check leaves keys in the store"
        del group, state


def test_consensus_checks_leave_no_keys_in_the_store():
    on_ranks(2, check_store_keys)
