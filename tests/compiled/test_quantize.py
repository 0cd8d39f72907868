"""Compile the kernels that quantize to fp8."""

import re

import pytest
import torch

from tests.compiled.quantize import BY_INSTRUCTION, DEQUANTIZE, LARGEST, quantize_launches
from tests.compiled.targets import needs_no_gpu
from tests.support.aot import SHARED_MEMORY, TARGETS, compile_for

pytestmark = needs_no_gpu


@pytest.mark.parametrize("arch", TARGETS)
def test_quantization_compiles(arch):
    for name, (kernel, args, kwargs) in quantize_launches(arch).items():
        compiled = compile_for(kernel, args, kwargs, arch)
        assert compiled.metadata.shared <= SHARED_MEMORY[arch], name
        if not arch.startswith("sm"):
            continue
        ptx, quantizes = compiled.asm["ptx"], name != DEQUANTIZE and not name.startswith(LARGEST)
        # Scales and codes are those of IEEE divisions that keep denormal numbers.
        divisions = set(re.findall(r"\bdiv\.[a-z.]*f32", ptx))
        assert divisions == ({"div.rn.f32"} if quantizes else set()) and ".ftz" not in ptx, f"{name}: {divisions}"
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (quantizes and arch in BY_INSTRUCTION), name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_quantization_to_other_formats_compiles(arch, dtype):
    launches = quantize_launches(arch, dtype)
    for name in ("rows", "blocks of a weight", "given, transposed"):
        kernel, args, kwargs = launches[name]
        ptx = compile_for(kernel, args, kwargs, arch).asm.get("ptx", "")
        by_instruction = arch in BY_INSTRUCTION and dtype == torch.float8_e5m2
        assert ("cvt.rn.satfinite.e5m2x2.f32" in ptx) == by_instruction, name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_aligned_matrices_are_read_and_written_in_wide_words(arch):
    launches = quantize_launches(arch)
    for name, (kernel, args, kwargs) in launches.items():
        if args[0].shape[1] % 16:
            continue
        ptx = compile_for(kernel, args, kwargs, arch).asm["ptx"]
        loads = set(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", ptx))
        stores = set(re.findall(r"st\.global(?:\.\w+)*\.v[24]\.b32", ptx))
        assert loads and (stores or name.startswith(LARGEST)), name
