"""Test bodies for ep_dispatch and ep_combine. Every rank runs them; test_dispatch.py starts them."""


import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tdkernels.ops.experts.dispatch.counted import CountedRouting
from tdkernels.symm import resolve_group
from tdkernels.symm.group import group_state
from tests.ops.collectives.cases import same
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32, Routed
from tests.support.ranks import device
from tests.test_protocol import in_any_order

SMALL = {"num_senders": 2, "num_receivers": 3, "chunk_tokens": 1, "block_bytes": 256, "num_warps": 1}
UNEVEN = [3, 0, 7, 1]  # tokens of ranks


def config_of(changes):
    return None if changes is None else EpConfig(**changes)


def tokens_of(tokens):
    """Return the number of tokens of each rank: one number for all ranks, or the first entries of a list."""
    world_size = dist.get_world_size()
    return [tokens] * world_size if isinstance(tokens, int) else tokens[:world_size]


def case_of(tokens, k, experts_each, width, dtype=BF16, **options):
    """Return a case for the world group; k "all" stands for the number of experts."""
    k = experts_each * dist.get_world_size() if k == "all" else k
    options.setdefault("local_world_size", group_state(resolve_group()).local_world_size)
    return Routed(tokens_of(tokens), k, experts_each * dist.get_world_size(), width, dtype, **options)


# ---- forward and gradients ----


def computes(spec, changes):
    """Check forward and all gradients of a dispatch and a combine with the same routing."""
    case = case_of(**spec)
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    case.x.requires_grad_()
    case.weights.requires_grad_()
    recv, handle = case.dispatch(config=config)
    case.check_received(recv)
    expert_out = case.expert_out().requires_grad_()
    y = tdkernels.ep_combine(expert_out, handle)
    case.check_combined(y, combine=combine)
    check_gradients_of_dispatch(case, recv, combine)
    check_gradients_of_combine(case, y, expert_out)


def dispatches_tokens(spec):
    case = case_of(**spec)
    recv, _ = case.dispatch()
    case.check_received(recv)


def check_gradients_of_dispatch(case, recv, combine):
    """Check that dx is the sum over the rows of each token, and that the gradient of topk_weights is only moved."""
    d_rows = case.draw(case.all_ids.numel(), case.all_x.shape[1], case.dtype)
    d_weights = case.draw(case.all_ids.numel(), 1, FP32)
    dx, dw = torch.autograd.grad(
        [recv.x, recv.topk_weights], [case.x, case.weights],
        [d_rows[case.order].to(device()), d_weights.flatten()[case.order].to(device())],
    )
    tdkernels.synchronize()
    case.check_numbers("dx of dispatch", dx, *case.combined(d_rows, None, combine))
    expected = d_weights.view(case.valid.shape).where(case.valid, 0.0)[case.mine].to(case.weights.dtype)
    assert same(dw, expected), f"dtopk_weights of dispatch: {case.title}"


def expected_gradients_of_combine(case, all_dy, weights):
    """Return the gradient of the rows [R, H], bitwise, and of the weights [T, k] in fp64 and in plain torch."""
    weights = torch.ones(case.valid.shape) if weights is None else weights
    dy_of_rows = case.received(all_dy).float()
    d_rows = (dy_of_rows * case.by_row(weights).float()[:, None]).to(all_dy.dtype)
    out = case.all_out.view(*case.valid.shape, all_dy.shape[1])[case.mine]
    dy, valid = all_dy[case.mine][:, None], case.valid[case.mine]
    exact = (out.double() * dy.double()).sum(-1).where(valid, 0.0)
    low = (out.float() * dy.float()).sum(-1).where(valid, 0.0).to(weights.dtype)
    return d_rows, exact, low


def check_gradients_of_combine(case, y, expert_out):
    all_dy = case.draw(sum(case.tokens), y.shape[1], y.dtype)
    d_out, dw = torch.autograd.grad(y, [expert_out, case.weights], all_dy[case.mine].to(device()))
    tdkernels.synchronize()
    d_rows, exact, low = expected_gradients_of_combine(case, all_dy, case.all_weights)
    assert same(d_out, d_rows), f"dexpert_out: {case.title}"
    case.check_numbers("dtopk_weights of combine", dw, exact, low)


def moves_any_bits(dtypes, changes):
    """Check that payloads of random bits arrive bitwise, for several dtypes and odd widths."""
    for seed, (dtype, width) in enumerate(dtypes):
        case = case_of([4, 0, 5, 2], 2, 2, width, dtype, values="bits", seed=seed)
        recv, _ = case.dispatch(weighted=seed % 2 == 0, config=config_of(changes))
        case.check_received(recv, weighted=seed % 2 == 0)
        assert recv.scales is None


def takes_any_layout(changes):
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    case = case_of(5, 3, 3, 24, FP32)

    def misaligned(tensor):
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    layouts = {
        "transposed": lambda t: t.t().contiguous().t(),
        "misaligned": misaligned,
        "every second": lambda t: t.repeat_interleave(2, 0)[::2],
        "int32": lambda t: t if t.is_floating_point() else t.int(),
        "broadcast": lambda t: t,
    }
    for name, layout in layouts.items():
        x, ids, weights = layout(case.x), layout(case.ids), layout(case.weights)
        before = [tensor.clone() for tensor in (x, ids, weights)]
        recv, handle = tdkernels.ep_dispatch(x, ids, weights, num_experts=case.experts, config=config)
        case.check_received(recv)
        y = tdkernels.ep_combine(layout(case.expert_out()), handle)
        case.check_combined(y, combine=combine)
        for tensor, was in zip((x, ids, weights), before, strict=True):
            assert same(tensor, was.cpu()), f"{name}: an operand was modified"
    ones = torch.ones((), device=device()).expand(case.x.shape)
    recv, _ = tdkernels.ep_dispatch(ones, case.ids, num_experts=case.experts, config=config)
    assert same(recv.x, torch.ones(case.num_rows, 24)), "strides of zero"


def weights_are_optional(changes):
    """Without weights all weights are 1. Weights passed only to the combine scale its sum and get a gradient."""
    case = case_of(UNEVEN, 3, 3, 17, out_width=40, out_dtype=FP16, seed=2)
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    recv, handle = case.dispatch(weighted=False, config=config)
    case.check_received(recv, weighted=False)
    y = tdkernels.ep_combine(case.expert_out(), handle)
    case.check_combined(y, weighted=False, combine=combine)
    for weights_dtype in (FP32, BF16):
        case.weights = case.all_weights[case.mine].to(weights_dtype).to(device()).requires_grad_()
        expert_out = case.expert_out().requires_grad_()
        y = tdkernels.ep_combine(expert_out, handle, case.weights)
        case.check_combined(y, combine=combine)
        case.all_weights = case.all_weights.to(weights_dtype)
        check_gradients_of_combine(case, y, expert_out)


def combine_takes_other_weights(changes):
    """Weights passed to the combine take precedence over the weights of the dispatch, for this combine only."""
    case, other = (case_of(UNEVEN, 2, 2, 9, weights=dtype, seed=3) for dtype in (FP32, BF16))
    other.all_weights = torch.where(other.valid, 2.0, torch.nan).to(BF16)
    _, handle = case.dispatch(config=config_of(changes))
    y = tdkernels.ep_combine(case.expert_out(), handle, other.all_weights[case.mine].to(device()))
    other.check_combined(y)
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))


def combine_uses_weights_changed_in_place(changes):
    """The combine uses the current values of weights that were changed in place after the dispatch, on all ranks."""
    case = case_of(UNEVEN, 2, 2, 9, weights=FP32, seed=3)
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    case.weights = case.weights.clone()  # it may be a view of all_weights
    _, handle = case.dispatch(config=config)
    case.weights.mul_(2)
    case.all_weights = case.all_weights * 2
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine=combine)
    recv, handle = case.dispatch(config=config)
    recv.topk_weights.detach().zero_()
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine=combine)


def reuses_the_handle(changes):
    """A handle routes other rows and weights, of any width and dtype, and their gradients."""
    case, other = (
        case_of(UNEVEN, 3, 3, width, dtype, weights=weights, seed=4)
        for width, dtype, weights in ((16, BF16, FP32), (37, FP32, BF16))
    )
    other.all_weights = (other.all_weights * 2).to(BF16)
    other.weights = other.all_weights[other.mine].to(device()).requires_grad_()
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    _, handle = case.dispatch(config=config)
    other.x.requires_grad_()
    for _ in range(2):
        recv, again = tdkernels.ep_dispatch(other.x, handle, other.weights)
        other.check_received(recv)
        assert again is not handle and again.num_experts == case.experts
        expert_out = other.expert_out().requires_grad_()
        y = tdkernels.ep_combine(expert_out, again)
        other.check_combined(y, combine=combine)
        check_gradients_of_dispatch(other, recv, combine)
        check_gradients_of_combine(other, y, expert_out)
        unweighted_handle = tdkernels.ep_dispatch(case.x, again)[1]  # the same routing, without weights
        unweighted = tdkernels.ep_combine(case.expert_out(), unweighted_handle)
        case.check_combined(unweighted, weighted=False, combine=combine)
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine=combine)  # the weights of ``case``


def reduces_in_fixed_order(dtype, changes):
    """Check the order and the rounding of sums bitwise. The weights are powers of two, so that scaling is exact."""
    case = case_of([4, 2, 5, 3], 4, 3, 50, dtype, values="normal", seed=16)
    case.all_weights = 2.0 ** torch.randint(-2, 3, case.valid.shape, generator=case.generator)
    case.weights = case.all_weights[case.mine].to(device())
    _, handle = case.dispatch(config=config_of(changes))
    y = tdkernels.ep_combine(case.expert_out(), handle)
    tdkernels.synchronize()
    expected = case.combined(case.all_out, case.all_weights, changes["combine"])[1]
    assert same(y, expected), f"{case.title}, {changes}"


def is_within_error_bound(dtype, changes):
    spec = dict(tokens=[5, 3, 0, 4], k=4, experts_each=4, width=96, dtype=dtype, values="normal", ids="distinct")
    computes(spec, changes)


def accumulates_gradients(changes):
    """A tensor used twice gets the sum of both gradients, and a retained graph can run backward twice."""
    case = case_of(UNEVEN, 2, 2, 12, FP32, seed=5)
    case.x.requires_grad_()
    case.weights.requires_grad_()
    recv, handle = case.dispatch(config=config_of(changes))
    expert_out = recv.x * 2.0
    first = tdkernels.ep_combine(expert_out, handle)
    second = tdkernels.ep_combine(recv.x, handle)
    first_dy, second_dy = (case.draw(sum(case.tokens), 12, FP32) for _ in range(2))
    dys = [dy[case.mine].to(device()) for dy in (first_dy, second_dy)]
    once = torch.autograd.grad([first, second], [case.x, case.weights], dys, retain_graph=True)
    again = torch.autograd.grad([first, second], [case.x, case.weights], dys)
    tdkernels.synchronize()
    # Each y is a multiple of x. With s, the sum of a token's weights, they are 2 * s * x and s * x.
    x, weights = case.all_x[case.mine].double(), case.all_weights[case.mine].where(case.valid[case.mine], 0.0).double()
    dy = 2 * first_dy[case.mine].double() + second_dy[case.mine].double()
    dx = dy * weights.sum(1, keepdim=True)
    dw = (dy * x).sum(1, keepdim=True).where(case.valid[case.mine], 0.0)
    for got in (once, again):
        case.check_numbers("dx", got[0], dx, dx.float())
        case.check_numbers("dtopk_weights", got[1], dw, dw.float())


def sends_only_required_gradients():
    """A gradient that is not required is neither computed nor sent."""
    case = case_of(3, 2, 2, 8, FP32, seed=6)
    sent = []

    def combine(routing, rows, row_numbers=None, **options):
        sent.append((rows.shape[1], row_numbers is not None))
        return whole_combine(routing, rows, row_numbers=row_numbers, **options)

    def dispatch_gradient(routing, dy, expert_rows, weights, want_dots):
        sent.append(("rows", want_dots))
        return whole_gradient(routing, dy, expert_rows, weights, want_dots)

    whole_combine, whole_gradient = CountedRouting.combine, CountedRouting.dispatch_gradient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountedRouting, "combine", combine)
        patch.setattr(CountedRouting, "dispatch_gradient", dispatch_gradient)
        for wants_x, wants_weights, expected in (
            (True, False, [(8, False)]), (False, True, [(0, True)]), (True, True, [(8, True)])
        ):
            x, weights = case.x.detach().clone(), case.weights.detach().clone()
            x.requires_grad_(wants_x), weights.requires_grad_(wants_weights)
            recv, _ = tdkernels.ep_dispatch(x, case.ids, weights, num_experts=case.experts)
            assert recv.x.requires_grad and recv.topk_weights.requires_grad and not recv.splits.requires_grad
            sent.clear()
            (recv.x.sum() + recv.topk_weights.sum()).backward()
            assert sent == expected, f"{sent} for x {wants_x} and weights {wants_weights}"
            assignments = case.valid[case.mine].sum(1, keepdim=True).float()
            assert not wants_x or same(x.grad, assignments.expand(x.shape))
            assert not wants_weights or same(weights.grad, case.valid[case.mine].float())
            assert wants_x or x.grad is None
        _, handle = case.dispatch()
        for wants_rows, wants_weights, expected in (
            (True, False, [(8, False), ("rows", False)]),
            (False, True, [(8, False), ("rows", True), (0, True)]),
            (True, True, [(8, False), ("rows", True), (0, True)]),
        ):
            rows, weights = case.expert_out().requires_grad_(wants_rows), case.weights.detach().clone()
            weights.requires_grad_(wants_weights)
            sent.clear()
            y = tdkernels.ep_combine(rows, handle, weights)
            y.sum().backward()
            assert sent == expected, f"{sent} for rows {wants_rows} and weights {wants_weights}"
            expected_rows, exact, low = expected_gradients_of_combine(
                case, torch.ones(sum(case.tokens), 8), case.all_weights
            )
            assert not wants_rows or same(rows.grad, expected_rows)
            assert not wants_weights or same(weights.grad, low)
            assert torch.equal(low.double(), exact)
            assert wants_rows or rows.grad is None


def builds_no_graph_under_no_grad():
    case = case_of(3, 2, 2, 8, FP32)
    case.x.requires_grad_()
    case.weights.requires_grad_()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            recv, handle = case.dispatch()
            y = tdkernels.ep_combine(case.expert_out().requires_grad_(), handle)
        case.check_received(recv)
        case.check_combined(y)
        assert not (recv.x.requires_grad or recv.topk_weights.requires_grad or y.requires_grad), context
    recv, handle = Routed(case.tokens, 2, case.experts, 8).dispatch()
    assert not recv.x.requires_grad and not tdkernels.ep_combine(recv.x, handle).requires_grad


def rejects_second_derivatives():
    case = case_of(3, 2, 2, 8, FP32)
    case.x.requires_grad_()
    recv, handle = case.dispatch()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(recv.x.sum(), case.x, create_graph=True)
    rows = case.expert_out().requires_grad_()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(tdkernels.ep_combine(rows, handle).sum(), rows, create_graph=True)


def allows_overwriting_operands():
    """The ids and x may be overwritten after the call; a later combine and backward do not read them."""
    case = case_of(UNEVEN, 3, 3, 16, FP32, seed=15)
    case.x.requires_grad_()
    ids = case.ids.clone()
    x = case.x * 1.0
    recv, handle = tdkernels.ep_dispatch(x, ids, case.weights, num_experts=case.experts)
    ids.fill_(-1)
    x.detach().fill_(torch.nan)
    case.check_received(recv)
    rows = case.expert_out().requires_grad_()
    y = tdkernels.ep_combine(rows, handle)
    case.check_combined(y)
    ids.fill_(1 << 30)
    case.weights.requires_grad_()
    check_gradients_of_combine(case, tdkernels.ep_combine(rows, handle, case.weights), rows)
    d_rows = case.draw(case.all_ids.numel(), 16, FP32)
    (dx,) = torch.autograd.grad(recv.x, case.x, d_rows[case.order].to(device()))
    tdkernels.synchronize()
    case.check_numbers("dx of dispatch", dx, *case.combined(d_rows, None))


# ---- a whole layer ----


def matches_unsharded_layer(weights_in, seed, changes):
    """Compare output and all gradients of a mixture of experts, sharded over the ranks, with the unsharded layer.

    All values are small integers, so sums are exact in any order and gradients are compared for equality.
    """
    width, hidden, each, k = 6, 5, 2, 3 if dist.get_world_size() > 1 else 2
    case = case_of([5, 0, 3, 4], k, each, width, FP32, ids="distinct", seed=seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def ternary(*shape):
        return torch.randint(-1, 2, shape, generator=case.generator).double()

    # A gate without softmax keeps all values integers.
    whole = {
        "x": ternary(sum(case.tokens), width), "gate": ternary(case.experts, width),
        "up": ternary(case.experts, hidden, width), "down": ternary(case.experts, width, hidden),
    }
    dy = ternary(sum(case.tokens), width)
    local = slice(rank * each, (rank + 1) * each)
    parts = {"x": case.mine, "gate": slice(None), "up": local, "down": local}
    own = {name: whole[name][part].to(FP32).to(device()).requires_grad_() for name, part in parts.items()}

    def experts(rows, splits, up, down):
        outputs = [torch.relu(r @ u.t()) @ d.t() for r, u, d in zip(rows.split(splits), up, down, strict=True)]
        return torch.cat(outputs)

    weights = (own["x"] @ own["gate"].t()).gather(1, case.ids)
    by_combine = weights_in == "combine"
    recv, handle = tdkernels.ep_dispatch(
        own["x"], case.ids, None if by_combine else weights, num_experts=case.experts, config=config_of(changes)
    )
    rows = experts(recv.x, recv.splits.tolist(), own["up"], own["down"])
    if weights_in == "experts":  # the experts apply the received weights, so the combine uses ones
        rows = rows * recv.topk_weights[:, None]
        y = tdkernels.ep_combine(rows, handle, torch.ones_like(weights).detach())
    else:
        y = tdkernels.ep_combine(rows, handle, weights if by_combine else None)
    y.backward(dy[case.mine].to(FP32).to(device()))
    tdkernels.synchronize()

    whole = {name: tensor.requires_grad_() for name, tensor in whole.items()}
    weights = (whole["x"] @ whole["gate"].t()).gather(1, case.all_ids)
    expected = 0
    for j in range(k):
        ids = case.all_ids[:, j]
        hidden_rows = torch.relu(torch.einsum("th,tfh->tf", whole["x"], whole["up"][ids]))
        expected = expected + weights[:, j : j + 1] * torch.einsum("tf,thf->th", hidden_rows, whole["down"][ids])
    expected.backward(dy)
    assert torch.equal(y.detach().cpu().double(), expected[case.mine].detach()), f"y of rank {rank} of {world_size}"
    gate = own["gate"].grad.cpu().double()
    if world_size > 1:  # each rank has the gradient from its own tokens
        gate = own["gate"].grad.clone()
        dist.all_reduce(gate)
        gate = gate.cpu().double()
    assert torch.equal(gate, whole["gate"].grad), "dgate"
    for name in ("x", "up", "down"):
        got, wanted = own[name].grad.cpu().double(), whole[name].grad[parts[name]]
        assert torch.equal(got, wanted), f"d{name} of rank {rank} of {world_size}: {(got - wanted).abs().max()}"


# ---- determinism ----


def is_bitwise_deterministic():
    """Results are bitwise equal for any number of senders and receivers and any timing, as the sum order is fixed."""
    case = case_of([3, 2, 4, 1], 3, 2, 40, values="normal", seed=7)
    expert_out = case.expert_out()
    all_dy = case.draw(sum(case.tokens), 40, BF16)
    results = []
    for seed, changes in enumerate((SMALL, SMALL | {"num_senders": 5, "num_receivers": 1})):
        x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
        rows = expert_out.clone().requires_grad_()
        with in_any_order(seed):
            recv, handle = tdkernels.ep_dispatch(
                x, case.ids, weights, num_experts=case.experts, config=config_of(changes)
            )
            y = tdkernels.ep_combine(rows, handle)
            gradients = torch.autograd.grad(y, [rows, weights], all_dy[case.mine].to(device()), retain_graph=True)
            d_rows = all_dy.repeat_interleave(3, 0)[case.order].to(device())
            gradients += torch.autograd.grad([recv.x], [x], [d_rows])
        tdkernels.synchronize()
        results.append([tensor.detach().cpu() for tensor in (recv.x, y, *gradients)])
    names = ("recv.x", "y", "dexpert_out", "dtopk_weights", "dx")
    for others in results[1:]:
        for name, first, other in zip(names, results[0], others, strict=True):
            assert same(other, first), f"{name} has other bits the second time"


# ---- quantization and scales ----


def quantize_ref(x):
    """Return (codes, scales) of rows, in plain torch."""
    width = x.shape[1]
    quanta = torch.nn.functional.pad(x.float(), (0, -width % 128)).unflatten(1, (-1, 128))
    amax = quanta.abs().amax(2)
    amax = torch.where(amax > 0, amax.clamp(min=2.0**-118), 448.0)
    fp8_max = torch.full_like(amax, 448.0)  # a tensor, since a GPU multiplies by the reciprocal of a scalar divisor
    codes = (quanta * (fp8_max / amax)[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :width], amax / fp8_max


def quantizes(width, dtype, changes):
    case = case_of([4, 0, 3, 5], 2, 2, width, dtype, values="normal", seed=width)
    total = sum(case.tokens)
    magnitudes = torch.tensor([1.0, 1e-4, 300.0, 0.0, 2.0**-130 if dtype == FP32 else 2.0**-14])
    case.all_x = (case.all_x.float() * magnitudes[torch.arange(total) % 5, None]).to(dtype)
    if width > 128:
        case.all_x[:, 128:256] = 0.0  # a block with codes 0 and scale 1
    case.x = case.all_x[case.mine].to(device())
    recv, handle = case.dispatch(quantize="fp8", config=config_of(changes))
    tdkernels.synchronize()
    codes, scales = quantize_ref(case.all_x)
    assert same(recv.scales, case.received(scales)), f"scales: {case.title}"
    assert same(recv.x, case.received(codes)), f"codes: {case.title}"
    assert same(recv.topk_weights, case.by_row(case.all_weights)), f"topk_weights: {case.title}"
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))


def quantized_rows_have_no_gradient():
    case = case_of(UNEVEN, 2, 2, 130, FP32, seed=10)
    case.x.requires_grad_()
    with pytest.raises(ValueError, match='quantize="fp8" has no gradient'):
        case.dispatch(quantize="fp8")
    codes, _ = quantize_ref(case.all_x)
    with torch.no_grad():
        recv, _ = case.dispatch(quantize="fp8")
    assert same(recv.x, case.received(codes))
    case.x = case.x.detach()
    case.weights.requires_grad_()  # the weights still have a gradient
    recv, _ = case.dispatch(quantize="fp8")
    assert not recv.x.requires_grad and not recv.scales.requires_grad
    recv.topk_weights.backward(torch.full_like(recv.topk_weights, 2.0))
    assert same(case.weights.grad, torch.where(case.valid, 2.0, 0.0)[case.mine])


def sends_scales(scales, changes):
    """Scales of any dtype and shape arrive bitwise with rows of fp8 codes."""
    for seed, (dtype, shape) in enumerate(scales):
        case = case_of([4, 0, 2, 5], 2, 2, 20, torch.float8_e4m3fn, values="bits", seed=seed)
        all_scales = case.draw(sum(case.tokens), shape[0] if shape else 1, dtype)
        all_scales = all_scales if shape else all_scales.flatten()
        recv, _ = case.dispatch(
            weighted=False, scales=all_scales[case.mine].to(device()), config=config_of(changes)
        )
        case.check_received(recv, weighted=False)
        assert same(recv.scales, case.received(all_scales)), f"scales {dtype} {shape}"


# ---- torch.compile ----


def make_layer(handles):
    """Return a function to compile, with other operators before, between and after dispatch and combine."""

    def layer(x, ids, weights):
        recv, handle = tdkernels.ep_dispatch(2 * x, ids, weights, num_experts=4)
        handles.append(handle)
        return 3 * tdkernels.ep_combine(recv.x + 1, handle)

    return layer


def compiles_with_graph_breaks():
    case = case_of([3, 5], 2, 2, 8, FP32)
    results = []
    for layer in (make_layer([]), torch.compile(make_layer([]), backend="aot_eager")):
        x = case.x.clone().requires_grad_()
        weights = torch.full(case.ids.shape, 0.5, device=device(), requires_grad=True)
        y = layer(x, case.ids, weights)
        y.sum().backward()
        results.append((y.detach(), x.grad, weights.grad))
    for name, plain, compiled in zip(("y", "dx", "dweights"), *results, strict=True):
        assert torch.equal(plain, compiled), name
