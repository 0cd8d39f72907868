"""all_gather, reduce_scatter and all_reduce with every exchange, against results computed on the CPU."""

import pytest
import torch

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tdkernels.ops.collectives.config import EXCHANGES, CollectiveConfig, default_config
from tests.ops.collectives import cases
from tests.ops.collectives.cases import OPERATORS, SHAPES, SMALL
from tests.support.ranks import dies, fresh_ranks, on_ranks
from tests.support.subset import EVERYTHING, THOROUGH, at_once, pairs, turns

TIMEOUT_S = 2.0 if EVERYTHING else 1.0  # a GPU may have to load a kernel first

WORLD_SIZES = [1, 2, 3, 4]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL_CHUNKS = {**SMALL, "num_programs": 3}
LONG_CHUNKS = {**SMALL, "num_programs": 2, "piece_blocks": 3}
ONE_CHUNK = {"block_bytes": 65536, "num_warps": 16, "num_programs": 1}
TWO_SHOT = {"exchange": "two_shot"}
CONFIGS = {
    operator: {
        "default": None,
        "torch": {"method": "torch"},
        "small chunks": SMALL_CHUNKS,
        "chunks of three blocks": LONG_CHUNKS,
        "one chunk": ONE_CHUNK,
    }
    for operator in OPERATORS
}
CONFIGS["all_gather"]["copy engine"] = {"exchange": "copy_engine"}
CONFIGS["all_reduce"] |= {
    "two shots": TWO_SHOT,
    "two shots, small chunks": {**TWO_SHOT, **SMALL_CHUNKS},
    "two shots, chunks of three blocks": {**TWO_SHOT, **LONG_CHUNKS},
}
# One config for every exchange.
VARIANTS = [
    ("all_gather", SMALL_CHUNKS),
    ("all_gather", {"exchange": "copy_engine"}),
    ("reduce_scatter", SMALL_CHUNKS),
    ("all_reduce", SMALL_CHUNKS),
    ("all_reduce", {**TWO_SHOT, **SMALL_CHUNKS}),
]
each_operator = pytest.mark.parametrize("operator", OPERATORS)
each_variant = pytest.mark.parametrize("operator, changes", VARIANTS, ids=str)


def configs_of(operators=OPERATORS):
    return [(operator, config) for operator in operators for config in CONFIGS[operator]]


def test_every_exchange_is_covered():
    variants = {(operator, changes.get("exchange", "one_shot")) for operator, changes in VARIANTS}
    assert variants == {(operator, exchange) for operator, names in EXCHANGES.items() for exchange in names}


@pytest.mark.parametrize(
    "operator, config, world_size, dtype",
    turns(configs_of(), [(1, BF16)]) + turns(configs_of(), [(2, FP32), (3, BF16), (4, FP16)], 1 + THOROUGH),
    ids=str,
)
def test_configs(operator, config, world_size, dtype):
    on_ranks(world_size, cases.computes, operator, dtype, SHAPES, CONFIGS[operator][config])


@pytest.mark.parametrize("world_size, dtype, operator", pairs(WORLD_SIZES, [BF16, FP16, FP32], OPERATORS), ids=str)
def test_dtypes(world_size, dtype, operator):
    on_ranks(world_size, cases.computes, operator, dtype, [(1,), (5, 7), (150,)], None)


ANY_DTYPES = [torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.float64]
GATHERS = [None, SMALL_CHUNKS, {"exchange": "copy_engine"}, {"method": "torch"}]


@pytest.mark.parametrize(
    "dtype, changes", turns([(dtype,) for dtype in ANY_DTYPES], [(one,) for one in GATHERS], 2, THOROUGH), ids=str
)
def test_all_gather_of_any_dtype(dtype, changes):
    """Check sizes that are odd or multiples of 2, 4, 8 and 16 bytes, smaller and larger than a chunk."""
    shapes = [(1,), (3, 5), (2,), (4, 3), (8,), (16,), (301,)]
    on_ranks(3, cases.computes, "all_gather", dtype, shapes, changes)


SUMMING = [variant for variant in configs_of(["reduce_scatter", "all_reduce"]) if "torch" not in variant]


@pytest.mark.parametrize("operator, config, dtype", turns(SUMMING, [(BF16,), (FP32,)]), ids=str)
def test_summation_order(operator, config, dtype):
    on_ranks(4, cases.reduces_in_rank_order, operator, dtype, CONFIGS[operator][config])


@each_operator
@pytest.mark.parametrize("world_size", [1, 2])
def test_layouts(world_size, operator):
    on_ranks(world_size, cases.supports_any_layout, operator)


@each_operator
@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_tensors(world_size, operator):
    on_ranks(world_size, cases.supports_empty_tensors, operator)


@pytest.mark.parametrize("world_size", [1, 3])
def test_scalars(world_size):
    on_ranks(world_size, cases.supports_scalars)


@each_operator
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size, operator):
    on_ranks(world_size, cases.rejects_invalid_arguments, operator)


@pytest.mark.parametrize(
    "ranks, changes, operator",
    pairs([(1, FP32), (2, BF16), (3, FP32)], [None, SMALL_CHUNKS, {"method": "torch"}], OPERATORS),
    ids=str,
)
def test_gradients(ranks, changes, operator):
    world_size, dtype = ranks
    on_ranks(world_size, cases.computes_gradient, operator, dtype, changes)


@each_operator
def test_second_derivatives_are_rejected(operator):
    on_ranks(2, cases.rejects_second_derivatives, operator)


@each_operator
def test_forward_mode_is_rejected(operator):
    on_ranks(2, cases.rejects_forward_mode, operator)


# ---- interaction of ranks ----


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_workspace_is_reused_by_other_shapes_and_dtypes(world_size):
    on_ranks(world_size, cases.reuses_poisoned_memory, VARIANTS)


# With one chunk, a peer soon starts the next call; with several chunks, it starts it during this call.
@each_variant
@pytest.mark.parametrize("world_size, shape, calls", [(2, (20,), 12), (3, (200,), 4)], ids=str)
def test_ranks_running_ahead(world_size, shape, calls, operator, changes):
    on_ranks(world_size, cases.runs_ahead_of_peers, operator, changes, shape, calls)


@each_variant
def test_slow_rank(operator, changes):
    on_ranks(3, cases.waits_for_a_slow_rank, operator, changes)


def test_subgroups():
    on_ranks(4, cases.computes_in_subgroups, VARIANTS)


@each_operator
@pytest.mark.parametrize("field", ["shape", "rows", "no rows", "dtype", "config", "method", "operator"])
def test_disagreement_raises_on_every_rank(field, operator):
    on_ranks(3, cases.reports_disagreement, operator, field)


@each_variant
def test_mismatch_of_cached_shapes_is_detected(operator, changes):
    on_ranks(3, cases.detects_mismatch_of_cached_plans, operator, changes, (151,), changes)


@pytest.mark.parametrize("operator", OPERATORS)
def test_mismatch_of_cached_configs_is_detected(operator):
    other = TWO_SHOT | SMALL_CHUNKS if operator == "all_reduce" else {**SMALL_CHUNKS, "num_programs": 1}
    on_ranks(3, cases.detects_mismatch_of_cached_plans, operator, SMALL_CHUNKS, (150,), other)


@pytest.mark.parametrize("variants", at_once(VARIANTS), ids=str)
def test_killed_rank(variants):
    with fresh_ranks(3, grace_s=60.0) as pool, pytest.raises(RankError) as caught:
        pool.run(cases.loses_rank_1, variants, dies, TIMEOUT_S)
    assert isinstance(caught.value.exceptions[1], ChildProcessError)
    for rank in (0, 2):
        for (operator, changes), error in zip(variants, caught.value.results[rank], strict=True):
            assert type(error) is PeerTimeoutError, f"{operator} {changes}: {error!r}"
            assert (error.operator, error.rank, error.peer, error.timeout_s) == (operator, rank, 1, TIMEOUT_S)
            assert error.seen < error.expected


def test_sums_are_not_sent_after_timeout():
    """Rank 0 receives rank 1's data after its timeout, so it must not send its sum; its own x is still valid."""
    assert on_ranks(3, cases.times_out_before_peers, SMALL_CHUNKS) == ["missed 1", "right", "right"]
    two_shots = on_ranks(3, cases.times_out_before_peers, TWO_SHOT | SMALL_CHUNKS)
    assert two_shots == ["missed 1", "missed 0", "missed 0"]


# ---- tuning ----


@each_operator
def test_calls_use_the_tuned_config(operator):
    for method, source, text in on_ranks(2, cases.uses_tuned_config, operator):
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


def test_one_shot_is_the_default_for_small_messages():
    def exchanges(world_size):
        sizes = [1 << exponent for exponent in range(10, 29)]
        return [default_config("all_reduce", n, world_size, torch.device("cpu")).exchange for n in sizes]

    assert set(exchanges(2)) == {"one_shot"}, "with two ranks, two-shot sends as much and waits twice"
    for world_size in (4, 8):
        found = exchanges(world_size)
        assert found == sorted(found) and set(found) == {"one_shot", "two_shot"}
    assert exchanges(4).count("one_shot") > exchanges(8).count("one_shot")


def test_exchanges_are_valid_for_their_operators_only():
    device = torch.device("cpu")
    for exchange in ("one_shot", "two_shot", "copy_engine"):
        legal = {op for op in OPERATORS if CollectiveConfig(exchange=exchange).illegal(device, BF16, op) is None}
        assert legal == {op for op in OPERATORS if exchange in EXCHANGES[op]}
        assert CollectiveConfig(exchange=exchange).illegal(device, BF16) is None
