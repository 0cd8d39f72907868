"""Tuning ep_dispatch, ep_combine and all_to_all, and calls that use the tuned configs."""

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
from tests.autotune.selection_support import count_calls, store_entries, tables_in
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32, Routed
from tests.support.aot import recorded_launches
from tests.support.ranks import a_group, device, on_ranks
from tests.support.routing import planned

TUNED = EpConfig(num_senders=1, num_receivers=2, chunk_tokens=4, block_bytes=16384, num_warps=2)
COMBINE_CONFIG = EpConfig(num_senders=2, num_receivers=1, block_bytes=8192, num_warps=2)
TORCH = EpConfig(method="torch")
EXPLICIT = EpConfig(num_senders=1, num_receivers=1, chunk_tokens=8, block_bytes=32768, num_warps=1)
OPERATORS = ["all_to_all", "ep_combine", "ep_dispatch"]
# Operator, sizes (tokens of all ranks, H, experts, top-k), layout, dtype.
PROBLEMS = [
    ("ep_dispatch", (8, 16, 4, 2), "exact", BF16), ("ep_dispatch", (8, 130, 4, 2), "static_fp8", BF16),
    ("ep_dispatch", (8, 16, 4, 2), "bounded_fp8", BF16),
    ("ep_combine", (8, 16, 4, 2), "static", FP32), ("all_to_all", (7, 16, 4), "exact", FP16),
    ("all_to_all", (8, 16, 4), "bounded", BF16),
]


def tune_all(folder):
    with cache_in(folder / f"rank{dist.get_rank()}"):
        return [
            expert_support.check_tune(operator, shape, layout, TUNED, dtype)
            for operator, shape, layout, dtype in PROBLEMS
        ]


def test_all_ranks_find_the_same_entries(tmp_path):
    first, second = on_ranks(2, tune_all, tmp_path)
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


def test_bad_problems_are_rejected():
    on_ranks(2, expert_support.check_rejected, BAD)


# ---- calls use tuned configs ----


def make_case(tokens, **changes):
    return Routed(tokens, **{**dict(k=2, experts=4, width=16, dtype=BF16), **changes})


def round_trip_configs(case, group, config=None, **options):
    """Run and check a dispatch and its combine; return the configs of the launches."""
    launches = (
        (ep_launch, "launch_dispatch", lambda args, options: args[0].config),
        (ep_launch, "launch_combine", lambda args, options: args[2]),
    )
    x, weights = case.x.clone().requires_grad_(), case.weights.nan_to_num().requires_grad_()
    with expert_support.record_configs(*launches) as ran:
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


def check_tuned_configs(folder):
    """Check the selected configs for token counts that differ between ranks and change on one rank only.

    Repeated calls select without communication.
    """
    with a_group() as group, tables_in(folder):
        store_entries(
            *(entry_of(TUNED, "ep_dispatch", (tokens, 16, 4, 2), "exact", dtype="bfloat16") for tokens in (4, 16)),
            entry_of(COMBINE_CONFIG, "ep_combine", (8, 16, 4, 2), "exact", dtype="bfloat16"),
        )
        state = group_state(group)
        assert round_trip_configs(make_case([3, 5]), group) == [TUNED, COMBINE_CONFIG]
        problems = {problem.operator: problem for problem, _ in state.choices}
        assert problems["ep_dispatch"].shape[1:] == problems["ep_combine"].shape[1:] == (16, 4, 2)
        case = make_case([4, 5], seed=1)
        round_trip_configs(case, group)  # the bucket of tokens may change
        known = dict(state.choices)
        with count_calls(state, "exchange") as exchanges, count_calls(selection, "look_up") as lookups:
            assert round_trip_configs(case, group) == [TUNED, COMBINE_CONFIG] and (exchanges, lookups) == ([0], [0])
        # An explicit config of the dispatch also applies to its combine, and nothing is selected.
        assert round_trip_configs(make_case([5, 0], seed=2), group, config=EXPLICIT) == [EXPLICIT] * 2
        assert state.choices == known
        # With max_tokens the layout is "static", which has no entries yet.
        defaults = [default_config(device()), default_config(device(), "ep_combine")]
        assert round_trip_configs(make_case([3, 5]), group, max_tokens=16) == defaults
        store_entries(entry_of(TUNED, "ep_dispatch", (8, 16, 4, 2), "static", dtype="bfloat16"))
        state.choices.clear()
        assert round_trip_configs(make_case([3, 5]), group, max_tokens=16) == [TUNED, defaults[1]]
        # With max_tokens_per_rank the problem has W x 4 = 8 tokens. A low-latency dispatch signals each token.
        defaults[0] = replace(default_config(device(), bounded=True), chunk_tokens=1)
        assert round_trip_configs(make_case([3, 2]), group, max_tokens_per_rank=4) == defaults
        store_entries(entry_of(TUNED, "ep_dispatch", (8, 16, 4, 2), "bounded", dtype="bfloat16"))
        state.choices.clear()
        bounded = round_trip_configs(make_case([3, 2]), group, max_tokens_per_rank=4)
        assert bounded == [replace(TUNED, chunk_tokens=1), defaults[1]]
        assert round_trip_configs(make_case([3, 2], seed=4), group, max_tokens_per_rank=4) == bounded
        result = explain("ep_dispatch", 8, 16, 4, 2, layout="static", group=group)
        assert (result.source, result.config, result.method, result.plain_ms) == ("cache", TUNED, "fused", 3.0)
        del group, state


def check_torch_config(folder):
    """Check that calls use the torch backend if it was the fastest; with max_tokens they use the Triton kernels."""
    with a_group() as group, tables_in(folder):
        sizes, exact = (16, 4, 2), {"layout": "exact", "dtype": "bfloat16"}
        store_entries(
            *(entry_of(TORCH, "ep_dispatch", (tokens, *sizes), **exact) for tokens in (4, 8, 16)),
            *(entry_of(TORCH, "all_to_all", (tokens, 16, 2), **exact) for tokens in (4, 8, 16)),
        )
        x, splits = torch.ones(5, 16, dtype=BF16, device=device()), torch.tensor([2, 3], device=device())
        with count_calls(TorchRouting, "dispatch") as dispatches, count_calls(ep_route, "route_by_torch") as counts:
            assert round_trip_configs(make_case([3, 5]), group) == [] and dispatches == [1]
            tdkernels.all_to_all(x, splits, group=group)
            assert dispatches == [2] and counts == [0], "tokens counted by the kernels are not counted again"
            assert len(round_trip_configs(make_case([3, 5]), group, max_tokens=16)) == 2 and dispatches == [2]
        result = explain("ep_dispatch", 8, 16, 4, 2, layout="exact", group=group)
        assert (result.source, result.config, result.method) == ("cache", TORCH, "torch")
        del group


def test_call_uses_the_torch_backend_if_it_was_fastest(tmp_path):
    on_ranks(2, check_torch_config, tmp_path)


@pytest.mark.parametrize("operator, layout", [
    (operator, layout) for operator in OPERATORS for layout in tunable(operator).layouts
])
def test_torch_is_a_candidate_only_for_exact_layouts(operator, layout):
    op, sizes = tunable(operator), (16, 64, 4) if operator == "all_to_all" else (16, 64, 4, 2)
    problem = Problem(operator, "cpu", 2, 2, "bfloat16", layout, sizes)
    if operator == "ep_combine":  # a combine uses the backend of its dispatch
        assert op.plain() is None and op.illegal(TORCH, problem, torch.device("cpu")) is not None
    else:
        assert op.plain() == TORCH
        assert (op.illegal(TORCH, problem, torch.device("cpu")) is None) == layout.startswith("exact")


def test_call_uses_tuned_config(tmp_path):
    on_ranks(2, check_tuned_configs, tmp_path)


def check_ranks_without_tokens(folder):
    with a_group() as group, tables_in(folder):
        for tokens in ([0, 0], [0, 3]):
            round_trip_configs(make_case(tokens, dtype=FP32), group)
        del group


def test_ranks_without_tokens(tmp_path):
    on_ranks(2, check_ranks_without_tokens, tmp_path)


def check_all_to_all(folder):
    rank = dist.get_rank()
    x = torch.arange(20.0 * 16).view(20, 16).to(device())[rank * 9 : 9 + rank * 11].bfloat16()
    splits = torch.tensor([[5, 4], [4, 7]][rank], device=device())
    with a_group() as group, tables_in(folder):
        entries = [entry_of(TUNED, "all_to_all", (tokens, 16, 2), "exact", dtype="bfloat16") for tokens in (8, 32)]
        fp8 = [entry_of(COMBINE_CONFIG, "all_to_all", (tokens, 8, 2), "exact", dtype="bfloat16") for tokens in (8, 32)]
        store_entries(*entries, *fp8)
        launches = (ep_launch, "launch_dispatch", lambda args, options: args[0].config)
        for payload, expected in ((x, TUNED), (x.to(torch.float8_e4m3fn), COMBINE_CONFIG)):
            with expert_support.record_configs(launches) as ran:
                out, out_splits, _ = tdkernels.all_to_all(payload, splits, group=group)
                back, _, _ = tdkernels.all_to_all(out, out_splits, group=group)
            assert torch.equal(back.view(torch.uint8), payload.view(torch.uint8))
            assert [config for _, config in ran] == [expected] * 2
        assert explain("all_to_all", x[:8], splits, group=group).problem.shape == (16, 16, 2)
        del group


def test_all_to_all_uses_tuned_config(tmp_path):
    on_ranks(2, check_all_to_all, tmp_path)


# ---- without ranks ----


@pytest.mark.parametrize("world_size, num_experts, choices", [(2, 4, 2), (2, 2, 1), (4, 64, 6), (8, 256, 8), (3, 9, 9)])
def test_tokens_of_a_routing(world_size, num_experts, choices):
    """tokens_of recovers the number of tokens from even routings, also if the fullest rank has 5% more."""
    for tokens in (8, 128, 1000, 4096):
        staged = tokens * (world_size - 1) * crossing_share(world_size, num_experts, choices)
        for more in (1.0, 1.05):
            found = tokens_of(round(more * staged), None, world_size, num_experts, choices)
            assert found in (bucket(world_size * tokens), bucket(world_size * tokens) // 2)
            exact = world_size * tokens
            assert found == exact or exact & (exact - 1), "a power of two"
        capacity = sure_capacity(world_size * tokens, world_size, num_experts, choices)
        assert tokens_of(capacity, capacity, world_size, num_experts, choices) == bucket(world_size * tokens)
    without_tokens = tokens_of(0, None, world_size, num_experts, choices)
    assert without_tokens == tokens_of(1, None, world_size, num_experts, choices) <= 4
    assert tokens_of(1, 1, world_size, num_experts, choices) == 1


def test_crossing_share():
    ids = torch.rand(20000, 12).argsort(1)[:, :3]
    assert crossing_share(4, 12, 3) == pytest.approx((ids < 3).any(1).float().mean().item(), abs=0.02)
    assert crossing_share(2, 4, 4) == 1.0


def test_key_rounds_tokens_up_to_a_power_of_two():
    op = tunable("ep_combine")
    problem = Problem("ep_combine", "cpu", 2, 2, "bfloat16", "exact", (700, 16, 4, 2))
    assert op.key(problem).shape == (1024, 16, 4, 2) and op.key(op.key(problem)) == op.key(problem)


def test_operands_do_not_determine_the_number_of_experts():
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
    with expert_support.fake_h200():
        expert_support.check_estimates(operator, sizes)


def test_fp8_reduces_wire_bytes():
    with expert_support.fake_h200():
        op = tunable("ep_dispatch")
        problems = {
            layout: Problem("ep_dispatch", "NVIDIA H200", 8, 8, "bfloat16", layout, (32768, 7168, 256, 8))
            for layout in ("static", "static_fp8")
        }
        # These byte counts are also in the documentation.
        assert op.floors(problems["static"]).wire_bytes == pytest.approx(269.80e6, rel=0.01)
        assert op.floors(problems["static_fp8"]).wire_bytes == pytest.approx(139.12e6, rel=0.01)
        default = op.default(problems["static"], expert_support.GPU)
        assert op.estimate_ms(default, problems["static_fp8"], expert_support.H200) < op.estimate_ms(
            default, problems["static"], expert_support.H200
        )


def check_compiled_ahead(operator, layout, launch, *launchers, config=TUNED):
    """Check that the tuner compiles the kernel that ``launch`` launches last."""
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
        expert_support.assert_same_code(launched, launches[0])


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
def test_dispatch_is_compiled_ahead(layout):
    def launch(problem, x, ids, weights):
        route(problem, ids).dispatch(x, weights=weights, quantize=layout == "static_fp8")

    check_compiled_ahead("ep_dispatch", layout, launch, MODULES)


@pytest.mark.parametrize("layout", ["bounded", "bounded_fp8"])
def test_low_latency_dispatch_is_compiled_ahead(layout):
    def launch(problem, x, ids, weights):
        low_latency_route(problem, ids).dispatch(x, weights=weights, quantize=layout == "bounded_fp8")

    check_compiled_ahead("ep_dispatch", layout, launch, MODULES)


def test_low_latency_candidates_for_few_tokens():
    with expert_support.fake_h200():
        op = tunable("ep_dispatch")
        for tokens, expected in ((128, True), (1024, True), (2048, False)):
            problem = Problem("ep_dispatch", "h200", 8, 8, "bfloat16", "bounded_fp8", (8 * tokens, 7168, 256, 8))
            space = op.space(problem, torch.device("cuda"))
            low_latency = [config for config in space if config.direct_tokens >= tokens]
            two_phase = [config for config in space if config.direct_tokens == 0]
            assert two_phase and bool(low_latency) == expected
            chunks = [{config.chunk_tokens for config in configs} for configs in (low_latency, two_phase)]
            assert chunks[0] <= {1} < chunks[1]


def test_combine_is_compiled_ahead():
    def launch(problem, x, ids, weights):
        routing = route(problem, ids)
        rows, _, row_weights = routing.dispatch(x, weights=weights)
        routing.combine(rows, weights=weights, row_weights=row_weights)

    check_compiled_ahead("ep_combine", "static", launch, MODULES)


def test_all_to_all_is_compiled_ahead():
    def launch(problem, x, splits):
        route(problem, torch.zeros(len(x), 1, dtype=torch.int64)).dispatch(x)

    check_compiled_ahead("all_to_all", "static", launch, MODULES)


def test_low_latency_all_to_all_is_compiled_ahead():
    def launch(problem, x, splits):
        ids, code = torch.zeros(len(x), 1, dtype=torch.int64), torch.zeros((), dtype=torch.int32)
        low_latency_route(problem, ids, by_source=True, error_code=code).dispatch(x)

    check_compiled_ahead("all_to_all", "bounded", launch, MODULES)
