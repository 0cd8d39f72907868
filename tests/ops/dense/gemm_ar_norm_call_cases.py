"""Test bodies for calls of gemm_ar_rms_norm and gemm_ar_layer_norm: call cache, errors, peers and tuning.

Every rank runs them; see test_gemm_ar_norm.py.
"""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import GemmArNormConfig, Tiles, autotune
from tdkernels.ops.dense.gemm_ar_norm import launch
from tdkernels.runtime import gpu
from tests.ops.dense.cases import LAYOUTS
from tests.ops.dense.gemm_ar_norm_cases import BF16, CONFIGS, FP16, FP32, replace_operands
from tests.ops.dense.gemm_ar_norm_oracle import NormCase
from tests.support.ranks import a_group, device
from tests.test_protocol import failure_of, timeout

# ---- call cache ----


def caches_calls(operator):
    """Check that repeated calls skip validation and, from the third call on, launch directly, with new operands."""
    launches = []
    original = launch.launch_cached
    with pytest.MonkeyPatch.context() as patch, a_group() as group, torch.no_grad():
        patch.setattr(launch, "launch_cached", lambda *call: launches.append(call) or original(*call))
        for quantize in (None, "fp8"):
            for leading in (False, True):
                launches.clear()
                for seed in range(5):
                    case = NormCase(operator, BF16, 6, 40, 24, seed=seed)
                    given = case
                    if leading:
                        shapes = case.x.view(2, 3, 24), case.residual.view(2, 3, 40)
                        given = replace_operands(case, x=shapes[0], residual=shapes[1])
                    y, r, *scale = given.call(group=group, config=CONFIGS["fused"], quantize=quantize)
                    assert y.shape == r.shape == given.residual.shape
                    if quantize is None:
                        case.check(y.view(6, 40), r.view(6, 40), in_rank_order=True)
                    else:
                        case.check_sum(r.view(6, 40), in_rank_order=True)
                        assert scale[0].shape == (*y.shape[:-1], 1) and y.dtype == gpu.e4m3_dtype(y.device)
                # Codes of an x with leading dimensions need a view of another dtype and shape.
                assert len(launches) == (5 if quantize and leading else 1), (quantize, leading, len(launches))
        case = NormCase(operator, BF16, 6, 40, 24)
        case.x = LAYOUTS["misaligned"](case.x.detach(), 0)  # copied in each call, so that it is never bound
        for _ in range(3):
            case.check(*case.call(group=group, config=CONFIGS["fused"]), in_rank_order=True)
        del group


# ---- errors ----


def rejects_invalid_arguments(operator):
    """Check the errors of one call on every rank; each names the operator, the argument and its shape."""
    case = NormCase(operator, BF16, 4, 6, 8)
    new = lambda *shape, dtype=BF16: torch.zeros(shape, dtype=dtype, device=device())  # noqa: E731
    for changes, error, *parts in (
        ({"x": new(4, 7)}, ValueError, "x [4, 7]", "weight [6, 8]"),
        ({"x": new(8)}, ValueError, "x must have at least 2 dimensions", "[8]"),
        ({"x": new(4, 8, dtype=torch.int32)}, TypeError, "x is torch.int32"),
        ({"weight": new(6, 8, dtype=FP16)}, TypeError, "weight is torch.float16"),
        ({"weight": new(0, 8)}, ValueError, "weight [0, 8]", "empty"),
        ({"bias": new(7)}, ValueError, "bias [7]", "weight [6, 8]"),
        ({"residual": new(4, 7)}, ValueError, "residual [4, 7]", "[4, 6]"),
        ({"residual": new(1, 4, 6)}, ValueError, "residual [1, 4, 6]", "[4, 6]"),
        ({"residual": new(4, 6, dtype=FP32)}, TypeError, "residual is torch.float32"),
        ({"norm_weight": new(8)}, ValueError, "norm_weight [8]", "[6]"),
        ({"norm_weight": new(1, 6)}, ValueError, "norm_weight [1, 6]", "[6]"),
        ({"norm_weight": new(6, dtype=FP16)}, TypeError, "norm_weight is torch.float16"),
        ({"norm_weight": None}, TypeError, "norm_weight"),
        ({"norm_bias": new(6, dtype=FP32)}, TypeError, "norm_bias is torch.float32"),
        ({"norm_bias": new(5)}, ValueError, "norm_bias [5]", "[6]"),
        ({"eps": -1.0}, ValueError, "eps", "-1.0"),
        ({"eps": torch.ones(())}, ValueError, "eps"),
    ):
        failure = failure_of(replace_operands(case, **changes).call)
        assert type(failure) is error, f"{changes}: {failure!r}"
        assert all(part in str(failure) for part in (f"{operator}: ", *parts)), f"{parts}: {failure}"
    for options, error, *parts in (
        ({"quantize": "int8"}, ValueError, "quantize", "int8"),
        ({"main_grad": new(6, 7)}, ValueError, "main_grad [6, 7]", "weight [6, 8]"),
        ({"config": tdkernels.GemmArConfig()}, TypeError, "config", "GemmArNormConfig"),
        ({"config": GemmArNormConfig("best")}, ValueError, 'method must be "fused", "separate" or "torch"'),
        ({"config": GemmArNormConfig(row_programs=3)}, ValueError, "row_programs must be 1, 2, 4 or 8, not 3"),
        ({"config": GemmArNormConfig(split_k=0)}, ValueError, "split_k must be at least 1, not 0"),
        ({"config": GemmArNormConfig(num_programs=0)}, ValueError, "num_programs must be at least 1, not 0"),
        ({"config": GemmArNormConfig(tiles=Tiles(24))}, ValueError, "block_m must be a power of two"),
    ):
        failure = failure_of(case.call, **options)
        assert type(failure) is error and all(part in str(failure) for part in (f"{operator}: ", *parts)), failure
    case.check(*case.call(), in_rank_order=True)


def reports_disagreement(operator):
    """Check that every rank raises if rank 1 makes a different call, and that the group stays usable."""
    odd = dist.get_rank() == 1
    new = lambda *shape, dtype=BF16: torch.zeros(shape, dtype=dtype, device=device())  # noqa: E731
    for field, operands, options in (
        ("M", {"x": new(3, 9), "residual": new(3, 40)}, {}),
        ("K/W", {"x": new(5, 8), "weight": new(40, 8)}, {}),
        ("eps", {"eps": 1e-3}, {}),
        ("has_residual", {"residual": None}, {}),
        ("has_bias", {"bias": None}, {}),
        ("has_norm_bias", {"norm_bias": None}, {}),
        ("norm_weight_dtype", {"norm_weight": new(40, dtype=FP32), "norm_bias": new(40, dtype=FP32)}, {}),
        ("quantize", {}, {"quantize": "fp8"}),
        ("config", {}, {"config": CONFIGS["fused, split K"]}),
        ("config", {}, {"config": CONFIGS["torch"]}),
    ):
        with a_group() as group, torch.no_grad():
            case = NormCase(operator, BF16, 5, 40, 9)
            given = {"config": CONFIGS["fused"]} if field == "config" else {}
            odd_case = replace_operands(case, **operands) if odd else case
            error = failure_of(odd_case.call, group=group, **(given | (options if odd else {})))
            assert type(error) is ValueError and "the ranks disagree" in str(error), f"{field}: {error!r}"
            assert f"{field} is " in str(error) and "on rank 1" in str(error) and operator in str(error), str(error)
            case.check(*case.call(group=group, **given), in_rank_order=True)
            del group


def misses_a_rank(operator):
    """Let rank 1 omit a call of a cached shape; return the errors of the others."""
    with a_group() as group:
        case = NormCase(operator, FP32, 5, 40, 9)
        with torch.no_grad():
            for _ in range(2):
                case.check(*case.call(group=group, config=CONFIGS["fused"]), in_rank_order=True)
            dist.barrier()
            error = None
            if dist.get_rank() != 1:
                with timeout(1.0):
                    error = failure_of(case.call, group=group, config=CONFIGS["fused"])
        dist.barrier()
        del group
    return error


# ---- tuning ----


def uses_tuned_config(operator, layout):
    """Tune a problem, check calls without a config, and return what ``explain`` reports for them."""
    quantize = "fp8" if layout == "fp8" else None
    with a_group() as group:
        case = NormCase(operator, BF16, 6, 64, 32)
        sizes = 6, 64, 32 * case.world_size
        autotune.tune(operator, *sizes, layout=layout, group=group, budget_s=3.0)
        with autotune.mode("cached"), torch.no_grad():
            for seed in range(3):
                case = NormCase(operator, BF16, 6, 64, 32, seed=seed)
                case.check_sum(case.call(group=group, quantize=quantize)[1], in_rank_order=False)
            explained = tdkernels.explain(operator, *sizes, layout=layout, group=group)
            if quantize is None:
                operands = case.x, case.weight, case.residual, case.norm_weight
                assert str(tdkernels.explain(operator, *operands, group=group)) == str(explained)
        del group
    return explained.method, explained.source, str(explained)
