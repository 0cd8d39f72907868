"""Launches of the kernels of all_reduce_rms_norm and all_reduce_layer_norm, with the arguments of their launcher."""

import torch

from tdkernels.ops.collectives.norm import launch
from tdkernels.ops.collectives.norm.config import AllReduceNormConfig
from tdkernels.ops.common.fp8_codes import format_for
from tdkernels.ops.common.norm_launch import Options, kernel_outputs
from tests.support.aot import PLAN

# {name: fields of the config}. A row of 16 warps has at most 8192 elements in registers.
EXCHANGES = {
    "one_shot": {"row_programs": 4, "send_columns": 1024, "num_warps": 16},
    "two_shot": {"exchange": "two_shot", "num_warps": 16},
}
CONVERTING = ("sm_90", "sm_100")  # see ``gpu.converts_to_e4m3``


def norm_launch(
    arch, dtype, hidden, exchange, *, layer_norm=False, quantize=None, residual=True, bias=None, ranks=4,
    weight_dtype=None, **changes,
):
    """Return the launch (kernel, args, kwargs) for rows of ``hidden`` elements."""
    x = torch.empty(2, hidden, dtype=dtype)
    weight = torch.empty(hidden, dtype=weight_dtype or dtype)
    has_bias = layer_norm if bias is None else bias
    operands = x, torch.empty_like(x) if residual else None, weight, torch.empty_like(weight) if has_bias else None
    options = Options("all_reduce_layer_norm" if layer_norm else "all_reduce_rms_norm", 1e-5, quantize)
    outputs = [torch.empty(spec.shape, dtype=spec.dtype) for spec in kernel_outputs(x, x.shape, options)]
    config = AllReduceNormConfig(**EXCHANGES[exchange] | changes)
    ctx = torch.empty(64, dtype=torch.int64)
    kernel, args, kwargs = launch.arguments(ctx, operands, outputs, PLAN, ranks, options, config)
    if quantize:
        codes = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        kwargs = {**kwargs, "FORMAT": format_for(codes, arch in CONVERTING)}
    return kernel, list(args), kwargs
