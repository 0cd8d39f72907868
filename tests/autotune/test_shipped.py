"""The tables that come with the package: every entry can be used, and the shapes that they promise are there."""

import pytest
import torch

from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.problem import slug
from tdkernels.autotune.tunable import operators, tunable
from tdkernels.model_shapes import MODELS, problems
from tdkernels.ops.attention.ag_attention import vendor_attention
from tdkernels.runtime import gpu as runtime_gpu

FILES = disk_cache.files(disk_cache.SHIPPED)
# What a program may have on the GPUs that there are tables for, and how many run at a time.
LIMITS = {"NVIDIA H200": (232448, 132, (9, 0)), "NVIDIA H100 80GB HBM3": (232448, 132, (9, 0))}
TOKENS = [8192]
# Rows that were tuned, up to 32768. Since there are kernels for few rows these have run at 2 ranks only.
MANY = [1 << i for i in range(10, 16)]
SWEPT = {2: [2, 8, 32, 64, 128, 256, 512, *MANY], 4: MANY, 8: MANY}


def entries(operator, gpu="NVIDIA H200"):
    return disk_cache.load(disk_cache.SHIPPED / slug(gpu) / f"{operator}.json")


@pytest.fixture
def as_if_on(monkeypatch):
    def on(gpu):
        shared, num_sms, capability = LIMITS[gpu]
        monkeypatch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: shared)
        monkeypatch.setattr(runtime_gpu, "num_sms", lambda device: num_sms)
        monkeypatch.setattr(runtime_gpu, "capability", lambda device: capability)
        monkeypatch.setattr(vendor_attention, "_HAS_CUDNN", True)

    return on


SWEEPS = ["ag_gemm", "gemm_rs"]  # of gemm_ar only some sizes were tuned yet
# Not tuned yet, the first since the tuner replays calls that take the host longer than the GPU: they run by defaults.
UNTUNED = {"all_to_all", "ep_moe"}
TUNED = sorted(set(operators()) - UNTUNED)


def test_there_is_a_table_for_every_operator_that_was_tuned():
    assert {file.stem for file in FILES} == set(TUNED)


@pytest.mark.parametrize("operator", TUNED)
def test_no_problem_is_there_twice(operator):
    problems = [entry.problem for entry in entries(operator)]
    assert len(problems) == len(set(problems))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_entry_can_be_used(file, as_if_on):
    found, bad = table.from_json(file.read_text(encoding="utf-8"))
    assert bad == 0
    assert file.read_text(encoding="utf-8") == table.to_json(found), "not as the tool writes it"
    operator = tunable(file.stem)
    as_if_on(found[0].problem.gpu)
    for entry in found:
        assert (entry.problem.operator, slug(entry.problem.gpu)) == (file.stem, file.parent.name)
        assert operator.why_not(entry.problem) is None, entry.problem
        config = operator.config_from_dict(entry.config)
        assert operator.config_to_dict(config) == entry.config
        # Only its type is asked for, and a GPU need not be there.
        assert operator.illegal(config, entry.problem, torch.device("cuda", 0)) is None, entry.problem


@pytest.mark.parametrize("operator", TUNED)
def test_no_entry_is_slower_than_the_plain_sequence_and_the_default_were(operator):
    slower = [entry for entry in entries(operator) if not entry.ms <= min(_others(entry))]
    assert not slower


def _others(entry):
    """What the default took, and torch's sequence where there is one."""
    return [ms for ms in (entry.default_ms, entry.plain_ms) if ms is not None]


@pytest.mark.parametrize("operator", SWEEPS)
@pytest.mark.parametrize("ranks", SWEPT)
def test_the_models_are_there(operator, ranks):
    have = {entry.problem.shape for entry in entries(operator) if entry.problem.world_size == ranks}
    wanted = {shape for name in MODELS for op, shape in problems(name, TOKENS) if op == operator}
    # Of models that nobody measures by name, the products of one layer stand for the rest.
    named = ("llama-3.1-8b", "llama-3.1-70b")
    swept = {shape for name in named for op, shape in problems(name, SWEPT[ranks]) if op == operator}
    assert swept <= have
    near = [entry for entry in entries(operator) if entry.problem.world_size == ranks]
    for shape in wanted:
        problem = near[0].problem
        similar = table.nearest(near, type(problem)(**{**vars(problem), "shape": shape}))
        assert similar is not None, shape
