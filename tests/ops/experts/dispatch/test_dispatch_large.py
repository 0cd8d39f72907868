"""Dispatch and combine at large sizes, where transfers take long enough for races to show; GPUs only.

As in test_large.py, operands are -1, 0 and 1, so every sum is exact. Ranks start each call at different times, and
receive buffers are filled with NaN in between. Each expert multiplies by its own small factor, so that a row that
reaches a wrong expert is detected.
"""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tests.ops.experts.dispatch.cases import quantize_ref
from tests.ops.test_large import REPEATS, poison_and_skew
from tests.support.ranks import DEVICE, device, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs GPUs")

BF16 = torch.bfloat16
FACTORS = torch.tensor([-1.0, 1.0, 2.0, -2.0, 3.0])


def check(name, got, expected):
    assert got.shape == expected.shape, f"{name}: {list(got.shape)}, not {list(expected.shape)}"
    wrong = (got != expected).sum().item()  # a NaN is unequal too
    assert wrong == 0, f"{name}: {wrong} of {got.numel()} elements are wrong"


class Tokens:
    """Tokens of all ranks, drawn on the device of each rank from a common seed."""

    def __init__(self, rank_tokens, k, experts, width, seed):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator(device()).manual_seed(seed)

        def integers(low, high, *shape):
            return torch.randint(low, high, shape, device=device(), generator=generator)

        counts = [rank_tokens, *(integers(0, rank_tokens + 1, world_size - 1)).tolist()]
        counts = counts[seed % world_size :] + counts[: seed % world_size]
        total, start = sum(counts), sum(counts[:rank])
        self.mine, self.k, self.experts, self.width = slice(start, start + counts[rank]), k, experts, width
        self.all_x, self.all_dy = (integers(-1, 2, total, width).to(BF16) for _ in range(2))
        self.all_ids = torch.rand(total, experts, device=device(), generator=generator).argsort(1)[:, :k].contiguous()
        if seed % 3 == 1:
            self.all_ids[integers(0, 10, total, k) == 0] = -1
        elif seed % 3 == 2:  # only the upper half of the experts
            self.all_ids = self.all_ids.clamp(min=experts // 2)
        self.all_weights = FACTORS.to(device())[integers(0, 3, total, k)]
        self.x, self.ids, self.weights, self.dy = (
            tensor[self.mine].clone() for tensor in (self.all_x, self.all_ids, self.all_weights, self.all_dy)
        )
        each = experts // world_size
        flat = self.all_ids.flatten()
        here = ((flat >= rank * each) & (flat < (rank + 1) * each)).nonzero().flatten()
        self.order = here[torch.sort(flat[here], stable=True).indices]
        self.splits = torch.bincount(flat[here] - rank * each, minlength=each).int()
        self.num_rows = len(self.order)
        self.factors = FACTORS.to(device())[torch.arange(experts, device=device()) % len(FACTORS)]
        self.own_factors = self.factors[rank * each : (rank + 1) * each]

    def apply_experts(self, recv):
        """Return each row times the factor of its expert, without a host sync for the number of rows."""
        rows = torch.arange(recv.x.shape[0], device=device())
        expert = torch.bucketize(rows, recv.splits.cumsum(0), right=True).clamp(max=len(self.own_factors) - 1)
        return recv.x * self.own_factors[expert].to(BF16)[:, None]

    def check_received(self, recv):
        check("splits", recv.splits, self.splits)
        check("recv.x", recv.x.detach()[: self.num_rows], self.all_x[self.order // self.k])
        check("recv.topk_weights", recv.topk_weights.detach()[: self.num_rows], self.all_weights.flatten()[self.order])

    def assignment_factors(self):
        return self.factors[self.ids.clamp(min=0)].where(self.ids >= 0, 0.0)

    def expected(self, tokens):
        """Return the weighted sums over the assignments of each token for the given expert inputs, exact in bf16."""
        return ((self.weights * self.assignment_factors()).sum(1, keepdim=True) * tokens.float()).to(BF16)

    def check_results(self, y, dx, dw):
        check("y", y, self.expected(self.x))
        check("dx", dx, self.expected(self.dy))
        dots = (self.x.float() * self.dy.float()).sum(1, keepdim=True)
        check("dtopk_weights", dw, self.assignment_factors() * dots)


CONFIGS = [{}, {"combine": "per_expert"}, {"chunk_tokens": 7, "num_senders": 20, "num_receivers": 30, "num_warps": 8}]


def layers_are_exact(rank_tokens, k, experts, width, repeats=REPEATS):
    world_size = dist.get_world_size()
    for repeat in range(repeats):
        tokens = Tokens(rank_tokens, k, experts, width, seed=repeat)
        config = EpConfig(**CONFIGS[repeat % 3])
        # One rank may receive all tokens of all ranks.
        max_tokens = None if repeat % 2 else rank_tokens * world_size * min(k, experts // world_size)
        tokens.x.requires_grad_()
        tokens.weights.requires_grad_()
        poison_and_skew(repeat)
        recv, handle = tdkernels.ep_dispatch(
            tokens.x, tokens.ids, tokens.weights, num_experts=experts, max_tokens=max_tokens, config=config
        )
        y = tdkernels.ep_combine(tokens.apply_experts(recv), handle)
        dx, dw = torch.autograd.grad(y, [tokens.x, tokens.weights], tokens.dy)
        tdkernels.synchronize()
        tokens.x, tokens.weights = tokens.x.detach(), tokens.weights.detach()
        tokens.check_received(recv)
        tokens.check_results(y.detach(), dx, dw)


def many_calls_are_exact(rank_tokens, k, experts, width, repeats=REPEATS):
    """Make calls back to back, so that ranks run ahead of each other as far as possible."""
    all_tokens = [Tokens(rank_tokens, k, experts, width, seed) for seed in range(6)]
    max_tokens = rank_tokens * dist.get_world_size() * min(k, experts // dist.get_world_size())
    for repeat in range(repeats):
        poison_and_skew(repeat)
        results = []
        for tokens in all_tokens:
            recv, handle = tdkernels.ep_dispatch(
                tokens.x, tokens.ids, tokens.weights, num_experts=experts, max_tokens=max_tokens
            )
            results.append((recv, tdkernels.ep_combine(tokens.apply_experts(recv), handle)))
        tdkernels.synchronize()
        for tokens, (recv, y) in zip(all_tokens, results, strict=True):
            tokens.check_received(recv)
            check("y", y, tokens.expected(tokens.x))


def separate_phases_are_exact(rank_tokens, k, experts, width, repeats=REPEATS):
    for repeat in range(repeats):
        tokens = Tokens(rank_tokens, k, experts, width, seed=repeat)
        poison_and_skew(repeat)
        sent = tdkernels.ep_dispatch_send(tokens.x, tokens.ids, tokens.weights, num_experts=experts)
        product = tokens.x.float() @ tokens.x.float().t()
        recv, handle = sent.receive()
        sent = tdkernels.ep_combine_send(tokens.apply_experts(recv), handle)
        product = product @ tokens.x.float()
        y = sent.receive()
        tdkernels.synchronize()
        del product
        tokens.check_received(recv)
        check("y", y, tokens.expected(tokens.x))


def quantization_is_exact(rank_tokens, k, experts, width, repeats=REPEATS):
    for repeat in range(repeats):
        tokens = Tokens(rank_tokens, k, experts, width, seed=repeat)
        generator = torch.Generator(device()).manual_seed(repeat)
        tokens.all_x = torch.randn(tokens.all_x.shape, device=device(), generator=generator).to(BF16)
        poison_and_skew(repeat)
        recv, _ = tdkernels.ep_dispatch(
            tokens.all_x[tokens.mine], tokens.ids, tokens.weights, num_experts=experts, quantize="fp8"
        )
        tdkernels.synchronize()
        codes, scales = quantize_ref(tokens.all_x[tokens.order // k])
        check("scales", recv.scales, scales)
        check("codes", recv.x.view(torch.uint8), codes.contiguous().view(torch.uint8))


def all_to_all_is_exact(rank_tokens, width, repeats=REPEATS):
    """Check all_to_all, its gradient and the way back."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for repeat in range(repeats):
        generator = torch.Generator(device()).manual_seed(repeat)
        shape = world_size, world_size
        splits = torch.randint(0, 2 * rank_tokens // world_size, shape, generator=generator, device=device())
        splits[torch.rand(shape, generator=generator, device=device()) < 0.2] = 0
        all_x, all_dx = (
            [torch.randint(-1, 2, (n, width), generator=generator, device=device()).to(BF16) for n in splits.sum(1)]
            for _ in range(2)
        )

        def received(all_values, splits=splits):
            return torch.cat([x.split(own.tolist())[rank] for x, own in zip(all_values, splits, strict=True)])

        max_tokens = 2 * rank_tokens if repeat % 2 else None
        x = all_x[rank].clone().requires_grad_()
        poison_and_skew(repeat)
        out, out_splits, _ = tdkernels.all_to_all(x, splits[rank], max_tokens=max_tokens)
        rows = splits[:, rank].sum().item()
        dout = torch.full(out.shape, torch.nan, dtype=BF16, device=device())
        dout[:rows] = received(all_dx)
        (dx,) = torch.autograd.grad(out, x, dout)
        back, back_splits, _ = tdkernels.all_to_all(out.detach()[:rows], out_splits)
        tdkernels.synchronize()
        check("splits", out_splits, splits[:, rank].int())
        check("out", out.detach()[:rows], received(all_x))
        check("dx", dx, all_dx[rank])
        check("way back", back, all_x[rank])
        check("splits of way back", back_splits, splits[rank].int())


each_size = pytest.mark.parametrize("rank_tokens, k, experts, width", [
    (1, 8, 64, 7168), (128, 8, 256, 7168), (512, 8, 64, 7168), (1000, 6, 256, 1030), (4096, 8, 256, 7168),
])
each_world_size = pytest.mark.parametrize("world_size", [2, 4])


@each_world_size
@each_size
def test_layers(world_size, rank_tokens, k, experts, width):
    on_ranks(world_size, layers_are_exact, rank_tokens, k, experts, width)


@each_world_size
@pytest.mark.parametrize("rank_tokens, k, experts, width", [
    (16, 8, 64, 2048), (128, 8, 256, 7168), (1024, 8, 64, 2048),
])
def test_many_calls(world_size, rank_tokens, k, experts, width):
    on_ranks(world_size, many_calls_are_exact, rank_tokens, k, experts, width)


@each_world_size
@pytest.mark.parametrize("rank_tokens, k, experts, width", [(128, 8, 256, 7168), (4096, 8, 64, 2048)])
def test_separate_send_and_receive(world_size, rank_tokens, k, experts, width):
    on_ranks(world_size, separate_phases_are_exact, rank_tokens, k, experts, width)


@each_world_size
@pytest.mark.parametrize("rank_tokens, k, experts, width", [
    (128, 8, 256, 7168), (1024, 8, 64, 7168), (1000, 3, 64, 1030),
])
def test_quantized(world_size, rank_tokens, k, experts, width):
    on_ranks(world_size, quantization_is_exact, rank_tokens, k, experts, width)


@each_world_size
@pytest.mark.parametrize("rank_tokens, width", [(64, 7168), (4096, 7168), (3000, 1031)])
def test_all_to_all(world_size, rank_tokens, width):
    on_ranks(world_size, all_to_all_is_exact, rank_tokens, width)
