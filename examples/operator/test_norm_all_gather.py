"""Tests of norm_all_gather. Run them: pytest test_norm_all_gather.py"""

import pytest
import torch
import torch.distributed as dist
from norm_all_gather import norm_all_gather, norm_all_gather_ref

import tdkernels
import tdkernels.sanitizer
from tdkernels.launch import RankPool, rank_device


@pytest.fixture(scope="module", params=[1, 3])
def pool(request):
    with RankPool(request.param) as ranks:
        yield ranks


def make(rows, hidden, dtype, seed=0):
    torch.manual_seed(100 * seed + dist.get_rank())
    x = torch.randn(rows, hidden, device=rank_device()).to(dtype)
    torch.manual_seed(seed)
    return x, (1 + 0.1 * torch.randn(hidden, device=rank_device())).to(dtype)


def forward_errors(rows, hidden, dtype):
    """Return the largest error of three calls with new data, and whether a repeated call gives the same bits."""
    errors = []
    for seed in range(3):
        x, weight = make(rows, hidden, dtype, seed)
        y, expected = norm_all_gather(x, weight), norm_all_gather_ref(x, weight)
        errors.append((y.float() - expected.float()).abs().max().item())
    return max(errors), torch.equal(y, norm_all_gather(x, weight))


@pytest.mark.parametrize("rows, hidden", [(1, 1), (3, 5), (7, 96), (16, 128)])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_forward(pool, rows, hidden, dtype, bound):
    for error, same_bits in pool.run(forward_errors, rows, hidden, dtype):
        assert error <= bound and same_bits


def gradients(rows, hidden):
    """Return whether dx and dweight agree with the unsharded computation, in fp32."""
    x, weight = (tensor.requires_grad_() for tensor in make(rows, hidden, torch.float32))
    y = norm_all_gather(x, weight)
    coefficients = torch.linspace(-1, 1, y.numel(), device=x.device).view_as(y)
    (y * coefficients).sum().backward()  # each rank has the same loss, so dx sums W equal contributions
    dist.all_reduce(weight.grad)
    whole = norm_all_gather_ref(x.detach(), torch.ones_like(weight))  # the gathered rows of x, normalized
    rows_of_rank = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    x2, weight2 = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
    y2 = torch.nn.functional.rms_norm(x2, x2.shape[-1:], weight2, 1e-6)
    (y2 * coefficients[rows_of_rank]).sum().backward()
    ranks = dist.get_world_size()
    dweight = ranks * (whole * coefficients).sum(0)
    close = lambda ours, expected: torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)  # noqa: E731
    return close(x.grad, ranks * x2.grad), close(weight.grad, dweight)


def test_gradients(pool):
    assert all(all(result) for result in pool.run(gradients, 5, 96))


def bad_calls():
    """Return the errors of calls with invalid arguments on one rank or on all ranks."""
    x, weight = make(4, 8, torch.float32)
    errors = []
    for arguments in ((x[0], weight), (x, weight[:4]), (x.double(), weight), (x[dist.get_rank() :], weight)):
        try:
            norm_all_gather(*arguments)
            errors.append(None)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    return errors


def test_errors(pool):
    for scalar_row, short_weight, dtype, disagreement in pool.run(bad_calls):
        assert "x must be [R, H]" in scalar_row and "weight [4] must be [H]" in short_weight
        assert "torch.float64" in dtype
        assert disagreement is None if pool.world_size == 1 else "disagree" in disagreement


def races():
    with tdkernels.sanitizer.record(check=False) as found:
        for seed in range(3):
            norm_all_gather(*make(5, 16, torch.float32, seed))
    return [str(race) for race in found]


def test_no_race():
    with RankPool(3, "cpu") as ranks:
        assert ranks.run(races) == [[], [], []]


def compiled_matches():
    """Return whether the output and the gradients of a compiled call equal those of an eager call."""
    results = []
    for function in (norm_all_gather, torch.compile(norm_all_gather, fullgraph=True, backend="aot_eager")):
        x, weight = (tensor.requires_grad_() for tensor in make(4, 16, torch.float32))
        y = function(x, weight)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, weight.grad))
    return all(torch.equal(eager, compiled) for eager, compiled in zip(*results))


def test_compiles(pool):
    assert all(pool.run(compiled_matches))
