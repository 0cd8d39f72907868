"""Test bodies for all_to_all. Every rank runs them; test_all_to_all.py starts them.

Every rank draws the operands of all ranks from a seed, so it computes the expected results without communication.
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


class AllToAllCase:
    """Rows and splits of all ranks, and the expected results of this rank.

    Args:     splits: [W, E], rows of each rank for each expert, or for each rank if E is W
              values: random "bits", or small "exact" integers
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

    def received(self, all_values):
        """Return this rank's received rows of tensors with one row for each row of x, one tensor per rank."""
        parts = []
        for own, splits in zip(all_values, self.splits.tolist(), strict=True):
            start = sum(splits[: self.here.start])
            data = own.contiguous().view(torch.uint8) if own.dtype.itemsize == 1 else own
            parts.append(data[start : start + sum(splits[self.here])])
        return torch.cat(parts).view(all_values[0].dtype)

    def of_ranks(self):
        """Return the number of rows from each rank to each rank, [W, W]."""
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
    """Return splits [W, E] of the given kind."""
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
    """Exchange rows of random bits and send them back with one split per rank."""
    config = config_of(changes)
    for seed, (dtype, width) in enumerate(dtypes):
        kind = KINDS[seed % len(KINDS)]
        case = AllToAllCase(splits_of(kind, experts_each, seed), width, dtype, seed=seed)
        if seed % 2:
            case.own_splits = case.own_splits.int()
        out, out_splits, scales = case.call(config=config)
        case.check(out, out_splits)
        assert scales is None
        back, back_splits, _ = tdkernels.all_to_all(
            out, out_splits.view(case.world_size, -1).sum(1), config=config
        )
        assert same(back, case.all_x[case.rank]), f"{kind} {dtype}: way back"
        own = case.splits[case.rank].view(case.world_size, -1).sum(1)
        assert same(back_splits, own.int()), f"{kind} {dtype}: splits of way back"


def matches_reference(experts_each):
    case = AllToAllCase(splits_of("any", experts_each, seed=3), 8, FP32, values="exact")
    expected, expected_splits = tdkernels.all_to_all_ref(case.x, case.own_splits)
    out, out_splits, _ = case.call()
    tdkernels.synchronize()
    assert same(out, expected.cpu()) and same(out_splits.flatten(), expected_splits.flatten().cpu())
    assert out_splits.shape == expected_splits.shape, f"{list(out_splits.shape)}, not {list(expected_splits.shape)}"


def respects_capacity(experts_each, changes=None):
    case = AllToAllCase(splits_of("any", experts_each, seed=1), 12, seed=1)
    config = config_of(changes)
    torch_backend = config is not None and config.method == "torch"
    needed = case.of_ranks().sum(0).max().item() if torch_backend else required_capacity(case)  # torch stages nothing
    for capacity in (needed, 60):
        out, out_splits, _ = case.call(max_tokens=capacity, config=config)
        case.check(out, out_splits, capacity)
    error = failure_of(case.call, max_tokens=needed - 1, config=config)
    assert type(error) is ValueError and f"all_to_all: max_tokens={needed - 1} is too small" in str(error), repr(error)
    tdkernels.synchronize()  # does not raise the error again
    case.check(*case.call(config=config)[:2])


def required_capacity(case):
    """Return the maximum over ranks of rows received and of rows exchanged with other ranks."""
    to_ranks = case.of_ranks()
    crossing = to_ranks - to_ranks.diagonal().diag()
    return max(to_ranks.sum(0).max().item(), crossing.sum(1).max().item(), crossing.sum(0).max().item())


def sends_scales(scales, changes=None):
    for seed, (dtype, shape) in enumerate(scales):
        case = AllToAllCase(splits_of("any", 2, seed), 20, torch.float8_e4m3fn, seed=seed)
        all_scales = [case.draw(len(x), shape[0] if shape else 1, dtype) for x in case.all_x]
        all_scales = [scales if shape else scales.flatten() for scales in all_scales]
        out, out_splits, out_scales = case.call(
            scales=all_scales[case.rank].to(device()), config=config_of(changes)
        )
        case.check(out, out_splits)
        assert same(out_scales, case.received(all_scales)), f"scales {dtype} {shape}"


def computes_gradient(dtype, experts_each, capacity, changes):
    """Gradient rows are sent back to the ranks of the rows."""
    case = AllToAllCase(splits_of("one has none", experts_each, seed=2), 20, dtype, values="exact", seed=2)
    case.x.requires_grad_()
    scales = torch.ones(len(case.x), device=device(), requires_grad=True)
    out, out_splits, out_scales = case.call(max_tokens=capacity, scales=scales, config=config_of(changes))
    case.check(out, out_splits, capacity)
    assert out.requires_grad and not out_splits.requires_grad and not out_scales.requires_grad
    all_dx = [case.draw(len(x), 20, dtype) for x in case.all_x]
    dout = torch.full(out.shape, torch.nan, dtype=dtype, device=device())
    dout[: case.num_rows] = case.received(all_dx).to(device())
    out.backward(dout, retain_graph=True)
    tdkernels.synchronize()
    assert same(case.x.grad, all_dx[case.rank]), f"dx {dtype}"
    out.backward(dout)
    assert same(case.x.grad, 2 * all_dx[case.rank]), "gradients add up"
    config = config_of(changes)
    with torch.no_grad():
        assert not case.call(config=config)[0].requires_grad
    with pytest.raises(RuntimeError, match="all_to_all.*second derivative|second derivative.*all_to_all"):
        torch.autograd.grad(case.call(config=config)[0].sum(), case.x, create_graph=True)


def rejects_invalid_splits(what, offender, max_tokens, changes=None):
    """If one rank has invalid splits, every rank raises an error that names it, once; the next call is correct."""
    case = AllToAllCase(splits_of("any", seed=5), 8, seed=5)
    right, x = case.own_splits, case.x
    if dist.get_rank() == offender:
        if what == "negative":  # with the correct sum
            case.own_splits = torch.tensor([-1, right.sum() + 1, *[0] * (len(right) - 2)], device=device())
        elif what == "sum too large":
            case.own_splits = right + 1
        elif what == "sum too small":
            case.x = torch.cat([x, x.new_ones(1, 8)])
        elif what == "large":
            case.own_splits = right + (1 << 32)
        elif what == "positive with empty x":
            case.x, case.own_splits = x[:0], right * 0 + 1
        elif what == "negative with empty x":
            case.x, case.own_splits = x[:0], torch.tensor([1, -1, *right[2:] * 0], device=device())
    for _ in range(2):
        error = failure_of(case.call, max_tokens=max_tokens, config=config_of(changes))
        assert type(error) is ValueError, repr(error)
        message = f"all_to_all: splits of rank {offender} are negative or do not add up to the rows of its x"
        if dist.get_rank() == offender:
            splits, rows = case.own_splits, len(case.x)
            message += f"; here splits {list(splits.shape)}, the least of which is {splits.min()}, add up to "
            message += f"{splits.sum()}, and x has {rows}"
        assert str(error) == message, str(error)
        tdkernels.synchronize()
    case.own_splits, case.x = right, x
    out, out_splits, _ = case.call(config=config_of(changes))
    case.check(out, out_splits)


def rejects_invalid_arguments():
    """Each rank rejects invalid arguments locally, before any launch."""
    case = AllToAllCase(splits_of("any", seed=6), 8, FP32, values="exact")
    x, splits, world_size = case.x, case.own_splits, case.world_size

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
        indivisible = torch.zeros(world_size + 1, dtype=torch.int64, device=device())
        message = rf"splits \[{world_size + 1}\] must be divisible by the group's {world_size} ranks"
        table.append((dict(splits=indivisible), ValueError, message))
    for changes, kind, message in table:
        with pytest.raises(kind, match=message) as caught:
            call(**changes)
        assert str(caught.value).startswith("all_to_all: "), str(caught.value)
    case.check(*case.call()[:2])


def takes_any_layout(changes=None):
    case = AllToAllCase(splits_of("any", seed=7), 24, FP32, values="exact", seed=7)
    x = case.x
    layouts = {
        "transposed": x.t().contiguous().t(),
        "misaligned": torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        "every second": x.repeat_interleave(2, 0)[::2],
    }
    config = config_of(changes)
    for case.x in layouts.values():
        case.check(*case.call(config=config)[:2])
    case.own_splits = case.own_splits.repeat_interleave(2)[::2]
    case.check(*case.call(config=config)[:2])


def stress(calls, most_rows, seed, changes=None):
    """Make calls with random splits and random delays on each rank, and fill all memory with NaN in between."""
    world_size = dist.get_world_size()
    rng, rank_rng = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for call in range(calls):
        experts, width, dtype = rng.choice([(world_size, 24, BF16), (2 * world_size, 9, FP32)])
        splits = [[rng.choice([0, rng.randrange(most_rows)]) for _ in range(experts)] for _ in range(world_size)]
        case = AllToAllCase(splits, width, dtype, seed=seed + call)
        if rng.random() < 0.2:
            poison()
        time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.01)]))
        max_tokens = rng.choice([None, 2 * most_rows * experts])
        out, out_splits, _ = case.call(max_tokens=max_tokens, config=config_of(changes))
        if rng.random() < 0.2:
            poison()  # results must not alias the workspace
        case.check(out, out_splits, None if len(out) == case.num_rows else len(out))


def uses_subgroups(changes=None):
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([1, 2, 3]) as high:
        for group, members in ((low, [0, 1]), (high, [1, 2, 3])):
            if rank in members:
                splits = [[1 + i + j for j in range(len(members))] for i in range(len(members))]
                case = AllToAllCase(splits, 16, seed=members[0], rank=members.index(rank))
                case.check(*case.call(group=group, config=config_of(changes))[:2])
        del low, high, group


def reports_disagreement(what, changes=None):
    differs = dist.get_rank() == 1
    case = AllToAllCase(splits_of("any", 2 if what == "num_experts" and differs else 1), 16, FP32, values="exact")
    x = case.x[:, :8].contiguous() if what == "width" and differs else case.x
    x = x.half() if what == "dtype" and differs else x
    max_tokens = 50 + differs if what == "max_tokens" else None
    with a_group() as group:
        options = {"max_tokens": max_tokens, "group": group, "config": config_of(changes)}
        error = failure_of(tdkernels.all_to_all, x, case.own_splits, **options)
        assert type(error) is ValueError, repr(error)
        assert f"all_to_all: the ranks disagree: {what} is " in str(error) and "on rank 1" in str(error), str(error)
        right = AllToAllCase(splits_of("any"), 16, FP32, values="exact")
        right.check(*right.call(group=group, config=config_of(changes))[:2])
        del group


def detects_mismatch_of_cached_plans(what):
    with a_group() as group:
        variants = [(AllToAllCase(splits_of("any", seed=8), width, FP32), options) for width, options in (
            [(16, {}), (24, {})] if what == "width" else [(16, {"max_tokens": 40}), (16, {"max_tokens": 50})]
        )]
        for case, options in variants * 2:
            out, out_splits, _ = case.call(group=group, **options)
            case.check(out, out_splits, options.get("max_tokens"))
        dist.barrier()
        case, options = variants[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.call, group=group, **options)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and "all_to_all" in str(error), repr(error)
        del group, out, out_splits
