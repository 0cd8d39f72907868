"""ag_attention against the attention of the whole sequence, and what holds between its ranks."""

from types import SimpleNamespace

import pytest
import torch

from tdkernels import AgAttentionConfig, PeerTimeoutError
from tdkernels.launch import RankError
from tdkernels.ops.attention.ag_attention import config as ag_attention_config
from tdkernels.ops.attention.ag_attention import vendor_attention
from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS
from tdkernels.runtime import gpu
from tests.ops.attention.ag_attention import cases as asked
from tests.ops.attention.ag_attention import rank_cases as ranks_asked
from tests.ops.attention.ag_attention.oracle import BF16, FP16, FP32, many
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="takes too long without a GPU")

# Positions of a rank, heads, head dimensions; bf16 if nothing else is said.
SPECS = {
    "grouped": dict(rows=40, heads=4, kv_heads=2, d=16, dv=16),
    "odd, zigzag": dict(rows=37, batch=2, heads=2, kv_heads=1, d=24, dv=40, sharding="zigzag", seed=1),
    "fp32, zigzag": dict(rows=64, heads=1, kv_heads=1, d=17, dv=33, dtype=FP32, sharding="zigzag", seed=2),
    "fp32": dict(rows=35, batch=2, heads=2, kv_heads=2, d=32, dv=16, dtype=FP32, scale=0.3, seed=3),
    "not causal": dict(rows=33, batch=2, heads=2, kv_heads=2, d=20, dv=16, dtype=FP16, causal=False, seed=4),
    "not causal, zigzag": dict(rows=20, heads=3, kv_heads=1, causal=False, sharding="zigzag", lse=False, seed=5),
    # Of o alone the gradient of a query with one key is a difference of equal numbers, of which nothing need be left.
    "one position": dict(rows=1, batch=2, heads=2, kv_heads=1, seed=6),
    "one position, zigzag": dict(rows=1, batch=3, heads=2, kv_heads=1, dtype=FP16, sharding="zigzag", seed=7),
    "wide": dict(rows=18, heads=1, kv_heads=1, d=144, dv=200, seed=8),
    "nothing": dict(rows=0, batch=2, heads=2, kv_heads=1),
}
LARGE = {
    "heads of 128, zigzag": dict(rows=1000, heads=8, kv_heads=2, d=128, dv=128, sharding="zigzag", seed=11),
    "heads of 128": dict(rows=777, batch=2, heads=4, kv_heads=4, d=128, dv=64, seed=12),
    "heads of 192": dict(rows=600, heads=4, kv_heads=1, d=192, dv=128, sharding="zigzag", dtype=FP16, seed=13),
    "heads of 256": dict(rows=500, heads=2, kv_heads=1, d=256, dv=256, causal=False, seed=14),
    "fp32": dict(rows=300, heads=2, kv_heads=1, d=64, dv=96, dtype=FP32, sharding="zigzag", seed=15),
    "narrow values": dict(rows=300, heads=4, kv_heads=2, d=32, dv=16, batch=3, dtype=FP16, seed=16),
    "narrow values, zigzag": dict(rows=301, heads=4, kv_heads=2, d=128, dv=24, sharding="zigzag", seed=17),
}

# The interpreter takes long, so CPU ranks are not asked everything everywhere.
ON_CPU = {
    (1, "default"): ["odd, zigzag", "not causal", "one position, zigzag", "nothing"],
    (2, "default"): ["grouped", "fp32, zigzag", "wide", "nothing"],
    (2, "small blocks"): ["odd, zigzag", "not causal"],
    (2, "flash"): ["grouped", "odd, zigzag", "not causal, zigzag", "wide", "nothing"],
    (3, "flash"): ["odd, zigzag", "fp32", "one position, zigzag"],
    (2, "torch"): ["grouped", "odd, zigzag", "not causal", "one position, zigzag"],
    (3, "default"): ["odd, zigzag", "one position, zigzag", "one position"],
    (3, "small blocks"): ["fp32"],
    (3, "large chunks"): ["fp32, zigzag", "not causal, zigzag"],
    (4, "large chunks"): ["odd, zigzag"],
}

GRADIENTS_ON_CPU = {
    1: ["odd, zigzag"],
    2: ["grouped", "odd, zigzag", "fp32, zigzag", "wide"],
    3: ["odd, zigzag", "not causal", "fp32"],
}


@pytest.mark.parametrize("world_size, config, spec", [
    (world_size, config, spec) for world_size in (1, 2, 3, 4) for config in asked.CONFIGS for spec in SPECS
    if ON_GPU or spec in ON_CPU.get((world_size, config), ())
])
def test_everything(world_size, config, spec):
    if ON_GPU and config == "torch" and SPECS[spec].get("dtype") == FP32:
        pytest.skip("torch attends in fp32 there by kernels of its own, which are less exact than its products")
    if ON_GPU and config in asked.BY_PARTS and not by_parts(SPECS[spec], config):
        pytest.skip("not of such heads")
    on_ranks(world_size, asked.computes, many(SPECS[spec]), config)


def by_parts(spec, kernel):
    """Whether a kernel of torch's takes such heads."""
    return spec.get("dtype") != FP32 and max(spec.get("d", 16), spec.get("dv", 16)) <= KERNELS[kernel].widest


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", [*SPECS, *LARGE])
@pytest.mark.parametrize("kernel", asked.BY_PARTS)
def test_gradients_by_parts(world_size, spec, kernel):
    if not ON_GPU and (kernel == "cudnn" or spec not in GRADIENTS_ON_CPU.get(world_size, ())):
        pytest.skip("CPU ranks have another one, and are not asked everything")
    asked_for = {name: value for name, value in {**SPECS, **LARGE}[spec].items() if name != "lse"}
    if spec == "nothing" or "one position" in spec or ON_GPU and not by_parts(asked_for, kernel):
        pytest.skip("not of such heads, or nothing but differences of equal numbers")
    on_ranks(world_size, asked.goes_backward_by_parts, many(asked_for) if spec in SPECS else asked_for, kernel, kernel)


@pytest.mark.parametrize("config, method", [("default", "flash"), ("flash", "fused")])
def test_forward_and_backward_by_different_kernels(config, method):
    spec = SPECS["odd, zigzag"]
    on_ranks(2, asked.goes_backward_by_parts, many(spec), method, config)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("spec", LARGE)
def test_many_tiles(world_size, spec):
    on_ranks(world_size, asked.computes, LARGE[spec], "default")


@pytest.mark.parametrize("spec", ["grouped", "odd, zigzag", "not causal"])
def test_specification(spec):
    on_ranks(2, asked.specifies, SPECS[spec])


@pytest.mark.parametrize("what", asked.AUTOGRAD, ids=lambda f: f.__name__)
def test_autograd(what):
    on_ranks(2, what)


@pytest.mark.parametrize("config", ["default", "flash"])
def test_subgroup(config):
    on_ranks(3, asked.computes_in_a_subgroup, config)


@pytest.mark.parametrize("world_size, calls", [(2, 60), (3, 60), (4, 60)] if ON_GPU else [(2, 5)])
def test_the_same_bits(world_size, calls):
    on_ranks(world_size, ranks_asked.repeats, ranks_asked.KINDS, calls, seed=world_size)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("spec", LARGE)
def test_the_same_bits_of_many_tiles(world_size, spec):
    on_ranks(world_size, ranks_asked.repeats, [(LARGE[spec], "default")], 20, seed=world_size)


@pytest.mark.parametrize("world_size, calls", [(2, 60), (3, 60)] if ON_GPU else [(3, 3)])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"] if ON_GPU else ["contiguous"])
@pytest.mark.parametrize("config", ["small blocks", "flash"])
def test_no_rank_overtakes_its_peers_data(world_size, calls, sharding, config):
    on_ranks(world_size, ranks_asked.outruns_its_peers, calls, sharding, config)


@pytest.mark.parametrize("config", ["default", "flash"])
def test_slow_rank(config):
    on_ranks(2, ranks_asked.waits_for_a_slow_rank, config)


def test_configs_of_torchs_kernels_are_looked_at_when_compiled(monkeypatch):
    """For a GPU, as fullgraph compiles a call; what torch brings is no question that torch.compile can ask."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(vendor_attention, "_HAS_CUDNN", True)
    monkeypatch.setattr(vendor_attention, "_HAS_FLASH", True)
    for name in KERNELS:
        config = AgAttentionConfig(method=name, backward=name)

        def looked_at(x, config=config):
            assert config.illegal(torch.device("cuda", 0), BF16) is None
            return x + 1

        torch._dynamo.reset()
        assert torch.compile(looked_at, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1.0


@needs_gpu
def test_no_sums_of_what_has_not_come_are_announced():
    with fresh_ranks(2) as pool:
        pool.run(ranks_asked.announces_no_sums_of_what_has_not_come, 1.0)


@pytest.mark.parametrize("what", ranks_asked.DISAGREEMENTS)
def test_disagreement_is_named_on_every_rank(what):
    on_ranks(3, ranks_asked.disagrees, what)


@pytest.mark.parametrize("what", ranks_asked.KNOWN)
def test_known_but_different_calls_never_give_a_result(what):
    on_ranks(2, ranks_asked.is_not_fooled_by_a_known_plan, what)


@pytest.mark.parametrize("when", ranks_asked.LOST)
def test_killed_rank(when):
    with fresh_ranks(2) as pool, pytest.raises(RankError) as caught:
        pool.run(ranks_asked.loses_rank_1, dies, when, 0.7)
    exceptions = caught.value.exceptions
    assert isinstance(exceptions[1], ChildProcessError)
    error = exceptions[0]
    assert type(error) is PeerTimeoutError, repr(error)
    assert (error.operator, error.rank, error.peer, error.timeout_s) == ("ag_attention", 0, 1, 0.7)
    assert error.seen < error.expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, asked.refuses)


# Rows of a shard, elements of a head, dtype, capability, what is open; whose kernels are taken forwards and backwards.
DEFAULTS = {
    "long": (1 << 15, 128, BF16, (9, 0), None, "cudnn", "cudnn"),
    "short": (64, 128, BF16, (9, 0), None, "fused", "fused"),
    "wide": (1 << 15, 192, BF16, (9, 0), None, "fused", "fused"),
    "fp32": (1 << 15, 128, FP32, (9, 0), None, "fused", "fused"),
    "Ampere": (1 << 15, 128, BF16, (8, 0), None, "fused", "fused"),
    "Blackwell": (1 << 15, 128, BF16, (10, 0), None, "fused", "fused"),
    "ours, chosen": (1 << 15, 128, BF16, (9, 0), "chosen", "fused", "cudnn"),
    "ours, given": (1 << 15, 128, BF16, (9, 0), AgAttentionConfig(), "fused", "fused"),
    "theirs forwards": (64, 128, BF16, (9, 0), AgAttentionConfig(method="flash"), "flash", "flash"),
    "given": (64, 128, BF16, (9, 0), AgAttentionConfig(backward="cudnn"), "fused", "cudnn"),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("what", DEFAULTS)
def test_whose_kernels(what, deterministic, monkeypatch):
    """On a GPU with torch's kernels; the gradients that cuDNN makes are not the same bits each time."""
    rows, width, dtype, capability, given, forward, backward = DEFAULTS[what]
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    missing = "fp32" if dtype == FP32 else None
    monkeypatch.setattr(ag_attention_config, "why_not", lambda name, device, dtype: missing)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    of = rows, width, dtype, SimpleNamespace(type="cuda")
    chosen = given == "chosen"
    config = ag_attention_config.completed(AgAttentionConfig() if chosen else given, *of, chosen=chosen)
    expected = "fused" if deterministic and what != "given" else backward
    assert (config.method, config.backward) == (forward, expected)
