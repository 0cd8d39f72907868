"""Launches of the Ulysses projections."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch

from tdkernels.ops.attention.ulysses import launch_out as ulysses_launch_out
from tdkernels.ops.attention.ulysses import launch_qkv as ulysses_launch_qkv
from tdkernels.ops.attention.ulysses.config import UlyssesConfig
from tdkernels.ops.common import gemm_operands
from tests.compiled.targets import BF16, compile_launches, tiles_for
from tests.support.aot import descriptor, recorded_launches

# The projections before and after an attention with sharded heads, and their gradients, which take the transposed
# weights. "gradient of x" also keeps the gathered rows for the weight gradient.
ULYSSES = ["qkv", "gradient of o", "out", "gradient of x"]


@functools.cache
def ulysses_launches(arch, dtype, sizes=(2, 256, 512, 256), bias=False, ranks=4, tiles=None):
    """Return {name: (kernel, args, kwargs)}; ``sizes`` are per rank: B, S / W, K, N / W."""
    batch, positions, k, width = sizes
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 1)
    tiles = tiles or tiles_for(arch, dtype)
    config = UlyssesConfig(tiles=tiles)
    x, o = torch.zeros(batch * positions, k, dtype=dtype), torch.zeros(ranks * batch * positions, width, dtype=dtype)
    weight = torch.zeros(ranks * width, k, dtype=dtype)
    qkv_bias, out_bias = (torch.zeros(n, dtype=dtype) if bias else None for n in weight.shape)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(gemm_operands, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(ulysses_launch_out, "_push_bytes", lambda device: 32 << 10)
        gathered = descriptor(dtype, (2, 256, 512), [1, tiles.block_m, tiles.block_k])
        patch.setattr(ulysses_launch_out, "_gathered_descriptor", lambda *_: gathered)
        qkv = stack.enter_context(recorded_launches(ulysses_launch_qkv, ranks))
        out = stack.enter_context(recorded_launches(ulysses_launch_out, ranks))
        ulysses_launch_qkv.launch("op", x, weight, qkv_bias, batch, group, config)
        ulysses_launch_qkv.launch("op", x, weight.t().contiguous().t(), None, batch, group, config)
        ulysses_launch_out.launch("op", o, weight.t().contiguous(), out_bias, batch, group, config)
        ulysses_launch_out.launch("op", o, weight.t(), None, batch, group, config, keep=True)
    return dict(zip(ULYSSES, qkv + out, strict=True))


def compile_ulysses(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([ulysses_launches(arch, dtype, **options)[name]], arch)
    return compiled
