"""Communication that hides behind computation: ready-made overlapping operators on stock Triton and PyTorch."""

import importlib
import os

from tdkernels import autotune, launch
from tdkernels.autotune.explain import explain
from tdkernels.errors import PeerFailedError, PeerTimeoutError, PlanMismatchError
from tdkernels.ops import (  # noqa: F401  the modules called tuning make the operators known to the tuner
    ag_gemm_tuning,
    collective_tuning,
    gemm_ar_tuning,
    gemm_rs_tuning,
)
from tdkernels.ops._tiles import Tiles
from tdkernels.ops.ag_gemm import AgGemmConfig, ag_gemm, ag_gemm_ref
from tdkernels.ops.collective_config import CollectiveConfig
from tdkernels.ops.collectives import (
    all_gather,
    all_gather_ref,
    all_reduce,
    all_reduce_ref,
    reduce_scatter,
    reduce_scatter_ref,
)
from tdkernels.ops.ep_config import EpConfig
from tdkernels.ops.gemm_ar import GemmArConfig, gemm_ar, gemm_ar_ref
from tdkernels.ops.gemm_rs import GemmRsConfig, gemm_rs, gemm_rs_ref
from tdkernels.symm import set_timeout, synchronize

# As for what is imported later, so for what the tuner knows of it.
autotune.operator.register_later("tdkernels.ops.ag_attention_tuning", "ag_attention")
autotune.operator.register_later("tdkernels.ops.ep_tuning", "all_to_all", "ep_combine", "ep_dispatch")
autotune.operator.register_later("tdkernels.ops.ep_moe_tuning", "ep_moe")
autotune.operator.register_later("tdkernels.ops.flash_decode_tuning", "flash_decode")
autotune.operator.register_later("tdkernels.ops.group_gemm_tuning", "group_gemm")
autotune.operator.register_later("tdkernels.ops.moe_tp_tuning", "moe_ag_gemm", "moe_gemm_rs", "tp_moe")
autotune.operator.register_later("tdkernels.ops.ulysses_tuning", "ulysses_qkv", "ulysses_out")

__version__ = "0.1.0"

# What is for experts is imported when it is first asked for: its kernels would be a third of the time that this takes.
_LATER = {
    "tdkernels.ops.ag_attention": ("AgAttentionConfig", "ag_attention", "ag_attention_ref"),
    "tdkernels.ops.all_to_all": ("all_to_all", "all_to_all_ref"),
    "tdkernels.ops.ep_halves": ("ep_combine_send", "ep_dispatch_send"),
    "tdkernels.ops.ep_moe": ("EpMoeConfig", "ep_moe", "ep_moe_ref"),
    "tdkernels.ops.flash_decode": ("flash_decode", "flash_decode_ref"),
    "tdkernels.ops.flash_decode_config": ("FlashDecodeConfig",),
    "tdkernels.ops.group_gemm": ("GroupGemmConfig", "group_gemm", "group_gemm_ref"),
    "tdkernels.ops.moe_ag_gemm_kernel": ("MoeTpConfig",),
    "tdkernels.ops.moe_routing": ("MoeRouting",),
    "tdkernels.ops.moe_tp": ("moe_ag_gemm", "moe_gemm_rs", "tp_moe", "tp_moe_ref"),
    "tdkernels.ops.moe_ep": (
        "EpHandle", "EpTokens", "ep_combine", "ep_combine_ref", "ep_dispatch", "ep_dispatch_ref",
    ),
    "tdkernels.ops.ulysses": ("ulysses_out", "ulysses_out_ref", "ulysses_qkv", "ulysses_qkv_ref"),
    "tdkernels.ops.ulysses_config": ("UlyssesConfig",),
}  # fmt: skip


def __getattr__(name):
    if name in ("nn", "sanitizer"):
        return importlib.import_module(f"tdkernels.{name}")
    for module, names in _LATER.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})


__all__ = [
    "AgAttentionConfig", "AgGemmConfig", "CollectiveConfig", "EpConfig", "EpHandle", "EpMoeConfig", "EpTokens",
    "FlashDecodeConfig", "GemmArConfig", "GemmRsConfig", "GroupGemmConfig", "MoeRouting", "MoeTpConfig",
    "PeerFailedError", "PeerTimeoutError", "PlanMismatchError", "Tiles", "UlyssesConfig", "ag_attention",
    "ag_attention_ref",
    "ag_gemm", "ag_gemm_ref", "all_gather", "all_gather_ref", "all_reduce", "all_reduce_ref", "all_to_all",
    "all_to_all_ref", "autotune", "ep_combine", "ep_combine_ref", "ep_combine_send", "ep_dispatch",
    "ep_dispatch_ref", "ep_dispatch_send", "ep_moe", "ep_moe_ref", "explain", "flash_decode", "flash_decode_ref",
    "gemm_ar", "gemm_ar_ref", "gemm_rs", "gemm_rs_ref", "group_gemm", "group_gemm_ref", "moe_ag_gemm",
    "moe_gemm_rs", "reduce_scatter", "reduce_scatter_ref", "set_timeout", "synchronize", "tp_moe", "tp_moe_ref",
    "ulysses_out", "ulysses_out_ref", "ulysses_qkv", "ulysses_qkv_ref",
]  # fmt: skip

if os.environ.get("TDKERNELS_SANITIZE", "0") not in ("", "0"):
    launch.around_runs = importlib.import_module("tdkernels.sanitizer").record
