"""Launches of ag_attention and its backward."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch

from tdkernels.ops.attention.ag_attention import config as ag_attention_config
from tdkernels.ops.attention.ag_attention import launch as ag_attention_launch
from tdkernels.ops.attention.ag_attention import launch_dkv as ag_attention_launch_dkv
from tdkernels.ops.attention.ag_attention import launch_dq as ag_attention_launch_dq
from tdkernels.runtime import gpu
from tests.compiled.targets import BF16, FP16, compile_launches
from tests.support.aot import recorded_launches

ATTENTION = ["attention", "statistics", "gradient of q", "gradients of k and v"]
ODD_ATTENTION = [
    ("sm_90", "attention", dict(d=17, dv=33, rows=1, heads=1, kv_heads=1, ranks=1)),
    ("sm_90", "gradients of k and v", dict(d=192, dv=128, dtype=FP16, rows=3, heads=3, kv_heads=1, ranks=3)),
    ("gfx942", "gradients of k and v", dict(d=17, dv=256, rows=3, heads=3, kv_heads=1, ranks=3, sharding="contiguous")),
]


@functools.cache
def attention_launches(
    arch, dtype, d=64, dv=64, rows=256, heads=4, kv_heads=2, ranks=2, sharding="zigzag", causal=True
):
    """Return {name: (kernel, args, kwargs)} of a training step with the default tiles of ``arch``."""
    device, forward_launch, dkv_launch = SimpleNamespace(type="cuda"), ag_attention_launch, ag_attention_launch_dkv
    q, k, v = (torch.zeros(1, rows, *size, dtype=dtype) for size in ((heads, d), (kv_heads, d), (kv_heads, dv)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(gpu, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(gpu, "capability", lambda device: (int(arch[3:-1]), int(arch[-1])))
        patch.setattr(torch.version, "hip", "7.0" if arch.startswith("gfx") else None)
        config = ag_attention_config.completed(None, rows, max(d, dv), dtype, device)
        # There is no workspace for peers to write to; use the descriptor of a plain tensor instead.
        for module in (forward_launch, dkv_launch):
            patch.setattr(
                module, "gathered_descriptor", lambda *args: forward_launch.shard_descriptor(args[2], *args[4:])
            )
        forward, query, keys = [
            stack.enter_context(recorded_launches(module, ranks))
            for module in (forward_launch, ag_attention_launch_dq, dkv_launch)
        ]
        call = causal, sharding, d**-0.5, SimpleNamespace(size=lambda: ranks), config
        o, lse = forward_launch.launch(q, k, v, *call)
        ag_attention_launch_dq.launch(q, k, v, o, lse, o, lse, (True,) * 3, *call)
    return dict(zip(ATTENTION, (*forward, keys[0], *query, *keys[1:]), strict=True))


def compile_attention(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([attention_launches(arch, dtype, **options)[name]], arch)
    return compiled
