"""Helpers shared by all families: dtypes, default tiles per GPU, and compilation of launches."""

import pytest
import torch

from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.experts.dispatch.kernel_payload import BY_INSTRUCTION, BY_INTEGERS
from tests.support.aot import SHARED_MEMORY, compile_for
from tests.support.ranks import DEVICE

needs_no_gpu = pytest.mark.skipif(DEVICE == "cuda", reason="needs no GPU and takes minutes: `make test` runs it")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def tiles_for(arch, dtype):
    """Return the default tiles for large shapes. ``default_tiles`` itself needs the device to be present."""
    if dtype == FP32:
        return Tiles(64, 64, 32, num_warps=4, num_stages=2)
    if arch.startswith("gfx"):
        return Tiles(128, 128, 64, num_warps=8, num_stages=2)
    return Tiles() if arch in ("sm_90", "sm_100") else Tiles(128, 128, 64, num_warps=8, num_stages=3)


def uses_tma(arch, dtype):
    return arch in ("sm_90", "sm_100") and dtype != FP32


def compile_launches(launches, arch):
    """Compile launches for ``arch``.

    The launchers ran on a device without an fp8 conversion instruction, so the quantization method is set here.
    """
    quantize = (BY_INSTRUCTION if arch in ("sm_90", "sm_100") else BY_INTEGERS).value
    compiled = []
    for kernel, args, kwargs in launches:
        payload = kwargs.get("PAYLOAD")
        if payload is not None and payload.quantize:
            kwargs = {**kwargs, "PAYLOAD": payload._replace(quantize=quantize)}
        compiled.append(compile_for(kernel, args, kwargs, arch))
    assert all(each.metadata.shared <= SHARED_MEMORY[arch] for each in compiled)
    return compiled
