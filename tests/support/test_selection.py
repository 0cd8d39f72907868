"""The lists of the selection name existing tests, and a default run leaves out no test and no failure mode."""

from pathlib import Path
from types import SimpleNamespace

from tests.support import selection

TESTS = Path(__file__).parents[1]


def test_lists_name_existing_tests():
    for file, names in selection._OVERLAPPING.items():
        sources = [path.read_text() for path in TESTS.rglob(file)]
        missing = [name for name in names if not any(f"def {name}(" in source for source in sources)]
        assert not missing, f"{file} has no {missing}"
    sources = [path.read_text() for path in TESTS.rglob("test_*.py")]
    names = [*selection._TOGETHER, *selection._FOR_ONE_GPU]
    assert [name for name in names if not any(f"def {name}(" in source for source in sources)] == []


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
    assert len(chosen) == 3
    assert {case.callspec.params["operator"] for case in chosen} == {*"ab"}
    assert {case.callspec.params["what"] for case in chosen} == {*"xyz"}
    quick = cases_of("test_values", lambda: None)
    for cases in (quick, cases_of("test_invalid_operands"), cases_of("test_values", folder="lang")):
        assert selection._chosen(cases) == cases
