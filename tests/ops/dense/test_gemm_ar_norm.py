"""gemm_ar_rms_norm and gemm_ar_layer_norm: r bit by bit in rank order, y against fp64, codes against quantize_fp8."""

import pytest
import torch

from tdkernels import PeerTimeoutError
from tdkernels.ops.dense.gemm_ar_norm.config import registers_hold
from tests.ops.dense import gemm_ar_norm_call_cases as call_cases
from tests.ops.dense import gemm_ar_norm_cases as cases
from tests.ops.dense.gemm_ar_norm_cases import CONFIGS, FUSED, LAYER, LONG, RMS, SHAPES
from tests.support.ranks import DEVICE, on_ranks
from tests.support.simulated_nodes import thorough
from tests.support.subset import THOROUGH

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATORS = [RMS, LAYER]
each_operator = pytest.mark.parametrize("operator", OPERATORS)
# For tests of code that both operators share.
either_operator = pytest.mark.parametrize("operator", [RMS, pytest.param(LAYER, marks=thorough)])


@pytest.mark.parametrize(
    "operator, world_size, dtype, count",
    [(RMS, 1, BF16, 3), (RMS, 2, FP32, 2), (LAYER, 2, FP16, 3), (RMS, 3, BF16, 3), (LAYER, 3, FP32, 2)],
    ids=str,
)
def test_values(operator, world_size, dtype, count):
    for number, config in enumerate(CONFIGS):
        # On CPU ranks each config has another of the shapes than with the number of ranks before.
        shapes = SHAPES[:count] if THOROUGH else [SHAPES[(number + world_size) % count]]
        on_ranks(world_size, cases.computes, operator, dtype, shapes, config)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False}, {"residual": False, "norm_bias": False}, {"norm_dtype": FP32},
        {"bias": False, "residual": False, "norm_bias": False, "norm_dtype": FP32},
    ],
    ids=str,
)
@each_operator
def test_optional_operands(operator, options):
    for config in ("fused, split K", "separate", "torch"):
        on_ranks(2, cases.computes, operator, BF16, SHAPES[1:2], config, **options)


@pytest.mark.parametrize("operator, world_size, dtype", [(RMS, 2, FP32), (LAYER, 3, BF16)], ids=str)
def test_long_rows(operator, world_size, dtype):
    assert LONG[1] > registers_hold(CONFIGS["fused"].tiles.num_warps, dtype)
    for config in ("fused", "fused, shared rows"):
        on_ranks(world_size, cases.computes, operator, dtype, [LONG], config)


@either_operator
def test_exact_sums(operator):
    for config in FUSED:
        on_ranks(3, cases.sums_exactly, operator, BF16, config)


@either_operator
def test_poisoned_memory(operator):
    on_ranks(3, cases.reuses_poisoned_memory, operator)


@either_operator
def test_ranks_running_ahead(operator):
    on_ranks(3, cases.runs_ahead_of_peers, operator)


@each_operator
def test_special_values(operator):
    on_ranks(3, cases.keeps_special_values, operator)


@pytest.mark.parametrize("world_size", [1, 3])
@each_operator
def test_no_rows(operator, world_size):
    on_ranks(world_size, cases.computes_without_rows, operator)


@each_operator
def test_batch_invariance(operator):
    on_ranks(2, cases.is_batch_invariant, operator)


@either_operator
def test_layouts(operator):
    on_ranks(2, cases.supports_any_layout, operator)


@pytest.mark.parametrize(
    "world_size, dtype, config, options",
    [
        (1, FP32, "default", {}),
        (2, BF16, "fused", {"norm_dtype": FP32}),
        (3, FP32, "separate", {"bias": False}),
        (3, FP16, "fused, shared rows", {}),
        (2, BF16, "torch", {"residual": False, "norm_bias": False}),
    ],
    ids=str,
)
@each_operator
def test_gradients(operator, world_size, dtype, config, options):
    on_ranks(world_size, cases.has_gradients, operator, dtype, config, **options)


@each_operator
def test_subsets_of_gradients(operator):
    on_ranks(2, cases.has_subsets_of_gradients, operator)


@either_operator
def test_main_grad(operator):
    on_ranks(2, cases.accumulates_main_grad, operator)


@either_operator
def test_autograd_features(operator):
    on_ranks(2, cases.supports_autograd_features, operator)


@pytest.mark.parametrize("operator, config", [(RMS, "fused"), (LAYER, "default")])
def test_compile(operator, config):
    on_ranks(2, cases.compiled_equals_eager, operator, config)
    on_ranks(2, cases.compiled_codes_equal_eager, operator)


@pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")
@pytest.mark.parametrize("world_size", [2, 4])
@each_operator
def test_cuda_graph(operator, world_size):
    on_ranks(world_size, cases.replays_in_a_graph, operator)


@either_operator
def test_call_cache(operator):
    on_ranks(2, call_cases.caches_calls, operator)


@pytest.mark.parametrize("world_size", [1, 2])
@each_operator
def test_invalid_arguments(operator, world_size):
    on_ranks(world_size, call_cases.rejects_invalid_arguments, operator)


@either_operator
def test_disagreement_raises_on_every_rank(operator):
    on_ranks(3, call_cases.reports_disagreement, operator)


@either_operator
def test_missing_rank(operator):
    for rank, error in enumerate(on_ranks(3, call_cases.misses_a_rank, operator)):
        if rank == 1:
            assert error is None
        else:
            assert type(error) is PeerTimeoutError, repr(error)
            assert (error.operator, error.rank, error.peer) == (operator, rank, 1)


# ---- tuning ----


@pytest.mark.parametrize("operator, layout", [(RMS, "rows"), (LAYER, "fp8")])
def test_tuning(operator, layout):
    for method, source, text in on_ranks(2, call_cases.uses_tuned_config, operator, layout):
        assert source == "cache" and method in ("fused", "separate", "torch") and operator in text
        assert method != "torch" or "torch matmul, collective, addition and norm" in text
