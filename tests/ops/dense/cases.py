"""Test bodies for the dense operators. Every rank runs them; see test_dense.py."""

import dataclasses
import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels.ops.dense.ag_gemm import config as ag_gemm_config
from tdkernels.ops.dense.gemm_ar import config as gemm_ar_config
from tdkernels.ops.dense.gemm_rs import config as gemm_rs_config
from tests.support.dense_oracle import GRADIENTS, Case
from tests.support.ranks import a_group, device
from tests.support.subset import THOROUGH

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

# rows, n, k per rank (see Case). A default tile is 64 x 64 on the CPU and up to 128 x 256 on a GPU, which uses TMA if n
# and k are multiples of 8.
SHAPES = [(5, 3, 7), (37, 29, 51), (64, 64, 64), (65, 66, 70)]
LARGE_SHAPES = [(130, 264, 72)]
MINIMAL_SHAPES = [(1, 1, 1), (1, 17, 3), (17, 1, 3), (3, 17, 1)]
SMALL_M = (2, 21, 200)  # small M; K is larger than any config's number of K splits


# The default config, from the operands of a rank and the number of ranks.
_DEFAULTS = {
    "ag_gemm": ag_gemm_config.default_config_for,
    "gemm_rs": gemm_rs_config.default_config_for,
    "gemm_ar": gemm_ar_config.default_config_for,
}


def config_for(case, **changes):
    """Return the default config for the case with some fields changed, or None if there are no changes."""
    if not changes:
        return None
    x = case.x.detach().reshape(-1, case.x.shape[-1])
    return dataclasses.replace(_DEFAULTS[case.operator](x, case.weight, case.world_size), **changes)


def computes(operator, dtype, shapes, *, bias=True, exact=False, backward=None, **changes):
    """Check output and gradients (see ``Case.runs_backward``) for each shape, with changed config fields."""
    cases = [Case(operator, dtype, *shape, bias=bias, exact=exact, seed=i) for i, shape in enumerate(shapes)]
    configs = [config_for(case, **changes) for case in cases]
    results = [case.run(backward, config=config) for case, config in zip(cases, configs, strict=True)]
    for case, config, result in zip(cases, configs, results, strict=True):
        has_gradients = case.runs_backward(config=config) if backward is None else backward
        assert set(result) == {"output", *["dx", "dweight", *["dbias"] * bias] * has_gradients}
        case.check(result)
        has_same_bits_on_all_ranks(case, result)


def has_same_bits_on_all_ranks(case, results):
    """Check that replicated results have the same bits on all ranks; otherwise model replicas would diverge."""
    for name in sorted(case.whole & results.keys()):
        own_bytes = results[name].contiguous().view(torch.uint8)
        rank_0_bytes = own_bytes.clone()
        dist.broadcast(rank_0_bytes, 0)
        wrong = (own_bytes != rank_0_bytes).sum().item()
        assert wrong == 0, f"{name} of {case.title}: {wrong} of {own_bytes.numel()} bytes differ from rank 0"


# ---- layouts: copies with another memory layout; gaps hold ``fill`` ----


def transposed(t, fill):
    return t.t().contiguous().t()


def row_strided(t, fill):
    wide = t.new_full((t.shape[0], t.shape[1] + 3), fill)
    wide[:, 1:-2] = t
    return wide[:, 1:-2]


def misaligned(t, fill):
    flat = t.new_full((t.numel() + 1,), fill)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def every_second(t, fill):
    wide = t.new_full((2 * t.shape[0], 2 * t.shape[1]), fill)
    wide[::2, 1::2] = t
    return wide[::2, 1::2]


LAYOUTS = {layout.__name__: layout for layout in (transposed, row_strided, misaligned, every_second)}


def computes_with_strided_bias(operator, dtype, **changes):
    case = Case(operator, dtype, 37, 29, 51)
    wide = case.bias.new_full((2 * case.bias.numel(),), torch.nan)
    wide[1::2] = case.bias.detach()
    case.bias = wide[1::2].requires_grad_()
    case.check(case.run(config=config_for(case, **changes)))


def computes_with_layout(operator, dtype, operand, layout, **changes):
    """Check one operand or output gradient in the given layout, with aligned and unaligned rows."""
    for shape in [(37, 29, 51), (40, 24, 48)]:
        case = Case(operator, dtype, *shape)
        original = getattr(case, operand).detach()
        changed = LAYOUTS[layout](original, _between(case, operand))
        assert torch.equal(changed, original)
        setattr(case, operand, changed.requires_grad_(operand != "dy"))
        case.check(case.run(config=config_for(case, **changes)))


def _between(case, operand):
    """Return the fill value between the rows of an operand: NaN, unless only plain torch reads the operand.

    With AMX, torch's bf16 GEMM on CPU reads past an odd row and multiplies that by zero: uxlfoundation/oneDNN#5717.
    """
    read_by_torch_only = operand == "dy" and "output" in case.whole
    return torch.finfo(case.dtype).max if read_by_torch_only else torch.nan


def supports_expanded_gradients(operator, **changes):
    """Check output gradients with strides of zero, as from ``output.sum().backward()``."""
    # Use small integers: libraries may sum in another order for other strides.
    case = Case(operator, torch.float32, 9, 7, 5, exact=True)
    case.dy = torch.ones_like(case.dy)
    config = config_for(case, **changes)
    expected = case.run(config=config)
    case.dy = torch.ones((), device=device()).expand(case.dy.shape)
    for name, result in case.run(config=config).items():
        assert torch.equal(result, expected[name]), name


def computes_with_leading_dims(operator, dtype, batch, seq):
    """Check x of [..., seq, K] and [..., seq, 1, K]: leading dimensions are flattened and restored."""
    for leading in [(seq,), (seq, 1)]:
        case = Case(operator, dtype, batch * seq, 21, 19)
        case.x = case.x.detach().view(-1, *leading, case.x.shape[1]).requires_grad_()
        results = case.run()
        assert results["output"].shape == (case.dy.shape[0] // seq, *leading, case.dy.shape[1])
        assert results["dx"].shape == case.x.shape
        case.check(results)


def computes_without_rows(operator, dtype, config_changes):
    """Check operands without rows: an empty output, and zero gradients."""
    case = Case(operator, dtype, 0, 5, 3)
    results = case.run(config=config_for(case, **config_changes))
    assert set(results) == {"output", "dx", "dweight", "dbias"}
    case.check(results)
    # The ranks are still synchronized.
    after = Case(operator, dtype, 4, 5, 3)
    after.check(after.run())


# ---- autograd ----


def computes_subsets_of_gradients(operator, dtype, **changes):
    names = list(GRADIENTS)
    subsets = [subset for size in range(len(names) + 1) for subset in itertools.combinations(names, size)]
    for subset in subsets:
        case = Case(operator, dtype, 19, 13, 17)
        for name in names:
            getattr(case, name).requires_grad_(name in subset)
        results = case.run(config=config_for(case, **changes))
        assert set(results) == {"output", *(GRADIENTS[name] for name in subset)}, f"{subset}: got {set(results)}"
        case.check(results)


def computes_without_grad(operator):
    for mode in (torch.no_grad, torch.inference_mode):
        case = Case(operator, torch.float32, 19, 13, 17)
        with mode():
            output = case.call()
        assert not output.requires_grad
        case.check({"output": output})


def trains_after_inference(operator, **changes):
    """Check a training call that reuses the workspace of a call in inference mode, and the reverse."""
    with a_group() as group:
        for seed in range(2):
            case = Case(operator, torch.bfloat16, 19, 13, 17, seed=seed)
            config = config_for(case, **changes)
            with torch.inference_mode():
                case.check({"output": case.call(group=group, config=config)})
            case.check(case.run(True, group=group, config=config))
        del group


def uses_an_output_twice(operator):
    case = Case(operator, torch.float32, 19, 13, 17)
    output = case.call()
    ((output * case.dy / 2).sum() + (output * case.dy / 2).sum()).backward()
    case.check(case.gradients())


def shares_x_between_calls(operator):
    """Check that gradients of a shared x accumulate, as for q, k and v of an attention block."""
    case, other = Case(operator, torch.float32, 19, 13, 17), Case(operator, torch.float32, 19, 11, 17, seed=1)
    expected = case.run()["dx"] + other.run()["dx"]
    case.x.grad, other.x = None, case.x  # dx does not depend on x
    torch.autograd.backward([case.call(), other.call()], [case.dy, other.dy])
    assert torch.equal(case.x.grad, expected)


def repeats_backward(operator):
    case = Case(operator, torch.bfloat16, 19, 13, 17)
    output = case.call()
    output.backward(case.dy, retain_graph=True)
    output.backward(case.dy)
    case.check({name: gradient / 2 for name, gradient in case.gradients().items()})


def supports_checkpoint(operator):
    case = Case(operator, torch.bfloat16, 19, 13, 17)
    output = checkpoint(case.call, use_reentrant=False)
    output.backward(case.dy)
    case.check({"output": output, **case.gradients()})


def rejects_second_derivatives(operator):
    """Check that second derivatives raise instead of missing terms."""
    case = Case(operator, torch.float32, 19, 13, 17)
    output = case.call()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(output, case.x, case.dy, create_graph=True)


def rejects_forward_mode(operator):
    """Check that forward-mode AD raises instead of returning a zero tangent."""
    case = Case(operator, torch.float32, 19, 13, 17)
    x, weight = case.x.detach(), case.weight.detach()
    call = getattr(tdkernels, operator)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="jvp"):
            call(forward_ad.make_dual(x, torch.ones_like(x)), weight)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.jvp(lambda x: call(x, weight), (x,), (torch.ones_like(x),))


def supports_autocast(operator):
    """Check fp32 parameters under autocast: bf16 compute, fp32 gradients."""
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


# ---- determinism ----


def is_deterministic(operator, dtype, **changes):
    """Check that repeated calls return the same bits, with random delays of ranks."""
    case = Case(operator, dtype, 40, 37, 70)
    config = config_for(case, **changes)
    first = case.run(config=config)
    case.check(first)
    has_same_bits_on_all_ranks(case, first)
    delays = random.Random(dist.get_rank())
    for _ in range(3 if THOROUGH else 2):
        time.sleep(delays.uniform(0, 0.03))
        for name, result in case.run(config=config).items():
            assert torch.equal(result, first[name]), f"{name} of {case.title} changed from call to call"


def reduces_in_rank_order(operator, dtype, **changes):
    """Check the bits of z: partials, rounded to the dtype, are summed in fp32 in rank order."""
    # The partials are x[0] + x[1] / 16, which do not depend on the summation order of the GEMM. gemm_rs does not round
    # its own partial first, so there the partials are x[0].
    weights = [1.0] if operator == "gemm_rs" else [1.0, 1 / 16]
    case = Case(operator, dtype, 40, 37, len(weights), bias=False)
    with torch.no_grad():
        case.weight.copy_(torch.tensor(weights))
    column = case.x.detach().double() @ case.weight[:1].detach().double().t()
    partial = column.float().to(dtype)
    partials = [torch.empty_like(partial) for _ in range(case.world_size)]
    dist.all_gather(partials, partial)
    total = torch.zeros_like(partial, dtype=torch.float32)
    for rank_partial in partials:
        total += rank_partial.float()
    expected = case.own_parts({"output": total.to(dtype).expand(-1, case.shape[1])})["output"]
    got = case.call(config=config_for(case, **changes)).detach()
    wrong = (got != expected).sum().item()
    assert wrong == 0, f"{wrong} of {got.numel()} elements of {case.title} have another summation order"


def computes_backward_without_peers(operator):
    """Check that the backward of one rank alone does not wait if the output gradient is replicated."""
    case = Case(operator, torch.bfloat16, 19, 13, 17)
    output = case.call()
    if dist.get_rank() == 0:
        output.backward(case.dy)
        case.check(case.gradients())
    case.check({"output": case.call()})


def matches_linear_on_one_rank(operator, dtype):
    case = Case(operator, dtype, 37, 29, 51)
    results = case.run()
    assert torch.equal(results["output"], F.linear(case.x, case.weight, case.bias))
    case.check(results)
