"""Tuning under autocast, inference mode and graph capture, and errors on one rank that must reach all ranks."""

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


def check_group_works(group):
    case = Case("ag_gemm", FP32, 16, 8, 8, exact=True)
    case.check(case.run(group=group))


def check_tuning_under_autocast(folder):
    with cache_in(folder), a_group() as group, pytest.MonkeyPatch.context() as patch:
        kinds = []
        errors = Reference.errors
        patch.setattr(Reference, "errors", lambda self, out: kinds.append(self.exact.dtype) or errors(self, out))
        with torch.autocast(device().type, BF16):
            result = autotune.tune("gemm_rs", 32, 32, 32, dtype=torch.float16, group=group)
        assert set(kinds) == {FP32}, "autocast must not lower the precision of the reference"
        assert result.entry.plain_ms is not None
        assert not [trial for trial in result.trials if trial.reason is not None]


def test_autocast_does_not_reach_the_reference(tmp_path):
    on_ranks(2, check_tuning_under_autocast, tmp_path)


def check_inference_mode():
    with a_group() as group:
        case = Case("ag_gemm", FP32, 16, 8, 8, exact=True)
        with torch.inference_mode():
            tdkernels.ag_gemm(case.x.detach(), case.weight.detach(), group=group)
        tdkernels.set_timeout(33)  # writes to a tensor that the call above has created
        try:
            case.check(case.run(group=group))
        finally:
            tdkernels.set_timeout(None)


def test_workspace_created_in_inference_mode_works_afterwards():
    on_ranks(2, check_inference_mode)


def check_failing_callback(folder):
    calls = []

    def fails(stage, done, total):
        calls.append(stage)
        raise RuntimeError("broken pipe")

    with cache_in(folder), a_group() as group:
        autotune.tune("ag_gemm", 32, 32, 16, dtype=FP32, group=group, on_progress=fails)
        assert len(calls) == (dist.get_rank() == 0), "called once, on rank 0"
        check_group_works(group)


def test_progress_callback_that_raises_is_not_called_again(tmp_path):
    on_ranks(2, check_failing_callback, tmp_path)


def check_lookup_error():
    def broken(*_):
        raise ZeroDivisionError("of rank 0 alone")

    with a_group() as group, autotune.mode("cached"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "look_up", broken)
        case = Case("ag_gemm", FP32, 16, 8, 8, exact=True)
        with pytest.raises(RuntimeError, match="rank 0 could not choose a config: ZeroDivisionError: of rank 0 alone"):
            case.call(group=group)
        patch.undo()
        check_group_works(group)


def test_lookup_error_on_rank_0_is_raised_on_all_ranks():
    on_ranks(2, check_lookup_error)


def check_log_error():
    with a_group() as group, autotune.mode("cached"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_demand, "_log_choice", lambda *_: 1 / 0)
        patch.setattr(on_demand._log, "exception", lambda *_: None)
        for _ in range(2):
            check_group_works(group)


def test_failing_log_does_not_break_a_call():
    on_ranks(2, check_log_error)


def check_layout_mismatch():
    with a_group() as group, autotune.mode("cached"):
        x, weight = torch.randn(8, 16, device=device()), torch.randn(8, 16, device=device())
        if dist.get_rank() == 1:
            weight = weight.t().contiguous().t()
        with pytest.raises(ValueError, match='layout is "nk" on rank 0, "kn" on rank 1'):
            tdkernels.ag_gemm(x, weight, group=group)
        check_group_works(group)


def test_layout_mismatch_between_ranks_is_reported():
    on_ranks(2, check_layout_mismatch)


def check_capture_then_tune(folder):
    """Check that a shape first called during a capture is not tuned then, but at the next call outside a capture."""
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
        assert len(tuned) == 1, "a problem that cannot be tuned is tried only once"


def test_shape_first_called_in_a_capture_is_tuned_later(tmp_path):
    on_ranks(2, check_capture_then_tune, tmp_path)


def check_device_loss(folder):
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


def test_lost_device_ends_tuning_on_all_ranks(tmp_path):
    on_ranks(2, check_device_loss, tmp_path)


def check_late_wrong_result(folder):
    with cache_in(folder), a_group() as group, pytest.MonkeyPatch.context() as patch:
        op = tunable("ag_gemm")
        run, broken = op.run, []
        final = tuner._Tuner._best_that_is_right

        def late(self, finalists, default):
            broken.append(min((t for t in finalists if t.reason is None), key=lambda t: t.ms).config)
            return final(self, finalists, default)

        def wrong(self, operands, problem, group, config):
            output = run(operands, problem, group, config)
            return output + 1 if config in broken else output

        patch.setattr(type(op), "run", wrong)
        patch.setattr(tuner._Tuner, "_best_that_is_right", late)
        patch.setitem(rounds.HOST_BOUND, device().type, math.inf)  # so that the fastest candidate wins
        result = autotune.tune("ag_gemm", 32, 32, 16, dtype=FP32, group=group)
        assert op.config_from_dict(result.entry.config) != broken[0]
        assert any(trial.config == broken[0] and "wrong" in trial.reason for trial in result.trials if trial.reason)


def test_winner_with_a_wrong_final_result_is_rejected(tmp_path):
    on_ranks(2, check_late_wrong_result, tmp_path)


def check_reference_memory(folder):
    with cache_in(folder), a_group() as group, pytest.MonkeyPatch.context() as patch:
        num_bytes = 1 << 60 if dist.get_rank() == 1 else 8
        patch.setattr(type(tunable("gemm_rs")), "reference_bytes", lambda self, problem: num_bytes)
        with pytest.raises(tuner.TuningError, match="memory for the reference: rank 1"):
            autotune.tune("gemm_rs", 32, 32, 32, dtype=FP32, group=group)
        check_group_works(group)


def test_insufficient_memory_is_detected_before_a_collective(tmp_path):
    on_ranks(2, check_reference_memory, tmp_path)


def test_explain_fills_in_tiles():
    config = tdkernels.explain("ag_gemm", 64, 64, 64, dtype=FP32, world_size=2, config=AgGemmConfig()).config
    assert config.tiles is not None
