"""Config selection: the order of sources, and that all ranks select the same config if their files differ."""

import contextlib
import logging
import os
import re
from dataclasses import asdict, replace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import autotune, explain
from tdkernels.autotune import disk_cache, on_demand, selection, table, tuner
from tdkernels.autotune.hardware import KIN, Hardware
from tdkernels.autotune.problem import Problem, gpu_name
from tdkernels.autotune.tunable import tunable, versions
from tdkernels.ops.common import gemm_tunable, tunable_base
from tdkernels.runtime import gpu as runtime_gpu
from tdkernels.symm.group import group_state
from tests.autotune.entries import cache_in, make_entry
from tests.autotune.support import replace_in
from tests.ops.dense.specialized_support import pretend_hopper
from tests.support.dense_oracle import OPERATORS, Case, whole_shape
from tests.support.ranks import a_group, device, fresh_ranks, on_ranks

FP32 = torch.float32
# Rows, n and k of a rank, see Case. On two ranks M, N, K are 32, 32, 16 for AG-GEMM, 32, 16, 32 for GEMM-RS and
# 16, 16, 32 for GEMM-AR.
ROWS, N, K = 16, 16, 16
# The operator that computes the gradient of x.
DUAL = {"ag_gemm": "gemm_rs", "gemm_rs": "ag_gemm"}


@contextlib.contextmanager
def tables_in(folder, mode="cached", user="user"):
    """On a rank: use a user cache and shipped tables in ``folder``, and drop tables read before."""
    with pytest.MonkeyPatch.context() as patch, cache_in(folder / user), autotune.mode(mode):
        patch.setattr(disk_cache, "SHIPPED", folder / "shipped")
        patch.setattr(on_demand, "_warned", set())
        yield


def case_of(operator, rows=ROWS, seed=0):
    return Case(operator, FP32, rows, N, K, exact=True, seed=seed)


def problem_of(operator, shape=None, layout="nk", world_size=2):
    if shape is None:
        shape = whole_shape(operator, ROWS, N, K, 2)
    return Problem(operator, gpu_name(device()), world_size, world_size, "float32", layout, shape)


def untuned_config(operator):
    """Return what ``record_configs`` records without a table entry; on a GPU, so few rows run the torch baseline."""
    config = tunable(operator).fallback(problem_of(operator), device())
    return "torch" if config.method == "torch" else config


def config_of(operator, number):
    """Return a legal config; configs with different numbers are distinct."""
    field = "num_comm_sms" if operator == "ag_gemm" else "item_tiles"
    return replace(tunable(operator).default(problem_of(operator), device()), **{field: number})


def entry_of(operator, config, shape=None, layout="nk", ms=2.0, **other_versions):
    """Return an entry for a config, or for a dict of its fields."""
    op = tunable(operator)
    values = config if isinstance(config, dict) else op.config_to_dict(config)
    problem = problem_of(operator, shape, layout)
    return table.Entry(problem, {**versions(op), **other_versions}, values, ms, plain_ms=3.0, when="2026-01-02")


def store_entries(*entries):
    """Store entries in the user's cache. Only rank 0 writes, because ranks may share the cache."""
    if dist.get_rank() == 0:
        disk_cache.store(entries)
    dist.barrier()
    disk_cache.forget()


def ship(folder, *entries):
    """Write entries of one operator as its shipped table."""
    if dist.get_rank() == 0:
        problem = entries[0].problem
        file = folder / "shipped" / disk_cache.path(problem.operator, problem.gpu).relative_to(disk_cache.folder())
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(table.to_json(entries), encoding="utf-8")
    dist.barrier()


@contextlib.contextmanager
def record_configs():
    """Record the configs that run, by operator; the unfused baseline of a forward is recorded as "torch"."""
    ran = {operator: [] for operator in OPERATORS}
    with pytest.MonkeyPatch.context() as patch:
        for operator in OPERATORS:
            module, launcher = (import_module(f"tdkernels.ops.dense.{operator}.{name}") for name in ("op", "launch"))
            launch, plain = launcher.launch, getattr(module, f"{operator}_ref")

            def launch_(x, weight, bias, group, config, *args, ran=ran[operator], launch=launch, **options):
                ran.append(config)
                return launch(x, weight, bias, group, config, *args, **options)

            def plain_(*args, ran=ran[operator], plain=plain, **options):
                ran.append("torch")
                return plain(*args, **options)

            patch.setattr(launcher, "launch", launch_)
            patch.setattr(module, f"{operator}_ref", plain_)
        yield ran


@contextlib.contextmanager
def count_calls(owner, name):
    """Count the calls of a function."""
    count, real = [0], getattr(owner, name)

    def wrapper(*args, **options):
        count[0] += 1
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrapper)
        yield count


@contextlib.contextmanager
def capture_log(level=logging.INFO):
    """Capture the library's log records at this level and above."""
    records, logger = [], logging.getLogger("tdkernels")
    handler = logging.Handler()
    handler.emit = records.append
    previous_level = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous_level)


def check_run(operator, group, rows=ROWS, **options):
    """Clear the group's selected configs, run and check a call, and return (config that ran, its source)."""
    choices = group_state(group).choices
    choices.clear()
    case = case_of(operator, rows)
    with record_configs() as ran:
        case.check({"output": case.call(group=group, **options)})
    assert len(ran[operator]) == 1 or autotune.get_mode() == "on"
    config = ran[operator][-1]
    if not choices:
        return config, None
    [((problem, mode), choice)] = choices.items()
    assert mode == autotune.get_mode() and problem.shape == case.shape
    assert choice.config == config or config == choice.config.method == "torch"
    return config, choice.source


# ---- the order of sources ----


def check_order_of_sources(folder, operator):
    nearest, shipped, cached, explicit = (config_of(operator, number) for number in (3, 4, 5, 6))
    default = untuned_config(operator)
    far, near = (tuple(factor * size for size in problem_of(operator).shape) for factor in (4, 2))
    with a_group() as group, tables_in(folder):
        assert check_run(operator, group) == (default, "default")
        ship(folder, entry_of(operator, shipped, far))
        assert check_run(operator, group) == (default, "default")
        ship(folder, entry_of(operator, nearest, near))
        assert check_run(operator, group) == (nearest, "nearest")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(tunable(operator)), "suits", lambda self, config, *_: config != nearest)
            assert check_run(operator, group) == (default, "default")
        ship(folder, entry_of(operator, nearest, near), entry_of(operator, shipped))
        assert check_run(operator, group) == (shipped, "shipped")
        store_entries(entry_of(operator, cached, near))
        assert check_run(operator, group) == (shipped, "shipped")
        store_entries(entry_of(operator, cached))
        assert check_run(operator, group) == (cached, "cache")
        assert check_run(operator, group, config=explicit) == (explicit, None)
        store_entries(entry_of(operator, {"method": "torch"}))
        assert check_run(operator, group) == ("torch", "cache")
        # Other entries of the same table do not matter.
        store_entries(entry_of(operator, explicit, layout="kn"))
        assert check_run(operator, group) == ("torch", "cache")
        with autotune.mode("off"):  # the default config, without tables or estimates
            assert check_run(operator, group) == (tunable(operator).default(problem_of(operator), device()), "default")
        del group


@pytest.mark.parametrize("operator", OPERATORS)
def test_explicit_then_cache_then_shipped_then_nearest_then_default(tmp_path, operator):
    on_ranks(2, check_order_of_sources, tmp_path, operator)


def check_tables_of_similar_gpu(folder):
    """Check that without a near entry for this GPU the shipped table of a similar GPU is used, exact shape first."""
    operator = OPERATORS[0]
    own, exact, near = (config_of(operator, number) for number in (3, 4, 5))
    doubled = tuple(2 * size for size in problem_of(operator).shape)

    def on_similar_gpu(config, *shape):
        entry = entry_of(operator, config, *shape)
        return replace(entry, problem=replace(entry.problem, gpu="Kin 9000"))

    with a_group() as group, tables_in(folder), pytest.MonkeyPatch.context() as patch:
        ship(folder, on_similar_gpu(near, doubled))
        assert check_run(operator, group) == (untuned_config(operator), "default")
        patch.setitem(KIN, problem_of(operator).gpu, "Kin 9000")
        assert check_run(operator, group) == (near, "similar_gpu")
        explained = explain(operator, *problem_of(operator).shape, dtype=FP32, group=group)
        assert (explained.source, explained.tuned_for.gpu, explained.measured) == ("similar_gpu", "Kin 9000", False)
        assert "for a similar GPU" in str(explained)
        ship(folder, on_similar_gpu(near, doubled), on_similar_gpu(exact))
        assert check_run(operator, group) == (exact, "similar_gpu")
        with autotune.mode("off"):
            assert check_run(operator, group)[1] == "default"
        store_entries(entry_of(operator, own, doubled))
        assert check_run(operator, group) == (own, "nearest")  # measured on this GPU
        del group


def test_tables_of_a_similar_gpu(tmp_path):
    on_ranks(2, check_tables_of_similar_gpu, tmp_path)


def check_selected_once(folder):
    """Check that later calls neither read files nor communicate, even if the files have changed."""
    first, later = config_of("ag_gemm", 3), config_of("ag_gemm", 4)
    with a_group() as group, tables_in(folder):
        store_entries(entry_of("ag_gemm", first))
        case = case_of("ag_gemm")
        with record_configs() as ran:
            case.call(group=group)
            store_entries(entry_of("ag_gemm", later))
            with count_calls(selection, "look_up") as lookups, count_calls(group_state(group), "exchange") as exchanges:
                for _ in range(2):
                    case.check({"output": case.call(group=group)})
        assert ran["ag_gemm"] == [first] * 3 and lookups == exchanges == [0]
        # Each mode has its own selection.
        with autotune.mode("off"), record_configs() as ran:
            case.call(group=group)
        assert ran["ag_gemm"] == [tunable("ag_gemm").default(problem_of("ag_gemm"), device())]
        # Tuning resets the selection.
        with autotune.mode("cached"):
            entry = autotune.tune("ag_gemm", *problem_of("ag_gemm").shape, dtype=FP32, group=group).entry
            case.check({"output": case.call(group=group)})
        [choice] = [choice for (_, mode), choice in group_state(group).choices.items() if mode == "cached"]
        assert choice.source == "cache" and choice.entry.config == entry.config
        del group


def test_config_is_selected_once_per_shape(tmp_path):
    on_ranks(2, check_selected_once, tmp_path)


# ---- entries that are not used ----


def check_entries_of_other_versions(folder, what):
    cached, shipped = config_of("ag_gemm", 3), config_of("ag_gemm", 4)
    default = untuned_config("ag_gemm")
    with a_group() as group, tables_in(folder):
        store_entries(entry_of("ag_gemm", cached, **{what: "of another day"}))
        assert check_run("ag_gemm", group) == (default, "default")
        ship(folder, entry_of("ag_gemm", shipped, **{what: "of another day"}))
        assert check_run("ag_gemm", group) == (shipped, "shipped")
        store_entries(entry_of("ag_gemm", cached))  # in addition to the entry of other versions
        assert check_run("ag_gemm", group) == (cached, "cache")
        del group


@pytest.mark.parametrize("what", ["torch", "triton", "kernels"])
def test_other_versions_miss_in_the_cache_but_match_in_shipped_tables(tmp_path, what):
    on_ranks(2, check_entries_of_other_versions, tmp_path, what)


UNUSABLE = {
    "no such tile": {"method": "fused", "tiles": {"block_m": 48}},
    "no such field": {"method": "fused", "colour": "red"},
    "of another operator": {"method": "fused", "item_tiles": 4},
    "no such field of a tile": {"method": "fused", "tiles": {"block_q": 64}},
    "no such method": {"method": "sideways"},
    "no such transport": {"transport": "pigeon"},
    "too small": {"num_comm_sms": 0},
    "text for a number": {"num_comm_sms": "many"},
    "a list for a number": {"num_comm_sms": [2]},
    "nothing for a text": {"transport": None},
    "a list for the tiles": {"tiles": [64, 64, 64]},
    "text for the tiles": {"tiles": "64x64x64"},
}


def check_unusable_entry(folder, values):
    shipped = config_of("ag_gemm", 4)
    tdkernels.set_timeout(3.0)
    try:
        with a_group() as group, tables_in(folder):
            ship(folder, entry_of("ag_gemm", shipped))
            store_entries(entry_of("ag_gemm", values))
            with capture_log(logging.WARNING) as warnings:
                for _ in range(2):
                    assert check_run("ag_gemm", group) == (shipped, "shipped")
            messages = [record.getMessage() for record in warnings]
            assert len(messages) == (dist.get_rank() == 0), messages
            assert all("the cache entry for ag_gemm 32x32x16" in each and "is not used" in each for each in messages)
            # It is not used for a near shape either.
            default = untuned_config("ag_gemm")
            ship(folder, entry_of("ag_gemm", values, (64, 64, 32)))
            assert check_run("ag_gemm", group) == (default, "default")
            del group
    finally:
        tdkernels.set_timeout(None)


@pytest.mark.parametrize("what", UNUSABLE)
def test_unusable_entry_is_skipped_with_one_warning(tmp_path, what):
    on_ranks(2, check_unusable_entry, tmp_path, UNUSABLE[what])


def check_entry_without_tiles(folder, values):
    """Check that the call is correct; the tiles may be filled in or the entry skipped."""
    with a_group() as group, tables_in(folder):
        store_entries(entry_of("ag_gemm", values))
        case = case_of("ag_gemm")
        case.check({"output": case.call(group=group)})
        del group


@pytest.mark.parametrize("values", [{"method": "fused"}, {"num_comm_sms": 2, "tiles": None}], ids=str)
def test_an_entry_without_tiles(tmp_path, values):
    on_ranks(2, check_entry_without_tiles, tmp_path, values)


# ---- ranks whose files or settings differ ----


def check_ranks_follow_rank_0(folder, first):
    """Check the selection if rank 1 has another entry than rank 0."""
    mine, others = config_of("ag_gemm", 3), config_of("ag_gemm", 4)
    default = untuned_config("ag_gemm")
    expected = {"a hit": (mine, "cache"), "nothing": (default, "default"), "garbage": (default, "default")}[first]
    with a_group() as group, tables_in(folder, user=f"user{dist.get_rank()}"):
        if dist.get_rank() == 1:
            disk_cache.store([entry_of("ag_gemm", others, ms=9.0)])
        elif first == "a hit":
            disk_cache.store([entry_of("ag_gemm", mine, ms=7.0)])
        elif first == "garbage":
            file = disk_cache.path("ag_gemm", gpu_name(device()))
            file.parent.mkdir(parents=True)
            file.write_text('{"format": 1, "entr', encoding="utf-8")
        disk_cache.forget()
        with capture_log(logging.WARNING) as warnings:
            assert check_run("ag_gemm", group) == expected
        warned = [record.getMessage() for record in warnings if "is ignored" in record.getMessage()]
        assert len(warned) == (first == "garbage" and dist.get_rank() == 0), warned
        [choice] = group_state(group).choices.values()
        assert (choice.entry.ms if choice.entry else None) == (7.0 if first == "a hit" else None)
        del group


@pytest.mark.parametrize("first", ["a hit", "nothing", "garbage"])
def test_all_ranks_follow_the_files_of_rank_0(tmp_path, first):
    on_ranks(2, check_ranks_follow_rank_0, tmp_path, first)


def check_mismatch(folder, what):
    rank = dist.get_rank()
    with a_group() as group, tables_in(folder):
        mode = ("cached" if rank == 0 else "on") if what == "config" else "cached"
        rows = [ROWS, ROWS + (what == "M/W")]
        case = case_of("ag_gemm", rows[rank])
        with autotune.mode(mode), pytest.raises(ValueError) as caught:
            case.call(group=group)
        message = str(caught.value)
        modes = '"left to autotune (cached)" on rank 0, "left to autotune (on)" on rank 1'
        values = modes if what == "config" else "16 on rank 0, 17 on rank 1"
        assert f"ag_gemm: the ranks disagree: {what} is {values}" == message, message
        assert not group_state(group).choices
        case = case_of("ag_gemm")
        case.check({"output": case.call(group=group)})
        del group, caught


@pytest.mark.parametrize("what", ["config", "M/W"])
def test_mismatched_modes_or_shapes_are_reported_on_every_rank(tmp_path, what):
    on_ranks(2, check_mismatch, tmp_path, what)


# ---- tuning on a miss ----


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


# ---- torch.compile ----


def check_tracing(folder, mode):
    """Check that tracing selects no config, and that calls of the compiled function select as eager calls do."""
    torch._dynamo.reset()
    selected_while_tracing = []
    with a_group() as group, tables_in(folder, mode):
        case = case_of("ag_gemm")
        with count_calls(tunable_base, "choose") as selected, count_calls(tuner, "tune_problem") as tuned:
            compile_ = torch._dynamo.lookup_backend("aot_eager")

            def backend(graph, inputs):
                compiled = compile_(graph, inputs)
                selected_while_tracing.append(selected[0] + tuned[0])
                return compiled

            def function(x, weight, bias, group):
                return tdkernels.ag_gemm(x, weight, bias, group=group) * 1.0

            compiled = torch.compile(function, backend=backend, fullgraph=True)
            output = compiled(case.x, case.weight, case.bias, group)
            assert selected_while_tracing == [0]
            assert selected == [1] and tuned == [int(mode == "on")]
            case.check({"output": output})
            output.backward(case.dy)
            assert selected == [2]  # one more for the GEMM-RS of dx
            case.check(case.gradients())
            case.check({"output": compiled(case.x, case.weight, case.bias, group)})
            assert selected == [2] and len(selected_while_tracing) == 1, "the repeated call is cached"
            assert tuned == [2 * int(mode == "on")]
        del group, compiled, output
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["cached", "on"])
def test_tracing_does_not_select_or_tune(tmp_path, mode):
    on_ranks(2, check_tracing, tmp_path, mode)


# ---- the backward ----


def check_backward(folder, operator, method):
    """Check that dx is computed by the dual operator, with the config tuned for a [K, N] weight."""
    dual = DUAL[operator]
    m, n, k = problem_of(operator).shape
    tuned = config_of(dual, 3) if method == "fused" else {"method": "torch"}
    with a_group() as group, tables_in(folder):
        # The entry for the default layout belongs to another problem.
        store_entries(entry_of(dual, config_of(dual, 5), (m, k, n), "nk"))
        store_entries(entry_of(dual, tuned, (m, k, n), "kn"))
        case = case_of(operator)
        with record_configs() as ran:
            case.check(case.run(group=group))
        expected = {operator: [untuned_config(operator)], dual: [tuned] if method == "fused" else []}
        assert ran == {**dict.fromkeys(OPERATORS, []), **expected}
        choices = {problem: choice for (problem, _), choice in group_state(group).choices.items()}
        backward = problem_of(dual, (m, k, n), "kn")
        assert choices.keys() == {problem_of(operator), backward} and choices[backward].source == "cache"
        # One gradient at a time. Without dx there is no GEMM-RS or AG-GEMM in the backward.
        for name in ("x", "weight", "bias"):
            alone = case_of(operator, seed=1)
            for other in ("x", "weight", "bias"):
                getattr(alone, other).requires_grad_(other == name)
            alone.check(alone.run(group=group))
        del group


@pytest.mark.parametrize("method", ["fused", "torch"])
@pytest.mark.parametrize("operator", DUAL)
def test_backward_uses_tuned_config(tmp_path, operator, method):
    on_ranks(2, check_backward, tmp_path, operator, method)


# ---- logging ----


def check_log(folder):
    """Check that rank 0 logs one line per shape, and one warning in all if there is no table for its GPU."""
    with a_group() as group, tables_in(folder):
        store_entries(entry_of("gemm_rs", config_of("gemm_rs", 3)))
        case, other, tuned = case_of("ag_gemm"), case_of("ag_gemm", ROWS + 1), case_of("gemm_rs")
        with capture_log() as records:
            for _ in range(2):
                for each in (case, other, tuned):
                    each.call(group=group)
        infos = [record.getMessage() for record in records if record.levelno == logging.INFO]
        warnings = [record.getMessage() for record in records if record.levelno > logging.INFO]
        if dist.get_rank() != 0:
            assert not records
        else:
            assert len(infos) == 3, infos
            runs = "torch" if untuned_config("ag_gemm") == "torch" else "fused"
            assert re.match(rf"ag_gemm 32x32x16 float32 nk on 2 x .*: {runs} \(default\), method={runs}\b", infos[0])
            assert infos[1].startswith("ag_gemm 34x32x16")
            assert re.match(r"gemm_rs 32x16x32 .*: fused \(cache\), .*item_tiles=3.* 2.000 ms measured, ", infos[2])
            assert len(warnings) == (1 if device().type == "cuda" else 0), warnings
            assert all(re.match("ag_gemm 32x32x16 .* there is no table of ag_gemm ", line) for line in warnings)
        del group


def test_rank_0_logs_one_line_per_shape(tmp_path):
    on_ranks(2, check_log, tmp_path)


def test_autotune_is_off_by_default_in_tests():
    # Other tests must not depend on the configs that were tuned on this machine.
    assert os.environ["TDKERNELS_AUTOTUNE"] == "off" and autotune.get_mode() == "off"


# ---- problems without table entries ----


@pytest.mark.parametrize("operator", OPERATORS)
def test_fallback_is_torch_for_medium_m_on_a_gpu(operator, monkeypatch):
    """On a simulated GPU: medium M is too large for one tile and too small for overlap to pay."""
    rates = Hardware(790e12, 4.3e12, 380e9, 132, measured=True)
    monkeypatch.setattr(gemm_tunable, "hardware", lambda device, dtype: rates)
    monkeypatch.setattr(runtime_gpu, "num_sms", lambda device: 132)
    op, gpu = tunable(operator), torch.device("cuda", 0)
    for capability, medium in (((8, 0), "torch"), ((9, 0), "fused")):  # Hopper has kernels that are fast there, too
        monkeypatch.setattr(runtime_gpu, "capability", lambda device, value=capability: value)
        methods = {
            m: op.fallback(Problem(operator, "NVIDIA Testing", 4, 4, "bfloat16", "nk", (m, 8192, 8192)), gpu).method
            for m in (4, 64, 1024, 8192, 32768)
        }
        assert methods == {4: "fused", 64: "fused", 1024: medium, 8192: "fused", 32768: "fused"}
    on_nodes = Problem(operator, "NVIDIA Testing", 4, 2, "bfloat16", "nk", (4, 8192, 8192))
    wide = Problem(operator, "NVIDIA Testing", 4, 4, "float32", "nk", (64, 8192, 8192))
    for problem in (on_nodes, wide):
        assert op.fallback(problem, gpu).method == "torch", "small-M kernels need one node and a 16-bit dtype"


def test_fallback_is_fused_on_cpu_ranks(monkeypatch):
    problem = Problem("ag_gemm", "cpu", 2, 2, "float32", "nk", (4, 4, 4))
    assert tunable("ag_gemm").fallback(problem, torch.device("cpu")).method == "fused"


def simulated_hopper(monkeypatch):
    """Return a device with the properties of an H200 on which configs depend."""
    pretend_hopper(monkeypatch)
    monkeypatch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: 227 << 10)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("operator, lower, higher", [
    ("gemm_rs", {"transport": "forward"}, {"transport": "direct"}),
    ("gemm_rs", {"transport": "direct"}, {"transport": "direct", "warp_specialize": True}),
    ("gemm_ar", {"transport": "forward"}, {"transport": "direct", "warp_specialize": True}),
    ("ag_gemm", {"transport": "push"}, {"transport": "push", "warp_specialize": True}),
    ("ag_gemm", {"method": "parts"}, {"transport": "push", "warp_specialize": True}),
    ("gemm_rs", {"method": "torch"}, {"transport": "direct"}),
])
def test_default_of_a_newer_kind_supersedes_older_measurements(operator, lower, higher, monkeypatch):
    """On a simulated Hopper GPU the default has the highest kind of kernel for this shape."""
    tuned, device = tunable(operator), simulated_hopper(monkeypatch)
    monkeypatch.setattr(disk_cache, "user_entries", lambda *name: [])
    current = versions(tuned)
    problem = Problem(operator, "NVIDIA Testing", 4, 4, "bfloat16", "nk", (8192, 8192, 8192))
    best = tuned.default(problem, device)
    assert best.warp_specialize

    def selected(changes, default=best, current_kernels=False, modelled=False, near=False):
        config = tuned.config_to_dict(replace(best, **{"warp_specialize": False, **changes}))
        kernels = {**current, "kernels": current["kernels"] if current_kernels else "older"}
        entry = make_entry(operator, config=config, versions=kernels, modelled=modelled)
        entry = replace(entry, problem=replace(problem, shape=(8192, 8192, 4096)) if near else problem)
        monkeypatch.setattr(disk_cache, "shipped_entries", lambda *name: [entry])
        monkeypatch.setattr(type(tuned), "default", lambda self, problem, device: default)
        return selection.look_up(tuned, problem, device, "cached").source

    of_higher = replace(best, **{"warp_specialize": False, **higher})
    assert selected(lower, of_higher) == selected(lower, of_higher, near=True) == "default"
    assert selected(lower, of_higher, current_kernels=True) == "shipped"
    assert selected(lower, of_higher, modelled=True) == "modelled"
    assert selected(higher, of_higher) == "shipped" and selected(higher, of_higher, near=True) == "nearest"
    assert selected(higher, replace(best, **{"warp_specialize": False, **lower})) == "shipped"


def test_few_rows_keep_older_measurements(monkeypatch):
    tuned, device = tunable("ag_gemm"), simulated_hopper(monkeypatch)
    for m, superseded in ((512, False), (1024, True)):
        problem = Problem("ag_gemm", "NVIDIA Testing", 4, 4, "bfloat16", "nk", (m, 8192, 8192))
        assert tuned.default(problem, device).warp_specialize
        assert tuned.is_superseded(tdkernels.AgGemmConfig(), problem, device) == superseded


def test_modelled_entries_rank_between_current_and_older_measurements(monkeypatch):
    tuned, device = tunable("gemm_rs"), torch.device("cpu")
    current = versions(tuned)
    mine = []

    def entry(item_tiles, kernels, day, modelled=False):
        config = asdict(tdkernels.GemmRsConfig(tiles=tdkernels.Tiles(16, 16, 16), item_tiles=item_tiles))
        kernels = {**current, "kernels": kernels}
        return make_entry("gemm_rs", config=config, versions=kernels, modelled=modelled, when=f"2026-01-{day:02}")

    older, now, model = entry(1, "older", 8), entry(2, current["kernels"], 8), entry(3, "older", 9, modelled=True)
    monkeypatch.setattr(disk_cache, "user_entries", lambda *name: mine)

    def selected(*entries, shape=older.problem.shape):
        monkeypatch.setattr(disk_cache, "shipped_entries", lambda *name: list(entries))
        choice = selection.look_up(tuned, replace(older.problem, shape=shape), device, "cached")
        return choice.config.item_tiles, choice.source

    assert selected(older) == (1, "shipped")
    assert selected(older, model) == selected(model, older) == selected(model) == (3, "modelled")
    assert selected(older, now, model) == selected(model, now) == (2, "shipped")
    for day in (9, 10):  # measured when the model was, or later
        later = replace(older, when=f"2026-01-{day:02}")
        assert selected(later, model) == selected(model, later) == (1, "shipped")
    assert selected(replace(now, versions={**now.versions, "torch": "older"}), model) == (2, "shipped")
    near = (8192, 4096, 8192)
    assert selected(model, shape=near) == (3, "nearest")
    for kernels in ("0000", "zzzz"):  # the order of the hashes does not matter
        other = replace(older, versions={**current, "kernels": kernels})
        assert selected(other, model, shape=near) == selected(model, other, shape=near) == (3, "nearest")
    mine.append(now)
    assert selected(model) == (2, "cache")
    assert selected(older, model, shape=near) == (2, "nearest")
