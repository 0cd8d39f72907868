"""No candidate that fails, on whatever rank and in whatever way, wins or does any harm."""

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
    one_of,
    problem_of,
    replace_in,
    same_everywhere,
    unharmed,
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


def stays_away(real, operands, problem, group, config):
    x, weight = operands
    return x.new_zeros(group.size() * x.shape[0], weight.shape[0])


def is_late(real, *call):
    time.sleep(2 * CALL_LIMIT_S)
    return real(*call)


def misbehaves(folder, fault, reason, *, culprit, calls_before=0, of="bad"):
    """Rank ``culprit`` (None: every rank) fails with one candidate, after so many good calls with it."""
    with a_group() as group, cache_in(folder), pytest.MonkeyPatch.context() as patch, unharmed(group):
        op = tunable("ag_gemm")
        bad, good = one_of(op, 1), one_of(op, 3)
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
    "no tensor at all": (no_tensor, "^rank 1: AttributeError"),
    "stays away": (stays_away, "^rank 0: PeerTimeoutError: .*rank 1"),
    "is late": (is_late, "^rank 0: PeerTimeoutError: .*rank 1"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_fails_on_one_rank_is_out_on_all(tmp_path, what):
    same_everywhere(on_ranks(2, misbehaves, tmp_path, *FAULTS[what], culprit=1))


@pytest.mark.parametrize("what", ["raises before it launches", "stays away"])
def test_the_first_of_three_fails(tmp_path, what):
    fault, _ = FAULTS[what]
    same_everywhere(on_ranks(3, misbehaves_with_three, tmp_path, fault))


def misbehaves_with_three(folder, fault):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "CALL_LIMIT_S", 1.5)  # two cores, three ranks
        return misbehaves(folder, fault, "^rank ", culprit=0)


@pytest.mark.parametrize("fault", [raises_before, raises_after, stays_away, is_late], ids=lambda f: f.__name__)
def test_failure_in_the_timing_phase_only(tmp_path, fault):
    # The peers have launched by then, and wait in a kernel, not for an agreement.
    _, reasons = same_everywhere(on_ranks(2, misbehaves, tmp_path, fault, "rank 1", culprit=1, calls_before=1))
    [reason] = [reason for reason in reasons.values() if reason]
    assert fault is raises_after or "PeerTimeoutError" in reason


def finds_what_the_one_before_left(folder):
    """A candidate that writes nothing, and gets the memory of the one before from the allocator."""
    op, left, fresh = tunable("ag_gemm"), [], []
    lazy, careful = one_of(op, 1), one_of(op, 3)

    def run(operands, problem, group, config):
        if config == lazy:
            return left[-1]
        if config == careful and not fresh:
            for workspace in group_state(group).workspaces.values():
                data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :]
                fresh.append(bool((data == 0xFF).all()))
            dist.barrier(group)  # a peer that goes on writes into what is looked at here
        left.append(type(op).run(op, operands, problem, group, config))
        return left[-1]

    with cache_in(folder), candidates(careful, lazy, run=run):
        result = tune("ag_gemm", *SHAPE, dtype=FP32)
    reasons = {trial.config: trial.reason for trial in result.trials}
    assert reasons.pop(lazy, None) and not any(reasons.values()), reasons
    assert fresh and all(fresh), "what was gathered for the one before is still there"


def test_what_one_candidate_leaves_behind_is_poisoned_for_the_next(tmp_path):
    on_ranks(2, finds_what_the_one_before_left, tmp_path)


def finds_what_the_reference_left(folder):
    """The first candidate writes nothing, and the allocator gives it the memory of the reference's result."""
    op, left = tunable("ag_gemm"), []
    default = op.default(problem_of("ag_gemm", SHAPE), device())

    def reference(operands, problem, group):
        output = type(op).reference(op, operands, problem, group)
        if output.dtype == FP32:
            left.append(output)
        return output

    def run(operands, problem, group, config):
        return left[0] if config == default else type(op).run(op, operands, problem, group, config)

    with cache_in(folder), candidates(one_of(op, 3), reference=reference, run=run):
        result = tune("ag_gemm", *SHAPE, dtype=FP32)
    [reason] = [trial.reason for trial in result.trials if trial.config == default]
    assert reason is not None and "wrong" in reason, "it has passed"


def test_what_the_reference_leaves_behind_is_poisoned_too(tmp_path):
    on_ranks(2, finds_what_the_reference_left, tmp_path)


def poisons(folder):
    """A peer that goes on writes into our memory, and our poison must not come after that."""
    steps = []

    def noting(step, real):
        def noted(*args):
            steps.append(step)
            return real(*args)

        return noted

    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "synchronize", noting("wait for the device", tuner.synchronize))
        for owner, name in ((tuner._Tuner, "_poison"), (GroupState, "exchange")):
            patch.setattr(owner, name, noting(name, getattr(owner, name)))
        with candidates(one_of(tunable("ag_gemm"), 3)):
            tune("ag_gemm", *SHAPE, dtype=FP32)
    assert steps.count("_poison") == 4, "the three and, in the end, the winner"
    for number, step in enumerate(steps):
        if step == "_poison":
            assert steps[number + 1] == "wait for the device", "the next step of all ranks may begin before the fills"


def test_the_poison_is_in_place_before_anybody_goes_on(tmp_path):
    on_ranks(2, poisons, tmp_path)


def test_the_plain_sequence_wins_when_all_else_fails(tmp_path):
    entry, _ = same_everywhere(
        on_ranks(2, misbehaves, tmp_path, raises_after, "rank 0: RuntimeError", culprit=0, of="fused")
    )
    assert entry.config == {"method": "torch"} and entry.ms == entry.plain_ms


def test_a_fused_candidate_wins_when_the_plain_sequence_fails(tmp_path):
    entry, _ = same_everywhere(
        on_ranks(2, misbehaves, tmp_path, raises_before, "rank 0: RuntimeError", culprit=None, of="plain")
    )
    assert entry.config["method"] == "fused" and entry.plain_ms is None


def fails(folder, what):
    """There is nothing to tune: TuningError on every rank, and nothing is kept."""
    with a_group() as group, cache_in(folder), unharmed(group):
        op = tunable("ag_gemm")

        def no_operands(*_):
            if dist.get_rank() == 1:
                raise MemoryError("no room for operands")
            return type(op).operands(op, *_)

        def run(operands, problem, group, config):
            raise RuntimeError("out of luck")

        changes = {"operands": {"operands": no_operands}, "all": {"run": run}}[what]
        with candidates(one_of(op, 1), **changes), pytest.raises(TuningError) as caught:
            tune("ag_gemm", *SHAPE, dtype=FP32, group=group)
        assert disk_cache.user_entries("ag_gemm", gpu_name(device())) == []
        text = str(caught.value)
        del group, caught  # the traceback holds the group
    return text


def test_operands_that_one_rank_cannot_make(tmp_path):
    text = same_everywhere(on_ranks(3, fails, tmp_path, "operands"))
    assert "operands: rank 1: MemoryError: no room for operands" in text


def test_nothing_works(tmp_path):
    text = same_everywhere(on_ranks(2, fails, tmp_path, "all"))
    assert "no candidate runs: rank 0: RuntimeError: out of luck" in text


def compiles(folder):
    """Each rank compiles a share, then all of it; what fails on one rank is out on all."""
    with a_group() as group, cache_in(folder), pytest.MonkeyPatch.context() as patch:
        op, mine = tunable("ag_gemm"), []
        problem = problem_of("ag_gemm", SHAPE)
        default = op.default(problem, device())
        tiles = default.tiles
        bad = replace(default, tiles=replace(tiles, num_stages=3))
        same = replace(bad, num_comm_sms=1)  # the same kernel
        other = replace(default, tiles=replace(tiles, num_stages=4))

        def compile_(operands, world_size, config):
            mine.append(config)
            if config == bad and dist.get_rank() == 1:
                raise ValueError("too many registers")

        replace_in(patch, op, "compile", compile_)
        with GroupStep(problem, group, device()) as ranks:
            under_test = tuner._Tuner(op, problem, ranks, 20.0, None, True)
            under_test.operands = [None]
            if device().type == "cpu":  # which compiles nothing: pretend, for this step, that it is a GPU
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
    assert mine[: len(first_share)] and set(mine[: len(first_share)]) == set(first_share)
    assert sorted(mine[len(first_share) :], key=str) == sorted([default, bad, other], key=str)


def test_a_kernel_that_does_not_compile_on_one_rank(tmp_path):
    on_ranks(2, compiles, tmp_path)
