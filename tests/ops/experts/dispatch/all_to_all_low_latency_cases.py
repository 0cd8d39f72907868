"""What all_to_all with ``max_tokens_per_rank`` is asked, as functions of a rank."""

import random
import time

import torch
import torch.distributed as dist

import tdkernels
from tests.ops.collectives.cases import same
from tests.ops.experts.dispatch.all_to_all_cases import FP32, KINDS, AsyncCollective, config_of, splits_of
from tests.ops.experts.dispatch.low_latency_cases import goes_straight, launches_of
from tests.support.ranks import a_group, device
from tests.test_protocol import failure_of, poison


def most_of(exchange):
    """The smallest max_tokens_per_rank."""
    return max(*map(len, exchange.all_x), 1)


def straight(exchange, **options):
    """A call in one launch, checked; what it returns."""
    most = most_of(exchange)
    options = {"max_tokens_per_rank": most, **options}
    out, out_splits, out_scales = goes_straight(exchange.call, **options)
    exchange.check(out, out_splits, options.get("max_tokens", exchange.world_size * options["max_tokens_per_rank"]))
    return out, out_splits, out_scales


def moves(dtypes, experts_each, changes):
    """Any bits there, and back again where the rows came from."""
    config = config_of(changes)
    for seed, (dtype, width) in enumerate(dtypes):
        kind = KINDS[seed % len(KINDS)]
        exchange = AsyncCollective(splits_of(kind, experts_each, seed), width, dtype, seed=seed)
        out, out_splits, scales = straight(exchange, config=config)
        assert scales is None
        of_ranks = out_splits.view(exchange.world_size, -1).sum(1)
        most = max(exchange.of_ranks().sum(0).max().item(), 1)
        back, back_splits, _ = goes_straight(
            tdkernels.all_to_all, x=out[: exchange.num_rows], splits=of_ranks, max_tokens_per_rank=most, config=config
        )
        own = exchange.all_x[exchange.rank]
        assert same(back[: len(own)], own), f"{kind} {dtype}: the way back"
        assert same(back_splits, exchange.of_ranks()[exchange.rank].int()), f"{kind} {dtype}: splits of the way back"


def sends_scales_along(scales):
    for seed, (dtype, shape) in enumerate(scales):
        exchange = AsyncCollective(splits_of("any", 2, seed), 20, torch.float8_e4m3fn, seed=seed)
        all_scales = [exchange.draw(len(x), shape[0] if shape else 1, dtype) for x in exchange.all_x]
        all_scales = [scales if shape else scales.flatten() for scales in all_scales]
        _, _, out_scales = straight(exchange, scales=all_scales[exchange.rank].to(device()))
        assert same(out_scales[: exchange.num_rows], exchange.received(all_scales)), f"scales {dtype} {shape}"


def has_a_gradient(dtype, experts_each, changes):
    """The rows of the gradient go back where the rows came from, by the tables that the one launch has made."""
    exchange = AsyncCollective(splits_of("one has none", experts_each, seed=2), 20, dtype, values="exact", seed=2)
    exchange.x.requires_grad_()
    out, _, _ = straight(exchange, config=config_of(changes))
    all_dx = [exchange.draw(len(x), 20, dtype) for x in exchange.all_x]
    dout = torch.full(out.shape, torch.nan, dtype=dtype, device=device())
    dout[: exchange.num_rows] = exchange.received(all_dx).to(device())
    for times in (1, 2):
        out.backward(dout, retain_graph=True)
        tdkernels.synchronize()
        assert same(exchange.x.grad, times * all_dx[exchange.rank]), f"dx {dtype}"


def counts_first(config, most):
    """Where tokens are too many for one launch, or a config says so, the same rows come by the other way."""
    exchange = AsyncCollective(splits_of("any", 2, seed=4), 12, seed=4)
    (out, out_splits, _), direct = launches_of(exchange.call, max_tokens_per_rank=most, config=config)
    assert direct and not any(direct)
    exchange.check(out, out_splits, exchange.world_size * most)


def keeps_to_a_capacity(experts_each):
    exchange = AsyncCollective(splits_of("any", experts_each, seed=1), 12, seed=1)
    needed, bound = exchange.of_ranks().sum(0).max().item(), most_of(exchange)
    straight(exchange, max_tokens=needed)
    error = failure_of(exchange.call, max_tokens=needed - 1, max_tokens_per_rank=bound)
    if error is None:  # on a GPU it is told later
        error = failure_of(tdkernels.synchronize)
    assert type(error) is ValueError and f"all_to_all: max_tokens={needed - 1} is too small" in str(error), repr(error)
    failure_of(tdkernels.synchronize)
    straight(exchange)


def refuses_splits(what, offender):
    """Those of one rank are wrong: all are told whose, and the next call is right."""
    exchange = AsyncCollective(splits_of("any", seed=5), 8, seed=5)
    right, bound = exchange.own_splits, most_of(exchange) + 1
    if dist.get_rank() == offender:
        if what == "negative":
            exchange.own_splits = torch.tensor([-1, right.sum() + 1, *[0] * (len(right) - 2)], device=device())
        else:
            exchange.own_splits = right + 1
    error = failure_of(exchange.call, max_tokens_per_rank=bound)
    if error is None:
        error = failure_of(tdkernels.synchronize)
    words = f"all_to_all: splits of rank {offender} are negative or do not add up to the rows of its x"
    assert type(error) is ValueError and words in str(error), repr(error)
    assert (f"; here splits {list(right.shape)}, " in str(error)) == (dist.get_rank() == offender), str(error)
    failure_of(tdkernels.synchronize)
    exchange.own_splits = right
    straight(exchange, max_tokens_per_rank=bound)


def refuses_too_many_rows(config):
    """On whichever rank they are, all are told whose, and how many."""
    exchange = AsyncCollective(splits_of("one has none", seed=1), 8, seed=1)
    rows = [len(x) for x in exchange.all_x]
    most = max(rows)
    offender = rows.index(most)
    assert rows.count(most) == 1
    for _ in range(2):
        error = failure_of(exchange.call, max_tokens_per_rank=most - 1, config=config)
        if error is None:
            error = failure_of(tdkernels.synchronize)
        mine = f"all_to_all: x [{most}, 8] has more rows than max_tokens_per_rank = {most - 1}"
        theirs = f"all_to_all: rank {offender} has {most} tokens, more than max_tokens_per_rank"
        assert type(error) is ValueError, repr(error)
        assert theirs in str(error) or (dist.get_rank() == offender and mine in str(error)), str(error)
        failure_of(tdkernels.synchronize)  # rank ``offender`` may be told twice
    out, out_splits, _ = exchange.call(max_tokens_per_rank=most, config=config)
    exchange.check(out, out_splits, exchange.world_size * most)


def endures(calls, most_rows, seed):
    """Random splits, between which ranks wait at random and all memory is filled with NaNs."""
    world_size = dist.get_world_size()
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for call in range(calls):
        experts, width, dtype = of_all.choice([(world_size, 24, torch.bfloat16), (2 * world_size, 9, FP32)])
        splits = [[of_all.choice([0, of_all.randrange(most_rows)]) for _ in range(experts)] for _ in range(world_size)]
        exchange = AsyncCollective(splits, width, dtype, seed=seed + call)
        if of_all.random() < 0.2:
            poison()
        time.sleep(own.choice([0.0, own.uniform(0.0, 0.01)]))
        bound = 2 * world_size * most_rows
        out, out_splits, _ = exchange.call(max_tokens_per_rank=bound)
        if of_all.random() < 0.2:
            poison()  # what we got is ours and does not change with the workspace
        exchange.check(out, out_splits, world_size * bound)


def uses_subgroups():
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([1, 2, 3]) as most:
        for group, members in ((low, [0, 1]), (most, [1, 2, 3])):
            if rank in members:
                splits = [[1 + i + j for j in range(len(members))] for i in range(len(members))]
                straight(AsyncCollective(splits, 16, seed=members[0], rank=members.index(rank)), group=group)
        del low, most, group


def disagrees():
    exchange = AsyncCollective(splits_of("any"), 16, FP32, values="exact")
    with a_group() as group:
        error = failure_of(exchange.call, max_tokens_per_rank=50 + (dist.get_rank() == 1), group=group)
        assert type(error) is ValueError, repr(error)
        words = "all_to_all: the ranks disagree: "
        assert words in str(error) and "max_tokens_per_rank is " in str(error) and "on rank 1" in str(error), str(error)
        straight(exchange, group=group)
        del group


def refuses():
    """Before anything is launched, so each rank by itself."""
    exchange = AsyncCollective(splits_of("any", seed=6), 8)
    for most in (0, -1, 1.0, True, "2", 1 << 30):
        error = failure_of(exchange.call, max_tokens_per_rank=most)
        words = "all_to_all: max_tokens_per_rank must be a positive integer"
        assert type(error) is ValueError and words in str(error), repr(error)
    straight(exchange)


def is_captured(bound=40):
    """A graph that is replayed with other rows, and other splits."""
    x = torch.zeros(bound, 24, dtype=torch.bfloat16, device=device())
    splits = torch.zeros(2 * dist.get_world_size(), dtype=torch.int64, device=device())

    def fill(seed):
        table = splits_of("any", 2, seed)
        for row in table:
            row[seed % len(row)] += bound - sum(row)
        exchange = AsyncCollective(table, 24, seed=seed)
        x.copy_(exchange.x)
        splits.copy_(exchange.own_splits)
        return exchange

    fill(0)
    tdkernels.all_to_all(x, splits, max_tokens_per_rank=bound)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, out_splits, _ = tdkernels.all_to_all(x, splits, max_tokens_per_rank=bound)
    for seed in (1, 2, 1):
        exchange = fill(seed)
        out.fill_(torch.nan)
        graph.replay()
        exchange.check(out, out_splits, exchange.world_size * bound)
