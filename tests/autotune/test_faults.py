"""Fault injection in the tuner: a candidate that fails on any rank is eliminated and corrupts no state."""

import re
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tdkernels.autotune import TuningError, disk_cache, tune, tuner
from tdkernels.autotune.group_step import GroupStep
from tdkernels.autotune.problem import gpu_name
from tdkernels.autotune.tunable import tunable
from tdkernels.symm.group import GroupState, group_state
from tests.autotune.entries import cache_in
from tests.autotune.support import (
    CALL_LIMIT_S,
    FP32,
    SHAPE,
    candidates,
    config_of,
    equal_on_ranks,
    problem_of,
    replace_in,
    state_unchanged,
)
from tests.support.ranks import a_group, device, on_ranks


def raises_before(real, *call):
    raise RuntimeError("out of luck\nand more")


def raises_after(real, *call):
    real(*call)
    raise RuntimeError("out of luck")


def one_element_off(real, *call):
    output = real(*call)
    output[-1, -1] += 100
    return output


def all_nan(real, *call):
    return real(*call).fill_(torch.nan)


def one_nan(real, *call):
    output = real(*call)
    output[0, 0] = torch.nan
    return output


def wrong_shape(real, *call):
    return real(*call)[:-1]


def wrong_dtype(real, *call):
    return real(*call).double()


def no_tensor(real, *call):
    real(*call)


def does_not_launch(real, operands, problem, group, config):
    x, weight = operands
    return x.new_zeros(group.size() * x.shape[0], weight.shape[0])


def launches_late(real, *call):
    time.sleep(2 * CALL_LIMIT_S)
    return real(*call)


def check_fault(folder, fault, reason, *, culprit, calls_before=0, of="bad"):
    """Inject ``fault`` into candidates, and check that they are eliminated on all ranks.

    Args:
        culprit: The rank that fails, or None for every rank.
        calls_before: Number of correct calls of these candidates before the fault.
        of: Which candidates fail: "bad", "default", "plain" or "fused" (all but "plain").
    """
    with a_group() as group, cache_in(folder), pytest.MonkeyPatch.context() as patch, state_unchanged(group):
        op = tunable("ag_gemm")
        bad, good = config_of(op, 1), config_of(op, 3)
        default, plain = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain()
        failing = {"bad": [bad], "default": [default], "plain": [plain], "fused": [default, bad, good]}[of]
        real, count = op.run, [0]

        def run(operands, problem, group, config):
            if config in failing and culprit in (None, dist.get_rank()):
                count[0] += 1
                if count[0] > calls_before:
                    return fault(real, operands, problem, group, config)
            return real(operands, problem, group, config)

        patch.setattr(tuner, "_CALL_LIMIT_S", CALL_LIMIT_S)
        with candidates(bad, good, run=run):
            result = tune("ag_gemm", *SHAPE, dtype=FP32, group=group)

        reasons = {trial.config: trial.reason for trial in result.trials}
        assert reasons.keys() == {default, plain, bad, good}
        failed = {config for config, why in reasons.items() if why is not None}
        assert failed == set(failing), reasons
        for config in failing:
            assert re.search(reason, reasons[config]) and "\n" not in reasons[config], reasons[config]
            assert any(text.startswith(f"rejected: {config}") for text in result.log), result.log
        assert result.trials[-1].config in failing and result.trials[-1].samples == []
        assert op.config_from_dict(result.entry.config) not in failing
        assert (result.entry.plain_ms is None) == (plain in failing)
        assert (result.entry.default_ms is None) == (default in failing)
        del group
    return result.entry, reasons


FAULTS = {
    "raises before it launches": (raises_before, "rank 1.*"),
    "raises after it has launched": (raises_after, "^rank 1: RuntimeError: out of luck$"),
    "one element off": (one_element_off, "^rank 1: ArithmeticError: wrong: errors"),
    "all NaN": (all_nan, "^rank 1: ArithmeticError: wrong: errors"),
    "one NaN": (one_nan, "^rank 1: ArithmeticError: wrong: errors"),
    "wrong shape": (wrong_shape, r"^rank 1: ArithmeticError: wrong: torch.float32 \[47, 24\]"),
    "wrong dtype": (wrong_dtype, r"^rank 1: ArithmeticError: wrong: torch.float64 \[48, 24\]"),
    "no tensor": (no_tensor, "^rank 1: AttributeError"),
    "does not launch": (does_not_launch, "^rank 0: PeerTimeoutError: .*rank 1"),
    "launches late": (launches_late, "^rank 0: PeerTimeoutError: .*rank 1"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_failure_on_one_rank_eliminates_on_all_ranks(tmp_path, what):
    equal_on_ranks(on_ranks(2, check_fault, tmp_path, *FAULTS[what], culprit=1))


@pytest.mark.parametrize("what", ["raises before it launches", "does not launch"])
def test_first_of_three_ranks_fails(tmp_path, what):
    fault, _ = FAULTS[what]
    equal_on_ranks(on_ranks(3, check_fault_on_three_ranks, tmp_path, fault))


def check_fault_on_three_ranks(folder, fault):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "CALL_LIMIT_S", 1.5)  # three ranks may share two cores
        return check_fault(folder, fault, "^rank ", culprit=0)


@pytest.mark.parametrize(
    "fault", [raises_before, raises_after, does_not_launch, launches_late], ids=lambda fault: fault.__name__
)
def test_failure_in_the_timing_phase_only(tmp_path, fault):
    # The peers have launched by then and wait in a kernel, not in a consensus check.
    results = on_ranks(2, check_fault, tmp_path, fault, "rank 1", culprit=1, calls_before=1)
    _, reasons = equal_on_ranks(results)
    [reason] = [reason for reason in reasons.values() if reason]
    assert fault is raises_after or "PeerTimeoutError" in reason


def check_poison_between_candidates(folder):
    """Check that a candidate fails if it writes nothing and returns the output of the previous candidate."""
    op, outputs, fresh = tunable("ag_gemm"), [], []
    lazy, careful = config_of(op, 1), config_of(op, 3)

    def run(operands, problem, group, config):
        if config == lazy:
            return outputs[-1]
        if config == careful and not fresh:
            for workspace in group_state(group).workspaces.values():
                data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :]
                fresh.append(bool((data == 0xFF).all()))
            dist.barrier(group)  # a peer that continues would write to the buffer that is checked here
        outputs.append(type(op).run(op, operands, problem, group, config))
        return outputs[-1]

    with cache_in(folder), candidates(careful, lazy, run=run):
        result = tune("ag_gemm", *SHAPE, dtype=FP32)
    reasons = {trial.config: trial.reason for trial in result.trials}
    assert reasons.pop(lazy, None) and not any(reasons.values()), reasons
    assert fresh and all(fresh), "the buffer still holds data of the previous candidate"


def test_memory_is_poisoned_between_candidates(tmp_path):
    on_ranks(2, check_poison_between_candidates, tmp_path)


def check_poison_after_reference(folder):
    """Check that the first candidate fails if it returns the memory of the reference's result."""
    op, outputs = tunable("ag_gemm"), []
    default = op.default(problem_of("ag_gemm", SHAPE), device())

    def reference(operands, problem, group):
        output = type(op).reference(op, operands, problem, group)
        if output.dtype == FP32:
            outputs.append(output)
        return output

    def run(operands, problem, group, config):
        return outputs[0] if config == default else type(op).run(op, operands, problem, group, config)

    with cache_in(folder), candidates(config_of(op, 3), reference=reference, run=run):
        result = tune("ag_gemm", *SHAPE, dtype=FP32)
    [reason] = [trial.reason for trial in result.trials if trial.config == default]
    assert reason is not None and "wrong" in reason, "the candidate passed"


def test_memory_of_the_reference_is_poisoned(tmp_path):
    on_ranks(2, check_poison_after_reference, tmp_path)


def check_order_of_poison(folder):
    """Check that fills finish before the next exchange: a peer that continues writes to this rank's memory."""
    steps = []

    def recording(step, real):
        def wrapper(*args):
            steps.append(step)
            return real(*args)

        return wrapper

    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "synchronize", recording("wait for the device", tuner.synchronize))
        for owner, name in ((tuner._Tuner, "_poison"), (GroupState, "exchange")):
            patch.setattr(owner, name, recording(name, getattr(owner, name)))
        with candidates(config_of(tunable("ag_gemm"), 3)):
            tune("ag_gemm", *SHAPE, dtype=FP32)
    assert steps.count("_poison") == 4, "once per candidate, and once for the winner"
    for number, step in enumerate(steps):
        if step == "_poison":
            assert steps[number + 1] == "wait for the device", "the peers' next step may begin before the fills"


def test_poison_completes_before_any_rank_continues(tmp_path):
    on_ranks(2, check_order_of_poison, tmp_path)


def test_torch_baseline_wins_if_all_other_candidates_fail(tmp_path):
    entry, _ = equal_on_ranks(
        on_ranks(2, check_fault, tmp_path, raises_after, "rank 0: RuntimeError", culprit=0, of="fused")
    )
    assert entry.config == {"method": "torch"} and entry.ms == entry.plain_ms


def test_fused_candidate_wins_if_the_torch_baseline_fails(tmp_path):
    entry, _ = equal_on_ranks(
        on_ranks(2, check_fault, tmp_path, raises_before, "rank 0: RuntimeError", culprit=None, of="plain")
    )
    assert entry.config["method"] == "fused" and entry.plain_ms is None


def check_tuning_error(folder, what):
    """Check that TuningError is raised on every rank and nothing is stored; return its message."""
    with a_group() as group, cache_in(folder), state_unchanged(group):
        op = tunable("ag_gemm")

        def no_operands(*_):
            if dist.get_rank() == 1:
                raise MemoryError("no room for operands")
            return type(op).operands(op, *_)

        def run(operands, problem, group, config):
            raise RuntimeError("out of luck")

        changes = {"operands": {"operands": no_operands}, "all": {"run": run}}[what]
        with candidates(config_of(op, 1), **changes), pytest.raises(TuningError) as caught:
            tune("ag_gemm", *SHAPE, dtype=FP32, group=group)
        assert disk_cache.user_entries("ag_gemm", gpu_name(device())) == []
        text = str(caught.value)
        del group, caught  # the traceback holds the group
    return text


def test_operands_that_one_rank_cannot_allocate(tmp_path):
    text = equal_on_ranks(on_ranks(3, check_tuning_error, tmp_path, "operands"))
    assert "operands: rank 1: MemoryError: no room for operands" in text


def test_all_candidates_fail(tmp_path):
    text = equal_on_ranks(on_ranks(2, check_tuning_error, tmp_path, "all"))
    assert "no candidate runs: rank 0: RuntimeError: out of luck" in text


def check_compile_error(folder):
    """Check that each rank compiles its share, then all kernels; a failure on one rank eliminates on all ranks."""
    with a_group() as group, cache_in(folder), pytest.MonkeyPatch.context() as patch:
        op, compiled = tunable("ag_gemm"), []
        problem = problem_of("ag_gemm", SHAPE)
        default = op.default(problem, device())
        tiles = default.tiles
        bad = replace(default, tiles=replace(tiles, num_stages=3))
        same = replace(bad, num_comm_sms=1)  # the same kernel
        other = replace(default, tiles=replace(tiles, num_stages=4))

        def compile_(operands, world_size, config):
            compiled.append(config)
            if config == bad and dist.get_rank() == 1:
                raise ValueError("too many registers")

        replace_in(patch, op, "compile", compile_)
        with GroupStep(problem, group, device()) as ranks:
            under_test = tuner._Tuner(op, problem, ranks, 20.0, None, True)
            under_test.operands = [None]
            if device().type == "cpu":  # nothing is compiled on a CPU: simulate a GPU for this step
                under_test.device = torch.device("cuda")
                patch.setattr(torch.cuda, "set_device", lambda device: None)
            trials = [tuner.Trial(config) for config in (default, op.plain(), bad, same, other)]
            under_test._compile(trials)
            del under_test
        del group
    reasons = [trial.reason for trial in trials]
    why = "does not compile on rank 1: ValueError: too many registers"
    assert reasons == [None, None, why, why, None]
    first_share = [default, bad, other][dist.get_rank() :: 2]
    assert compiled[: len(first_share)] and set(compiled[: len(first_share)]) == set(first_share)
    assert sorted(compiled[len(first_share) :], key=str) == sorted([default, bad, other], key=str)


def test_compile_error_on_one_rank(tmp_path):
    on_ranks(2, check_compile_error, tmp_path)
