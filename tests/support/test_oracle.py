"""The error bound of the oracle rejects wrong results."""

import pytest
import torch

from tests.support.dense_oracle import OPERATORS, Case, assert_close, relative_error
from tests.support.ranks import on_ranks


def test_bound_is_twice_the_error_of_plain_torch():
    exact = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    low = exact.float() * (1 + 1e-4)
    assert relative_error(low, exact) == pytest.approx(1e-4, rel=1e-3)
    assert_close("y", exact.float() * (1 - 1.9e-4), exact, low)
    with pytest.raises(AssertionError, match="^y: relative error 0.00021 is above 0.0002$"):
        assert_close("y", exact.float() * (1 - 2.1e-4), exact, low)


@pytest.mark.parametrize("dtype, u", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24)])
def test_bound_is_at_least_one_rounding(dtype, u):
    exact = torch.ones(1, dtype=torch.float64)
    low = exact.to(dtype)
    assert_close("y", low + 2 * u, exact, low)
    with pytest.raises(AssertionError, match="above"):
        assert_close("y", low + 4 * u, exact, low)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_and_inf_fail(wrong):
    for exact in (torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)):
        low = exact.float()
        bad = low.clone()
        bad[1] = wrong
        with pytest.raises(AssertionError, match="relative error"):
            assert_close("y", bad, exact, low)
        with pytest.raises(AssertionError, match="bounds nothing"):
            assert_close("y", low, exact, bad)


def test_shape_dtype_and_zero():
    exact = torch.zeros(2, 3, dtype=torch.float64)
    low = exact.float()
    assert_close("y", low, exact, low)
    assert_close("y", low[:0], exact[:0], low[:0])
    for wrong in (low.t(), low.half(), low + 1e-30):
        with pytest.raises(AssertionError):
            assert_close("y", wrong, exact, low)


def detect_wrong_element(operator, exact):
    case = Case(operator, torch.bfloat16, 9, 7, 11, exact=exact)
    results = case.run()
    case.check(results)
    for name, result in results.items():
        changed = result.clone()
        changed.view(-1)[-1] += 1.0
        with pytest.raises(AssertionError, match=f"^{name} of {operator} torch.bfloat16 rows=9 n=7 k=11 rank"):
            case.check({name: changed})


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_wrong_element_is_detected(operator, exact):
    on_ranks(2, detect_wrong_element, operator, exact)
