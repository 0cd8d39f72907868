"""The lists of the selection name existing tests, and a default run leaves out no operator and no failure mode."""

import re
from pathlib import Path
from types import SimpleNamespace

from tests.support import selection

TESTS = Path(__file__).parents[1]


def test_lists_name_existing_tests():
    sources = [path.read_text() for path in TESTS.rglob("test_*.py")]
    endings = *selection._LONG, *selection._RARE
    missing = [name for name in endings if not any(re.search(rf"def test\w*{name}\(", source) for source in sources)]
    assert missing == []


def runs_ranks(operator, what):
    on_ranks(2, operator, what)  # noqa: F821


def cases_of(name, function=runs_ranks, folder="ops"):
    """Return test cases of two operators and three values, as far as the selection reads them."""
    path = TESTS / folder / "test_any.py"
    values = [{"operator": operator, "what": what} for operator in "ab" for what in "xyz"]
    return [
        SimpleNamespace(
            path=path, originalname=name, nodeid=f"{name}{number}", function=function,
            callspec=SimpleNamespace(params=params),
        )
        for number, params in enumerate(values)
    ]


def test_only_long_tests_are_reduced():
    chosen = selection._chosen(cases_of("test_values"))
    assert [case.callspec.params["operator"] for case in chosen] == [*"ab"]
    quick = cases_of("test_values", lambda: None)
    for cases in (quick, cases_of("test_invalid_operands"), cases_of("test_values", folder="lang")):
        assert selection._chosen(cases) == cases
    assert len(selection._chosen(cases_of("test_values", lambda: None, folder="compiled"))) == 2


def test_different_tests_have_different_values():
    chosen = [selection._chosen(cases_of(f"test_values_{number}")) for number in range(40)]
    found = {(case.callspec.params["operator"], case.callspec.params["what"]) for cases in chosen for case in cases}
    assert found == {(operator, what) for operator in "ab" for what in "xyz"}


def test_variants_of_an_operator_count_as_one():
    names = ["gemm_rs forward", "gemm_rs direct", "ag_gemm", "ag_gemm push"]
    cases = cases_of("test_variants")[:4]
    for case, name in zip(cases, names, strict=True):
        case.callspec.params = {"name": name}
    chosen = [case.callspec.params["name"].split()[0] for case in selection._chosen(cases)]
    assert chosen == ["gemm_rs", "ag_gemm"]
