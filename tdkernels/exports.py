"""Where the public names and the tuners of operators are defined; nothing is imported before it is used.

Creating the kernels of all operators takes longer than everything else that an import does, and the command line parses
its arguments before it imports torch.
"""

PUBLIC = {  # module: what tdkernels exports of it
    "tdkernels.autotune.explain": ("explain",),
    "tdkernels.autotune.invariance": ("batch_invariant", "set_batch_invariant"),
    "tdkernels.errors": ("PeerFailedError", "PeerTimeoutError", "PlanMismatchError"),
    "tdkernels.ops.common.tile_config": ("Tiles",),
    "tdkernels.symm": ("set_timeout", "synchronize"),
    "tdkernels.ops.dense.ag_gemm.op": ("AgGemmConfig", "ag_gemm", "ag_gemm_ref"),
    "tdkernels.ops.dense.column_linear.op": ("column_linear", "column_linear_ref"),
    "tdkernels.ops.dense.gemm_ar.op": ("GemmArConfig", "gemm_ar", "gemm_ar_ref"),
    "tdkernels.ops.dense.gemm_ar_norm.config": ("GemmArNormConfig",),
    "tdkernels.ops.dense.gemm_ar_norm.op": ("gemm_ar_layer_norm", "gemm_ar_rms_norm"),
    "tdkernels.ops.dense.gemm_ar_norm.reference": ("gemm_ar_layer_norm_ref", "gemm_ar_rms_norm_ref"),
    "tdkernels.ops.dense.gemm_rs.op": ("GemmRsConfig", "gemm_rs", "gemm_rs_ref"),
    "tdkernels.ops.quantize.op": ("quantize_fp8", "quantize_fp8_ref"),
    "tdkernels.ops.collectives.config": ("CollectiveConfig",),
    "tdkernels.ops.collectives.op": (
        "all_gather", "all_gather_ref", "all_reduce", "all_reduce_ref", "reduce_scatter", "reduce_scatter_ref",
    ),
    "tdkernels.ops.collectives.norm.config": ("AllReduceNormConfig",),
    "tdkernels.ops.collectives.norm.op": ("all_reduce_layer_norm", "all_reduce_rms_norm"),
    "tdkernels.ops.collectives.norm.reference": ("all_reduce_layer_norm_ref", "all_reduce_rms_norm_ref"),
    "tdkernels.ops.collectives.regions": ("copy_to_ranks", "gather_rows", "scatter_rows"),
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

TUNERS = {  # module: operators that it registers with the tuner
    "tdkernels.ops.collectives.tuning": ("all_gather", "all_reduce", "reduce_scatter"),
    "tdkernels.ops.collectives.norm.tuning": ("all_reduce_layer_norm", "all_reduce_rms_norm"),
    "tdkernels.ops.dense.ag_gemm.tuning": ("ag_gemm",),
    "tdkernels.ops.dense.gemm_ar.tuning": ("gemm_ar",),
    "tdkernels.ops.dense.gemm_ar_norm.tuning": ("gemm_ar_layer_norm", "gemm_ar_rms_norm"),
    "tdkernels.ops.dense.gemm_rs.tuning": ("gemm_rs",),
    "tdkernels.ops.attention.ag_attention.tuning": ("ag_attention",),
    "tdkernels.ops.experts.dispatch.tuning": ("all_to_all", "ep_combine", "ep_dispatch"),
    "tdkernels.ops.experts.ep_moe.tuning": ("ep_moe",),
    "tdkernels.ops.attention.flash_decode.tuning": ("flash_decode",),
    "tdkernels.ops.experts.grouped_gemm.tuning": ("group_gemm",),
    "tdkernels.ops.experts.tp_moe.tuning": ("moe_ag_gemm", "moe_gemm_rs", "tp_moe"),
    "tdkernels.ops.attention.ulysses.tuning": ("ulysses_qkv", "ulysses_out"),
}
