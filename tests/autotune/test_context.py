"""What surrounds a call must not change what is tuned, and what goes wrong on one rank must reach all."""

import math

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import AgGemmConfig, autotune
from tdkernels.autotune import on_demand, rounds, selection, tuner
from tdkernels.autotune.accuracy import Reference
from tdkernels.autotune.group_step import GroupStep
from tdkernels.autotune.tunable import tunable
from tdkernels.symm.group import group_state
from tests.autotune.entries import cache_in
from tests.support.dense_oracle import Case
from tests.support.ranks import a_group, device, on_ranks

FP32, BF16 = torch.float32, torch.bfloat16


def still_works(group):
    case = Case("ag_gemm", FP32, 16, 8, 8, exact=True)
    case.check(case.run(group=group))


def is_tuned_under_autocast(folder):
    with cache_in(folder), a_group() as group, pytest.MonkeyPatch.context() as patch:
        kinds = []
        errors = Reference.errors
        patch.setattr(Reference, "errors", lambda self, out: kinds.append(self.exact.dtype) or errors(self, out))
        with torch.autocast(device().type, BF16):
            result = autotune.tune("gemm_rs", 32, 32, 32, dtype=torch.float16, group=group)
        assert set(kinds) == {FP32}, "autocast has made the reference coarse"
        assert result.entry.plain_ms is not None
        assert not [trial for trial in result.trials if trial.reason is not None]


def test_autocast_does_not_reach_the_reference(tmp_path):
    on_ranks(2, is_tuned_under_autocast, tmp_path)


def is_used_under_inference_mode():
    with a_group() as group:
        case = Case("ag_gemm", FP32, 16, 8, 8, exact=True)
        with torch.inference_mode():
            tdkernels.ag_gemm(case.x.detach(), case.weight.detach(), group=group)
        tdkernels.set_timeout(33)  # which is written into a table that the call above has made
        try:
            case.check(case.run(group=group))
        finally:
            tdkernels.set_timeout(None)


def test_workspaces_made_under_inference_mode_can_be_used_after_it():
    on_ranks(2, is_used_under_inference_mode)


def has_a_caller_that_fails(folder):
    calls = []

    def fails(stage, done, total):
        calls.append(stage)
        raise RuntimeError("broken pipe")

    with cache_in(folder), a_group() as group:
        autotune.tune("ag_gemm", 32, 32, 16, dtype=FP32, group=group, on_progress=fails)
        assert len(calls) == (dist.get_rank() == 0), "told once, by rank 0"
        still_works(group)


def test_a_progress_callback_that_raises_is_not_told_again(tmp_path):
    on_ranks(2, has_a_caller_that_fails, tmp_path)


def cannot_look_up():
    def broken(*_):
        raise ZeroDivisionError("of rank 0 alone")

    with a_group() as group, autotune.mode("cached"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "look_up", broken)
        case = Case("ag_gemm", FP32, 16, 8, 8, exact=True)
        with pytest.raises(RuntimeError, match="rank 0 could not choose a config: ZeroDivisionError: of rank 0 alone"):
            case.call(group=group)
        patch.undo()
        still_works(group)


def test_a_rank_0_that_cannot_choose_says_so_on_all_ranks():
    on_ranks(2, cannot_look_up)


def cannot_say():
    with a_group() as group, autotune.mode("cached"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_demand, "_log_choice", lambda *_: 1 / 0)
        patch.setattr(on_demand._log, "exception", lambda *_: None)
        for _ in range(2):
            still_works(group)


def test_a_log_that_fails_costs_no_step():
    on_ranks(2, cannot_say)


def lies_otherwise():
    with a_group() as group, autotune.mode("cached"):
        x, weight = torch.randn(8, 16, device=device()), torch.randn(8, 16, device=device())
        if dist.get_rank() == 1:
            weight = weight.t().contiguous().t()
        with pytest.raises(ValueError, match='layout is "nk" on rank 0, "kn" on rank 1'):
            tdkernels.ag_gemm(x, weight, group=group)
        still_works(group)


def test_a_weight_that_lies_otherwise_on_one_rank_is_named():
    on_ranks(2, lies_otherwise)


def is_captured_first(folder):
    """A shape met in a capture, which must not tune, is tuned when it comes by outside."""
    tuned = []

    def tune_problem(op, problem, *rest, **options):
        tuned.append(problem.shape)
        raise tuner.TuningError("not now")

    with cache_in(folder), a_group() as group, autotune.mode("on"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "tune_problem", tune_problem)
        case = Case("ag_gemm", FP32, 16, 8, 8)
        patch.setattr(selection, "_capturing", lambda device: dist.get_rank() == 1)
        case.call(group=group)
        assert not tuned and not group_state(group).choices
        patch.setattr(selection, "_capturing", lambda device: False)
        case.call(group=group)
        assert len(tuned) == 1
        case.call(group=group)
        assert len(tuned) == 1, "a problem that cannot be tuned is not tried at every call"


def test_what_was_met_in_a_capture_is_tuned_later(tmp_path):
    on_ranks(2, is_captured_first, tmp_path)


def loses_a_device(folder):
    with cache_in(folder), a_group() as group, pytest.MonkeyPatch.context() as patch:
        op = tunable("ag_gemm")
        run = op.run

        def fails(operands, problem, group, config):
            if config.method == "fused" and dist.get_rank() == 1:
                raise RuntimeError("unspecified launch failure")
            return run(operands, problem, group, config)

        patch.setattr(type(op), "run", lambda self, *args: fails(*args))
        patch.setattr(tuner, "_CALL_LIMIT_S", 1.0)
        patch.setattr(GroupStep, "_quiet", lambda self: dist.get_rank() != 1)
        with pytest.raises(tuner.TuningError, match="a device is lost: rank"):
            autotune.tune("ag_gemm", 32, 32, 16, dtype=FP32, group=group)


def test_a_lost_device_ends_the_tuning_on_all_ranks(tmp_path):
    on_ranks(2, loses_a_device, tmp_path)


def turns_wrong_in_the_end(folder):
    with cache_in(folder), a_group() as group, pytest.MonkeyPatch.context() as patch:
        op = tunable("ag_gemm")
        run, turned = op.run, []
        final = tuner._Tuner._best_that_is_right

        def late(self, finalists, default):
            turned.append(min((t for t in finalists if t.reason is None), key=lambda t: t.ms).config)
            return final(self, finalists, default)

        def wrong(self, operands, problem, group, config):
            output = run(operands, problem, group, config)
            return output + 1 if config in turned else output

        patch.setattr(type(op), "run", wrong)
        patch.setattr(tuner._Tuner, "_best_that_is_right", late)
        patch.setitem(rounds.HOST_BOUND, device().type, math.inf)  # the fastest is to win
        result = autotune.tune("ag_gemm", 32, 32, 16, dtype=FP32, group=group)
        assert op.config_from_dict(result.entry.config) != turned[0]
        assert any(trial.config == turned[0] and "wrong" in trial.reason for trial in result.trials if trial.reason)


def test_a_winner_that_has_become_wrong_does_not_win(tmp_path):
    on_ranks(2, turns_wrong_in_the_end, tmp_path)


def has_too_little_memory(folder):
    with cache_in(folder), a_group() as group, pytest.MonkeyPatch.context() as patch:
        much = 1 << 60 if dist.get_rank() == 1 else 8
        patch.setattr(type(tunable("gemm_rs")), "reference_bytes", lambda self, problem: much)
        with pytest.raises(tuner.TuningError, match="memory for the reference: rank 1"):
            autotune.tune("gemm_rs", 32, 32, 32, dtype=FP32, group=group)
        still_works(group)


def test_too_little_memory_is_found_before_a_collective(tmp_path):
    on_ranks(2, has_too_little_memory, tmp_path)


def test_explain_fills_in_the_tiles_that_would_run():
    config = tdkernels.explain("ag_gemm", 64, 64, 64, dtype=FP32, world_size=2, config=AgGemmConfig()).config
    assert config.tiles is not None
