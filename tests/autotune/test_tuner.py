"""The tuner finds the fastest legal config, the same on all ranks."""

import contextlib
import functools
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.autotune import disk_cache, rounds, tune, tuner
from tdkernels.autotune.problem import gpu_name
from tdkernels.autotune.tunable import tunable
from tdkernels.symm import get_timeout
from tests.autotune.entries import cache_in
from tests.autotune.support import (
    FP32,
    SHAPE,
    SHAPES,
    candidates,
    config_of,
    equal_on_ranks,
    problem_of,
    replace_in,
    state_unchanged,
)
from tests.support.dense_oracle import OPERATORS
from tests.support.ranks import DEVICE, a_group, device, on_ranks
from tests.support.simulated_nodes import thorough

# ---- results ----


def check_tune(folder, operator):
    world_size = dist.get_world_size()
    shape = SHAPES[world_size]
    progress = []
    with cache_in(folder / f"rank{dist.get_rank()}"), state_unchanged(None):
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
        assert order == sorted(order), "trials are sorted by their last round, latest first"
        counts = r"(\d+) candidates: 0 cannot run, (\d+) are beyond 2 x the best estimate, 0 beyond .*; (\d+) are tried"
        candidates, pruned, kept = map(int, re.match(counts, result.log[0]).groups())
        assert 0 <= pruned < candidates and kept == len(trials)
        assert 0 < result.seconds < 60
        if dist.get_rank() == 0:
            assert all(0 <= done <= total for _, done, total in progress)
            assert {"check", "round 1", "final"} <= {stage for stage, _, _ in progress}
        else:
            assert not progress

        disk_cache.forget()
        kept = disk_cache.user_entries(operator, gpu_name(device()))
        if dist.get_rank() == 0:
            assert [(e.problem, e.versions, e.config, e.when) for e in kept] == [
                (entry.problem, entry.versions, entry.config, entry.when)
            ]
            assert kept[0].ms == pytest.approx(entry.ms, rel=1e-3)
        else:
            assert not kept  # only rank 0 writes: there may be no folder that all ranks can write
    return entry


@pytest.mark.parametrize("world_size, operator", [
    pytest.param(ranks, name, marks=[thorough] if (ranks, name) == (3, "gemm_ar") else [])
    for ranks in (2, 3) for name in OPERATORS
])
def test_all_ranks_find_the_same_entry_and_rank_0_stores_it(tmp_path, world_size, operator):
    entries = on_ranks(world_size, check_tune, tmp_path, operator)
    assert entries == [entries[0]] * world_size
    assert [file.name for file in disk_cache.files(tmp_path / "rank0")] == [f"{operator}.json"]


def check_other_layouts_and_dtypes(folder):
    for operator, dtype in (("ag_gemm", torch.bfloat16), ("gemm_rs", torch.float16), ("gemm_ar", torch.bfloat16)):
        with cache_in(folder), state_unchanged(None):
            entry = tune(operator, 64, 64, 64, dtype=dtype, layout="kn").entry
        assert (entry.problem.layout, entry.problem.dtype) == ("kn", str(dtype).removeprefix("torch."))
        assert entry.plain_ms and entry.default_ms


def test_other_layouts_and_dtypes(tmp_path):
    on_ranks(2, check_other_layouts_and_dtypes, tmp_path)


def check_subgroup(folder):
    with a_group([0, 2]) as group:
        entry = None
        if dist.get_rank() != 1:
            with cache_in(folder):
                entry = tune("gemm_rs", 64, 64, 64, dtype=FP32, group=group).entry
            assert entry.problem == problem_of("gemm_rs", (64, 64, 64), world_size=2)
        del group
    return entry


def test_subgroup_tunes_without_other_ranks(tmp_path):
    entries = on_ranks(3, check_subgroup, tmp_path)
    assert entries[0] == entries[2] and entries[1] is None


# ---- candidates ----


def check_pruning(folder):
    op = tunable("ag_gemm")
    default, plain = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain()
    best, near, late, slow = (config_of(op, number) for number in (3, 4, 5, 6))
    illegal = config_of(op, 0)
    copies = [replace(config, transport="copy_engine") for config in (best, near)]
    estimates = {best: 1.0, near: 1.5, late: 1.9, slow: 2.1, default: 50.0, plain: 70.0}
    estimates |= {copies[0]: 90.0, copies[1]: 80.0}
    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "_MAX_CANDIDATES", 2)
        with candidates(slow, late, illegal, *copies, near, best, default, best, estimates=estimates):
            result = tune("ag_gemm", *SHAPE, dtype=FP32)
    assert {trial.config for trial in result.trials} == {default, plain, best, near, copies[1]}
    assert result.log[0].startswith(
        "8 candidates: 1 cannot run, 4 are beyond 2 x the best estimate, 1 beyond the first 2; 5 are tried"
    )


def test_pruned_candidates_are_counted_and_default_and_plain_are_kept(tmp_path):
    on_ranks(2, check_pruning, tmp_path)


# ---- times ----


@contextlib.contextmanager
def fake_times(ms, host_share=0.0, in_graph=None):
    """Replace the tuner's bursts with given times; yield the list of bursts as (config, calls).

    Args:
        ms: Time by config: a number, or one number per rank. The key None is the local computation.
        host_share: Fraction of the time that the host needs for the launches.
        in_graph: As ``ms``, for bursts in a CUDA graph.
    """
    op, bursts = tunable("ag_gemm"), []
    real, current = op.run, []
    with pytest.MonkeyPatch.context() as patch:

        def burst(call, input_sets, calls, device, group, ms=ms, host_share=host_share):
            current[:] = [None]
            replace_in(patch, op, "run", lambda operands, problem, group, config: current.__setitem__(0, config))
            call(input_sets[0])
            replace_in(patch, op, "run", real)
            bursts.append((current[0], calls))
            value = ms[current[0]]
            value = value[dist.get_rank()] if isinstance(value, tuple) else value
            return value, host_share * value

        patch.setattr(tuner, "burst", burst)
        patch.setitem(rounds.HAS_GRAPHS, device().type, in_graph is not None)
        patch.setattr(tuner, "burst_in_graph", functools.partial(burst, ms=in_graph, host_share=0.0))
        yield bursts


def check_elimination(folder):
    op = tunable("ag_gemm")
    default, plain = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain()
    # Fastest on rank 0 only; best on its slowest rank; just behind; beyond the limit of candidates; far behind.
    uneven, best, behind, last, far = (config_of(op, number) for number in (3, 4, 5, 7, 6))
    ms = {uneven: (0.1, 0.16), best: (0.15, 0.14), behind: 0.18, last: 0.2, far: (1.0, 0.01)}
    ms |= {default: 0.3, plain: (0.5, 0.4)}
    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        first, *others = rounds.ROUNDS["cuda"]
        patch.setitem(rounds.ROUNDS, device().type, (replace(first, keep=3), *others))
        patch.setitem(rounds.FINAL, device().type, rounds.FINAL["cuda"])
        with candidates(far, last, uneven, best, behind), fake_times({**ms, None: (0.02, 0.04)}) as bursts:
            result = tune("ag_gemm", *SHAPE, dtype=FP32)
    entry, times = result.entry, {trial.config: trial.ms for trial in result.trials}
    assert op.config_from_dict(entry.config) == best
    assert (entry.ms, entry.plain_ms, entry.default_ms, entry.local_ms) == (0.15, 0.5, 0.3, 0.04)
    assert times == {config: max(value) if isinstance(value, tuple) else value for config, value in ms.items()}
    assert [trial.config for trial in result.trials] == [best, default, plain, uneven, behind, last, far]
    assert any(text.startswith("best 0.1500 ms") for text in result.log)

    counts = {config: sum(which == config for which, _ in bursts) for config in ms}
    assert counts[far] == counts[last] == 2 < counts[behind] < counts[uneven] < counts[best]
    # Default and torch baseline are always in the final.
    finals = counts[best] - counts[uneven]
    assert counts[default] == counts[plain] == 2 + finals
    return [(str(config), calls) for config, calls in bursts]


def test_slowest_rank_counts_and_slow_candidates_are_eliminated(tmp_path):
    first, second = on_ranks(2, check_elimination, tmp_path)
    assert first == second, "the ranks did not run the same bursts in the same order"
    in_rounds = [calls for config, calls in first if "num_comm_sms=4" in config]
    assert 0 < in_rounds[0] < in_rounds[1] < in_rounds[-1], "later rounds have longer bursts"


def find_winner(folder, default_ms, plain_ms, host_share):
    """Return which config is found, "best", "default" or "plain", if "best" takes 0.1 ms."""
    op = tunable("ag_gemm")
    default, plain, best = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain(), config_of(op, 4)
    ms = {best: 0.1, default: default_ms, plain: plain_ms, None: 0.02}
    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.setitem(rounds.HOST_BOUND, device().type, 0.9)
        with candidates(best), fake_times(ms, host_share):
            entry = tune("ag_gemm", *SHAPE, dtype=FP32).entry
    found = op.config_from_dict(entry.config)
    assert entry.ms == ms[found] and entry.default_ms == default_ms
    return {best: "best", default: "default", plain: "plain"}[found]


@pytest.mark.parametrize("default_ms, plain_ms, host_share, found", [
    (0.105, 0.5, 0.95, "default"), (0.105, 0.5, 0.5, "best"), (0.12, 0.5, 0.95, "best"), (0.105, 0.09, 0.95, "plain"),
])
def test_host_bound_tuning_keeps_the_default(tmp_path, default_ms, plain_ms, host_share, found):
    assert on_ranks(2, find_winner, tmp_path, default_ms, plain_ms, host_share) == [found] * 2


def check_timing_in_graphs(folder, host_share):
    """Return whether the entry was timed in a CUDA graph, where the order of the candidates is reversed."""
    op = tunable("ag_gemm")
    default, plain, best = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain(), config_of(op, 4)
    ms = {best: 0.15, default: 0.12, plain: 0.1, None: 0.02}
    in_graph = {best: 0.01, default: 0.012, plain: 0.014, None: 0.005}
    with cache_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.setitem(rounds.HOST_COUNTS, device().type, 0.5)
        with candidates(best), fake_times(ms, host_share, in_graph):
            entry = tune("ag_gemm", *SHAPE, dtype=FP32).entry
        if dist.get_rank() == 0:
            assert disk_cache.user_entries("ag_gemm", entry.problem.gpu) == [entry]
    found = op.config_from_dict(entry.config)
    expected = in_graph if entry.graph else ms
    assert found == min((best, default, plain), key=expected.get)
    assert (entry.ms, entry.plain_ms, entry.default_ms) == tuple(expected[config] for config in (found, plain, default))
    assert entry.local_ms == expected[None]
    return entry.graph


@pytest.mark.parametrize("host_share", [0.4, 0.6])
def test_host_bound_problem_is_timed_in_graphs(tmp_path, host_share):
    assert on_ranks(2, check_timing_in_graphs, tmp_path, host_share) == [host_share > 0.5] * 2


def tune_small_m(folder):
    with cache_in(folder), a_group() as group:
        return [tune(operator, 8, 64, 64, dtype=FP32, group=group).entry.graph for operator in OPERATORS]


def test_small_m_is_timed_in_graphs_on_a_gpu(tmp_path):
    assert on_ranks(2, tune_small_m, tmp_path) == [[DEVICE == "cuda"] * 3] * 2


def check_failure_in_the_final(folder):
    """Check that the second candidate wins if the leader fails in the final."""
    with a_group() as group, cache_in(folder), state_unchanged(group):
        op = tunable("ag_gemm")
        default, plain = op.default(problem_of("ag_gemm", SHAPE), device()), op.plain()
        leader, second = config_of(op, 3), config_of(op, 4)
        times = {leader: 1.0, second: 1.04, default: 3.0, plain: 5.0, None: 0.1}
        with candidates(leader, second), fake_times(times):
            fake_burst, seen = tuner.burst, []

            def burst(call, input_sets, *rest):
                ms, host = fake_burst(call, input_sets, *rest)
                seen.append(ms)
                if ms == 1.0 and 0.1 in seen and dist.get_rank() == 1:
                    raise RuntimeError("out of luck")
                return ms, host

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tuner, "burst", burst)
                result = tune("ag_gemm", *SHAPE, dtype=FP32, group=group)
        assert op.config_from_dict(result.entry.config) == second and result.entry.ms == 1.04
        [failed] = [trial for trial in result.trials if trial.reason]
        assert failed.config == leader and failed.reason == "rank 1: RuntimeError: out of luck"
        del group
    return result.entry


def test_leader_fails_in_the_final(tmp_path):
    equal_on_ranks(on_ranks(2, check_failure_in_the_final, tmp_path))


def check_zero_budget(folder):
    with cache_in(folder):
        result = tune("gemm_rs", 64, 64, 64, dtype=FP32, budget_s=0)
    op, entry = tunable("gemm_rs"), result.entry
    assert op.illegal(op.config_from_dict(entry.config), entry.problem, device()) is None
    assert "the budget of 0 s ended the elimination in round 1" in result.log
    assert entry.ms > 0 and entry.plain_ms > 0 and entry.default_ms > 0
    assert {trial.config for trial in result.trials} == {op.plain(), op.default(entry.problem, device())}
    return entry


def test_zero_budget_compares_default_and_plain(tmp_path):
    equal_on_ranks(on_ranks(2, check_zero_budget, tmp_path))


# ---- invalid problems ----

BAD = {
    "operator": (("reduce", 64, 64, 64), {}, "operator must be one of .*ag_gemm, .*, not 'reduce'"),
    "M": (("ag_gemm", 65, 64, 64), {}, "ag_gemm: M = 65 is not divisible by 2 ranks"),
    "N": (("ag_gemm", 64, 65, 64), {}, "ag_gemm: N = 65 is not divisible by 2 ranks"),
    "K": (("gemm_rs", 64, 64, 65), {}, "gemm_rs: K = 65 is not divisible by 2 ranks"),
    "K of gemm_ar": (("gemm_ar", 65, 65, 65), {}, "gemm_ar: K = 65 is not divisible by 2 ranks"),
    "zero": (("gemm_rs", 64, 0, 64), {}, r"3 positive sizes, M x N x K, not \(64, 0, 64\)"),
    "negative": (("gemm_rs", -64, 64, 64), {}, r"3 positive sizes, .*\(-64, 64, 64\)"),
    "no integer": (("gemm_rs", 64.0, 64, 64), {}, r"3 positive sizes, .*\(64.0, 64, 64\)"),
    "too few": (("gemm_rs", 64, 64), {}, r"3 positive sizes, .*\(64, 64\)"),
    "dtype": (("ag_gemm", 64, 64, 64), {"dtype": torch.float64}, "dtype must be one of .*float32.*, not float64"),
    "layout": (("ag_gemm", 64, 64, 64), {"layout": "nm"}, "layout must be one of nk, kn, scaled, .*, not 'nm'"),
}


def check_rejected(folder, arguments, options, message):
    with cache_in(folder), state_unchanged(None), pytest.raises(ValueError, match=message):
        tune(*arguments, **options)


@pytest.mark.parametrize("what", BAD)
def test_bad_problems_are_rejected_on_every_rank(tmp_path, what):
    on_ranks(2, check_rejected, tmp_path, *BAD[what])
    assert not disk_cache.files(tmp_path)


def check_single_rank(folder):
    with cache_in(folder), pytest.raises(ValueError, match="one rank has nothing to tune"):
        tune("ag_gemm", 64, 64, 64)


def test_one_rank_has_nothing_to_tune(tmp_path):
    on_ranks(1, check_single_rank, tmp_path)


def check_different_problems(folder):
    with a_group() as group, cache_in(folder), state_unchanged(group):
        with pytest.raises(ValueError) as caught:
            tune("ag_gemm", 64 << dist.get_rank(), 64, 64, dtype=FP32, group=group)
        text = str(caught.value)
        del group, caught
    assert "tune ag_gemm: the ranks disagree" in text
    assert "shape is [64, 64, 64] on rank 0, [128, 64, 64] on rank 1" in text


def test_different_problems_on_ranks_are_rejected(tmp_path):
    on_ranks(2, check_different_problems, tmp_path)


def check_short_timeout(folder):
    """Check that candidates run with a quarter of the timeout, so that ranks have time to agree on an elimination."""
    with a_group() as group:
        tdkernels.set_timeout(8.0)
        try:
            with cache_in(folder), state_unchanged(group):
                op = tunable("ag_gemm")
                seen = []

                def run(*call):
                    seen.append(get_timeout())
                    return type(op).run(op, *call)

                with candidates(config_of(op, 3), run=run):
                    tune("ag_gemm", *SHAPE, dtype=FP32, group=group)
                assert set(seen) == {2.0} and get_timeout() == 8.0
        finally:
            tdkernels.set_timeout(None)
        del group


def test_short_timeout_leaves_time_for_agreement(tmp_path):
    on_ranks(2, check_short_timeout, tmp_path)
