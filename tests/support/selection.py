"""Select the cases of a default run. TDKERNELS_TEST_THOROUGH and GPUs run all of them.

The parameters of a test are combined because any combination may be called. But all combinations take hours, and a
default run must be short. So it contains one case of a test that takes long, for each operator or kernel that the test
has. Which one depends on the name of the test, so that tests of the same operator have different dtypes, sizes and
numbers of ranks.
"""

import zlib

import torch

from tests.support import simulated_nodes

_CODE = ("operator", "kernel", "name", "variant", "mutant")  # parameters whose values are other code
# Tests that call these functions take long, because they run ranks, and so do tests whose names end like this. The
# other tests have all combinations, and those of failures, too.
_RUN_RANKS = {"on_ranks", "fresh_ranks", "on_nodes"}
_LONG = (
    "_in_any_order", "_and_a_slower_link_never_helps", "_is_recorded_from_start_to_end", "_with_another_triton",
    "_shows_its_program_and_output",
)
_FAILURES = ("invalid", "bad_", "disagreement", "rejected", "mismatch")
# Parameters of tests in these folders are combined in full, unless the test compiles kernels.
_IN_FULL = {"cli", "lang", "runtime", "support", "symm"}
# Compilations of kernels in a form that is hardly ever used, or that differs little from that of another test.
_RARE = (
    "_in_fp8", "_odd_sizes_compile", "_odd_sizes_compiles", "_size_one_compiles", "_traced_kernels_compile",
    "_contain_no_trace_code", "_clock_is_read_after_the_gemm_is_done", "_for_several_nodes",
    "_one_rank_per_node_compiles", "_multinode_gemm_kernels_on_hopper",
)
_OTHER_GPUS = ("sm_89", "sm_100", "gfx950")  # sm_80 uses the same code paths as sm_89, and has more shared memory


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
    if not _takes_long(cases[0]):
        return cases
    code = _CODE[:2] if "compiled" in cases[0].path.parts else _CODE
    of_code = {}
    for case in cases:
        of_code.setdefault(tuple(_name_of(params(case).get(name)) for name in code), []).append(case)
    first = zlib.crc32(cases[0].originalname.encode())
    return [group[(first + number) % len(group)] for number, group in enumerate(of_code.values())]


def _name_of(value):
    """Return the name of an operator or a kernel. "gemm_rs forward" is a variant of "gemm_rs"."""
    return str(getattr(value, "__name__", value)).split()[0]


def _takes_long(item):
    """Return whether all combinations of the parameters of a test would take long."""
    if "compiled" in item.path.parts:
        return True
    if _IN_FULL & set(item.path.parts) or any(word in item.originalname for word in _FAILURES):
        return False
    return bool(_RUN_RANKS & set(item.function.__code__.co_names)) or item.originalname.endswith(_LONG)


def _is_skipped(item):
    return any(marker.args and marker.args[0] is True for marker in item.iter_markers("skipif"))


def _adds_little(item, values):
    """Return whether a case adds little: multi-node operators except at 2 x 2, and rare kernels, GPUs and dtypes."""
    if item.path.parent.name == "compiled":
        return item.originalname.endswith(_RARE) or "arch" in values and _compilation_adds_little(values)
    return item.path.name.endswith("_multinode.py") and values.get("world_size", 4) != 4


def _compilation_adds_little(values):
    """Return whether other cases cover the GPU and the dtype of this compilation."""
    dtype = values.get("dtype", torch.bfloat16)
    if values["arch"] == "sm_90":
        return dtype == torch.float16  # compiles to the same code as bf16
    return dtype != torch.bfloat16 or values["arch"] not in ("gfx942", *_OTHER_GPUS)
