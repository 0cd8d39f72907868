"""GPU operators that overlap communication with computation, for PyTorch, in stock Triton.

One call replaces a collective and the matrix product, attention or expert layer next to it, in the forward and in the
backward pass. ``group`` is a ``ProcessGroup``, a one-dimensional ``DeviceMesh``, or None for the world. Calls are
collective: all ranks of the group make the same calls in the same order.

Each operator ``op`` has a reference ``op_ref`` in plain PyTorch with the same operands, except ``ep_dispatch_send``,
``ep_combine_send``, ``moe_ag_gemm`` and ``moe_gemm_rs``. An optional ``config`` selects how an operator runs. Without
it, the config comes from the tuning tables or from a heuristic.

Tensor parallelism:
    ag_gemm: all-gather, then GEMM.
    gemm_rs: GEMM, then reduce-scatter.
    gemm_ar: GEMM, then all-reduce.
    gemm_ar_rms_norm, gemm_ar_layer_norm: GEMM, all-reduce, residual addition and norm.
    quantize_fp8: fp8 operands and their scales, on one rank.
    AgGemmConfig, GemmRsConfig, GemmArConfig, GemmArNormConfig, Tiles: configs, and the tile sizes in them.

Collectives, for small messages:
    all_gather, reduce_scatter, all_reduce: the collectives alone.
    all_reduce_rms_norm, all_reduce_layer_norm: all-reduce, residual addition and norm.
    CollectiveConfig, AllReduceNormConfig: configs.

Expert parallelism, with different experts on each rank:
    ep_dispatch, ep_combine: send tokens to the ranks of their experts, and return the weighted sums.
    ep_dispatch_send, ep_combine_send: the send phase alone, to overlap the transfer with other work.
    all_to_all: exchange of rows with variable splits.
    ep_moe: a whole expert layer.
    EpTokens, EpHandle: the received tokens, and the routing of a dispatch.
    EpConfig, EpMoeConfig: configs.

Tensor-parallel experts, with every expert sharded over all ranks:
    tp_moe: a whole expert layer.
    moe_ag_gemm, moe_gemm_rs: its two stages.
    group_gemm: grouped GEMM on one rank.
    MoeRouting: the routing that the two stages share.
    MoeTpConfig, GroupGemmConfig: configs.

Attention:
    ag_attention: attention over keys and values that are sharded along the sequence.
    flash_decode: decoding with a KV cache that is sharded along the sequence.
    ulysses_qkv, ulysses_out: projections with an all-to-all between heads and sequence.
    AgAttentionConfig, FlashDecodeConfig, UlyssesConfig: configs.

Control and errors:
    synchronize: wait for the GPU and raise the errors of kernels.
    set_timeout: bound all waits for peers.
    batch_invariant, set_batch_invariant: results of a row that do not depend on the rest of the batch.
    explain: return the config that a call would run with, and why.
    PeerTimeoutError, PeerFailedError, PlanMismatchError: errors of collective calls.

Submodules, imported on first use:
    autotune: tuning of configs.
    errors: the exception classes.
    integrations: the kernels behind operators of other libraries.
    lang: device functions for writing kernels.
    launch: processes as ranks on one machine.
    nn: modules made of the operators.
    ops: the operators' packages.
    sanitizer: race checker for CPU ranks.
    symm: symmetric memory.
    trace: timelines of kernels.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from tdkernels.exports import PUBLIC

if TYPE_CHECKING:  # for type checkers and editors; at run time, the first use of a name imports it
    from tdkernels.autotune.explain import explain
    from tdkernels.autotune.invariance import batch_invariant, set_batch_invariant
    from tdkernels.errors import PeerFailedError, PeerTimeoutError, PlanMismatchError
    from tdkernels.ops.attention.ag_attention.op import AgAttentionConfig, ag_attention, ag_attention_ref
    from tdkernels.ops.attention.flash_decode.config import FlashDecodeConfig
    from tdkernels.ops.attention.flash_decode.op import flash_decode
    from tdkernels.ops.attention.flash_decode.reference import flash_decode_ref
    from tdkernels.ops.attention.ulysses.config import UlyssesConfig
    from tdkernels.ops.attention.ulysses.op import ulysses_out, ulysses_out_ref, ulysses_qkv, ulysses_qkv_ref
    from tdkernels.ops.collectives.config import CollectiveConfig
    from tdkernels.ops.collectives.norm.config import AllReduceNormConfig
    from tdkernels.ops.collectives.norm.op import all_reduce_layer_norm, all_reduce_rms_norm
    from tdkernels.ops.collectives.norm.reference import all_reduce_layer_norm_ref, all_reduce_rms_norm_ref
    from tdkernels.ops.collectives.op import (
        all_gather,
        all_gather_ref,
        all_reduce,
        all_reduce_ref,
        reduce_scatter,
        reduce_scatter_ref,
    )
    from tdkernels.ops.collectives.regions import copy_to_ranks, gather_rows, scatter_rows
    from tdkernels.ops.common.tile_config import Tiles
    from tdkernels.ops.dense.ag_gemm.op import AgGemmConfig, ag_gemm, ag_gemm_ref
    from tdkernels.ops.dense.column_linear.op import column_linear, column_linear_ref
    from tdkernels.ops.dense.gemm_ar.op import GemmArConfig, gemm_ar, gemm_ar_ref
    from tdkernels.ops.dense.gemm_ar_norm.config import GemmArNormConfig
    from tdkernels.ops.dense.gemm_ar_norm.op import gemm_ar_layer_norm, gemm_ar_rms_norm
    from tdkernels.ops.dense.gemm_ar_norm.reference import gemm_ar_layer_norm_ref, gemm_ar_rms_norm_ref
    from tdkernels.ops.dense.gemm_rs.op import GemmRsConfig, gemm_rs, gemm_rs_ref
    from tdkernels.ops.experts.dispatch.all_to_all import all_to_all, all_to_all_ref
    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.op import (
        EpHandle,
        EpTokens,
        ep_combine,
        ep_combine_ref,
        ep_dispatch,
        ep_dispatch_ref,
    )
    from tdkernels.ops.experts.dispatch.send import ep_combine_send, ep_dispatch_send
    from tdkernels.ops.experts.ep_moe.op import EpMoeConfig, ep_moe, ep_moe_ref
    from tdkernels.ops.experts.grouped_gemm.op import GroupGemmConfig, group_gemm, group_gemm_ref
    from tdkernels.ops.experts.tp_moe.config import MoeTpConfig
    from tdkernels.ops.experts.tp_moe.op import moe_ag_gemm, moe_gemm_rs, tp_moe, tp_moe_ref
    from tdkernels.ops.experts.tp_moe.routing import MoeRouting
    from tdkernels.ops.quantize.op import quantize_fp8, quantize_fp8_ref
    from tdkernels.symm import set_timeout, synchronize

__version__ = "0.2.0"

_SUBMODULES = ("autotune", "errors", "integrations", "lang", "launch", "nn", "ops", "sanitizer", "symm", "trace")
_MODULES = {name: module for module, names in PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"tdkernels.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AgAttentionConfig", "AgGemmConfig", "AllReduceNormConfig", "CollectiveConfig", "EpConfig", "EpHandle",
    "EpMoeConfig", "EpTokens", "FlashDecodeConfig", "GemmArConfig", "GemmArNormConfig", "GemmRsConfig",
    "GroupGemmConfig", "MoeRouting", "MoeTpConfig", "PeerFailedError", "PeerTimeoutError", "PlanMismatchError",
    "Tiles", "UlyssesConfig", "ag_attention", "ag_attention_ref", "ag_gemm", "ag_gemm_ref", "all_gather",
    "all_gather_ref", "all_reduce", "all_reduce_layer_norm", "all_reduce_layer_norm_ref", "all_reduce_ref",
    "all_reduce_rms_norm", "all_reduce_rms_norm_ref", "all_to_all", "all_to_all_ref", "autotune", "batch_invariant",
    "column_linear", "column_linear_ref", "copy_to_ranks", "ep_combine", "ep_combine_ref", "ep_combine_send",
    "ep_dispatch", "ep_dispatch_ref", "ep_dispatch_send", "ep_moe", "ep_moe_ref", "explain", "flash_decode",
    "flash_decode_ref", "gather_rows", "gemm_ar", "gemm_ar_layer_norm", "gemm_ar_layer_norm_ref", "gemm_ar_ref",
    "gemm_ar_rms_norm", "gemm_ar_rms_norm_ref", "gemm_rs", "gemm_rs_ref", "group_gemm", "group_gemm_ref",
    "moe_ag_gemm", "moe_gemm_rs", "quantize_fp8", "quantize_fp8_ref", "reduce_scatter", "reduce_scatter_ref",
    "scatter_rows", "set_batch_invariant", "set_timeout", "synchronize", "tp_moe", "tp_moe_ref", "ulysses_out",
    "ulysses_out_ref", "ulysses_qkv", "ulysses_qkv_ref",
]

if os.environ.get("TDKERNELS_SANITIZE", "0") not in ("", "0"):
    setattr(importlib.import_module("tdkernels.launch"), "around_runs", __getattr__("sanitizer").record)  # noqa: B010
