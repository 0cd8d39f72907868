"""Traces for the tests: one of each variant of data transfer, recorded once."""

import functools

import pytest
import torch

from tdkernels.autotune.tunable import tunable
from tdkernels.trace import recording
from tdkernels.trace.recording import record_operator
from tests.support.ranks import on_ranks
from tests.support.subset import THOROUGH

# Operator, changes to the default config, and its sizes, such as M, N and K: multiples of the world size, or absolute
# if negative; and the memory layout of its operands, if not the default.
VARIANTS = {
    "push": ("ag_gemm", {"transport": "push", "num_comm_sms": 2}, (70, 40, -16)),
    "copy engine": ("ag_gemm", {"transport": "copy_engine"}, (70, 40, -16)),
    "reduce-scatter": ("gemm_rs", {}, (130, -140, 16)),
    "reduce-scatter, direct": ("gemm_rs", {"transport": "direct"}, (130, -140, 16)),
    "two shot": ("gemm_ar", {"exchange": "two_shot"}, (-130, -140, 16)),
    "two shot, direct": ("gemm_ar", {"exchange": "two_shot", "transport": "direct"}, (-130, -140, 16)),
    "one shot": ("gemm_ar", {"exchange": "one_shot", "split_k": 2}, (-9, -140, 64)),
    "one shot reduce-scatter": ("gemm_rs", {"transport": "one_shot"}, (9, -140, 64)),
    "one shot all-gather": ("ag_gemm", {"transport": "one_shot", "split_k": 2, "num_comm_sms": 2}, (9, 140, -64)),
    "ulysses qkv": ("ulysses_qkv", {}, (70, 70, -16)),
    "ulysses out": ("ulysses_out", {"num_comm_sms": 2, "chunk_parts": 1}, (70, -70, 32)),
    "attention": ("ag_attention", {"chunk_rows": 16}, (-1, 36, -4, -2, -16, -16), "full"),
    "decode": ("flash_decode", {"block_n": 16, "num_programs": 6}, (-2, -1, -4, -2, -16, -16, -56)),
    "decode, several tokens": ("flash_decode", {"num_programs": 2}, (-2, -2, -4, -2, -16, -16, -20), "paged"),
    "moe all-gather": ("moe_ag_gemm", {"stages": 2}, (32, 48, -32, -3, -2)),
    "token dispatch": ("ep_dispatch", {"chunk_tokens": 4}, (9, -33, 4, -2), "static"),
    "token dispatch, low latency": ("ep_dispatch", {}, (9, -33, 4, -2), "bounded_fp8"),
    "token combine": ("ep_combine", {"combine": "per_expert"}, (9, -33, 4, -2), "exact"),
    "moe reduce-scatter": ("moe_gemm_rs", {"stages": 2}, (32, -48, 32, -3, -2)),
}
REPETITIONS = 2


def problem(variant, world_size):
    """Return (operator, shape, changes, layout) of a variant."""
    operator, changes, sizes, *layout = VARIANTS[variant]
    shape = tuple(-size if size < 0 else size * world_size for size in sizes)
    return operator, shape, changes, *(layout or tunable(operator).layouts[:1])


@functools.cache
def recordings(variant, world_size):
    """Return the results of ``record_operator`` on all ranks."""
    operator, shape, changes, layout = problem(variant, world_size)
    arguments = operator, shape, torch.float32, changes, REPETITIONS, layout
    return on_ranks(world_size, record_operator if THOROUGH or variant == "push" else record_untimed, *arguments)


def record_untimed(*arguments):
    """Record an operator without the calls that only measure its time, which are half of all calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_time", lambda *arguments: 1.0)
        return record_operator(*arguments)
