"""Tuning ep_dispatch, ep_combine and all_to_all, and calls that take what was tuned."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, explain
from tdkernels.autotune import selection
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.experts.dispatch import counted as counted_routing
from tdkernels.ops.experts.dispatch import counting, low_latency
from tdkernels.ops.experts.dispatch import launch as ep_launch
from tdkernels.ops.experts.dispatch import route as ep_route
from tdkernels.ops.experts.dispatch.config import default_config
from tdkernels.ops.experts.dispatch.token_buckets import bucket, crossing_share, sure_capacity, tokens_of
from tdkernels.ops.experts.dispatch.torch_backend import TorchRouting
from tdkernels.runtime import gpu
from tdkernels.symm.group import group_state
from tests.autotune import expert_support
from tests.autotune.entries import cache_in
from tests.autotune.expert_support import entry_of
from tests.autotune.test_selection import counted, tables_in, tune_by_hand
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32, Routed
from tests.support.aot import recorded_launches
from tests.support.ranks import a_group, device, on_ranks
from tests.support.routing import planned

TUNED = EpConfig(num_senders=1, num_receivers=2, chunk_tokens=4, block_bytes=16384, num_warps=2)
BACK = EpConfig(num_senders=2, num_receivers=1, block_bytes=8192, num_warps=2)
BY_TORCH = EpConfig(method="torch")
EXPLICIT = EpConfig(num_senders=1, num_receivers=1, chunk_tokens=8, block_bytes=32768, num_warps=1)
OPERATORS = ["all_to_all", "ep_combine", "ep_dispatch"]
# Tokens of all ranks, H, experts, choices.
PROBLEMS = [
    ("ep_dispatch", (8, 16, 4, 2), "exact", BF16), ("ep_dispatch", (8, 130, 4, 2), "static_fp8", BF16),
    ("ep_dispatch", (8, 16, 4, 2), "bounded_fp8", BF16),
    ("ep_combine", (8, 16, 4, 2), "static", FP32), ("all_to_all", (7, 16, 4), "exact", FP16),
    ("all_to_all", (8, 16, 4), "bounded", BF16),
]


def are_tuned(folder):
    with cache_in(folder / f"rank{dist.get_rank()}"):
        return [
            expert_support.tunes(operator, shape, layout, TUNED, dtype) for operator, shape, layout, dtype in PROBLEMS
        ]


def test_all_ranks_find_the_same(tmp_path):
    first, second = on_ranks(2, are_tuned, tmp_path)
    assert first == second


BAD = [
    (("ep_dispatch", 8, 16, 5, 2), {}, "ep_dispatch: EXPERTS = 5 is not divisible by 2 ranks"),
    (("ep_combine", 8, 16, 4, 5), {}, "ep_combine: a token has at most EXPERTS = 4 choices, not 5"),
    (("ep_combine", 8, 16, 4, 2), {"layout": "exact_fp8"}, "layout must be one of exact, static, not 'exact_fp8'"),
    (("ep_dispatch", 8, 16, 4), {}, "4 positive sizes, TOKENS x HIDDEN x EXPERTS x CHOICES, not (8, 16, 4)"),
    (("all_to_all", 8, 16, 4, 1), {}, "3 positive sizes, TOKENS x HIDDEN x EXPERTS, not (8, 16, 4, 1)"),
    (("all_to_all", 8, 16, 4), {"dtype": torch.float8_e4m3fn}, "dtype must be one of"),
    (("group_gemm", 8, 16, 16, 2), {}, "group_gemm: it runs on one rank: tune it in a group of one (--nproc 1)"),
]


def test_problems_that_there_are_not():
    on_ranks(2, expert_support.are_refused, BAD)


# ---- what a call takes ----


def a_case(tokens, **changes):
    return Routed(tokens, **{**dict(k=2, experts=4, width=16, dtype=BF16), **changes})


def there_and_back(case, group, config=None, **options):
    """The configs that a dispatch, its combine and their backwards ran with."""
    launches = (
        (ep_launch, "launch_dispatch", lambda args, options: args[0].config),
        (ep_launch, "launch_combine", lambda args, options: args[2]),
    )
    x, weights = case.x.clone().requires_grad_(), case.weights.nan_to_num().requires_grad_()
    with expert_support.recorded(*launches) as ran:
        recv, handle = tdkernels.ep_dispatch(
            x, case.ids, weights, num_experts=case.experts, group=group, config=config, **options
        )
        rows = recv.x[: int(recv.splits.sum())].detach()
        assert torch.equal(rows.cpu(), case.received(case.all_x))
        expert_out = case.expert_out()
        if options:
            expert_out = torch.cat([expert_out, expert_out.new_full((len(recv.x) - len(rows), case.x.shape[1]), 9.0)])
        y = tdkernels.ep_combine(expert_out, handle, group=group)
        case.check_combined(y.detach())
    return [config for _, config in ran]


def take_the_entry(folder):
    """With other numbers of tokens on each rank, that change on one rank alone; later calls ask nobody."""
    with a_group() as group, tables_in(folder):
        tune_by_hand(
            *(entry_of(TUNED, "ep_dispatch", (tokens, 16, 4, 2), "exact", dtype="bfloat16") for tokens in (4, 16)),
            entry_of(BACK, "ep_combine", (8, 16, 4, 2), "exact", dtype="bfloat16"),
        )
        state = group_state(group)
        assert there_and_back(a_case([3, 5]), group) == [TUNED, BACK]
        problems = {problem.operator: problem for problem, _ in state.choices}
        assert problems["ep_dispatch"].shape[1:] == problems["ep_combine"].shape[1:] == (16, 4, 2)
        case = a_case([4, 5], seed=1)
        there_and_back(case, group)  # perhaps the next power of two
        known = dict(state.choices)
        with counted(state, "exchange") as exchanges, counted(selection, "look_up") as lookups:
            assert there_and_back(case, group) == [TUNED, BACK] and (exchanges, lookups) == ([0], [0])
        # What a dispatch was given is its combine's, too; then nothing is chosen.
        assert there_and_back(a_case([5, 0], seed=2), group, config=EXPLICIT) == [EXPLICIT] * 2
        assert state.choices == known
        # Of calls whose host does not wait for a routing nothing is known yet.
        usual = [default_config(device()), default_config(device(), "ep_combine")]
        assert there_and_back(a_case([3, 5]), group, max_tokens=16) == usual
        tune_by_hand(entry_of(TUNED, "ep_dispatch", (8, 16, 4, 2), "static", dtype="bfloat16"))
        state.choices.clear()
        assert there_and_back(a_case([3, 5]), group, max_tokens=16) == [TUNED, usual[1]]
        # With a bound on the tokens of each rank they are that many; they leave at once, each with a signal of its own.
        usual[0] = replace(default_config(device(), bounded=True), chunk_tokens=1)
        assert there_and_back(a_case([3, 2]), group, max_tokens_per_rank=4) == usual
        tune_by_hand(entry_of(TUNED, "ep_dispatch", (8, 16, 4, 2), "bounded", dtype="bfloat16"))
        state.choices.clear()
        bounded = there_and_back(a_case([3, 2]), group, max_tokens_per_rank=4)
        assert bounded == [replace(TUNED, chunk_tokens=1), usual[1]]
        assert there_and_back(a_case([3, 2], seed=4), group, max_tokens_per_rank=4) == bounded
        asked = explain("ep_dispatch", 8, 16, 4, 2, layout="static", group=group)
        assert (asked.source, asked.config, asked.method, asked.plain_ms) == ("cache", TUNED, "fused", 3.0)
        del group, state


def take_torchs_sequence(folder):
    """Where it was the best, there and back and with gradients; what a graph is to capture goes by our kernels."""
    with a_group() as group, tables_in(folder):
        sizes, exact = (16, 4, 2), {"layout": "exact", "dtype": "bfloat16"}
        tune_by_hand(
            *(entry_of(BY_TORCH, "ep_dispatch", (tokens, *sizes), **exact) for tokens in (4, 8, 16)),
            *(entry_of(BY_TORCH, "all_to_all", (tokens, 16, 2), **exact) for tokens in (4, 8, 16)),
        )
        x, splits = torch.ones(5, 16, dtype=BF16, device=device()), torch.tensor([2, 3], device=device())
        with counted(TorchRouting, "dispatch") as by_torch, counted(ep_route, "route_by_torch") as counts:
            assert there_and_back(a_case([3, 5]), group) == [] and by_torch == [1]
            tdkernels.all_to_all(x, splits, group=group)
            assert by_torch == [2] and counts == [0], "what our kernels have counted is counted again"
            assert len(there_and_back(a_case([3, 5]), group, max_tokens=16)) == 2 and by_torch == [2]
        asked = explain("ep_dispatch", 8, 16, 4, 2, layout="exact", group=group)
        assert (asked.source, asked.config, asked.method) == ("cache", BY_TORCH, "torch")
        del group


def test_a_call_goes_by_torch_where_that_was_the_best(tmp_path):
    on_ranks(2, take_torchs_sequence, tmp_path)


@pytest.mark.parametrize("operator, layout", [
    (operator, layout) for operator in OPERATORS for layout in tunable(operator).layouts
])
def test_torchs_sequence_is_a_candidate_where_the_host_waits_anyway(operator, layout):
    op, sizes = tunable(operator), (16, 64, 4) if operator == "all_to_all" else (16, 64, 4, 2)
    problem = Problem(operator, "cpu", 2, 2, "bfloat16", layout, sizes)
    if operator == "ep_combine":  # what has come by our kernels goes back by them
        assert op.plain() is None and op.illegal(BY_TORCH, problem, torch.device("cpu")) is not None
    else:
        assert op.plain() == BY_TORCH
        assert (op.illegal(BY_TORCH, problem, torch.device("cpu")) is None) == layout.startswith("exact")


def test_a_call_takes_what_was_tuned(tmp_path):
    on_ranks(2, take_the_entry, tmp_path)


def choose_between_ranks_without_tokens(folder):
    with a_group() as group, tables_in(folder):
        for tokens in ([0, 0], [0, 3]):
            there_and_back(a_case(tokens, dtype=FP32), group)
        del group


def test_ranks_without_tokens(tmp_path):
    on_ranks(2, choose_between_ranks_without_tokens, tmp_path)


def send_rows(folder):
    rank = dist.get_rank()
    x = torch.arange(20.0 * 16).view(20, 16).to(device())[rank * 9 : 9 + rank * 11].bfloat16()
    splits = torch.tensor([[5, 4], [4, 7]][rank], device=device())
    with a_group() as group, tables_in(folder):
        entries = [entry_of(TUNED, "all_to_all", (tokens, 16, 2), "exact", dtype="bfloat16") for tokens in (8, 32)]
        codes = [entry_of(BACK, "all_to_all", (tokens, 8, 2), "exact", dtype="bfloat16") for tokens in (8, 32)]
        tune_by_hand(*entries, *codes)
        launches = (ep_launch, "launch_dispatch", lambda args, options: args[0].config)
        for payload, expected in ((x, TUNED), (x.to(torch.float8_e4m3fn), BACK)):
            with expert_support.recorded(launches) as ran:
                out, out_splits, _ = tdkernels.all_to_all(payload, splits, group=group)
                back, _, _ = tdkernels.all_to_all(out, out_splits, group=group)
            assert torch.equal(back.view(torch.uint8), payload.view(torch.uint8))
            assert [config for _, config in ran] == [expected] * 2
        assert explain("all_to_all", x[:8], splits, group=group).problem.shape == (16, 16, 2)
        del group


def test_all_to_all_takes_what_was_tuned(tmp_path):
    on_ranks(2, send_rows, tmp_path)


# ---- without ranks ----


@pytest.mark.parametrize("world_size, num_experts, choices", [(2, 4, 2), (2, 2, 1), (4, 64, 6), (8, 256, 8), (3, 9, 9)])
def test_the_tokens_that_a_routing_stands_for(world_size, num_experts, choices):
    """Evenly routed tokens of any number, with a few more on the fullest rank, are taken for what they are."""
    for tokens in (8, 128, 1000, 4096):
        staged = tokens * (world_size - 1) * crossing_share(world_size, num_experts, choices)
        for more in (1.0, 1.05):
            found = tokens_of(round(more * staged), None, world_size, num_experts, choices)
            assert found in (bucket(world_size * tokens), bucket(world_size * tokens) // 2)
            exact = world_size * tokens
            assert found == exact or exact & (exact - 1), "a power of two"
        capacity = sure_capacity(world_size * tokens, world_size, num_experts, choices)
        assert tokens_of(capacity, capacity, world_size, num_experts, choices) == bucket(world_size * tokens)
    of_nothing = tokens_of(0, None, world_size, num_experts, choices)
    assert of_nothing == tokens_of(1, None, world_size, num_experts, choices) <= 4
    assert tokens_of(1, 1, world_size, num_experts, choices) == 1


def test_share_of_tokens_that_cross():
    ids = torch.rand(20000, 12).argsort(1)[:, :3]
    assert crossing_share(4, 12, 3) == pytest.approx((ids < 3).any(1).float().mean().item(), abs=0.02)
    assert crossing_share(2, 4, 4) == 1.0


def test_calls_go_by_powers_of_two():
    op = tunable("ep_combine")
    problem = Problem("ep_combine", "cpu", 2, 2, "bfloat16", "exact", (700, 16, 4, 2))
    assert op.key(problem).shape == (1024, 16, 4, 2) and op.key(op.key(problem)) == op.key(problem)


def test_operands_do_not_tell_how_many_experts_there_are():
    with pytest.raises(ValueError, match="ep_dispatch: operands do not determine all of its sizes; give them"):
        explain("ep_dispatch", (4, 16), (4, 2), world_size=2)
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    assert explain("ep_dispatch", 8, 16, 4, 2, world_size=2).config == default_config(here)
    with pytest.raises(ValueError, match="group_gemm: it runs on one rank: .*, ask with world_size=1"):
        explain("group_gemm", 8, 16, 16, 2, world_size=2)


SIZES = [(2, 128, 1024, 8, 2), (8, 1024, 7168, 256, 8), (8, 65536, 7168, 256, 8), (4, 4, 64, 4, 1)]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", ["exact", "static"])
def test_estimates(operator, layout):
    sizes = [(size[0], layout, *size[1 : 4 if operator == "all_to_all" else 5]) for size in SIZES]
    with expert_support.an_h200():
        expert_support.estimates_are_sensible(operator, sizes)


def test_codes_take_less_on_the_wire():
    with expert_support.an_h200():
        op = tunable("ep_dispatch")
        of = {
            layout: Problem("ep_dispatch", "NVIDIA H200", 8, 8, "bfloat16", layout, (32768, 7168, 256, 8))
            for layout in ("static", "static_fp8")
        }
        # The documents say how many bytes.
        assert op.floors(of["static"]).wire_bytes == pytest.approx(269.80e6, rel=0.01)
        assert op.floors(of["static_fp8"]).wire_bytes == pytest.approx(139.12e6, rel=0.01)
        default = op.default(of["static"], expert_support.GPU)
        assert op.estimate_ms(default, of["static_fp8"], expert_support.H200) < op.estimate_ms(
            default, of["static"], expert_support.H200
        )


def compiled_and_launched(operator, layout, launch, *launchers, config=TUNED):
    """Of one problem: what a call would launch last, and what the tuner compiles for it."""
    op = tunable(operator)
    sizes = {"all_to_all": (16, 64, 4), "group_gemm": (64, 128, 64, 4)}.get(operator, (16, 64, 4, 2))
    ranks = 1 if op.alone else 2
    problem = Problem(operator, "cpu", ranks, ranks, "bfloat16", layout, sizes)
    with pytest.MonkeyPatch.context() as patch, recorded_launches(*launchers, 2) as launches:
        patch.setattr(gpu, "has_tma", lambda device: True)
        patch.setattr(gpu, "converts_to_e4m3", lambda device: True)
        operands = op.operands(problem, torch.device("cpu"), torch.Generator())
        launch(problem, *operands)
        launched = launches[-1]
        launches.clear()
        op.compile([tensor.to("meta") for tensor in operands], problem, config)
        assert len(launches) == 1
        expert_support.same_code(launched, launches[0])


MODULES = counting, counted_routing, ep_launch, low_latency


def plan_of(problem, ids, **options):
    group = type("Group", (), {"size": lambda self: problem.world_size})()
    return planned(group, ids, problem.shape[2], TUNED, problem.operator, max_tokens=32, **options)


def route(problem, ids):
    return counting.count(*plan_of(problem, ids))


def low_latency_route(problem, ids, **options):
    plan, request = plan_of(problem, ids, max_tokens_per_rank=len(ids), **options)
    return low_latency.route_low_latency(low_latency.plan_low_latency(plan), request)


@pytest.mark.parametrize("layout", ["static", "static_fp8"])
def test_a_dispatch_is_compiled_ahead(layout):
    def launch(problem, x, ids, weights):
        route(problem, ids).dispatch(x, weights=weights, quantize=layout == "static_fp8")

    compiled_and_launched("ep_dispatch", layout, launch, MODULES)


@pytest.mark.parametrize("layout", ["bounded", "bounded_fp8"])
def test_a_direct_dispatch_is_compiled_ahead(layout):
    def launch(problem, x, ids, weights):
        low_latency_route(problem, ids).dispatch(x, weights=weights, quantize=layout == "bounded_fp8")

    compiled_and_launched("ep_dispatch", layout, launch, MODULES)


def test_what_is_direct_is_a_candidate_beside_what_is_counted_first():
    with expert_support.an_h200():
        op = tunable("ep_dispatch")
        for tokens, most in ((128, True), (1024, True), (2048, False)):
            problem = Problem("ep_dispatch", "h200", 8, 8, "bfloat16", "bounded_fp8", (8 * tokens, 7168, 256, 8))
            direct = [config for config in op.space(problem, torch.device("cuda")) if config.direct_tokens >= tokens]
            counted = [config for config in op.space(problem, torch.device("cuda")) if config.direct_tokens == 0]
            assert counted and bool(direct) == most
            assert {config.chunk_tokens for config in direct} <= {1} < {config.chunk_tokens for config in counted}


def test_a_combine_is_compiled_ahead():
    def launch(problem, x, ids, weights):
        routing = route(problem, ids)
        rows, _, row_weights = routing.dispatch(x, weights=weights)
        routing.combine(rows, weights=weights, row_weights=row_weights)

    compiled_and_launched("ep_combine", "static", launch, MODULES)


def test_an_all_to_all_is_compiled_ahead():
    def launch(problem, x, splits):
        route(problem, torch.zeros(len(x), 1, dtype=torch.int64)).dispatch(x)

    compiled_and_launched("all_to_all", "static", launch, MODULES)


def test_a_direct_all_to_all_is_compiled_ahead():
    def launch(problem, x, splits):
        ids, code = torch.zeros(len(x), 1, dtype=torch.int64), torch.zeros((), dtype=torch.int32)
        low_latency_route(problem, ids, by_source=True, error_code=code).dispatch(x)

    compiled_and_launched("all_to_all", "bounded", launch, MODULES)
