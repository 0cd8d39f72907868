"""The flag of a config survives its text and its JSON form, and only a bool is accepted."""

from dataclasses import replace

import pytest
import torch

from tdkernels import AgGemmConfig, GemmRsConfig, Tiles
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common.config import from_text, mistyped, to_text
from tdkernels.runtime import gpu

TILES = Tiles(128, 256, 64, num_stages=3)
BOTH = [GemmRsConfig(transport="direct", tiles=TILES, warp_specialize=flag) for flag in (False, True)]
OF_AG_GEMM = [AgGemmConfig(tiles=TILES, warp_specialize=flag) for flag in (False, True)]


@pytest.mark.parametrize("config", [*BOTH, *OF_AG_GEMM], ids=str)
def test_forms_of_a_config(config):
    found = from_text(type(config), to_text(config))
    assert found == config and found.warp_specialize is config.warp_specialize
    tuned = tunable("gemm_rs" if config in BOTH else "ag_gemm")
    values = tuned.config_to_dict(config)
    assert values.get("warp_specialize") is (True if config.warp_specialize else None)
    assert tuned.config_from_dict(values) == config


@pytest.mark.parametrize("flag", [1, "True", None])
def test_a_flag_of_another_type_is_rejected(flag):
    config = GemmRsConfig(transport="direct", tiles=TILES, warp_specialize=flag)
    assert mistyped(config) == f"warp_specialize must be True or False, not {flag!r}"
    values = tunable("gemm_rs").config_to_dict(BOTH[1])
    with pytest.raises(TypeError, match="warp_specialize is"):
        tunable("gemm_rs").config_from_dict({**values, "warp_specialize": flag})


def test_a_flag_is_no_number():
    with pytest.raises(TypeError, match="pieces is True"):
        tunable("gemm_rs").config_from_dict({**tunable("gemm_rs").config_to_dict(BOTH[0]), "pieces": True})


@pytest.mark.parametrize("config, num_comm", [(OF_AG_GEMM[1], 24), (replace(OF_AG_GEMM[1], num_comm_sms=128), 24)])
def test_a_trace_records_the_portable_kernel(config, num_comm):
    on = Problem("ag_gemm", "NVIDIA Testing", 4, 4, "bfloat16", "nk", (8192, 4096, 4096)), torch.device("cuda", 0)
    recorded = tunable("ag_gemm").as_recorded(config, *on)
    assert recorded == replace(config, warp_specialize=False, num_comm_sms=num_comm)
    assert tunable("ag_gemm").as_recorded(OF_AG_GEMM[0], *on) is OF_AG_GEMM[0]


@pytest.mark.parametrize("layout, block_n", [("scaled fast", 256), ("scaled", 128), ("scaled by block", 128)])
@pytest.mark.parametrize("operator, config", [("ag_gemm", OF_AG_GEMM[1]), ("gemm_rs", BOTH[1])])
def test_a_trace_of_scaled_operands_has_the_tile_of_the_portable_kernel(
    monkeypatch, operator, config, layout, block_n
):
    """With two accumulators, that kernel has no registers for the tile of the other one."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    problem = Problem(operator, "NVIDIA Testing", 4, 4, "float8_e4m3fn", layout, (8192, 4096, 4096))
    config = replace(config, tiles=Tiles(128, 256, 128))
    recorded = tunable(operator).as_recorded(config, problem, torch.device("cuda", 0))
    assert not recorded.warp_specialize and recorded.tiles.block_n == block_n
