"""Pytest hooks: select the tests of a default run, close the shared ranks, fail a suite without multi-rank tests."""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support import ranks, sharing, simulated_nodes, subset

# The ranks inherit these. Configs tuned on this machine or shipped for it must not decide which path a test takes:
# without a config an operator uses its heuristic, and tests of the tuner set what they need.
os.environ["TDKERNELS_CACHE_DIR"] = tempfile.mkdtemp(prefix="tdkernels-tests-")
os.environ["TDKERNELS_AUTOTUNE"] = "off"
# The ranks share the cores. Several threads of numpy's matrix products in each of them wait for each other in loops.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--repeat", type=int, default=1, help="number of runs of each test; a race may need many")


@pytest.fixture(autouse=True)
def repetition(request):
    """The index of this repetition."""
    return getattr(request, "param", 0)


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--repeat")
    if count > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count), indirect=True)


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
# Their cases overlap, so every other case is enough.
_LONG = {
    "test_ag_attention.py": ("test_everything", "test_autograd", "test_killed_rank"),
    "test_all_to_all.py": ("test_round_trip",),
    "test_all_to_all_low_latency.py": ("test_round_trip",),
    "test_batch_invariance.py": (
        "test_ag_attention", "test_collectives_and_grouped_gemm", "test_expert_layers", "test_flash_decode",
        "test_gemms",
    ),
    "test_async_all_gather.py": ("test_late_sender",),
    "test_collectives.py": ("test_ranks_running_ahead",),
    "test_compile.py": ("test_fullgraph",),
    "test_dense.py": (
        "test_minimal_shapes_in_every_config", "test_determinism", "test_configs",
        "test_every_element_of_small_integers", "test_layouts", "test_shapes_larger_than_any_tile",
        "test_summation_order", "test_training_after_inference",
    ),
    "test_dim_and_lists.py": ("test_methods",),
    "test_dispatch.py": ("test_forward_and_gradients",),
    "test_dispatch_multinode.py": ("test_no_forwarding_after_a_timeout", "test_missing_rank"),
    "test_dispatch_ranks.py": ("test_killed_rank", "test_stress"),
    "test_docs.py": ("test_tutorial_shows_its_program_and_output",),
    "test_ep_moe.py": (
        "test_forward_and_gradients", "test_low_latency_dispatch", "test_fused_with_max_tokens_per_rank",
    ),
    "test_ep_moe_ranks.py": ("test_killed_rank", "test_stress"),
    "test_expert_gemm.py": ("test_scaled_grouped_gemm_on_hopper_uses_wgmma_and_tma",),
    "test_failures.py": (
        "test_an_exception_between_launches_breaks_the_group",
        "test_host_error_raised_in_a_later_call_breaks_the_group",
    ),
    "test_faults.py": ("test_failure_on_one_rank_eliminates_on_all_ranks", "test_failure_in_the_timing_phase_only"),
    "test_flash_decode.py": (
        "test_everything", "test_merge_in_two_steps", "test_flash_decode_in_chunks_compiles",
        "test_two_paged_decode_programs_fit_on_a_hopper_sm",
    ),
    "test_flash_decode_multinode.py": ("test_everything",),
    "test_float8.py": ("test_layers_equal_their_recipe",),
    "test_fp8_weights.py": ("test_forward", "test_calls", "test_tokens_are_multiplied_as_sent"),
    "test_gemm_ar_multinode.py": ("test_any_network_order", "test_one_owner_sums_in_any_network_order"),
    "test_gemm_rs_multinode.py": ("test_any_network_order",),
    "test_gemm_ar_norm.py": (
        "test_call_cache", "test_compile", "test_exact_sums", "test_gradients", "test_layouts", "test_poisoned_memory",
        "test_ranks_running_ahead", "test_values",
    ),
    "test_grouped_gemm.py": ("test_layouts_of_w",),
    "test_known_calls.py": ("test_call_is_validated_once",),
    "test_low_latency.py": ("test_forward_and_gradients", "test_killed_rank", "test_stress"),
    "test_norm.py": (
        "test_calls_use_the_tuned_config", "test_many_rounds", "test_memory_is_reused_by_other_shapes_and_dtypes",
        "test_values",
    ),
    "test_protocol.py": (
        "test_different_cached_shapes_never_give_a_result", "test_different_cached_configs_never_give_a_result",
        "test_slow_rank", "test_no_rank_overtakes_its_peers_data",
    ),
    "test_quantized_all_reduce.py": ("test_values", "test_memory_is_reused_in_any_order"),
    "test_scaled.py": ("test_configs", "test_scalings", "test_scaled_kernels_multiply_fp8"),
    "test_tp_moe.py": ("test_forward_and_gradients",),
    "test_tp_moe_ranks.py": ("test_bitwise_deterministic", "test_killed_rank"),
    "test_recording.py": (
        "test_every_program_is_recorded_from_start_to_end", "test_traced_call_computes_the_same_bits",
    ),
    "test_traces.py": ("test_traced_kernels_compile", "test_untraced_kernels_contain_no_trace_code"),
    "test_ulysses.py": ("test_everything",),
    "test_ulysses_ranks.py": ("test_ranks_running_ahead",),
    "test_void_launches.py": ("test_void_launch_changes_nothing",),
    "test_wire.py": ("test_chunks", "test_error_bound"),
}


def pytest_collection_modifyitems(items):
    """Skip cases that add little unless TDKERNELS_TEST_THOROUGH is set; multi-node tests need one GPU per rank."""
    seen, compilations = Counter(), {}
    for item in items:
        which = item.path.name, getattr(item, "originalname", None)
        is_long = which[1] in _LONG.get(which[0], ())
        if item.path.name.endswith("_multinode.py"):
            item.add_marker(simulated_nodes.needs_gpus)
        if is_long and seen[which] % 2 or _adds_little(item, _params(item)):
            item.add_marker(simulated_nodes.thorough)
        elif item.path.parent.name == "compiled":
            compilations.setdefault((item.path, item.originalname), []).append(item)
        seen[which] += 1
    # A compilation that fails nearly always fails with each combination that has one of its values.
    for same in compilations.values():
        chosen = subset.each_value([{name: str(value) for name, value in _params(item).items()} for item in same])
        for index in set(range(len(same))) - set(chosen):
            same[index].add_marker(simulated_nodes.thorough)
    sharing.in_order(items)


def _params(item):
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Do not run a module that the other process of ``make test`` runs."""
    return True if sharing.runs_elsewhere(item) else None


def _adds_little(item, params):
    """Whether a case adds little: multi-node operators except at 2 x 2, and most compilations for other GPUs."""
    if item.path.parent.name == "compiled":
        return "arch" in params and _compilation_adds_little(item, params)
    return item.path.name.endswith("_multinode.py") and params.get("world_size", 4) != 4


def _compilation_adds_little(item, params):
    """Return whether other cases cover the GPU and the dtype of this compilation."""
    dtype = params.get("dtype", torch.bfloat16)
    if getattr(params.get("kernel"), "__name__", None) in _ALIKE_KERNELS and item.originalname == _GEMMS:
        if dtype == torch.float32 or params["arch"] == "gfx950":
            return True
    if params["arch"] == "sm_90":
        return dtype == torch.float16  # compiles to the same code as bf16
    if dtype != torch.bfloat16:
        return True
    if params["arch"] == "gfx942":
        return item.originalname in _FOR_ONE_GPU
    return params["arch"] not in _OTHER_GPUS or not item.originalname.startswith(_FOR_ALL_GPUS)


def pytest_report_header(config):
    return f"ranks run on: {ranks.ASKED} (TDKERNELS_TEST_DEVICE)"


def _whole_suite(config) -> bool:
    """Whether the whole suite is requested. A single file or test need not run several ranks; CI always must."""
    option = config.option
    if option.collectonly:
        return False
    if os.environ.get("CI"):
        return True
    suite = {config.rootpath, *(config.rootpath / path for path in config.getini("testpaths"))}
    narrowed = option.keyword or option.markexpr or option.deselect or option.ignore or getattr(option, "lf", False)
    return not narrowed and all(Path(arg).resolve() in suite for arg in config.args)


def _nothing_ran_on_ranks(config) -> bool:
    return ranks.multi_rank_runs == 0 and _whole_suite(config)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    ranks.close_all()
    shutil.rmtree(os.environ["TDKERNELS_CACHE_DIR"], ignore_errors=True)
    if exitstatus == pytest.ExitCode.OK and _nothing_ran_on_ranks(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if _nothing_ran_on_ranks(config):
        terminalreporter.section("FAILED: no test ran on two ranks or more", red=True)
        terminalreporter.line("All of them were skipped or are missing, so this run says nothing about the operators.")
        terminalreporter.line(f"Ranks ran on: {ranks.ASKED}. TDKERNELS_TEST_DEVICE=cpu runs them without GPUs.")
