"""What ep_dispatch and ep_combine are asked, as functions that every rank runs. test_moe_ep.py asks."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tdkernels.ops import ep_launch
from tests.ops.collective import same
from tests.ops.routed import BF16, FP16, FP32, Routed
from tests.ranks import device
from tests.test_protocol import stalls

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


def check_gradients_of_dispatch(case, recv, combine):
    """dx adds up the gradients of the token's rows; topk_weights' have only moved."""
    d_rows = case.draw(case.all_ids.numel(), case.all_x.shape[1], case.dtype)
    d_weights = case.draw(case.all_ids.numel(), 1, FP32)
    dx, dw = torch.autograd.grad(
        [recv.x, recv.topk_weights], [case.x, case.weights],
        [d_rows[case.order].to(device()), d_weights.flatten()[case.order].to(device())],
    )  # fmt: skip
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


def takes_any_layout():
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
        recv, handle = tdkernels.ep_dispatch(x, ids, weights, num_experts=case.experts)
        case.check_received(recv)
        y = tdkernels.ep_combine(layout(case.expert_out()), handle)
        case.check_combined(y)
        for tensor, was in zip((x, ids, weights), before, strict=True):
            assert same(tensor, was.cpu()), f"{name}: an operand was written to"
    ones = torch.ones((), device=device()).expand(case.x.shape)
    recv, _ = tdkernels.ep_dispatch(ones, case.ids, num_experts=case.experts)
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


def uses_the_handle_again():
    """Other rows with other weights go the same ways, whatever their width and dtype; gradients too."""
    case, other = (
        case_of(UNEVEN, 3, 3, width, dtype, weights=weights, seed=4)
        for width, dtype, weights in ((16, BF16, FP32), (37, FP32, BF16))
    )
    other.all_weights = (other.all_weights * 2).to(BF16)
    other.weights = other.all_weights[other.mine].to(device()).requires_grad_()
    _, handle = case.dispatch()
    other.x.requires_grad_()
    for _ in range(2):
        recv, again = tdkernels.ep_dispatch(other.x, handle, other.weights)
        other.check_received(recv)
        assert again is not handle and again.num_experts == case.experts
        expert_out = other.expert_out().requires_grad_()
        y = tdkernels.ep_combine(expert_out, again)
        other.check_combined(y)
        check_gradients_of_dispatch(other, recv, "per_rank")
        check_gradients_of_combine(other, y, expert_out)
        handle_of_nothing = tdkernels.ep_dispatch(case.x, again)[1]  # which is of the same routing, without weights
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle_of_nothing), weighted=False)
    case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))  # its own weights


def is_within_the_bound(dtype, changes):
    spec = dict(tokens=[6, 3, 0, 5], k=4, experts_each=4, width=96, dtype=dtype, values="normal", ids="distinct")
    computes(spec, changes)


def adds_up_gradients():
    """What is used twice gets the sum of both gradients, and a graph can be gone through twice."""
    case = case_of(UNEVEN, 2, 2, 12, FP32, seed=5)
    case.x.requires_grad_()
    case.weights.requires_grad_()
    recv, handle = case.dispatch()
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

    whole_combine, whole_gradient = ep_launch.combine, ep_launch.dispatch_gradient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_launch, "combine", combine)
        patch.setattr(ep_launch, "dispatch_gradient", dispatch_gradient)
        for wants_x, wants_weights, expected in (
            (True, False, [(8, False)]), (False, True, [(0, True)]), (True, True, [(8, True)])
        ):  # fmt: skip
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
        ):  # fmt: skip
            rows, weights = case.expert_out().requires_grad_(wants_rows), case.weights.detach().clone()
            weights.requires_grad_(wants_weights)
            sent.clear()
            y = tdkernels.ep_combine(rows, handle, weights)
            y.sum().backward()
            assert sent == expected, f"{sent} for rows {wants_rows} and weights {wants_weights}"
            expected_rows, exact, low = expected_gradients_of_combine(
                case, torch.ones(sum(case.tokens), 8), case.all_weights
            )  # fmt: skip
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


# ---- a layer made of it ----


def is_a_layer(weights_in, seed):
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
    }  # fmt: skip
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
        own["x"], case.ids, None if by_combine else weights, num_experts=case.experts
    )  # fmt: skip
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
    case = case_of([3, 2, 4], 3, 2, 40, values="normal", seed=7)
    expert_out = case.expert_out()
    all_dy = case.draw(sum(case.tokens), 40, BF16)
    results = []
    for seed, changes in enumerate((SMALL, SMALL, SMALL | {"num_senders": 5, "num_receivers": 1})):
        x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
        rows = expert_out.clone().requires_grad_()
        with stalls(seed=10 * seed + dist.get_rank()):
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
