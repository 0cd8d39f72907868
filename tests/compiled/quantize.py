"""Launches of the kernels that quantize to fp8."""

import torch

from tdkernels.ops.quantize import launch, launch_dequantize
from tests.compiled.targets import BF16, FP32
from tests.support.aot import pointer, recorded_launches

DEQUANTIZE = "dequantize"  # name of the launch that converts codes back
LARGEST = "largest"  # first word of the names of launches of largest_kernel
BY_INSTRUCTION = ("sm_90", "sm_100")  # ``gpu.converts_to_e4m3``


def quantize_launches(arch, dtype=torch.float8_e4m3fn):
    """Return {name: (kernel, args, kwargs)}, with the conversion that ``arch`` uses."""
    x, narrow, scale = torch.empty(512, 4096, dtype=BF16), torch.empty(40, 72, dtype=FP32), pointer(FP32)[:1]
    calls = {
        "rows": lambda: launch.by_row(x, dtype, False),
        "rows, not aligned": lambda: launch.by_row(narrow, dtype, False),
        "long rows": lambda: launch.by_row(x.view(64, -1), dtype, False),
        "long columns": lambda: launch.by_row(x, dtype, True),
        "short columns": lambda: launch.by_row(narrow, dtype, True),
        "tensor": lambda: launch.by_tensor(x, dtype, False),
        "tensor, transposed": lambda: launch.by_tensor(narrow, dtype, True),
        "blocks": lambda: launch.by_block(x, dtype, False, False),
        "blocks, transposed": lambda: launch.by_block(x, dtype, False, True),
        "blocks of a weight": lambda: launch.by_block(x, dtype, True, False),
        "blocks of a weight, transposed": lambda: launch.by_block(narrow, dtype, True, True),
        "given": lambda: launch.by_given_scale(x, scale, dtype, False),
        "given, transposed": lambda: launch.by_given_scale(x, scale, dtype, True),
    }
    found = {}
    for name, call in calls.items():
        with recorded_launches(launch) as launches:
            call()
        for kernel, args, kwargs in launches:
            if kernel is launch.largest_kernel:
                found[f"{LARGEST} of {name}"] = kernel, args, kwargs
            else:
                found[name] = kernel, args, {**kwargs, "FORMAT": launch.format_for(dtype, arch in BY_INSTRUCTION)}
    with recorded_launches(launch_dequantize) as launches:
        launch_dequantize.rows_by_block(torch.empty(512, 4096, dtype=torch.float8_e4m3fn), pointer(FP32)[:1], BF16)
    ((kernel, args, kwargs),) = launches
    found[DEQUANTIZE] = kernel, args, {**kwargs, "CONVERTS": arch in BY_INSTRUCTION}
    return found
