"""Launches of flash_decode and its backward."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tdkernels.ops.attention.flash_decode import launch as flash_decode_launch
from tdkernels.ops.attention.flash_decode import launch_backward as flash_decode_launch_backward
from tdkernels.ops.attention.flash_decode import launch_split as flash_decode_launch_split
from tdkernels.ops.attention.flash_decode.config import fused_config
from tdkernels.ops.attention.flash_decode.latent.kernel import latent_kernel
from tdkernels.ops.attention.flash_decode.operands import Operands
from tdkernels.runtime import gpu as runtime_gpu
from tests.compiled.targets import BF16
from tests.support.aot import SHARED_MEMORY, Recorder, recorded_launches

# Problems by name: (q [B, Tq, Hq, D], Hkv, Dv, block_size or 0, fp8, (soft_cap, window)).
DECODES = {
    "one token": ((8, 1, 32, 128), 8, 128, 0, False, (None, None)),
    "tokens, paged, fp8": ((3, 2, 12, 96), 4, 80, 16, True, (30.0, 100)),
    "paged": ((8, 1, 32, 128), 8, 128, 16, False, (None, None)),
    "latent": ((4, 1, 128, 576), 1, 512, 64, False, (None, None)),
    "dense latent": ((4, 1, 128, 576), 1, 512, 0, False, (None, None)),
    "latent, fp8, rope": ((4, 1, 128, 576), 1, 512, 64, True, (None, None)),
    "dense latent, fp8, rope": ((4, 1, 128, 576), 1, 512, 0, True, (None, None)),
    "heads of 512": ((8, 1, 32, 512), 8, 512, 0, False, (None, None)),
}


def _operands(name, dtype, sizes=None):
    """Return (Operands, options) of a problem; ``sizes``: those of q."""
    usual, heads, dv, page, fp8, (soft_cap, window) = DECODES[name]
    sizes = sizes or usual
    q = torch.zeros(sizes, dtype=dtype)
    k = torch.zeros(sizes[0], page or 256, heads, sizes[3], dtype=torch.float8_e4m3fn if fp8 else dtype)
    rope = torch.zeros(*k.shape[:3], k.shape[3] - dv, dtype=dtype) if "rope" in name else None
    k = k[..., :dv].contiguous() if "rope" in name else k
    v = k[..., :dv] if "latent" in name else k.new_zeros(*k.shape[:3], dv)
    lens, table = torch.zeros(sizes[0], dtype=torch.int32), torch.zeros(sizes[0], 16, dtype=torch.int32)
    scales = (torch.ones(heads), torch.ones(heads)) if fp8 else (None, None)
    return Operands(q, k, v, lens, table if page else None, *scales, rope), (1.0, soft_cap, window)


def decode_launch(name, arch, dtype=BF16, ranks=4, nodes=1, chunk_keys=0, config=None):
    """Return [(kernel, args, kwargs), ...] of the forward, and of the backward unless the cache is fp8.

    ``config``: the config of the forward; None for the default with ``chunk_keys``.
    """
    operands, options = _operands(name, dtype)
    group, fp8 = SimpleNamespace(size=lambda: ranks), operands.k_scale is not None
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: SHARED_MEMORY[arch])
        gpu, default = torch.device("cuda", 0), flash_decode_launch.fused_config
        tile = flash_decode_launch_backward._tile
        chosen = lambda shape, _: replace(default(shape, gpu), chunk_keys=chunk_keys)  # noqa: E731
        patch.setattr(flash_decode_launch, "fused_config", chosen)
        patch.setattr(flash_decode_launch_backward, "_tile", lambda shape, size, _: tile(shape, size, gpu))
        kind = 0 if not fp8 else 1 if arch in ("sm_89", "sm_90", "sm_100") else 2
        patch.setattr(flash_decode_launch, "fp8_kind", lambda cache: kind)
        launches, gradients = (
            stack.enter_context(recorded_launches(module, ranks, nodes))
            for module in (flash_decode_launch, flash_decode_launch_backward)
        )
        o, _, lse = flash_decode_launch.launch(operands, options, group, config, keep=not fp8)
        if not fp8:
            (q, k, v, lens, table, *_), shape = operands, flash_decode_launch.shape_of_call(operands)
            flash_decode_launch_backward.launch(q, k, v, lens, lens, table, o, lse, lse, shape, options)
    return launches + gradients


def split_launches(name, arch, dtype=BF16, ranks=1, sizes=None, lens_dtype=torch.int32, portable=True, chunk_keys=0):
    """Return [(kernel, args, kwargs), ...] of method "split": of the kernel that computes parts, and of the other one.

    The window is not used, which this method does not support.

    ``sizes``: those of q, instead of those in ``DECODES``; ``portable``: False for ``latent_kernel``.
    """
    launcher = flash_decode_launch_split
    operands, (*options, _) = _operands(name, dtype, sizes)
    operands, options = operands._replace(kv_lens=operands.kv_lens.to(lens_dtype)), (*options, None)
    fp8 = operands.k_scale is not None
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: SHARED_MEMORY[arch])
        kind = 0 if not fp8 else 1 if arch in ("sm_89", "sm_90", "sm_100") else 2
        patch.setattr(flash_decode_launch, "fp8_kind", lambda cache: kind)
        launches = stack.enter_context(recorded_launches((launcher, flash_decode_launch), ranks))
        patch.setattr(launcher, "has_latent_kernel", lambda *_: not portable)
        patch.setattr(launcher, "_overlaps", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(launcher, "_latent_kernel", lambda: Recorder(latent_kernel, launches))
        shape = flash_decode_launch.shape_of_call(operands)
        config = replace(fused_config(shape, torch.device("cuda", 0)), method="split", chunk_keys=chunk_keys)
        group = SimpleNamespace(size=lambda: ranks)
        launcher.launch(operands, options, group, config, keep=not fp8)
    return launches
