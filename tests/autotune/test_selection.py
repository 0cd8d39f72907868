"""Which config a call runs with: where it comes from, and that all ranks run the same, whatever their files say."""

import contextlib
import logging
import os
import re
from dataclasses import replace
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
from tests.autotune.entries import cache_in
from tests.autotune.support import replace_in
from tests.support.dense_oracle import OPERATORS, Case, whole_shape
from tests.support.ranks import a_group, device, fresh_ranks, on_ranks

FP32 = torch.float32
# Rows, n and k of a rank, see Case; on two ranks M, N, K of AG-GEMM are 32, 32, 16, of GEMM-RS 32, 16, 32 and of
# GEMM-AR 16, 16, 32.
ROWS, N, K = 16, 16, 16
# By which the gradient of x is computed.
DUAL = {"ag_gemm": "gemm_rs", "gemm_rs": "ag_gemm"}


@contextlib.contextmanager
def tables_in(folder, mode="cached", user="user"):
    """In a rank: the user's cache and the shipped tables are in this folder, and nothing is remembered from before."""
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


def untuned(operator):
    """What runs where nobody has tuned, in the words of `recorded`: on a GPU, so few rows run in sequence."""
    config = tunable(operator).fallback(problem_of(operator), device())
    return "torch" if config.method == "torch" else config


def config_of(operator, number):
    """A legal config, told from others by its number."""
    field = "num_comm_sms" if operator == "ag_gemm" else "item_tiles"
    return replace(tunable(operator).default(problem_of(operator), device()), **{field: number})


def entry_of(operator, config, shape=None, layout="nk", ms=2.0, **other_versions):
    """An entry for a config, or for a dict that stands for one."""
    op = tunable(operator)
    values = config if isinstance(config, dict) else op.config_to_dict(config)
    problem = problem_of(operator, shape, layout)
    return table.Entry(problem, {**versions(op), **other_versions}, values, ms, plain_ms=3.0, when="2026-01-02")


def tune_by_hand(*entries):
    """Put entries into the user's cache; once, whoever shares it."""
    if dist.get_rank() == 0:
        disk_cache.store(entries)
    dist.barrier()
    disk_cache.forget()


def ship(folder, *entries):
    """Put entries of one operator into the shipped tables."""
    if dist.get_rank() == 0:
        problem = entries[0].problem
        file = folder / "shipped" / disk_cache.path(problem.operator, problem.gpu).relative_to(disk_cache.folder())
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(table.to_json(entries), encoding="utf-8")
    dist.barrier()


@contextlib.contextmanager
def recorded():
    """The configs that run within, by operator; "torch" for the plain sequence of a forward."""
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
def counted(owner, name):
    """How often a function is called within."""
    count, real = [0], getattr(owner, name)

    def counting(*args, **options):
        count[0] += 1
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counting)
        yield count


@contextlib.contextmanager
def log_of(level=logging.INFO):
    """What the library logs within, at this level and above."""
    records, logger = [], logging.getLogger("tdkernels")
    handler = logging.Handler()
    handler.emit = records.append
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def run_of(operator, group, rows=ROWS, **options):
    """Run a right call in a group that has chosen nothing yet; (what ran, where it came from)."""
    choices = group_state(group).choices
    choices.clear()
    case = case_of(operator, rows)
    with recorded() as ran:
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


def follows_the_order(folder, operator):
    nearest, shipped, cached, explicit = (config_of(operator, number) for number in (3, 4, 5, 6))
    default = untuned(operator)
    far, near = (tuple(factor * size for size in problem_of(operator).shape) for factor in (4, 2))
    with a_group() as group, tables_in(folder):
        assert run_of(operator, group) == (default, "default")
        ship(folder, entry_of(operator, shipped, far))
        assert run_of(operator, group) == (default, "default")
        ship(folder, entry_of(operator, nearest, near))
        assert run_of(operator, group) == (nearest, "nearest")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(tunable(operator)), "suits", lambda self, config, *_: config != nearest)
            assert run_of(operator, group) == (default, "default")
        ship(folder, entry_of(operator, nearest, near), entry_of(operator, shipped))
        assert run_of(operator, group) == (shipped, "shipped")
        tune_by_hand(entry_of(operator, cached, near))
        assert run_of(operator, group) == (shipped, "shipped")
        tune_by_hand(entry_of(operator, cached))
        assert run_of(operator, group) == (cached, "cache")
        assert run_of(operator, group, config=explicit) == (explicit, None)
        tune_by_hand(entry_of(operator, {"method": "torch"}))
        assert run_of(operator, group) == ("torch", "cache")
        # What is in other rows of the same table does not matter.
        tune_by_hand(entry_of(operator, explicit, layout="kn"))
        assert run_of(operator, group) == ("torch", "cache")
        with autotune.mode("off"):  # and then what runs depends on nothing, not even on an estimate
            assert run_of(operator, group) == (tunable(operator).default(problem_of(operator), device()), "default")
        del group


@pytest.mark.parametrize("operator", OPERATORS)
def test_explicit_then_cache_then_shipped_then_nearest_then_default(tmp_path, operator):
    on_ranks(2, follows_the_order, tmp_path, operator)


def follows_a_kindred_table(folder):
    """Where nothing near is known of this GPU, what is shipped for one of the same kind: this shape, or one near it."""
    operator = OPERATORS[0]
    own, theirs, near = (config_of(operator, number) for number in (3, 4, 5))
    twice = tuple(2 * size for size in problem_of(operator).shape)

    def on_kin(config, *shape):
        entry = entry_of(operator, config, *shape)
        return replace(entry, problem=replace(entry.problem, gpu="Kin 9000"))

    with a_group() as group, tables_in(folder), pytest.MonkeyPatch.context() as patch:
        ship(folder, on_kin(near, twice))
        assert run_of(operator, group) == (untuned(operator), "default")
        patch.setitem(KIN, problem_of(operator).gpu, "Kin 9000")
        assert run_of(operator, group) == (near, "kindred")
        explained = explain(operator, *problem_of(operator).shape, dtype=FP32, group=group)
        assert (explained.source, explained.tuned_for.gpu, explained.measured) == ("kindred", "Kin 9000", False)
        assert "for a similar GPU" in str(explained)
        ship(folder, on_kin(near, twice), on_kin(theirs))
        assert run_of(operator, group) == (theirs, "kindred")
        with autotune.mode("off"):
            assert run_of(operator, group)[1] == "default"
        tune_by_hand(entry_of(operator, own, twice))
        assert run_of(operator, group) == (own, "nearest")  # measured on this GPU
        del group


def test_tables_of_a_kindred_gpu(tmp_path):
    on_ranks(2, follows_a_kindred_table, tmp_path)


def decides_once(folder):
    """Later calls neither read files nor talk to the peers, though the files have changed."""
    first, later = config_of("ag_gemm", 3), config_of("ag_gemm", 4)
    with a_group() as group, tables_in(folder):
        tune_by_hand(entry_of("ag_gemm", first))
        case = case_of("ag_gemm")
        with recorded() as ran:
            case.call(group=group)
            tune_by_hand(entry_of("ag_gemm", later))
            with counted(selection, "look_up") as lookups, counted(group_state(group), "exchange") as exchanges:
                for _ in range(2):
                    case.check({"output": case.call(group=group)})
        assert ran["ag_gemm"] == [first] * 3 and lookups == exchanges == [0]
        # Another mode is another question.
        with autotune.mode("off"), recorded() as ran:
            case.call(group=group)
        assert ran["ag_gemm"] == [tunable("ag_gemm").default(problem_of("ag_gemm"), device())]
        # After tuning the group asks again.
        with autotune.mode("cached"):
            entry = autotune.tune("ag_gemm", *problem_of("ag_gemm").shape, dtype=FP32, group=group).entry
            case.check({"output": case.call(group=group)})
        [choice] = [choice for (_, mode), choice in group_state(group).choices.items() if mode == "cached"]
        assert choice.source == "cache" and choice.entry.config == entry.config
        del group


def test_a_shape_is_decided_once(tmp_path):
    on_ranks(2, decides_once, tmp_path)


# ---- entries that do not count ----


def has_entries_of_other_versions(folder, what):
    cached, shipped = config_of("ag_gemm", 3), config_of("ag_gemm", 4)
    default = untuned("ag_gemm")
    with a_group() as group, tables_in(folder):
        tune_by_hand(entry_of("ag_gemm", cached, **{what: "of another day"}))
        assert run_of("ag_gemm", group) == (default, "default")
        ship(folder, entry_of("ag_gemm", shipped, **{what: "of another day"}))
        assert run_of("ag_gemm", group) == (shipped, "shipped")
        tune_by_hand(entry_of("ag_gemm", cached))  # beside the one of other versions
        assert run_of("ag_gemm", group) == (cached, "cache")
        del group


@pytest.mark.parametrize("what", ["torch", "triton", "kernels"])
def test_other_versions_are_a_miss_in_the_cache_and_good_enough_when_shipped(tmp_path, what):
    on_ranks(2, has_entries_of_other_versions, tmp_path, what)


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


def skips(folder, values):
    shipped = config_of("ag_gemm", 4)
    tdkernels.set_timeout(3.0)
    try:
        with a_group() as group, tables_in(folder):
            ship(folder, entry_of("ag_gemm", shipped))
            tune_by_hand(entry_of("ag_gemm", values))
            with log_of(logging.WARNING) as warnings:
                for _ in range(2):
                    assert run_of("ag_gemm", group) == (shipped, "shipped")
            texts = [record.getMessage() for record in warnings]
            assert len(texts) == (dist.get_rank() == 0), texts
            assert all("the cache entry for ag_gemm 32x32x16" in text and "is not used" in text for text in texts)
            # Nor is it used from afar.
            default = untuned("ag_gemm")
            ship(folder, entry_of("ag_gemm", values, (64, 64, 32)))
            assert run_of("ag_gemm", group) == (default, "default")
            del group
    finally:
        tdkernels.set_timeout(None)


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_entry_that_cannot_run_is_skipped_with_one_warning(tmp_path, what):
    on_ranks(2, skips, tmp_path, UNUSABLE[what])


def meets_an_entry_without_tiles(folder, values):
    """They may be filled in, as for a config of the call, or the entry skipped; but the call must be right."""
    with a_group() as group, tables_in(folder):
        tune_by_hand(entry_of("ag_gemm", values))
        case = case_of("ag_gemm")
        case.check({"output": case.call(group=group)})
        del group


@pytest.mark.parametrize("values", [{"method": "fused"}, {"num_comm_sms": 2, "tiles": None}], ids=str)
def test_an_entry_without_tiles(tmp_path, values):
    on_ranks(2, meets_an_entry_without_tiles, tmp_path, values)


# ---- ranks whose files or settings differ ----


def has_files_of_its_own(folder, first):
    """Rank 1 has tuned something else than rank 0."""
    mine, others = config_of("ag_gemm", 3), config_of("ag_gemm", 4)
    default = untuned("ag_gemm")
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
        with log_of(logging.WARNING) as warnings:
            assert run_of("ag_gemm", group) == expected
        warned = [record.getMessage() for record in warnings if "is ignored" in record.getMessage()]
        assert len(warned) == (first == "garbage" and dist.get_rank() == 0), warned
        [choice] = group_state(group).choices.values()
        assert (choice.entry.ms if choice.entry else None) == (7.0 if first == "a hit" else None)
        del group


@pytest.mark.parametrize("first", ["a hit", "nothing", "garbage"])
def test_all_follow_rank_0_whatever_is_in_their_own_files(tmp_path, first):
    on_ranks(2, has_files_of_its_own, tmp_path, first)


def differs(folder, what):
    rank = dist.get_rank()
    with a_group() as group, tables_in(folder):
        mode = ("cached" if rank == 0 else "on") if what == "config" else "cached"
        rows = [ROWS, ROWS + (what == "M/W")]
        case = case_of("ag_gemm", rows[rank])
        with autotune.mode(mode), pytest.raises(ValueError) as caught:
            case.call(group=group)
        text = str(caught.value)
        modes = '"left to autotune (cached)" on rank 0, "left to autotune (on)" on rank 1'
        values = modes if what == "config" else "16 on rank 0, 17 on rank 1"
        assert f"ag_gemm: the ranks disagree: {what} is {values}" == text, text
        assert not group_state(group).choices
        case = case_of("ag_gemm")
        case.check({"output": case.call(group=group)})
        del group, caught


@pytest.mark.parametrize("what", ["config", "M/W"])
def test_other_modes_or_shapes_are_named_on_every_rank(tmp_path, what):
    on_ranks(2, differs, tmp_path, what)


# ---- tuning on a miss ----


def tunes_on_a_miss(folder, expected):
    """``expected``: how often in the first and in the second call."""
    with a_group() as group, tables_in(folder, "on"), counted(tuner, "tune_problem") as count:
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


def test_mode_on_tunes_once_and_later_processes_find_it(tmp_path):
    first = on_ranks(2, tunes_on_a_miss, tmp_path, [1, 0])
    with fresh_ranks(2) as pool:
        later = pool.run(tunes_on_a_miss, tmp_path, [0, 0])
    assert first == later == [first[0]] * 2


def tunes_only_where_it_should(folder):
    tuned = config_of("ag_gemm", 3)
    near = tuple(2 * size for size in problem_of("ag_gemm").shape)
    with a_group() as group, tables_in(folder), counted(tuner, "tune_problem") as count:
        for mode in ("off", "cached"):
            with autotune.mode(mode):
                assert run_of("ag_gemm", group)[1] == "default"
        with autotune.mode("on"):
            run_of("ag_gemm", group, config=tuned)
            ship(folder, entry_of("ag_gemm", tuned))
            assert run_of("ag_gemm", group) == (tuned, "shipped")
            assert count == [0]
            ship(folder, entry_of("ag_gemm", tuned, near))
            assert run_of("ag_gemm", group)[1] == "cache"  # a guess from afar is no reason not to tune
            assert count == [1]
        with autotune.mode("on"):
            assert run_of("ag_gemm", group)[1] == "cache" and count == [1]
        del group


def test_only_mode_on_tunes_and_only_what_nobody_has_tuned(tmp_path):
    on_ranks(2, tunes_only_where_it_should, tmp_path)


def one_rank_captures(folder):
    with a_group() as group, tables_in(folder, "on"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_capturing", lambda device: dist.get_rank() == 1)
        with counted(tuner, "tune_problem") as count:
            case = case_of("ag_gemm")
            case.check({"output": case.call(group=group)})
        assert count == [0] and not group_state(group).choices, "it is tuned when that is possible"
        del group


def test_nobody_tunes_while_a_rank_captures(tmp_path):
    on_ranks(2, one_rank_captures, tmp_path)


def cannot_be_tuned(folder):
    """A call goes on with what it would have run without tuning."""
    op = tunable("ag_gemm")

    def operands(*_):
        raise MemoryError("no room")

    with a_group() as group, tables_in(folder, "on"), pytest.MonkeyPatch.context() as patch:
        replace_in(patch, op, "operands", operands)
        with log_of(logging.WARNING) as warnings:
            assert run_of("ag_gemm", group) == (untuned("ag_gemm"), "default")
        texts = [record.getMessage() for record in warnings if "could not be tuned" in record.getMessage()]
        assert len(texts) == (dist.get_rank() == 0) and all("no room" in text for text in texts)
        del group


def test_a_call_that_cannot_tune_runs_all_the_same(tmp_path):
    on_ranks(2, cannot_be_tuned, tmp_path)


# ---- torch.compile ----


def is_traced(folder, mode):
    """Tracing asks nobody; each call of what was traced asks as an eager call does."""
    torch._dynamo.reset()
    asked_while_tracing = []
    with a_group() as group, tables_in(folder, mode):
        case = case_of("ag_gemm")
        with counted(tunable_base, "choose") as asked, counted(tuner, "tune_problem") as tuned:
            compile_ = torch._dynamo.lookup_backend("aot_eager")

            def backend(graph, inputs):
                compiled = compile_(graph, inputs)
                asked_while_tracing.append(asked[0] + tuned[0])
                return compiled

            def function(x, weight, bias, group):
                return tdkernels.ag_gemm(x, weight, bias, group=group) * 1.0

            compiled = torch.compile(function, backend=backend, fullgraph=True)
            output = compiled(case.x, case.weight, case.bias, group)
            assert asked_while_tracing == [0]
            assert asked == [1] and tuned == [int(mode == "on")]
            case.check({"output": output})
            output.backward(case.dy)
            assert asked == [2]  # for the GEMM-RS of dx
            case.check(case.gradients())
            case.check({"output": compiled(case.x, case.weight, case.bias, group)})
            assert asked == [2] and len(asked_while_tracing) == 1, "the same call is known by now"
            assert tuned == [2 * int(mode == "on")]
        del group, compiled, output
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["cached", "on"])
def test_tracing_neither_looks_up_nor_tunes(tmp_path, mode):
    on_ranks(2, is_traced, tmp_path, mode)


# ---- the backward ----


def goes_backward(folder, operator, method):
    """The product of dx is the other operator, with the weight as [K, N]."""
    dual = DUAL[operator]
    m, n, k = problem_of(operator).shape
    tuned = config_of(dual, 3) if method == "fused" else {"method": "torch"}
    with a_group() as group, tables_in(folder):
        # What is there for the usual layout is for another problem.
        tune_by_hand(entry_of(dual, config_of(dual, 5), (m, k, n), "nk"))
        tune_by_hand(entry_of(dual, tuned, (m, k, n), "kn"))
        case = case_of(operator)
        with recorded() as ran:
            case.check(case.run(group=group))
        expected = {operator: [untuned(operator)], dual: [tuned] if method == "fused" else []}
        assert ran == {**dict.fromkeys(OPERATORS, []), **expected}
        choices = {problem: choice for (problem, _), choice in group_state(group).choices.items()}
        backward = problem_of(dual, (m, k, n), "kn")
        assert choices.keys() == {problem_of(operator), backward} and choices[backward].source == "cache"
        # Each gradient by itself: what needs no dx takes no GEMM-RS or AG-GEMM.
        for name in ("x", "weight", "bias"):
            alone = case_of(operator, seed=1)
            for other in ("x", "weight", "bias"):
                getattr(alone, other).requires_grad_(other == name)
            alone.check(alone.run(group=group))
        del group


@pytest.mark.parametrize("method", ["fused", "torch"])
@pytest.mark.parametrize("operator", DUAL)
def test_the_backward_takes_what_was_tuned_for_it(tmp_path, operator, method):
    on_ranks(2, goes_backward, tmp_path, operator, method)


# ---- what it says ----


def logs(folder):
    """One line a shape, from rank 0; on a GPU for which there is no table one warning more, whatever the shapes."""
    with a_group() as group, tables_in(folder):
        tune_by_hand(entry_of("gemm_rs", config_of("gemm_rs", 3)))
        case, other, tuned = case_of("ag_gemm"), case_of("ag_gemm", ROWS + 1), case_of("gemm_rs")
        with log_of() as records:
            for _ in range(2):
                for each in (case, other, tuned):
                    each.call(group=group)
        infos = [record.getMessage() for record in records if record.levelno == logging.INFO]
        warnings = [record.getMessage() for record in records if record.levelno > logging.INFO]
        if dist.get_rank() != 0:
            assert not records
        else:
            assert len(infos) == 3, infos
            runs = "torch" if untuned("ag_gemm") == "torch" else "fused"
            assert re.match(rf"ag_gemm 32x32x16 float32 nk on 2 x .*: {runs} \(default\), method={runs}\b", infos[0])
            assert infos[1].startswith("ag_gemm 34x32x16")
            assert re.match(r"gemm_rs 32x16x32 .*: fused \(cache\), .*item_tiles=3.* 2.000 ms measured, ", infos[2])
            assert len(warnings) == (1 if device().type == "cuda" else 0), warnings
            assert all(re.match("ag_gemm 32x32x16 .* there is no table of ag_gemm ", line) for line in warnings)
        del group


def test_one_line_a_shape_on_rank_0(tmp_path):
    on_ranks(2, logs, tmp_path)


def test_the_tests_look_up_nothing_unless_they_say_so():
    # Other tests depend on it: the suite must not be decided by what was tuned on this machine.
    assert os.environ["TDKERNELS_AUTOTUNE"] == "off" and autotune.get_mode() == "off"


# ---- where nobody has tuned ----


@pytest.mark.parametrize("operator", OPERATORS)
def test_without_a_table_some_rows_run_in_sequence_on_a_gpu(operator, monkeypatch):
    """As on a GPU, which need not be there: neither few enough for one tile, nor so many that what is hidden counts."""
    rates = Hardware(790e12, 4.3e12, 380e9, 132, measured=True)
    monkeypatch.setattr(gemm_tunable, "hardware", lambda device, dtype: rates)
    monkeypatch.setattr(runtime_gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(runtime_gpu, "num_sms", lambda device: 132)
    op, gpu = tunable(operator), torch.device("cuda", 0)
    methods = {
        m: op.fallback(Problem(operator, "NVIDIA Testing", 4, 4, "bfloat16", "nk", (m, 8192, 8192)), gpu).method
        for m in (4, 64, 1024, 8192, 32768)
    }
    assert methods == {4: "fused", 64: "fused", 1024: "torch", 8192: "fused", 32768: "fused"}
    on_nodes = Problem(operator, "NVIDIA Testing", 4, 2, "bfloat16", "nk", (4, 8192, 8192))
    wide = Problem(operator, "NVIDIA Testing", 4, 4, "float32", "nk", (64, 8192, 8192))
    for problem in (on_nodes, wide):
        assert op.fallback(problem, gpu).method == "torch", "the kernels for few rows are for one node, and 16 bits"


def test_on_cpu_ranks_the_kernels_run(monkeypatch):
    problem = Problem("ag_gemm", "cpu", 2, 2, "float32", "nk", (4, 4, 4))
    assert tunable("ag_gemm").fallback(problem, torch.device("cpu")).method == "fused"
