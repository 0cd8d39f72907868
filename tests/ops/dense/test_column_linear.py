"""column_linear: values, gradients, and errors."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tests.ops.dense import cases
from tests.support.dense_oracle import Case
from tests.support.ranks import device, on_ranks

BF16, FP16, FP32 = cases.DTYPES


@pytest.mark.parametrize("world_size, dtype, bias", [(1, FP32, True), (2, BF16, True), (3, FP16, False)], ids=str)
def test_shapes(world_size, dtype, bias):
    on_ranks(world_size, cases.computes, "column_linear", dtype, cases.SHAPES + cases.MINIMAL_SHAPES, bias=bias)


def test_every_element_of_small_integers():
    on_ranks(3, cases.computes, "column_linear", BF16, cases.SHAPES, exact=True)


def takes_leading_dimensions_and_a_config():
    config = tdkernels.GemmArConfig(method="torch")
    case = Case("column_linear", FP32, 24, 8, 16, seed=1)
    x = case.x.detach().view(2, 3, 4, 16).requires_grad_()
    y = tdkernels.column_linear(x, case.weight, case.bias, config=config)
    assert y.shape == (2, 3, 4, 8)
    y.sum().backward()  # an expanded gradient, whose strides are zero
    results = x.grad, case.weight.grad
    expected = x.detach().clone().requires_grad_(), case.weight.detach().clone().requires_grad_()
    tdkernels.column_linear_ref(*expected, case.bias.detach()).sum().backward()
    for got, operand in zip(results, expected, strict=True):
        torch.testing.assert_close(got, operand.grad)


def test_leading_dimensions_and_a_config():
    on_ranks(2, takes_leading_dimensions_and_a_config)


def communicates_only_for_dx():
    """Only rank 0 calls it: without a gradient of x there is nothing to wait for."""
    if dist.get_rank() == 0:
        case = Case("column_linear", FP32, 8, 8, 8)
        with torch.no_grad():
            tdkernels.column_linear(case.x, case.weight, case.bias)
        tdkernels.column_linear(case.x.detach(), case.weight, case.bias).backward(case.dy)
        torch.testing.assert_close(case.weight.grad, case.dy.t() @ case.x.detach())


def test_no_communication_without_a_gradient_of_x():
    on_ranks(2, communicates_only_for_dx)


def takes_a_list():
    """One all-reduce adds the gradients of x of all weights. The sums of small integers are exact."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float().to(device())  # noqa: E731
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, whole = draw(2, 6, 8), [draw(ranks * n, 8) for n in (4, 7, 5)]
    weights = [one.chunk(ranks)[rank].clone().requires_grad_() for one in whole]
    weights[1].requires_grad_(False)
    biases = [None, draw(7), draw(5).requires_grad_()]
    dys = [draw(2, 6, ranks * one.shape[0]).chunk(ranks, -1)[rank] for one in weights]
    x_own, x_ref = x.clone().requires_grad_(), x.clone().requires_grad_()
    ys, expected = tdkernels.column_linear(x_own, weights, biases), tdkernels.column_linear_ref(x_ref, weights, biases)
    assert all(torch.equal(y, want) for y, want in zip(ys, expected, strict=True))
    operands = [weights[0], weights[2], biases[2]]
    wanted = torch.autograd.grad(expected, [x_ref, *operands], dys)
    for got, want in zip(torch.autograd.grad(ys, [x_own, *operands], dys), wanted, strict=True):
        assert torch.equal(got, want)
    # Outputs that are not used have no gradient.
    wanted = torch.autograd.grad(tdkernels.column_linear_ref(x_ref, weights, biases)[1].sum(), x_ref)
    assert torch.equal(torch.autograd.grad(tdkernels.column_linear(x_own, weights, biases)[1].sum(), x_own)[0], *wanted)
    with torch.no_grad():
        assert isinstance(tdkernels.column_linear(x, weights), list)


def test_a_list_of_weights():
    on_ranks(3, takes_a_list)


def follows_autocast():
    case = Case("column_linear", FP32, 16, 8, 16)
    with torch.autocast(device().type, torch.bfloat16):
        y = tdkernels.column_linear(case.x, case.weight, case.bias)
    assert y.dtype == torch.bfloat16
    y.backward(case.dy.bfloat16())
    assert {case.x.grad.dtype, case.weight.grad.dtype, case.bias.grad.dtype} == {torch.float32}
    torch.testing.assert_close(case.x.grad, case.expected["dx"].float().to(device()), rtol=0.05, atol=0.05)


def test_autocast():
    on_ranks(2, follows_autocast)


def compiles_without_a_graph_break():
    case = Case("column_linear", FP32, 16, 8, 16)
    compiled = torch.compile(tdkernels.column_linear, fullgraph=True, backend="aot_eager")
    compiled(case.x, case.weight, case.bias).backward(case.dy)
    case.check({"dx": case.x.grad, "dweight": case.weight.grad, "dbias": case.bias.grad})


def test_compiles_without_a_graph_break():
    on_ranks(2, compiles_without_a_graph_break)


def rejects_invalid_arguments():
    x, weight = torch.zeros(4, 8, device=device()), torch.zeros(6, 8, device=device())
    for arguments, options, error, message in (
        ((x, weight[:, :7]), {}, ValueError, r"column_linear: .*\[4, 8\].*\[6, 7\]"),
        ((x.double(), weight.double()), {}, TypeError, "column_linear: x is torch.float64"),
        ((x, weight, torch.zeros(5, device=device())), {}, ValueError, r"column_linear: bias .*\[5\]"),
        ((x, []), {}, ValueError, "column_linear: the list of weights is empty"),
        ((x, [weight], weight[0]), {}, TypeError, "column_linear: weight is a list, so bias must be a list or None"),
        ((x, weight), {"config": tdkernels.GemmRsConfig()}, TypeError, "GemmArConfig or None, not GemmRsConfig"),
    ):
        with pytest.raises(error, match=message):
            tdkernels.column_linear(*arguments, **options)
    y = tdkernels.column_linear(x.requires_grad_(), weight)
    with pytest.raises(RuntimeError, match="column_linear: second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_invalid_arguments():
    on_ranks(1, rejects_invalid_arguments)


def backward_with_other_rows():
    x, weight = torch.zeros(4 + dist.get_rank(), 8, device=device()), torch.zeros(6, 8, device=device())
    y = tdkernels.column_linear(x.requires_grad_(), weight)
    with pytest.raises(ValueError, match="column_linear backward: the ranks.*M"):
        y.sum().backward()
        tdkernels.synchronize()


def test_ranks_that_disagree():
    on_ranks(2, backward_with_other_rows)
