"""flash_decode against attention to the whole of a cache that the ranks share."""

import pytest

from tests.ops.attention.flash_decode import cases as asked
from tests.ops.attention.flash_decode.cases import CONFIGS
from tests.ops.attention.flash_decode.oracle import FP16, FP32, many
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"

SPECS = {
    "GQA": dict(batch=3, heads=6, kv_heads=2, dim=64, keys=20),
    "MQA": dict(batch=2, heads=5, kv_heads=1, dim=80, keys=17, seed=1),
    "MHA": dict(batch=2, heads=3, kv_heads=3, dim=96, keys=9, dtype=FP16, seed=2),
    "heads of 256": dict(batch=1, heads=2, kv_heads=1, dim=256, keys=18, seed=3),
    "heads of 192 and 128": dict(batch=2, heads=4, kv_heads=2, dim=192, value_dim=128, keys=5, seed=4),
    # With wide heads and few keys a gradient is a small difference, of which fp32 leaves more to luck.
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
    # Whole blocks of keys that nobody sees are left out, and no others.
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
    "fp8, latent": dict(
        batch=1, heads=4, kv_heads=1, dim=96, value_dim=64, keys=9, scales="one", latent=True, tokens=2, seed=26
    ),
}
# So many blocks of 16 keys for each tile that its parts are merged in two steps: 200 and more, and 68 to 76.
LONG = {
    "one head": dict(batch=1, heads=3, kv_heads=1, dim=16, keys=3580, lens="full", seed=30),
    "some heads": dict(
        batch=1, heads=66, kv_heads=3, dim=32, value_dim=16, keys=1190, lens="full", dtype=FP16, seed=31
    ),
    "wide": dict(batch=1, heads=18, kv_heads=1, dim=40, value_dim=140, keys=1250, lens="full", tokens=2, seed=32),
}

# The interpreter takes long, so CPU ranks are not asked everything everywhere.
ON_CPU = {
    (1, "default"): ["GQA", "window", "soft cap", "no keys", "fp8", "paged", "more tokens than keys"],
    (1, "one program"): ["tokens", "fp32"],
    (2, "default"): [
        "GQA", "MHA", "heads of 256", "heads of 192 and 128", "fp32", "odd heads", "latent",
        "latent, paged, two tokens", "one token", "more tokens than keys", "window of several blocks", "window of one",
        "no keys", "no keys of one", "fp8", "fp8 by head, paged", "fp8, latent", "fp8, scales of two kinds",
        "fp8, odd heads",
    ],
    (2, "small blocks"): ["tokens", "paged", "pages of one", "pages, all at once"],
    (2, "one program"): ["soft cap", "all on the last"],
    (2, "torch"): ["GQA", "window", "latent", "no keys of one", "pages, all at once", "fp8 by head, paged"],
    (3, "default"): ["window", "none on the first", "one key"],
    (3, "small blocks"): ["MQA", "pages, all at once"],
    (4, "default"): ["tokens", "window wider than all"],
}


@pytest.mark.parametrize("world_size, config, spec", [
    (world_size, config, spec) for world_size in (1, 2, 3, 4) for config in CONFIGS for spec in SPECS
    if ON_GPU or spec in ON_CPU.get((world_size, config), ())
])
def test_everything(world_size, config, spec):
    on_ranks(world_size, asked.computes, many(SPECS[spec]), config)


@pytest.mark.parametrize("world_size, spec", [
    (world_size, spec) for world_size in (1, 2) for spec in LONG if ON_GPU or world_size == 1 or spec == "wide"
])
def test_everything_of_many_parts(world_size, spec):
    on_ranks(world_size, asked.computes, LONG[spec], "many programs")


def test_every_spec_is_asked_on_cpu_ranks():
    assert {*SPECS} == {spec for specs in ON_CPU.values() for spec in specs}


def test_the_reference_attends_as_torch_does():
    asked.attends_as_torch_does()


CHANGING = [dict(SPECS["tokens"], lens=lens, seed=seed) for seed, lens in enumerate(["ragged", "none", "full", "last"])]
PAGES = [dict(SPECS["pages, all at once"], lens=lens, seed=seed) for seed, lens in enumerate(["full", "one", "ragged"])]


@pytest.mark.parametrize("world_size, specs", [(1, CHANGING), (2, CHANGING), (2, PAGES)], ids=str)
def test_new_lens_in_the_same_memory(world_size, specs):
    on_ranks(world_size, asked.takes_new_lens, specs)


@pytest.mark.parametrize("what", asked.AUTOGRAD, ids=lambda f: f.__name__)
def test_autograd(what):
    on_ranks(2, what)


@pytest.mark.parametrize("world_size", [1, 2] if ON_GPU else [2])
def test_layouts(world_size):
    on_ranks(world_size, asked.takes_any_layout)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_sequences(world_size):
    on_ranks(world_size, asked.has_no_sequences)


def test_subgroup():
    on_ranks(3, asked.computes_in_a_subgroup)


def test_groups_of_one_rank():
    on_ranks(2, asked.computes_alone)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, asked.refuses)


# A rank of several nodes takes pages and lengths by the same kernel.
@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "many programs"), (3, "default"), (2, "torch")])
def test_keys_of_pages_outside_the_cache_are_masked(world_size, config):
    on_ranks(world_size, asked.masks_pages_outside_the_cache, config)


@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "many programs"), (3, "default"), (2, "torch")])
def test_lengths_of_64_bits_are_clamped(world_size, config):
    on_ranks(world_size, asked.clamps_lengths_of_64_bits, config)


@pytest.mark.parametrize("world_size", [1, 3])
def test_wrong_lens_and_pages(world_size):
    on_ranks(world_size, asked.refuses_what_only_the_device_knows)
