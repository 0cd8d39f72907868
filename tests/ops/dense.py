"""What both dense operators are asked, as functions that every rank runs. test_ag_gemm.py and test_gemm_rs.py ask."""

import dataclasses
import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tdkernels.ops import ag_gemm_kernel, gemm_rs_kernel
from tests.ranks import device
from tests.reference import GRADIENTS, Case

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

# rows, n, k of a rank (see Case). A default tile is 64 x 64 on the CPU, up to 128 x 256 on a GPU; a GPU reads by TMA
# where n and k are multiples of 8.
SHAPES = [(5, 3, 7), (37, 29, 51), (64, 64, 64), (65, 66, 70)]
LARGE_SHAPES = [(130, 264, 72)]
MINIMAL_SHAPES = [(1, 1, 1), (1, 17, 3), (17, 1, 3), (3, 17, 1)]


def config_for(case, **changes):
    """The default config for the case's operands, some fields changed; None, which means the default, for none."""
    if not changes:
        return None
    x = case.x.detach().reshape(-1, case.x.shape[-1])
    if case.operator == "ag_gemm":
        default = ag_gemm_kernel.default_config_for(x, case.weight)
    else:
        default = gemm_rs_kernel.default_config_for(x, case.weight, case.world_size)
    return dataclasses.replace(default, **changes)


def computes(operator, dtype, shapes, *, bias=True, exact=False, **changes):
    """Output and gradients of each shape, with the config changed as told."""
    cases = [Case(operator, dtype, *shape, bias=bias, exact=exact, seed=i) for i, shape in enumerate(shapes)]
    results = [case.run(config=config_for(case, **changes)) for case in cases]
    for case, result in zip(cases, results, strict=True):
        assert set(result) == {"output", "dx", "dweight", *["dbias"] * bias}
        case.check(result)


# ---- layouts: the same values, laid out otherwise; what is not theirs holds NaN ----


def transposed(t):
    return t.t().contiguous().t()


def row_strided(t):
    wide = t.new_full((t.shape[0], t.shape[1] + 3), torch.nan)
    wide[:, 1:-2] = t
    return wide[:, 1:-2]


def misaligned(t):
    flat = t.new_full((t.numel() + 1,), torch.nan)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def every_second(t):
    wide = t.new_full((2 * t.shape[0], 2 * t.shape[1]), torch.nan)
    wide[::2, 1::2] = t
    return wide[::2, 1::2]


LAYOUTS = {layout.__name__: layout for layout in (transposed, row_strided, misaligned, every_second)}


def computes_with_strided_bias(operator, dtype):
    case = Case(operator, dtype, 37, 29, 51)
    wide = case.bias.new_full((2 * case.bias.numel(),), torch.nan)
    wide[1::2] = case.bias.detach()
    case.bias = wide[1::2].requires_grad_()
    case.check(case.run())


def computes_with_layout(operator, dtype, operand, layout):
    """One operand, or the gradient of the output, in a layout of its own; with and without alignment of its rows."""
    for shape in [(37, 29, 51), (40, 24, 48)]:
        case = Case(operator, dtype, *shape)
        original = getattr(case, operand).detach()
        changed = LAYOUTS[layout](original)
        assert torch.equal(changed, original)
        setattr(case, operand, changed.requires_grad_(operand != "dy"))
        case.check(case.run())


def takes_an_expanded_gradient(operator):
    """What ``output.sum().backward()`` passes down has strides of zero."""
    # Small integers: a library may add in another order for other strides, which must not make a difference.
    case = Case(operator, torch.float32, 9, 7, 5, exact=True)
    case.dy = torch.ones_like(case.dy)
    expected = case.run()
    case.dy = torch.ones((), device=device()).expand(case.dy.shape)
    for name, result in case.run().items():
        assert torch.equal(result, expected[name]), name


def computes_with_leading_dims(operator, dtype, batch, seq):
    """x [batch, seq, K], and [batch, seq, 1, K]: rows are flattened, and restored in the output."""
    world_size = dist.get_world_size()
    # gemm_rs divides the first dimension between the ranks.
    rows = batch * seq if operator == "ag_gemm" else batch * seq // world_size
    out_batch = batch * world_size if operator == "ag_gemm" else batch // world_size
    for leading in [(seq,), (seq, 1)]:
        case = Case(operator, dtype, rows, 21, 19)
        case.x = case.x.detach().view(batch, *leading, -1).requires_grad_()
        results = case.run()
        assert results["output"].shape == (out_batch, *leading, case.dy.shape[1])
        assert results["dx"].shape == case.x.shape
        case.check(results)


def computes_nothing(operator, dtype, config_changes):
    """No rows at all: an empty output, and gradients that are zero."""
    case = Case(operator, dtype, 0, 5, 3)
    results = case.run(config=config_for(case, **config_changes))
    assert set(results) == {"output", "dx", "dweight", "dbias"}
    case.check(results)
    # The ranks are still in step.
    after = Case(operator, dtype, 4, 5, 3)
    after.check(after.run())


# ---- autograd ----


def computes_only_the_gradients_asked_for(operator, dtype):
    names = list(GRADIENTS)
    subsets = [subset for size in range(len(names) + 1) for subset in itertools.combinations(names, size)]
    for subset in subsets:
        case = Case(operator, dtype, 19, 13, 17)
        for name in names:
            getattr(case, name).requires_grad_(name in subset)
        results = case.run()
        assert set(results) == {"output", *(GRADIENTS[name] for name in subset)}, f"asked for {subset}: {set(results)}"
        case.check(results)


def computes_without_grad(operator):
    for mode in (torch.no_grad, torch.inference_mode):
        case = Case(operator, torch.float32, 19, 13, 17)
        with mode():
            output = case.call()
        assert not output.requires_grad
        case.check({"output": output})


def uses_an_output_twice(operator):
    case = Case(operator, torch.float32, 19, 13, 17)
    output = case.call()
    ((output * case.dy / 2).sum() + (output * case.dy / 2).sum()).backward()
    case.check(case.gradients())


def feeds_one_x_to_two_calls(operator):
    """As an attention block feeds q, k and v: the gradients of x add up."""
    case, other = Case(operator, torch.float32, 19, 13, 17), Case(operator, torch.float32, 19, 11, 17, seed=1)
    expected = case.run()["dx"] + other.run()["dx"]
    case.x.grad, other.x = None, case.x  # dx does not depend on x
    torch.autograd.backward([case.call(), other.call()], [case.dy, other.dy])
    assert torch.equal(case.x.grad, expected)


def goes_backward_twice(operator):
    case = Case(operator, torch.bfloat16, 19, 13, 17)
    output = case.call()
    output.backward(case.dy, retain_graph=True)
    output.backward(case.dy)
    case.check({name: gradient / 2 for name, gradient in case.gradients().items()})


def recomputes_in_a_checkpoint(operator):
    case = Case(operator, torch.bfloat16, 19, 13, 17)
    output = checkpoint(case.call, use_reentrant=False)
    output.backward(case.dy)
    case.check({"output": output, **case.gradients()})


def refuses_second_derivatives(operator):
    """Rather than leave terms out of them."""
    case = Case(operator, torch.float32, 19, 13, 17)
    output = case.call()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(output, case.x, case.dy, create_graph=True)


def obeys_autocast(operator):
    """fp32 parameters under autocast: computed in bf16, with gradients in fp32."""
    case = Case(operator, torch.bfloat16, 37, 29, 51)
    for name in GRADIENTS:
        setattr(case, name, getattr(case, name).detach().float().requires_grad_())
    with torch.autocast(device().type, torch.bfloat16):
        output = case.call()
    assert output.dtype == torch.bfloat16
    output.backward(case.dy)
    gradients = case.gradients()
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    case.check({"output": output, **{name: gradient.bfloat16() for name, gradient in gradients.items()}})


# ---- the rest ----


def repeats_its_bits(operator, dtype, **changes):
    """The same bits every time, whoever comes first."""
    case = Case(operator, dtype, 40, 37, 70)
    config = config_for(case, **changes)
    first = case.run(config=config)
    case.check(first)
    delays = random.Random(dist.get_rank())
    for _ in range(3):
        time.sleep(delays.uniform(0, 0.03))
        for name, result in case.run(config=config).items():
            assert torch.equal(result, first[name]), f"{name} of {case.title} changed from call to call"


def is_plain_linear_on_one_rank(operator, dtype):
    case = Case(operator, dtype, 37, 29, 51)
    results = case.run()
    assert torch.equal(results["output"], F.linear(case.x, case.weight, case.bias))
    case.check(results)
