"""What ep_dispatch and ep_combine are asked, as functions that every rank runs. test_dispatch.py asks."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tdkernels.ops.experts.dispatch import counting, low_latency, route
from tdkernels.ops.experts.dispatch import launch as ep_launch
from tdkernels.ops.experts.dispatch.counted import CountedRouting
from tdkernels.ops.experts.ep_moe import launch_dispatch_gemm as ep_moe_launch_dispatch_gemm
from tdkernels.ops.experts.ep_moe import launch_gemm_combine as ep_moe_launch_gemm_combine
from tdkernels.symm import resolve_group
from tdkernels.symm.group import group_state
from tests.ops.collectives.cases import same
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32, Routed
from tests.support.ranks import device
from tests.test_protocol import failure_of, in_any_order

SMALL = {"num_senders": 2, "num_receivers": 3, "chunk_tokens": 1, "block_bytes": 256, "num_warps": 1}
UNEVEN = [3, 0, 7, 1]  # tokens of ranks


def config_of(changes):
    return None if changes is None else EpConfig(**changes)


def tokens_of(tokens):
    """Of each rank of the world: a number for all, or as the list begins."""
    world_size = dist.get_world_size()
    return [tokens] * world_size if isinstance(tokens, int) else tokens[:world_size]


def case_of(tokens, k, experts_each, width, dtype=BF16, **options):
    """A case of the world; k "all" are as many choices as experts."""
    k = experts_each * dist.get_world_size() if k == "all" else k
    options.setdefault("local_world_size", group_state(resolve_group()).local_world_size)
    return Routed(tokens_of(tokens), k, experts_each * dist.get_world_size(), width, dtype, **options)


# ---- what it computes ----


def computes(spec, changes):
    """Forward and every gradient of a dispatch and a combine of one routing."""
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


def arrives(spec):
    case = case_of(**spec)
    recv, _ = case.dispatch()
    case.check_received(recv)


def check_gradients_of_dispatch(case, recv, combine):
    """dx adds up the gradients of the token's rows; topk_weights' have only moved."""
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
    """What rows [R, H] get, to the bit, and what weights [T, k] get, in fp64 and as plain torch has it."""
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
    """Every bit of every payload, whatever number it would be, and odd widths."""
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
            assert same(tensor, was.cpu()), f"{name}: an operand was written to"
    ones = torch.ones((), device=device()).expand(case.x.shape)
    recv, _ = tdkernels.ep_dispatch(ones, case.ids, num_experts=case.experts, config=config)
    assert same(recv.x, torch.ones(case.num_rows, 24)), "strides of zero"


def weights_are_optional(changes):
    """None are 1, given to neither; given to the combine alone they are the sum's, and their gradient comes."""
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
    """Those given to the combine count for that one, not those of the dispatch."""
    case, other = (case_of(UNEVEN, 2, 2, 9, weights=dtype, seed=3) for dtype in (FP32, BF16))
    other.all_weights = torch.where(other.valid, 2.0, torch.nan).to(BF16)
    _, handle = case.dispatch(config=config_of(changes))
    y = tdkernels.ep_combine(case.expert_out(), handle, other.all_weights[case.mine].to(device()))
    other.check_combined(y)
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))


def combine_takes_changed_weights(changes):
    """Weights that were changed in place since the dispatch count as they are, those of other ranks' rows too."""
    case = case_of(UNEVEN, 2, 2, 9, weights=FP32, seed=3)
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    case.weights = case.weights.clone()  # it may be a part of all_weights
    _, handle = case.dispatch(config=config)
    case.weights.mul_(2)
    case.all_weights = case.all_weights * 2
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine=combine)
    recv, handle = case.dispatch(config=config)
    recv.topk_weights.detach().zero_()
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine=combine)


def uses_the_handle_again(changes):
    """Other rows with other weights go the same ways, whatever their width and dtype; gradients too."""
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
        handle_of_nothing = tdkernels.ep_dispatch(case.x, again)[1]  # which is of the same routing, without weights
        unweighted = tdkernels.ep_combine(case.expert_out(), handle_of_nothing)
        case.check_combined(unweighted, weighted=False, combine=combine)
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine=combine)  # its own weights


def adds_in_order(dtype, changes):
    """Numbers whose sum depends on the order and on where it is rounded, weighted by such as leave them as they are."""
    case = case_of([4, 2, 5, 3], 4, 3, 50, dtype, values="normal", seed=16)
    case.all_weights = 2.0 ** torch.randint(-2, 3, case.valid.shape, generator=case.generator)
    case.weights = case.all_weights[case.mine].to(device())
    _, handle = case.dispatch(config=config_of(changes))
    y = tdkernels.ep_combine(case.expert_out(), handle)
    tdkernels.synchronize()
    expected = case.combined(case.all_out, case.all_weights, changes["combine"])[1]
    assert same(y, expected), f"{case.title}, {changes}"


def is_within_the_bound(dtype, changes):
    spec = dict(tokens=[5, 3, 0, 4], k=4, experts_each=4, width=96, dtype=dtype, values="normal", ids="distinct")
    computes(spec, changes)


def adds_up_gradients(changes):
    """What is used twice gets the sum of both gradients, and a graph can be gone through twice."""
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
    # y is the sum of weights times x, so with the sum of a token's weights: 2 * s * x and s * x.
    x, weights = case.all_x[case.mine].double(), case.all_weights[case.mine].where(case.valid[case.mine], 0.0).double()
    dy = 2 * first_dy[case.mine].double() + second_dy[case.mine].double()
    dx = dy * weights.sum(1, keepdim=True)
    dw = (dy * x).sum(1, keepdim=True).where(case.valid[case.mine], 0.0)
    for got in (once, again):
        case.check_numbers("dx", got[0], dx, dx.float())
        case.check_numbers("dtopk_weights", got[1], dw, dw.float())


def sends_only_what_is_asked_for():
    """A gradient that nobody needs is neither computed nor sent."""
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
            choices = case.valid[case.mine].sum(1, keepdim=True).float()
            assert not wants_x or same(x.grad, choices.expand(x.shape))
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


def leaves_no_graph_under_no_grad():
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


def refuses_second_derivatives():
    case = case_of(3, 2, 2, 8, FP32)
    case.x.requires_grad_()
    recv, handle = case.dispatch()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(recv.x.sum(), case.x, create_graph=True)
    rows = case.expert_out().requires_grad_()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(tdkernels.ep_combine(rows, handle).sum(), rows, create_graph=True)


def keeps_what_it_needs():
    """Where tokens go is known when the dispatch has been made, whatever becomes of the ids."""
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


# ---- a layer made of it ----


def is_a_layer(weights_in, seed, changes):
    """A mixture of experts, its tokens and experts divided between ranks, against the whole of it, all gradients.

    Everything is a small integer, so sums are exact in whatever order: each gradient is equal.
    """
    width, hidden, each, k = 6, 5, 2, 3 if dist.get_world_size() > 1 else 2
    case = case_of([5, 0, 3, 4], k, each, width, FP32, ids="distinct", seed=seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def ternary(*shape):
        return torch.randint(-1, 2, shape, generator=case.generator).double()

    # A gate without a softmax keeps to integers.
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
    if weights_in == "experts":  # which multiply by what has come along; nothing is left to weigh
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
    if world_size > 1:  # each rank has that of its own tokens
        gate = own["gate"].grad.clone()
        dist.all_reduce(gate)
        gate = gate.cpu().double()
    assert torch.equal(gate, whole["gate"].grad), "dgate"
    for name in ("x", "up", "down"):
        got, wanted = own[name].grad.cpu().double(), whole[name].grad[parts[name]]
        assert torch.equal(got, wanted), f"d{name} of rank {rank} of {world_size}: {(got - wanted).abs().max()}"


# ---- the same bits ----


def gives_the_same_bits():
    """Whoever sends and receives, and whenever: sums are in an order of their own."""
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


# ---- at most so many rows ----


def keeps_to_a_capacity(changes):
    """Just enough, and more than enough: the same in the first rows, and what is in the others is nobody's business."""
    case = case_of(UNEVEN, 3, 3, 24, FP32, seed=8)
    combine = "per_rank" if changes is None else changes.get("combine", "per_rank")
    for capacity in (max(case.capacity()), 100):
        case.x.requires_grad_()
        case.weights.requires_grad_()
        recv, handle = case.dispatch(max_tokens=capacity, config=config_of(changes))
        case.check_received(recv, capacity=capacity)
        expert_out = torch.full((capacity, 24), torch.nan, device=device())
        expert_out[: case.num_rows] = case.expert_out()
        y = tdkernels.ep_combine(expert_out.requires_grad_(), handle)
        case.check_combined(y, combine=combine)

        all_dy = case.draw(sum(case.tokens), 24, FP32)
        d_out, dw = torch.autograd.grad(y, [expert_out, case.weights], all_dy[case.mine].to(device()))
        d_rows, exact, low = expected_gradients_of_combine(case, all_dy, case.all_weights)
        assert same(d_out[: case.num_rows], d_rows), "dexpert_out"
        assert not d_out[case.num_rows :].any(), "rows that no token has take part in no sum"
        case.check_numbers("dtopk_weights of combine", dw, exact, low)

        d_choices = case.draw(case.all_ids.numel(), 24, FP32)
        d_recv = torch.full((capacity, 24), torch.nan, device=device())
        d_recv[: case.num_rows] = d_choices[case.order].to(device())
        d_weights = torch.full((capacity,), torch.nan, device=device())
        d_weights[: case.num_rows] = 3.0
        dx, dw = torch.autograd.grad([recv.x, recv.topk_weights], [case.x, case.weights], [d_recv, d_weights])
        tdkernels.synchronize()
        case.check_numbers("dx of dispatch", dx, *case.combined(d_choices, None, combine))
        assert same(dw, torch.where(case.valid, 3.0, 0.0)[case.mine]), "dtopk_weights of dispatch"


def told(case, **options):
    """The error of a dispatch that cannot be; on a GPU it may come after the call, which then has sent nothing."""
    received = []
    error = failure_of(lambda: received.append(case.dispatch(**options)[0]))
    assert not any(recv.splits.any() for recv in received), "rows are said to have come"
    return error


def refuses_what_is_too_much(spec, which):
    """One row less than is needed: all ranks are told, once, and the next call is right."""
    case = case_of(**spec)
    rows, staged = case.capacity()
    needed = (rows, staged)[which]
    assert needed > (rows, staged)[1 - which], "this is to be decided by one of them"
    for _ in range(2):  # both halves
        error = told(case, max_tokens=needed - 1)
        assert type(error) is ValueError, repr(error)
        for words in (f"ep_dispatch: max_tokens={needed - 1} is too small", f"{rows} rows", f"{staged} tokens"):
            assert words in str(error), f"{words} in {error}"
        tdkernels.synchronize()  # says it once only
    recv, handle = case.dispatch(max_tokens=needed)
    case.check_received(recv, capacity=needed)
    expert_out = torch.zeros(needed, case.all_x.shape[1], dtype=case.dtype, device=device())
    expert_out[: case.num_rows] = case.expert_out()
    case.check_combined(tdkernels.ep_combine(expert_out, handle))
    recv, _ = case.dispatch()
    case.check_received(recv)


def refusal(case, offender, wrong):
    """What this rank is told of an id of a rank."""
    words = f"ep_dispatch: topk_ids of rank {offender} are out of range: "
    words += f"each must be from 0 to {case.experts - 1}, or -1 for none"
    mine = dist.get_rank() == offender
    return f"{words}; here topk_ids {list(case.ids.shape)} has {wrong}" if mine else words


def refuses_wrong_ids(wrong, where, id_dtype, changes):
    """One id of one rank: all are told whose, once, and the next call is right."""
    case = case_of(UNEVEN, 3, 3, 8, seed=9)
    offender = [rank for rank, tokens in enumerate(case.tokens) if tokens][where]
    right = case.ids
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    for max_tokens in (None, 50):
        case.ids = right.to(id_dtype).clone()
        if dist.get_rank() == offender:
            case.ids[where, 1] = wrong
        error = told(case, max_tokens=max_tokens, config=config)
        assert type(error) is ValueError, repr(error)
        assert str(error) == refusal(case, offender, wrong), str(error)
        tdkernels.synchronize()
        case.ids = right
        recv, handle = case.dispatch(config=config)
        case.check_received(recv)
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine=combine)


# ---- codes and scales ----


def quantized(x):
    """(codes, scales) of rows, by plain torch."""
    width = x.shape[1]
    quanta = torch.nn.functional.pad(x.float(), (0, -width % 128)).unflatten(1, (-1, 128))
    most = quanta.abs().amax(2)
    most = torch.where(most > 0, most.clamp(min=2.0**-118), 448.0)
    largest = torch.full_like(most, 448.0)  # a tensor: a GPU would multiply by the reciprocal of a number
    codes = (quanta * (largest / most)[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :width], most / largest


def quantizes(width, dtype, changes):
    case = case_of([4, 0, 3, 5], 2, 2, width, dtype, values="normal", seed=width)
    total = sum(case.tokens)
    magnitudes = torch.tensor([1.0, 1e-4, 300.0, 0.0, 2.0**-130 if dtype == FP32 else 2.0**-14])
    case.all_x = (case.all_x.float() * magnitudes[torch.arange(total) % 5, None]).to(dtype)
    if width > 128:
        case.all_x[:, 128:256] = 0.0  # codes of 0 and a scale of 1 among others
    case.x = case.all_x[case.mine].to(device())
    recv, handle = case.dispatch(quantize="fp8", config=config_of(changes))
    tdkernels.synchronize()
    codes, scales = quantized(case.all_x)
    assert same(recv.scales, case.received(scales)), f"scales: {case.title}"
    assert same(recv.x, case.received(codes)), f"codes: {case.title}"
    assert same(recv.topk_weights, case.by_row(case.all_weights)), f"topk_weights: {case.title}"
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))


def quantized_rows_have_no_gradient():
    case = case_of(UNEVEN, 2, 2, 130, FP32, seed=10)
    case.x.requires_grad_()
    with pytest.raises(ValueError, match='quantize="fp8" has no gradient'):
        case.dispatch(quantize="fp8")
    codes, _ = quantized(case.all_x)
    with torch.no_grad():
        recv, _ = case.dispatch(quantize="fp8")
    assert same(recv.x, case.received(codes))
    case.x = case.x.detach()
    case.weights.requires_grad_()  # which have one, as ever
    recv, _ = case.dispatch(quantize="fp8")
    assert not recv.x.requires_grad and not recv.scales.requires_grad
    recv.topk_weights.backward(torch.full_like(recv.topk_weights, 2.0))
    assert same(case.weights.grad, torch.where(case.valid, 2.0, 0.0)[case.mine])


def sends_scales_along(scales, changes):
    """Of any dtype and number, to the bit, with rows of codes."""
    for seed, (dtype, shape) in enumerate(scales):
        case = case_of([4, 0, 2, 5], 2, 2, 20, torch.float8_e4m3fn, values="bits", seed=seed)
        all_scales = case.draw(sum(case.tokens), shape[0] if shape else 1, dtype)
        all_scales = all_scales if shape else all_scales.flatten()
        recv, _ = case.dispatch(
            weighted=False, scales=all_scales[case.mine].to(device()), config=config_of(changes)
        )
        case.check_received(recv, weighted=False)
        assert same(recv.scales, case.received(all_scales)), f"scales {dtype} {shape}"


# ---- what cannot be ----


def refuses():
    """Before anything is launched, so each rank by itself; then everything is as before."""
    case = case_of(4, 2, 3, 8)
    x, ids, weights, experts = case.x, case.ids, case.weights, case.experts
    recv, handle = case.dispatch()
    rows = case.expert_out()
    world_size = dist.get_world_size()

    def dispatch(**changes):
        arguments = {"x": x, "topk_ids": ids, "topk_weights": weights, "num_experts": experts, **changes}
        return tdkernels.ep_dispatch(arguments.pop("x"), **arguments)

    def combine(**changes):
        arguments = {"expert_out": rows, "handle": handle, **changes}
        return tdkernels.ep_combine(arguments.pop("expert_out"), **arguments)

    table = [
        (dispatch, dict(x=[1.0]), TypeError, "x must be a torch.Tensor"),
        (dispatch, dict(x=x.int()), TypeError, "x is torch.int32"),
        (dispatch, dict(x=x.double()), TypeError, "x is torch.float64"),
        (dispatch, dict(x=x.to("meta")), ValueError, "x is on meta|topk_ids is on"),
        (dispatch, dict(x=x[0]), ValueError, r"x must have 2 dimensions \[rows, H\], its shape is \[8\]"),
        (dispatch, dict(x=x[:, :0]), ValueError, r"x \[4, 0\] has empty rows"),
        (dispatch, dict(x=x.to_sparse()), TypeError, "x must be a plain dense tensor"),
        (dispatch, dict(x=x[:3]), ValueError, r"topk_ids must be \[T, k\] with the T = 3 .*\[4, 2\]"),
        (dispatch, dict(topk_ids=None), TypeError, "topk_ids must be a torch.Tensor"),
        (dispatch, dict(topk_ids=ids.float()), TypeError, "topk_ids is torch.float32"),
        (dispatch, dict(topk_ids=ids.to(torch.int16)), TypeError, "topk_ids is torch.int16"),
        (dispatch, dict(topk_ids=ids[:, 0]), ValueError, r"topk_ids must be \[T, k\]"),
        (dispatch, dict(topk_ids=ids[:, :0]), ValueError, r"topk_ids \[4, 0\] must have from 1"),
        (dispatch, dict(topk_ids=ids[:, :1].expand(4, experts + 1)), ValueError, f"from 1 to num_experts = {experts}"),
        (dispatch, dict(topk_ids=ids.to("meta")), ValueError, "topk_ids is on meta"),
        (dispatch, dict(topk_weights=weights[:, :1]), ValueError, r"topk_weights \[4, 1\] .* topk_ids \[4, 2\]"),
        (dispatch, dict(topk_weights=weights.double()), TypeError, "topk_weights is torch.float64"),
        (dispatch, dict(topk_weights=ids), TypeError, "topk_weights is torch.int64"),
        (dispatch, dict(topk_weights=1.0), TypeError, "topk_weights must be a torch.Tensor"),
        (dispatch, dict(num_experts=None), ValueError, "num_experts must be a positive integer, not None"),
        (dispatch, dict(num_experts=0), ValueError, "num_experts must be a positive integer, not 0"),
        (dispatch, dict(num_experts=6.0), ValueError, "num_experts must be a positive integer, not 6.0"),
        (dispatch, dict(num_experts=True), ValueError, "num_experts must be a positive integer, not True"),
        (dispatch, dict(scales=weights[:3]), ValueError, r"scales must be \[T\] or \[T, S\] with the T = 4"),
        (dispatch, dict(scales=weights[:, :, None]), ValueError, r"scales must be .*\[4, 2, 1\]"),
        (dispatch, dict(scales=2.0), TypeError, "scales must be a torch.Tensor"),
        (dispatch, dict(quantize="fp4"), ValueError, "quantize must be None or \"fp8\", not 'fp4'"),
        (dispatch, dict(quantize=True), ValueError, "quantize must be None or \"fp8\", not True"),
        (dispatch, dict(quantize="fp8", scales=weights), ValueError, "quantize needs .* no scales"),
        (dispatch, dict(quantize="fp8", x=x.to(torch.float8_e5m2)), ValueError, "quantize needs an x in bf16"),
        (dispatch, dict(max_tokens=0), ValueError, "max_tokens must be a positive integer below .*, not 0"),
        (dispatch, dict(max_tokens=-1), ValueError, "max_tokens must be a positive integer below .*, not -1"),
        (dispatch, dict(max_tokens=1 << 30), ValueError, "max_tokens must be a positive integer below"),
        (dispatch, dict(max_tokens=8.0), ValueError, "max_tokens must be a positive integer below .*, not 8.0"),
        (dispatch, dict(config=tdkernels.CollectiveConfig()), TypeError, "config must be an EpConfig or None"),
        (dispatch, dict(config=EpConfig(combine="sum")), ValueError, "config cannot run: combine must be"),
        (dispatch, dict(group="world"), TypeError, "group"),
        (combine, dict(expert_out=rows[:-1]), ValueError, f"must have the {case.num_rows} rows of recv.x"),
        (combine, dict(expert_out=rows[0]), ValueError, "expert_out must have 2 dimensions"),
        (combine, dict(expert_out=rows[:, :0]), ValueError, "expert_out .* has empty rows"),
        (combine, dict(expert_out=rows.int()), TypeError, "expert_out is torch.int32"),
        (combine, dict(expert_out=recv.x.to(torch.float8_e4m3fn)), TypeError, "expert_out is torch.float8_e4m3fn"),
        (combine, dict(expert_out=rows.to("meta")), ValueError, "expert_out is on meta"),
        (combine, dict(expert_out=None), TypeError, "expert_out must be a torch.Tensor"),
        (combine, dict(handle=recv), TypeError, "handle must be the EpHandle of an ep_dispatch, not EpTokens"),
        (combine, dict(topk_weights=weights[:3]), ValueError, r"topk_weights \[3, 2\]"),
        (combine, dict(topk_weights=weights.double()), TypeError, "topk_weights is torch.float64"),
        (combine, dict(config=EpConfig(num_warps=3)), ValueError, "config cannot run: num_warps"),
    ]
    if world_size > 1:
        words = f"num_experts {experts + 1} must be divisible by the group's {world_size} ranks"
        table.append((dispatch, dict(num_experts=experts + 1), ValueError, words))
    for function, changes, kind, words in table:
        with pytest.raises(kind, match=words) as caught:
            function(**changes)
        assert "group" in changes or str(caught.value).startswith(f"ep_{function.__name__}: "), str(caught.value)
    with pytest.raises(ValueError, match="topk_weights"):
        tdkernels.ep_dispatch(x, handle, weights[:, :1])
    with pytest.raises(ValueError, match=r"x \[3, 8\] must have the 4 tokens of the handle"):
        tdkernels.ep_dispatch(x[:3], handle)
    with pytest.raises(TypeError, match="positional"):
        tdkernels.ep_dispatch(x, ids, weights, experts)
    recv, handle = case.dispatch()
    case.check_received(recv)
    case.check_combined(combine(handle=handle))


# ---- in halves ----


def comes_in_halves(changes, options):
    """The same as whole calls, whatever is done in between, and whoever is late for which half."""
    case = case_of(UNEVEN, 3, 3, 33, FP16, seed=11)
    rank = dist.get_rank()
    config = config_of(changes)
    combine = config.combine if config else "per_rank"
    expected = case.dispatch(config=config, **options)[0]
    for turn in range(2):
        time.sleep(0.1 if turn == rank else 0.0)
        sent = tdkernels.ep_dispatch_send(
            case.x, case.ids, case.weights, num_experts=case.experts, config=config, **options
        )
        total = torch.ones(3, device=device())
        dist.all_reduce(total) if dist.get_world_size() > 1 else None
        assert total.tolist() == [dist.get_world_size()] * 3
        time.sleep(0.1 if turn == rank + 1 else 0.0)
        recv, handle = sent.receive()
        tdkernels.synchronize()
        for name, got, whole in zip(recv._fields, recv, expected, strict=True):
            assert got is None and whole is None or same(got[: case.num_rows], whole[: case.num_rows].cpu()), name

        expert_out = case.all_out.new_zeros(recv.x.shape[0], 33).to(device())
        expert_out[: case.num_rows] = case.expert_out()
        sent = tdkernels.ep_combine_send(expert_out, handle)
        between, _ = case.dispatch(config=config, **options)  # the way there is free
        y = sent.receive()
        case.check_combined(y, combine=combine)
        assert same(y, tdkernels.ep_combine(expert_out, handle).cpu()), "y"
        assert same(between.x[: case.num_rows], expected.x[: case.num_rows].cpu()), "a dispatch between the halves"


def halves_are_taken_in_turn():
    """What is sent has to be received before anything else is sent the same way."""
    case = case_of(UNEVEN, 2, 3, 16, seed=12)
    recv, handle = case.dispatch()
    expert_out = case.expert_out()
    operands = (case.x, case.ids, case.weights)
    sent = tdkernels.ep_dispatch_send(*operands, num_experts=case.experts)
    for call in (
        lambda: tdkernels.ep_dispatch_send(*operands, num_experts=case.experts), lambda: case.dispatch(),
        lambda: tdkernels.ep_dispatch(case.x, handle),
    ):
        with pytest.raises(RuntimeError, match="ep_dispatch: an earlier dispatch of this group .* receive it first"):
            call()
    case.check_combined(tdkernels.ep_combine(expert_out, handle))
    recv, handle = sent.receive()
    case.check_received(recv)
    with pytest.raises(RuntimeError, match="nothing of this dispatch is left"):
        sent.receive()

    sent = tdkernels.ep_combine_send(expert_out, handle)
    for call in (tdkernels.ep_combine_send, tdkernels.ep_combine):
        with pytest.raises(RuntimeError, match="an earlier combine of this group .* receive it first"):
            call(expert_out, handle)
    case.check_received(case.dispatch()[0])
    case.check_combined(sent.receive())
    with pytest.raises(RuntimeError, match="nothing of this combine is left"):
        sent.receive()

    recv, handle = case.dispatch()
    case.check_received(recv)
    case.check_combined(tdkernels.ep_combine(expert_out, handle))


def a_half_is_received_once():
    """By whom it was sent for, also where another of the same routing is under way."""
    case = case_of(UNEVEN, 2, 3, 16, seed=13)
    handle = case.dispatch()[1]
    other = case.x + 1
    first = tdkernels.ep_dispatch_send(case.x, handle)
    recv, _ = first.receive()
    second = tdkernels.ep_dispatch_send(other, handle)
    with pytest.raises(RuntimeError, match="nothing of this dispatch is left"):
        first.receive()
    case.check_received(recv, weighted=False)
    recv, _ = second.receive()
    assert same(recv.x, case.received(case.all_x + 1))


def halves_have_no_gradient():
    case = case_of(3, 2, 2, 8, FP32, seed=14)
    x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
    _, handle = case.dispatch()
    rows = case.expert_out().requires_grad_()
    for call in (
        lambda: tdkernels.ep_dispatch_send(x, case.ids, num_experts=case.experts),
        lambda: tdkernels.ep_dispatch_send(case.x, case.ids, weights, num_experts=case.experts),
        lambda: tdkernels.ep_combine_send(rows, handle),
        lambda: tdkernels.ep_combine_send(case.expert_out(), handle, weights),
    ):
        with pytest.raises(ValueError, match="_send: separate send and receive have no gradient"):
            call()
    with torch.no_grad():
        recv, handle = tdkernels.ep_dispatch_send(x, case.ids, weights, num_experts=case.experts).receive()
        y = tdkernels.ep_combine_send(rows, handle).receive()
    case.check_received(recv)
    case.check_combined(y)
    case.weights = weights
    handle = case.dispatch()[1]  # whose weights require a gradient, which the combine would have
    with pytest.raises(ValueError, match="_send: separate send and receive have no gradient"):
        tdkernels.ep_combine_send(case.expert_out(), handle)


# ---- by torch's collectives ----

BY_TORCH = EpConfig(method="torch")


@contextlib.contextmanager
def without_symmetric_memory():
    """Within, nothing may ask for a workspace of experts."""

    def refuse(*_, **__):
        raise AssertionError("a workspace was asked for")

    with pytest.MonkeyPatch.context() as patch:
        for module in (ep_launch, counting, low_latency, ep_moe_launch_dispatch_gemm, ep_moe_launch_gemm_combine):
            patch.setattr(module, "get_workspace", refuse)
        yield


def needs_no_symmetric_memory(spec):
    """Nor NVSHMEM, between nodes."""
    with without_symmetric_memory():
        computes(spec, {"method": "torch", "combine": "per_expert"})


def refuses_what_torch_cannot():
    """Another way back than there; on each rank by itself, and the next call is right."""
    case = case_of(UNEVEN, 2, 3, 16, seed=17)
    handles = {config: case.dispatch(config=config)[1] for config in (BY_TORCH, EpConfig(**SMALL))}
    rows = case.expert_out()
    for config, other in zip(handles, reversed(handles), strict=True):
        words = f'ep_combine: config has method "{other.method}", but the dispatch .* went by "{config.method}"'
        with pytest.raises(ValueError, match=words):
            tdkernels.ep_combine(rows, handles[config], config=other)
        combine = "per_expert" if config is BY_TORCH else "per_rank"
        case.check_combined(tdkernels.ep_combine(rows, handles[config], config=config), combine=combine)


def comes_in_halves_by_torch():
    """The first does it all; also by a handle, and where torch has been chosen for the dispatch."""
    case = case_of(UNEVEN, 2, 3, 16, seed=22)
    for handle in (case.dispatch(config=BY_TORCH)[1], case.ids):
        options = {} if handle is not case.ids else {"num_experts": case.experts, "config": BY_TORCH}
        recv, again = tdkernels.ep_dispatch_send(case.x, handle, case.weights, **options).receive()
        assert again._routing.method == "torch"
        case.check_received(recv)
        sent = tdkernels.ep_combine_send(case.expert_out(), again)
        case.check_combined(sent.receive(), combine="per_expert")


def makes_the_same_codes():
    """As our kernels, of numbers that are none, too, and of every magnitude."""
    case = case_of(UNEVEN, 2, 3, 300, FP32, values="normal", seed=23)
    case.x *= 2.0 ** torch.randint(-140, 120, case.x.shape, generator=case.generator).float().to(device())
    case.x[:, 5::131] = torch.nan
    case.x[:, 256:] = 0.0
    ours, torchs = (case.dispatch(quantize="fp8", config=config)[0] for config in (EpConfig(**SMALL), BY_TORCH))
    tdkernels.synchronize()
    numbers = ~ours.x.float().isnan()
    assert torch.equal(numbers, ~torchs.x.float().isnan()) and not numbers.all()
    assert torch.equal(ours.scales, torchs.scales)
    assert torch.equal(ours.x.view(torch.uint8)[numbers], torchs.x.view(torch.uint8)[numbers])


def tells_of_what_each_has_seen():
    """Ranks that differ in what all of them have seen before: where ids are counted, they are told each time."""
    case = case_of(UNEVEN, 2, 3, 16, seed=24)
    odd = dist.get_rank() == 1
    calls = {
        "max_tokens": lambda other: case.dispatch(config=BY_TORCH, max_tokens=90 if other else 80),
        "dtype": lambda other: tdkernels.ep_dispatch(
            case.x.half() if other else case.x, case.ids, num_experts=case.experts, config=BY_TORCH
        ),
    }
    for name, call in calls.items():
        call(False), call(True)
        error = failure_of(lambda call=call: call(odd))
        assert type(error) is ValueError and f"the ranks disagree: {name} is" in str(error), repr(error)
        call(True)


def tells_of_different_rows_by_torch():
    """torch would hang or mix up rows of different sizes, of which no rank has seen any yet; the next call is right."""
    case = case_of(UNEVEN, 2, 3, 16, FP32, seed=21)
    odd = dist.get_rank() == 1
    _, handle = case.dispatch(config=BY_TORCH)
    rows = case.expert_out()
    for call in (
        lambda: tdkernels.ep_dispatch(case.x[:, : 7 if odd else 9], handle),
        lambda: tdkernels.ep_dispatch(case.x[:, :5].to(BF16 if odd else FP16), handle),
        lambda: tdkernels.ep_dispatch(case.x[:, :3], handle, case.weights if odd else None),
        lambda: tdkernels.ep_combine(rows[:, :5].to(BF16 if odd else FP16), handle),
    ):
        error = failure_of(call)
        assert type(error) is ValueError and "the ranks disagree" in str(error), repr(error)
        case.check_combined(tdkernels.ep_combine(rows, handle), combine="per_expert")


def tells_all_ranks_by_torch():
    """Too many rows, too many tokens, and ranks that disagree."""
    case = case_of(UNEVEN, 2, 3, 16, seed=18)
    rows, _ = case.capacity()
    too_many = max(case.tokens) - 1
    for options, words in (
        ({"max_tokens": rows - 1}, f"ep_dispatch: max_tokens={rows - 1} is too small: a rank receives {rows} rows"),
        ({"max_tokens_per_rank": too_many}, f"has {too_many + 1} tokens, more than max_tokens_per_rank"),
        ({"max_tokens": rows + dist.get_rank()}, "ep_dispatch: the ranks disagree"),
    ):
        if "disagree" in words and dist.get_world_size() == 1:
            continue
        error = failure_of(lambda options=options: case.dispatch(config=BY_TORCH, **options))
        assert type(error) is ValueError and words in str(error), repr(error)
        recv, handle = case.dispatch(config=BY_TORCH)
        case.check_received(recv)
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle), combine="per_expert")


def takes_a_bound_by_torch():
    case = case_of(UNEVEN, 2, 3, 16, seed=19)
    recv, handle = case.dispatch(config=BY_TORCH, max_tokens_per_rank=max(case.tokens))
    capacity = dist.get_world_size() * max(case.tokens) * 2
    case.check_received(recv, capacity=capacity)
    expert_out = case.all_out.new_zeros(capacity, 16).to(device())
    expert_out[: case.num_rows] = case.expert_out()
    case.check_combined(tdkernels.ep_combine(expert_out, handle), combine="per_expert")


def goes_by_torch_where_chosen():
    """As the group has found to be best, which is known once the rows are: whatever could be called before still can.

    Halves, and calls for which the host does not wait, go by our kernels all the same.
    """
    case = case_of(UNEVEN, 2, 3, 16, seed=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "choose_config", lambda *_: BY_TORCH)
        assert case.dispatch(max_tokens=60)[1]._routing.method == "fused"
        recv, handle = case.dispatch()
        assert handle._routing.method == "torch"
        case.check_received(recv)
        for config in (None, EpConfig(**SMALL, combine="per_expert")):
            y = tdkernels.ep_combine(case.expert_out(), handle, config=config)
            case.check_combined(y, combine="per_expert")
        case.check_combined(tdkernels.ep_combine_send(case.expert_out(), handle).receive(), combine="per_expert")
        recv, _ = tdkernels.ep_dispatch_send(case.x, handle, case.weights).receive()
        case.check_received(recv)
        recv, handle = tdkernels.ep_dispatch_send(case.x, case.ids, case.weights, num_experts=case.experts).receive()
        assert handle._routing.method == "fused"
        case.check_received(recv)


# ---- torch.compile ----


def layer_of(handles):
    """A function to compile, with something before, between and after the operators."""

    def layer(x, ids, weights):
        recv, handle = tdkernels.ep_dispatch(2 * x, ids, weights, num_experts=4)
        handles.append(handle)
        return 3 * tdkernels.ep_combine(recv.x + 1, handle)

    return layer


def runs_between_graphs():
    case = case_of([3, 5], 2, 2, 8, FP32)
    results = []
    for layer in (layer_of([]), torch.compile(layer_of([]), backend="aot_eager")):
        x = case.x.clone().requires_grad_()
        weights = torch.full(case.ids.shape, 0.5, device=device(), requires_grad=True)
        y = layer(x, case.ids, weights)
        y.sum().backward()
        results.append((y.detach(), x.grad, weights.grad))
    for name, plain, compiled in zip(("y", "dx", "dweights"), *results, strict=True):
        assert torch.equal(plain, compiled), name
