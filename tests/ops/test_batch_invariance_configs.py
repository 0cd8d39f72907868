"""Configs of the batch-invariant mode: they do not depend on the number of rows, or only their tiles do."""

from dataclasses import replace

import pytest
import torch

import tdkernels
from tdkernels import (
    GemmRsConfig,
)
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.runtime import gpu as runtime_gpu
from tdkernels.symm import shared_settings


@pytest.fixture(autouse=True)
def restored():
    yield
    shared_settings.set_batch_invariant(None)


OPERATORS = {  # name: (layout, shape for M rows, world size)
    "ag_gemm": ("nk", lambda m: (m, 4096, 4096), 4),
    "gemm_rs": ("kn", lambda m: (m, 4096, 4096), 4),
    "gemm_ar": ("nk", lambda m: (m, 4096, 4096), 4),
    "group_gemm": ("swiglu", lambda m: (m, 4096, 2048, 16), 1),
    "tp_moe": ("swiglu", lambda m: (m, 2048, 1024, 16, 2), 4),
    "moe_ag_gemm": ("swiglu", lambda m: (m, 4096, 2048, 16, 2), 4),
    "moe_gemm_rs": ("nk", lambda m: (m, 4096, 2048, 16, 2), 4),
    "ep_moe": ("exact", lambda m: (m, 2048, 1024, 16, 2), 4),
    "flash_decode": ("dense", lambda m: (m, 1, 32, 8, 128, 128, 4096), 4),
    "ag_attention": ("full", lambda m: (m, 4096, 32, 8, 128, 128), 4),
}
FP8_OPERATORS = {"ag_gemm", "gemm_rs", "gemm_ar"}
ROWS = 4, 8, 64, 256, 512, 1024, 4096, 32768


@pytest.fixture(params=[(9, 0), (8, 0), (10, 0)], ids=lambda capability: f"sm_{capability[0]}{capability[1]}")
def simulated_gpu(request, monkeypatch):
    """A CUDA device of each generation, without a GPU."""
    shared = {8: 166912, 9: 232448, 10: 232448}[request.param[0]]
    monkeypatch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: shared)
    monkeypatch.setattr(runtime_gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(runtime_gpu, "max_warps", lambda device: 32)
    monkeypatch.setattr(runtime_gpu, "capability", lambda device: request.param)
    return torch.device("cuda", 0)


def of_bits(config, device):
    """Return a config without what changes no bits: on Hopper, the tile of a GEMM of 16-bit operands.

    ``test_tiles_of_the_mode_give_the_same_bits`` compares these tiles on GPUs.
    """
    sizes = config.tiles and (config.tiles.block_m, config.tiles.block_n, config.tiles.block_k)
    alike = (64, 64, 64), (128, 128, 64), (128, 256, 64)
    return replace(config, tiles=None) if runtime_gpu.capability(device) == (9, 0) and sizes in alike else config


def problem(operator, rows, dtype, layout=None, local=None):
    """Return a tuning problem with ``rows`` rows."""
    usual, shape, world_size = OPERATORS[operator]
    local = local or world_size
    return Problem(operator, "a GPU", world_size, local, dtype, layout or usual, shape(rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_config_does_not_depend_on_the_rows(operator, dtype, simulated_gpu):
    made = tunable(operator)
    problems = [problem(operator, rows, dtype) for rows in ROWS]
    configs = {made.invariant(one, simulated_gpu) for one in problems}
    assert len({of_bits(config, simulated_gpu) if operator in FP8_OPERATORS else config for config in configs}) == 1
    for config in configs:
        assert made.illegal(config, problems[0], simulated_gpu) is None and config.variant_reason() is None
    if operator in FP8_OPERATORS:
        on_hopper = runtime_gpu.capability(simulated_gpu) == (9, 0) and dtype != "float32"
        assert len(configs) == (3 if on_hopper else 1)
        defaults = {made.default(one, simulated_gpu) for one in problems}
        assert len(defaults) > 1 or dtype == "float32"  # the test could fail
        assert config.tiles is not None and config.split_k == 1


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_config_of_flash_decode_does_not_depend_on_what_ranks_may_differ_in(layout, heads, simulated_gpu):
    made, configs = tunable("flash_decode"), {}
    for kind in ("", " latent"):
        for keys in (1, 65536):
            one = Problem("flash_decode", "a GPU", 4, 4, "bfloat16", layout + kind, (4, 1, heads, 1, 576, 512, keys))
            assert made.illegal(made.invariant(one, simulated_gpu), one, simulated_gpu) is None
            configs.setdefault(made.key(one), set()).add(made.invariant(one, simulated_gpu))
    assert [len(found) for found in configs.values()] == [1]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("operator", ["all_reduce_rms_norm", "gemm_ar_rms_norm"])
def test_config_of_norms_does_not_depend_on_the_rows(operator, world_size, simulated_gpu):
    made = tunable(operator)
    sizes = (8192,) if operator.startswith("all") else (8192, 4096)
    problems = [Problem(operator, "a GPU", world_size, world_size, "bfloat16", "rows", (m, *sizes)) for m in ROWS]
    configs = {made.invariant(one, simulated_gpu) for one in problems}
    assert len(configs) == 1 and made.illegal(*configs, problems[0], simulated_gpu) is None


@pytest.mark.parametrize("layout", ["scaled", "scaled fast", "scaled by block"])
@pytest.mark.parametrize("operator", sorted(FP8_OPERATORS))
def test_config_of_fp8_does_not_depend_on_the_rows(operator, layout, simulated_gpu):
    made = tunable(operator)
    assert layout in made.layouts
    configs = {made.invariant(problem(operator, rows, "float8_e4m3fn", layout), simulated_gpu) for rows in ROWS}
    assert len(configs) == 1
    assert made.illegal(*configs, problem(operator, 64, "float8_e4m3fn", layout), simulated_gpu) is None


@pytest.mark.parametrize("operator", sorted(FP8_OPERATORS))
def test_open_tiles_are_those_of_the_mode(operator, simulated_gpu):
    made = tunable(operator)
    given = made.config_class(transport="direct") if operator == "gemm_rs" else made.config_class()
    with tdkernels.batch_invariant():
        for one in (problem(operator, rows, "bfloat16") for rows in ROWS):
            assert made.completed(given, one, simulated_gpu).tiles == made.invariant(one, simulated_gpu).tiles


def test_groups_that_are_not_supported():
    for operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
        with (
            tdkernels.batch_invariant(),
            pytest.raises(NotImplementedError, match=f"{operator}: a group on several nodes is not supported"),
        ):
            tunable(operator).invariant(problem(operator, 64, "bfloat16", local=2), torch.device("cpu"))
    wide = Problem("gemm_rs", "a GPU", 16, 16, "bfloat16", "nk", (64, 4096, 4096))
    with tdkernels.batch_invariant(), pytest.raises(NotImplementedError, match="more than 8 ranks"):
        tunable("gemm_rs").invariant(wide, torch.device("cpu"))


def test_explain_names_the_mode():
    with tdkernels.batch_invariant():
        explained = tdkernels.explain("gemm_rs", 64, 64, 64, world_size=2)
        assert explained.source == "batch_invariant" and explained.config.transport == "direct"
        with pytest.raises(ValueError, match="gemm_rs: config is not batch-invariant: transport"):
            tdkernels.explain("gemm_rs", 64, 64, 64, world_size=2, config=GemmRsConfig())
    assert tdkernels.explain("gemm_rs", 64, 64, 64, world_size=2).source != "batch_invariant"
