"""ep_dispatch and ep_combine against what all ranks' operands give, forward and backward, and between the ranks."""

import pytest
import torch

from tdkernels import EpConfig
from tdkernels.ops.experts.dispatch.config import COMBINES, default_config
from tdkernels.ops.experts.dispatch.counting import _Counting
from tdkernels.ops.experts.dispatch.request import RoutingShape
from tests.ops.experts.dispatch import cases
from tests.ops.experts.dispatch.cases import SMALL, UNEVEN
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"
FP8 = torch.float8_e4m3fn
PER_EXPERT = {**SMALL, "combine": "per_expert"}
WIDE_CHUNKS = {"num_senders": 1, "num_receivers": 1, "chunk_tokens": 3, "num_warps": 1}
BY_TORCH = {"method": "torch", "combine": "per_expert"}  # which is how it sums
CONFIGS = {"default": None, "small": SMALL, "per expert": PER_EXPERT, "wide chunks": WIDE_CHUNKS, "torch": BY_TORCH}
each_sum = pytest.mark.parametrize("config", ["default", "per expert", "torch"])
each_way = pytest.mark.parametrize("config", ["default", "torch"])

# Tokens of the ranks, choices, experts of each rank, sizes of rows.
SPECS = {
    "distinct": dict(tokens=5, k=2, experts_each=2, width=32, ids="distinct"),
    "uneven": dict(tokens=UNEVEN, k=3, experts_each=3, width=65, dtype=FP16, seed=1),
    "as many choices as experts": dict(tokens=3, k="all", experts_each=2, width=1, dtype=FP32, ids="any", seed=2),
    "one choice": dict(tokens=[0, 9, 1, 4], k=1, experts_each=1, width=7, weights=BF16, seed=3),
    "all to one": dict(tokens=[6, 2, 0, 3], k=2, experts_each=2, width=8, ids="one", seed=4),
    "no tokens": dict(tokens=0, k=2, experts_each=2, width=9, seed=7),
    "all dropped": dict(tokens=[2, 0, 1, 3], k=2, experts_each=2, width=9, ids="none", seed=8),
    "rows of several blocks": dict(tokens=2, k=2, experts_each=2, width=200, dtype=FP32, seed=5),
}


# The interpreter takes long, so CPU ranks are not asked everything everywhere.
ON_CPU = {
    (1, "small"): ["distinct", "rows of several blocks"],
    (2, "default"): list(SPECS),
    (3, "per expert"): ["uneven", "all to one"],
    (4, "small"): ["uneven", "as many choices as experts"],
}


@pytest.mark.parametrize("world_size, config, spec", [
    (*ranks_and_config, spec) for ranks_and_config, specs in ON_CPU.items() for spec in (SPECS if ON_GPU else specs)
])
def test_everything(world_size, config, spec):
    on_ranks(world_size, cases.computes, SPECS[spec], CONFIGS[config])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_everything_by_torch(world_size, spec):
    on_ranks(world_size, cases.computes, SPECS[spec], BY_TORCH)


def test_counts_of_many_tiles():
    """A program counts few ids, and where there are many programs a launch of its own adds them up: here on rank 0."""
    many, few = (_Counting(RoutingShape("op", tokens, 33, 66, 2), "", False, None) for tokens in (34, 2))
    assert many.agrees_apart and not few.agrees_apart, "this case does not ask what it was made for"
    spec = dict(tokens=[34, 2], k=33, experts_each=33, width=3, dtype=FP32, seed=9)
    on_ranks(2, cases.arrives, spec)


@pytest.mark.parametrize("world_size, dtype, combine", [
    (2, BF16, "per_rank"), (2, FP32, "per_expert"), (3, FP32, "per_rank"), (3, FP16, "per_expert"),
    (3, BF16, "per_rank"), (3, BF16, "per_expert"),
], ids=str)
def test_error_is_that_of_torch(world_size, dtype, combine):
    on_ranks(world_size, cases.is_within_the_bound, dtype, {**SMALL, "combine": combine})


@pytest.mark.parametrize("changes", [{"combine": "per_rank"}, {"combine": "per_expert"}, BY_TORCH], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sums_are_in_order(dtype, changes):
    on_ranks(3, cases.adds_in_order, dtype, {**SMALL, **changes})


# Multiples of 1, 2, 4, 8 and 16 bytes, and rows of several blocks of 256 bytes.
BITS = [(BF16, 5), (FP8, 1), (FP8, 300), (torch.float8_e5m2, 6), (FP32, 70), (FP16, 64), (FP8, 12), (BF16, 12)]


@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "small"), (3, "wide chunks"), (3, "torch")])
def test_any_bits_are_moved(world_size, config):
    on_ranks(world_size, cases.moves_any_bits, BITS, CONFIGS[config])


@each_way
@pytest.mark.parametrize("world_size", [1, 3])
def test_layouts(world_size, config):
    on_ranks(world_size, cases.takes_any_layout, CONFIGS[config])


@each_sum
@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_are_optional(world_size, config):
    on_ranks(world_size, cases.weights_are_optional, CONFIGS[config])


@each_sum
def test_combine_with_other_weights(config):
    on_ranks(2, cases.combine_takes_other_weights, CONFIGS[config])


@each_sum
def test_combine_with_weights_that_were_changed(config):
    on_ranks(2, cases.combine_takes_changed_weights, CONFIGS[config])


@each_way
@pytest.mark.parametrize("world_size", [1, 3])
def test_handle_is_used_again(world_size, config):
    on_ranks(world_size, cases.uses_the_handle_again, CONFIGS[config])


@each_way
def test_gradients_of_what_is_used_twice_add_up(config):
    on_ranks(3, cases.adds_up_gradients, CONFIGS[config])


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_nobody_needs_are_not_sent(world_size):
    on_ranks(world_size, cases.sends_only_what_is_asked_for)


def test_no_grad():
    on_ranks(2, cases.leaves_no_graph_under_no_grad)


@pytest.mark.parametrize("world_size", [1, 2])
def test_second_derivatives_are_refused(world_size):
    on_ranks(world_size, cases.refuses_second_derivatives)


@pytest.mark.parametrize("weights_in", ["dispatch", "experts", "combine"])
@pytest.mark.parametrize("world_size, config", [(1, "default"), (3, "default"), (3, "torch")])
def test_layer(world_size, config, weights_in):
    on_ranks(world_size, cases.is_a_layer, weights_in, world_size, CONFIGS[config])


def test_same_bits_twice():
    on_ranks(3, cases.gives_the_same_bits)


@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "small"), (3, "per expert"), (3, "torch")])
def test_capacity(world_size, config):
    on_ranks(world_size, cases.keeps_to_a_capacity, CONFIGS[config])


# Of which either the rows of a rank are the most, or the tokens that one sends.
FULL_RANK = dict(tokens=[3, 4, 2, 5], k=2, experts_each=2, width=8, ids="last")
FULL_STAGE = dict(tokens=[6, 0, 0, 0], k=3, experts_each=1, width=8, ids="distinct")


@pytest.mark.parametrize("world_size, spec, which", [(1, FULL_RANK, 0), (3, FULL_RANK, 0), (3, FULL_STAGE, 1)], ids=str)
def test_more_than_the_capacity(world_size, spec, which):
    on_ranks(world_size, cases.refuses_what_is_too_much, spec, which)


@pytest.mark.parametrize("wrong, id_dtype", [
    (-2, torch.int64), (9, torch.int64), ((1 << 32) + 1, torch.int64), (-(1 << 31), torch.int32)
], ids=str)
@each_way
def test_wrong_ids(config, wrong, id_dtype):
    on_ranks(3, cases.refuses_wrong_ids, wrong, 0, id_dtype, CONFIGS[config])


@each_way
@pytest.mark.parametrize("where", [0, 1])
def test_wrong_ids_are_told_of_their_rank(where, config):
    on_ranks(3, cases.refuses_wrong_ids, 100, where, torch.int64, CONFIGS[config])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("width, dtype", [(1, BF16), (127, FP32), (128, FP16), (129, BF16), (600, FP32)], ids=str)
def test_quantized(world_size, width, dtype):
    on_ranks(world_size, cases.quantizes, width, dtype, SMALL if width > 256 else None)


@pytest.mark.parametrize("width, dtype", [(1, BF16), (127, FP32), (600, FP16)], ids=str)
def test_quantized_by_torch(width, dtype):
    on_ranks(2, cases.quantizes, width, dtype, BY_TORCH)


def test_quantized_rows_have_no_gradient():
    on_ranks(2, cases.quantized_rows_have_no_gradient)


@each_way
@pytest.mark.parametrize("world_size", [1, 3])
def test_scales(world_size, config):
    on_ranks(world_size, cases.sends_scales_along, [
        (FP32, ()), (FP32, (1,)), (FP32, (5,)), (BF16, (3,)), (torch.uint8, ()), (torch.uint8, (7,)),
        (torch.float64, (2,)), (torch.int64, ()), (torch.float8_e5m2, (4,)), (torch.uint32, ()), (torch.uint16, (3,)),
    ], CONFIGS[config])


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, cases.refuses)


@pytest.mark.parametrize("world_size, config, options", [
    (1, "default", {}), (2, "per expert", {"max_tokens": 40}), (3, "small", {"quantize": "fp8"}),
], ids=str)
def test_halves(world_size, config, options):
    on_ranks(world_size, cases.comes_in_halves, CONFIGS[config], options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_halves_are_taken_in_turn(world_size):
    on_ranks(world_size, cases.halves_are_taken_in_turn)


def test_a_half_is_received_once():
    on_ranks(2, cases.a_half_is_received_once)


@pytest.mark.parametrize("world_size", [1, 2])
def test_halves_have_no_gradient(world_size):
    on_ranks(world_size, cases.halves_have_no_gradient)


def test_operands_may_be_written_to_once_a_call_is_made():
    on_ranks(2, cases.keeps_what_it_needs)


# ---- configs ----


def test_configs_that_cannot_run():
    cpu = torch.device("cpu")
    for changes, words in (
        ({"combine": "sum"}, "combine must be"), ({"num_senders": 0}, "num_senders must be"),
        ({"num_senders": 1.0}, "num_senders must be"), ({"num_receivers": -1}, "num_receivers must be"),
        ({"num_receivers": True}, "num_receivers must be"), ({"chunk_tokens": 0}, "chunk_tokens must be"),
        ({"block_bytes": 128}, "block_bytes must be a power of two"), ({"block_bytes": 131072}, "block_bytes must be"),
        ({"block_bytes": 1000}, "block_bytes must be"), ({"num_warps": 0}, "num_warps must be"),
        ({"num_warps": 3}, "num_warps must be"), ({"num_warps": 32}, "num_warps must be"),
    ):
        reason = EpConfig(**changes).illegal(cpu)
        assert reason is not None and words in reason, f"{changes}: {reason}"
    for combine in COMBINES:
        assert EpConfig(combine=combine, block_bytes=256, num_warps=16, chunk_tokens=1000).illegal(cpu) is None
    assert default_config(cpu).illegal(cpu) is None and EpConfig().illegal(cpu) is None


# ---- by torch ----


def test_torch_in_halves():
    on_ranks(2, cases.comes_in_halves_by_torch)


def test_torch_makes_the_same_codes():
    on_ranks(2, cases.makes_the_same_codes)


def test_torch_tells_of_what_each_rank_has_seen():
    on_ranks(3, cases.tells_of_what_each_has_seen)


def test_torch_refuses_what_it_cannot_do():
    on_ranks(2, cases.refuses_what_torch_cannot)


@pytest.mark.parametrize("world_size", [1, 3])
def test_torch_tells_all_ranks(world_size):
    on_ranks(world_size, cases.tells_all_ranks_by_torch)


def test_torch_tells_of_different_rows():
    on_ranks(3, cases.tells_of_different_rows_by_torch)


def test_torch_needs_no_symmetric_memory():
    on_ranks(2, cases.needs_no_symmetric_memory, SPECS["uneven"])


def test_torch_takes_a_bound_on_tokens():
    on_ranks(3, cases.takes_a_bound_by_torch)


def test_torch_where_it_has_been_chosen():
    on_ranks(3, cases.goes_by_torch_where_chosen)


def test_between_compiled_graphs():
    on_ranks(2, cases.runs_between_graphs)
