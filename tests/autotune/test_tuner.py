"""The tuner finds the same legal config on all ranks, and no candidate that fails does any harm."""

import contextlib
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.autotune import TuningError, cache, tune, tuner
from tdkernels.autotune.hardware import _MEASURED, Hardware
from tdkernels.autotune.operator import tunable
from tdkernels.autotune.problem import Problem, gpu_name
from tdkernels.autotune.together import Together
from tdkernels.ops import _device
from tdkernels.symm import get_timeout, resolve_group
from tdkernels.symm.group import GroupState, group_state
from tests.autotune.entries import cache_in
from tests.ranks import a_group, device, on_ranks
from tests.reference import Case

FP32 = torch.float32
OPERATORS = ["ag_gemm", "gemm_rs"]
# M, N, K; with three ranks a shard has more than one tile of the smaller kind.
SHAPES = {2: (64, 64, 64), 3: (192, 96, 96)}
SHAPE = (48, 48, 48)  # for two ranks and for three
CALL_LIMIT_S = 1.0


def problem_of(operator, shape, *, layout="nk", world_size=None):
    world_size = world_size or dist.get_world_size()
    return Problem(operator, gpu_name(device()), world_size, world_size, "float32", layout, tuple(shape))


def mapped():
    """How many parts of symmetric buffers this process has mapped; CPU only."""
    return Path("/proc/self/maps").read_text().count("memfd:tdkernels")


@contextlib.contextmanager
def unharmed(group):
    """What happens within leaves the group's own state, the timeout and the memory of this process as they were."""
    cases = [Case(operator, FP32, 5, 3, 7, exact=True, seed=seed) for seed, operator in enumerate(OPERATORS)]

    def work():
        for case in cases:
            case.check({"output": case.call(group=group)})

    def now():
        state = group_state(resolve_group(group))
        buffers = [(name, workspace, workspace.buffer) for name, workspace in state.workspaces.items()]
        return state, buffers, mapped(), get_timeout()

    work()
    before = now()
    yield
    assert now() == before
    work()
    assert now() == before
    del before


# ---- what it finds ----


def tunes(folder, operator):
    world_size = dist.get_world_size()
    shape = SHAPES[world_size]
    progress = []
    with cache_in(folder / f"rank{dist.get_rank()}"), unharmed(None):
        result = tune(operator, *shape, dtype=FP32, on_progress=lambda *step: progress.append(step))
        entry, op = result.entry, tunable(operator)
        assert entry.problem == problem_of(operator, shape)
        config = op.config_from_dict(entry.config)
        assert op.illegal(config, entry.problem, device()) is None
        assert entry.ms == min(entry.ms, entry.plain_ms, entry.default_ms) > 0 and entry.local_ms > 0
        assert entry.wire_ms is None if device().type == "cpu" else entry.wire_ms > 0

        trials = {trial.config: trial for trial in result.trials}
        assert len(trials) == len(result.trials) > 2
        assert {op.plain(), op.default(entry.problem, device()), config} <= trials.keys()
        assert [trial.reason for trial in result.trials] == [None] * len(trials)
        order = [(-trial.last_round, trial.ms) for trial in result.trials]
        assert order == sorted(order), "those of the last round first"
        counts = r"(\d+) candidates: 0 cannot run, (\d+) are beyond 2 x the best estimate, 0 beyond .*; (\d+) are tried"
        candidates, pruned, kept = map(int, re.match(counts, result.log[0]).groups())
        assert 0 <= pruned < candidates and kept == len(trials)
        assert 0 < result.seconds < 60
        if dist.get_rank() == 0:
            assert all(0 <= done <= total for _, done, total in progress)
            assert {"check", "round 1", "final"} <= {stage for stage, _, _ in progress}
        else:
            assert not progress

        cache.forget()
        kept = cache.user_entries(operator, gpu_name(device()))
        if dist.get_rank() == 0:
            assert [(e.problem, e.versions, e.config, e.when) for e in kept] == [
                (entry.problem, entry.versions, entry.config, entry.when)
            ]
            assert kept[0].ms == pytest.approx(entry.ms, rel=1e-3)
        else:
            assert not kept  # for there may be no folder that all can write
    return entry


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_find_the_same_entry_and_keep_it(tmp_path, world_size, operator):
    entries = on_ranks(world_size, tunes, tmp_path, operator)
    assert entries == [entries[0]] * world_size
    assert [file.name for file in cache.files(tmp_path / "rank0")] == [f"{operator}.json"]


def tunes_other_layouts_and_dtypes(folder):
    for operator, dtype, layout in (("ag_gemm", torch.bfloat16, "kn"), ("gemm_rs", torch.float16, "kn")):
        with cache_in(folder), unharmed(None):
            entry = tune(operator, 64, 64, 64, dtype=dtype, layout=layout).entry
        assert (entry.problem.layout, entry.problem.dtype) == (layout, str(dtype).removeprefix("torch."))
        assert entry.plain_ms and entry.default_ms


def test_other_layouts_and_dtypes(tmp_path):
    on_ranks(2, tunes_other_layouts_and_dtypes, tmp_path)


def tunes_in_a_subgroup(folder):
    with a_group([0, 2]) as group:
        entry = None
        if dist.get_rank() != 1:
            with cache_in(folder):
                entry = tune("gemm_rs", 64, 64, 64, dtype=FP32, group=group).entry
            assert entry.problem == problem_of("gemm_rs", (64, 64, 64), world_size=2)
        del group
    return entry


def test_a_subgroup_tunes_alone(tmp_path):
    entries = on_ranks(3, tunes_in_a_subgroup, tmp_path)
    assert entries[0] == entries[2] and entries[1] is None


# ---- candidates ----


def one_of(op, number):
    """A legal config of AG-GEMM, told from others by its number."""
    return replace(op.default(problem_of("ag_gemm", SHAPE), device()), num_comm_sms=number)


@contextlib.contextmanager
def candidates(*configs, estimates=None, **changes):
    """AG-GEMM has just these configs, tried in this order, and other attributes as told."""
    op = tunable("ag_gemm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "space", lambda problem, device: list(configs))
        patch.setattr(op, "estimate_ms", lambda config, *_: (estimates or {}).get(config, 1.0))
        for name, value in changes.items():
            patch.setattr(op, name, value)
        yield op


def cuts(folder):
    op = tunable("ag_gemm")
    default, plain = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain()
    best, near, late, slow = (one_of(op, number) for number in (3, 4, 5, 6))
    illegal = one_of(op, 0)
    estimates = {best: 1.0, near: 1.5, late: 1.9, slow: 2.1, default: 50.0, plain: 70.0}
    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "_MAX_CANDIDATES", 2)
        with candidates(slow, late, illegal, near, best, default, best, estimates=estimates):
            result = tune("ag_gemm", *SHAPE, dtype=FP32)
    assert {trial.config for trial in result.trials} == {default, plain, best, near}
    assert result.log[0].startswith(
        "6 candidates: 1 cannot run, 2 are beyond 2 x the best estimate, 1 beyond the first 2; 4 are tried"
    )


def test_what_is_cut_is_counted_and_default_and_plain_never_are(tmp_path):
    on_ranks(2, cuts, tmp_path)


# ---- candidates that fail ----


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


def stays_away(real, operands, group, config):
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

        def run(operands, group, config):
            if config in failing and culprit in (None, dist.get_rank()):
                count[0] += 1
                if count[0] > calls_before:
                    return fault(real, operands, group, config)
            return real(operands, group, config)

        patch.setattr(tuner, "_CALL_LIMIT_S", CALL_LIMIT_S)
        with candidates(bad, good, run=run):
            result = tune("ag_gemm", *SHAPE, dtype=FP32, group=group)

        reasons = {trial.config: trial.reason for trial in result.trials}
        assert reasons.keys() == {default, plain, bad, good}
        failed = {config for config, why in reasons.items() if why is not None}
        assert failed == set(failing), reasons
        for config in failing:
            assert re.search(reason, reasons[config]) and "\n" not in reasons[config], reasons[config]
            assert any(text.startswith(f"out: {config}") for text in result.log), result.log
        assert result.trials[-1].config in failing and result.trials[-1].samples == []
        assert op.config_from_dict(result.entry.config) not in failing
        assert (result.entry.plain_ms is None) == (plain in failing)
        assert (result.entry.default_ms is None) == (default in failing)
        del group
    return result.entry, reasons


def same_everywhere(results):
    """Ranks agree on the entry and on why a candidate is out."""
    assert results == [results[0]] * len(results)
    return results[0]


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

    def run(operands, group, config):
        if config == lazy:
            return left[-1]
        if config == careful and not fresh:
            for workspace in group_state(group).workspaces.values():
                data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :]
                fresh.append(bool((data == 0xFF).all()))
            dist.barrier(group)  # a peer that goes on writes into what is looked at here
        left.append(type(op).run(op, operands, group, config))
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

    def reference(operands, group):
        output = type(op).reference(op, operands, group)
        if output.dtype == FP32:
            left.append(output)
        return output

    def run(operands, group, config):
        return left[0] if config == default else type(op).run(op, operands, group, config)

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

        def run(operands, group, config):
            raise RuntimeError("out of luck")

        changes = {"operands": {"operands": no_operands}, "all": {"run": run}}[what]
        with candidates(one_of(op, 1), **changes), pytest.raises(TuningError) as caught:
            tune("ag_gemm", *SHAPE, dtype=FP32, group=group)
        assert cache.user_entries("ag_gemm", gpu_name(device())) == []
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

        def compile_(operands, config):
            mine.append(config)
            if config == bad and dist.get_rank() == 1:
                raise ValueError("too many registers")

        patch.setattr(op, "compile", compile_)
        with Together(problem, group, device()) as ranks:
            under_test = tuner._Tuner(op, problem, ranks, 20.0, None)
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


# ---- times ----


@contextlib.contextmanager
def made_up_times(ms):
    """Bursts take ``ms[config]`` (a number, or one for each rank); gives the bursts: (config, calls), None alone."""
    op, bursts = tunable("ag_gemm"), []
    real, asked = op.run, []
    with pytest.MonkeyPatch.context() as patch:

        def burst(call, input_sets, calls, device, group):
            asked[:] = [None]
            patch.setattr(op, "run", lambda operands, group, config: asked.__setitem__(0, config))
            call(input_sets[0])
            patch.setattr(op, "run", real)
            bursts.append((asked[0], calls))
            value = ms[asked[0]]
            return value[dist.get_rank()] if isinstance(value, tuple) else value, 0.0

        patch.setattr(tuner, "burst", burst)
        yield bursts


def eliminates(folder):
    op = tunable("ag_gemm")
    default, plain = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain()
    # Fastest on rank 0; best where it is slowest; just behind; one too many; far behind.
    uneven, best, behind, last, far = (one_of(op, number) for number in (3, 4, 5, 7, 6))
    ms = {uneven: (0.1, 0.16), best: (0.15, 0.14), behind: 0.18, last: 0.2, far: (1.0, 0.01)}
    ms |= {default: 0.3, plain: (0.5, 0.4)}
    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        first, *others = tuner._ROUNDS["cuda"]
        patch.setitem(tuner._ROUNDS, device().type, (replace(first, keep=3), *others))
        patch.setitem(tuner._FINAL, device().type, tuner._FINAL["cuda"])
        with candidates(far, last, uneven, best, behind), made_up_times({**ms, None: (0.02, 0.04)}) as bursts:
            result = tune("ag_gemm", *SHAPE, dtype=FP32)
    entry, times = result.entry, {trial.config: trial.ms for trial in result.trials}
    assert op.config_from_dict(entry.config) == best
    assert (entry.ms, entry.plain_ms, entry.default_ms, entry.local_ms) == (0.15, 0.5, 0.3, 0.04)
    assert times == {config: max(value) if isinstance(value, tuple) else value for config, value in ms.items()}
    assert [trial.config for trial in result.trials] == [best, default, plain, uneven, behind, last, far]
    assert any(text.startswith("best 0.1500 ms") for text in result.log)

    counts = {config: sum(which == config for which, _ in bursts) for config in ms}
    assert counts[far] == counts[last] == 2 < counts[behind] < counts[uneven] < counts[best]
    # Those to be compared with are in the final, however slow.
    finals = counts[best] - counts[uneven]
    assert counts[default] == counts[plain] == 2 + finals
    return [(str(config), calls) for config, calls in bursts]


def test_the_slowest_rank_counts_and_who_is_behind_drops_out(tmp_path):
    first, second = on_ranks(2, eliminates, tmp_path)
    assert first == second, "the ranks did not run the same bursts in the same order"
    in_rounds = [calls for config, calls in first if "num_comm_sms=4" in config]
    assert 0 < in_rounds[0] < in_rounds[1] < in_rounds[-1], "later rounds have longer bursts"


def fails_in_the_final(folder):
    """The leader fails when it is timed for the last time; the next one is the best."""
    with a_group() as group, cache_in(folder), unharmed(group):
        op = tunable("ag_gemm")
        default, plain = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain()
        leader, second = one_of(op, 3), one_of(op, 4)
        with candidates(leader, second), made_up_times({leader: 1.0, second: 1.1, default: 3.0, plain: 5.0, None: 0.1}):
            invented, seen = tuner.burst, []

            def burst(call, input_sets, *rest):
                ms, host = invented(call, input_sets, *rest)
                seen.append(ms)
                if ms == 1.0 and 0.1 in seen and dist.get_rank() == 1:
                    raise RuntimeError("out of luck")
                return ms, host

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tuner, "burst", burst)
                result = tune("ag_gemm", *SHAPE, dtype=FP32, group=group)
        assert op.config_from_dict(result.entry.config) == second and result.entry.ms == 1.1
        [failed] = [trial for trial in result.trials if trial.reason]
        assert failed.config == leader and failed.reason == "rank 1: RuntimeError: out of luck"
        del group
    return result.entry


def test_the_leader_fails_in_the_final(tmp_path):
    same_everywhere(on_ranks(2, fails_in_the_final, tmp_path))


def has_no_time(folder):
    with cache_in(folder):
        result = tune("gemm_rs", 64, 64, 64, dtype=FP32, budget_s=0)
    op, entry = tunable("gemm_rs"), result.entry
    assert op.illegal(op.config_from_dict(entry.config), entry.problem, device()) is None
    assert "the budget of 0 s ended the elimination in round 1" in result.log
    assert entry.ms > 0 and entry.plain_ms > 0 and entry.default_ms > 0
    assert {trial.config for trial in result.trials} == {op.plain(), op.default(entry.problem, device())}
    return entry


def test_without_time_default_and_plain_are_compared(tmp_path):
    same_everywhere(on_ranks(2, has_no_time, tmp_path))


# ---- the cost model ----

H200 = Hardware(*_MEASURED["NVIDIA H200"], num_sms=132, measured=True)
GPU = torch.device("cuda", 0)


@pytest.fixture
def an_h200(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
    )
    monkeypatch.setattr(_device, "_properties", lambda index: properties)


def configs_of(op, problem):
    return [*op.space(problem, GPU), op.default(problem, GPU), op.plain()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_estimate_is_below_the_floors_and_a_slower_link_never_helps(an_h200, operator, dtype):
    op = tunable(operator)
    slower = replace(H200, link=H200.link / 4)
    for world_size, *shape in ((2, 64, 64, 64), (4, 8192, 57344, 8192), (8, 512, 8192, 28672), (3, 99, 51, 303)):
        problem = Problem(operator, "NVIDIA H200", world_size, world_size, dtype, "nk", tuple(shape))
        assert op.why_not(problem) is None
        floors = op.floors(problem)
        floor_ms = max(floors.flops / H200.flops, floors.wire_bytes / H200.link) * 1e3
        configs = configs_of(op, problem)
        assert len(configs) > 5 and all(op.illegal(config, problem, GPU) is None for config in configs)
        for config in configs:
            estimate = op.estimate_ms(config, problem, H200)
            assert floor_ms <= estimate < 1e6, f"{config} for {problem}"
            assert estimate <= op.estimate_ms(config, problem, slower), f"{config} for {problem}"


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_bound_by_the_wire_takes_longer_with_a_slower_link(an_h200, operator):
    op = tunable(operator)
    shape = (8192, 512, 8192) if operator == "ag_gemm" else (8192, 8192, 512)
    problem = Problem(operator, "NVIDIA H200", 4, 4, "bfloat16", "nk", shape)
    for config in configs_of(op, problem):
        twice = op.estimate_ms(config, problem, replace(H200, link=H200.link / 2))
        assert 1.3 < twice / op.estimate_ms(config, problem, H200) <= 2.0, config


@pytest.mark.parametrize("operator", OPERATORS)
def test_twice_the_work_takes_longer(an_h200, operator):
    op = tunable(operator)
    shape = (8192, 8192, 8192)
    small = Problem(operator, "NVIDIA H200", 4, 4, "bfloat16", "nk", shape)
    for number in range(3):
        large = replace(small, shape=tuple(size * (1 + (i == number)) for i, size in enumerate(shape)))
        for config in configs_of(op, small):
            assert op.estimate_ms(config, large, H200) > op.estimate_ms(config, small, H200), config


# ---- problems that are none ----

BAD = {
    "operator": (("all_reduce", 64, 64, 64), {}, "operator must be one of ag_gemm, gemm_rs, not 'all_reduce'"),
    "M": (("ag_gemm", 65, 64, 64), {}, "ag_gemm: M = 65 is not divisible by 2 ranks"),
    "N": (("ag_gemm", 64, 65, 64), {}, "ag_gemm: N = 65 is not divisible by 2 ranks"),
    "K": (("gemm_rs", 64, 64, 65), {}, "gemm_rs: K = 65 is not divisible by 2 ranks"),
    "zero": (("gemm_rs", 64, 0, 64), {}, r"three positive sizes M, N and K, not \(64, 0, 64\)"),
    "negative": (("gemm_rs", -64, 64, 64), {}, r"three positive sizes .*\(-64, 64, 64\)"),
    "no integer": (("gemm_rs", 64.0, 64, 64), {}, r"three positive sizes .*\(64.0, 64, 64\)"),
    "too few": (("gemm_rs", 64, 64), {}, r"three positive sizes .*\(64, 64\)"),
    "dtype": (("ag_gemm", 64, 64, 64), {"dtype": torch.float64}, "dtype must be one of .*float32.*, not float64"),
    "layout": (("ag_gemm", 64, 64, 64), {"layout": "nm"}, "layout must be one of nk, kn, not 'nm'"),
}


def is_refused(folder, arguments, options, message):
    with cache_in(folder), unharmed(None), pytest.raises(ValueError, match=message):
        tune(*arguments, **options)


@pytest.mark.parametrize("what", BAD)
def test_bad_problems_are_refused_on_every_rank(tmp_path, what):
    on_ranks(2, is_refused, tmp_path, *BAD[what])
    assert not cache.files(tmp_path)


def is_alone(folder):
    with cache_in(folder), pytest.raises(ValueError, match="one rank has nothing to tune"):
        tune("ag_gemm", 64, 64, 64)


def test_one_rank_has_nothing_to_tune(tmp_path):
    on_ranks(1, is_alone, tmp_path)


def tunes_different_problems(folder):
    with a_group() as group, cache_in(folder), unharmed(group):
        with pytest.raises(ValueError) as caught:
            tune("ag_gemm", 64 << dist.get_rank(), 64, 64, dtype=FP32, group=group)
        text = str(caught.value)
        del group, caught
    assert "tune ag_gemm: the ranks disagree" in text
    assert "shape is [64, 64, 64] on rank 0, [128, 64, 64] on rank 1" in text


def test_ranks_that_tune_different_problems(tmp_path):
    on_ranks(2, tunes_different_problems, tmp_path)


def tunes_with_a_short_timeout(folder):
    """A candidate may wait for a quarter of the timeout at most, so that the ranks can still agree that it is out."""
    with a_group() as group:
        tdkernels.set_timeout(8.0)
        try:
            with cache_in(folder), unharmed(group):
                op = tunable("ag_gemm")
                seen = []

                def run(*call):
                    seen.append(get_timeout())
                    return type(op).run(op, *call)

                with candidates(one_of(op, 3), run=run):
                    tune("ag_gemm", *SHAPE, dtype=FP32, group=group)
                assert set(seen) == {2.0} and get_timeout() == 8.0
        finally:
            tdkernels.set_timeout(None)
        del group


def test_a_short_timeout_is_left_time_to_agree_in(tmp_path):
    on_ranks(2, tunes_with_a_short_timeout, tmp_path)
