"""Test bodies for the low-latency all_to_all (``max_tokens_per_rank``). Every rank runs them."""

import random
import time

import torch
import torch.distributed as dist

import tdkernels
from tests.ops.collectives.cases import same
from tests.ops.experts.dispatch.all_to_all_cases import FP32, KINDS, AllToAllCase, config_of, splits_of
from tests.ops.experts.dispatch.low_latency_cases import record_launches, run_low_latency
from tests.support.ranks import a_group, device
from tests.test_protocol import failure_of, poison


def min_tokens_per_rank(case):
    """Return the smallest max_tokens_per_rank that a case allows."""
    return max(*map(len, case.all_x), 1)


def call_low_latency(case, **options):
    """Make a low-latency call, check the results and return them."""
    bound = min_tokens_per_rank(case)
    options = {"max_tokens_per_rank": bound, **options}
    out, out_splits, out_scales = run_low_latency(case.call, **options)
    case.check(out, out_splits, options.get("max_tokens", case.world_size * options["max_tokens_per_rank"]))
    return out, out_splits, out_scales


def moves(dtypes, experts_each, changes):
    """Exchange rows of random bits and send them back."""
    config = config_of(changes)
    for seed, (dtype, width) in enumerate(dtypes):
        kind = KINDS[seed % len(KINDS)]
        case = AllToAllCase(splits_of(kind, experts_each, seed), width, dtype, seed=seed)
        out, out_splits, scales = call_low_latency(case, config=config)
        assert scales is None
        of_ranks = out_splits.view(case.world_size, -1).sum(1)
        bound = max(case.of_ranks().sum(0).max().item(), 1)
        back, back_splits, _ = run_low_latency(
            tdkernels.all_to_all, x=out[: case.num_rows], splits=of_ranks, max_tokens_per_rank=bound, config=config
        )
        own = case.all_x[case.rank]
        assert same(back[: len(own)], own), f"{kind} {dtype}: way back"
        assert same(back_splits, case.of_ranks()[case.rank].int()), f"{kind} {dtype}: splits of way back"


def sends_scales(scales):
    for seed, (dtype, shape) in enumerate(scales):
        case = AllToAllCase(splits_of("any", 2, seed), 20, torch.float8_e4m3fn, seed=seed)
        all_scales = [case.draw(len(x), shape[0] if shape else 1, dtype) for x in case.all_x]
        all_scales = [scales if shape else scales.flatten() for scales in all_scales]
        _, _, out_scales = call_low_latency(case, scales=all_scales[case.rank].to(device()))
        assert same(out_scales[: case.num_rows], case.received(all_scales)), f"scales {dtype} {shape}"


def computes_gradient(dtype, experts_each, changes):
    """Gradient rows are sent back to the ranks of the rows, by the routing that the low-latency launch computed."""
    case = AllToAllCase(splits_of("one has none", experts_each, seed=2), 20, dtype, values="exact", seed=2)
    case.x.requires_grad_()
    out, _, _ = call_low_latency(case, config=config_of(changes))
    all_dx = [case.draw(len(x), 20, dtype) for x in case.all_x]
    dout = torch.full(out.shape, torch.nan, dtype=dtype, device=device())
    dout[: case.num_rows] = case.received(all_dx).to(device())
    for times in (1, 2):
        out.backward(dout, retain_graph=True)
        tdkernels.synchronize()
        assert same(case.x.grad, times * all_dx[case.rank]), f"dx {dtype}"


def falls_back_to_two_phase(config, bound):
    """For many tokens, or if the config says so, a bounded call uses the two-phase exchange, with the same rows."""
    case = AllToAllCase(splits_of("any", 2, seed=4), 12, seed=4)
    (out, out_splits, _), low_latency = record_launches(case.call, max_tokens_per_rank=bound, config=config)
    assert low_latency and not any(low_latency)
    case.check(out, out_splits, case.world_size * bound)


def respects_capacity(experts_each):
    case = AllToAllCase(splits_of("any", experts_each, seed=1), 12, seed=1)
    needed, bound = case.of_ranks().sum(0).max().item(), min_tokens_per_rank(case)
    call_low_latency(case, max_tokens=needed)
    error = failure_of(case.call, max_tokens=needed - 1, max_tokens_per_rank=bound)
    if error is None:  # on a GPU the error is raised later
        error = failure_of(tdkernels.synchronize)
    assert type(error) is ValueError and f"all_to_all: max_tokens={needed - 1} is too small" in str(error), repr(error)
    failure_of(tdkernels.synchronize)
    call_low_latency(case)


def rejects_invalid_splits(what, offender):
    """If one rank has invalid splits, every rank raises an error that names it, and the next call is correct."""
    case = AllToAllCase(splits_of("any", seed=5), 8, seed=5)
    right, bound = case.own_splits, min_tokens_per_rank(case) + 1
    if dist.get_rank() == offender:
        if what == "negative":
            case.own_splits = torch.tensor([-1, right.sum() + 1, *[0] * (len(right) - 2)], device=device())
        else:
            case.own_splits = right + 1
    error = failure_of(case.call, max_tokens_per_rank=bound)
    if error is None:
        error = failure_of(tdkernels.synchronize)
    message = f"all_to_all: splits of rank {offender} are negative or do not add up to the rows of its x"
    assert type(error) is ValueError and message in str(error), repr(error)
    assert (f"; here splits {list(right.shape)}, " in str(error)) == (dist.get_rank() == offender), str(error)
    failure_of(tdkernels.synchronize)
    case.own_splits = right
    call_low_latency(case, max_tokens_per_rank=bound)


def rejects_too_many_rows(config):
    """If a rank exceeds the bound, every rank raises an error that names the rank and its number of rows."""
    case = AllToAllCase(splits_of("one has none", seed=1), 8, seed=1)
    rows = [len(x) for x in case.all_x]
    bound = max(rows)
    offender = rows.index(bound)
    assert rows.count(bound) == 1
    for _ in range(2):
        error = failure_of(case.call, max_tokens_per_rank=bound - 1, config=config)
        if error is None:
            error = failure_of(tdkernels.synchronize)
        own_message = f"all_to_all: x [{bound}, 8] has more rows than max_tokens_per_rank = {bound - 1}"
        peer_message = f"all_to_all: rank {offender} has {bound} tokens, more than max_tokens_per_rank"
        assert type(error) is ValueError, repr(error)
        assert peer_message in str(error) or (dist.get_rank() == offender and own_message in str(error)), str(error)
        tdkernels.synchronize()  # does not raise the error again
    out, out_splits, _ = case.call(max_tokens_per_rank=bound, config=config)
    case.check(out, out_splits, case.world_size * bound)


def stress(calls, most_rows, seed):
    """Make calls with random splits and random delays on each rank, and fill all memory with NaN in between."""
    world_size = dist.get_world_size()
    rng, rank_rng = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for call in range(calls):
        experts, width, dtype = rng.choice([(world_size, 24, torch.bfloat16), (2 * world_size, 9, FP32)])
        splits = [[rng.choice([0, rng.randrange(most_rows)]) for _ in range(experts)] for _ in range(world_size)]
        case = AllToAllCase(splits, width, dtype, seed=seed + call)
        if rng.random() < 0.2:
            poison()
        time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.01)]))
        bound = 2 * world_size * most_rows
        out, out_splits, _ = case.call(max_tokens_per_rank=bound)
        if rng.random() < 0.2:
            poison()  # results must not alias the workspace
        case.check(out, out_splits, world_size * bound)


def uses_subgroups():
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([1, 2, 3]) as high:
        for group, members in ((low, [0, 1]), (high, [1, 2, 3])):
            if rank in members:
                splits = [[1 + i + j for j in range(len(members))] for i in range(len(members))]
                call_low_latency(AllToAllCase(splits, 16, seed=members[0], rank=members.index(rank)), group=group)
        del low, high, group


def reports_disagreement():
    case = AllToAllCase(splits_of("any"), 16, FP32, values="exact")
    with a_group() as group:
        error = failure_of(case.call, max_tokens_per_rank=50 + (dist.get_rank() == 1), group=group)
        assert type(error) is ValueError, repr(error)
        for message in ("all_to_all: the ranks disagree: ", "max_tokens_per_rank is ", "on rank 1"):
            assert message in str(error), str(error)
        call_low_latency(case, group=group)
        del group


def rejects_invalid_arguments():
    """Each rank rejects an invalid bound locally, before any launch."""
    case = AllToAllCase(splits_of("any", seed=6), 8)
    for bound in (0, -1, 1.0, True, "2", 1 << 30):
        error = failure_of(case.call, max_tokens_per_rank=bound)
        message = "all_to_all: max_tokens_per_rank must be a positive integer"
        assert type(error) is ValueError and message in str(error), repr(error)
    call_low_latency(case)


def replays_in_cuda_graph(bound=40):
    """Replay a captured call with other rows and other splits."""
    x = torch.zeros(bound, 24, dtype=torch.bfloat16, device=device())
    splits = torch.zeros(2 * dist.get_world_size(), dtype=torch.int64, device=device())

    def fill(seed):
        table = splits_of("any", 2, seed)
        for row in table:
            row[seed % len(row)] += bound - sum(row)
        case = AllToAllCase(table, 24, seed=seed)
        x.copy_(case.x)
        splits.copy_(case.own_splits)
        return case

    fill(0)
    tdkernels.all_to_all(x, splits, max_tokens_per_rank=bound)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, out_splits, _ = tdkernels.all_to_all(x, splits, max_tokens_per_rank=bound)
    for seed in (1, 2, 1):
        case = fill(seed)
        out.fill_(torch.nan)
        graph.replay()
        case.check(out, out_splits, case.world_size * bound)
