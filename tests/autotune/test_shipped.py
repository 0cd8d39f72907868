"""Shipped tables: every entry can be used, and the shapes of the listed models are covered."""

from dataclasses import replace

import pytest
import torch

from bench.dense.modelled import modelled_entries
from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.problem import slug
from tdkernels.autotune.tunable import operators, tunable
from tdkernels.model_shapes import MODELS, problems
from tdkernels.ops.attention.ag_attention import vendor_attention
from tdkernels.runtime import gpu as runtime_gpu

FILES = disk_cache.files(disk_cache.SHIPPED)
# Shared memory per program, number of SMs and compute capability of the GPUs that have tables.
LIMITS = {"NVIDIA H200": (232448, 132, (9, 0)), "NVIDIA H100 80GB HBM3": (232448, 132, (9, 0))}
TOKENS = [8192]
# Tuned M by number of ranks, up to 32768. Small M were retuned for the small-M kernels at 2 ranks only.
LARGE_M = [1 << i for i in range(10, 16)]
SWEPT = {2: [2, 8, 32, 64, 128, 256, 512, *LARGE_M], 4: LARGE_M, 8: LARGE_M}


def entries(operator, gpu="NVIDIA H200"):
    return disk_cache.load(disk_cache.SHIPPED / slug(gpu) / f"{operator}.json")


@pytest.fixture
def simulated_gpu(monkeypatch):
    def on(gpu):
        shared, num_sms, capability = LIMITS[gpu]
        monkeypatch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: shared)
        monkeypatch.setattr(runtime_gpu, "num_sms", lambda device: num_sms)
        monkeypatch.setattr(runtime_gpu, "capability", lambda device: capability)
        monkeypatch.setattr(vendor_attention, "_HAS_CUDNN", True)

    return on


SWEEPS = ["ag_gemm", "gemm_rs"]  # gemm_ar is tuned for some sizes only
# These run default configs. all_to_all has not been tuned since the tuner times host-bound calls in CUDA graphs.
UNTUNED = {
    "all_to_all", "ep_moe",
    "all_reduce_rms_norm", "all_reduce_layer_norm", "gemm_ar_rms_norm", "gemm_ar_layer_norm",
}
TUNED = sorted(set(operators()) - UNTUNED)


def test_every_tuned_operator_has_a_table():
    assert {file.stem for file in FILES} == set(TUNED)


@pytest.mark.parametrize("operator", TUNED)
def test_problems_are_unique(operator):
    """A problem may also have a modelled entry."""
    problems = [(entry.problem, entry.modelled) for entry in entries(operator)]
    assert len(problems) == len(set(problems))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_entry_is_usable(file, simulated_gpu):
    found, bad = table.from_json(file.read_text(encoding="utf-8"))
    assert bad == 0
    assert file.read_text(encoding="utf-8") == table.to_json(found), "the file differs from the output of to_json"
    operator = tunable(file.stem)
    simulated_gpu(found[0].problem.gpu)
    for entry in found:
        assert (entry.problem.operator, slug(entry.problem.gpu)) == (file.stem, file.parent.name)
        assert operator.why_not(entry.problem) is None, entry.problem
        config = operator.config_from_dict(entry.config)
        assert operator.config_to_dict(config) == entry.config
        # Only the type of the device is used, so this needs no GPU.
        assert operator.illegal(config, entry.problem, torch.device("cuda", 0)) is None, entry.problem


@pytest.mark.parametrize("operator", TUNED)
def test_no_entry_is_slower_than_default_or_torch(operator):
    measured = [entry for entry in entries(operator) if not entry.modelled]
    slower = [entry for entry in measured if not entry.ms <= min(_baselines(entry))]
    assert not slower


def _baselines(entry):
    """Return the times of the default config and of the torch baseline, as far as measured."""
    return [ms for ms in (entry.default_ms, entry.plain_ms) if ms is not None]


@pytest.mark.parametrize("operator", SWEEPS)
@pytest.mark.parametrize("ranks", SWEPT)
def test_models_are_covered(operator, ranks):
    have = {entry.problem.shape for entry in entries(operator) if entry.problem.world_size == ranks}
    wanted = {shape for name in MODELS for op, shape in problems(name, TOKENS) if op == operator}
    # These two models must be covered exactly; for the others an entry of a near shape is enough.
    named = ("llama-3.1-8b", "llama-3.1-70b")
    swept = {shape for name in named for op, shape in problems(name, SWEPT[ranks]) if op == operator}
    assert swept <= have
    near = [entry for entry in entries(operator) if entry.problem.world_size == ranks]
    for shape in wanted:
        problem = near[0].problem
        similar = table.nearest(near, type(problem)(**{**vars(problem), "shape": shape}))
        assert similar is not None, shape


def test_modelled_entries_are_those_of_the_recorded_rows():
    """If this fails after a benchmark in solo mode, run ``python -m bench.dense.modelled``."""
    shipped = [entry for file in FILES for entry in disk_cache.load(file) if entry.modelled]
    by_table = modelled_entries()
    filled = [head for head, made in by_table.items() if made]
    heads = sorted(filled, key=lambda head: (slug(head[1]), head[0]))  # as the files
    made = [entry for head in heads for entry in table.from_json(table.to_json(by_table[head]))[0]]
    ignored = {"versions": {}}  # the hash of the kernels is that of the code when the table was written
    assert shipped and [replace(e, **ignored) for e in shipped] == [replace(e, **ignored) for e in made]
