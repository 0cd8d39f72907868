"""Test bodies for the synchronization between ranks in dispatch and combine. Every rank runs them.

test_dispatch_ranks.py starts them: memory reuse, groups, disagreement, and late or missing peers.
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

# Few kinds, since each is compiled on a GPU. Calls of a kind differ in the routing and the number of tokens.
KINDS = [
    dict(k=2, experts_each=2, width=24, dtype=BF16, changes=SMALL),
    dict(k=1, experts_each=4, width=7, dtype=FP32, changes={**SMALL, "combine": "per_expert"}),
    dict(k=3, experts_each=4, width=80, dtype=FP16, changes=None),
]


def dispatch_and_combine(case, changes=None, group=None, **options):
    """Run a dispatch and a combine and check the results."""
    config = config_of(changes)
    recv, handle = case.dispatch(config=config, group=group, **options)
    y = tdkernels.ep_combine(case.expert_out(), handle, group=group)
    case.check_received(recv)
    case.check_combined(y, combine=config.combine if config else "per_rank")


def padded(rows, capacity):
    """Return rows padded with NaN to [capacity, …], or the rows themselves if capacity is None."""
    if capacity is None:
        return rows
    out = rows.new_full((capacity, *rows.shape[1:]), torch.nan)
    out[: len(rows)] = rows
    return out


def two_phase_dispatch(case, config, _rng):
    return *case.dispatch(config=config), None


def stress(calls, most_tokens, seed, dispatch=two_phase_dispatch):
    """Make random calls, with random delays on each rank, and fill all memory with NaN in between.

    Args:     dispatch: (case, config, the RNG shared by all ranks) -> recv, handle, capacity of recv.x or None
    """
    world_size = dist.get_world_size()
    rng, rank_rng = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for _ in range(calls):
        kind = rng.choice(KINDS)
        tokens = [rng.choice([0, 1, rng.randrange(most_tokens + 1)]) for _ in range(world_size)]
        case = Routed(
            tokens, kind["k"], kind["experts_each"] * world_size, kind["width"], kind["dtype"],
            ids=rng.choice(["any", "any", "distinct", "one", "last", "none"]), seed=rng.randrange(1 << 30),
        )
        if rng.random() < 0.2:
            poison()
        time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.01)]))
        recv, handle, capacity = dispatch(case, config_of(kind["changes"]), rng)
        expert_out = padded(case.expert_out(), capacity)
        time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.01)]))
        y = tdkernels.ep_combine(expert_out, handle)
        if rng.random() < 0.2:
            poison()  # results must not alias the workspace
        case.check_received(recv, capacity=capacity)
        case.check_combined(y, combine=(kind["changes"] or {}).get("combine", "per_rank"))


def runs_ahead_of_peers(calls):
    """Make calls with new data back to back, so that ranks run ahead of each other.

    The calls use a handle, since exchanging counts would synchronize the ranks. All dispatches precede all combines.
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
            assignments = case.valid[case.mine].sum(1, keepdim=True).to(BF16)
            assert torch.equal(case.x.grad.cpu(), assignments.expand(case.x.shape)), "dx"
            case.x.grad = None


def grows_workspace(widths):
    """Make calls that need larger and smaller workspaces than the call before."""
    handles = []
    for seed, (tokens, width) in enumerate(widths):
        case = case_of(tokens, 2, 2, width, FP32, seed=seed)
        dispatch_and_combine(case)
        handles.append((case, case.dispatch()[1]))
    for case, handle in handles:  # handles stay valid after the workspace has been replaced
        case.check_combined(tdkernels.ep_combine(case.expert_out(), handle))


# ---- groups ----


def uses_subgroups():
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([2, 3]) as high, a_group([1, 2, 3]) as last_three:
        for _ in range(2):
            for group, members in ((low, [0, 1]), (high, [2, 3]), (last_three, [1, 2, 3])):
                if rank in members:
                    own, tokens = members.index(rank), [3 + members[0], 1, 2][: len(members)]
                    case = Routed(tokens, 2, 2 * len(members), 16, seed=members[0], rank=own)
                    dispatch_and_combine(case, group=group)
        case = case_of(2, 2, 1, 8)
        if rank != 0:
            case = Routed([2] * 3, 2, 3, 8, rank=rank - 1)
            _, handle = case.dispatch(group=last_three)
            for call, message in (
                (lambda: tdkernels.ep_combine(case.expert_out(), handle), "of another group than the call"),
                (lambda: tdkernels.ep_dispatch(case.x, handle), "of another group"),
            ):
                error = failure_of(call)
                assert type(error) is ValueError and message in str(error), repr(error)
        del low, high, last_three, group


def uses_a_mesh():
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "ep"))
    for name, other in (("ep", "dp"), ("dp", "ep")):
        case = Routed([3, 5], 2, 4, 16, seed=mesh.get_local_rank(other), rank=mesh.get_local_rank(name))
        dispatch_and_combine(case, group=mesh[name])


# ---- ranks that disagree ----

BASE_SPEC = dict(k=2, experts=6, width=16, dtype=BF16)
# Changes of the case and the options of rank 1 of three; then the reported field, its value on rank 1 and elsewhere.
DISAGREEMENTS = {
    "width": (dict(width=24), {}, "width", 24, 16),
    "dtype": (dict(dtype=FP32), {}, "dtype", '"torch.float32"', '"torch.bfloat16"'),
    "k": (dict(k=3), {}, "k", 3, 2),
    "num_experts": (dict(experts=9), {}, "num_experts", 9, 6),
    "max_tokens": ({}, {"max_tokens": 50}, "max_tokens", 50, "null"),
    "other max_tokens": ({}, {"max_tokens": 50}, "max_tokens", 50, 60),
    "quantize": ({}, {"quantize": "fp8"}, "quantize", "true", "false"),
    "scales": ({}, {"scales": True}, "scales", 8, 0),
    "weights": ({}, {"weighted": False}, "weighted", "false", "true"),
    "combine": ({}, {"config": {**SMALL, "combine": "per_expert"}}, "config", "per_expert", "per_rank"),
    "chunks": ({}, {"config": {**SMALL, "chunk_tokens": 2}}, "config", "chunk_tokens=2", "chunk_tokens=1"),
}


def reports_disagreement(what):
    """Every rank reports the disagreement, and the group stays usable."""
    changes, options, field, odd_value, common_value = DISAGREEMENTS[what]
    differs = dist.get_rank() == 1
    case = Routed([3] * 3, **{**BASE_SPEC, **(changes if differs else {})})
    base_case = Routed([3] * 3, **BASE_SPEC)
    options = dict(options) if differs else {}
    if what == "other max_tokens" and not differs:
        options["max_tokens"] = 60
    if options.pop("scales", False):
        options["scales"] = torch.ones(3, 2, device=device())
    options["config"] = config_of(options.pop("config", SMALL))
    with a_group() as group:
        error = failure_of(case.dispatch, group=group, **options)
        check_disagreement(error, field, odd_value, common_value)
        dispatch_and_combine(base_case, group=group)
        del group


def check_disagreement(error, field, odd_value, common_value, operator="ep_dispatch"):
    assert type(error) is ValueError, repr(error)
    for part in (f"{operator}: the ranks disagree", f"{field} is ", f"{common_value}", "on ranks 0, 2", f"{odd_value}"):
        assert part in str(error), f"{part} in {error}"
    assert "on rank 1" in str(error), str(error)


def reports_disagreement_in_combine(what):
    case = Routed([3] * 3, **BASE_SPEC)
    differs = dist.get_rank() == 1
    with a_group() as group:
        _, handle = case.dispatch(group=group, weighted=False)
        expert_out = case.expert_out()
        if what == "width":
            error = failure_of(tdkernels.ep_combine, expert_out[:, : 8 + 8 * differs], handle, group=group)
            expected = "width", 16, 8, "ep_combine"
        elif what == "dtype":
            dtype = FP32 if differs else BF16
            error = failure_of(tdkernels.ep_combine, expert_out.to(dtype), handle, group=group)
            expected = "dtype", '"torch.float32"', '"torch.bfloat16"', "ep_combine"
        else:
            config = config_of({**SMALL, "combine": "per_expert" if differs else "per_rank"})
            error = failure_of(tdkernels.ep_combine, expert_out, handle, group=group, config=config)
            expected = "config", "per_expert", "per_rank"
        check_disagreement(error, *expected)
        case.check_combined(tdkernels.ep_combine(expert_out, handle, group=group), weighted=False)
        dispatch_and_combine(case, group=group)
        del group


def reports_operator_mismatch():
    x, splits = torch.ones(3, 4, device=device()), torch.ones(3, dtype=torch.int32, device=device())
    ids = torch.zeros(3, 1, dtype=torch.int64, device=device())
    with a_group() as group:
        if dist.get_rank() == 1:
            error = failure_of(tdkernels.all_to_all, x, splits, group=group)
        else:
            error = failure_of(tdkernels.ep_dispatch, x, ids, num_experts=3, group=group)
        assert type(error) is ValueError, repr(error)
        assert 'operator is "ep_dispatch" on ranks 0, 2, "all_to_all" on rank 1' in str(error), str(error)
        dispatch_and_combine(Routed([3] * 3, **BASE_SPEC), group=group)
        del group


# Two cached calls each. Rank 1 then makes the second and the other ranks make the first.
CACHED_CALLS = {
    "width": (({}, {}), (dict(width=24), {})),
    "k": (({}, {}), (dict(k=3), {})),
    "capacity": (({}, {}), ({}, {"max_tokens": 30})),
    "codes": (({}, {}), ({}, {"quantize": "fp8"})),
    "chunks": (({}, {}), ({}, {"config": config_of({**SMALL, "chunk_tokens": 2})})),
}


def detects_mismatch_of_cached_plans(what):
    """If ranks mix two cached calls, the consensus check is skipped, and the plan ids in the signals reveal it."""
    with a_group() as group:
        variants = [(Routed([3] * 3, **{**BASE_SPEC, **changes}), options) for changes, options in CACHED_CALLS[what]]
        for case, options in variants * 2:
            recv, _ = case.dispatch(group=group, **options)
            tdkernels.synchronize()
            if "quantize" not in options:
                case.check_received(recv, capacity=options.get("max_tokens"))
        dist.barrier()
        case, options = variants[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.dispatch, group=group, **options)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and "ep_dispatch" in str(error), repr(error)
        again = failure_of(case.dispatch, group=group, **options)
        assert type(again) is type(error) and str(again) == str(error), f"{again!r} after {error!r}"
        del group


def detects_mismatch_of_cached_combine_plans():
    with a_group() as group:
        case = Routed([3] * 3, **BASE_SPEC)
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


# ---- late and missing ranks ----


def loses_rank_1(leave, when, timeout_s):
    """Rank 1 dies before it sends the counts, the tokens or the sums; the others time out, in later calls as well."""
    case = case_of(3, 2, 2, 16)
    for _ in range(2):
        dispatch_and_combine(case)
    tdkernels.set_timeout(timeout_s)
    expert_out = case.expert_out()
    handle = case.dispatch()[1] if when == "combine" else None
    dist.barrier()
    if dist.get_rank() == 1:
        if when == "dispatch":  # the other ranks have all counts and wait for tokens
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


def times_out_on_rank_0(when):
    """Rank 1 is late, and rank 0 times out first. Ranks that need data from rank 0 must not get a result."""
    rank = dist.get_rank()
    with a_group() as group:
        case = Routed([3] * 3, **BASE_SPEC)
        for _ in range(2):
            dispatch_and_combine(case, group=group)
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
    """Check that all ranks except rank 1, which was killed, raised PeerTimeoutError in ``ep_dispatch``."""
    exceptions = caught.value.exceptions
    assert isinstance(exceptions[1], ChildProcessError)
    for rank in range(0, world_size, 2):
        error = exceptions[rank]
        assert type(error) is PeerTimeoutError, repr(error)
        assert (error.operator, error.rank, error.peer, error.timeout_s) == ("ep_dispatch", rank, 1, timeout_s)
        assert error.seen < error.expected
