"""Helpers of the tests of config selection: tables in a folder, entries, and calls whose configs are recorded."""

import contextlib
import logging
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from tdkernels import autotune
from tdkernels.autotune import disk_cache, on_demand, table
from tdkernels.autotune.problem import Problem, gpu_name
from tdkernels.autotune.tunable import tunable, versions
from tdkernels.symm.group import group_state
from tests.autotune.entries import cache_in
from tests.support.dense_oracle import OPERATORS, Case, whole_shape
from tests.support.ranks import device

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
