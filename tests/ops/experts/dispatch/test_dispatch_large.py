"""Dispatch and combine at sizes at which transfers take long enough to be overtaken; only GPUs do that.

As in test_large.py: operands are -1, 0 and 1, every sum is exact, ranks start each call at their own time, and what the
ranks receive into is filled with NaN in between. An expert multiplies by a small number of its own, so that a row that
came to another expert shows, too.
"""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tests.ops.experts.dispatch.cases import quantized
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
    """All ranks' tokens, made on each rank's device from a seed that is the same on all."""

    def __init__(self, most, k, experts, width, seed):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator(device()).manual_seed(seed)

        def integers(low, high, *shape):
            return torch.randint(low, high, shape, device=device(), generator=generator)

        counts = [most, *(integers(0, most + 1, world_size - 1)).tolist()]
        counts = counts[seed % world_size :] + counts[: seed % world_size]
        total, start = sum(counts), sum(counts[:rank])
        self.mine, self.k, self.experts, self.width = slice(start, start + counts[rank]), k, experts, width
        self.all_x, self.all_dy = (integers(-1, 2, total, width).to(BF16) for _ in range(2))
        self.all_ids = torch.rand(total, experts, device=device(), generator=generator).argsort(1)[:, :k].contiguous()
        if seed % 3 == 1:
            self.all_ids[integers(0, 10, total, k) == 0] = -1
        elif seed % 3 == 2:  # all on half of the experts, and those of the last rank twice as often
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

    def experts_make(self, recv):
        """Each row times its expert's number; without the host knowing how many rows there are."""
        rows = torch.arange(recv.x.shape[0], device=device())
        expert = torch.bucketize(rows, recv.splits.cumsum(0), right=True).clamp(max=len(self.own_factors) - 1)
        return recv.x * self.own_factors[expert].to(BF16)[:, None]

    def check_received(self, recv):
        check("splits", recv.splits, self.splits)
        check("recv.x", recv.x.detach()[: self.num_rows], self.all_x[self.order // self.k])
        check("recv.topk_weights", recv.topk_weights.detach()[: self.num_rows], self.all_weights.flatten()[self.order])

    def factor_of_choices(self):
        return self.factors[self.ids.clamp(min=0)].where(self.ids >= 0, 0.0)

    def expected(self, of_tokens):
        """The sum of the choices' rows, weighted, where the experts are given these; exact, and so in bf16."""
        return ((self.weights * self.factor_of_choices()).sum(1, keepdim=True) * of_tokens.float()).to(BF16)

    def check_results(self, y, dx, dw):
        check("y", y, self.expected(self.x))
        check("dx", dx, self.expected(self.dy))
        dots = (self.x.float() * self.dy.float()).sum(1, keepdim=True)
        check("dtopk_weights", dw, self.factor_of_choices() * dots)


CONFIGS = [{}, {"combine": "per_expert"}, {"chunk_tokens": 7, "num_senders": 20, "num_receivers": 30, "num_warps": 8}]


def layers_are_exact(most, k, experts, width, repeats=REPEATS):
    world_size = dist.get_world_size()
    for repeat in range(repeats):
        tokens = Tokens(most, k, experts, width, seed=repeat)
        config = EpConfig(**CONFIGS[repeat % 3])
        # All tokens of all ranks may come to one.
        max_tokens = None if repeat % 2 else most * world_size * min(k, experts // world_size)
        tokens.x.requires_grad_()
        tokens.weights.requires_grad_()
        poison_and_skew(repeat)
        recv, handle = tdkernels.ep_dispatch(
            tokens.x, tokens.ids, tokens.weights, num_experts=experts, max_tokens=max_tokens, config=config
        )
        y = tdkernels.ep_combine(tokens.experts_make(recv), handle)
        dx, dw = torch.autograd.grad(y, [tokens.x, tokens.weights], tokens.dy)
        tdkernels.synchronize()
        tokens.x, tokens.weights = tokens.x.detach(), tokens.weights.detach()
        tokens.check_received(recv)
        tokens.check_results(y.detach(), dx, dw)


def many_calls_are_exact(most, k, experts, width, repeats=REPEATS):
    """Nothing between the calls, so that ranks run ahead of each other by as much as they can."""
    all_tokens = [Tokens(most, k, experts, width, seed) for seed in range(6)]
    max_tokens = most * dist.get_world_size() * min(k, experts // dist.get_world_size())
    for repeat in range(repeats):
        poison_and_skew(repeat)
        results = []
        for tokens in all_tokens:
            recv, handle = tdkernels.ep_dispatch(
                tokens.x, tokens.ids, tokens.weights, num_experts=experts, max_tokens=max_tokens
            )
            results.append((recv, tdkernels.ep_combine(tokens.experts_make(recv), handle)))
        tdkernels.synchronize()
        for tokens, (recv, y) in zip(all_tokens, results, strict=True):
            tokens.check_received(recv)
            check("y", y, tokens.expected(tokens.x))


def halves_are_exact(most, k, experts, width, repeats=REPEATS):
    for repeat in range(repeats):
        tokens = Tokens(most, k, experts, width, seed=repeat)
        poison_and_skew(repeat)
        sent = tdkernels.ep_dispatch_send(tokens.x, tokens.ids, tokens.weights, num_experts=experts)
        product = tokens.x.float() @ tokens.x.float().t()
        recv, handle = sent.receive()
        sent = tdkernels.ep_combine_send(tokens.experts_make(recv), handle)
        product = product @ tokens.x.float()
        y = sent.receive()
        tdkernels.synchronize()
        del product
        tokens.check_received(recv)
        check("y", y, tokens.expected(tokens.x))


def codes_are_exact(most, k, experts, width, repeats=REPEATS):
    for repeat in range(repeats):
        tokens = Tokens(most, k, experts, width, seed=repeat)
        generator = torch.Generator(device()).manual_seed(repeat)
        tokens.all_x = torch.randn(tokens.all_x.shape, device=device(), generator=generator).to(BF16)
        poison_and_skew(repeat)
        recv, _ = tdkernels.ep_dispatch(
            tokens.all_x[tokens.mine], tokens.ids, tokens.weights, num_experts=experts, quantize="fp8"
        )
        tdkernels.synchronize()
        codes, scales = quantized(tokens.all_x[tokens.order // k])
        check("scales", recv.scales, scales)
        check("codes", recv.x.view(torch.uint8), codes.contiguous().view(torch.uint8))


def exchanges_are_exact(most, width, repeats=REPEATS):
    """all_to_all there and back, and its gradient."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for repeat in range(repeats):
        generator = torch.Generator(device()).manual_seed(repeat)
        shape = world_size, world_size
        splits = torch.randint(0, 2 * most // world_size, shape, generator=generator, device=device())
        splits[torch.rand(shape, generator=generator, device=device()) < 0.2] = 0
        all_x, all_dx = (
            [torch.randint(-1, 2, (n, width), generator=generator, device=device()).to(BF16) for n in splits.sum(1)]
            for _ in range(2)
        )

        def received(of_all, splits=splits):
            return torch.cat([x.split(own.tolist())[rank] for x, own in zip(of_all, splits, strict=True)])

        max_tokens = 2 * most if repeat % 2 else None
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
        check("the way back", back, all_x[rank])
        check("splits of the way back", back_splits, splits[rank].int())


each_size = pytest.mark.parametrize("most, k, experts, width", [
    (1, 8, 64, 7168), (128, 8, 256, 7168), (512, 8, 64, 7168), (1000, 6, 256, 1030), (4096, 8, 256, 7168),
])
both_worlds = pytest.mark.parametrize("world_size", [2, 4])


@both_worlds
@each_size
def test_layers(world_size, most, k, experts, width):
    on_ranks(world_size, layers_are_exact, most, k, experts, width)


@both_worlds
@pytest.mark.parametrize("most, k, experts, width", [(16, 8, 64, 2048), (128, 8, 256, 7168), (1024, 8, 64, 2048)])
def test_many_calls(world_size, most, k, experts, width):
    on_ranks(world_size, many_calls_are_exact, most, k, experts, width)


@both_worlds
@pytest.mark.parametrize("most, k, experts, width", [(128, 8, 256, 7168), (4096, 8, 64, 2048)])
def test_halves(world_size, most, k, experts, width):
    on_ranks(world_size, halves_are_exact, most, k, experts, width)


@both_worlds
@pytest.mark.parametrize("most, k, experts, width", [(128, 8, 256, 7168), (1024, 8, 64, 7168), (1000, 3, 64, 1030)])
def test_codes(world_size, most, k, experts, width):
    on_ranks(world_size, codes_are_exact, most, k, experts, width)


@both_worlds
@pytest.mark.parametrize("most, width", [(64, 7168), (4096, 7168), (3000, 1031)])
def test_exchanges(world_size, most, width):
    on_ranks(world_size, exchanges_are_exact, most, width)
