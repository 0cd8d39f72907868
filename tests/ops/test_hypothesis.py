"""Property-based tests: hypothesis draws shapes and configs of the dense operators."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tdkernels import AgGemmConfig, GemmArConfig, GemmRsConfig, Tiles
from tests.ops.dense.cases import has_same_bits_on_all_ranks
from tests.support.dense_oracle import OPERATORS, Case
from tests.support.ranks import DEVICE, on_ranks

# A GPU compiles a kernel for each tile size, dtype and alignment, so draw fewer of them and fewer examples.
ON_GPU = DEVICE == "cuda"
BLOCKS = st.sampled_from([16, 64] if ON_GPU else [16, 32, 64])
SIZES = st.integers(1, 70)
TILES = st.builds(Tiles, BLOCKS, BLOCKS, st.just(32), st.integers(1, 4), st.just(4), st.just(2))
ONE_SHOT = {"transport": st.just("one_shot"), "tiles": st.none() | TILES, "split_k": st.integers(1, 4)}
CONFIGS = {
    "ag_gemm": st.builds(
        AgGemmConfig,
        tiles=st.none() | TILES,
        transport=st.sampled_from(["push", "copy_engine"]),
        num_comm_sms=st.integers(1, 4),
        chunk_tiles=st.integers(1, 3),
    )
    | st.builds(AgGemmConfig, **ONE_SHOT, num_comm_sms=st.integers(1, 4)),
    "gemm_rs": st.builds(GemmRsConfig, tiles=st.none() | TILES, item_tiles=st.integers(1, 5))
    | st.builds(GemmRsConfig, **ONE_SHOT),
    "gemm_ar": st.builds(GemmArConfig, tiles=st.none() | TILES, item_tiles=st.integers(1, 5))
    | st.builds(GemmArConfig, exchange=st.just("one_shot"), tiles=st.none() | TILES, split_k=st.integers(1, 4)),
}


def computes(operator, dtype, shape, bias, exact, seed, config):
    case = Case(operator, dtype, *shape, bias=bias, exact=exact, seed=seed)
    results = case.run(config=config)
    case.check(results)
    has_same_bits_on_all_ranks(case, results)


@settings(
    max_examples=12 if ON_GPU else 30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    world_size=st.integers(2, 4),
    operator=st.sampled_from(OPERATORS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    rows=st.integers(0, 70),
    n=SIZES,
    k=SIZES,
    bias=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
    data=st.data(),
)
def test_any_shape(world_size, operator, dtype, rows, n, k, bias, seed, data):
    # For tiny shapes draw small integers: sums are exact, and all elements are compared for equality.
    exact = min(rows, n, k) < 8
    config = data.draw(st.none() | CONFIGS[operator])
    on_ranks(world_size, computes, operator, dtype, (rows, n, k), bias, exact, seed, config)
