"""Traces for the tests: of each way in which data goes between the ranks, recorded once."""

import functools

import torch

from tdkernels.autotune.tunable import tunable
from tdkernels.trace.recording import record_operator
from tests.support.ranks import on_ranks

# Operator, changes to the default config, and its sizes, such as M, N and K: multiples of the number of ranks or,
# negative, as they are; and how its operands lie, if not as usual.
WAYS = {
    "push": ("ag_gemm", {"transport": "push", "num_comm_sms": 2}, (130, 70, -48)),
    "copy engine": ("ag_gemm", {"transport": "copy_engine"}, (130, 70, -48)),
    "reduce-scatter": ("gemm_rs", {}, (130, -140, 16)),
    "reduce-scatter, direct": ("gemm_rs", {"transport": "direct"}, (130, -140, 16)),
    "two shot": ("gemm_ar", {"exchange": "two_shot"}, (-130, -140, 16)),
    "one shot": ("gemm_ar", {"exchange": "one_shot", "split_k": 2}, (-9, -140, 64)),
    "one shot, sums of own rows": ("gemm_rs", {"transport": "one_shot"}, (9, -140, 64)),
    "one shot, gathered": ("ag_gemm", {"transport": "one_shot", "split_k": 2, "num_comm_sms": 2}, (9, 140, -64)),
    "to heads": ("ulysses_qkv", {}, (70, 70, -48)),
    "to positions": ("ulysses_out", {"num_comm_sms": 2, "chunk_parts": 1}, (70, -70, 32)),
    "attention": ("ag_attention", {"chunk_rows": 16}, (-1, 36, -4, -2, -16, -16), "full"),
    "decode": ("flash_decode", {"block_n": 16, "num_programs": 6}, (-2, -1, -4, -2, -16, -16, -56)),
    "decode of tokens": ("flash_decode", {"num_programs": 2}, (-2, -2, -4, -2, -16, -16, -20), "paged"),
    "experts' rows": ("moe_ag_gemm", {"stages": 2}, (32, 48, -32, -3, -2)),
    "tokens to experts": ("ep_dispatch", {"chunk_tokens": 4}, (9, -33, 4, -2), "static"),
    "tokens straight to experts": ("ep_dispatch", {}, (9, -33, 4, -2), "bounded_fp8"),
    "tokens from experts": ("ep_combine", {"combine": "per_expert"}, (9, -33, 4, -2), "exact"),
    "experts' sums": ("moe_gemm_rs", {"stages": 2}, (32, -48, 32, -3, -2)),
}
REPETITIONS = 2


def problem(way, world_size):
    """(operator, shape, changes, layout) of a way."""
    operator, changes, sizes, *layout = WAYS[way]
    shape = tuple(-size if size < 0 else size * world_size for size in sizes)
    return operator, shape, changes, *(layout or tunable(operator).layouts[:1])


@functools.cache
def recordings(way, world_size):
    """What ``record_operator`` returns on all ranks."""
    operator, shape, changes, layout = problem(way, world_size)
    return on_ranks(world_size, record_operator, operator, shape, torch.float32, changes, REPETITIONS, layout)
