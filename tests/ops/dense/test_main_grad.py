"""main_grad: the backward adds the gradient of a weight to an accumulator. The sums of small integers are exact."""

import contextlib

import pytest
import torch

import tdkernels
from tdkernels.ops.dense import vendor_gemm
from tests.support.dense_oracle import DIVIDED, Case
from tests.support.ranks import device, on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
SHAPE = (12, 9, 7)  # rows, n, k per rank
CONFIGS = {"ag_gemm": tdkernels.AgGemmConfig, "gemm_rs": tdkernels.GemmRsConfig}


@contextlib.contextmanager
def pipelined_backward():
    """In a rank: use the pipelined forms of a backward, which are meant for large GEMMs, for all sizes."""
    before = vendor_gemm._HOST_S
    vendor_gemm._HOST_S = dict.fromkeys(before, (-1.0, 0.0))  # any size is large enough
    try:
        yield
    finally:
        vendor_gemm._HOST_S = before


def accumulates(operator, dtype, form, rows=SHAPE[0]):
    """Two backward passes add the gradient twice, in fp32 and in the dtype of the weight."""
    case = Case(operator, dtype, rows, *SHAPE[1:], exact=True)
    case.x.requires_grad_(form != "without dx")
    config = CONFIGS[operator](method=form) if form in ("torch", "parts") else None
    dx = {"dx"} if case.x.requires_grad else set()
    with pipelined_backward() if form == "pipelined" else contextlib.nullcontext():
        for accumulator in {FP32, dtype}:
            main_grad = torch.ones_like(case.weight, dtype=accumulator).detach()
            for _ in range(2):
                results = case.run(config=config, main_grad=main_grad)
                assert results.keys() == {"output", "dbias"} | dx
                case.check(results)
            assert torch.equal(main_grad.double().cpu(), 1 + 2 * case.expected["dweight"])


FORMS = [
    *[(operator, form) for operator in DIVIDED for form in ("default", "without dx", "pipelined")],
    *[(operator, form) for operator in CONFIGS for form in ("torch", "parts")],
]


def every_form():
    for turn, (operator, form) in enumerate(FORMS):
        accumulates(operator, (BF16, FP32)[turn % 2], form)


@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulation(world_size):
    on_ranks(world_size, every_form)


def pipelined_column_linear(rows):
    with pipelined_backward():
        case = Case("column_linear", BF16, rows, 9, 8, exact=True)
        for _ in range(2):
            case.check(case.run())


@pytest.mark.parametrize("world_size, rows", [(2, 64), (3, 15), (3, 16)])
def test_pipelined_backward_of_column_linear(world_size, rows):
    """16 rows cannot be divided between 3 ranks: a gemm_ar computes the gradient."""
    on_ranks(world_size, pipelined_column_linear, rows)


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().to(device())


def accumulates_for_a_list(operator, **options):
    rank = torch.distributed.get_rank() if operator == "ag_gemm" else 0
    x, weights = draw(2, 3, 8, seed=rank).requires_grad_(), [draw(n, 8, seed=n).requires_grad_() for n in (4, 7, 5)]
    main_grads = [torch.ones_like(weight).detach() for weight in weights]
    results = []
    for given in (None, main_grads):
        x.grad = None
        ys = getattr(tdkernels, operator)(x, weights, main_grad=given, **options)
        sum((y * draw(*y.shape, seed=i)).sum() for i, y in enumerate(ys)).backward()
        results.append(x.grad)
    assert torch.equal(*results)
    for weight, main_grad in zip(weights, main_grads, strict=True):
        assert torch.equal(main_grad, 1 + weight.grad)


def follows_megatron():
    """With the attribute grad_added_to_main_grad, the weight gets a placeholder as its gradient."""
    for operator in DIVIDED:
        case = Case(operator, FP32, *SHAPE, exact=True)
        case.weight.grad_added_to_main_grad, case.weight.zero_out_wgrad = False, True
        main_grad = torch.zeros_like(case.weight).detach()
        results = case.run(main_grad=main_grad)
        assert case.weight.grad_added_to_main_grad is True
        assert torch.equal(results["dweight"], torch.zeros_like(main_grad))
        assert torch.equal(main_grad.double().cpu(), case.expected["dweight"])


def layers_use_the_attribute():
    x = draw(4, 8, seed=torch.distributed.get_rank())
    for kind in (tdkernels.nn.ColumnParallelLinear, tdkernels.nn.RowParallelLinear):
        for sequence_parallel in (True, False):
            width = 8 // (1 if kind is tdkernels.nn.ColumnParallelLinear else 2)
            layer = kind(8, 6, sequence_parallel=sequence_parallel, device=device())
            layer(x[:, :width].contiguous()).sum().backward()
            gradient, layer.weight.grad = layer.weight.grad, None
            layer.weight.main_grad = torch.ones_like(layer.weight).detach()
            layer(x[:, :width].contiguous()).sum().backward()
            assert layer.weight.grad is None
            torch.testing.assert_close(layer.weight.main_grad, 1 + gradient)


def compiles():
    for operator in DIVIDED:
        case = Case(operator, BF16, *SHAPE, exact=True)
        torch._dynamo.reset()
        compiled = torch.compile(getattr(tdkernels, operator), fullgraph=True, backend="aot_eager")
        main_grad = torch.ones_like(case.weight, dtype=FP32).detach()
        for _ in range(2):
            compiled(case.x, case.weight, case.bias, main_grad=main_grad).backward(case.dy)
        assert torch.equal(main_grad.double().cpu(), 1 + 2 * case.expected["dweight"])


def test_lists_frameworks_and_compilation():
    on_ranks(2, accumulates_for_a_list, "ag_gemm", dim=1)
    on_ranks(2, accumulates_for_a_list, "column_linear")
    for check in (follows_megatron, layers_use_the_attribute, compiles):
        on_ranks(2, check)


def rejects_invalid_accumulators():
    x, weight = torch.zeros(4, 8, device=device()), torch.zeros(6, 8, device=device())
    for main_grad, error, message in (
        (torch.zeros(6, 7, device=device()), ValueError, r"main_grad \[6, 7\] must have the shape of weight \[6, 8\]"),
        (weight.half(), TypeError, "main_grad is torch.float16; float32"),
        (torch.zeros(6, 8, device=device(), requires_grad=True), ValueError, r"main_grad \[6, 8\] must not require"),
        (torch.zeros(6, 8, device="meta"), ValueError, "weight is on .* but main_grad is on meta"),
        ([weight], TypeError, "main_grad"),
    ):
        for operator in DIVIDED:
            with pytest.raises(error, match=f"{operator}: .*{message}"):
                getattr(tdkernels, operator)(x, weight, main_grad=main_grad)
    for main_grad, error, message in (
        (weight, TypeError, "main_grad must be a list if weight is a list"),
        ([weight, weight], ValueError, "there are 1 weights but 2 tensors in main_grad"),
        ([None], TypeError, "main_grad must be None or contain a tensor for each weight"),
    ):
        with pytest.raises(error, match=f"ag_gemm: {message}"):
            tdkernels.ag_gemm(x, [weight], main_grad=main_grad)
    weights = weight.clone().requires_grad_(), weight
    with pytest.raises(ValueError, match="ag_gemm: main_grad is given, but weight 1 needs no gradient"):
        tdkernels.ag_gemm(x, weights, main_grad=[weight, weight])


def test_errors():
    on_ranks(1, rejects_invalid_accumulators)
