"""Tuning ep_moe: selection between the fused and the sequential method, use of tuned configs, and cost estimates."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, EpMoeConfig, GroupGemmConfig, Tiles, autotune, explain
from tdkernels.autotune import disk_cache
from tdkernels.autotune.problem import Problem, gpu_name
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.experts.dispatch import counting, route
from tdkernels.ops.experts.dispatch.counted import routing_to_compile
from tdkernels.ops.experts.dispatch.request import DispatchRequest, RoutingShape
from tdkernels.ops.experts.dispatch.token_buckets import sure_capacity
from tdkernels.ops.experts.dispatch.torch_backend import TorchRouting
from tdkernels.ops.experts.ep_moe import config as ep_moe_config
from tdkernels.ops.experts.ep_moe import fused as ep_moe_fused
from tdkernels.ops.experts.ep_moe import launch_dispatch_gemm as ep_moe_launch_dispatch_gemm
from tdkernels.ops.experts.ep_moe import launch_gemm_combine as ep_moe_launch_gemm_combine
from tdkernels.ops.experts.ep_moe import launch_sort as ep_moe_launch_sort
from tdkernels.ops.experts.ep_moe import op as ep_moe
from tdkernels.ops.experts.ep_moe.config import SEQUENCE, layout_of
from tdkernels.runtime import gpu
from tdkernels.symm.group import group_state
from tests.autotune import expert_support
from tests.autotune.entries import cache_in
from tests.autotune.expert_support import entry_of
from tests.autotune.selection_support import count_calls, store_entries, tables_in
from tests.ops.experts.dispatch.oracle import BF16, FP32
from tests.ops.experts.ep_moe.cases import Layer
from tests.support.aot import recorded_launches
from tests.support.ranks import a_group, device, on_ranks
from tests.test_protocol import failure_of

FUSED = EpMoeConfig(gemm=GroupGemmConfig(tiles=Tiles(32, 32, 32, num_warps=4, num_stages=2)), method="fused")
TORCH, EP_TORCH = EpMoeConfig(method="torch"), EpConfig(method="torch")
SIZES = (16, 8, 4, 2)  # H, I, E, k
# Tokens of all ranks, H, I, experts, top-k.
PROBLEMS = [((8, *SIZES), "exact", FP32), ((7, 24, 9, 4, 3), "exact", BF16), ((8, *SIZES), "bounded", FP32)]


def tune_all(folder):
    with cache_in(folder / f"rank{dist.get_rank()}"):
        return [expert_support.check_tune("ep_moe", shape, layout, FUSED, dtype) for shape, layout, dtype in PROBLEMS]


def test_all_ranks_find_the_same_entries(tmp_path):
    first, second = on_ranks(2, tune_all, tmp_path)
    assert first == second


BAD = [
    (("ep_moe", 8, 16, 8, 5, 2), {}, "ep_moe: EXPERTS = 5 is not divisible by 2 ranks"),
    (("ep_moe", 8, 16, 8, 4, 5), {}, "ep_moe: a token has at most EXPERTS = 4 choices, not 5"),
    (("ep_moe", 8, 16, 8, 4, 2), {"layout": "static"}, "layout must be one of exact, bounded, not 'static'"),
    (("ep_moe", 8, 16, 8, 4), {}, "5 positive sizes, TOKENS x HIDDEN x INTERMEDIATE x EXPERTS x CHOICES"),
]


def test_bad_problems_are_rejected():
    on_ranks(2, expert_support.check_rejected, BAD)


# ---- calls use tuned configs ----


def methods_of(layer, group, **options):
    """Run and check a layer; return the configs of fused launches and the number of dispatches by torch.

    With every method the ids are counted once.
    """
    launches = (ep_moe, "ep_moe_fused", lambda args, options: args[-2])
    with contextlib.ExitStack() as stack:
        ran = stack.enter_context(expert_support.record_configs(launches))
        torch_dispatches = stack.enter_context(count_calls(TorchRouting, "dispatch"))
        routes = [stack.enter_context(count_calls(module, "count")) for module in (route, ep_moe_fused, ep_moe_config)]
        routes.append(stack.enter_context(count_calls(route, "route_by_torch")))
        layer.check(layer.run(group=group, **options))
    assert "max_tokens_per_rank" in options or sum(map(sum, routes)) == 1, routes
    return [config for _, config in ran], torch_dispatches[0]


def check_tuned_configs(folder):
    with a_group() as group, tables_in(folder):
        state = group_state(group)
        layer = Layer([3, 5], 2, 2, 16, 8, FP32, group=group)
        assert methods_of(layer, group) == methods_of(layer, group, max_tokens=16) == ([], 0), "not tuned yet"
        for config, expected in ((FUSED, ([FUSED], 0)), (TORCH, ([], 1)), (SEQUENCE, ([], 0))):
            store_entries(*(entry_of(config, "ep_moe", (n, *SIZES), "exact", dtype="float32") for n in (4, 8, 16)))
            state.choices.clear()
            assert methods_of(layer, group) == expected, config
            known = dict(state.choices)
            with count_calls(state, "exchange") as exchanges:
                assert methods_of(layer, group) == expected and exchanges == [0], "no second consensus check"
            assert state.choices == known
        # The sequential method uses the entries of its operators; the fused method ignores them.
        store_entries(
            *(entry_of(EP_TORCH, "ep_dispatch", (n, 16, 4, 2), "exact", dtype="float32") for n in (4, 8, 16))
        )
        state.choices.clear()
        assert methods_of(layer, group) == ([], 1)
        store_entries(*(entry_of(FUSED, "ep_moe", (tokens, *SIZES), "exact", dtype="float32") for tokens in (4, 8, 16)))
        state.choices.clear()
        assert methods_of(layer, group) == ([FUSED], 0)
        # An explicit config wins. Calls whose bounds are not sufficient on all ranks are not fused.
        assert methods_of(layer, group, config=EpMoeConfig(ep=EpConfig())) == ([], 0)
        assert methods_of(layer, group, max_tokens_per_rank=5) == methods_of(layer, group, max_tokens=16) == ([], 0)
        with autotune.mode("off"):
            assert methods_of(layer, group) == ([], 0)
        result = explain("ep_moe", 8, *SIZES, layout="exact", dtype=torch.float32, group=group)
        assert (result.source, result.config, result.method) == ("cache", FUSED, "fused")
        del group, state, layer


def test_call_uses_tuned_config(tmp_path):
    on_ranks(2, check_tuned_configs, tmp_path)


def check_bounded_entry(folder):
    """Check bounded calls if only rank 0 has entries. Selection counts no ids; repeated calls do not communicate."""
    with a_group() as group, tables_in(folder, user=f"rank{dist.get_rank()}"):
        state = group_state(group)
        layer = Layer([3, 5], 2, 2, 16, 8, FP32, group=group)
        bound = {"max_tokens_per_rank": 5}
        exact = [entry_of(FUSED, "ep_moe", (n, *SIZES), "exact", dtype="float32") for n in (4, 8, 16)]
        store_entries(*exact, entry_of(TORCH, "ep_moe", (16, *SIZES), "bounded", dtype="float32"))
        assert methods_of(layer, group, **bound) == ([], 0), "the torch backend would need a host sync"
        store_entries(*(entry_of(FUSED, "ep_moe", (n, *SIZES), "bounded", dtype="float32") for n in (16, 32)))
        state.choices.clear()
        calls = [(bound, True)]
        # max_tokens of 18 is sufficient for all assignments of any rank, 17 is not.
        calls += [({"max_tokens_per_rank": 9, "max_tokens": most}, most >= 18) for most in (18, 17)]
        for bounds, fused in calls:
            assert methods_of(layer, group, **bounds) == ([FUSED] if fused else [], 0), bounds
            known = dict(state.choices)
            with count_calls(state, "exchange") as exchanges, count_calls(route, "route") as routes:
                assert methods_of(layer, group, **bounds) == ([FUSED] if fused else [], 0)
                assert exchanges == [0] and state.choices == known and (not fused or routes == [0])
        assert methods_of(layer, group, max_tokens=18) == ([], 0), "the tokens of other ranks are unknown"
        assert methods_of(layer, group, config=EpMoeConfig(ep=EpConfig()), **bound) == ([], 0)
        assert methods_of(layer, group, config=EpMoeConfig(method="fused"), **bound)[0][0].gemm is None
        with autotune.mode("off"):
            assert methods_of(layer, group, **bound) == ([], 0)
        error = failure_of(layer.call, group=group, max_tokens_per_rank=4) or failure_of(tdkernels.synchronize)
        assert type(error) is ValueError and "max_tokens_per_rank" in str(error), repr(error)
        failure_of(tdkernels.synchronize)
        for tokens in ([0, 0], [5, 0]):
            layer = Layer(tokens, 2, 2, 16, 8, FP32, group=group)
            assert methods_of(layer, group, **bound) == ([FUSED], 0)
        result = explain("ep_moe", 10, *SIZES, layout="bounded", dtype=torch.float32, group=group)
        assert (result.source, result.config) == ("cache", FUSED)
        assert bool(disk_cache.user_entries("ep_moe", gpu_name(device()))) == (dist.get_rank() == 0)
        del group, state, layer


def test_bounded_call_uses_tuned_config(tmp_path):
    on_ranks(2, check_bounded_entry, tmp_path)


def check_compiled_graph(folder):
    with a_group() as group, tables_in(folder):
        store_entries(entry_of(FUSED, "ep_moe", (16, *SIZES), "bounded", dtype="float32"))
        layer = Layer([3, 5], 2, 2, 16, 8, FP32, group=group)
        bound = {"num_experts": layer.experts, "max_tokens_per_rank": 5, "group": group}
        compiled = torch.compile(tdkernels.ep_moe, backend="eager", fullgraph=True)
        with count_calls(ep_moe, "ep_moe_fused") as fused_calls:
            layer.check({"y": compiled(*layer.operands(), **bound)})
            assert fused_calls == [0]
            layer.check({"y": layer.call(max_tokens_per_rank=5, group=group)})
            assert fused_calls == [1]
        del group, layer, bound, compiled


def test_compiled_graph_uses_the_sequential_method(tmp_path):
    on_ranks(2, check_compiled_graph, tmp_path)


def test_method_is_selected_only_if_every_method_can_run():
    """Cases: ranks, nodes, (quantize, max_tokens, max_tokens_per_rank, top-k), layout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_moe_config, "spans_nodes", lambda group: group.nodes > 1)
        for ranks, nodes, call, layout in (
            (2, 1, (None, None, None, 2), "exact"),
            (2, 1, (None, 40, 5, 2), "bounded"),
            (2, 1, (None, 10, 5, 2), "bounded"),
            (2, 1, (None, 9, 5, 2), None),  # a rank may have 10 assignments
            (8, 1, (None, 34, 5, 2), None),  # with 8 ranks, one rank may stage 35 tokens
            (8, 1, (None, 35, 5, 2), "bounded"),
            (2, 1, (None, 40, None, 2), None),
            (2, 1, ("fp8", None, None, 2), None),
            (2, 1, ("fp8", 40, 5, 2), None),
            (1, 1, (None, 40, 5, 2), None),
            (4, 2, (None, 40, 5, 2), None),
        ):
            group = SimpleNamespace(size=lambda ranks=ranks: ranks, nodes=nodes)
            assert layout_of(*call, group) == layout, (ranks, nodes, call)


@pytest.mark.parametrize("ranks, experts, choices", [(2, 4, 2), (8, 64, 8), (8, 8, 8), (4, 4, 1), (3, 6, 6)])
def test_max_tokens_per_rank_alone_allows_every_method(ranks, experts, choices):
    group = SimpleNamespace(size=lambda: ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_moe_config, "spans_nodes", lambda group: False)
        for bound in (1, 7, 4096):
            capacity = sure_capacity(ranks * bound, ranks, experts, choices)
            assert layout_of(None, capacity, bound, choices, group) == "bounded"


def check_ranks_without_tokens(folder):
    """Check that all ranks select the fused method if only some or no ranks have tokens."""
    with a_group() as group, tables_in(folder):
        store_entries(*(entry_of(FUSED, "ep_moe", (2**n, *SIZES), "exact", dtype="bfloat16") for n in range(5)))
        for tokens in ([0, 0], [0, 3], [7, 1]):
            assert methods_of(Layer(tokens, 2, 2, 16, 8, BF16, group=group), group) == ([FUSED], 0)
        del group


def test_ranks_without_tokens(tmp_path):
    on_ranks(2, check_ranks_without_tokens, tmp_path)


# ---- without ranks ----


def test_sizes_of_operands():
    shapes = (5, 16), (5, 2), (5, 2), (2, 16, 16), (2, 16, 8)
    assert tunable("ep_moe").sizes_of(*shapes, world_size=2) == (10, *SIZES)
    for invalid in (shapes[:4], (*shapes[:3], (2, 12, 16), shapes[4]), ((6, 16), *shapes[1:])):
        with pytest.raises(ValueError, match="ep_moe: the operands"):
            tunable("ep_moe").sizes_of(*invalid, world_size=2)
    assert explain("ep_moe", *shapes, world_size=2).config == SEQUENCE


def test_config_round_trip():
    op = tunable("ep_moe")
    for config in (SEQUENCE, TORCH, FUSED, EpMoeConfig(method="fused")):
        assert op.config_from_dict(op.config_to_dict(config)) == config
    parts = EpMoeConfig(EP_TORCH, GroupGemmConfig(method="torch"))  # never a tuning result, but explain must show it
    fields = op.config_to_dict(parts)
    assert (fields["method"], fields["gemm"]) == ("sequence", "torch") and "method=torch" in fields["ep"]
    for values in ({}, {"method": 3}, {"method": "fused", "tiles": 3}, {"method": "fused", "stages": 2},
                   {"method": "fused", "tiles": {"block_m": "64"}}):
        with pytest.raises((TypeError, ValueError)):
            op.config_from_dict(values)


def test_estimates():
    sizes = [(2, 8192, 7168, 2048, 256, 8), (8, 1024, 7168, 2048, 256, 8), (4, 512, 64, 64, 4, 1)]
    with expert_support.fake_h200():
        for layout in tunable("ep_moe").layouts:
            expert_support.check_estimates("ep_moe", [(ranks, layout, *shape) for ranks, *shape in sizes])


def test_bounded_layout_is_estimated_faster():
    """A bound saves the host sync; for few tokens it also saves the sequential method the exchange of counts."""
    op, fused = tunable("ep_moe"), EpMoeConfig(method="fused")
    with expert_support.fake_h200():
        for tokens, low_latency in ((2 * 128, True), (2 * 4096, False)):
            problem = Problem("ep_moe", "NVIDIA H200", 2, 2, "bfloat16", "bounded", (tokens, 7168, 2048, 256, 8))
            saved_ms = [
                op.estimate_ms(config, replace(problem, layout="exact"), expert_support.H200)
                - op.estimate_ms(config, problem, expert_support.H200)
                for config in (fused, SEQUENCE)
            ]
            assert saved_ms[0] > 0
            assert saved_ms[1] > saved_ms[0] if low_latency else saved_ms[1] == pytest.approx(saved_ms[0])


def test_torch_is_a_candidate_only_for_the_exact_layout():
    op = tunable("ep_moe")
    problem = Problem("ep_moe", "cpu", 2, 2, "bfloat16", "exact", (64, *SIZES))
    for layout, legal in (("exact", True), ("bounded", False)):
        problem = replace(problem, layout=layout)
        assert (op.illegal(TORCH, problem, torch.device("cpu")) is None) == legal
        assert op.goes_in_graphs(problem) != legal
        assert op.illegal(EP_TORCH, problem, torch.device("cpu")) == "it must be a EpMoeConfig, not EpConfig"


def test_fused_is_estimated_better_if_communication_bound():
    """With top-1 both methods send the same bytes. With top-8 on 2 ranks the fused method sends four times as many."""
    with expert_support.fake_h200():
        op, fused = tunable("ep_moe"), EpMoeConfig(method="fused")
        for ranks, sizes, better in ((8, (65536, 7168, 512, 8, 1), True), (2, (8192, 7168, 256, 256, 8), False)):
            problem = Problem("ep_moe", "NVIDIA H200", ranks, ranks, "bfloat16", "exact", sizes)
            times = [op.estimate_ms(config, problem, expert_support.H200) for config in (fused, SEQUENCE)]
            assert (times[0] < times[1]) == better, problem


@pytest.mark.parametrize("max_tokens, most_tokens, rows", [(8192, None, 256), (8192, 128, 32), (256, 128, 8)])
def test_tiles_are_chosen_for_expected_rows_not_for_capacity(max_tokens, most_tokens, rows):
    shape = RoutingShape("ep_moe", 128, 8, 256, 8, max_tokens, most_tokens)
    routing = replace(routing_to_compile(shape, None, torch.device("cpu")), rows=max_tokens)
    assert ep_moe_fused._rows_of_expert(routing, 32) == rows


def test_fused_method_is_compiled_ahead():
    op, ranks = tunable("ep_moe"), 2
    problem = Problem("ep_moe", "cpu", ranks, ranks, "bfloat16", "exact", (64, 64, 128, 4, 2))
    config = EpMoeConfig(gemm=GroupGemmConfig(tiles=Tiles(64, 64, 64)), method="fused")
    modules = ep_moe_launch_dispatch_gemm, ep_moe_launch_gemm_combine
    with pytest.MonkeyPatch.context() as patch, recorded_launches(modules, ranks) as launches:
        patch.setattr(gpu, "has_tma", lambda device: True)
        patch.setattr(gpu, "num_sms", lambda device: 132)
        patch.setattr(ep_moe_launch_dispatch_gemm, "rows_of_buffer", lambda workspace, x: x[:1])
        operands = op.operands(problem, torch.device("cpu"), torch.Generator())
        group = type("Group", (), {"size": lambda self: ranks, "rank": lambda self: 0})()
        with recorded_launches((counting, ep_moe_launch_sort), ranks):
            x, ids, weights, gate_up, down = operands
            request = DispatchRequest("ep_moe", group, x, ids, 4, max_tokens=256)
            ep_moe.ep_moe_fused(request, weights, gate_up, down, "swiglu", config)
        launched = list(launches)
        launches.clear()
        op.compile([tensor.to("meta") for tensor in operands], problem, config)
        assert len(launched) == len(launches) == 2
        for ran, compiled in zip(launched, launches, strict=True):
            expert_support.assert_same_code(ran, compiled)
