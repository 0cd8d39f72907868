"""all_reduce_rms_norm and all_reduce_layer_norm, against sums in rank order and norms in fp64."""

import pytest
import torch

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tdkernels.ops.collectives.norm import reference
from tdkernels.ops.collectives.norm.config import _default_exchange, default_config
from tdkernels.runtime import gpu
from tests.ops.collectives import norm_cases as cases
from tests.ops.collectives import norm_gradient_cases as gradients
from tests.ops.collectives.norm_cases import BF16, CONFIGS, FP16, FP32, OPERATORS, SHAPES
from tests.support.ranks import dies, fresh_ranks, on_ranks
from tests.support.subset import EVERYTHING, at_once, pairs, turns

TIMEOUT_S = 2.0 if EVERYTHING else 1.0  # a GPU may have to load a kernel first
ONE_SHOT, TWO_SHOT = CONFIGS["small pieces"], CONFIGS["two shots"]
# One config for every exchange.
VARIANTS = [("all_reduce_rms_norm", ONE_SHOT), ("all_reduce_layer_norm", TWO_SHOT)]
each_operator = pytest.mark.parametrize("operator", OPERATORS)
each_variant = pytest.mark.parametrize("operator, changes", VARIANTS, ids=str)


@pytest.mark.parametrize(
    "config, operator, ranks", pairs(list(CONFIGS), OPERATORS, [(3, BF16), (2, FP32), (3, FP16)]), ids=str
)
def test_values(config, operator, ranks):
    world_size, dtype = ranks
    on_ranks(world_size, cases.computes, operator, dtype, SHAPES, CONFIGS[config])


@pytest.mark.parametrize("operator, dtype", turns([(name,) for name in OPERATORS], [(BF16,), (FP32,)]), ids=str)
def test_one_rank(operator, dtype):
    on_ranks(1, cases.computes, operator, dtype, SHAPES, None)


@pytest.mark.parametrize("config", ["small pieces", "two shots", "two shots, long pieces"])
def test_many_rounds(config):
    """More rows and longer rows than the programs process in one round."""
    on_ranks(2, cases.computes, "all_reduce_layer_norm", BF16, [(23, 40), (4, 2100)], CONFIGS[config], 1)


@each_operator
def test_layouts(operator):
    on_ranks(2, cases.supports_any_layout, operator)


@each_operator
@pytest.mark.parametrize("world_size", [1, 2])
def test_empty_tensors(world_size, operator):
    on_ranks(world_size, cases.supports_empty_tensors, operator)


@each_operator
@pytest.mark.parametrize("changes", [ONE_SHOT, TWO_SHOT], ids=str)
def test_special_values(changes, operator):
    on_ranks(3, cases.keeps_special_values, operator, changes)


@pytest.mark.parametrize(
    "operator, dtypes, changes",
    pairs(OPERATORS, [(FP32, None), (BF16, None), (BF16, FP32)], [ONE_SHOT, TWO_SHOT, {"method": "torch"}]), ids=str,
)
def test_gradients(operator, dtypes, changes):
    on_ranks(2, gradients.computes_gradients, operator, dtypes[0], changes, dtypes[1])


@each_operator
def test_gradients_of_one_rank(operator):
    on_ranks(1, gradients.computes_gradients, operator, FP32, None)


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
def test_gradients_by_the_kernels_of_torch(wanted, monkeypatch):
    """GPUs use torch's kernels. That of LayerNorm exists on the CPU, too, and that of RMSNorm for meta tensors."""
    generator = torch.Generator().manual_seed(0)
    r, dy, weight = (torch.randn(size, generator=generator) for size in ((2, 3, 40), (2, 3, 40), (40,)))
    fused = reference._fused_gradients
    for is_layer_norm in (True, False):
        stats = reference.statistics(r, 1e-3, is_layer_norm)
        expected = reference.gradients(dy, r, weight, stats, is_layer_norm, wanted)
        on_device = _as_they_are if is_layer_norm else _on_meta
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_plain_gradients", lambda *call, on_device=on_device: fused(*on_device(call)))
            got = reference.gradients(dy, r, weight, stats, is_layer_norm, wanted)
        for one, other in zip(got, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or one.shape == other.shape
            if is_layer_norm and one is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _as_they_are(values):
    return values


def _on_meta(values):
    return [value.to("meta") if isinstance(value, torch.Tensor) else value for value in values]


@each_operator
def test_other_derivatives_are_rejected(operator):
    on_ranks(2, gradients.rejects_derivatives, operator)


@each_operator
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_arguments(world_size, operator):
    on_ranks(world_size, cases.rejects_invalid_arguments, operator)


# ---- caches and tuning ----


@each_operator
def test_call_cache(operator):
    on_ranks(2, cases.hits_the_call_cache, operator)


@each_operator
def test_calls_use_the_tuned_config(operator):
    for found in on_ranks(2, cases.uses_tuned_config, operator):
        for method, source, text in found:
            assert source == "cache" and method in ("fused", "torch")
            assert "matmul" not in text and (method != "torch" or "torch collective, addition and norm\n" in text)


@each_operator
@pytest.mark.parametrize("world_size", [2, 3])
def test_batch_invariance(world_size, operator):
    on_ranks(world_size, cases.is_batch_invariant, operator)


def test_defaults_can_run():
    device = torch.device("cpu")
    exchanges = set()
    for rows in (1, 8, 4096):
        for hidden in (1, 100, 4096, 16384, 50000):
            config = default_config(rows, hidden, BF16, 8, device)
            assert config.illegal(device, BF16) is None
            exchanges.add(config.exchange)
    assert exchanges == {"one_shot", "two_shot"}


@pytest.mark.parametrize("rows, world_size, exchange", [
    (16, 8, "one_shot"), (64, 8, "two_shot"), (64, 4, "one_shot"), (128, 4, "two_shot"), (128, 2, "one_shot"),
])
def test_exchange_that_was_measured_to_be_faster(monkeypatch, rows, world_size, exchange):
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    assert _default_exchange(rows, 8192, BF16, world_size, torch.device("cuda")) == exchange


# ---- interaction of ranks ----


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_reused_by_other_shapes_and_dtypes(world_size):
    variants = VARIANTS + [("all_reduce_rms_norm", CONFIGS["two shots, long pieces"])]
    on_ranks(world_size, cases.reuses_poisoned_memory, variants + [("all_reduce_layer_norm", CONFIGS["shared rows"])])


@each_variant
def test_repeated_calls_have_the_same_bits(operator, changes):
    on_ranks(3, cases.repeats_exactly, operator, changes)


@each_operator
def test_disagreement_raises_on_every_rank(operator):
    on_ranks(3, cases.reports_disagreement, operator)


@each_variant
def test_mismatch_of_cached_calls_is_detected(operator, changes):
    on_ranks(3, cases.detects_mismatch_of_cached_calls, operator, changes)


@pytest.mark.parametrize("variants", at_once(VARIANTS), ids=str)
def test_killed_rank(variants):
    with fresh_ranks(3, grace_s=60.0) as pool, pytest.raises(RankError) as caught:
        pool.run(cases.loses_rank_1, variants, dies, TIMEOUT_S)
    assert isinstance(caught.value.exceptions[1], ChildProcessError)
    for rank in (0, 2):
        for (operator, changes), error in zip(variants, caught.value.results[rank], strict=True):
            assert type(error) is PeerTimeoutError, f"{operator} {changes}: {error!r}"
            assert (error.operator, error.rank, error.peer, error.timeout_s) == (operator, rank, 1, TIMEOUT_S)


def test_sums_are_not_sent_after_timeout():
    """Rank 0 receives rank 1's data after its timeout, so it must not send r; its own x is still valid."""
    assert on_ranks(3, cases.times_out_before_peers, ONE_SHOT) == ["missed 1", "right", "right"]
    assert on_ranks(3, cases.times_out_before_peers, TWO_SHOT) == ["missed 1", "missed 0", "missed 0"]
