"""torch.ops.symm_mem for scaled fp8 operands on tdkernels: equal to the product of the dequantized operands.

Codes are small integers and scales are powers of two, so all products and sums are exact.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist

from tdkernels.integrations import symm_mem
from tests.integrations.test_symm_mem import group_name, runs_torch, strides, strides_of_torch
from tests.support.ranks import DEVICE, device, on_ranks

GATHER, SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def generator(seed):
    return torch.Generator().manual_seed(seed)


def codes(*shape, seed, dtype=E4M3):
    """Draw -1, 0 and 1."""
    return torch.randint(-1, 2, shape, generator=generator(seed)).float().to(device(), dtype)


def scales(*shape, seed):
    """Draw powers of two."""
    return torch.exp2(torch.randint(-4, 5, shape, generator=generator(seed)).float()).to(device())


def weight_and_scale(k, n, row_wise, seed):
    """Return B [K, N], column-major, and its scale."""
    return codes(n, k, seed=seed).t(), scales(*((1, n) if row_wise else (1,)), seed=seed)


def gather(A, Bs, A_scale, B_scales, dim=0, biases=None, result_scales=None, out_dtypes=None, fast=None):
    none, number = [None] * len(Bs), len(Bs)
    return torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        A, Bs, A_scale, B_scales, dim, group_name(), biases or none, result_scales or none,
        out_dtypes or [BF16] * number, fast or [False] * number,
    )


def scatter(A, B, A_scale, B_scale, reduce_op="sum", dim=0, dim_of_A=0, shape=None, **options):
    shape = shape or [*A.shape[:-1], B.shape[1]]
    options = {"out_dtype": BF16, **options}
    return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        A, B, A_scale, B_scale, reduce_op, dim, dim_of_A, group_name(), shape, **options
    )


def meta(value):
    return [meta(one) for one in value] if isinstance(value, list) else value if value is None else value.to("meta")


# ---- all-gather ----


def gathers(shape, dim, scaling, row_wise, out_dtype, number=2, fast=False, with_bias=True):
    """Compare with the dequantized products. ``scaling`` of A: "tensor", "sharded" (row-wise) or "replicated"."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shards = [codes(*shape, seed=r, dtype=E5M2 if fast else E4M3) for r in range(ranks)]
    whole = torch.cat([shard.float() for shard in shards], dim)
    scale = scales(1, seed=7) if scaling == "tensor" else scales(*whole.shape[:-1], 1, seed=7)
    own_scale = scale.chunk(ranks, dim)[rank].contiguous() if scaling == "sharded" else scale
    pairs = [weight_and_scale(shape[-1], 16 * (i + 1), row_wise, 100 * rank + i) for i in range(number)]
    Bs, B_scales = map(list, zip(*pairs, strict=True))
    biases = [scales(B.shape[1], seed=i).to(out_dtype) if with_bias and i != 1 else None for i, B in enumerate(Bs)]
    call = Bs, own_scale, B_scales, dim, biases, None, [out_dtype] * number, [fast] * number
    A, ys = gather(shards[rank], *call)
    assert A.dtype == shards[0].dtype and torch.equal(A.float(), whole) and len(ys) == number
    for y, B, B_scale, bias in zip(ys, Bs, B_scales, biases, strict=True):
        expected = (whole.double() * scale) @ (B.double() * B_scale)
        expected = expected if bias is None else expected + bias.double()
        assert y.dtype == out_dtype and torch.equal(y, expected.to(out_dtype))
    assert strides((A, ys)) == strides_of_torch(shards[rank], Bs, dim, True)
    # With W = 1 torch's Meta kernel differs from its CUDA kernel. It rejects a mix of tensor-wise and row-wise scales.
    if ranks > 1 and row_wise == (scaling != "tensor"):
        on_meta = [meta(operand) for operand in (shards[rank], Bs, own_scale, B_scales)]
        assert strides((A, ys)) == strides(gather(*on_meta, dim, meta(biases), *call[5:]))


def gathers_all(cases):
    with symm_mem.installed():
        for case in cases:
            gathers(*case)
        assert symm_mem.counts()[GATHER] == {"tdkernels": len(cases), "torch": {}}


GATHERS = [
    ((5, 32), 0, "tensor", False, BF16, 1),
    ((5, 48), 0, "sharded", True, FP32, 3),
    ((5, 32), 0, "replicated", True, FP16, 2, True),
    ((4, 3, 32), 0, "sharded", True, BF16, 1, False, False),
    ((3, 4, 32), 1, "replicated", True, BF16),
    ((3, 4, 32), 1, "sharded", False, FP32),
    ((2, 2, 3, 144), 2, "tensor", True, BF16, 1, True),
    ((0, 32), 0, "sharded", True, BF16),
]


@pytest.mark.parametrize("world_size, cases", [(1, GATHERS), (2, GATHERS), (3, GATHERS[1:5:3])])
def test_all_gather_scaled_matmul(world_size, cases):
    on_ranks(world_size, gathers_all, cases)


def gathers_a_row_of_a_rank():
    """A scale [1, 1] of A [1, K] is row-wise in torch's contract, so the ranks may have different ones."""
    ranks = dist.get_world_size()
    B, B_scale = weight_and_scale(32, 16, False, 5)
    A = torch.ones(1, 32, device=device()).to(E4M3)
    scale = torch.full((1, 1), 2.0 ** dist.get_rank(), device=device())
    with symm_mem.installed():
        _, (y,) = gather(A, [B], scale, [B_scale])
    row = B.float().sum(0) * B_scale
    assert torch.equal(y.float(), torch.stack([row * 2.0**rank for rank in range(ranks)]))


def test_a_row_of_a_rank_has_its_own_scale():
    on_ranks(2, gathers_a_row_of_a_rank)


# ---- reduce-scatter ----


def scatters(shape, dim, reduce_op, row_wise_A, row_wise_B, out_dtype, reshaped=False, fast=False):
    """Compare with the dequantized products; ``reshaped``: A is passed as a matrix, as torch.compile does."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # With "avg" W equal partials, whose mean is exact in bf16, too.
    seeds = [0] * ranks if reduce_op == "avg" else range(ranks)
    As = [codes(*shape, seed=seed, dtype=E5M2 if fast else E4M3) for seed in seeds]
    A_scales = [scales(*((*shape[:-1], 1) if row_wise_A else (1,)), seed=20 + seed) for seed in seeds]
    pairs = [weight_and_scale(shape[-1], 6 * ranks, row_wise_B, 30 + seed) for seed in seeds]
    operands = zip(As, A_scales, pairs, strict=True)
    partials = [(A.double() * scale) @ (B.double() * B_scale) for A, scale, (B, B_scale) in operands]
    total = sum(partial.to(out_dtype).double() for partial in partials)  # partials are sent in out_dtype
    expected = (total / ranks if reduce_op == "avg" else total).chunk(ranks, dim)[rank].to(out_dtype)
    (A, A_scale), (B, B_scale) = (As[rank], A_scales[rank]), pairs[rank]
    if reshaped:
        A, A_scale = A.flatten(0, -2), A_scale.reshape(-1, 1)
    z = scatter(
        A, B, A_scale, B_scale, reduce_op, dim, 0 if reshaped else dim, [*shape[:-1], B.shape[1]], out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    assert z.dtype == out_dtype and z.is_contiguous() and torch.equal(z, expected)


def scatters_all(cases):
    with symm_mem.installed():
        for case in cases:
            scatters(*case)
        assert symm_mem.counts()[SCATTER] == {"tdkernels": len(cases), "torch": {}}


SCATTERS = [
    ((6, 32), 0, "sum", False, False, FP32),
    ((6, 48), 0, "avg", True, True, BF16),
    ((12, 2, 32), 0, "sum", True, True, FP32, False, True),
    ((2, 6, 32), 1, "sum", True, False, FP32),
    ((2, 6, 32), 1, "avg", False, True, FP16, True),
    ((3, 6, 2, 32), 1, "sum", True, True, FP32, True),
    ((0, 16), 0, "sum", False, True, BF16),
]


@pytest.mark.parametrize("world_size, cases", [(1, SCATTERS), (2, SCATTERS), (3, SCATTERS[3:6:2])])
def test_scaled_matmul_reduce_scatter(world_size, cases):
    on_ranks(world_size, scatters_all, cases)


# ---- calls that run torch's kernel ----


def gathers_by_torch():
    """Calls that tdkernels does not support give torch's results, and are counted with the reason."""
    ranks = dist.get_world_size()
    A, one = codes(16, 32, seed=1), torch.ones(1, device=device())
    (B, B_scale), (C, C_scale) = (weight_and_scale(32, 16, False, seed) for seed in (2, 3))
    scale, whole = scales(1, seed=4), torch.cat([A.float()] * ranks)
    y_of_B, y_of_C = ((whole * scale) @ (B.float() * B_scale), (whole * scale) @ (C.float() * C_scale))
    with symm_mem.installed():
        zeros = torch.zeros(16, dtype=BF16, device=device())
        for options, dtypes in (
            ({"out_dtypes": [BF16, FP32]}, [BF16, FP32]), ({"fast": [False, True]}, [BF16, BF16]),
            ({"biases": [None, zeros], "out_dtypes": [FP16, FP16]}, [FP16, FP16]),
        ):
            gathered, ys = gather(A, [B, C], scale, [B_scale, C_scale], **options)
            assert torch.equal(gathered.float(), whole) and [y.dtype for y in ys] == dtypes
            assert torch.equal(ys[0].float(), y_of_B.to(dtypes[0]).float())
            assert torch.equal(ys[1].float(), y_of_C.to(dtypes[1]).float())
        _, (y,) = gather(A, [B], scale, [B_scale], result_scales=[one])
        assert torch.equal(y.float(), y_of_B)
        _, (y,) = gather(A, [B], scale, [B_scale], out_dtypes=[None])
        assert y.dtype == E4M3 and torch.equal(y.float(), y_of_B.to(E4M3).float())
        assert torch.equal(gather(A, [], scale, [])[0].float(), whole)
        assert symm_mem.counts()[GATHER] == {"tdkernels": 0, "torch": {
            "out_dtypes or use_fast_accum differ": 2, "a bias does not have out_dtype": 1, "result_scale is given": 1,
            "out_dtype None is not supported": 1, "Bs is empty": 1,
        }}


@pytest.mark.skipif(DEVICE == "cuda", reason="on GPUs torch's GEMM rejects some of these biases and dtypes")
@runs_torch
def test_unsupported_all_gathers_run_on_torch():
    on_ranks(2, gathers_by_torch)


def scatters_by_torch():
    """torch adds the bias of each rank, and the results are counted with the reason."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    A, (B, B_scale), scale = codes(4, 32, seed=1), weight_and_scale(32, 16, False, 2), scales(1, seed=3)
    bias = torch.full((16,), rank + 1.0, dtype=BF16, device=device())
    y = ((A.float() * scale) @ (B.float() * B_scale)).chunk(ranks)[rank]
    with symm_mem.installed():
        z = scatter(A, B, scale, B_scale, bias=bias)
        assert torch.equal(z.float(), (ranks * y + sum(range(1, ranks + 1))).to(BF16).float())
        z = scatter(A, B, scale, B_scale, "avg", result_scale=torch.ones(1, device=device()))
        assert torch.equal(z.float(), y)
        assert symm_mem.counts()[SCATTER] == {
            "tdkernels": 0, "torch": {"bias is given": 1, "result_scale is given": 1},
        }


@runs_torch
def test_unsupported_reduce_scatters_run_on_torch():
    on_ranks(2, scatters_by_torch)


def gives_reasons():
    """Return the reasons of calls that torch's kernel rejects on a CPU or on all devices, from both operators."""
    A, (B, B_scale), one = codes(4, 128, seed=1), weight_and_scale(128, 16, False, 2), torch.ones(1, device=device())
    by_block = torch.ones(4, 2, device=device())
    with symm_mem.installed():
        for operands in (
            (A.to(BF16), B.to(BF16), one, B_scale), (A, B[:, :0], one, B_scale),
            (A[:, :8].contiguous(), B[:8].t().contiguous().t(), one, B_scale), (A, B, by_block, B_scale),
            (A, B, one, torch.ones(2, 16, device=device())), (A, B, one.double(), B_scale),
        ):
            A_, B_, A_scale, scale_of_B = operands
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                gather(A_, [B_], torch.cat([A_scale] * 2) if A_scale.dim() == 2 else A_scale, [scale_of_B])
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                scatter(A_, B_, A_scale, scale_of_B)
        return symm_mem.counts()


@pytest.mark.skipif(DEVICE == "cuda", reason="an error of torch's kernel may leave its workspace broken")
def test_reasons():
    reasons = {
        "torch.bfloat16 is not supported": 1, "K or N is 0": 1, "K is not a multiple of 16": 1,
        "the scales are not tensor-wise or row-wise": 2, "the scales are not fp32": 1,
    }
    for counts in on_ranks(2, gives_reasons):
        assert counts[GATHER] == counts[SCATTER] == {"tdkernels": 0, "torch": reasons}
