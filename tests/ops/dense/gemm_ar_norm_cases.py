"""Test bodies for gemm_ar_rms_norm and gemm_ar_layer_norm. Every rank runs them; see test_gemm_ar_norm.py."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint

import tdkernels
from tdkernels import GemmArNormConfig, Tiles
from tdkernels.autotune.invariance import batch_invariant
from tests.ops.dense.cases import LAYOUTS
from tests.ops.dense.gemm_ar_norm_oracle import OPERANDS, NormCase, exact_norm, same_bits_on_all_ranks
from tests.support.ranks import a_group, device
from tests.test_protocol import poison

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RMS, LAYER = "gemm_ar_rms_norm", "gemm_ar_layer_norm"
SMALL = Tiles(16, 32, 32, num_warps=1, num_stages=1)
CONFIGS = {
    "default": None,
    "fused": GemmArNormConfig(tiles=SMALL, num_programs=2),
    "fused, wide": GemmArNormConfig(tiles=replace(SMALL, block_n=128), num_programs=2),
    "fused, split K": GemmArNormConfig(tiles=SMALL, split_k=3, num_programs=5),
    "fused, shared rows": GemmArNormConfig(tiles=SMALL, row_programs=4, num_programs=64),
    "fused, without tiles": GemmArNormConfig(split_k=2, row_programs=2, num_programs=3),
    "separate": GemmArNormConfig("separate"),
    "torch": GemmArNormConfig("torch"),
}
FUSED = [name for name in CONFIGS if name.startswith("fused")]
# rows, n, k of a rank. One tile of 16 x 32; several rows and columns of tiles; odd sizes; more rows than programs.
SHAPES = [(1, 32, 16), (5, 33, 7), (18, 70, 51)]
LONG = (3, 1100, 9)  # a row does not stay in the registers of one warp


# ---- values ----


def computes(operator, dtype, shapes, config, **options):
    """Check r bit by bit, y against fp64, and fp8 codes and scales bit by bit against y, for each shape."""
    for seed, shape in enumerate(shapes):
        case = NormCase(operator, dtype, *shape, seed=seed, **options)
        y, r = case.call(config=CONFIGS[config])
        # torch adds in its own order. "separate", the default for many rows, adds the bias before it rounds a partial.
        fused = config in FUSED or (config == "default" and shape[0] <= 16)
        case.check(y, r, in_rank_order=fused or (config in ("separate", "default") and case.bias is None))
        with torch.no_grad():
            codes, r_of_codes, scale = case.call(config=CONFIGS[config], quantize="fp8")
        assert torch.equal(r_of_codes, r), config
        expected_codes, expected_scale = tdkernels.quantize_fp8(y.detach().view(-1, y.shape[-1]), dtype=codes.dtype)
        assert scale.shape == (*y.shape[:-1], 1) and torch.equal(scale.view(-1, 1), expected_scale), case.title
        assert torch.equal(codes.view(-1, y.shape[-1]).view(torch.uint8), expected_codes.view(torch.uint8)), case.title
        same_bits_on_all_ranks(case.title, y, r, codes, scale)


def sums_exactly(operator, dtype, config):
    """Check r bit by bit against the exact sum, with small integers that use all of K."""
    for seed, shape in enumerate(((2, 34, 140), (18, 65, 33))):
        case = NormCase(operator, dtype, *shape, seed=seed, kind="integers")
        y, r = case.call(config=CONFIGS[config])
        case.check(y, r, in_rank_order=True)


def reuses_poisoned_memory(operator):
    """Make calls of different sizes with new random operands, between which all buffers are filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills its memory with NaN
    try:
        with a_group() as group:
            for seed in range(8):
                shape = [(5, 33, 7), (18, 70, 51), LONG, (1, 32, 200)][seed % 4]
                config = CONFIGS[FUSED[seed % len(FUSED)]]
                case = NormCase(operator, (BF16, FP32)[seed // 4], *shape, seed=seed)
                y, r = case.call(group=group, config=config)
                poison(group)
                case.check(y, r, in_rank_order=True)
            del group
    finally:
        torch.use_deterministic_algorithms(before)


def runs_ahead_of_peers(operator):
    """Make calls with different data and no synchronization; rank 0, 1 or 2 is late."""
    for late in range(dist.get_world_size()):
        cases = [NormCase(operator, FP32, 5, 70, 9, seed=10 * late + seed) for seed in range(6)]
        if dist.get_rank() == late:
            time.sleep(0.1)
        results = [case.call(config=CONFIGS["fused"]) for case in cases]
        for case, (y, r) in zip(cases, results, strict=True):
            case.check(y, r, in_rank_order=True)


def keeps_special_values(operator):
    """Check that NaN and infinity stay in their rows, and reach y, codes and scales as torch's norm does."""
    case = NormCase(operator, BF16, 6, 40, 9)
    if dist.get_rank() == 1:
        case.x.data[1, 3] = torch.nan
        case.x.data[2, 8] = torch.inf
    case.residual.data[4, 5] = -torch.inf
    with torch.no_grad():
        y, r = case.call(config=CONFIGS["fused, shared rows"])
        codes, _, scale = case.call(config=CONFIGS["fused, shared rows"], quantize="fp8")
    tdkernels.synchronize()
    assert r[1].isnan().all() and not r[2].isfinite().any()
    assert r[4, 5] == -torch.inf and r[4].isfinite().sum() == 39
    assert r[[0, 3, 5]].isfinite().all() and y[[0, 3, 5]].isfinite().all()
    expected = exact_norm(r, case.norm_weight, case.norm_bias, case.eps, case.is_layer_norm)
    assert torch.equal(y.isnan().cpu(), expected.isnan()) and torch.equal(y.isinf().cpu(), expected.isinf())
    assert y[1].isnan().all() and y[4].isnan().any()
    assert torch.equal(scale.isnan()[:, 0], y.isnan().any(1))
    same_bits_on_all_ranks(case.title, y, r, codes, scale)


def computes_without_rows(operator):
    """Check empty outputs and zero gradients, for calls in any mode, and that the ranks stay synchronized."""
    for config in ("default", "fused", "separate", "torch"):
        case = NormCase(operator, BF16, 0, 40, 9)
        y, r = case.call(config=CONFIGS[config])
        assert y.shape == r.shape == (0, 40) and y.dtype == BF16
        torch.autograd.backward([y, r], [torch.zeros_like(y), torch.zeros_like(r)])
        for name, operand in case.operands().items():
            assert operand.grad is not None and operand.grad.shape == operand.shape, name
            assert not operand.grad.any(), name
        with torch.no_grad():
            codes, r, scale = case.call(config=CONFIGS[config], quantize="fp8")
        assert codes.shape == r.shape == (0, 40) and scale.shape == (0, 1) and codes.dtype.itemsize == 1
    after = NormCase(operator, BF16, 3, 40, 9)
    after.check(*after.call(), in_rank_order=True)


def is_batch_invariant(operator):
    """Check in the batch-invariant mode that a row has the same bits in batches of any size, at any place."""
    whole = NormCase(operator, BF16, 40, 96, 150, kind="random")
    with batch_invariant(), torch.no_grad():
        for config in (None, CONFIGS["fused, without tiles"]):
            y, r = whole.call(config=config)
            for rows in ([7], [39, 7], [3] * 17 + [7]):
                part = replace_operands(whole, x=whole.x[rows], residual=whole.residual[rows])
                part_y, part_r = part.call(config=config)
                assert torch.equal(part_y, y[rows]) and torch.equal(part_r, r[rows]), (config, rows)
        whole.check(y, r, in_rank_order=False)
        for method in ("separate", "torch"):
            with pytest.raises(ValueError, match=f'{operator}: config .*method must be "fused", not {method!r}'):
                whole.call(config=CONFIGS[method])


# ---- layouts ----


def replace_operands(case, **operands):
    """Return a shallow copy of a case with other operands."""
    other = object.__new__(NormCase)
    other.__dict__ = case.__dict__ | operands
    return other


def supports_any_layout(operator):
    """Check operands that are transposed, strided or misaligned, with NaN in the gaps, and leading dimensions."""
    for shape in ((5, 33, 7), (16, 64, 32)):
        for config in ("fused", "separate"):
            case = NormCase(operator, BF16, *shape)
            y, r = case.call(config=CONFIGS[config])
            case.check(y, r, in_rank_order=config == "fused")
            for name, change in (
                ("x", "transposed"), ("x", "misaligned"), ("x", "row_strided"), ("weight", "transposed"),
                ("weight", "row_strided"), ("weight", "every_second"), ("residual", "transposed"),
                ("residual", "misaligned"), ("norm_weight", "misaligned"), ("norm_bias", "every_second"),
                ("bias", "misaligned"), ("bias", "every_second"),
            ):
                other = replace_operands(case, **{name: _in_layout(getattr(case, name).detach(), change)})
                other_y, other_r = other.call(config=CONFIGS[config])
                if config == "fused":
                    assert torch.equal(other_r, r) and torch.equal(other_y, y), (name, change)
                else:  # torch's GEMM may select another kernel for another layout
                    other.check(other_y, other_r, in_rank_order=False)
            leading = replace_operands(
                case, x=case.x.view(1, shape[0], 1, shape[2]), residual=case.residual.view(1, shape[0], 1, shape[1])
            )
            outputs = leading.call(config=CONFIGS[config])
            assert all(output.shape == (1, shape[0], 1, shape[1]) for output in outputs)
            assert torch.equal(outputs[0].view_as(y), y) and torch.equal(outputs[1].view_as(r), r)
            case.run_backward(*outputs)
            case.check_gradients(r)


def _in_layout(tensor, change):
    matrix = tensor if tensor.dim() == 2 else tensor[None]
    changed = LAYOUTS[change](matrix, torch.nan)
    return changed if tensor.dim() == 2 else changed[0]


# ---- gradients ----


def has_gradients(operator, dtype, config, **options):
    """Check the gradients of every operand for gradients of y and r, of y alone, and of r alone."""
    for seed, used in enumerate(("yr", "y", "r")):
        case = NormCase(operator, dtype, 19, 40, 17, seed=seed, **options)
        y, r = case.call(config=CONFIGS[config])
        case.check(y, r, in_rank_order=config.startswith("fused"))
        case.run_backward(y, r, used)
        case.check_gradients(r, used)


def has_subsets_of_gradients(operator):
    """Check that only operands that require a gradient get one, and that it is that of the full backward."""
    for wanted in (["x"], ["weight"], ["bias"], ["residual"], ["norm_weight"], ["norm_bias"], ["x", "norm_weight"]):
        case = NormCase(operator, FP32, 19, 40, 17)
        for name, operand in case.operands().items():
            operand.requires_grad_(name in wanted)
        y, r = case.call(config=CONFIGS["fused"])
        case.run_backward(y, r)
        assert [name for name in OPERANDS if getattr(case, name).grad is not None] == wanted
        case.check_gradients(r)


def accumulates_main_grad(operator):
    for dtype in (BF16, FP32):
        case = NormCase(operator, BF16, 19, 40, 17, kind="random")
        main_grad = torch.full(case.weight.shape, 0.5, dtype=dtype, device=device())
        y, r = case.call(config=CONFIGS["fused"], main_grad=main_grad)
        case.run_backward(y, r)
        assert case.weight.grad is None
        case.check_gradients(r, added={"weight": (main_grad, 0.5)})


def supports_autograd_features(operator):
    """Check checkpointing, autocast, second derivatives, and modes without gradient."""
    case = NormCase(operator, BF16, 19, 40, 17)
    outputs = checkpoint.checkpoint(lambda: case.call(config=CONFIGS["fused"]), use_reentrant=False)
    case.run_backward(*outputs)
    case.check_gradients(outputs[1])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y, r = case.call(config=CONFIGS["fused"])
        assert not y.requires_grad and not r.requires_grad
        case.check(y, r, in_rank_order=True)
    with pytest.raises(RuntimeError, match=f"{operator}: .*second derivative"):
        torch.autograd.grad(case.call()[0].sum(), case.x, create_graph=True)
    with pytest.raises(RuntimeError, match=f'{operator}: quantize="fp8" has no gradient'):
        case.call(quantize="fp8")
    wide = replace_operands(case, **{name: getattr(case, name).detach().float() for name in ("x", "weight", "bias")})
    with torch.autocast(device().type, BF16):
        y, r = wide.call(config=CONFIGS["fused"])
    case.check(y, r, in_rank_order=True)


class Block(nn.Module):
    """A row-parallel linear layer with residual and norm, twice; the second norm has no residual."""

    def __init__(self, operator, width, hidden, config):
        super().__init__()
        self.operator, self.config = getattr(tdkernels, operator), config
        for name, shape in (("weight", (hidden, width)), ("bias", (hidden,)), ("back", (hidden, hidden))):
            setattr(self, name, nn.Parameter(torch.randn(shape) / width))
        self.norm_weight = nn.Parameter(1 + torch.randn(hidden) / 4)
        self.norm_bias = nn.Parameter(torch.randn(hidden) / 4)

    def forward(self, x, residual):
        norms = {"norm_bias": self.norm_bias, "config": self.config}
        y, r = self.operator(x, self.weight, residual, self.norm_weight, bias=self.bias, **norms)
        y, _ = self.operator(y + r, self.back, None, self.norm_weight, **norms)
        return y


def compiled_equals_eager(operator, config):
    torch._dynamo.reset()
    torch.manual_seed(3)
    module = Block(operator, 12, 40, CONFIGS[config]).to(device())
    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for rows in (4, 4, 7):  # the third call has a shape that was not traced
        x, residual = torch.randn(2, rows, 12, device=device()), torch.randn(2, rows, 40, device=device())
        results = []
        for run in (module, compiled):
            given = x.clone().requires_grad_()
            y = run(given, residual)
            gradients = torch.autograd.grad(y.square().sum(), [given, *module.parameters()])
            with torch.no_grad():
                results.append([y.detach(), *gradients, run(x, residual)])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-4)
    tdkernels.synchronize()


def compiled_codes_equal_eager(operator):
    case = NormCase(operator, BF16, 5, 40, 12)
    compiled = torch.compile(lambda: case.call(quantize="fp8"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for one, other in zip(compiled(), case.call(quantize="fp8"), strict=True):
            assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    arguments = *(operand.detach() for operand in case.operands().values()), operator, 1e-5
    group, checks = dist.group.WORLD.group_name, ("test_schema", "test_faketensor")
    for keep in (False, True):
        op = torch.ops.tdkernels.gemm_ar_norm.default
        torch.library.opcheck(op, (*arguments, keep, group, ""), test_utils=checks)
    torch.library.opcheck(torch.ops.tdkernels.gemm_ar_norm_fp8.default, (*arguments, group, ""), test_utils=checks)


def replays_in_a_graph(operator):
    """Capture a call with gradients, and one with codes, in a CUDA graph; replay both with new data."""
    static = NormCase(operator, BF16, 24, 80, 136, kind="random")
    config = replace(CONFIGS["fused"], tiles=Tiles(32, 64, 64, num_warps=4, num_stages=2), split_k=2)

    def step():
        y, r = static.call(config=config)
        gradients = torch.autograd.grad([y, r], list(static.operands().values()), [static.dy, static.dr])
        with torch.no_grad():
            codes, _, scale = static.call(config=config, quantize="fp8")
        return y.detach(), r.detach(), codes, scale, *gradients

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in range(1, 6):
        fresh = NormCase(operator, BF16, 24, 80, 136, kind="random", seed=seed)
        with torch.no_grad():
            for name in (*OPERANDS, "dy", "dr"):
                getattr(static, name).copy_(getattr(fresh, name))
        for result in results:
            result.view(torch.uint8).fill_(0xFF)
        graph.replay()
        y, r, codes, scale, *gradients = results
        fresh.check(y, r, in_rank_order=False)
        expected = tdkernels.quantize_fp8(y, dtype=codes.dtype)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
        for name, gradient in zip(OPERANDS, gradients, strict=True):
            getattr(fresh, name).grad = gradient
        fresh.check_gradients(r)
        eager = NormCase(operator, BF16, 24, 80, 136, seed=seed)  # an eager call between replays
        eager.check(*eager.call(config=config), in_rank_order=True)
