"""Test bodies for method "torch" of flash_decode. Every rank runs them; see test_torch_method.py."""

import contextlib
from unittest import mock

from tdkernels.ops.attention.flash_decode import torch_attention
from tests.ops.attention.flash_decode import cases
from tests.ops.attention.flash_decode.oracle import FP16, enlarge

FLASH, PAGED = torch_attention.FLASH, torch_attention.FLASH_PAGED
COPIED, PLAIN = torch_attention.FLASH_COPIED, torch_attention.PLAIN
BASE = dict(batch=3, heads=6, kv_heads=2, dim=16, keys=20)
# (spec, path of CPU ranks). A cache is NaN beyond its lengths, and so are pages without keys.
SPECS = [
    (dict(BASE, seed=40), FLASH),
    (dict(BASE, heads=2, seed=41), FLASH),  # one query row for each head of the cache
    (dict(BASE, kv_heads=1, dim=64, dtype=FP16, lens="some none", seed=42), FLASH),
    (dict(BASE, tokens=1, lens="none", seed=43), FLASH),
    (dict(BASE, tokens=4, seed=44), FLASH),
    (dict(BASE, tokens=2, lens="last", scale=0.3, seed=45), FLASH),
    (dict(BASE, tokens=4, keys=3, lens="full", dtype=FP16, seed=46), FLASH),  # fewer keys than query tokens
    (dict(BASE, tokens=4, lens="one", seed=47), FLASH),
    (dict(BASE, tokens=4, lens="not first", seed=48), FLASH),
    (dict(BASE, page=4, seed=49), COPIED),
    (dict(BASE, page=4, tokens=4, lens="full", dtype=FP16, seed=50), COPIED),
    (dict(BASE, keys=300, page=256, seed=51), PAGED if torch_attention._TAKES_PAGES else COPIED),
    (dict(BASE, keys=300, page=256, tokens=4, seed=52), PAGED if torch_attention._TAKES_PAGES else COPIED),
    (dict(BASE, heads=4, kv_heads=1, dim=64, value_dim=64, latent=True, seed=53), FLASH),
    (dict(BASE, heads=4, kv_heads=1, dim=48, value_dim=32, latent=True, tokens=4, seed=54), PLAIN),
    (dict(BASE, window=7, tokens=4, seed=55), PLAIN),
    (dict(BASE, soft_cap=1.5, seed=56), PLAIN),
    (dict(BASE, scales="mixed", page=4, tokens=4, seed=57), PLAIN),
]


@contextlib.contextmanager
def recorded_paths():
    """Record the paths of the calls with method "torch"."""
    paths, select = [], torch_attention._path_of

    def record(*args):
        paths.append(select(*args))
        return paths[-1]

    with mock.patch.object(torch_attention, "_path_of", record):
        yield paths


def computes_on_every_path(specs):
    """Check o, lse and gradients of each spec, and the path on CPU ranks."""
    for spec, path in specs:
        with recorded_paths() as paths:
            cases.computes(enlarge(spec), "torch")
        assert cases.device().type != "cpu" or {*paths} == {path}, f"{spec}: {paths}"


def computes_on_different_paths():
    """Check a call whose ranks take different paths, since the strides of their caches differ."""
    for tokens in (None, 4):
        case = cases.Decode(**enlarge(dict(BASE, tokens=tokens, seed=58)))
        if case.rank == 0:
            for name in cases.CACHES:  # rows are not aligned
                cache = getattr(case, name).detach()
                setattr(case, name, cases.torch.cat([cache, cache[..., :1]], -1)[..., :-1])
        with recorded_paths() as paths:
            case.check(case.run(config=cases.config_of("torch")))
        assert {*paths} == {COPIED if case.rank == 0 else FLASH}
