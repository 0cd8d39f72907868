"""Config spaces, cost estimates and hardware floors of the attention operators, on a simulated GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tdkernels.autotune import table
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable, versions
from tdkernels.runtime import gpu
from tests.autotune.attention_support import OPERATORS
from tests.autotune.test_cost_model import GPU, H200, configs_of

pytestmark = pytest.mark.usefixtures("fake_h200")

PROBLEMS = {  # (ranks, layout, sizes)
    "ulysses_qkv": [(2, "nk", (8192, 6144, 4096)), (4, "kn", (512, 10240, 8192)), (3, "nk", (99, 51, 303))],
    "ulysses_out": [(2, "nk", (8192, 4096, 4096)), (8, "kn", (1024, 8192, 8192)), (3, "nk", (99, 51, 303))],
    "ag_attention": [
        (2, "causal zigzag", (1, 8192, 32, 8, 128, 128)), (8, "full", (2, 131072, 32, 32, 192, 128)),
        (4, "causal contiguous", (3, 64, 4, 1, 33, 17)),
    ],
    "flash_decode": [
        (1, "dense", (128, 1, 32, 8, 128, 128, 1024)), (2, "paged fp8", (1, 1, 96, 12, 128, 128, 65536)),
        (4, "paged latent", (32, 2, 128, 1, 576, 512, 8192)), (8, "dense", (1, 1, 1, 1, 16, 16, 1)),
        (1, "dense latent", (8, 1, 128, 1, 576, 512, 32768)), (2, "dense latent", (1, 1, 16, 1, 576, 512, 64)),
    ],
}
# Problems large enough that doubling any size takes longer.
LARGE = {
    "ulysses_qkv": (4, "nk", (8192, 8192, 8192)), "ulysses_out": (4, "nk", (8192, 8192, 8192)),
    "ag_attention": (4, "causal zigzag", (4, 65536, 32, 8, 64, 64)),
    "flash_decode": (4, "dense", (64, 8, 32, 8, 128, 128, 65536)),
}
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def problem_of(operator, ranks, layout, sizes, dtype="bfloat16"):
    problem = Problem(operator, "NVIDIA H200", ranks, ranks, dtype, layout, sizes)
    assert tunable(operator).why_not(problem) is None
    return problem


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@each_operator
def test_no_estimate_is_below_the_floors_and_a_slower_link_never_helps(operator, dtype):
    op, slower = tunable(operator), replace(H200, link=H200.link / 4)
    for spec in PROBLEMS[operator]:
        problem = problem_of(operator, *spec, dtype)
        floors = op.floors(problem)
        floor_ms = max(floors.computation_ms(H200), floors.wire_bytes / H200.link * 1e3)
        assert floors.flops > 0 and (floors.wire_bytes > 0) == (problem.world_size > 1)
        configs = configs_of(op, problem)
        legal = [config for config in configs if op.illegal(config, problem, GPU) is None]
        assert len(legal) > 5 and {op.default(problem, GPU), op.plain()} <= set(legal)
        assert op.fallback(problem, GPU) == op.default(problem, GPU), "untuned problems run the Triton kernel"
        for config in legal:
            estimate = op.estimate_ms(config, problem, H200)
            assert floor_ms <= estimate < 1e6, f"{config} for {problem}"
            assert estimate <= op.estimate_ms(config, problem, slower), f"{config} for {problem}"
            assert op.config_from_dict(op.config_to_dict(config)) == config


@each_operator
def test_doubling_a_size_takes_longer(operator):
    op, small = tunable(operator), problem_of(operator, *LARGE[operator])
    for number, name in enumerate(op.sizes):
        if name == "kv_heads" and operator == "ag_attention":
            continue  # more KV heads add communication, but no computation
        sizes = [size * (1 + (i == number)) for i, size in enumerate(small.shape)]
        if name == "kv_heads":
            sizes[number - 1] *= 2  # keep the number of query heads per KV head
        large = problem_of(operator, small.world_size, small.layout, tuple(sizes))
        # If a decode does not saturate the memory, wider heads increase the bytes in flight.
        least = 1.0 if operator == "flash_decode" and name in ("d", "dv") else 1.001
        for config in configs_of(op, small):
            ratio = op.estimate_ms(config, large, H200) / op.estimate_ms(config, small, H200)
            assert ratio >= least, f"{name}: {config}"


@each_operator
def test_space_has_no_duplicates_and_the_default_shares_a_kernel(operator):
    op = tunable(operator)
    for spec in PROBLEMS[operator]:
        problem = problem_of(operator, *spec)
        space = op.space(problem, GPU)
        assert len(space) == len(set(space))
        assert op.compiled(op.default(problem, GPU)) in {op.compiled(config) for config in space}


def test_backward_tiles_are_filled_in_by_the_call():
    """Configs tuned for the forward leave the tiles of the backward unset."""
    op = tunable("ag_attention")
    problem = problem_of("ag_attention", *LARGE["ag_attention"])
    for config in (op.default(problem, GPU), *op.space(problem, GPU)):
        values = op.config_to_dict(config)
        assert not any(name.startswith(("dq_", "dkv_")) for name in values)
        complete = op.completed(config, problem, GPU)
        assert complete.dq_block_q and complete.dkv_num_stages
        assert config.method != "fused" or complete.block_q == config.block_q


def test_baseline_of_flash_decode_depends_on_the_kernel_that_torch_has():
    """It is bound by memory. Copying pages takes two passes more, and attention in fp32 many more."""
    op = tunable("flash_decode")

    def cost(layout, d=128, dv=128, dtype="bfloat16", ranks=1):
        problem = problem_of("flash_decode", ranks, layout, (64, 1, 32, 8, d, dv, 8192), dtype)
        floor = op.floors(problem).computation_ms(H200)
        return op.estimate_ms(op.plain(), problem, H200) / floor

    dense = cost("dense")
    assert 1.0 < dense < 1.5
    assert dense + 2.0 < cost("paged") < dense + 2.4
    assert min(cost("dense fp8"), cost("dense", 192), cost("dense", 100, 100), cost("dense", dtype="float32")) > 3.5
    assert dense < cost("dense", ranks=2) < 1.6, "the ranks exchange few bytes"


LATENT = (8, 1, 128, 1, 576, 512, 32768)


@pytest.mark.parametrize("sizes, layout, dtype, default, is_wide", [
    (LATENT, "dense latent", "bfloat16", "split", True), (LATENT, "dense latent", "float16", "split", True),
    ((8, 2, 16, 1, 576, 512, 4096), "dense latent", "bfloat16", "split", True),
    ((8, 1, 16, 1, 576, 512, 4096), "dense latent", "bfloat16", "fused", True),
    (LATENT, "dense latent", "float32", "fused", True), (LATENT, "dense latent fp8", "bfloat16", "fused", True),
    (LATENT, "dense", "bfloat16", "fused", True),
    ((8, 1, 128, 1, 320, 256, 4096), "dense latent", "bfloat16", "fused", True),
    ((8, 1, 128, 2, 576, 512, 4096), "dense latent", "bfloat16", "fused", True),
    ((16, 1, 16, 1, 128, 128, 24576), "dense", "bfloat16", "split", False),
    ((4, 8, 64, 8, 128, 128, 40000), "paged", "bfloat16", "split", False),
    ((4, 1, 64, 8, 128, 128, 40000), "dense fp8", "bfloat16", "split", False),
    ((8, 1, 40, 40, 128, 128, 10000), "dense", "bfloat16", "split", False),  # 3 * 40 of 132 SMs
    ((8, 1, 96, 96, 128, 128, 10000), "dense", "bfloat16", "fused", False),  # 96 of 132 SMs
], ids=str)
def test_default_method_of_decodes_on_hopper(sizes, layout, dtype, default, is_wide):
    op, problem = tunable("flash_decode"), problem_of("flash_decode", 1, layout, sizes, dtype)
    assert op.default(problem, GPU).method == default
    split = [config for config in op.space(problem, GPU) if config.method == "split"]
    assert (len(split) == 1) == is_wide and split


def test_large_results_are_sent_during_the_call():
    """Method "split" sends them at its end."""
    op = tunable("flash_decode")
    for ranks, batch, method in ((2, 128, "split"), (4, 128, "fused"), (4, 16, "split")):
        problem = problem_of("flash_decode", ranks, "dense", (batch, 1, 32, 8, 128, 128, 1024))
        assert op.default(problem, GPU).method == method
    latent = problem_of("flash_decode", 4, "dense latent", (32, 1, 128, 1, 576, 512, 4096))
    assert op.default(latent, GPU).method == "split", "it is faster by more than the exchange takes"


def test_latent_decode_on_other_gpus_is_not_split(monkeypatch):
    op, problem = tunable("flash_decode"), problem_of("flash_decode", 1, "dense latent", LATENT)
    dense = replace(problem, layout="dense", shape=(16, 1, 16, 1, 128, 128, 24576))
    for major in (8, 10):
        properties = SimpleNamespace(**{**vars(gpu._properties(0)), "major": major})
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "_properties", lambda index, properties=properties: properties)
            assert op.default(problem, GPU).method == "fused" and op.default(dense, GPU).method == "split"


def test_calls_that_cannot_be_split():
    """Several ranks with several query tokens run "fused", whatever the config says."""
    op = tunable("flash_decode")
    for ranks, queries, default in ((2, 1, "split"), (2, 2, "fused"), (1, 2, "split")):
        problem = problem_of("flash_decode", ranks, "dense latent", (8, queries, 128, 1, 576, 512, 4096))
        assert op.default(problem, GPU).method == default
        assert (default == "split") == any(config.method == "split" for config in op.space(problem, GPU))
        recorded = op.recordable(problem, GPU)
        assert recorded.method == "fused" and op.is_recordable(recorded)
        assert not any(op.is_recordable(replace(recorded, method=method)) for method in ("split", "torch"))
        assert op.goes_in_graphs(problem)


def test_estimate_of_a_split_decode():
    """Many keys take time in proportion to their number; with one block of keys, the second launch makes it slower."""
    op = tunable("flash_decode")

    def estimates(*sizes):
        problem = problem_of("flash_decode", 1, "dense latent", sizes)
        (split,) = (config for config in op.space(problem, GPU) if config.method == "split")
        return [op.estimate_ms(config, problem, H200) for config in (split, replace(split, method="fused"))]

    (once, _), (twice, _) = estimates(*LATENT), estimates(*LATENT[:-1], 2 * LATENT[-1])
    assert 1.8 < twice / once <= 2.0
    split, fused = estimates(1, 1, 32, 1, 576, 512, 32)
    assert split > fused


def test_cpu_ranks_try_both_methods():
    op, cpu = tunable("flash_decode"), torch.device("cpu")
    problem = problem_of("flash_decode", 2, "dense", (2, 1, 4, 2, 16, 16, 24), "float32")
    space = op.space(problem, cpu)
    assert {config.method for config in space} == {"fused", "split"} and op.default(problem, cpu).method == "fused"
    for config in space:
        assert op.illegal(config, problem, cpu) is None
        assert 0.0 < op.estimate_ms(config, problem, H200) < 1e3
        assert op.config_from_dict(op.config_to_dict(config)) == config


def test_configs_exceeding_shared_memory_are_illegal():
    """This includes a config tuned for narrower heads, which the nearest-shape lookup would return."""
    op = tunable("flash_decode")
    narrow = problem_of("flash_decode", 2, "dense", (8, 1, 32, 8, 128, 128, 8192))
    wide = replace(narrow, shape=(8, 1, 32, 8, 256, 256, 8192))
    config = next(c for c in op.space(narrow, GPU) if (c.block_n, c.num_stages) == (128, 4))
    assert op.illegal(config, narrow, GPU) is None
    assert "need 410624 bytes of shared memory" in op.illegal(config, wide, GPU)
    entry = table.Entry(narrow, versions(op), op.config_to_dict(config), 1.0)
    assert table.nearest([entry], wide) == entry
    attention = problem_of("ag_attention", 2, "full", (1, 4096, 8, 8, 256, 256))
    config = replace(tunable("ag_attention").default(attention, GPU), block_k=128, num_stages=3)
    assert "bytes of shared memory" in tunable("ag_attention").illegal(config, attention, GPU)


def test_unaligned_head_shards_use_one_source_at_a_time():
    """If a column block spans the heads of two ranks, ``sources_at_once > 1`` would duplicate a candidate."""
    op = tunable("ulysses_out")
    for sizes, expected in (((8192, 4096, 4096), {2, 3}), ((8192, 4096, 4128), {1})):
        space = op.space(problem_of("ulysses_out", 4, "nk", sizes), GPU)
        assert {config.sources_at_once for config in space} == expected


def test_reference_is_chunked_to_fit_in_memory():
    """For a long sequence, the full fp32 score matrix would exceed the memory of a GPU."""
    op = tunable("ag_attention")
    scores = 4 * 32 * 131072 * 131072 // 8
    long = problem_of("ag_attention", 8, "full", (1, 131072, 32, 8, 128, 128))
    assert op.reference_bytes(long) < 40 << 30 < scores
    assert op.reference_bytes(replace(long, dtype="float32")) > scores, "torch computes all scores at once"
