"""ag_attention against attention over the whole sequence, and the interaction of its ranks."""

from types import SimpleNamespace

import pytest
import torch

from tdkernels import AgAttentionConfig, PeerTimeoutError
from tdkernels.launch import RankError
from tdkernels.ops.attention.ag_attention import config as ag_attention_config
from tdkernels.ops.attention.ag_attention import vendor_attention
from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS
from tdkernels.runtime import gpu
from tests.ops.attention.ag_attention import cases, rank_cases
from tests.ops.attention.ag_attention.oracle import BF16, FP16, FP32, enlarge
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="takes too long without a GPU")

# Positions per rank, heads, head dimensions; bf16 by default.
SPECS = {
    "grouped": dict(rows=40, heads=4, kv_heads=2, d=16, dv=16),
    "odd, zigzag": dict(rows=37, batch=2, heads=2, kv_heads=1, d=24, dv=40, sharding="zigzag", seed=1),
    "fp32, zigzag": dict(rows=64, heads=1, kv_heads=1, d=17, dv=33, dtype=FP32, sharding="zigzag", seed=2),
    "fp32": dict(rows=35, batch=2, heads=2, kv_heads=2, d=32, dv=16, dtype=FP32, scale=0.3, seed=3),
    "not causal": dict(rows=33, batch=2, heads=2, kv_heads=2, d=20, dv=16, dtype=FP16, causal=False, seed=4),
    "not causal, zigzag": dict(rows=20, heads=3, kv_heads=1, causal=False, sharding="zigzag", lse=False, seed=5),
    # With one key, the gradient of q from o is a difference of equal numbers; these specs also use the one from lse.
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

# The interpreter is slow, so CPU ranks run a selection.
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
    (world_size, config, spec) for world_size in (1, 2, 3, 4) for config in cases.CONFIGS for spec in SPECS
    if ON_GPU or spec in ON_CPU.get((world_size, config), ())
])
def test_everything(world_size, config, spec):
    if ON_GPU and config == "torch" and SPECS[spec].get("dtype") == FP32:
        pytest.skip("torch's fp32 attention kernels on GPUs are less exact than its GEMMs")
    if ON_GPU and config in cases.PIPELINED and not is_supported(SPECS[spec], config):
        pytest.skip("the kernel does not support these heads")
    on_ranks(world_size, cases.computes, enlarge(SPECS[spec]), config)


def is_supported(spec, kernel):
    """Return whether the given torch kernel supports the dtype and head dimensions."""
    return spec.get("dtype") != FP32 and max(spec.get("d", 16), spec.get("dv", 16)) <= KERNELS[kernel].widest


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", [*SPECS, *LARGE])
@pytest.mark.parametrize("kernel", cases.PIPELINED)
def test_pipelined_gradients(world_size, spec, kernel):
    if not ON_GPU and (kernel == "cudnn" or spec not in GRADIENTS_ON_CPU.get(world_size, ())):
        pytest.skip("CPU ranks have no cuDNN, and run a selection")
    options = {name: value for name, value in {**SPECS, **LARGE}[spec].items() if name != "lse"}
    if spec == "nothing" or "one position" in spec or ON_GPU and not is_supported(options, kernel):
        pytest.skip("unsupported heads, or gradients that are differences of equal numbers")
    on_ranks(
        world_size, cases.computes_pipelined_gradients, enlarge(options) if spec in SPECS else options, kernel, kernel
    )


@pytest.mark.parametrize("config, method", [("default", "flash"), ("flash", "fused")])
def test_forward_and_backward_by_different_kernels(config, method):
    spec = SPECS["odd, zigzag"]
    on_ranks(2, cases.computes_pipelined_gradients, enlarge(spec), method, config)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("spec", LARGE)
def test_many_tiles(world_size, spec):
    on_ranks(world_size, cases.computes, LARGE[spec], "default")


@pytest.mark.parametrize("spec", ["grouped", "odd, zigzag", "not causal"])
def test_reference(spec):
    on_ranks(2, cases.matches_reference, SPECS[spec])


@pytest.mark.parametrize("check", cases.AUTOGRAD, ids=lambda f: f.__name__)
def test_autograd(check):
    on_ranks(2, check)


@pytest.mark.parametrize("config", ["default", "flash"])
def test_subgroup(config):
    on_ranks(3, cases.computes_in_a_subgroup, config)


@pytest.mark.parametrize("world_size, calls", [(2, 60), (3, 60), (4, 60)] if ON_GPU else [(2, 5)])
def test_determinism(world_size, calls):
    on_ranks(world_size, rank_cases.is_deterministic, rank_cases.KINDS, calls, seed=world_size)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("spec", LARGE)
def test_determinism_with_many_tiles(world_size, spec):
    on_ranks(world_size, rank_cases.is_deterministic, [(LARGE[spec], "default")], 20, seed=world_size)


@pytest.mark.parametrize("world_size, calls", [(2, 60), (3, 60)] if ON_GPU else [(3, 3)])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"] if ON_GPU else ["contiguous"])
@pytest.mark.parametrize("config", ["small blocks", "flash"])
def test_ranks_running_ahead(world_size, calls, sharding, config):
    on_ranks(world_size, rank_cases.runs_ahead_of_peers, calls, sharding, config)


@pytest.mark.parametrize("config", ["default", "flash"])
def test_slow_rank(config):
    on_ranks(2, rank_cases.waits_for_a_slow_rank, config)


def test_config_validation_compiles_with_fullgraph(monkeypatch):
    """``illegal`` can be traced with fullgraph for a GPU: the checks for torch's kernels are not traced."""
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(vendor_attention, "_HAS_CUDNN", True)
    monkeypatch.setattr(vendor_attention, "_HAS_FLASH", True)
    for name in KERNELS:
        config = AgAttentionConfig(method=name, backward=name)

        def validate(x, config=config):
            assert config.illegal(torch.device("cuda", 0), BF16) is None
            return x + 1

        torch._dynamo.reset()
        assert torch.compile(validate, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1.0


@needs_gpu
def test_no_gradients_are_sent_after_timeout():
    with fresh_ranks(2) as pool:
        pool.run(rank_cases.sends_no_gradients_after_timeout, 1.0)


@pytest.mark.parametrize("name", rank_cases.DISAGREEMENTS)
def test_disagreement_raises_on_every_rank(name):
    on_ranks(3, rank_cases.reports_disagreement, name)


@pytest.mark.parametrize("name", rank_cases.CACHED)
def test_mismatch_of_cached_plans_is_detected(name):
    on_ranks(2, rank_cases.detects_mismatch_of_cached_plans, name)


@pytest.mark.parametrize("step", rank_cases.MISSED)
def test_killed_rank(step):
    with fresh_ranks(2) as pool, pytest.raises(RankError) as caught:
        pool.run(rank_cases.loses_rank_1, dies, step, 0.7)
    exceptions = caught.value.exceptions
    assert isinstance(exceptions[1], ChildProcessError)
    error = exceptions[0]
    assert type(error) is PeerTimeoutError, repr(error)
    assert (error.operator, error.rank, error.peer, error.timeout_s) == ("ag_attention", 0, 1, 0.7)
    assert error.seen < error.expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, cases.rejects_invalid_arguments)


# Rows of a shard, head dimension, dtype, capability, given config; the expected forward and backward methods.
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
@pytest.mark.parametrize("name", DEFAULTS)
def test_default_methods(name, deterministic, monkeypatch):
    """Default methods on a GPU. cuDNN's gradients are not deterministic."""
    rows, width, dtype, capability, given, forward, backward = DEFAULTS[name]
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    missing = "fp32" if dtype == FP32 else None
    monkeypatch.setattr(ag_attention_config, "why_not", lambda name, device, dtype: missing)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    problem = rows, width, dtype, SimpleNamespace(type="cuda")
    selected = given == "chosen"
    config = ag_attention_config.completed(AgAttentionConfig() if selected else given, *problem, chosen=selected)
    expected = "fused" if deterministic and name != "given" else backward
    assert (config.method, config.backward) == (forward, expected)
