"""Pytest hooks: select the tests of a default run, close the shared ranks, fail a suite without multi-rank tests."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support import ranks, selection, sharing, simulated_nodes

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


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name.endswith("_multinode.py"):
            item.add_marker(simulated_nodes.needs_gpus)
    selection.mark(items)
    sharing.in_order(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Do not run a module that the other process of ``make test`` runs."""
    return True if sharing.runs_elsewhere(item) else None


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
