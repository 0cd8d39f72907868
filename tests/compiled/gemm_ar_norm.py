"""Compile the kernel of gemm_ar_rms_norm and gemm_ar_layer_norm, with the arguments of its launcher."""

import pytest
import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.fp8_codes import format_for
from tdkernels.ops.common.norm_launch import Options, kernel_outputs
from tdkernels.ops.dense.gemm_ar_norm import launch
from tdkernels.ops.dense.gemm_ar_norm.config import GemmArNormConfig
from tdkernels.ops.dense.gemm_ar_norm.kernel import gemm_ar_norm_kernel
from tdkernels.rounding import next_power_of_2
from tests.compiled.dense import one_shot_tiles_for
from tests.compiled.targets import uses_tma
from tests.support.aot import PLAN, SHARED_MEMORY, compile_for

CONVERTING = ("sm_90", "sm_100")  # see ``gpu.converts_to_e4m3``


def compile_gemm_ar_norm(
    arch, dtype, n, *, rows=16, k=1024, ranks=4, tiles=None, layer_norm=False, quantize=None, residual=True, bias=False,
    norm_bias=None, norm_dtype=None, w_is_kn=False, **fields
):
    """Compile the kernel for rows of ``n`` elements. ``fields``: further fields of the config."""
    x, weight = torch.empty(rows, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    vector, norm_weight = torch.empty(n, dtype=dtype), torch.empty(n, dtype=norm_dtype or dtype)
    has_norm_bias = layer_norm if norm_bias is None else norm_bias
    operands = (
        x, weight.view(k, n).t() if w_is_kn else weight, vector if bias else None,
        torch.empty(rows, n, dtype=dtype) if residual else None, norm_weight,
        torch.empty_like(norm_weight) if has_norm_bias else None,
    )
    options = Options("gemm_ar_layer_norm" if layer_norm else "gemm_ar_rms_norm", 1e-5, quantize)
    outputs = [torch.empty(spec.shape, dtype=spec.dtype) for spec in kernel_outputs(x, (len(x), n), options)]
    config = GemmArNormConfig(tiles=tiles or one_shot_tiles_for(arch, dtype, max(next_power_of_2(rows), 16)), **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_operands, "has_tma", lambda device: uses_tma(arch, dtype))
        ctx, scratch = torch.empty(64, dtype=torch.int64), torch.empty(64)
        args, kwargs = launch.arguments(ctx, operands, outputs, scratch, PLAN, ranks, options, config)
    if quantize:
        codes = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        kwargs = {**kwargs, "FORMAT": format_for(codes, arch in CONVERTING)}
    compiled = compile_for(gemm_ar_norm_kernel, list(args), kwargs, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    return compiled
