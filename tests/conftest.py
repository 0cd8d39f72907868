"""The rule that a green suite has run something on several ranks, and the end of the ranks that tests share."""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support import ranks, simulated_nodes

# The ranks inherit these. What somebody has tuned on this machine, or what is shipped for it, must not decide which
# path a test takes: without a config it takes the default, and tests of the tuner say what they want.
os.environ["TDKERNELS_CACHE_DIR"] = tempfile.mkdtemp(prefix="tdkernels-tests-")
os.environ["TDKERNELS_AUTOTUNE"] = "off"


def pytest_addoption(parser):
    parser.addoption("--repeat", type=int, default=1, help="run each test this often: a race may need many tries")


@pytest.fixture(autouse=True)
def repetition(request):
    """Which of the repetitions this is."""
    return getattr(request, "param", 0)


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--repeat")
    if count > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count), indirect=True)


# What they compile differs from GPU to GPU, and stands for the rest.
_FOR_ALL_GPUS = ("test_products_compile", "test_one_shot_compiles", "test_small_kernels")
_OTHER_GPUS = ("sm_89", "sm_100", "gfx950")  # sm_80 takes the ways of sm_89, and has more shared memory
# What they ask is decided before it matters for which GPU it is compiled.
_FOR_ONE_GPU = ("test_traced_kernels_compile", "test_a_size_of_one_compiles", "test_collectives_of_odd_sizes_compile")
# Of their cases, which have most of what matters in common, every other one stands for the rest.
_LONG = {
    "test_ag_attention.py": ("test_everything",),
    "test_all_to_all.py": ("test_rows_go_there_and_back",),
    "test_all_to_all_low_latency.py": ("test_rows_go_there_and_back",),
    "test_compile.py": ("test_fullgraph",),
    "test_dense.py": ("test_minimal_shapes_in_every_config", "test_same_bits_every_time"),
    "test_dispatch.py": ("test_everything",),
    "test_flash_decode.py": ("test_everything",),
    "test_flash_decode_multinode.py": ("test_everything",),
    "test_low_latency.py": ("test_everything",),
    "test_tp_moe.py": ("test_everything",),
    "test_traces.py": ("test_traced_kernels_compile", "test_without_a_trace_nothing_of_it_is_compiled"),
    "test_ulysses.py": ("test_everything",),
}


def pytest_collection_modifyitems(items):
    """What says little that is new is run only if all tests are asked for; several nodes take a GPU for each rank."""
    seen = Counter()
    for item in items:
        which = item.path.name, getattr(item, "originalname", None)
        is_long = which[1] in _LONG.get(which[0], ())
        if item.path.name.endswith("_multinode.py"):
            item.add_marker(simulated_nodes.needs_gpus)
        if is_long and seen[which] % 2 or _says_little(item, getattr(getattr(item, "callspec", None), "params", {})):
            item.add_marker(simulated_nodes.thorough)
        seen[which] += 1


def _says_little(item, params):
    """Operators across nodes are asked at 2 x 2; for one GPU of each vendor most is compiled, for others some."""
    if item.path.parent.name == "compiled":
        return "arch" in params and _compiled_for_little(item, params)
    return item.path.name.endswith("_multinode.py") and params.get("world_size", 4) != 4


def _compiled_for_little(item, params):
    """Is it for a GPU, or of a dtype, that others stand for?"""
    dtype = params.get("dtype", torch.bfloat16)
    if params["arch"] == "sm_90":
        return dtype == torch.float16  # the same code as of bf16
    if dtype != torch.bfloat16:
        return True
    if params["arch"] == "gfx942":
        return item.originalname in _FOR_ONE_GPU
    return params["arch"] not in _OTHER_GPUS or not item.originalname.startswith(_FOR_ALL_GPUS)


def pytest_report_header(config):
    return f"ranks run on: {ranks.ASKED} (TDKERNELS_TEST_DEVICE)"


def _whole_suite(config) -> bool:
    """Was everything asked for? Who picks a file or a test does not mean to test several ranks; CI always does."""
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
