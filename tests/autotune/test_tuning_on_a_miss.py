"""Mode "on": a call without an entry tunes, once, and not in a capture."""

import logging

import pytest
import torch.distributed as dist

from tdkernels import autotune
from tdkernels.autotune import disk_cache, selection, tuner
from tdkernels.autotune.problem import gpu_name
from tdkernels.autotune.tunable import tunable
from tdkernels.symm.group import group_state
from tests.autotune.selection_support import (
    capture_log,
    case_of,
    check_run,
    config_of,
    count_calls,
    entry_of,
    problem_of,
    ship,
    tables_in,
    untuned_config,
)
from tests.autotune.support import replace_in
from tests.support.ranks import a_group, device, fresh_ranks, on_ranks


def check_tuning_on_a_miss(folder, expected):
    """Run two calls in mode "on"; ``expected`` is how often each of them tunes, or None."""
    with a_group() as group, tables_in(folder, "on"), count_calls(tuner, "tune_problem") as count:
        case = case_of("ag_gemm")
        counts = []
        for _ in range(2):
            before = count[0]
            case.check(case.run(group=group) if expected is None else {"output": case.call(group=group)})
            counts.append(count[0] - before)
        assert expected is None or counts == expected, counts
        [choice] = [c for (problem, _), c in group_state(group).choices.items() if problem == problem_of("ag_gemm")]
        assert choice.source == "cache" and choice.entry.ms > 0
        file = disk_cache.path("ag_gemm", gpu_name(device()))
        assert problem_of("ag_gemm") in {entry.problem for entry in disk_cache.load(file)}
        config = choice.config
        del group
    return config


def test_mode_on_tunes_once_and_later_processes_reuse_it(tmp_path):
    first = on_ranks(2, check_tuning_on_a_miss, tmp_path, [1, 0])
    with fresh_ranks(2) as pool:
        later = pool.run(check_tuning_on_a_miss, tmp_path, [0, 0])
    assert first == later == [first[0]] * 2


def check_when_tuning_happens(folder):
    tuned = config_of("ag_gemm", 3)
    near = tuple(2 * size for size in problem_of("ag_gemm").shape)
    with a_group() as group, tables_in(folder), count_calls(tuner, "tune_problem") as count:
        for mode in ("off", "cached"):
            with autotune.mode(mode):
                assert check_run("ag_gemm", group)[1] == "default"
        with autotune.mode("on"):
            check_run("ag_gemm", group, config=tuned)
            ship(folder, entry_of("ag_gemm", tuned))
            assert check_run("ag_gemm", group) == (tuned, "shipped")
            assert count == [0]
            ship(folder, entry_of("ag_gemm", tuned, near))
            assert check_run("ag_gemm", group)[1] == "cache"  # an entry of a near shape does not prevent tuning
            assert count == [1]
        with autotune.mode("on"):
            assert check_run("ag_gemm", group)[1] == "cache" and count == [1]
        del group


def test_only_mode_on_tunes_and_only_untuned_problems(tmp_path):
    on_ranks(2, check_when_tuning_happens, tmp_path)


def check_no_tuning_in_a_capture(folder):
    with a_group() as group, tables_in(folder, "on"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_capturing", lambda device: dist.get_rank() == 1)
        with count_calls(tuner, "tune_problem") as count:
            case = case_of("ag_gemm")
            case.check({"output": case.call(group=group)})
        assert count == [0] and not group_state(group).choices, "it is tuned at the next call outside a capture"
        del group


def test_no_rank_tunes_while_a_rank_captures(tmp_path):
    on_ranks(2, check_no_tuning_in_a_capture, tmp_path)


def check_failed_tuning(folder):
    """Check that after a tuning error the call runs the config that it would run without tuning."""
    op = tunable("ag_gemm")

    def operands(*_):
        raise MemoryError("no room")

    with a_group() as group, tables_in(folder, "on"), pytest.MonkeyPatch.context() as patch:
        replace_in(patch, op, "operands", operands)
        with capture_log(logging.WARNING) as warnings:
            assert check_run("ag_gemm", group) == (untuned_config("ag_gemm"), "default")
        messages = [record.getMessage() for record in warnings if "could not be tuned" in record.getMessage()]
        assert len(messages) == (dist.get_rank() == 0) and all("no room" in message for message in messages)
        del group


def test_call_runs_if_tuning_fails(tmp_path):
    on_ranks(2, check_failed_tuning, tmp_path)
