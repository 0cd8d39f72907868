"""Tuning ulysses_qkv, ulysses_out, ag_attention and flash_decode, and calls that use the tuned configs."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import autotune, explain
from tdkernels.autotune import disk_cache, tune, tuner
from tdkernels.autotune.problem import gpu_name
from tdkernels.autotune.tunable import tunable
from tdkernels.symm.group import alone, group_state
from tests.autotune.attention_support import (
    FP32,
    OPERATORS,
    SIZES,
    Call,
    config_of,
    entry_of,
    fake_winner,
    launched_configs,
    problem_of,
)
from tests.autotune.entries import cache_in
from tests.autotune.selection_support import capture_log, count_calls, store_entries, tables_in
from tests.ops.attention.ulysses.cases import Projection
from tests.support.ranks import a_group, device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, needs_gpus

DECODE = "flash_decode"
DUAL = {"ulysses_qkv": "ulysses_out", "ulysses_out": "ulysses_qkv"}


# ---- calls use tuned configs ----


def check_call_uses_tuned_config(folder, operator):
    op, best, other = tunable(operator), config_of(operator, 3), config_of(operator, 5)
    # Rank 1 has its own, empty cache.
    with a_group() as group, tables_in(folder / f"rank{dist.get_rank()}"):
        problem, call = problem_of(operator), Call(operator)
        default = op.default(problem, device())
        with fake_winner(operator, best):
            result = tune(operator, *SIZES[operator], dtype=FP32, group=group)
        assert {trial.reason for trial in result.trials} == {None}, "all candidates are correct"
        assert {op.plain(), default, best} < {trial.config for trial in result.trials}
        entry = result.entry
        assert (entry.problem, op.config_from_dict(entry.config)) == (problem, best)
        assert (entry.ms, entry.plain_ms) == (1.0, 9.0) and entry.local_ms > 0
        with launched_configs() as ran:
            call.run(group)
            call.run(group, config=other)
            with autotune.mode("off"):
                call.run(group)
        assert ran[operator] == [op.completed(config, problem, device()) for config in (best, other, default)]
        result = explain(getattr(tdkernels, operator), *call.operands, group=group)
        assert (result.source, result.measured, result.expected_ms) == ("cache", True, 1.0)
        assert result.config == ran[operator][0]
        del group
    return entry


@pytest.mark.parametrize("operator", OPERATORS)
def test_call_uses_tuned_config(tmp_path, operator):
    entries = on_ranks(2, check_call_uses_tuned_config, tmp_path, operator)
    assert entries[0] == entries[1]


def check_torch_config(folder):
    """Check that with a "torch" entry the forward launches no kernel of tdkernels, and that gradients work."""
    with a_group() as group, tables_in(folder), launched_configs() as ran:
        store_entries(*(entry_of(problem_of(operator), tunable(operator).plain()) for operator in OPERATORS))
        for operator in OPERATORS:
            call = Call(operator)
            call.run(group)
            q = call.operands[0].requires_grad_()
            getattr(tdkernels, operator)(*call.operands, group=group).sum().backward()
            assert q.grad.abs().sum() > 0
        # The backward of a ulysses projection calls the dual operator, which has no entry for its layout.
        assert {operator: len(configs) for operator, configs in ran.items() if configs} == dict.fromkeys(DUAL, 1)
        del group


def test_torch_can_be_the_fastest(tmp_path):
    on_ranks(2, check_torch_config, tmp_path)


def check_backward_uses_dual_entries(folder):
    for operator, dual in DUAL.items():
        forward, backward = config_of(operator, 3), config_of(dual, 4)
        with a_group() as group, tables_in(folder):
            case = Projection(operator, FP32, positions=8, k=24, n=8, exact=True, group=group)  # two sequences
            sizes = 32, *case.weight.shape
            of_dual = problem_of(dual, "kn", (32, *reversed(case.weight.shape)))
            store_entries(entry_of(problem_of(operator, sizes=sizes), forward), entry_of(of_dual, backward))
            with launched_configs() as ran:
                case.check(case.run())
                assert (ran[operator], ran[dual]) == ([forward], [backward])
                case.check(case.run(config=forward))  # an explicit config applies to forward and backward
                assert (ran[operator], ran[dual]) == ([forward] * 2, [backward, forward])
            del group, case


def test_projection_backward_uses_entries_of_the_dual_operator(tmp_path):
    on_ranks(2, check_backward_uses_dual_entries, tmp_path)


# ---- flash_decode: properties that may differ between ranks ----


def check_capacity_may_differ(folder):
    rank, tuned = dist.get_rank(), config_of(DECODE, 3)
    with a_group() as group, tables_in(folder):
        store_entries(entry_of(problem_of(DECODE), tuned))  # with the cache capacity of rank 0
        with launched_configs() as ran, count_calls(group_state(group), "exchange") as exchanges:
            call = Call(DECODE, capacity=24 + 16 * rank)
            call.run(group)
            agreed = exchanges[0]
            for capacities in ((24, 0), (72, 24)):
                Call(DECODE, capacity=capacities[rank]).run(group)
        assert ran[DECODE] == [tuned] * 3 and exchanges == [agreed], "no new consensus check if the capacity changes"
        [choice] = group_state(group).choices.values()
        assert choice.config == tuned
        result = explain(DECODE, *call.operands, group=group)
        assert (result.source, result.config, result.measured) == ("cache", tuned, rank == 0)
        assert ("  tuned for   " in str(result)) == (rank == 1)
        if rank == 0:  # as for other operators, a call that differs on one rank is rejected on all ranks
            call = Call(DECODE, capacity=24)
        paged = torch.arange(2, dtype=torch.int32, device=device()).view(2, 1)
        table = {"block_table": paged} if rank == 1 else {}
        fresh = dist.new_group([0, 1])
        with pytest.raises(ValueError, match='layout is "dense" on rank 0, "paged" on rank 1'):
            tdkernels.flash_decode(*call.operands, group=fresh, **table)
        dist.destroy_process_group(fresh)
        del group, fresh


def test_cache_capacity_may_differ_between_ranks(tmp_path):
    on_ranks(2, check_capacity_may_differ, tmp_path)


def check_tuning_on_a_miss(folder):
    """Check that all ranks tune the problem of rank 0 once, also if the capacity changes afterwards."""
    rank, tuned = dist.get_rank(), config_of(DECODE, 3)
    with a_group() as group, tables_in(folder, "on"), fake_winner(DECODE, tuned):
        with launched_configs() as ran, count_calls(tuner, "tune_problem") as count:
            Call(DECODE, capacity=24 + 16 * rank).run(group)
            Call(DECODE, capacity=40 - 8 * rank).run(group)
        assert count == [1] and ran[DECODE][-2:] == [tuned] * 2
        disk_cache.forget()
        [entry] = disk_cache.user_entries(DECODE, gpu_name(device()))
        assert entry.problem == problem_of(DECODE)
        del group


def test_ranks_with_different_capacity_tune_together(tmp_path):
    on_ranks(2, check_tuning_on_a_miss, tmp_path)


def check_single_rank_tuning(folder):
    tuned = config_of(DECODE, 3)
    with a_group() as group, tables_in(folder):
        with fake_winner(DECODE, tuned):
            entry = tune(DECODE, *SIZES[DECODE], dtype=FP32, group=group).entry
        assert entry.problem == problem_of(DECODE, ranks=1)
        with launched_configs() as ran:
            Call(DECODE).run(group)
        assert ran[DECODE] == [tuned]
        for operator in ("ag_attention", "ulysses_qkv", "ulysses_out"):
            with pytest.raises(ValueError, match=f"{operator}: one rank has nothing to tune"):
                tune(operator, *SIZES[operator], group=group)
        del group


def test_one_rank_can_tune_only_flash_decode(tmp_path):
    on_ranks(1, check_single_rank_tuning, tmp_path)


def test_lookup_without_a_group(tmp_path):
    alone.choices.clear()
    cpu = torch.device("cpu")
    problem, tuned = problem_of(DECODE, ranks=1, on=cpu), config_of(DECODE, 3, on=cpu)
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, 16)
    lens = torch.tensor([24, 5], dtype=torch.int32)
    with cache_in(tmp_path), autotune.mode("on"), launched_configs() as ran, capture_log() as records:
        disk_cache.store([entry_of(problem, tuned)])
        for _ in range(2):
            o = tdkernels.flash_decode(q, k, v, lens)
        torch.testing.assert_close(o, tdkernels.flash_decode_ref(q, k, v, lens), rtol=1e-5, atol=1e-5)
        assert ran[DECODE] == [tuned] * 2
        assert [record.getMessage().split(":")[0] for record in records] == [str(problem)], "logged once"
        assert explain(DECODE, q, k, v, lens, world_size=1).config == tuned
        disk_cache.store([entry_of(problem, tunable(DECODE).plain())])
        assert explain(DECODE, q, k, v, lens, world_size=1).config == tuned, "calls keep the selected config"


# ---- several nodes ----


def check_tuning_on_two_nodes(folder):
    tuned = config_of(DECODE, 3)
    with a_group_on_nodes(1) as group, tables_in(folder):
        with fake_winner(DECODE, tuned):
            entry = tune(DECODE, *SIZES[DECODE], dtype=FP32, group=group).entry
        assert entry.problem == problem_of(DECODE, local=1)
        with launched_configs() as ran:
            Call(DECODE).run(group)
            assert ran[DECODE] == [tuned]
            choices = dict(group_state(group).choices)
            for operator in ("ag_attention", "ulysses_qkv", "ulysses_out"):
                Call(operator).run(group)  # runs the torch baseline, without config selection
                assert not ran[operator] and group_state(group).choices == choices
                with pytest.raises(ValueError, match='on several nodes it supports only method "torch"'):
                    tune(operator, *SIZES[operator], group=group)
        del group


@needs_gpus
def test_only_flash_decode_is_tuned_across_nodes(tmp_path):
    on_ranks(2, check_tuning_on_two_nodes, tmp_path)


# ---- invalid problems ----

HEADS = "HEADS = 3 is not a multiple of KV_HEADS = 2"
BAD = [
    (("ag_attention", 1, 33, 2, 1, 16, 16), {}, "SEQ = 33 is not divisible by 2 ranks"),
    (("ag_attention", 1, 32, 3, 2, 16, 16), {}, HEADS),
    (("ag_attention", 1, 32, 2, 1, 8, 16), {}, "D and DV must be from 16 to 256, not 8 and 16"),
    (("ag_attention", 1, 32, 2, 1, 16, 257), {}, "D and DV must be from 16 to 256, not 16 and 257"),
    (("ag_attention", 32, 2, 1, 16), {}, r"6 positive sizes, BATCH x SEQ x HEADS x KV_HEADS x D x DV, not \(32, 2, 1"),
    (("ag_attention", 0, 32, 2, 1, 16, 16), {}, "6 positive sizes"),
    (("ag_attention", *SIZES["ag_attention"]), {"layout": "zigzag"}, "one of causal contiguous, .*full, not"),
    (("ulysses_qkv", 33, 32, 16), {}, "M = 33 is not divisible by 2 ranks"),
    (("ulysses_qkv", 32, 33, 16), {}, "N = 33 is not divisible by 2 ranks"),
    (("ulysses_out", 33, 16, 32), {}, "M = 33 is not divisible by 2 ranks"),
    (("ulysses_out", 32, 16, 33), {}, "K = 33 is not divisible by 2 ranks"),
    (("ulysses_out", 32, 16), {}, r"3 positive sizes, M x N x K, not \(32, 16\)"),
    (("ulysses_qkv", 32, 32, 16), {"layout": "kk"}, "layout must be one of nk, kn, not 'kk'"),
    ((DECODE, 2, 1, 3, 2, 16, 16, 24), {}, HEADS),
    ((DECODE, 2, 1, 4, 2, 16, 1025, 24), {}, "D and DV at most 1024, not 2, 16 and 1025"),
    ((DECODE, 2, 1, 4, 2, 16, 16, 0), {}, "7 positive sizes, BATCH x QUERIES x HEADS x KV_HEADS x D x DV x KEYS, not"),
    ((DECODE, 2, 1, 4, 2, 96, 32, 24), {"layout": "dense latent"}, "the greatest power of two in D, not 32"),
    ((DECODE, *SIZES[DECODE]), {"layout": "fp8"}, "layout must be one of dense, dense fp8, .*, not 'fp8'"),
    ((DECODE, *SIZES[DECODE]), {"dtype": torch.float64}, "dtype must be one of .*, not float64"),
]


def check_bad_problems(folder):
    with a_group() as group, cache_in(folder):
        for arguments, options, message in BAD:
            with pytest.raises(ValueError, match=f"^{arguments[0]}: .*{message}"):
                tune(*arguments, group=group, **options)
        for operator in OPERATORS:
            Call(operator).run(group)
        del group


def test_bad_problems_are_rejected_on_every_rank(tmp_path):
    on_ranks(2, check_bad_problems, tmp_path)
    assert not disk_cache.files(tmp_path)
