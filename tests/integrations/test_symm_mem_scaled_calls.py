"""torch.ops.symm_mem for scaled fp8 operands: errors, explanation, tuning, registration and torch.compile."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem

from tdkernels.integrations import symm_mem, symm_mem_calls, symm_mem_scaled, symm_mem_tuning
from tests.integrations.test_symm_mem import group_name, runs_torch
from tests.integrations.test_symm_mem_scaled import (
    BF16,
    FP32,
    GATHER,
    SCATTER,
    codes,
    gather,
    scales,
    scatter,
    weight_and_scale,
)
from tests.support.ranks import device, on_ranks


def rejects_invalid_arguments():
    A, (B, b), one = codes(4, 32, seed=1), weight_and_scale(32, 16, False, 2), torch.ones(1, device=device())
    sizes = {size: torch.ones(*size, device=device()) for size in ((3, 1), (8, 1), (4, 2), (1, 4))}
    with symm_mem.installed():
        for call, message in (
            (lambda: gather(A[0], [B], one, [b]), rf"{GATHER}: A must have at least 2 .*\[32\]"),
            (lambda: gather(A, [B[:16]], one, [b]), r"B \[16, 16\] must have 32 rows for A \[4, 32\]"),
            (lambda: gather(A, [B], one, [b], 2), "gather_dim must be at least 0 and less than 2, not 2"),
            (lambda: gather(A, [B], one, [b], 1), "gather_dim must not be the last dimension, 1"),
            (lambda: gather(A, [B, B], one, [b]), "B_scales must have 2 elements, one for each B, not 1"),
            (lambda: gather(A, [B], one, [b], biases=[None] * 2), "biases must have 1 elements.* not 2"),
            (lambda: gather(A, [B], one, [b], fast=[False] * 2), "use_fast_accum must have 1 elements.* not 2"),
            (lambda: gather(A, [B], sizes[3, 1], [b]),
             r"A_scale \[3, 1\] must have one element, the shape \[4, 1\] or \[8, 1\] for A \[4, 32\] and gather_dim"),
            (lambda: gather(A, [B], sizes[4, 2], [b]), r"A_scale \[4, 2\] must have one element"),
            (lambda: scatter(A[0], B, one, b), f"{SCATTER}: A must have at least 2"),
            (lambda: scatter(A, B[0], one, b, shape=[4, 16]), "B must have 2 dimensions"),
            (lambda: scatter(A, B, one, b, "max"), "reduce_op must be \"sum\" or \"avg\", not 'max'"),
            (lambda: scatter(A, B, one, b, dim_of_A=2), "scatter_dim_after_maybe_reshape must be at least 0 and less"),
            (lambda: scatter(A, B, one, b, dim=2), "orig_scatter_dim must be at least 0 and less than 2, not 2"),
            (lambda: scatter(A, B, one, b, dim=1), "orig_scatter_dim must not be the last dimension, 1"),
            (lambda: scatter(A, B, one, b, shape=[2, 16]), r"4 rows and 16 columns for A \[4, 32\] .* not \[2, 16\]"),
            (lambda: scatter(A, B, one, b, shape=[1, 4, 16]), r"dimension 0 of output_shape \[1, 4, 16\] must be div"),
            (lambda: scatter(A, B, sizes[8, 1], b), r"A_scale \[8, 1\] must have one element or the shape \[4, 1\]"),
            (lambda: scatter(A, B, sizes[1, 4], b), r"A_scale \[1, 4\] must have one element or the shape \[4, 1\]"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        assert symm_mem.counts()[GATHER] == symm_mem.counts()[SCATTER] == {"tdkernels": 0, "torch": {}}


def test_invalid_arguments():
    on_ranks(2, rejects_invalid_arguments)


def passes_use_fast_accum():
    A, (B, b), one = codes(4, 32, seed=1), weight_and_scale(32, 16, False, 2), torch.ones(1, device=device())
    with (
        symm_mem.installed(),
        mock.patch.object(symm_mem_scaled, "ag_gemm", wraps=symm_mem_scaled.ag_gemm) as ag_gemm,
        mock.patch.object(symm_mem_scaled, "gemm_rs", wraps=symm_mem_scaled.gemm_rs) as gemm_rs,
    ):
        for fast in (True, False):
            gather(A, [B], one, [b], fast=[fast])
            scatter(A, B, one, b, use_fast_accum=fast)
            assert ag_gemm.call_args.kwargs["use_fast_accum"] is gemm_rs.call_args.kwargs["use_fast_accum"] is fast


def test_use_fast_accum():
    on_ranks(2, passes_use_fast_accum)


# ---- explanation, tuning, autograd and registration ----


def explains_calls():
    A, (B, b), one = codes(4, 32, seed=1), weight_and_scale(32, 16, False, 2), torch.ones(1, device=device())
    with symm_mem.installed():
        for _ in range(2):
            gather(A, [B, B], one, [b, b])
        gather(A, [B], torch.ones(4, 1, device=device()), [b], fast=[True])
        scatter(A, B, one, b)
        return symm_mem.explain().splitlines()


def test_explanation():
    *unscaled, title, two, one, scatter_title, scattered = on_ranks(2, explains_calls)[0]
    assert len(unscaled) == 2 and (title, scatter_title) == (GATHER, SCATTER)
    assert two.startswith("      2 x ag_gemm 8x64x32 float8_e4m3fn scaled on 2 x ") and ": parts (" in two
    assert two.endswith("; one gather for N of 16, 16")
    assert one.startswith("      1 x ag_gemm 8x32x32 float8_e4m3fn scaled fast on 2 x ") and ": parts (" in one
    assert scattered.startswith("      1 x gemm_rs 4x16x64 float8_e4m3fn scaled on 2 x ") and ": fused (" in scattered


def _torch_multiplies_row_wise(A, B):
    """Return whether torch multiplies with row-wise scales on this device. torch 2.11 does not on a CPU."""
    try:
        torch._scaled_mm(A, B, A.new_ones(len(A), 1, dtype=FP32), B.new_ones(1, B.shape[1], dtype=FP32), out_dtype=BF16)
    except RuntimeError:
        return False
    return True


def runs_the_faster_kernel():
    """With times that favour torch's kernel all ranks run it. Times are taken once for each kind of call."""
    A, (B, b), one = codes(16, 32, seed=1), weight_and_scale(32, 16, False, 2), torch.ones(1, device=device())
    timed = []

    def burst(call, inputs, calls, rank_device, group):
        call(inputs[0])
        timed.append(calls)
        return float(len(timed) % 2), 0.0  # tdkernels and torch by turns

    def choose(key, _device, *rest):  # as on a GPU
        return symm_mem_tuning.torch_is_faster(key, torch.device("cuda", 0), *rest)

    with contextlib.ExitStack() as patches:
        patches.enter_context(symm_mem.installed())
        patches.enter_context(mock.patch.object(symm_mem_tuning, "burst", burst))
        patches.enter_context(mock.patch.object(symm_mem_calls, "torch_is_faster", choose))
        patches.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        patches.enter_context(mock.patch.object(symm_mem_tuning, "get_mode", lambda: "on"))
        expected = (A.float() @ B.float() * b).repeat(dist.get_world_size(), 1)
        for _ in range(2):
            _, (y,) = gather(A, [B], one, [b])
            assert torch.equal(y.float(), expected)
        assert len(timed) == 6
        for options in ({"fast": [True]}, {"out_dtypes": [FP32]}):
            gather(A, [B], one, [b], **options)
        calls = 4
        if _torch_multiplies_row_wise(A, B):
            gather(A, [B], torch.ones(16, 1, device=device()), [b.expand(1, 16).contiguous()])
            calls = 5
        assert len(timed) == 6 * (calls - 1), "each of these has its own times; the first two calls share theirs"
        scatter(A, B, one, b)
        counts = symm_mem.counts()
        assert counts[GATHER] == {"tdkernels": 0, "torch": {"torch's kernel is faster": calls}}
        assert counts[SCATTER] == {"tdkernels": 0, "torch": {"torch's kernel is faster": 1}}


@runs_torch
def test_tuning():
    on_ranks(2, runs_the_faster_kernel)


def ignores_autograd_and_autocast():
    A, (B, b) = codes(4, 32, seed=1), weight_and_scale(32, 16, False, 2)
    one = torch.ones(1, device=device(), requires_grad=True)
    with symm_mem.installed(), torch.autocast(device().type, dtype=BF16):
        _, (y,) = gather(A, [B], one, [b], out_dtypes=[FP32])
        z = scatter(A, B, one, b, out_dtype=FP32)
        assert symm_mem.counts()[GATHER]["tdkernels"] == symm_mem.counts()[SCATTER]["tdkernels"] == 1
    assert y.dtype == z.dtype == FP32 and torch.equal(y[:4], A.float() @ B.float() * b)


def test_autograd_and_autocast_do_not_reach_the_kernels():
    on_ranks(2, ignores_autograd_and_autocast)


def registered():
    return {
        key: torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{op}", key)
        for op in (GATHER, SCATTER) for key in ("CUDA", "CPU")
    }


def test_install_and_uninstall():
    assert registered() == {"CUDA": True, "CPU": False}
    with symm_mem.installed():
        assert registered() == {"CUDA": True, "CPU": True}
        for operator in (GATHER, SCATTER):
            own, of_torch = symm_mem._registrations(operator, "CUDA")
            assert own.startswith(symm_mem.__file__) and of_torch.startswith(torch_symm_mem.__file__)
    assert registered() == {"CUDA": True, "CPU": False}


# ---- torch.compile ----


def gather_then_product(A, B, A_scale, B_scale):
    all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    return torch._scaled_mm(all_gather(A, 0, group_name()), B, A_scale, B_scale, out_dtype=BF16)


def product_then_scatter(A, B, A_scale, B_scale):
    """The rows of A are [2, 8], and their second dimension is scattered."""
    reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    y = torch._scaled_mm(A.view(-1, A.shape[-1]), B, A_scale, B_scale, out_dtype=BF16)
    return reduce_scatter(y.view(*A.shape[:-1], -1), "sum", 1, group_name())


def compiles():
    """torch.compile replaces collectives and scaled products by the operators, which run on tdkernels."""
    from torch._inductor import config

    ranks, rank = dist.get_world_size(), dist.get_rank()
    As, scale = [codes(16, 32, seed=r) for r in range(ranks)], scales(1, seed=8)
    B, b = weight_and_scale(32, 16, False, 9)
    y_of = lambda A: (A.float() * scale) @ (B.float() * b)  # noqa: E731
    with (
        symm_mem.installed(),
        config.patch(_micro_pipeline_tp=True),
        # Inductor replaces nothing if torch is built without NCCL or symmetric memory is not enabled for the group.
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        torch_symm_mem._test_mode({group_name()}),
    ):
        for _ in range(2):
            y = torch.compile(gather_then_product, fullgraph=True)(As[rank], B, scale, b)
            assert torch.equal(y.float(), torch.cat([y_of(A) for A in As]))
            z = torch.compile(product_then_scatter, fullgraph=True)(As[rank].view(2, 8, 32), B, scale, b)
            total = sum(y_of(A).view(2, 8, 16) for A in As)
            assert torch.equal(z.float(), total.chunk(ranks, 1)[rank].to(BF16).float())
        counts = symm_mem.counts()
        assert counts[GATHER] == counts[SCATTER] == {"tdkernels": 2, "torch": {}}


def test_micro_pipeline_of_torch_compile():
    on_ranks(2, compiles)
