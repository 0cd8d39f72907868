"""Select the cases of a default run. TDKERNELS_TEST_THOROUGH and GPUs run all of them.

The parameters of a test are combined because any combination may be called, but a bug nearly always shows in each
combination that contains one of its values. So a default run contains each value of each parameter (``each_value``).
Parameters whose values do not all occur together, such as operators and their configs, count as one (``joined``).
"""

import torch

from tests.support import simulated_nodes, subset

# Their compiled code differs between GPUs, and covers what the other tests would compile for these GPUs.
_FOR_ALL_GPUS = ("test_gemm_kernels_compile", "test_one_shot_compiles", "test_helper_kernels")
_OTHER_GPUS = ("sm_89", "sm_100", "gfx950")  # sm_80 uses the same code paths as sm_89, and has more shared memory
# The result of these tests does not depend on the GPU that they compile for.
_FOR_ONE_GPU = (
    "test_traced_kernels_compile", "test_size_one_compiles", "test_collectives_with_odd_sizes_compile",
    "test_attention_with_odd_sizes_compiles", "test_dispatch_with_odd_sizes_compiles",
    "test_fused_ep_moe_with_odd_sizes_compiles", "test_grouped_gemm_with_odd_sizes_compiles",
    "test_tp_moe_with_odd_sizes_compiles", "test_ulysses_with_odd_sizes_compiles", "test_odd_sizes_compile",
)
# Kernels whose parts are those of gemm_ar_kernel and gemm_rs_direct_kernel.
_ALIKE_KERNELS, _GEMMS = ("gemm_rs_kernel", "gemm_ar_direct_kernel"), "test_gemm_kernels_compile"

# Tests that call these functions take long, because they run ranks, and so do tests whose names end like this. The
# other tests have all combinations.
_RUN_RANKS = {"on_ranks", "fresh_ranks", "on_nodes"}
_LONG = ("_in_any_order", "_and_a_slower_link_never_helps")
# Parameters of tests in these folders, or with these words in their names, are combined in full: each combination is
# another code path.
_IN_FULL = {"bench", "cli", "integrations", "lang", "runtime", "sanitizer", "support", "symm"}
_FAILURES = ("invalid", "bad_", "disagreement", "rejected", "mismatch")
# {test: parameters that are combined in full, because each combination is another code path}.
_TOGETHER = {
    "test_autograd": ("operator", "check"),
    "test_pipelined_gradients": ("kernel", "spec", "world_size"),  # it selects its own cases
}
# Lists of cases that overlap. A default run has each value of each parameter (``EACH``), although not all of them occur
# together; or every other case, from the one with this number: two tests of the same configs take different ones.
EACH = "each value"
_OVERLAPPING = {
    "test_ag_attention.py": {"test_everything": EACH, "test_autograd": 0},
    "test_all_to_all.py": {"test_round_trip": EACH},
    "test_all_to_all_low_latency.py": {"test_round_trip": EACH},
    "test_batch_invariance.py": {"test_ag_attention": 0, "test_expert_layers": 0, "test_flash_decode": 0},
    "test_compile.py": {"test_fullgraph": 0},
    "test_dense.py": {
        "test_configs": 0, "test_minimal_shapes_in_every_config": 1, "test_determinism": 0,
        "test_training_after_inference": 1,
    },
    "test_dim_and_lists.py": {"test_methods": 0},
    "test_dispatch.py": {"test_forward_and_gradients": EACH},
    "test_dispatch_multinode.py": {"test_no_forwarding_after_a_timeout": 0, "test_missing_rank": 0},
    "test_dispatch_ranks.py": {"test_killed_rank": 0, "test_stress": 0},
    "test_docs.py": {"test_tutorial_shows_its_program_and_output": 0},
    "test_ep_moe.py": {"test_forward_and_gradients": 0, "test_fused_with_max_tokens_per_rank": 0},
    "test_ep_moe_ranks.py": {"test_killed_rank": 0, "test_stress": 0},
    "test_expert_gemm.py": {"test_scaled_grouped_gemm_on_hopper_uses_wgmma_and_tma": 0},
    "test_faults.py": {
        "test_failure_on_one_rank_eliminates_on_all_ranks": 0, "test_failure_in_the_timing_phase_only": 0,
    },
    "test_flash_decode.py": {
        "test_everything": EACH, "test_merge_in_two_steps": 0, "test_flash_decode_in_chunks_compiles": 0,
        "test_two_paged_decode_programs_fit_on_a_hopper_sm": 0,
    },
    "test_flash_decode_multinode.py": {"test_everything": EACH},
    "test_fp8_weights.py": {"test_forward": 0, "test_calls": 0},
    "test_gemm_ar_multinode.py": {"test_any_network_order": 0, "test_one_owner_sums_in_any_network_order": 0},
    "test_gemm_rs_multinode.py": {"test_any_network_order": 0},
    "test_gemm_ar_norm.py": {
        "test_call_cache": 0, "test_compile": 0, "test_exact_sums": 0, "test_layouts": 0, "test_poisoned_memory": 0,
        "test_ranks_running_ahead": 0, "test_values": 0,
    },
    "test_known_calls.py": {"test_call_is_validated_once": 0},
    "test_low_latency.py": {"test_forward_and_gradients": EACH, "test_killed_rank": 0, "test_stress": 0},
    "test_norm.py": {
        "test_calls_use_the_tuned_config": 0, "test_many_rounds": 0,
        "test_memory_is_reused_by_other_shapes_and_dtypes": 0,
    },
    "test_protocol.py": {
        "test_different_cached_shapes_never_give_a_result": 0, "test_different_cached_configs_never_give_a_result": 0,
        "test_slow_rank": 0, "test_no_rank_overtakes_its_peers_data": 0,
    },
    "test_quantized_all_reduce.py": {"test_memory_is_reused_in_any_order": 0},
    "test_scaled.py": {"test_configs": 0, "test_scaled_kernels_multiply_fp8": 0},
    "test_tp_moe.py": {"test_forward_and_gradients": EACH},
    "test_tp_moe_ranks.py": {"test_bitwise_deterministic": 0},
    "test_recording.py": {"test_traced_call_computes_the_same_bits": 0},
    "test_traces.py": {"test_traced_kernels_compile": 0, "test_untraced_kernels_contain_no_trace_code": 0},
    "test_ulysses.py": {"test_everything": EACH},
    "test_ulysses_ranks.py": {"test_ranks_running_ahead": 0},
    "test_void_launches.py": {"test_void_launch_changes_nothing": 0},
}


def mark(items):
    """Mark the cases that a default run skips as ``thorough``."""
    tests = {}
    for item in items:
        if _adds_little(item, params(item)):
            item.add_marker(simulated_nodes.thorough)
        elif not _is_skipped(item):
            tests.setdefault((item.path, getattr(item, "originalname", None)), []).append(item)
    for cases in tests.values():
        chosen = {case.nodeid for case in _chosen(cases)}
        for case in cases:
            if case.nodeid not in chosen:
                case.add_marker(simulated_nodes.thorough)


def params(item):
    """Return the parameters of a test case."""
    return getattr(getattr(item, "callspec", None), "params", {})


def _chosen(cases):
    """Return the cases of a test that a default run contains."""
    item = cases[0]
    overlap = _OVERLAPPING.get(item.path.name, {}).get(item.originalname)
    if overlap in (0, 1) and len(cases) > 1:
        cases = cases[overlap::2]
    combinations = [{name: str(value) for name, value in params(case).items()} for case in cases]
    if item.path.parent.name != "compiled" and overlap != EACH:
        if not _takes_long(item):
            return cases
        combinations = subset.joined(combinations, _TOGETHER.get(item.originalname, ()))
    return [cases[index] for index in subset.each_value(combinations)]


def _takes_long(item):
    """Return whether all combinations of the parameters of a test would take long."""
    if _IN_FULL & set(item.path.parts) or any(word in item.originalname for word in _FAILURES):
        return False
    return bool(_RUN_RANKS & set(item.function.__code__.co_names)) or item.originalname.endswith(_LONG)


def _is_skipped(item):
    return any(marker.args and marker.args[0] is True for marker in item.iter_markers("skipif"))


def _adds_little(item, values):
    """Whether a case adds little: multi-node operators except at 2 x 2, and most compilations for other GPUs."""
    if item.path.parent.name == "compiled":
        return "arch" in values and _compilation_adds_little(item, values)
    return item.path.name.endswith("_multinode.py") and values.get("world_size", 4) != 4


def _compilation_adds_little(item, values):
    """Return whether other cases cover the GPU and the dtype of this compilation."""
    dtype = values.get("dtype", torch.bfloat16)
    if getattr(values.get("kernel"), "__name__", None) in _ALIKE_KERNELS and item.originalname == _GEMMS:
        if dtype == torch.float32 or values["arch"] == "gfx950":
            return True
    if values["arch"] == "sm_90":
        return dtype == torch.float16  # compiles to the same code as bf16
    if dtype != torch.bfloat16:
        return True
    if values["arch"] == "gfx942":
        return item.originalname in _FOR_ONE_GPU
    return values["arch"] not in _OTHER_GPUS or not item.originalname.startswith(_FOR_ALL_GPUS)
