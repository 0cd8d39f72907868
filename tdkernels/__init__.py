"""Communication that hides behind computation: ready-made overlapping operators on stock Triton and PyTorch."""

import importlib
import os

from tdkernels import autotune
from tdkernels.autotune.explain import explain
from tdkernels.errors import PeerFailedError, PeerTimeoutError, PlanMismatchError
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.symm import set_timeout, synchronize

# The tuner learns of an operator when the operator's module ``tuning`` is imported.
autotune.tunable.register_later("tdkernels.ops.collectives.tuning", "all_gather", "all_reduce", "reduce_scatter")
autotune.tunable.register_later("tdkernels.ops.dense.ag_gemm.tuning", "ag_gemm")
autotune.tunable.register_later("tdkernels.ops.dense.gemm_ar.tuning", "gemm_ar")
autotune.tunable.register_later("tdkernels.ops.dense.gemm_rs.tuning", "gemm_rs")
autotune.tunable.register_later("tdkernels.ops.attention.ag_attention.tuning", "ag_attention")
autotune.tunable.register_later("tdkernels.ops.experts.dispatch.tuning", "all_to_all", "ep_combine", "ep_dispatch")
autotune.tunable.register_later("tdkernels.ops.experts.ep_moe.tuning", "ep_moe")
autotune.tunable.register_later("tdkernels.ops.attention.flash_decode.tuning", "flash_decode")
autotune.tunable.register_later("tdkernels.ops.experts.grouped_gemm.tuning", "group_gemm")
autotune.tunable.register_later("tdkernels.ops.experts.tp_moe.tuning", "moe_ag_gemm", "moe_gemm_rs", "tp_moe")
autotune.tunable.register_later("tdkernels.ops.attention.ulysses.tuning", "ulysses_qkv", "ulysses_out")

__version__ = "0.1.0"

# Operators are imported when they are first asked for: creating their kernels takes longer than all else here.
_LATER = {
    "tdkernels.ops.dense.ag_gemm.op": ("AgGemmConfig", "ag_gemm", "ag_gemm_ref"),
    "tdkernels.ops.dense.gemm_ar.op": ("GemmArConfig", "gemm_ar", "gemm_ar_ref"),
    "tdkernels.ops.dense.gemm_rs.op": ("GemmRsConfig", "gemm_rs", "gemm_rs_ref"),
    "tdkernels.ops.collectives.config": ("CollectiveConfig",),
    "tdkernels.ops.collectives.op": (
        "all_gather", "all_gather_ref", "all_reduce", "all_reduce_ref", "reduce_scatter", "reduce_scatter_ref",
    ),
    "tdkernels.ops.attention.ag_attention.op": ("AgAttentionConfig", "ag_attention", "ag_attention_ref"),
    "tdkernels.ops.experts.dispatch.all_to_all": ("all_to_all", "all_to_all_ref"),
    "tdkernels.ops.experts.dispatch.config": ("EpConfig",),
    "tdkernels.ops.experts.dispatch.send": ("ep_combine_send", "ep_dispatch_send"),
    "tdkernels.ops.experts.ep_moe.op": ("EpMoeConfig", "ep_moe", "ep_moe_ref"),
    "tdkernels.ops.attention.flash_decode.op": ("flash_decode",),
    "tdkernels.ops.attention.flash_decode.reference": ("flash_decode_ref",),
    "tdkernels.ops.attention.flash_decode.config": ("FlashDecodeConfig",),
    "tdkernels.ops.experts.grouped_gemm.op": ("GroupGemmConfig", "group_gemm", "group_gemm_ref"),
    "tdkernels.ops.experts.tp_moe.config": ("MoeTpConfig",),
    "tdkernels.ops.experts.tp_moe.routing": ("MoeRouting",),
    "tdkernels.ops.experts.tp_moe.op": ("moe_ag_gemm", "moe_gemm_rs", "tp_moe", "tp_moe_ref"),
    "tdkernels.ops.experts.dispatch.op": (
        "EpHandle", "EpTokens", "ep_combine", "ep_combine_ref", "ep_dispatch", "ep_dispatch_ref",
    ),
    "tdkernels.ops.attention.ulysses.op": ("ulysses_out", "ulysses_out_ref", "ulysses_qkv", "ulysses_qkv_ref"),
    "tdkernels.ops.attention.ulysses.config": ("UlyssesConfig",),
}


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
]

if os.environ.get("TDKERNELS_SANITIZE", "0") not in ("", "0"):
    importlib.import_module("tdkernels.launch").around_runs = importlib.import_module("tdkernels.sanitizer").record
