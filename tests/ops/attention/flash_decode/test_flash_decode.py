"""flash_decode with a sharded KV cache, against attention over the whole sequence."""

import pytest

from tests.ops.attention.flash_decode import cases
from tests.ops.attention.flash_decode.cases import CONFIGS
from tests.ops.attention.flash_decode.oracle import FP16, FP32, enlarge
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"

SPECS = {
    "GQA": dict(batch=3, heads=6, kv_heads=2, dim=64, keys=20),
    "MQA": dict(batch=2, heads=5, kv_heads=1, dim=80, keys=17, seed=1),
    "MHA": dict(batch=2, heads=3, kv_heads=3, dim=96, keys=9, dtype=FP16, seed=2),
    "heads of 256": dict(batch=1, heads=2, kv_heads=1, dim=256, keys=18, seed=3),
    "heads of 192 and 128": dict(batch=2, heads=4, kv_heads=2, dim=192, value_dim=128, keys=5, seed=4),
    # With wide heads and few keys, a gradient is a small difference, and its fp32 error varies more by chance.
    "fp32": dict(batch=2, heads=4, kv_heads=2, dim=32, keys=16, lens="full", dtype=FP32, seed=5),
    "odd heads": dict(batch=2, heads=3, kv_heads=1, dim=50, value_dim=33, keys=7, dtype=FP16, seed=6),
    "latent": dict(batch=2, heads=20, kv_heads=1, dim=576, value_dim=512, keys=6, latent=True, seed=7),
    "latent, paged, two tokens": dict(
        batch=1, heads=4, kv_heads=1, dim=576, value_dim=512, keys=20, latent=True, page=16, tokens=2, seed=8
    ),
    "tokens": dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6, tokens=3, seed=9),
    "one token": dict(batch=2, heads=2, kv_heads=1, dim=16, keys=6, tokens=1, seed=10),
    "more tokens than keys": dict(batch=3, heads=2, kv_heads=1, dim=16, keys=6, tokens=5, lens="one", seed=11),
    "window": dict(batch=2, heads=4, kv_heads=2, dim=16, keys=3, tokens=3, window=5, lens="full", seed=12),
    # Blocks of keys outside all windows are skipped, and only these.
    "window of several blocks": dict(batch=3, heads=2, kv_heads=1, dim=16, keys=60, tokens=2, window=37, seed=28),
    "window of one": dict(batch=2, heads=2, kv_heads=1, dim=16, keys=5, tokens=2, window=1, seed=13),
    "window wider than all": dict(batch=1, heads=2, kv_heads=2, dim=16, keys=5, window=1000, lens="full", seed=14),
    "soft cap": dict(batch=2, heads=4, kv_heads=2, dim=16, keys=9, soft_cap=1.5, scale=0.5, seed=15),
    "no keys": dict(batch=2, heads=4, kv_heads=2, dim=16, keys=4, lens="none", seed=16),
    "no keys of one": dict(batch=3, heads=4, kv_heads=2, dim=16, keys=8, lens="some none", seed=17),
    "one key": dict(batch=3, heads=4, kv_heads=2, dim=16, keys=8, lens="one", seed=18),
    "all on the last": dict(batch=2, heads=4, kv_heads=2, dim=16, keys=8, lens="last", tokens=2, seed=19),
    "none on the first": dict(batch=2, heads=4, kv_heads=2, dim=16, keys=8, lens="not first", seed=20),
    "paged": dict(batch=3, heads=4, kv_heads=2, dim=128, keys=40, page=16, seed=21),
    "pages of one": dict(batch=2, heads=2, kv_heads=1, dim=16, keys=5, page=1, seed=22),
    "pages, all at once": dict(
        batch=3, heads=4, kv_heads=2, dim=16, keys=9, page=4, tokens=2, window=6, soft_cap=2.0, seed=23
    ),
    "fp8": dict(batch=2, heads=4, kv_heads=2, dim=64, keys=20, scales="tensor", seed=24),
    "fp8 by head, paged": dict(
        batch=2, heads=6, kv_heads=3, dim=32, keys=20, page=16, scales="head", dtype=FP16, soft_cap=3.0, seed=25
    ),
    "fp8, scales of two kinds": dict(
        batch=2, heads=6, kv_heads=3, dim=90, value_dim=40, keys=9, scales="mixed", seed=27
    ),
    "fp8, odd heads": dict(batch=2, heads=3, kv_heads=1, dim=33, value_dim=50, keys=9, scales="tensor", seed=29),
    # More query rows per head of the cache than one tile has.
    "latent, many heads": dict(batch=2, heads=72, kv_heads=1, dim=288, value_dim=256, keys=20, latent=True, seed=33),
    "fp8, latent": dict(
        batch=1, heads=4, kv_heads=1, dim=96, value_dim=64, keys=9, scales="one", latent=True, tokens=2, seed=26
    ),
    # Some columns of the keys have a cache of their own.
    "rope": dict(batch=2, heads=4, kv_heads=2, dim=24, rope=8, value_dim=20, keys=9, tokens=2, seed=34),
    "rope, latent, fp8, paged": dict(
        batch=2, heads=3, kv_heads=1, dim=96, rope=32, value_dim=64, keys=20, page=16, scales="tensor", latent=True,
        seed=35,
    ),
    "rope, fp8 by head": dict(
        batch=2, heads=4, kv_heads=2, dim=80, rope=16, value_dim=40, keys=9, scales="mixed", dtype=FP16, window=6,
        soft_cap=2.0, seed=36,
    ),
    "rope, fp32": dict(batch=1, heads=4, kv_heads=2, dim=21, rope=5, keys=9, dtype=FP32, seed=37),
}
# So many blocks of 16 keys per tile (200 and more, and 68 to 76) that its partial results are merged in two steps.
LONG = {
    "one head": dict(batch=1, heads=3, kv_heads=1, dim=16, keys=3580, lens="full", seed=30),
    "some heads": dict(
        batch=1, heads=66, kv_heads=3, dim=32, value_dim=16, keys=1190, lens="full", dtype=FP16, seed=31
    ),
    "wide": dict(batch=1, heads=18, kv_heads=1, dim=40, value_dim=140, keys=1250, lens="full", tokens=2, seed=32),
}

# The interpreter is slow, so CPU ranks run a selection.
ON_CPU = {
    (1, "default"): ["GQA", "window", "soft cap", "no keys", "fp8", "paged", "more tokens than keys", "rope, fp32"],
    (1, "one program"): ["tokens", "fp32"],
    (2, "default"): [
        "GQA", "MHA", "heads of 256", "heads of 192 and 128", "fp32", "odd heads", "latent",
        "latent, paged, two tokens", "one token", "more tokens than keys", "window of several blocks", "window of one",
        "no keys", "no keys of one", "fp8", "fp8 by head, paged", "fp8, latent", "fp8, scales of two kinds",
        "fp8, odd heads", "rope, fp8 by head",
    ],
    (2, "small blocks"): ["tokens", "paged", "pages of one", "pages, all at once"],
    (2, "one program"): ["soft cap", "all on the last"],
    (2, "high tiles"): ["latent, many heads", "tokens"],
    (2, "low tiles"): ["latent, many heads"],
    (1, "split"): [
        "GQA", "soft cap", "fp8", "paged", "latent, paged, two tokens", "more tokens than keys", "rope",
    ],
    (2, "split"): [
        "MHA", "latent, many heads", "no keys of one", "fp8 by head, paged", "window", "tokens", "fp32",
        "rope, latent, fp8, paged",
    ],
    (3, "split, many programs"): ["none on the first", "one key", "odd heads"],
    (2, "torch"): [
        "GQA", "window", "latent", "no keys of one", "pages, all at once", "fp8 by head, paged", "rope, fp8 by head",
    ],
    (3, "default"): ["window", "none on the first", "one key"],
    (3, "small blocks"): ["MQA", "pages, all at once"],
    (4, "default"): ["tokens", "window wider than all"],
}


@pytest.mark.parametrize("world_size, config, spec", [
    (world_size, config, spec) for world_size in (1, 2, 3, 4) for config in CONFIGS for spec in SPECS
    if ON_GPU or spec in ON_CPU.get((world_size, config), ())
])
def test_everything(world_size, config, spec):
    on_ranks(world_size, cases.computes, enlarge(SPECS[spec]), config)


@pytest.mark.parametrize("world_size, spec", [
    (world_size, spec) for world_size in (1, 2) for spec in LONG if ON_GPU or world_size == 1 or spec == "wide"
])
def test_merge_in_two_steps(world_size, spec):
    on_ranks(world_size, cases.computes, LONG[spec], "many programs")


def test_every_spec_runs_on_cpu_ranks():
    assert {*SPECS} == {spec for specs in ON_CPU.values() for spec in specs}


def test_oracle_matches_torch():
    cases.oracle_matches_torch()


CHANGING = [dict(SPECS["tokens"], lens=lens, seed=seed) for seed, lens in enumerate(["ragged", "none", "full", "last"])]
PAGES = [dict(SPECS["pages, all at once"], lens=lens, seed=seed) for seed, lens in enumerate(["full", "one", "ragged"])]


@pytest.mark.parametrize("world_size, specs", [(1, CHANGING), (2, CHANGING), (2, PAGES)], ids=str)
def test_changing_lens(world_size, specs):
    on_ranks(world_size, cases.supports_changing_lens, specs)


@pytest.mark.parametrize("check", cases.AUTOGRAD, ids=lambda f: f.__name__)
def test_autograd(check):
    on_ranks(2, check)


@pytest.mark.parametrize("world_size", [1, 2] if ON_GPU else [2])
def test_layouts(world_size):
    on_ranks(world_size, cases.supports_any_layout)


@pytest.mark.parametrize("world_size", [1, 2])
def test_empty_batch(world_size):
    on_ranks(world_size, cases.supports_empty_batch)


def test_subgroup():
    on_ranks(3, cases.computes_in_a_subgroup)


def test_groups_of_one_rank():
    on_ranks(2, cases.computes_in_groups_of_one)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, cases.rejects_invalid_arguments)


# Multi-node groups handle pages and lengths in the same kernel.
@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "many programs"), (3, "default"), (2, "torch")])
def test_pages_outside_the_cache_are_masked(world_size, config):
    on_ranks(world_size, cases.masks_pages_outside_the_cache, config)


@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "many programs"), (3, "default"), (2, "torch")])
def test_64_bit_lengths_are_clamped(world_size, config):
    on_ranks(world_size, cases.clamps_64_bit_lengths, config)


@pytest.mark.parametrize("world_size", [1, 3])
def test_debug_validation(world_size):
    on_ranks(world_size, cases.validates_in_debug_mode)
