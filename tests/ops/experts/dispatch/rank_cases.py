"""What holds between the ranks of a dispatch and a combine, as functions that every rank runs.

test_dispatch_ranks.py asks: reuse of memory, groups, disagreement, and peers that come late or never.
"""

import random
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError
from tdkernels.ops.experts.dispatch import launch as ep_launch
from tests.ops.experts.dispatch.cases import SMALL, UNEVEN, case_of, config_of
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32, Routed
from tests.support.ranks import a_group, device
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# Few kinds of calls, since a GPU compiles each; what differs from call to call is where tokens go and how many.
KINDS = [
    dict(k=2, experts_each=2, width=24, dtype=BF16, changes=SMALL),
    dict(k=1, experts_each=4, width=7, dtype=FP32, changes={**SMALL, "combine": "per_expert"}),
    dict(k=3, experts_each=4, width=80, dtype=FP16, changes=None),
]


def there_and_back(case, changes=None, group=None, **options):
    """One dispatch and combine, checked."""
    config = config_of(changes)
    recv, handle = case.dispatch(config=config, group=group, **options)
    y = tdkernels.ep_combine(case.expert_out(), handle, group=group)
    case.check_received(recv)
    case.check_combined(y, combine=config.combine if config else "per_rank")


def padded(rows, capacity):
    """[capacity, …] that begins with rows; the others are NaN, which nobody may add to anything. None: just rows."""
    if capacity is None:
        return rows
    out = rows.new_full((capacity, *rows.shape[1:]), torch.nan)
    out[: len(rows)] = rows
    return out


def counted(case, config, _of_all):
    return *case.dispatch(config=config), None


def endures(calls, most_tokens, seed, dispatch=counted):
    """Random tokens on random ways, between which ranks wait at random and all memory is filled with NaNs.

    Args:     dispatch: (case, config, a generator like that of all ranks) -> recv, handle, rows of recv.x or None if
              there are just as many as have come
    """
    world_size = dist.get_world_size()
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for _ in range(calls):
        kind = of_all.choice(KINDS)
        tokens = [of_all.choice([0, 1, of_all.randrange(most_tokens + 1)]) for _ in range(world_size)]
        case = Routed(
            tokens, kind["k"], kind["experts_each"] * world_size, kind["width"], kind["dtype"],
            ids=of_all.choice(["any", "any", "distinct", "one", "last", "none"]), seed=of_all.randrange(1 << 30),
        )
        if of_all.random() < 0.2:
            poison()
        time.sleep(own.choice([0.0, own.uniform(0.0, 0.01)]))
        recv, handle, capacity = dispatch(case, config_of(kind["changes"]), of_all)
        expert_out = padded(case.expert_out(), capacity)
        time.sleep(own.choice([0.0, own.uniform(0.0, 0.01)]))
        y = tdkernels.ep_combine(expert_out, handle)
        if of_all.random() < 0.2:
            poison()  # what we got is ours and does not change with the workspace
        case.check_received(recv, capacity=capacity)
        case.check_combined(y, combine=(kind["changes"] or {}).get("combine", "per_rank"))


def outruns_its_peers(calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other.

    By a handle, for counting would bring the ranks together again; and first all the dispatches, then all the combines.
    """
    case = case_of([4, 6, 3, 5], 2, 2, 24, ids="distinct", seed=calls)
    config = config_of(SMALL)
    _, handle = case.dispatch(config=config)
    tdkernels.ep_combine(case.expert_out(), handle)
    all_x = [case.draw(sum(case.tokens), 24, BF16) for _ in range(calls)]
    all_out = [case.draw(case.all_ids.numel(), 24, BF16) for _ in range(calls)]
    xs = [x[case.mine].to(device()) for x in all_x]
    outs = [out[case.order].to(device()) for out in all_out]
    with in_any_order(seed=calls):
        received = [tdkernels.ep_dispatch(x, handle, case.weights) for x in xs]
        ys = [tdkernels.ep_combine(out, handle) for out in outs]
    for call, (recv, _) in enumerate(received):
        case.all_x = all_x[call]
        case.check_received(recv)
    for call, y in enumerate(ys):
        case.all_out = all_out[call]
        case.check_combined(y)


def waits_for_a_slow_rank():
    for slow in range(dist.get_world_size()):
        case = case_of(UNEVEN, 2, 2, 16, seed=slow)
        case.x.requires_grad_()
        for wait in range(3):
            time.sleep(0.15 if dist.get_rank() == slow and wait == 0 else 0.0)
            recv, handle = case.dispatch()
            time.sleep(0.15 if dist.get_rank() == slow and wait == 1 else 0.0)
            y = tdkernels.ep_combine(case.expert_out(), handle)
            time.sleep(0.15 if dist.get_rank() == slow and wait == 2 else 0.0)
            recv.x.sum().backward()
            case.check_received(recv)
            case.check_combined(y)
            choices = case.valid[case.mine].sum(1, keepdim=True).to(BF16)
            assert torch.equal(case.x.grad.cpu(), choices.expand(case.x.shape)), "dx"
            case.x.grad = None


def grows(widths):
    """Each call wants more room than the one before, or less."""
    handles = []
    for seed, (tokens, width) in enumerate(widths):
        case = case_of(tokens, 2, 2, width, FP32, seed=seed)
        there_and_back(case)
        handles.append((case, case.dispatch()[1]))
    for case, handle in handles:  # which know nothing of memory that is no more
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))


# ---- groups ----


def uses_subgroups():
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([2, 3]) as high, a_group([1, 2, 3]) as most:
        for _ in range(2):
            for group, members in ((low, [0, 1]), (high, [2, 3]), (most, [1, 2, 3])):
                if rank in members:
                    own, tokens = members.index(rank), [3 + members[0], 1, 2][: len(members)]
                    case = Routed(tokens, 2, 2 * len(members), 16, seed=members[0], rank=own)
                    there_and_back(case, group=group)
        case = case_of(2, 2, 1, 8)
        if rank != 0:
            case = Routed([2] * 3, 2, 3, 8, rank=rank - 1)
            _, handle = case.dispatch(group=most)
            for call, words in (
                (lambda: tdkernels.ep_combine(case.expert_out(), handle), "of another group than the call"),
                (lambda: tdkernels.ep_dispatch(case.x, handle), "of another group"),
            ):
                error = failure_of(call)
                assert type(error) is ValueError and words in str(error), repr(error)
        del low, high, most, group


def uses_a_mesh():
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "ep"))
    for name, other in (("ep", "dp"), ("dp", "ep")):
        case = Routed([3, 5], 2, 4, 16, seed=mesh.get_local_rank(other), rank=mesh.get_local_rank(name))
        there_and_back(case, group=mesh[name])


# ---- ranks that do not agree ----

USUAL = dict(k=2, experts=6, width=16, dtype=BF16)
# What rank 1 of three does otherwise, and the field that says so, with its value there and elsewhere.
DISAGREEMENTS = {
    "width": (dict(width=24), {}, "width", 24, 16),
    "dtype": (dict(dtype=FP32), {}, "dtype", '"torch.float32"', '"torch.bfloat16"'),
    "choices": (dict(k=3), {}, "k", 3, 2),
    "num_experts": (dict(experts=9), {}, "num_experts", 9, 6),
    "max_tokens": ({}, {"max_tokens": 50}, "max_tokens", 50, "null"),
    "other max_tokens": ({}, {"max_tokens": 50}, "max_tokens", 50, 60),
    "quantize": ({}, {"quantize": "fp8"}, "quantize", "true", "false"),
    "scales": ({}, {"scales": True}, "scales", 8, 0),
    "weights": ({}, {"weighted": False}, "weighted", "false", "true"),
    "combine": ({}, {"config": {**SMALL, "combine": "per_expert"}}, "config", "per_expert", "per_rank"),
    "chunks": ({}, {"config": {**SMALL, "chunk_tokens": 2}}, "config", "chunk_tokens=2", "chunk_tokens=1"),
}


def disagrees(what):
    """Everybody is told, and the group is as good as before."""
    changes, options, field, there, elsewhere = DISAGREEMENTS[what]
    odd = dist.get_rank() == 1
    case = Routed([3] * 3, **{**USUAL, **(changes if odd else {})})
    usual = Routed([3] * 3, **USUAL)
    options = dict(options) if odd else {}
    if what == "other max_tokens" and not odd:
        options["max_tokens"] = 60
    if options.pop("scales", False):
        options["scales"] = torch.ones(3, 2, device=device())
    options["config"] = config_of(options.pop("config", SMALL))
    with a_group() as group:
        error = failure_of(case.dispatch, group=group, **options)
        check_disagreement(error, field, there, elsewhere)
        there_and_back(usual, group=group)
        del group


def check_disagreement(error, field, there, elsewhere, operator="ep_dispatch"):
    assert type(error) is ValueError, repr(error)
    for words in (f"{operator}: the ranks disagree", f"{field} is ", f"{elsewhere}", "on ranks 0, 2", f"{there}"):
        assert words in str(error), f"{words} in {error}"
    assert "on rank 1" in str(error), str(error)


def disagrees_in_combine(what):
    case = Routed([3] * 3, **USUAL)
    odd = dist.get_rank() == 1
    with a_group() as group:
        _, handle = case.dispatch(group=group, weighted=False)
        expert_out = case.expert_out()
        if what == "width":
            error = failure_of(tdkernels.ep_combine, expert_out[:, : 8 + 8 * odd], handle, group=group)
            expected = "width", 16, 8, "ep_combine"
        elif what == "dtype":
            dtype = FP32 if odd else BF16
            error = failure_of(tdkernels.ep_combine, expert_out.to(dtype), handle, group=group)
            expected = "dtype", '"torch.float32"', '"torch.bfloat16"', "ep_combine"
        else:
            config = config_of({**SMALL, "combine": "per_expert" if odd else "per_rank"})
            error = failure_of(tdkernels.ep_combine, expert_out, handle, group=group, config=config)
            expected = "config", "per_expert", "per_rank"
        check_disagreement(error, *expected)
        case.check_combined(tdkernels.ep_combine(expert_out, handle, group=group), weighted=False)
        there_and_back(case, group=group)
        del group


def disagrees_in_the_operator():
    x, splits = torch.ones(3, 4, device=device()), torch.ones(3, dtype=torch.int32, device=device())
    ids = torch.zeros(3, 1, dtype=torch.int64, device=device())
    with a_group() as group:
        if dist.get_rank() == 1:
            error = failure_of(tdkernels.all_to_all, x, splits, group=group)
        else:
            error = failure_of(tdkernels.ep_dispatch, x, ids, num_experts=3, group=group)
        assert type(error) is ValueError, repr(error)
        assert 'operator is "ep_dispatch" on ranks 0, 2, "all_to_all" on rank 1' in str(error), str(error)
        there_and_back(Routed([3] * 3, **USUAL), group=group)
        del group


# Two ways to call, both known, of which rank 1 takes the other.
KNOWN = {
    "width": (({}, {}), (dict(width=24), {})),
    "choices": (({}, {}), (dict(k=3), {})),
    "capacity": (({}, {}), ({}, {"max_tokens": 30})),
    "codes": (({}, {}), ({}, {"quantize": "fp8"})),
    "chunks": (({}, {}), ({}, {"config": config_of({**SMALL, "chunk_tokens": 2})})),
}


def is_not_fooled_by_a_known_plan(what):
    """Both calls have been made before, so nobody asks the others; only the signals can tell."""
    with a_group() as group:
        ways = [(Routed([3] * 3, **{**USUAL, **changes}), options) for changes, options in KNOWN[what]]
        for case, options in ways * 2:
            recv, _ = case.dispatch(group=group, **options)
            tdkernels.synchronize()
            if "quantize" not in options:
                case.check_received(recv, capacity=options.get("max_tokens"))
        dist.barrier()
        case, options = ways[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.dispatch, group=group, **options)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and "ep_dispatch" in str(error), repr(error)
        again = failure_of(case.dispatch, group=group, **options)
        assert type(again) is type(error) and str(again) == str(error), f"{again!r} after {error!r}"
        del group


def combine_is_not_fooled_by_a_known_plan():
    with a_group() as group:
        case = Routed([3] * 3, **USUAL)
        _, handle = case.dispatch(group=group)
        expert_out = case.expert_out()
        for width in (16, 8, 16, 8):
            y = tdkernels.ep_combine(expert_out[:, :width], handle, group=group)
        tdkernels.synchronize()
        dist.barrier()
        rows = expert_out[:, : 8 if dist.get_rank() == 1 else 16]
        with timeout(1.0):
            error = failure_of(tdkernels.ep_combine, rows, handle, group=group)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        again = failure_of(tdkernels.ep_combine, rows, handle, group=group)
        assert type(again) is type(error) and str(again) == str(error), repr(again)
        del group, handle, y


# ---- ranks that do not come ----


def loses_rank_1(leave, when, timeout_s):
    """Rank 1 is gone before the counts, the tokens or the sums; the others say so, now and whenever asked again."""
    case = case_of(3, 2, 2, 16)
    for _ in range(2):
        there_and_back(case)
    tdkernels.set_timeout(timeout_s)
    expert_out = case.expert_out()
    handle = case.dispatch()[1] if when == "combine" else None
    dist.barrier()
    if dist.get_rank() == 1:
        if when == "dispatch":  # the others know of all counts, and wait for tokens
            ep_launch.launch_dispatch = lambda *args, **kwargs: leave()
            case.dispatch()
        leave()

    def call():
        return case.dispatch() if handle is None else tdkernels.ep_combine(expert_out, handle)

    start = time.monotonic()
    error = failure_of(call)
    assert time.monotonic() - start < timeout_s + 5.0
    again = failure_of(call)
    assert type(again) is type(error) and again.peer == error.peer, f"{again!r} after {error!r}"
    raise error


def comes_when_rank_0_has_given_up(when):
    """Rank 1 is late. Whoever needs what rank 0 would have made of what it had not, must not get anything."""
    rank = dist.get_rank()
    with a_group() as group:
        case = Routed([3] * 3, **USUAL)
        for _ in range(2):
            there_and_back(case, group=group)
        expert_out = case.expert_out()
        handle = case.dispatch(group=group)[1] if when == "combine" else None
        dist.barrier()
        if rank == 1:
            time.sleep(0.9)
        with timeout(0.3 if rank == 0 else 2.0):
            try:
                if when == "combine":
                    case.check_combined(tdkernels.ep_combine(expert_out, handle, group=group))
                else:
                    recv, handle = case.dispatch(group=group, max_tokens=None)
                    case.check_received(recv)
                answer = "right"
            except PeerTimeoutError as error:
                answer = f"missed {error.peer}"
                error.__traceback__ = None
        handle = recv = None
        del group, handle, recv
    return answer


def check_killed(caught, world_size, timeout_s):
    """What ranks other than 1, which was killed, have said of it in ``ep_dispatch``."""
    exceptions = caught.value.exceptions
    assert isinstance(exceptions[1], ChildProcessError)
    for rank in range(0, world_size, 2):
        error = exceptions[rank]
        assert type(error) is PeerTimeoutError, repr(error)
        assert (error.operator, error.rank, error.peer, error.timeout_s) == ("ep_dispatch", rank, 1, timeout_s)
        assert error.seen < error.expected
