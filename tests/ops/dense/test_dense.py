"""Every dense operator in every kind of config: output and gradients against the unsharded computation."""

import pytest
import torch

from tdkernels import Tiles
from tdkernels.autotune.tunable import tunable
from tdkernels.runtime import gpu
from tests.ops.dense import cases
from tests.support.dense_oracle import DIVIDED, OPERATORS
from tests.support.ranks import on_ranks
from tests.support.subset import THOROUGH, pairs, turns

WORLD_SIZES = [1, 2, 3, 4] if THOROUGH else [1, 2, 4]  # other tests run on three ranks
BF16, FP16, FP32 = cases.DTYPES
# The default for few rows is one shot.
PUSH, FORWARD, ONE_SHOT_TRANSPORT = {"transport": "push"}, {"transport": "forward"}, {"transport": "one_shot"}
TWO_SHOT, ONE_SHOT_EXCHANGE = {"exchange": "two_shot"}, {"exchange": "one_shot"}
DIRECT_TWO_SHOT = {**TWO_SHOT, "transport": "direct"}
CONFIGS = {
    "ag_gemm": {
        "default": {},
        "torch": {"method": "torch"},
        "small tiles, one pushing program": {**PUSH, "tiles": Tiles(16, 16, 16, 1, 4, 2), "num_comm_sms": 1},
        "three pushing programs, chunks of two tiles": {
            **PUSH, "tiles": Tiles(32, 64, 16), "num_comm_sms": 3, "chunk_tiles": 2,
        },
        "chunks longer than a shard": {**PUSH, "tiles": Tiles(16, 128, 32, 2, 4, 1), "chunk_tiles": 9},
        "copy engine": {"transport": "copy_engine"},
        "copy engine, small tiles": {"transport": "copy_engine", "tiles": Tiles(16, 32, 64)},
        "copy engine, chunks of two tiles": {"transport": "copy_engine", "tiles": Tiles(32, 16, 16), "chunk_tiles": 2},
        "parts": {"method": "parts"},
        "parts, in three pieces": {"method": "parts", "pieces": 3},
        "one shot": ONE_SHOT_TRANSPORT,
        "one shot, small tiles, 2 K splits": {**ONE_SHOT_TRANSPORT, "tiles": Tiles(16, 16, 16, 1, 4, 2), "split_k": 2},
        "one shot, one pushing program, 3 K splits": {
            **ONE_SHOT_TRANSPORT, "tiles": Tiles(32, 64, 16), "num_comm_sms": 1, "split_k": 3,
        },
        "one shot, more K splits than blocks": {**ONE_SHOT_TRANSPORT, "tiles": Tiles(16, 128, 32), "split_k": 9},
        "one shot, one wide tile": {**ONE_SHOT_TRANSPORT, "tiles": Tiles(128, 256, 16, 8, 8, 2), "num_comm_sms": 5},
    },
    "gemm_rs": {
        "default": {},
        "torch": {"method": "torch"},
        "small tiles, sent one by one": {**FORWARD, "tiles": Tiles(16, 16, 16, 1, 4, 2), "item_tiles": 1},
        "items of three tiles": {**FORWARD, "tiles": Tiles(32, 64, 16), "item_tiles": 3},
        "items longer than a shard": {**FORWARD, "tiles": Tiles(64, 16, 32, 2, 4, 1), "item_tiles": 40},
        "sums in two halves": {**FORWARD, "tiles": Tiles(16, 128, 32), "item_tiles": 5},
        "one wide tile": {**FORWARD, "tiles": Tiles(128, 256, 16, 8, 8, 2), "item_tiles": 2},
        "direct": {"transport": "direct"},
        "direct, small tiles": {"transport": "direct", "tiles": Tiles(16, 16, 16, 1, 4, 2)},
        "direct, one wide tile": {"transport": "direct", "tiles": Tiles(128, 256, 16, 8, 8, 2)},
        "parts": {"method": "parts"},
        "parts, in three pieces": {"method": "parts", "pieces": 3},
        "one shot": ONE_SHOT_TRANSPORT,
        "one shot, small tiles, 2 K splits": {**ONE_SHOT_TRANSPORT, "tiles": Tiles(16, 16, 16, 1, 4, 2), "split_k": 2},
        "one shot, 3 K splits": {**ONE_SHOT_TRANSPORT, "tiles": Tiles(32, 64, 16), "split_k": 3},
        "one shot, one wide tile": {**ONE_SHOT_TRANSPORT, "tiles": Tiles(128, 256, 16, 8, 8, 2), "split_k": 2},
    },
    "gemm_ar": {
        "default": {},
        "torch": {"method": "torch"},
        "small tiles, sent one by one": {**TWO_SHOT, "tiles": Tiles(16, 16, 16, 1, 4, 2), "item_tiles": 1},
        "items of three tiles": {**TWO_SHOT, "tiles": Tiles(32, 64, 16), "item_tiles": 3},
        "items longer than the output": {**TWO_SHOT, "tiles": Tiles(64, 16, 32, 2, 4, 1), "item_tiles": 12},
        "sums in two halves": {**TWO_SHOT, "tiles": Tiles(16, 128, 32), "item_tiles": 5},
        "one wide tile": {**TWO_SHOT, "tiles": Tiles(128, 256, 16, 8, 8, 2), "item_tiles": 2},
        "direct": DIRECT_TWO_SHOT,
        "direct, small tiles": {**DIRECT_TWO_SHOT, "tiles": Tiles(16, 16, 16, 1, 4, 2), "num_comm_sms": 1},
        "direct, one wide tile": {**DIRECT_TWO_SHOT, "tiles": Tiles(128, 256, 16, 8, 8, 2), "num_comm_sms": 2},
        "one shot": ONE_SHOT_EXCHANGE,
        "one shot, small tiles, 2 K splits": {**ONE_SHOT_EXCHANGE, "tiles": Tiles(16, 16, 16, 1, 4, 2), "split_k": 2},
        "one shot, 3 K splits": {**ONE_SHOT_EXCHANGE, "tiles": Tiles(32, 64, 16), "split_k": 3},
        "one shot, more K splits than blocks": {**ONE_SHOT_EXCHANGE, "tiles": Tiles(16, 128, 32), "split_k": 9},
        "one shot, one wide tile": {**ONE_SHOT_EXCHANGE, "tiles": Tiles(128, 256, 16, 8, 8, 2), "split_k": 2},
    },
}
# Configs whose order of sums and sends depends most on timing.
TIMING_SENSITIVE = {
    "ag_gemm": [
        "default", "three pushing programs, chunks of two tiles", "copy engine", "parts, in three pieces",
        "one shot, small tiles, 2 K splits",
    ],
    "gemm_rs": [
        "default", "small tiles, sent one by one", "direct, small tiles", "parts, in three pieces",
        "one shot, 3 K splits",
    ],
    "gemm_ar": ["default", "small tiles, sent one by one", "direct, small tiles", "one shot, 3 K splits"],
}

PIPELINED = [(name, {"method": "parts", "pieces": 2}) for name in ("ag_gemm", "gemm_rs")]

assert list(CONFIGS) == list(TIMING_SENSITIVE) == OPERATORS
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def configs_of(configs=CONFIGS):
    return [(name, config) for name in configs for config in configs[name]]


@pytest.mark.parametrize("world_size, dtype, operator", pairs(WORLD_SIZES, cases.DTYPES, OPERATORS), ids=str)
def test_shapes(world_size, dtype, operator):
    on_ranks(world_size, cases.computes, operator, dtype, cases.SHAPES)


@each_operator
@pytest.mark.parametrize("world_size, dtype", [(2, FP32), (3, BF16), (4, FP16)], ids=str)
def test_every_element_of_small_integers(world_size, dtype, operator):
    shapes = cases.MINIMAL_SHAPES + cases.SHAPES
    on_ranks(world_size, cases.computes, operator, dtype, shapes, bias=False, exact=True)


@each_operator
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_shapes_larger_than_any_tile(dtype, operator):
    on_ranks(2, cases.computes, operator, dtype, cases.LARGE_SHAPES)


@pytest.mark.parametrize(
    "operator, config, world_size, dtype", turns(configs_of(), [(2, BF16), (3, FP32), (4, FP16)]), ids=str
)
def test_configs(operator, config, world_size, dtype):
    shapes = [(41, 37, 50), (24, 136, 48)]
    on_ranks(world_size, cases.computes, operator, dtype, shapes, **CONFIGS[operator][config])


# Without THOROUGH every second config runs, with two of the four shapes in turn.
TINY = [cases.MINIMAL_SHAPES] if THOROUGH else [cases.MINIMAL_SHAPES[first::2] for first in (0, 0, 1, 1)]


@pytest.mark.parametrize("operator, config, shapes", turns(configs_of(), [(shapes,) for shapes in TINY]), ids=str)
def test_minimal_shapes_in_every_config(operator, config, shapes):
    on_ranks(3, cases.computes, operator, BF16, [*shapes, cases.SMALL_M], exact=True, **CONFIGS[operator][config])


@each_operator
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("operand", ["x", "weight", "dy"])
def test_layouts(operand, layout, operator):
    on_ranks(2, cases.computes_with_layout, operator, BF16, operand, layout)


@pytest.mark.parametrize("operator, changes", PIPELINED, ids=str)
@pytest.mark.parametrize("operand", ["x", "weight", "dy"])
def test_pipelined_layouts(operand, operator, changes):
    on_ranks(2, cases.computes_with_layout, operator, BF16, operand, "every_second", **changes)


@pytest.mark.parametrize("operator, changes", [(name, {}) for name in OPERATORS] + PIPELINED, ids=str)
def test_strided_bias(operator, changes):
    on_ranks(2, cases.computes_with_strided_bias, operator, FP16, **changes)


@pytest.mark.parametrize("operator, changes", [(name, {}) for name in OPERATORS] + PIPELINED, ids=str)
def test_expanded_gradient(operator, changes):
    on_ranks(2, cases.supports_expanded_gradients, operator, **changes)


@pytest.mark.parametrize("operator, changes", PIPELINED, ids=str)
def test_pipelined_subsets_of_gradients(operator, changes):
    on_ranks(2, cases.computes_subsets_of_gradients, operator, BF16, **changes)


@pytest.mark.parametrize(
    "world_size, batch_seq, operator", pairs([1, 2], [(1, 7), (2, 7), (4, 1)], OPERATORS), ids=str
)
def test_leading_dimensions(world_size, batch_seq, operator):
    on_ranks(world_size, cases.computes_with_leading_dims, operator, BF16, *batch_seq)


@pytest.mark.parametrize(
    "world_size, changes, operator", pairs([1, 2, 3], [{}, {"method": "torch"}], OPERATORS), ids=str
)
def test_no_rows(world_size, changes, operator):
    on_ranks(world_size, cases.computes_without_rows, operator, BF16, changes)


@pytest.mark.parametrize("world_size, dtype, operator", pairs([1, 3], [BF16, FP32], OPERATORS), ids=str)
def test_subsets_of_gradients(world_size, dtype, operator):
    on_ranks(world_size, cases.computes_subsets_of_gradients, operator, dtype)


@each_operator
@pytest.mark.parametrize(
    "check",
    [
        cases.computes_without_grad, cases.uses_an_output_twice, cases.shares_x_between_calls,
        cases.repeats_backward, cases.supports_checkpoint, cases.supports_autocast,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_autograd(world_size, check, operator):
    on_ranks(world_size, check, operator)


@pytest.mark.parametrize("operator, config", configs_of(TIMING_SENSITIVE))
def test_training_after_inference(operator, config):
    on_ranks(2, cases.trains_after_inference, operator, **CONFIGS[operator][config])


@each_operator
def test_second_derivatives_are_rejected(operator):
    on_ranks(1, cases.rejects_second_derivatives, operator)


@each_operator
def test_forward_mode_is_rejected(operator):
    on_ranks(1, cases.rejects_forward_mode, operator)


@pytest.mark.parametrize("operator, config, dtype", turns(configs_of(TIMING_SENSITIVE), [(BF16,), (FP32,)]), ids=str)
def test_determinism(operator, config, dtype):
    on_ranks(3, cases.is_deterministic, operator, dtype, **CONFIGS[operator][config])


@pytest.mark.parametrize(
    "operator, config", configs_of({name: TIMING_SENSITIVE[name] for name in ("gemm_rs", "gemm_ar")})
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_summation_order(dtype, operator, config):
    on_ranks(4, cases.reduces_in_rank_order, operator, dtype, **CONFIGS[operator][config])


@pytest.mark.parametrize("operator", [name for name in OPERATORS if "output" not in DIVIDED[name]])
def test_backward_of_replicated_output_needs_no_peer(operator):
    on_ranks(2, cases.computes_backward_without_peers, operator)


@each_operator
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_one_rank_matches_linear(dtype, operator):
    on_ranks(1, cases.matches_linear_on_one_rank, operator, dtype)


# The best configs that the tuner found on H200 for similar shapes, or of those timed in solo mode.
@pytest.mark.parametrize("operator, world_size, sizes, columns, transport", [
    ("ag_gemm", 8, (256, 768, 4096), 256, "push"), ("ag_gemm", 4, (2048, 2560, 8192), 256, "push"),
    ("ag_gemm", 2, (128, 14336, 4096), 256, "one_shot"), ("ag_gemm", 2, (128, 5120, 8192), 128, "one_shot"),
    ("gemm_ar", 2, (128, 57344, 4096), 256, "one_shot"), ("gemm_ar", 2, (256, 57344, 4096), 256, "one_shot"),
    ("gemm_rs", 2, (256, 10240, 4096), 128, "one_shot"), ("gemm_ar", 2, (512, 10240, 4096), 128, "one_shot"),
    ("gemm_rs", 2, (256, 4096, 2048), 128, "one_shot"), ("gemm_rs", 2, (512, 4096, 7168), 256, "one_shot"),
    ("ag_gemm", 8, (144, 7168, 8192), 256, "push"), ("ag_gemm", 8, (64, 7168, 8192), 256, "push"),
    ("ag_gemm", 8, (64, 3584, 4096), 128, "one_shot"), ("ag_gemm", 4, (96, 14336, 8192), 256, "push"),
    ("gemm_rs", 8, (48, 8192, 1024), 128, "one_shot"), ("gemm_rs", 4, (96, 5120, 6400), 128, "one_shot"),
    ("gemm_ar", 8, (512, 8192, 3584), 256, "direct"), ("gemm_ar", 4, (512, 4096, 3584), 128, "direct"),
    ("gemm_rs", 4, (256, 2048, 3584), 128, "direct"), ("gemm_rs", 4, (256, 4096, 3584), 256, "direct"),
    ("gemm_rs", 4, (2048, 8192, 7168), 256, "direct"), ("gemm_rs", 4, (256, 4104, 3584), 128, "direct"),
    ("gemm_rs", 4, (2048, 8192, 7161), 256, "forward"), ("gemm_rs", 16, (2048, 8192, 7168), 256, "forward"),
    ("gemm_ar", 4, (2048, 4096, 1024), 256, "direct"), ("gemm_ar", 2, (8192, 8192, 14336), 256, "direct"),
    ("gemm_ar", 4, (1024, 2048, 1024), 128, "direct"), ("gemm_ar", 4, (1024, 4104, 1024), 128, "forward"),
    ("gemm_rs", 8, (64, 8200, 1024), 128, "one_shot"), ("gemm_rs", 8, (328, 128, 1024), 128, "forward"),
])
def test_default_tiles_on_hopper(operator, world_size, sizes, columns, transport, monkeypatch):
    """``sizes`` are rows (of the shard; of all ranks for gemm_ar), n and k per rank."""
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    config = tunable(operator).config_module.default_config(*sizes, torch.bfloat16, torch.device("cuda", 0), world_size)
    is_one_shot = getattr(config, "exchange", config.transport) == "one_shot"
    found = config.tiles.block_m, config.tiles.block_n, "one_shot" if is_one_shot else config.transport
    assert found == (128, columns, transport)


@pytest.mark.parametrize("operator, world_size, sizes, transport, warps", [
    ("gemm_rs", 8, (64, 8192, 1024), "direct", 4), ("gemm_rs", 4, (64, 4096, 3584), "one_shot", 8),
    ("gemm_ar", 8, (64, 8192, 1024), "direct", 4), ("gemm_ar", 4, (64, 8192, 2048), "one_shot", 4),
    ("ag_gemm", 8, (24, 1280, 8192), "one_shot", 4),
])
def test_default_tiles_of_64_rows_on_hopper(operator, world_size, sizes, transport, warps, monkeypatch):
    """As ``test_default_tiles_on_hopper``."""
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    config = tunable(operator).config_module.default_config(*sizes, torch.bfloat16, torch.device("cuda", 0), world_size)
    is_one_shot = getattr(config, "exchange", config.transport) == "one_shot"
    found = config.tiles.block_m, "one_shot" if is_one_shot else config.transport, config.tiles.num_warps
    assert found == (64, transport, warps)
