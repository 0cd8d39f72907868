"""The stress test of mutants on GPUs: bugs reach compiled kernels, and wrong results and timeouts are counted."""

import re
from unittest import mock

import pytest
import torch.distributed as dist

from tdkernels.lang import memory
from tdkernels.ops.collectives import kernel_async_all_gather as gather
from tests.compiled.helper_kernels import helper_launches
from tests.compiled.targets import needs_no_gpu
from tests.sanitizer import stress
from tests.sanitizer.compiled_mutants import forget_compiled, jit_functions, mutated_source, planted
from tests.sanitizer.mutants import MUTANTS, Mutant
from tests.support.aot import compile_for
from tests.support.ranks import DEVICE, on_ranks


def accesses(kernel):
    """Return the stores and loads of signals in the PTX of the first launch of a helper kernel, in their order."""
    args, constants = helper_launches()[kernel][0]
    ptx = compile_for(kernel, args, constants, "sm_90").asm["ptx"]
    return re.findall(r"@first st\.\w+\.\w+|\bld\.(?:acquire|relaxed)\.\w+\.global\.b64 %rd", ptx)


@needs_no_gpu
@pytest.mark.parametrize(
    "name, kernel, before, after",
    [
        ("K: a release store is relaxed", gather.notify_kernel, "st.release.sys", "st.relaxed.sys"),
        ("a release between ranks has the scope of a GPU", gather.notify_kernel, "st.release.sys", "st.release.gpu"),
        ("L: an acquire load is relaxed", gather.await_kernel, "ld.acquire.sys", "ld.relaxed.sys"),
        ("an acquire between ranks has the scope of a GPU", gather.await_kernel, "ld.acquire.sys", "ld.acquire.gpu"),
    ],
)
def test_mutant_is_compiled(name, kernel, before, after):
    unchanged = accesses(kernel)
    assert any(before in access for access in unchanged)
    assert not any(after in access for access in unchanged)
    with planted(MUTANTS[name]):
        mutant = accesses(kernel)
    assert [access.replace(after, before) for access in mutant] == unchanged != mutant
    assert accesses(kernel) == unchanged, "the mutation was not reverted"


def test_callers_are_compiled_again():
    """Triton's files of compiled kernels, and its caches in memory, are keyed by these hashes."""
    forget_compiled()
    before = [(function, function.cache_key) for function in jit_functions()]
    with planted(MUTANTS["K: a release store is relaxed"]):
        changed = {function.fn.__name__ for function, key in before if function.cache_key != key}
    assert {"store_release_if", "notify", "notify_kernel"} <= changed
    assert not {"load_acquire", "is_last_arriver"} & changed
    assert all(function.cache_key == key for function, key in before), "the mutation was not reverted"


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_matches_the_source(name):
    with planted(MUTANTS[name]):
        pass


def test_source_without_a_match_fails():
    with pytest.raises(AssertionError, match="0 times in load_acquire"):
        with mutated_source(memory.load_acquire, "no such line", ""):
            pass


# Bugs that show in every call, whatever the order of events.
_KERNEL = "gemm_ar one_shot", "tdkernels.ops.dense.kernel_one_shot", "gemm_one_shot_kernel"
WRONG = Mutant(*_KERNEL, "own = td.from_float32(acc, DTYPE)", "own = td.from_float32(acc + 1.0, DTYPE)", "")
SILENT = Mutant(*_KERNEL, "td.notify_all(ctx, td.signal_at(ctx, half, me * tiles + tile), signal)", "pass", "")


def outcomes_of(name, mutant):
    """Return the outcomes of two calls of the unchanged kernel, of the mutant, and of the unchanged kernel again."""
    outcomes = []
    with mock.patch.dict(MUTANTS, {name: mutant}):
        stress.prepare(name)
        for is_planted in (False, True, False):
            with mock.patch.object(stress, "FIRST_TIMEOUT_S", 1.0 if is_planted else 60.0):
                outcomes.append(stress.begin(is_planted, 2))
            dist.barrier()  # the workspaces must not be freed before all ranks have returned
        stress.end()
    return outcomes


@pytest.mark.parametrize("name, mutant, outcome", [("wrong", WRONG, ([0, 1], None)), ("silent", SILENT, ([], True))])
@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the program itself shows it")
def test_wrong_results_and_timeouts_are_counted(name, mutant, outcome):
    for before, found, after in on_ranks(3, outcomes_of, name, mutant):
        assert before == after == ([], None)
        wrong, error = found
        assert (wrong, error and error[0]) == outcome, found
