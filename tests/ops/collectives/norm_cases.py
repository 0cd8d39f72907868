"""Test bodies for all_reduce_rms_norm and all_reduce_layer_norm. Every rank runs them; see test_norm.py."""

import math
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError
from tdkernels.ops.collectives.norm import op as norm_op
from tdkernels.runtime import gpu
from tests.ops.collectives.cases import same
from tests.ops.collectives.norm_oracle import EPS, OPERATORS, NormCase, call, config_of, has_same_bits_on_all_ranks
from tests.support.ranks import a_group, device
from tests.support.subset import THOROUGH
from tests.test_protocol import failure_of, in_any_order, poison, timeout

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# With one warp, rows of more than 512 elements do not stay in registers.
CONFIGS = {
    "default": None,
    "torch": {"method": "torch"},
    "small pieces": {"send_columns": 64, "num_programs": 3, "num_warps": 1},
    "shared rows": {"row_programs": 4, "send_columns": 256, "num_programs": 8, "num_warps": 2},
    "two shots": {"exchange": "two_shot", "num_programs": 2, "num_warps": 1},
    "two shots, long pieces": {"exchange": "two_shot", "piece_rows": 3, "num_programs": 2, "num_warps": 2},
}
SHAPES = [(1, 1), (5, 8), (2, 3, 48), (7, 130), (2, 1000)]


def _options(seed):
    """Return options of a NormCase: each operand is None, and the weight fp32, in some of four cases."""
    without = [(), ("bias",), ("residual",), ("residual", "bias")][seed % 4]
    return {"without": without, "weight_dtype": FP32 if seed % 3 == 1 else None}


def computes(operator, dtype, shapes, changes, calls=2):
    """Check results for each shape with fresh operands; all but the first call come from the caches.

    In a default run only the first shape is called again.
    """
    is_exact = changes is None or changes.get("method") != "torch"
    for number, shape in enumerate(shapes):
        for seed in range(calls if number == 0 or THOROUGH else 1):
            case = NormCase(operator, shape, dtype, seed=10 * number + seed, **_options(number))
            operands = case.operands()
            outputs = case.call(changes, operands=operands)
            tdkernels.synchronize()
            case.check(outputs, is_exact)
            has_same_bits_on_all_ranks(outputs)
            for given, own in zip(operands, (case.full[case.rank], case.residual, case.weight, case.bias), strict=True):
                assert given is None or same(given, own), "an operand was modified"
                assert given is None or given.data_ptr() not in (output.data_ptr() for output in outputs)
            quantized = case.call(changes, "fp8", operands)
            tdkernels.synchronize()
            if is_exact:
                case.check_fp8(quantized, outputs[0])
            has_same_bits_on_all_ranks(quantized)
            for output in (*outputs, *quantized):
                output.view(torch.uint8).fill_(0xFF)


def supports_any_layout(operator):
    """Check strided, misaligned and expanded operands, and the same tensor as x and as residual."""
    layouts = {
        "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
        "misaligned": lambda t: torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape),
        "every second": lambda t: t.repeat_interleave(2, 0)[::2],
    }
    for changes in (CONFIGS["small pieces"], CONFIGS["two shots"]):
        for layout in layouts.values():
            case = NormCase(operator, (4, 32), BF16)
            for _ in range(2):
                case.check(case.call(changes, operands=[layout(operand) for operand in case.operands()]))
        case = NormCase(operator, (4, 32), BF16, without=("residual",))
        case.full[:] = case.full[0].clone()  # a residual is equal on all ranks
        x, _, weight, bias = case.operands()
        expected = case.full.float().sum(0)  # of at most three 16-bit numbers: exact
        outputs = case.call(changes, operands=(x, x, weight, bias))
        case.check(outputs, r=(expected + case.full[0].float()).to(BF16))
        outputs = case.call(changes, operands=(x, x + 1, weight, bias))  # another tensor of the same layout
        case.check(outputs, r=(expected + (case.full[0] + 1).float()).to(BF16))


def supports_empty_tensors(operator):
    for shape in ((0, 8), (2, 0, 5)):
        for quantize in (None, "fp8"):
            case = NormCase(operator, shape, BF16)
            y, r, *scale = case.call(None, quantize)
            assert y.shape == r.shape == shape and all(each.shape == (*shape[:-1], 1) for each in scale)
            assert r.dtype == BF16 and y.dtype == (gpu.e4m3_dtype(device()) if quantize else BF16)
        x, residual, weight, bias = case.operands()
        weight.requires_grad_()
        y, _ = case.call(operands=(x.requires_grad_(), residual, weight, bias))
        y.sum().backward()
        assert x.grad.shape == shape and same(weight.grad, torch.zeros_like(case.weight))
    computes(operator, BF16, [(2, 8)], None, 1)  # the ranks are still synchronized


def keeps_special_values(operator, changes):
    """Check rows of zeros, with a NaN, with an infinity and with huge numbers: no other row changes."""
    case = NormCase(operator, (6, 130), FP32, without=("bias",))
    plain_y, _ = case.call(changes)
    case.full[:, 0] = 0.0
    case.residual[0] = 0.0
    case.full[0, 1, 3] = math.nan
    case.full[-1, 2, 129] = math.inf
    case.full[:, 4] *= 2.0**40
    outputs = y, r = case.call(changes)
    case.check(outputs)
    codes, _, scale = quantized = case.call(changes, "fp8")
    case.check(outputs)
    has_same_bits_on_all_ranks((*outputs, *quantized))
    assert not y[0].any() and not codes[0].float().any() and scale[0] == 0.0
    assert y[1].isnan().all() and scale[1].isnan() and scale[2].isnan() and r[1].isnan().sum() == 1
    rest = [3, 5]
    assert same(y[rest], plain_y[rest].cpu()) and scale[rest].isfinite().all()
    kept = [0, 3, 4, 5]
    case.full, case.residual = case.full[:, kept], case.residual[kept]
    case.check_fp8([output[kept] for output in quantized], y[kept])


# ---- workspace reuse ----


def reuses_poisoned_memory(variants):
    """Check calls of changing sizes with every variant in turn, on a workspace filled with NaN, with ranks ahead."""
    for turn in range(2):
        for seed, (operator, changes) in enumerate(variants):
            dtype = [FP32, BF16, FP16][(turn + seed) % 3]
            shapes = [SHAPES[(2 * turn + seed + step) % len(SHAPES)] for step in range(2)]
            cases = [NormCase(operator, shape, dtype, 10 * turn + step) for step, shape in enumerate(shapes)]
            for case in cases:  # consensus checks and allocation
                case.call(changes)
            poison()
            with in_any_order(seed=seed):
                outputs = [(case.call(changes), case.call(changes, "fp8")) for case in cases]
            poison()  # outputs must not alias the workspace
            tdkernels.synchronize()
            for case, (plain, quantized) in zip(cases, outputs, strict=True):
                case.check(plain)
                case.check_fp8(quantized, plain[0])


def repeats_exactly(operator, changes):
    """Check that r and y do not depend on the ranks' order in time: fresh operands, then the same bits again."""
    for seed in range(3):
        case = NormCase(operator, (5, 130), BF16, seed)
        first = case.call(changes)
        case.check(first)
        time.sleep(0.01 * ((case.rank + seed) % 3))
        again = case.call(changes)
        assert all(same(one, other.cpu()) for one, other in zip(first, again, strict=True))


def is_batch_invariant(operator):
    """Check that a row has the same bits whatever the number of rows, and that other configs are rejected."""
    case = NormCase(operator, (40, 600), BF16)
    x, residual, weight, bias = case.operands()
    with tdkernels.batch_invariant():
        y, r = case.call()
        case.check((y, r))
        for rows in (1, 3, 17):
            few = case.call(operands=(x[-rows:], residual[-rows:], weight, bias))
            assert same(few[0], y[-rows:].cpu()) and same(few[1], r[-rows:].cpu()), rows
        explanation = tdkernels.explain(operator, x)
        assert explanation.source == "batch_invariant"
        with pytest.raises(ValueError, match=f'{operator}: config is not batch-invariant: method must be "fused"'):
            case.call({"method": "torch"})


# ---- caches and tuning ----


def hits_the_call_cache(operator):
    """Check which calls hit: those with the same layouts and settings."""
    hits, original = [], norm_op.call_cache.lookup_run

    def recording(*args):
        entry, key = original(*args)
        hits.append(entry is not None)
        return entry, key

    with a_group() as group, tdkernels.autotune.mode("off"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_op.call_cache, "lookup_run", recording)
        for changes in (None, {"method": "torch"}):
            for quantize in (None, "fp8"):
                for seed in range(3):
                    case = NormCase(operator, (3, 48), BF16, seed, group=group)
                    y, r, *scale = case.call(changes, quantize)
                    if not quantize:
                        case.check((y, r), is_exact=changes is None)
                    assert len(scale) == (quantize is not None)
                    assert y.dtype == (gpu.e4m3_dtype(y.device) if quantize else BF16)
                assert hits == [False, True, True], (changes, quantize)
                hits.clear()
        for options in ({"without": ("residual",)}, {"without": ("bias",)}, {"weight_dtype": FP32}):
            NormCase(operator, (3, 48), BF16, group=group, **options).call()
        getattr(tdkernels, operator)(*case.operands()[:3], eps=0.5, group=group)
        assert not any(hits)
        del group, case


def uses_tuned_config(operator):
    """Tune a problem, check calls without a config, and return what explain() reports for them."""
    case, found = NormCase(operator, (6, 40), FP32), []
    for layout in ("rows", "fp8"):
        tdkernels.autotune.tune(operator, 6, 40, dtype=FP32, layout=layout, device=device(), budget_s=5.0)
        with tdkernels.autotune.mode("cached"):
            explanation = tdkernels.explain(operator, case.operands()[0], layout=layout)
            outputs = case.call(None, "fp8" if layout == "fp8" else None)
            if layout == "rows":
                case.check(outputs, explanation.method == "fused")
            found.append((explanation.method, explanation.source, str(explanation)))
    return found


# ---- disagreeing and missing ranks ----


def rejects_invalid_arguments(operator):
    """Check validation errors, which are raised before any launch."""
    case = NormCase(operator, (3, 8), BF16)
    x, residual, weight, bias = case.operands()

    def rejected(error, message, changes=None, quantize=None, **operands):
        given = {"x": x, "residual": residual, "weight": weight, "bias": bias} | operands
        with pytest.raises(error, match=f"{operator}: {message}"):
            call(operator, *given.values(), changes, quantize=quantize)

    rejected(TypeError, "x must be a torch.Tensor", x=[1.0])
    rejected(TypeError, "x is torch.int32", x=x.int())
    rejected(ValueError, r"x must be \[\.\.\., hidden\]", x=x[0, 0])
    rejected(ValueError, r"x must be \[\.\.\., hidden\] .* \[3, 0\]", x=x[:, :0])
    rejected(ValueError, "x is on meta", x=x.to("meta"))
    for name, operand in (("x", x), ("residual", residual), ("weight", weight), ("bias", bias)):
        rejected(TypeError, f"{name} must be a plain dense tensor, not torch.sparse_coo", **{name: operand.to_sparse()})
    rejected(ValueError, r"residual \[2, 8\] must be \[3, 8\]", residual=residual[:2])
    rejected(TypeError, "residual is torch.float32", residual=residual.float())
    rejected(ValueError, r"weight \[4\] must be \[8\]", weight=weight[:4])
    rejected(TypeError, "weight is torch.float16", weight=weight.half())
    rejected(TypeError, "weight must be a torch.Tensor", weight=None)
    rejected(ValueError, r"bias \[1, 8\] must be \[8\]", bias=bias[None])
    rejected(TypeError, "bias is torch.float32", bias=bias.float())
    rejected(ValueError, 'quantize must be None or "fp8", not', quantize="e4m3")
    for changes, message in (
        ({"method": "nccl"}, 'method must be "fused" or "torch"'), ({"exchange": "ring"}, "exchange must be"),
        ({"row_programs": 3}, "row_programs must be 1, 2, 4 or 8"), ({"send_columns": 99}, "send_columns must be"),
        ({"piece_rows": 0}, "piece_rows must be at least 1"), ({"num_programs": 0}, "num_programs must be at least 1"),
        ({"num_warps": 3}, "num_warps must be"),
    ):
        rejected(ValueError, f"config cannot run: {message}", changes)
    function = getattr(tdkernels, operator)
    for eps in (-1e-6, math.inf, math.nan, "1e-6", True):
        with pytest.raises(ValueError, match=f"{operator}: eps must be a finite number of at least 0"):
            function(x, residual, weight, eps=eps)
    with pytest.raises(TypeError, match="must be a AllReduceNormConfig|must be an AllReduceNormConfig"):
        function(x, residual, weight, config=tdkernels.CollectiveConfig())


DISAGREEMENTS = {
    "shape": dict(shape=(4, 6)), "dtype": dict(dtype=FP16), "eps": dict(eps=0.25), "quantize": dict(quantize="fp8"),
    "has_residual": dict(without=("residual",)), "has_bias": dict(without=("bias",)),
    "weight_dtype": dict(weight_dtype=FP32), "config": dict(changes={"num_warps": 1}), "no rows": dict(shape=(0, 4)),
    "operator": dict(operator=None),
}


def reports_disagreement(operator):
    """Check that every rank raises if rank 1 of three makes a different call, and that the group stays usable."""
    odd = dist.get_rank() == 1
    for field, difference in DISAGREEMENTS.items():
        with a_group() as group:
            other = difference if odd else {}
            name = OPERATORS[operator == OPERATORS[0]] if "operator" in other else operator
            kept = {key: value for key, value in other.items() if key in ("without", "weight_dtype")}
            case = NormCase(name, other.get("shape", (6, 4)), other.get("dtype", BF16), group=group, **kept)
            changes = other.get("changes", {"num_warps": 2} if field == "config" else None)
            x, residual, weight, bias = case.operands()
            options = {"config": config_of(changes), "quantize": other.get("quantize"), "eps": other.get("eps", EPS)}
            error = failure_of(getattr(tdkernels, name), x, residual, weight, bias=bias, group=group, **options)
            assert type(error) is ValueError and "the ranks disagree" in str(error), (field, repr(error))
            word = {"no rows": "shape"}.get(field, field)
            assert f"{word} is " in str(error) and "on rank 1" in str(error), str(error)
            case = NormCase(operator, (6, 4), BF16, group=group)
            case.check(case.call())
            del group, case


def detects_mismatch_of_cached_calls(operator, changes):
    """Check that calls fail if all ranks know both calls but rank 1 makes the other one."""
    with a_group() as group:
        cases = [NormCase(operator, (rows, 40), FP32, group=group) for rows in (5, 6)]
        for case in cases * 2:
            case.check(case.call(changes))
        dist.barrier()
        case = cases[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(case.call, changes)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and operator in str(error), repr(error)
        del group, case, cases


def loses_rank_1(variants, leave, timeout_s):
    """Let rank 1 exit after two calls of each variant; check that the others raise, also in later calls."""
    cases = []
    for operator, changes in variants:
        case = NormCase(operator, (5, 40), FP32, group=dist.new_group())  # after a timeout a rank does not wait in it
        for _ in range(2):
            case.check(case.call(changes))
        cases.append(case)
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        leave()
    errors = []
    for case, (_, changes) in zip(cases, variants, strict=True):
        errors.append(failure_of(case.call, changes))
        assert str(failure_of(case.call, changes)) == str(errors[-1])
    return errors


def times_out_before_peers(changes):
    """Let rank 1 arrive after rank 0 has timed out; ranks that need a sum of rank 0 must fail, too."""
    with a_group() as group:
        case = NormCase(OPERATORS[0], (9, 40), FP32, group=group)
        for _ in range(2):
            case.check(case.call(changes))
        dist.barrier()
        if case.rank == 1:
            time.sleep(1.5)
        with timeout(0.5 if case.rank == 0 else 4.0):
            try:
                outputs = case.call(changes)
                tdkernels.synchronize()
                case.check(outputs)
                outcome = "right"
            except PeerTimeoutError as error:
                outcome = f"missed {error.peer}"
        del group, case
    return outcome
