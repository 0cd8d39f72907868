"""Which mode is in force: what was chosen, else the variable, else cached. conftest.py sets the variable to off."""

import pytest

from tdkernels import autotune

MODES = ("off", "cached", "on")
WRONG = ("On", "auto", " off", "1")


@pytest.fixture(autouse=True)
def nothing_chosen():
    autotune.set_mode(None)
    yield
    autotune.set_mode(None)


def test_the_default_is_cached(monkeypatch):
    monkeypatch.delenv("TDKERNELS_AUTOTUNE", raising=False)
    assert autotune.get_mode() == "cached"


@pytest.mark.parametrize("mode", MODES)
def test_the_variable_chooses(monkeypatch, mode):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", mode)
    assert autotune.get_mode() == mode


@pytest.mark.parametrize("variable", MODES)
@pytest.mark.parametrize("mode", MODES)
def test_set_mode_wins_over_the_variable_until_none(monkeypatch, mode, variable):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", variable)
    autotune.set_mode(mode)
    assert autotune.get_mode() == mode
    autotune.set_mode(None)
    assert autotune.get_mode() == variable


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_variable_is_named_when_it_counts(monkeypatch, wrong):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", wrong)
    with pytest.raises(ValueError, match="TDKERNELS_AUTOTUNE") as error:
        autotune.get_mode()
    assert repr(wrong) in str(error.value)
    autotune.set_mode("on")
    assert autotune.get_mode() == "on"


@pytest.mark.parametrize("wrong", [*WRONG, True, False, 0])
def test_a_wrong_mode_is_refused_and_changes_nothing(wrong):
    autotune.set_mode("on")
    with pytest.raises(ValueError, match="off.*cached.*on") as error:
        autotune.set_mode(wrong)
    assert repr(wrong) in str(error.value)
    with pytest.raises(ValueError), autotune.mode(wrong):
        pytest.fail("the block must not run")
    assert autotune.get_mode() == "on"


def test_a_block_has_its_mode_and_blocks_nest():
    with autotune.mode("on"):
        with autotune.mode("cached"):
            assert autotune.get_mode() == "cached"
            with autotune.mode(None):
                assert autotune.get_mode() == "off"  # the variable's
            assert autotune.get_mode() == "cached"
        assert autotune.get_mode() == "on"
    assert autotune.get_mode() == "off"


def test_the_mode_is_restored_after_an_exception():
    autotune.set_mode("cached")
    with pytest.raises(KeyError), autotune.mode("on"):
        raise KeyError
    assert autotune.get_mode() == "cached"


def test_what_is_set_in_a_block_ends_with_it(monkeypatch):
    with autotune.mode("on"):
        autotune.set_mode("cached")
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", "on")
    assert autotune.get_mode() == "on"  # the variable counts again, not what the block had chosen
