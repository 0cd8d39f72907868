"""Launches of flash_decode and its backward."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tdkernels.ops.attention.flash_decode import launch as flash_decode_launch
from tdkernels.ops.attention.flash_decode import launch_backward as flash_decode_launch_backward
from tdkernels.runtime import gpu as runtime_gpu
from tests.compiled.targets import BF16
from tests.support.aot import SHARED_MEMORY, recorded_launches

# Problems by name: (q [B, Tq, Hq, D], Hkv, Dv, block_size or 0, fp8, (soft_cap, window)).
DECODES = {
    "one token": ((8, 1, 32, 128), 8, 128, 0, False, (None, None)),
    "tokens, paged, fp8": ((3, 2, 12, 96), 4, 80, 16, True, (30.0, 100)),
    "paged": ((8, 1, 32, 128), 8, 128, 16, False, (None, None)),
    "latent": ((4, 1, 128, 576), 1, 512, 64, False, (None, None)),
}


def decode_launch(name, arch, dtype=BF16, ranks=4, nodes=1, chunk_keys=0, config=None):
    """Return [(kernel, args, kwargs), ...] of the forward, and of the backward unless the cache is fp8.

    ``config``: the config of the forward; None for the default with ``chunk_keys``.
    """
    sizes, heads, dv, page, fp8, (soft_cap, window) = DECODES[name]
    q, group = torch.zeros(sizes, dtype=dtype), SimpleNamespace(size=lambda: ranks)
    k = torch.zeros(sizes[0], page or 256, heads, sizes[3], dtype=torch.float8_e4m3fn if fp8 else dtype)
    v = k[..., :dv] if name == "latent" else k.new_zeros(*k.shape[:3], dv)
    lens, table = torch.zeros(sizes[0], dtype=torch.int32), torch.zeros(sizes[0], 16, dtype=torch.int32)
    table = table if page else None
    scales = (torch.ones(heads), torch.ones(heads)) if fp8 else None
    options = 1.0, soft_cap, window
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: SHARED_MEMORY[arch])
        gpu, default = torch.device("cuda", 0), flash_decode_launch.default_config
        tile = flash_decode_launch_backward._tile
        chosen = lambda shape, _: replace(default(shape, gpu), chunk_keys=chunk_keys)  # noqa: E731
        patch.setattr(flash_decode_launch, "default_config", chosen)
        patch.setattr(flash_decode_launch_backward, "_tile", lambda shape, size, _: tile(shape, size, gpu))
        kind = 0 if not fp8 else 1 if arch in ("sm_89", "sm_90", "sm_100") else 2
        patch.setattr(flash_decode_launch, "fp8_kind", lambda cache: kind)
        launches, gradients = (
            stack.enter_context(recorded_launches(module, ranks, nodes))
            for module in (flash_decode_launch, flash_decode_launch_backward)
        )
        o, _, lse = flash_decode_launch.launch(q, k, v, lens, table, scales, options, group, config, keep=not fp8)
        if not fp8:
            shape = flash_decode_launch.shape_of(q, k, v, table)
            flash_decode_launch_backward.launch(q, k, v, lens, lens, table, o, lse, lse, shape, options)
    return launches + gradients
