"""ulysses_qkv, ulysses_out, ag_attention and flash_decode are tuned, and their calls take what was found."""

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
    fastest,
    launched,
    problem_of,
)
from tests.autotune.entries import cache_in
from tests.autotune.test_selection import counted, log_of, tables_in, tune_by_hand
from tests.ops.attention.ulysses.cases import Projection
from tests.support.ranks import a_group, device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, needs_gpus

DECODE = "flash_decode"
DUAL = {"ulysses_qkv": "ulysses_out", "ulysses_out": "ulysses_qkv"}


# ---- what is found is taken ----


def tunes_and_takes_it(folder, operator):
    op, best, other = tunable(operator), config_of(operator, 3), config_of(operator, 5)
    # Rank 1 has a cache of its own, in which there is nothing.
    with a_group() as group, tables_in(folder / f"rank{dist.get_rank()}"):
        problem, call = problem_of(operator), Call(operator)
        default = op.default(problem, device())
        with fastest(operator, best):
            result = tune(operator, *SIZES[operator], dtype=FP32, group=group)
        assert {trial.reason for trial in result.trials} == {None}, "all that is tried is right"
        assert {op.plain(), default, best} < {trial.config for trial in result.trials}
        entry = result.entry
        assert (entry.problem, op.config_from_dict(entry.config)) == (problem, best)
        assert (entry.ms, entry.plain_ms) == (1.0, 9.0) and entry.local_ms > 0
        with launched() as ran:
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
def test_a_call_takes_what_was_tuned(tmp_path, operator):
    entries = on_ranks(2, tunes_and_takes_it, tmp_path, operator)
    assert entries[0] == entries[1]


def takes_torch(folder):
    """Where torch's sequence was the fastest nothing of ours is launched, and gradients are torch's."""
    with a_group() as group, tables_in(folder), launched() as ran:
        tune_by_hand(*(entry_of(problem_of(operator), tunable(operator).plain()) for operator in OPERATORS))
        for operator in OPERATORS:
            call = Call(operator)
            call.run(group)
            q = call.operands[0].requires_grad_()
            getattr(tdkernels, operator)(*call.operands, group=group).sum().backward()
            assert q.grad.abs().sum() > 0
        # But the gradients of the two projections are calls of the other one, which nobody has tuned.
        assert {operator: len(configs) for operator, configs in ran.items() if configs} == dict.fromkeys(DUAL, 1)
        del group


def test_torch_may_be_the_fastest(tmp_path):
    on_ranks(2, takes_torch, tmp_path)


def takes_the_others_table(folder):
    for operator, dual in DUAL.items():
        forward, backward = config_of(operator, 3), config_of(dual, 4)
        with a_group() as group, tables_in(folder):
            case = Projection(operator, FP32, positions=8, k=24, n=8, exact=True, group=group)  # of two sequences
            sizes = 32, *case.weight.shape
            of_dual = problem_of(dual, "kn", (32, *reversed(case.weight.shape)))
            tune_by_hand(entry_of(problem_of(operator, sizes=sizes), forward), entry_of(of_dual, backward))
            with launched() as ran:
                case.check(case.run())
                assert (ran[operator], ran[dual]) == ([forward], [backward])
                case.check(case.run(config=forward))  # which is for both
                assert (ran[operator], ran[dual]) == ([forward] * 2, [backward, forward])
            del group, case


def test_the_backward_of_a_projection_is_tuned_as_the_other_one(tmp_path):
    on_ranks(2, takes_the_others_table, tmp_path)


# ---- flash_decode: what is a rank's own business ----


def has_room_of_its_own(folder):
    rank, tuned = dist.get_rank(), config_of(DECODE, 3)
    with a_group() as group, tables_in(folder):
        tune_by_hand(entry_of(problem_of(DECODE), tuned))  # for the room that rank 0 has
        with launched() as ran, counted(group_state(group), "exchange") as exchanges:
            call = Call(DECODE, room=24 + 16 * rank)
            call.run(group)
            agreed = exchanges[0]
            for rooms in ((24, 0), (72, 24)):
                Call(DECODE, room=rooms[rank]).run(group)
        assert ran[DECODE] == [tuned] * 3 and exchanges == [agreed], "they have agreed, whatever room there is"
        [choice] = group_state(group).choices.values()
        assert choice.config == tuned
        result = explain(DECODE, *call.operands, group=group)
        assert (result.source, result.config, result.measured) == ("cache", tuned, rank == 0)
        assert ("  tuned for   " in str(result)) == (rank == 1)
        if rank == 0:  # as for other operators, what is called otherwise by one rank alone is refused by all
            call = Call(DECODE, room=24)
        paged = torch.arange(2, dtype=torch.int32, device=device()).view(2, 1)
        table = {"block_table": paged} if rank == 1 else {}
        fresh = dist.new_group([0, 1])
        with pytest.raises(ValueError, match='layout is "dense" on rank 0, "paged" on rank 1'):
            tdkernels.flash_decode(*call.operands, group=fresh, **table)
        dist.destroy_process_group(fresh)
        del group, fresh


def test_ranks_whose_caches_have_other_room(tmp_path):
    on_ranks(2, has_room_of_its_own, tmp_path)


def tunes_on_a_miss(folder):
    """All ranks tune what rank 0 has, and none of them again when the room is another."""
    rank, tuned = dist.get_rank(), config_of(DECODE, 3)
    with a_group() as group, tables_in(folder, "on"), fastest(DECODE, tuned):
        with launched() as ran, counted(tuner, "tune_problem") as count:
            Call(DECODE, room=24 + 16 * rank).run(group)
            Call(DECODE, room=40 - 8 * rank).run(group)
        assert count == [1] and ran[DECODE][-2:] == [tuned] * 2
        disk_cache.forget()
        [entry] = disk_cache.user_entries(DECODE, gpu_name(device()))
        assert entry.problem == problem_of(DECODE)
        del group


def test_ranks_of_other_room_tune_together(tmp_path):
    on_ranks(2, tunes_on_a_miss, tmp_path)


def is_tuned_alone(folder):
    tuned = config_of(DECODE, 3)
    with a_group() as group, tables_in(folder):
        with fastest(DECODE, tuned):
            entry = tune(DECODE, *SIZES[DECODE], dtype=FP32, group=group).entry
        assert entry.problem == problem_of(DECODE, ranks=1)
        with launched() as ran:
            Call(DECODE).run(group)
        assert ran[DECODE] == [tuned]
        for operator in ("ag_attention", "ulysses_qkv", "ulysses_out"):
            with pytest.raises(ValueError, match=f"{operator}: one rank has nothing to tune"):
                tune(operator, *SIZES[operator], group=group)
        del group


def test_one_rank_tunes_a_decode_and_nothing_else(tmp_path):
    on_ranks(1, is_tuned_alone, tmp_path)


def test_without_a_group_this_process_looks_up_by_itself(tmp_path):
    alone.choices.clear()
    cpu = torch.device("cpu")
    problem, tuned = problem_of(DECODE, ranks=1, on=cpu), config_of(DECODE, 3, on=cpu)
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, 16)
    lens = torch.tensor([24, 5], dtype=torch.int32)
    with cache_in(tmp_path), autotune.mode("on"), launched() as ran, log_of() as records:
        disk_cache.store([entry_of(problem, tuned)])
        for _ in range(2):
            o = tdkernels.flash_decode(q, k, v, lens)
        torch.testing.assert_close(o, tdkernels.flash_decode_ref(q, k, v, lens), rtol=1e-5, atol=1e-5)
        assert ran[DECODE] == [tuned] * 2
        assert [record.getMessage().split(":")[0] for record in records] == [str(problem)], "said once"
        assert explain(DECODE, q, k, v, lens, world_size=1).config == tuned
        disk_cache.store([entry_of(problem, tunable(DECODE).plain())])
        assert explain(DECODE, q, k, v, lens, world_size=1).config == tuned, "it is what calls go on with"


# ---- several nodes ----


def is_on_two_nodes(folder):
    tuned = config_of(DECODE, 3)
    with a_group_on_nodes(1) as group, tables_in(folder):
        with fastest(DECODE, tuned):
            entry = tune(DECODE, *SIZES[DECODE], dtype=FP32, group=group).entry
        assert entry.problem == problem_of(DECODE, local=1)
        with launched() as ran:
            Call(DECODE).run(group)
            assert ran[DECODE] == [tuned]
            choices = dict(group_state(group).choices)
            for operator in ("ag_attention", "ulysses_qkv", "ulysses_out"):
                Call(operator).run(group)  # by torch's sequence, of which nobody is asked
                assert not ran[operator] and group_state(group).choices == choices
                with pytest.raises(ValueError, match="on several nodes it runs by torch's sequence"):
                    tune(operator, *SIZES[operator], group=group)
        del group


@needs_gpus
def test_across_nodes_a_decode_alone_is_tuned(tmp_path):
    on_ranks(2, is_on_two_nodes, tmp_path)


# ---- problems that are none ----

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


def are_refused(folder):
    with a_group() as group, cache_in(folder):
        for arguments, options, message in BAD:
            with pytest.raises(ValueError, match=f"^{arguments[0]}: .*{message}"):
                tune(*arguments, group=group, **options)
        for operator in OPERATORS:
            Call(operator).run(group)
        del group


def test_bad_problems_are_refused_on_every_rank(tmp_path):
    on_ranks(2, are_refused, tmp_path)
    assert not disk_cache.files(tmp_path)
