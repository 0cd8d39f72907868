"""flash_decode with long sequences, on GPUs only: many blocks per program and many programs per rank."""

import pytest
import torch

import tdkernels
from tests.ops.attention.flash_decode.oracle import FP16, OPERANDS, Decode, releases_memory
from tests.support.ranks import DEVICE, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs GPUs")

# ``keys`` counts all ranks. With its reference, a case takes about 3 GiB of a GPU that other processes share.
SPECS = {
    "96 heads": dict(batch=1, heads=96, kv_heads=12, dim=128, keys=1 << 17, lens="full"),
    "32 heads": dict(batch=1, heads=32, kv_heads=8, dim=128, keys=1 << 17, lens="full", dtype=FP16, seed=1),
    "batch": dict(batch=16, heads=32, kv_heads=8, dim=128, keys=1 << 14, seed=2),
    "batch, full": dict(batch=16, heads=32, kv_heads=8, dim=128, keys=1 << 14, lens="full", seed=3),
    "window": dict(batch=16, heads=32, kv_heads=8, dim=128, keys=1 << 14, tokens=2, window=9000, seed=4),
    "latent": dict(
        batch=16, heads=128, kv_heads=1, dim=576, value_dim=512, keys=1 << 15, latent=True, page=64, seed=5
    ),
    "fp8": dict(batch=16, heads=32, kv_heads=8, dim=128, keys=1 << 14, scales="head", seed=6),
}
GRADIENTS = {name: dict(SPECS[name], keys=1 << 14) for name in ("96 heads", "32 heads")}
# Odd sizes for each supported head dimension.
WIDE = [
    dict(batch=7, heads=5 * kv_heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, keys=1111, page=page, seed=dim)
    for dim, value_dim in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512), (77, 41))
    for kv_heads, page in ((1, None), (3, 16))
]


def per_rank(spec, ranks):
    """Return the spec with the keys divided among the ranks."""
    return dict(spec, keys=spec["keys"] // ranks)


@releases_memory
def computes_repeatedly(spec, calls, gradients=False):
    case = Decode(**spec)
    expected = case.run(OPERANDS if gradients else ())
    case.check(expected)
    for _ in range(calls):
        o, lse = case.call(return_lse=True)
        tdkernels.synchronize()
        assert torch.equal(o, expected["o"]) and torch.equal(lse, expected["lse"])


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("spec", SPECS)
def test_long_sequences(world_size, spec):
    on_ranks(world_size, computes_repeatedly, per_rank(SPECS[spec], world_size), 20)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("spec", GRADIENTS)
def test_gradients_of_long_sequences(world_size, spec):
    on_ranks(world_size, computes_repeatedly, per_rank(GRADIENTS[spec], world_size), 1, gradients=True)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("spec", WIDE, ids=lambda spec: f"{spec['dim']}, {spec['kv_heads']}")
def test_every_width(world_size, spec):
    on_ranks(world_size, computes_repeatedly, spec, 5, gradients=True)
