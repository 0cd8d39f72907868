"""Config selection: the order of sources, and that all ranks select the same config if their files differ."""

import logging
import os
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import autotune, explain
from tdkernels.autotune import disk_cache, selection, tuner
from tdkernels.autotune.hardware import KIN
from tdkernels.autotune.problem import gpu_name
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common import tunable_base
from tdkernels.symm.group import group_state
from tests.autotune.selection_support import (
    DUAL,
    FP32,
    ROWS,
    capture_log,
    case_of,
    check_run,
    config_of,
    count_calls,
    entry_of,
    problem_of,
    record_configs,
    ship,
    store_entries,
    tables_in,
    untuned_config,
)
from tests.support.dense_oracle import OPERATORS
from tests.support.ranks import a_group, device, on_ranks

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
