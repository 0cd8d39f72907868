"""all_gather, reduce_scatter and all_reduce alone: by every exchange, against what all ranks' operands give."""

import pytest
import torch

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tdkernels.ops.collectives.config import EXCHANGES, CollectiveConfig, default_config
from tests.ops.collectives import cases
from tests.ops.collectives.cases import OPERATORS, SHAPES, SMALL
from tests.support.ranks import dies, fresh_ranks, on_ranks
from tests.support.subset import EVERYTHING, at_once, pairs, turns

TIMEOUT_S = 2.0 if EVERYTHING else 1.0  # a GPU may have to load a kernel first

WORLD_SIZES = [1, 2, 3, 4]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE_BY_ONE = {**SMALL, "num_programs": 3}
LONG_PIECES = {**SMALL, "num_programs": 2, "piece_blocks": 3}
ONE_PIECE = {"block_bytes": 65536, "num_warps": 16, "num_programs": 1}
TWO_SHOT = {"exchange": "two_shot"}
CONFIGS = {
    operator: {
        "default": None,
        "torch": {"method": "torch"},
        "small pieces": ONE_BY_ONE,
        "pieces of three blocks": LONG_PIECES,
        "one piece": ONE_PIECE,
    }
    for operator in OPERATORS
}
CONFIGS["all_gather"]["copy engine"] = {"exchange": "copy_engine"}
CONFIGS["all_reduce"] |= {
    "two shots": TWO_SHOT,
    "two shots, small pieces": {**TWO_SHOT, **ONE_BY_ONE},
    "two shots, pieces of three blocks": {**TWO_SHOT, **LONG_PIECES},
}
# Every way in which data goes between the ranks.
WAYS = [
    ("all_gather", ONE_BY_ONE),
    ("all_gather", {"exchange": "copy_engine"}),
    ("reduce_scatter", ONE_BY_ONE),
    ("all_reduce", ONE_BY_ONE),
    ("all_reduce", {**TWO_SHOT, **ONE_BY_ONE}),
]
each_operator = pytest.mark.parametrize("operator", OPERATORS)
each_way = pytest.mark.parametrize("operator, changes", WAYS, ids=str)


def configs_of(operators=OPERATORS):
    return [(operator, config) for operator in operators for config in CONFIGS[operator]]


def test_every_exchange_is_a_way():
    ways = {(operator, changes.get("exchange", "one_shot")) for operator, changes in WAYS}
    assert ways == {(operator, exchange) for operator, names in EXCHANGES.items() for exchange in names}


@pytest.mark.parametrize(
    "operator, config, world_size, dtype",
    turns(configs_of(), [(1, BF16)]) + turns(configs_of(), [(2, FP32), (3, BF16), (4, FP16)], 2),
    ids=str,
)
def test_configs(operator, config, world_size, dtype):
    on_ranks(world_size, cases.computes, operator, dtype, SHAPES, CONFIGS[operator][config])


@pytest.mark.parametrize("world_size, dtype, operator", pairs(WORLD_SIZES, [BF16, FP16, FP32], OPERATORS), ids=str)
def test_dtypes(world_size, dtype, operator):
    on_ranks(world_size, cases.computes, operator, dtype, [(1,), (5, 7), (150,)], None)


@pytest.mark.parametrize("changes", [None, ONE_BY_ONE, {"exchange": "copy_engine"}, {"method": "torch"}], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.float64], ids=str
)
def test_bytes_of_any_dtype_are_gathered(dtype, changes):
    """Odd numbers of bytes, and such as are multiples of 2, 4, 8 and 16, less and more than a piece."""
    shapes = [(1,), (3, 5), (2,), (4, 3), (8,), (16,), (301,)]
    on_ranks(3, cases.computes, "all_gather", dtype, shapes, changes)


SUMMING = [way for way in configs_of(["reduce_scatter", "all_reduce"]) if "torch" not in way]


@pytest.mark.parametrize("operator, config, dtype", turns(SUMMING, [(BF16,), (FP32,)]), ids=str)
def test_sums_are_in_rank_order(operator, config, dtype):
    on_ranks(4, cases.adds_in_rank_order, operator, dtype, CONFIGS[operator][config])


@each_operator
@pytest.mark.parametrize("world_size", [1, 2])
def test_layouts(world_size, operator):
    on_ranks(world_size, cases.takes_any_layout, operator)


@each_operator
@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing(world_size, operator):
    on_ranks(world_size, cases.takes_what_is_empty, operator)


@pytest.mark.parametrize("world_size", [1, 3])
def test_scalars(world_size):
    on_ranks(world_size, cases.takes_scalars)


@each_operator
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size, operator):
    on_ranks(world_size, cases.refuses, operator)


@pytest.mark.parametrize(
    "ranks, changes, operator",
    pairs([(1, FP32), (2, BF16), (3, FP32)], [None, ONE_BY_ONE, {"method": "torch"}], OPERATORS),
    ids=str,
)
def test_gradients(ranks, changes, operator):
    world_size, dtype = ranks
    on_ranks(world_size, cases.has_a_gradient, operator, dtype, changes)


@each_operator
def test_second_derivatives_are_refused(operator):
    on_ranks(2, cases.refuses_second_derivatives, operator)


@each_operator
def test_forward_mode_is_refused(operator):
    on_ranks(2, cases.refuses_forward_mode, operator)


# ---- between the ranks ----


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_memory_is_reused_by_other_shapes_and_dtypes(world_size):
    on_ranks(world_size, cases.reuses_poisoned_memory, WAYS)


# With one piece a peer is soon back with the data of the next call; with several it is back in the middle of this one.
@each_way
@pytest.mark.parametrize("world_size, shape, calls", [(2, (20,), 12), (3, (200,), 4)], ids=str)
def test_no_rank_overtakes_its_peers_data(world_size, shape, calls, operator, changes):
    on_ranks(world_size, cases.outruns_its_peers, operator, changes, shape, calls)


@each_way
def test_slow_rank(operator, changes):
    on_ranks(3, cases.waits_for_a_slow_rank, operator, changes)


def test_subgroups():
    on_ranks(4, cases.uses_subgroups, WAYS)


@each_operator
@pytest.mark.parametrize("what", ["shape", "rows", "no rows", "dtype", "config", "method", "operator"])
def test_disagreement_is_named_on_every_rank(what, operator):
    on_ranks(3, cases.disagrees, operator, what)


@each_way
def test_known_but_different_shapes_never_give_a_result(operator, changes):
    on_ranks(3, cases.is_not_fooled_by_a_known_plan, operator, changes, (151,), changes)


@pytest.mark.parametrize("operator", OPERATORS)
def test_known_but_different_configs_never_give_a_result(operator):
    other = TWO_SHOT | ONE_BY_ONE if operator == "all_reduce" else {**ONE_BY_ONE, "num_programs": 1}
    on_ranks(3, cases.is_not_fooled_by_a_known_plan, operator, ONE_BY_ONE, (150,), other)


@pytest.mark.parametrize("ways", at_once(WAYS), ids=str)
def test_killed_rank(ways):
    with fresh_ranks(3, grace_s=60.0) as pool, pytest.raises(RankError) as caught:
        pool.run(cases.loses_rank_1, ways, dies, TIMEOUT_S)
    assert isinstance(caught.value.exceptions[1], ChildProcessError)
    for rank in (0, 2):
        for (operator, changes), error in zip(ways, caught.value.results[rank], strict=True):
            assert type(error) is PeerTimeoutError, f"{operator} {changes}: {error!r}"
            assert (error.operator, error.rank, error.peer, error.timeout_s) == (operator, rank, 1, TIMEOUT_S)
            assert error.seen < error.expected


def test_what_was_given_up_is_not_passed_on():
    """Rank 0 has all of rank 1's parts in the end, but it had summed before; its own x is as good as ever."""
    assert on_ranks(3, cases.gives_up_before_its_peers, ONE_BY_ONE) == ["missed 1", "right", "right"]
    two_shots = on_ranks(3, cases.gives_up_before_its_peers, TWO_SHOT | ONE_BY_ONE)
    assert two_shots == ["missed 1", "missed 0", "missed 0"]


# ---- tuning ----


@each_operator
def test_tuning_finds_what_a_call_then_takes(operator):
    for method, source, text in on_ranks(2, cases.is_tuned, operator):
        assert source == "cache" and method in ("fused", "torch")
        assert "matmul" not in text and (method != "torch" or "torch collective\n" in text)


# ---- defaults ----


@each_operator
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_defaults_can_run(world_size, operator):
    device = torch.device("cpu")
    for exponent in range(0, 31, 2):
        config = default_config(operator, 1 << exponent, world_size, device)
        assert config.illegal(device, BF16, operator) is None


def test_one_shot_is_for_few_bytes():
    def exchanges(world_size):
        sizes = [1 << exponent for exponent in range(10, 29)]
        return [default_config("all_reduce", n, world_size, torch.device("cpu")).exchange for n in sizes]

    assert set(exchanges(2)) == {"one_shot"}, "two shots carry as much, and wait twice"
    for world_size in (4, 8):
        found = exchanges(world_size)
        assert found == sorted(found) and set(found) == {"one_shot", "two_shot"}
    assert exchanges(4).count("one_shot") > exchanges(8).count("one_shot")


def test_an_exchange_belongs_to_its_operator():
    device = torch.device("cpu")
    for exchange in ("one_shot", "two_shot", "copy_engine"):
        legal = {op for op in OPERATORS if CollectiveConfig(exchange=exchange).illegal(device, BF16, op) is None}
        assert legal == {op for op in OPERATORS if exchange in EXCHANGES[op]}
        assert CollectiveConfig(exchange=exchange).illegal(device, BF16) is None
