"""ep_dispatch and ep_combine: forward and backward against results computed from the operands of all ranks."""

import pytest
import torch

from tdkernels import EpConfig
from tdkernels.ops.experts.dispatch.config import COMBINES, default_config
from tdkernels.ops.experts.dispatch.counting import _Counting
from tdkernels.ops.experts.dispatch.request import RoutingShape
from tests.ops.experts.dispatch import cases, limit_cases, phase_cases, torch_backend_cases
from tests.ops.experts.dispatch.cases import SMALL, UNEVEN
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"
FP8 = torch.float8_e4m3fn
PER_EXPERT = {**SMALL, "combine": "per_expert"}
WIDE_CHUNKS = {"num_senders": 1, "num_receivers": 1, "chunk_tokens": 3, "num_warps": 1}
TORCH = {"method": "torch", "combine": "per_expert"}  # the sum order of torch
CONFIGS = {"default": None, "small": SMALL, "per expert": PER_EXPERT, "wide chunks": WIDE_CHUNKS, "torch": TORCH}
each_combine = pytest.mark.parametrize("config", ["default", "per expert", "torch"])
each_method = pytest.mark.parametrize("config", ["default", "torch"])

# Tokens of the ranks, assignments per token, experts per rank, row width.
SPECS = {
    "distinct": dict(tokens=5, k=2, experts_each=2, width=32, ids="distinct"),
    "uneven": dict(tokens=UNEVEN, k=3, experts_each=3, width=65, dtype=FP16, seed=1),
    "k equals experts": dict(tokens=3, k="all", experts_each=2, width=1, dtype=FP32, ids="any", seed=2),
    "k of 1": dict(tokens=[0, 9, 1, 4], k=1, experts_each=1, width=7, weights=BF16, seed=3),
    "all to one": dict(tokens=[6, 2, 0, 3], k=2, experts_each=2, width=8, ids="one", seed=4),
    "no tokens": dict(tokens=0, k=2, experts_each=2, width=9, seed=7),
    "all dropped": dict(tokens=[2, 0, 1, 3], k=2, experts_each=2, width=9, ids="none", seed=8),
    "rows of several blocks": dict(tokens=2, k=2, experts_each=2, width=200, dtype=FP32, seed=5),
}


# The interpreter is slow, so CPU ranks run only some of the combinations.
CPU_CASES = {
    (1, "small"): ["distinct", "rows of several blocks"],
    (2, "default"): list(SPECS),
    (3, "per expert"): ["uneven", "all to one"],
    (4, "small"): ["uneven", "k equals experts"],
}


@pytest.mark.parametrize("world_size, config, spec", [
    (*ranks_and_config, spec) for ranks_and_config, specs in CPU_CASES.items() for spec in (SPECS if ON_GPU else specs)
])
def test_forward_and_gradients(world_size, config, spec):
    on_ranks(world_size, cases.computes, SPECS[spec], CONFIGS[config])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_torch_forward_and_gradients(world_size, spec):
    on_ranks(world_size, cases.computes, SPECS[spec], TORCH)


def test_counts_of_many_tiles():
    """With many tiles of ids, a separate launch adds up the counts of the programs; here on rank 0."""
    many, few = (_Counting(RoutingShape("op", tokens, 33, 66, 2), "", False, None) for tokens in (34, 2))
    assert many.agrees_apart and not few.agrees_apart, "the case does not cover the separate launch"
    spec = dict(tokens=[34, 2], k=33, experts_each=33, width=3, dtype=FP32, seed=9)
    on_ranks(2, cases.dispatches_tokens, spec)


@pytest.mark.parametrize("world_size, dtype, combine", [
    (2, BF16, "per_rank"), (2, FP32, "per_expert"), (3, FP32, "per_rank"), (3, FP16, "per_expert"),
    (3, BF16, "per_rank"), (3, BF16, "per_expert"),
], ids=str)
def test_error_bound(world_size, dtype, combine):
    on_ranks(world_size, cases.is_within_error_bound, dtype, {**SMALL, "combine": combine})


@pytest.mark.parametrize("changes", [{"combine": "per_rank"}, {"combine": "per_expert"}, TORCH], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_reduction_order(dtype, changes):
    on_ranks(3, cases.reduces_in_fixed_order, dtype, {**SMALL, **changes})


# Row sizes that are multiples of 1, 2, 4, 8 and 16 bytes, and rows of several blocks of 256 bytes.
BITS = [(BF16, 5), (FP8, 1), (FP8, 300), (torch.float8_e5m2, 6), (FP32, 70), (FP16, 64), (FP8, 12), (BF16, 12)]


@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "small"), (3, "wide chunks"), (3, "torch")])
def test_any_bits(world_size, config):
    on_ranks(world_size, cases.moves_any_bits, BITS, CONFIGS[config])


@each_method
@pytest.mark.parametrize("world_size", [1, 3])
def test_layouts(world_size, config):
    on_ranks(world_size, cases.takes_any_layout, CONFIGS[config])


@each_combine
@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_are_optional(world_size, config):
    on_ranks(world_size, cases.weights_are_optional, CONFIGS[config])


@each_combine
def test_combine_with_other_weights(config):
    on_ranks(2, cases.combine_takes_other_weights, CONFIGS[config])


@each_combine
def test_combine_with_weights_changed_in_place(config):
    on_ranks(2, cases.combine_uses_weights_changed_in_place, CONFIGS[config])


@each_method
@pytest.mark.parametrize("world_size", [1, 3])
def test_handle_is_reused(world_size, config):
    on_ranks(world_size, cases.reuses_the_handle, CONFIGS[config])


@each_method
def test_gradients_accumulate(config):
    on_ranks(3, cases.accumulates_gradients, CONFIGS[config])


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_not_required_are_not_sent(world_size):
    on_ranks(world_size, cases.sends_only_required_gradients)


def test_no_grad():
    on_ranks(2, cases.builds_no_graph_under_no_grad)


@pytest.mark.parametrize("world_size", [1, 2])
def test_second_derivatives_are_rejected(world_size):
    on_ranks(world_size, cases.rejects_second_derivatives)


@pytest.mark.parametrize("weights_in", ["dispatch", "experts", "combine"])
@pytest.mark.parametrize("world_size, config", [(1, "default"), (3, "default"), (3, "torch")])
def test_layer_equals_unsharded_layer(world_size, config, weights_in):
    on_ranks(world_size, cases.matches_unsharded_layer, weights_in, world_size, CONFIGS[config])


def test_bitwise_deterministic():
    on_ranks(3, cases.is_bitwise_deterministic)


@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "small"), (3, "per expert"), (3, "torch")])
def test_capacity(world_size, config):
    on_ranks(world_size, limit_cases.respects_capacity, CONFIGS[config])


# The required capacity is given by the rows that a rank receives, or by the tokens that a rank sends.
FULL_RANK = dict(tokens=[3, 4, 2, 5], k=2, experts_each=2, width=8, ids="last")
FULL_STAGE = dict(tokens=[6, 0, 0, 0], k=3, experts_each=1, width=8, ids="distinct")


@pytest.mark.parametrize("world_size, spec, limit", [(1, FULL_RANK, 0), (3, FULL_RANK, 0), (3, FULL_STAGE, 1)], ids=str)
def test_overflow(world_size, spec, limit):
    on_ranks(world_size, limit_cases.rejects_overflow, spec, limit)


@pytest.mark.parametrize("wrong, id_dtype", [
    (-2, torch.int64), (9, torch.int64), ((1 << 32) + 1, torch.int64), (-(1 << 31), torch.int32)
], ids=str)
@each_method
def test_invalid_ids(config, wrong, id_dtype):
    on_ranks(3, limit_cases.rejects_invalid_ids, wrong, 0, id_dtype, CONFIGS[config])


@each_method
@pytest.mark.parametrize("where", [0, 1])
def test_invalid_ids_are_reported_with_their_rank(where, config):
    on_ranks(3, limit_cases.rejects_invalid_ids, 100, where, torch.int64, CONFIGS[config])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("width, dtype", [(1, BF16), (127, FP32), (128, FP16), (129, BF16), (600, FP32)], ids=str)
def test_quantized(world_size, width, dtype):
    on_ranks(world_size, cases.quantizes, width, dtype, SMALL if width > 256 else None)


@pytest.mark.parametrize("width, dtype", [(1, BF16), (127, FP32), (600, FP16)], ids=str)
def test_torch_quantized(width, dtype):
    on_ranks(2, cases.quantizes, width, dtype, TORCH)


def test_quantized_rows_have_no_gradient():
    on_ranks(2, cases.quantized_rows_have_no_gradient)


@each_method
@pytest.mark.parametrize("world_size", [1, 3])
def test_scales(world_size, config):
    on_ranks(world_size, cases.sends_scales, [
        (FP32, ()), (FP32, (1,)), (FP32, (5,)), (BF16, (3,)), (torch.uint8, ()), (torch.uint8, (7,)),
        (torch.float64, (2,)), (torch.int64, ()), (torch.float8_e5m2, (4,)), (torch.uint32, ()), (torch.uint16, (3,)),
    ], CONFIGS[config])


@pytest.mark.parametrize("world_size", [1, 2])
def test_invalid_arguments(world_size):
    on_ranks(world_size, limit_cases.rejects_invalid_arguments)


@pytest.mark.parametrize("world_size, config, options", [
    (1, "default", {}), (2, "per expert", {"max_tokens": 40}), (3, "small", {"quantize": "fp8"}),
], ids=str)
def test_separate_send_and_receive(world_size, config, options):
    on_ranks(world_size, phase_cases.sends_and_receives_separately, CONFIGS[config], options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_receive_is_required_before_next_send(world_size):
    on_ranks(world_size, phase_cases.requires_receive_before_next_send)


def test_receive_only_once():
    on_ranks(2, phase_cases.receives_only_once)


@pytest.mark.parametrize("world_size", [1, 2])
def test_separate_phases_have_no_gradient(world_size):
    on_ranks(world_size, phase_cases.separate_phases_have_no_gradient)


def test_operands_may_be_overwritten_after_the_call():
    on_ranks(2, cases.allows_overwriting_operands)


# ---- configs ----


def test_invalid_configs():
    cpu = torch.device("cpu")
    for changes, message in (
        ({"combine": "sum"}, "combine must be"), ({"num_senders": 0}, "num_senders must be"),
        ({"num_senders": 1.0}, "num_senders must be"), ({"num_receivers": -1}, "num_receivers must be"),
        ({"num_receivers": True}, "num_receivers must be"), ({"chunk_tokens": 0}, "chunk_tokens must be"),
        ({"block_bytes": 128}, "block_bytes must be a power of two"), ({"block_bytes": 131072}, "block_bytes must be"),
        ({"block_bytes": 1000}, "block_bytes must be"), ({"num_warps": 0}, "num_warps must be"),
        ({"num_warps": 3}, "num_warps must be"), ({"num_warps": 32}, "num_warps must be"),
    ):
        reason = EpConfig(**changes).illegal(cpu)
        assert reason is not None and message in reason, f"{changes}: {reason}"
    for combine in COMBINES:
        assert EpConfig(combine=combine, block_bytes=256, num_warps=16, chunk_tokens=1000).illegal(cpu) is None
    assert default_config(cpu).illegal(cpu) is None and EpConfig().illegal(cpu) is None


# ---- torch backend ----


def test_torch_separate_send_and_receive():
    on_ranks(2, torch_backend_cases.torch_backend_sends_and_receives_separately)


def test_torch_quantizes_identically():
    on_ranks(2, torch_backend_cases.torch_backend_quantizes_identically)


def test_torch_mixed_cached_calls():
    on_ranks(3, torch_backend_cases.torch_backend_reports_mixed_cached_calls)


def test_torch_rejects_mixed_backends():
    on_ranks(2, torch_backend_cases.rejects_mixed_backends)


@pytest.mark.parametrize("world_size", [1, 3])
def test_torch_errors_on_all_ranks(world_size):
    on_ranks(world_size, torch_backend_cases.torch_backend_reports_errors_on_all_ranks)


def test_torch_different_rows():
    on_ranks(3, torch_backend_cases.torch_backend_reports_different_rows)


def test_torch_needs_no_symmetric_memory():
    on_ranks(2, torch_backend_cases.needs_no_symmetric_memory, SPECS["uneven"])


def test_torch_with_max_tokens_per_rank():
    on_ranks(3, torch_backend_cases.torch_backend_takes_max_tokens_per_rank)


def test_selected_torch_backend():
    on_ranks(3, torch_backend_cases.uses_selected_torch_backend)


def test_compiled_with_graph_breaks():
    on_ranks(2, cases.compiles_with_graph_breaks)
