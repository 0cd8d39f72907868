"""What all_to_all is asked, as functions that every rank runs. test_all_to_all.py asks.

Every rank makes the same operands of all ranks from a seed, so it knows what is to come out.
"""

import random
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, PeerTimeoutError, PlanMismatchError
from tests.ops.collectives.cases import same
from tests.support.ranks import a_group, device
from tests.test_protocol import failure_of, poison, timeout

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = {"num_senders": 2, "num_receivers": 3, "chunk_tokens": 1, "block_bytes": 256, "num_warps": 1}


def config_of(changes):
    return None if changes is None else EpConfig(**changes)


class AsyncCollective:
    """All ranks' rows and splits, and what this rank is to get of them.

    Args:     splits: [W, E], rows of each rank for each expert, or for each rank where E is W
              values: "bits" of any kind, or small "exact" numbers
    """

    def __init__(self, splits, width, dtype=BF16, *, values="bits", seed=0, rank=None):
        self.splits = torch.tensor(splits)
        self.world_size, self.experts = self.splits.shape
        self.rank = dist.get_rank() if rank is None else rank
        self.values, self.dtype = values, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.all_x = [self.draw(sum(row), width, dtype) for row in splits]
        each = self.experts // self.world_size
        self.here = slice(self.rank * each, (self.rank + 1) * each)
        self.out_splits = self.splits[:, self.here].int()
        if each == 1:
            self.out_splits = self.out_splits.flatten()
        self.x = self.all_x[self.rank].to(device())
        self.own_splits = self.splits[self.rank].to(device())
        self.num_rows = self.splits[:, self.here].sum().item()

    def draw(self, rows, width, dtype):
        if self.values == "exact":
            return torch.randint(-4, 5, (rows, width), generator=self.generator).to(dtype)
        bits = torch.randint(256, (rows, width * dtype.itemsize), dtype=torch.uint8, generator=self.generator)
        return bits.view(dtype)

    def received(self, of_all):
        """This rank's part of what every rank has for each row."""
        parts = []
        for own, splits in zip(of_all, self.splits.tolist(), strict=True):
            start = sum(splits[: self.here.start])
            data = own.contiguous().view(torch.uint8) if own.dtype.itemsize == 1 else own
            parts.append(data[start : start + sum(splits[self.here])])
        return torch.cat(parts).view(of_all[0].dtype)

    def of_ranks(self):
        """[W, W] rows from each rank to each."""
        return self.splits.view(self.world_size, self.world_size, -1).sum(2)

    def call(self, **options):
        return tdkernels.all_to_all(self.x, self.own_splits, **options)

    def check(self, out, out_splits, capacity=None):
        tdkernels.synchronize()
        title = f"splits {self.splits.tolist()} {self.dtype}, rank {self.rank}"
        rows = self.num_rows if capacity is None else capacity
        assert out.shape == (rows, self.all_x[0].shape[1]), f"{title}: {list(out.shape)}"
        assert same(out_splits, self.out_splits), f"{title}: {out_splits.tolist()}, not {self.out_splits.tolist()}"
        assert same(out.detach()[: self.num_rows], self.received(self.all_x)), f"{title}: rows"


def splits_of(kind, experts_each=1, seed=0):
    """[W, E] rows, of a kind."""
    world_size = dist.get_world_size()
    generator = random.Random(seed)
    table = [[generator.randrange(4) for _ in range(world_size * experts_each)] for _ in range(world_size)]
    if kind == "nothing":
        table = [[0] * len(row) for row in table]
    elif kind == "one has none":
        table[seed % world_size] = [0] * len(table[0])
    elif kind == "all to one":
        table = [[5 * (expert == seed % len(row)) for expert in range(len(row))] for row in table]
    elif kind == "to itself":
        table = [[3 * (expert // experts_each == rank) for expert in range(len(row))] for rank, row in enumerate(table)]
    return table


KINDS = ["any", "one has none", "all to one", "to itself", "nothing"]


def moves(dtypes, experts_each, changes):
    """Any bits there, and back again where splits have one number a rank."""
    config = config_of(changes)
    for seed, (dtype, width) in enumerate(dtypes):
        kind = KINDS[seed % len(KINDS)]
        exchange = AsyncCollective(splits_of(kind, experts_each, seed), width, dtype, seed=seed)
        if seed % 2:
            exchange.own_splits = exchange.own_splits.int()
        out, out_splits, scales = exchange.call(config=config)
        exchange.check(out, out_splits)
        assert scales is None
        back, back_splits, _ = tdkernels.all_to_all(
            out, out_splits.view(exchange.world_size, -1).sum(1), config=config
        )
        assert same(back, exchange.all_x[exchange.rank]), f"{kind} {dtype}: the way back"
        own = exchange.splits[exchange.rank].view(exchange.world_size, -1).sum(1)
        assert same(back_splits, own.int()), f"{kind} {dtype}: splits of the way back"


def agrees_with_the_specification(experts_each):
    exchange = AsyncCollective(splits_of("any", experts_each, seed=3), 8, FP32, values="exact")
    expected, expected_splits = tdkernels.all_to_all_ref(exchange.x, exchange.own_splits)
    out, out_splits, _ = exchange.call()
    tdkernels.synchronize()
    assert same(out, expected.cpu()) and same(out_splits.flatten(), expected_splits.flatten().cpu())
    assert out_splits.shape == expected_splits.shape, f"{list(out_splits.shape)}, not {list(expected_splits.shape)}"


def keeps_to_a_capacity(experts_each, changes=None):
    exchange = AsyncCollective(splits_of("any", experts_each, seed=1), 12, seed=1)
    config = config_of(changes)
    by_torch = config is not None and config.method == "torch"
    needed = exchange.of_ranks().sum(0).max().item() if by_torch else exchange_needs(exchange)  # it stages nothing
    for capacity in (needed, 60):
        out, out_splits, _ = exchange.call(max_tokens=capacity, config=config)
        exchange.check(out, out_splits, capacity)
    error = failure_of(exchange.call, max_tokens=needed - 1, config=config)
    assert type(error) is ValueError and f"all_to_all: max_tokens={needed - 1} is too small" in str(error), repr(error)
    tdkernels.synchronize()  # says it once only
    exchange.check(*exchange.call(config=config)[:2])


def exchange_needs(exchange):
    """Rows that any rank receives, or sends to others."""
    to_ranks = exchange.of_ranks()
    crossing = to_ranks - to_ranks.diagonal().diag()
    return max(to_ranks.sum(0).max().item(), crossing.sum(1).max().item(), crossing.sum(0).max().item())


def sends_scales_along(scales, changes=None):
    for seed, (dtype, shape) in enumerate(scales):
        exchange = AsyncCollective(splits_of("any", 2, seed), 20, torch.float8_e4m3fn, seed=seed)
        all_scales = [exchange.draw(len(x), shape[0] if shape else 1, dtype) for x in exchange.all_x]
        all_scales = [scales if shape else scales.flatten() for scales in all_scales]
        out, out_splits, out_scales = exchange.call(
            scales=all_scales[exchange.rank].to(device()), config=config_of(changes)
        )
        exchange.check(out, out_splits)
        assert same(out_scales, exchange.received(all_scales)), f"scales {dtype} {shape}"


def has_a_gradient(dtype, experts_each, capacity, changes):
    """The rows of the gradient go back where the rows came from."""
    exchange = AsyncCollective(splits_of("one has none", experts_each, seed=2), 20, dtype, values="exact", seed=2)
    exchange.x.requires_grad_()
    scales = torch.ones(len(exchange.x), device=device(), requires_grad=True)
    out, out_splits, out_scales = exchange.call(max_tokens=capacity, scales=scales, config=config_of(changes))
    exchange.check(out, out_splits, capacity)
    assert out.requires_grad and not out_splits.requires_grad and not out_scales.requires_grad
    all_dx = [exchange.draw(len(x), 20, dtype) for x in exchange.all_x]
    dout = torch.full(out.shape, torch.nan, dtype=dtype, device=device())
    dout[: exchange.num_rows] = exchange.received(all_dx).to(device())
    out.backward(dout, retain_graph=True)
    tdkernels.synchronize()
    assert same(exchange.x.grad, all_dx[exchange.rank]), f"dx {dtype}"
    out.backward(dout)
    assert same(exchange.x.grad, 2 * all_dx[exchange.rank]), "gradients add up"
    config = config_of(changes)
    with torch.no_grad():
        assert not exchange.call(config=config)[0].requires_grad
    with pytest.raises(RuntimeError, match="all_to_all.*second derivative|second derivative.*all_to_all"):
        torch.autograd.grad(exchange.call(config=config)[0].sum(), exchange.x, create_graph=True)


def refuses_splits(what, offender, max_tokens, changes=None):
    """Those of one rank are wrong: all are told whose, once, and the next call is right."""
    exchange = AsyncCollective(splits_of("any", seed=5), 8, seed=5)
    right, x = exchange.own_splits, exchange.x
    if dist.get_rank() == offender:
        if what == "negative":  # and the sum is right
            exchange.own_splits = torch.tensor([-1, right.sum() + 1, *[0] * (len(right) - 2)], device=device())
        elif what == "sum too large":
            exchange.own_splits = right + 1
        elif what == "sum too small":
            exchange.x = torch.cat([x, x.new_ones(1, 8)])
        elif what == "large":
            exchange.own_splits = right + (1 << 32)
        elif what == "of no rows":
            exchange.x, exchange.own_splits = x[:0], right * 0 + 1
        elif what == "negative of no rows":
            exchange.x, exchange.own_splits = x[:0], torch.tensor([1, -1, *right[2:] * 0], device=device())
    for _ in range(2):
        error = failure_of(exchange.call, max_tokens=max_tokens, config=config_of(changes))
        assert type(error) is ValueError, repr(error)
        words = f"all_to_all: splits of rank {offender} are negative or do not add up to the rows of its x"
        if dist.get_rank() == offender:
            splits, rows = exchange.own_splits, len(exchange.x)
            words += f"; here splits {list(splits.shape)}, the least of which is {splits.min()}, add up to "
            words += f"{splits.sum()}, and x has {rows}"
        assert str(error) == words, str(error)
        tdkernels.synchronize()
    exchange.own_splits, exchange.x = right, x
    out, out_splits, _ = exchange.call(config=config_of(changes))
    exchange.check(out, out_splits)


def refuses():
    """Before anything is launched, so each rank by itself."""
    exchange = AsyncCollective(splits_of("any", seed=6), 8, FP32, values="exact")
    x, splits, world_size = exchange.x, exchange.own_splits, exchange.world_size

    def call(**changes):
        arguments = {"x": x, "splits": splits, **changes}
        return tdkernels.all_to_all(arguments.pop("x"), **arguments)

    table = [
        (dict(x=None), TypeError, "x must be a torch.Tensor"),
        (dict(x=x.long()), TypeError, "x is torch.int64"),
        (dict(x=x[:, 0]), ValueError, "x must have 2 dimensions"),
        (dict(x=x[:, :0]), ValueError, "x .* has empty rows"),
        (dict(x=x.to("meta")), ValueError, "x is on meta"),
        (dict(splits=splits.tolist()), TypeError, "splits must be a torch.Tensor"),
        (dict(splits=splits.float()), TypeError, "splits is torch.float32; int32 and int64"),
        (dict(splits=splits[:, None]), ValueError, r"splits must be \[W\] or \[E\], its shape is"),
        (dict(splits=splits[:0]), ValueError, r"splits must be \[W\] or \[E\], its shape is \[0\]"),
        (dict(splits=splits.to("meta")), ValueError, "splits is on meta"),
        (dict(scales=x[:, :1, None]), ValueError, r"scales must be \[T\] or \[T, S\]"),
        (dict(scales=torch.ones(len(x) + 1, device=device())), ValueError, r"scales must be .* T ="),
        (dict(max_tokens=0), ValueError, "max_tokens must be a positive integer"),
        (dict(config={"num_warps": 4}), TypeError, "config must be an EpConfig or None, not dict"),
        (dict(config=EpConfig(chunk_tokens=0)), ValueError, "config cannot run: chunk_tokens"),
    ]
    if world_size > 1:
        odd = torch.zeros(world_size + 1, dtype=torch.int64, device=device())
        words = rf"splits \[{world_size + 1}\] must be divisible by the group's {world_size} ranks"
        table.append((dict(splits=odd), ValueError, words))
    for changes, kind, words in table:
        with pytest.raises(kind, match=words) as caught:
            call(**changes)
        assert str(caught.value).startswith("all_to_all: "), str(caught.value)
    exchange.check(*exchange.call()[:2])


def takes_any_layout(changes=None):
    exchange = AsyncCollective(splits_of("any", seed=7), 24, FP32, values="exact", seed=7)
    x = exchange.x
    layouts = {
        "transposed": x.t().contiguous().t(),
        "misaligned": torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        "every second": x.repeat_interleave(2, 0)[::2],
    }
    config = config_of(changes)
    for exchange.x in layouts.values():
        exchange.check(*exchange.call(config=config)[:2])
    exchange.own_splits = exchange.own_splits.repeat_interleave(2)[::2]
    exchange.check(*exchange.call(config=config)[:2])


def endures(calls, most_rows, seed, changes=None):
    """Random splits, between which ranks wait at random and all memory is filled with NaNs."""
    world_size = dist.get_world_size()
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for call in range(calls):
        experts, width, dtype = of_all.choice([(world_size, 24, BF16), (2 * world_size, 9, FP32)])
        splits = [[of_all.choice([0, of_all.randrange(most_rows)]) for _ in range(experts)] for _ in range(world_size)]
        exchange = AsyncCollective(splits, width, dtype, seed=seed + call)
        if of_all.random() < 0.2:
            poison()
        time.sleep(own.choice([0.0, own.uniform(0.0, 0.01)]))
        max_tokens = of_all.choice([None, 2 * most_rows * experts])
        out, out_splits, _ = exchange.call(max_tokens=max_tokens, config=config_of(changes))
        if of_all.random() < 0.2:
            poison()  # what we got is ours and does not change with the workspace
        exchange.check(out, out_splits, None if len(out) == exchange.num_rows else len(out))


def uses_subgroups(changes=None):
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([1, 2, 3]) as most:
        for group, members in ((low, [0, 1]), (most, [1, 2, 3])):
            if rank in members:
                splits = [[1 + i + j for j in range(len(members))] for i in range(len(members))]
                exchange = AsyncCollective(splits, 16, seed=members[0], rank=members.index(rank))
                exchange.check(*exchange.call(group=group, config=config_of(changes))[:2])
        del low, most, group


def disagrees(what, changes=None):
    odd = dist.get_rank() == 1
    exchange = AsyncCollective(splits_of("any", 2 if what == "num_experts" and odd else 1), 16, FP32, values="exact")
    x = exchange.x[:, :8].contiguous() if what == "width" and odd else exchange.x
    x = x.half() if what == "dtype" and odd else x
    max_tokens = 50 + odd if what == "max_tokens" else None
    with a_group() as group:
        options = {"max_tokens": max_tokens, "group": group, "config": config_of(changes)}
        error = failure_of(tdkernels.all_to_all, x, exchange.own_splits, **options)
        assert type(error) is ValueError, repr(error)
        assert f"all_to_all: the ranks disagree: {what} is " in str(error) and "on rank 1" in str(error), str(error)
        right = AsyncCollective(splits_of("any"), 16, FP32, values="exact")
        right.check(*right.call(group=group, config=config_of(changes))[:2])
        del group


def is_not_fooled_by_a_known_plan(what):
    with a_group() as group:
        ways = [(AsyncCollective(splits_of("any", seed=8), width, FP32), options) for width, options in (
            [(16, {}), (24, {})] if what == "width" else [(16, {"max_tokens": 40}), (16, {"max_tokens": 50})]
        )]
        for exchange, options in ways * 2:
            out, out_splits, _ = exchange.call(group=group, **options)
            exchange.check(out, out_splits, options.get("max_tokens"))
        dist.barrier()
        exchange, options = ways[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(exchange.call, group=group, **options)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and "all_to_all" in str(error), repr(error)
        del group, out, out_splits
