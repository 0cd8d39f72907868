"""The flag of a config survives its text and its JSON form, and only a bool is accepted."""

import pytest

from tdkernels import AgGemmConfig, GemmRsConfig, Tiles
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common.config import from_text, mistyped, to_text

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
