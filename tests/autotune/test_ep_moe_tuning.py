"""Tuning ep_moe: whether its products overlap the ways, what calls take of that, and how long each way should take."""

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
from tests.autotune.test_selection import counted, tables_in, tune_by_hand
from tests.ops.experts.dispatch.oracle import BF16, FP32
from tests.ops.experts.ep_moe.cases import Layer
from tests.support.aot import recorded_launches
from tests.support.ranks import a_group, device, on_ranks
from tests.test_protocol import failure_of

FUSED = EpMoeConfig(gemm=GroupGemmConfig(tiles=Tiles(32, 32, 32, num_warps=4, num_stages=2)), method="fused")
BY_TORCH, EP_BY_TORCH = EpMoeConfig(method="torch"), EpConfig(method="torch")
SIZES = (16, 8, 4, 2)  # H, I, E, k
# Tokens of all ranks, H, I, experts, choices.
PROBLEMS = [((8, *SIZES), "exact", FP32), ((7, 24, 9, 4, 3), "exact", BF16), ((8, *SIZES), "bounded", FP32)]


def are_tuned(folder):
    with cache_in(folder / f"rank{dist.get_rank()}"):
        return [expert_support.tunes("ep_moe", shape, layout, FUSED, dtype) for shape, layout, dtype in PROBLEMS]


def test_all_ranks_find_the_same(tmp_path):
    first, second = on_ranks(2, are_tuned, tmp_path)
    assert first == second


BAD = [
    (("ep_moe", 8, 16, 8, 5, 2), {}, "ep_moe: EXPERTS = 5 is not divisible by 2 ranks"),
    (("ep_moe", 8, 16, 8, 4, 5), {}, "ep_moe: a token has at most EXPERTS = 4 choices, not 5"),
    (("ep_moe", 8, 16, 8, 4, 2), {"layout": "static"}, "layout must be one of exact, bounded, not 'static'"),
    (("ep_moe", 8, 16, 8, 4), {}, "5 positive sizes, TOKENS x HIDDEN x INTERMEDIATE x EXPERTS x CHOICES"),
]


def test_problems_that_there_are_not():
    on_ranks(2, expert_support.are_refused, BAD)


# ---- what a call takes ----


def methods_of(layer, group, **options):
    """How a layer ran: by which config if it was the one that overlaps, and whether by torch.

    However it is, the ids are counted once.
    """
    launches = (ep_moe, "ep_moe_fused", lambda args, options: args[-2])
    with contextlib.ExitStack() as stack:
        ran = stack.enter_context(expert_support.recorded(launches))
        by_torch = stack.enter_context(counted(TorchRouting, "dispatch"))
        routes = [stack.enter_context(counted(module, "count")) for module in (route, ep_moe_fused, ep_moe_config)]
        routes.append(stack.enter_context(counted(route, "route_by_torch")))
        layer.check(layer.run(group=group, **options))
    assert "max_tokens_per_rank" in options or sum(map(sum, routes)) == 1, routes
    return [config for _, config in ran], by_torch[0]


def take_the_entry(folder):
    with a_group() as group, tables_in(folder):
        state = group_state(group)
        layer = Layer([3, 5], 2, 2, 16, 8, FP32, group=group)
        assert methods_of(layer, group) == methods_of(layer, group, max_tokens=16) == ([], 0), "nobody has tuned it"
        for config, expected in ((FUSED, ([FUSED], 0)), (BY_TORCH, ([], 1)), (SEQUENCE, ([], 0))):
            tune_by_hand(*(entry_of(config, "ep_moe", (n, *SIZES), "exact", dtype="float32") for n in (4, 8, 16)))
            state.choices.clear()
            assert methods_of(layer, group) == expected, config
            known = dict(state.choices)
            with counted(state, "exchange") as exchanges:
                assert methods_of(layer, group) == expected and exchanges == [0], "asked again"
            assert state.choices == known
        # The sequence goes as its parts have been tuned to, and what overlaps does not ask them.
        tune_by_hand(
            *(entry_of(EP_BY_TORCH, "ep_dispatch", (n, 16, 4, 2), "exact", dtype="float32") for n in (4, 8, 16))
        )
        state.choices.clear()
        assert methods_of(layer, group) == ([], 1)
        tune_by_hand(*(entry_of(FUSED, "ep_moe", (tokens, *SIZES), "exact", dtype="float32") for tokens in (4, 8, 16)))
        state.choices.clear()
        assert methods_of(layer, group) == ([FUSED], 0)
        # What is said counts, and what need not fit on other ranks does not overlap.
        assert methods_of(layer, group, config=EpMoeConfig(ep=EpConfig())) == ([], 0)
        assert methods_of(layer, group, max_tokens_per_rank=5) == methods_of(layer, group, max_tokens=16) == ([], 0)
        with autotune.mode("off"):
            assert methods_of(layer, group) == ([], 0)
        asked = explain("ep_moe", 8, *SIZES, layout="exact", dtype=torch.float32, group=group)
        assert (asked.source, asked.config, asked.method) == ("cache", FUSED, "fused")
        del group, state, layer


def test_a_call_takes_what_was_tuned(tmp_path):
    on_ranks(2, take_the_entry, tmp_path)


def take_the_bounded_entry(folder):
    """Only rank 0 knows what was tuned; nothing is counted in order to choose, and known calls ask nobody."""
    with a_group() as group, tables_in(folder, user=f"rank{dist.get_rank()}"):
        state = group_state(group)
        layer = Layer([3, 5], 2, 2, 16, 8, FP32, group=group)
        bound = {"max_tokens_per_rank": 5}
        exact = [entry_of(FUSED, "ep_moe", (n, *SIZES), "exact", dtype="float32") for n in (4, 8, 16)]
        tune_by_hand(*exact, entry_of(BY_TORCH, "ep_moe", (16, *SIZES), "bounded", dtype="float32"))
        assert methods_of(layer, group, **bound) == ([], 0), "torch's sequence would wait for the host"
        tune_by_hand(*(entry_of(FUSED, "ep_moe", (n, *SIZES), "bounded", dtype="float32") for n in (16, 32)))
        state.choices.clear()
        asked = [(bound, True)]
        # A max_tokens that is enough for all choices of any rank, and one that is not.
        asked += [({"max_tokens_per_rank": 9, "max_tokens": most}, most >= 18) for most in (18, 17)]
        for bounds, overlaps in asked:
            assert methods_of(layer, group, **bounds) == ([FUSED] if overlaps else [], 0), bounds
            known = dict(state.choices)
            with counted(state, "exchange") as exchanges, counted(route, "route") as routes:
                assert methods_of(layer, group, **bounds) == ([FUSED] if overlaps else [], 0)
                assert exchanges == [0] and state.choices == known and (not overlaps or routes == [0])
        assert methods_of(layer, group, max_tokens=18) == ([], 0), "nobody knows the tokens of others"
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
        asked = explain("ep_moe", 10, *SIZES, layout="bounded", dtype=torch.float32, group=group)
        assert (asked.source, asked.config) == ("cache", FUSED)
        assert bool(disk_cache.user_entries("ep_moe", gpu_name(device()))) == (dist.get_rank() == 0)
        del group, state, layer


def test_a_call_with_a_bound_takes_what_was_tuned(tmp_path):
    on_ranks(2, take_the_bounded_entry, tmp_path)


def compile_a_call_with_a_bound(folder):
    with a_group() as group, tables_in(folder):
        tune_by_hand(entry_of(FUSED, "ep_moe", (16, *SIZES), "bounded", dtype="float32"))
        layer = Layer([3, 5], 2, 2, 16, 8, FP32, group=group)
        bound = {"num_experts": layer.experts, "max_tokens_per_rank": 5, "group": group}
        compiled = torch.compile(tdkernels.ep_moe, backend="eager", fullgraph=True)
        with counted(ep_moe, "ep_moe_fused") as overlapped:
            layer.check({"y": compiled(*layer.operands(), **bound)})
            assert overlapped == [0]
            layer.check({"y": layer.call(max_tokens_per_rank=5, group=group)})
            assert overlapped == [1]
        del group, layer, bound, compiled


def test_a_compiled_graph_has_the_sequence(tmp_path):
    on_ranks(2, compile_a_call_with_a_bound, tmp_path)


def test_a_method_is_chosen_only_where_each_would_run():
    """Of (quantize, max_tokens, max_tokens_per_rank, choices), by how many ranks of how many nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_moe_config, "spans_nodes", lambda group: group.nodes > 1)
        for ranks, nodes, call, layout in (
            (2, 1, (None, None, None, 2), "exact"),
            (2, 1, (None, 40, 5, 2), "bounded"),
            (2, 1, (None, 10, 5, 2), "bounded"),
            (2, 1, (None, 9, 5, 2), None),  # choices of a rank may be 10
            (8, 1, (None, 34, 5, 2), None),  # and of 8 ranks one may stage 35 tokens
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
def test_a_bound_alone_leaves_every_method_open(ranks, experts, choices):
    group = SimpleNamespace(size=lambda: ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_moe_config, "spans_nodes", lambda group: False)
        for most in (1, 7, 4096):
            capacity = sure_capacity(ranks * most, ranks, experts, choices)
            assert layout_of(None, capacity, most, choices, group) == "bounded"


def take_it_with_few_tokens(folder):
    """Tokens on some ranks only, or on none: all ranks come to the same."""
    with a_group() as group, tables_in(folder):
        tune_by_hand(*(entry_of(FUSED, "ep_moe", (2**n, *SIZES), "exact", dtype="bfloat16") for n in range(5)))
        for tokens in ([0, 0], [0, 3], [7, 1]):
            assert methods_of(Layer(tokens, 2, 2, 16, 8, BF16, group=group), group) == ([FUSED], 0)
        del group


def test_ranks_without_tokens(tmp_path):
    on_ranks(2, take_it_with_few_tokens, tmp_path)


# ---- without ranks ----


def test_operands_tell_the_sizes():
    shapes = (5, 16), (5, 2), (5, 2), (2, 16, 16), (2, 16, 8)
    assert tunable("ep_moe").sizes_of(*shapes, world_size=2) == (10, *SIZES)
    for wrong in (shapes[:4], (*shapes[:3], (2, 12, 16), shapes[4]), ((6, 16), *shapes[1:])):
        with pytest.raises(ValueError, match="ep_moe: the operands"):
            tunable("ep_moe").sizes_of(*wrong, world_size=2)
    assert explain("ep_moe", *shapes, world_size=2).config == SEQUENCE


def test_configs_are_kept_as_text():
    op = tunable("ep_moe")
    for config in (SEQUENCE, BY_TORCH, FUSED, EpMoeConfig(method="fused")):
        assert op.config_from_dict(op.config_to_dict(config)) == config
    parts = EpMoeConfig(EP_BY_TORCH, GroupGemmConfig(method="torch"))  # nothing that is tuned, but can be explained
    shown = op.config_to_dict(parts)
    assert (shown["method"], shown["gemm"]) == ("sequence", "torch") and "method=torch" in shown["ep"]
    for values in ({}, {"method": 3}, {"method": "fused", "tiles": 3}, {"method": "fused", "stages": 2},
                   {"method": "fused", "tiles": {"block_m": "64"}}):
        with pytest.raises((TypeError, ValueError)):
            op.config_from_dict(values)


def test_estimates():
    sizes = [(2, 8192, 7168, 2048, 256, 8), (8, 1024, 7168, 2048, 256, 8), (4, 512, 64, 64, 4, 1)]
    with expert_support.an_h200():
        for layout in tunable("ep_moe").layouts:
            expert_support.estimates_are_sensible("ep_moe", [(ranks, layout, *shape) for ranks, *shape in sizes])


def test_a_bound_saves_the_wait_and_few_tokens_the_counting_of_the_sequence():
    op, fused = tunable("ep_moe"), EpMoeConfig(method="fused")
    with expert_support.an_h200():
        for tokens, direct in ((2 * 128, True), (2 * 4096, False)):
            problem = Problem("ep_moe", "NVIDIA H200", 2, 2, "bfloat16", "bounded", (tokens, 7168, 2048, 256, 8))
            less = [
                op.estimate_ms(config, replace(problem, layout="exact"), expert_support.H200)
                - op.estimate_ms(config, problem, expert_support.H200)
                for config in (fused, SEQUENCE)
            ]
            assert less[0] > 0 and (less[1] > less[0] if direct else less[1] == pytest.approx(less[0]))


def test_torchs_sequence_is_a_candidate_where_the_host_waits_anyway():
    op = tunable("ep_moe")
    problem = Problem("ep_moe", "cpu", 2, 2, "bfloat16", "exact", (64, *SIZES))
    for layout, goes in (("exact", True), ("bounded", False)):
        problem = replace(problem, layout=layout)
        assert (op.illegal(BY_TORCH, problem, torch.device("cpu")) is None) == goes
        assert op.goes_in_graphs(problem) != goes
        assert op.illegal(EP_BY_TORCH, problem, torch.device("cpu")) == "it must be a EpMoeConfig, not EpConfig"


def test_overlapping_is_thought_better_where_the_wire_counts_and_worse_where_choices_meet():
    """Fine experts of one choice: as many bytes either way. Two ranks and eight choices: four times as many."""
    with expert_support.an_h200():
        op, fused = tunable("ep_moe"), EpMoeConfig(method="fused")
        for ranks, sizes, better in ((8, (65536, 7168, 512, 8, 1), True), (2, (8192, 7168, 256, 256, 8), False)):
            problem = Problem("ep_moe", "NVIDIA H200", ranks, ranks, "bfloat16", "exact", sizes)
            times = [op.estimate_ms(config, problem, expert_support.H200) for config in (fused, SEQUENCE)]
            assert (times[0] < times[1]) == better, problem


@pytest.mark.parametrize("max_tokens, most_tokens, rows", [(8192, None, 256), (8192, 128, 32), (256, 128, 8)])
def test_tiles_are_for_rows_that_may_come_and_not_for_all_there_is_room_for(max_tokens, most_tokens, rows):
    shape = RoutingShape("ep_moe", 128, 8, 256, 8, max_tokens, most_tokens)
    routing = replace(routing_to_compile(shape, None, torch.device("cpu")), rows=max_tokens)
    assert ep_moe_fused._rows_of_expert(routing, 32) == rows


def test_what_overlaps_is_compiled_ahead():
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
            expert_support.same_code(ran, compiled)
