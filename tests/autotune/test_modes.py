"""Autotune mode: set_mode(), else TDKERNELS_AUTOTUNE, else "cached". conftest.py sets the variable to "off"."""

import pytest

from tdkernels import autotune

MODES = ("off", "cached", "on")
INVALID = ("On", "auto", " off", "1")


@pytest.fixture(autouse=True)
def reset_mode():
    autotune.set_mode(None)
    yield
    autotune.set_mode(None)


def test_default_is_cached(monkeypatch):
    monkeypatch.delenv("TDKERNELS_AUTOTUNE", raising=False)
    assert autotune.get_mode() == "cached"


@pytest.mark.parametrize("mode", MODES)
def test_variable_sets_the_mode(monkeypatch, mode):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", mode)
    assert autotune.get_mode() == mode


@pytest.mark.parametrize("variable", MODES)
@pytest.mark.parametrize("mode", MODES)
def test_set_mode_overrides_the_variable_until_reset(monkeypatch, mode, variable):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", variable)
    autotune.set_mode(mode)
    assert autotune.get_mode() == mode
    autotune.set_mode(None)
    assert autotune.get_mode() == variable


@pytest.mark.parametrize("invalid", INVALID)
def test_invalid_variable_is_reported_if_used(monkeypatch, invalid):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", invalid)
    with pytest.raises(ValueError, match="TDKERNELS_AUTOTUNE") as error:
        autotune.get_mode()
    assert repr(invalid) in str(error.value)
    autotune.set_mode("on")
    assert autotune.get_mode() == "on"


@pytest.mark.parametrize("invalid", [*INVALID, True, False, 0])
def test_invalid_mode_is_rejected_and_changes_nothing(invalid):
    autotune.set_mode("on")
    with pytest.raises(ValueError, match="off.*cached.*on") as error:
        autotune.set_mode(invalid)
    assert repr(invalid) in str(error.value)
    with pytest.raises(ValueError), autotune.mode(invalid):
        pytest.fail("the block must not run")
    assert autotune.get_mode() == "on"


def test_mode_blocks_nest():
    with autotune.mode("on"):
        with autotune.mode("cached"):
            assert autotune.get_mode() == "cached"
            with autotune.mode(None):
                assert autotune.get_mode() == "off"  # from the variable
            assert autotune.get_mode() == "cached"
        assert autotune.get_mode() == "on"
    assert autotune.get_mode() == "off"


def test_mode_is_restored_after_an_exception():
    autotune.set_mode("cached")
    with pytest.raises(KeyError), autotune.mode("on"):
        raise KeyError
    assert autotune.get_mode() == "cached"


def test_set_mode_in_a_block_ends_with_the_block(monkeypatch):
    with autotune.mode("on"):
        autotune.set_mode("cached")
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", "on")
    assert autotune.get_mode() == "on"  # from the variable; the block's set_mode no longer applies
