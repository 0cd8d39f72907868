"""Test bodies for method "split" of flash_decode. Every rank runs them; see test_split.py.

On Hopper, ``latent_kernel`` computes the parts of latent caches. Other ranks run the portable kernel on narrower heads.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch

import tdkernels
from tdkernels import FlashDecodeConfig
from tdkernels.ops.attention.flash_decode import launch_split
from tests.ops.attention.flash_decode.oracle import BF16, FP32, OPERANDS, Decode, releases_memory, replace_pages
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import device

SPLIT = FlashDecodeConfig(method="split", block_n=32, num_stages=2)
ROOM = 100  # of a cache, in keys
PORTABLE, FUSED = "portable", "fused"  # kernels other than ``latent_kernel``, see ``runs``


def on_hopper():
    return device().type == "cuda" and torch.cuda.get_device_capability(device()) == (9, 0)


def lengths():
    """Return lengths around one and two blocks of 32 keys, and up to the capacity; fewer for the slow interpreter."""
    return [0, 1, 31, 32, 33, 63, 64, 65, 77, ROOM] if on_hopper() else [0, 1, 33, ROOM]


def latent(lens, heads, rope=False, **spec):
    """Return a case of a latent cache with room for the longest sequence, with ``rope`` and a cache for the others."""
    dim, value_dim = (576, 512) if on_hopper() else (96, 64)
    spec = spec | {"rope": dim - value_dim if rope else 0}
    return Decode(len(lens), heads, 1, dim, max(lens), value_dim=value_dim, lens=lens, latent=True, **spec)


@contextlib.contextmanager
def runs(kernel):
    """Check which kernel the calls within run: None for ``latent_kernel`` on Hopper and the portable one elsewhere."""
    used, real = [], launch_split.PairOfLaunches.__call__

    def recorded(pair, operands):
        used.append(pair.latent)
        return real(pair, operands)

    with mock.patch.object(launch_split.PairOfLaunches, "__call__", recorded):
        yield
    assert set(used) == (set() if kernel == FUSED else {kernel is None and on_hopper()})


def check(case, config=SPLIT, kernel=None):
    """Check o and lse, and that every call returns the same bits. New tensors, as the parts, begin as NaN."""
    with torch.no_grad(), poisoned_outputs(), runs(kernel):
        expected = case.run((), config=config)
        assert {*expected} == {"o", "lse"}
        case.check(expected)
        for _ in range(20 if on_hopper() else 1):
            o, lse = case.call(return_lse=True, config=config)
            assert torch.equal(o, expected["o"]) and torch.equal(lse, expected["lse"]), case.title
        # At least the third call, so it comes from the call cache.
        assert torch.equal(case.call(config=config), expected["o"]), "without its log-sum-exp"
    return expected


# ---- shapes ----


@releases_memory
def computes(heads, tokens, dtype, lens_dtype, programs):
    """Check sequences of all kinds of lengths, with any number of programs."""
    case = latent(lengths(), heads, tokens=tokens, dtype=dtype, seed=1)
    case.lens = case.lens.to(lens_dtype)
    for number in programs:
        check(case, replace(SPLIT, num_programs=number))
    check(case, replace(SPLIT, chunk_keys=64))


@releases_memory
def computes_many_sequences(batch, heads):
    check(latent([(number * 37) % 71 for number in range(batch)], heads, seed=2))


@releases_memory
def computes_a_long_sequence(keys, heads, programs):
    """Check one sequence with more parts than the join loads lse of at a time, which is 16."""
    config = replace(SPLIT, num_programs=programs)
    case = latent([keys], heads, seed=3)
    check(case, config)
    case = latent([keys], heads, seed=3)
    # The weight of the last key overflows relative to the maximum of any other part.
    for key in (case.whole["k_cache"][0][-1, 0], case.k_cache[0, -1, 0]):
        key.copy_(40 * case.q[0, 0])
    check(case, config)


def computes_with_any_scale(heads):
    """Check scores that grow so much within a sequence that earlier weights are rescaled, and such that do not."""
    for scale in (1e-3, 0.3, 1.0):
        check(latent(lengths(), heads, scale=scale, seed=4))


def computes_pages(heads, pages):
    """Check paged caches; ``latent_kernel`` reads pages of a multiple of 32 keys. Also with pages outside the cache."""
    for page in pages:
        kernel = None if page % 32 == 0 else PORTABLE
        check(latent(lengths(), heads, page=page, tokens=2, seed=5), kernel=kernel)
        case = latent(lengths(), heads, page=page, tokens=2, seed=6)
        replace_pages(case)
        check(case, kernel=kernel)


# ---- memory layouts and lengths ----


def supports_strides(heads):
    """Check caches with gaps, which are NaN: between sequences, between keys, and of keys that TMA cannot address."""
    case = latent(lengths(), heads, seed=7)
    expected = check(case)
    plain, (batch, keys, _, dim) = case.k_cache, case.k_cache.shape
    for rows, columns, offset, kernel in (
        (keys + 3, dim, 0, None), (keys, dim + 8, 0, None), (keys + 1, 2 * dim, 16, None), (keys, dim + 4, 0, PORTABLE),
        (keys, dim, 4, PORTABLE),
    ):
        memory = torch.full([batch * rows * columns + offset], torch.nan, dtype=plain.dtype, device=plain.device)
        case.k_cache = memory[offset:].view(batch, rows, 1, columns)[:, :keys, :, :dim]
        case.k_cache.copy_(plain)
        case.v_cache = case.k_cache[..., : case.value_dim]
        got = check(case, kernel=kernel)
        if kernel is None:
            assert torch.equal(got["o"], expected["o"]), (rows, columns)


def supports_queries_anywhere(heads):
    """Check q at an address that TMA cannot read."""
    case = latent(lengths(), heads, seed=8)
    memory = case.q.new_zeros(case.q.numel() + 1)
    memory[1:] = case.q.flatten()
    case.q = memory[1:].view_as(case.q)
    check(case, kernel=PORTABLE)


def clamps_lengths(heads):
    """Check lengths outside [0, capacity]. If truncated to 32 bits, some would be 5."""
    case = latent(lengths(), heads, seed=9)
    for too_long, too_short in ((ROOM + 1, -1), ((1 << 31) - 1, -(1 << 31)), ((1 << 32) + 5, -(1 << 32) + 5)):
        lens = case.all_lens[case.rank].clone()
        lens[lens == ROOM], lens[lens == 0] = too_long, too_short
        case.lens = lens.to(device(), torch.int64 if too_long >= 1 << 31 else torch.int32)
        check(case)


def supports_changing_lens(heads):
    """Check cached calls with the same tensors if lengths and keys change in them."""
    static = latent(lengths(), heads, seed=10)
    check(static)
    for seed in range(3):
        fresh = latent(lengths()[seed:] + lengths()[:seed], heads, seed=seed)
        for name in ("q", "k_cache", "lens"):
            getattr(static, name).copy_(getattr(fresh, name))
        o, lse = static.call(return_lse=True, config=SPLIT)
        fresh.check({"o": o, "lse": lse})


def supports_calls_in_a_row(heads):
    """Check calls with other operands one after the other, which use the same scratch memory.

    No kernel runs between their launches, so the second launch of a call overlaps with the first one if it can.
    """
    cases = [latent(lengths()[shift:] + lengths()[:shift], heads, seed=20 + shift) for shift in range(3)]
    with torch.no_grad():
        for config in (SPLIT, replace(SPLIT, chunk_keys=64)):
            expected = [case.run((), config=config) for case in cases]
            for results, case in zip(expected, cases, strict=True):
                case.check(results)
            for _ in range(200 if on_hopper() else 1):
                got = [case.call(return_lse=True, config=config) for case in cases]
                for (o, lse), results in zip(got, expected, strict=True):
                    assert torch.equal(o, results["o"]) and torch.equal(lse, results["lse"])


# ---- caches of the rotary columns ----


@releases_memory
def computes_with_rope(heads, tokens, dtype, scales, programs):
    """Check caches of latent columns, in fp8 if there are ``scales``, and of rotary columns."""
    case = latent(lengths(), heads, True, tokens=tokens, dtype=dtype, scales=scales, seed=30)
    for number in programs:
        check(case, replace(SPLIT, num_programs=number))
    check(case, replace(SPLIT, chunk_keys=64))
    if scales:
        del case.options["k_scale"], case.options["v_scale"]
        case._expected.clear()
        check(case)


def computes_pages_with_rope(heads, pages):
    for page in pages:
        kernel = None if page % 32 == 0 else PORTABLE
        case = latent(lengths(), heads, True, scales="tensor", page=page, tokens=2, seed=31)
        check(case, kernel=kernel)
        replace_pages(case)
        case._expected.clear()
        check(case, kernel=kernel)


def computes_with_any_scale_of_keys(heads):
    """Check scales with which latent columns have no weight in the scores, hardly any, or nearly all."""
    for factor in (0.0, 1e-6, 1e-2, 8.0):
        case = latent(lengths(), heads, True, scales="one", seed=32)
        case.options["k_scale"].fill_(factor)
        case.options["v_scale"].fill_(3.0)
        check(case)


def supports_one_buffer_for_both(heads):
    """Check caches that are views of one buffer of bytes: latent columns, padding, and rotary columns of each key."""
    case = latent(lengths(), heads, True, scales="tensor", seed=33)
    expected = check(case)
    plain, rope, (batch, keys, _, columns) = case.k_cache, case.k_rope, case.k_cache.shape
    for padding, kernel in ((16, None), (8, PORTABLE)):
        begin = columns + padding
        whole = torch.full((batch, keys, 1, begin + 2 * rope.shape[3]), 0x7F, dtype=torch.uint8, device=plain.device)
        case.k_cache = whole[..., :columns].view(plain.dtype)
        case.k_cache.view(torch.uint8).copy_(plain.view(torch.uint8))
        case.v_cache = case.k_cache
        case.k_rope = case.options["k_rope"] = whole[..., begin:].view(rope.dtype)
        case.k_rope.copy_(rope)
        got = check(case, kernel=kernel)
        if kernel is None:
            assert torch.equal(got["o"], expected["o"])


def supports_calls_in_a_row_with_rope(heads):
    """Check calls of three cases in turn, in fp8 and not, without another kernel between them."""
    orders = (lengths(), "one"), (lengths()[::-1], None), (lengths()[::-1], "one")
    cases = [latent(lens, heads, True, scales=kind, seed=40 + number) for number, (lens, kind) in enumerate(orders)]
    with torch.no_grad():
        expected = [case.run((), config=SPLIT) for case in cases]
        for results, case in zip(expected, cases, strict=True):
            case.check(results)
        for _ in range(300 if on_hopper() else 1):
            got = [case.call(return_lse=True, config=SPLIT) for case in cases]
            for (o, lse), results in zip(got, expected, strict=True):
                assert torch.equal(o, results["o"]) and torch.equal(lse, results["lse"])


def checks_rope(heads):
    """Check errors, that there is no gradient, and torch.compile."""
    case = latent([4, 2], heads, True, scales="one", seed=34)
    rope = case.k_rope

    def error(kind, text, **options):
        with pytest.raises(kind, match=text):
            case.call(**options)

    error(ValueError, r"k_rope \[2, 3, 1, \d+\] and k_cache .* may differ in the last dim", k_rope=rope[:, :3])
    error(ValueError, r"last dimensions of k_cache .* and k_rope .* must add up to that of q", k_rope=rope[..., 1:])
    error(ValueError, "power of two of at least 16, and that of k_rope", k_rope=torch.cat([rope] * 8, -1))
    error(TypeError, "k_rope", k_rope=rope.float())
    error(ValueError, "k_rope .* must have a contiguous last dimension", k_rope=torch.stack([rope, rope], -1)[..., 0])
    error(ValueError, "the last dimension of q .* and of k_cache", k_rope=None)
    rope.requires_grad_()
    error(ValueError, "no gradient with a cache of torch.float8_e4m3fn")
    case = latent([4, 2], heads, True, seed=34)
    case.q.requires_grad_()
    error(ValueError, "no gradient with k_rope")
    case.q.requires_grad_(False)
    torch._dynamo.reset()
    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(tdkernels.flash_decode, backend=backend, fullgraph=True)
    o, lse = case.call(compiled, return_lse=True)
    case.check({"o": o, "lse": lse})


# ---- other kernels, gradients, torch.compile ----


def falls_back(heads):
    """Check calls that ``latent_kernel`` or method "split" does not support."""
    for options, kernel in (
        (dict(scale=-0.3), PORTABLE), (dict(scale=0.0), PORTABLE), (dict(soft_cap=5.0), PORTABLE),
        (dict(dtype=FP32), PORTABLE), (dict(window=40), FUSED), (dict(window=40, tokens=2), FUSED),
        (dict(dtype=FP32, window=40), FUSED),
    ):
        check(latent(lengths(), heads, **options, seed=11), kernel=kernel)
    check(latent([0, 0], heads, seed=12), kernel=PORTABLE)  # the cache has no room


def computes_gradients(heads, tokens):
    case = latent(lengths(), heads, tokens=tokens, seed=13)
    with poisoned_outputs(), runs(None):
        results = case.run(OPERANDS, config=SPLIT)
    assert {*results} == {"o", "lse", "dq", "dk_cache"}
    case.check(results)
    with torch.no_grad():
        assert torch.equal(case.call(config=SPLIT), results["o"])


def supports_empty_batch():
    for tokens in (None, 2):
        whole = latent([4, 2], 3, tokens=tokens, dtype=FP32)
        q, k_cache = (getattr(whole, name)[:0].detach().requires_grad_() for name in ("q", "k_cache"))
        v_cache = k_cache[..., : whole.value_dim]
        o, lse = tdkernels.flash_decode(q, k_cache, v_cache, whole.lens[:0], return_lse=True, config=SPLIT)
        (o.sum() + lse.sum()).backward()
        assert o.shape == (*q.shape[:-1], whole.value_dim) and lse.shape == q.shape[:-1]
        assert q.grad.shape == q.shape and k_cache.grad.shape == k_cache.shape


def supports_compile():
    """Check that torch.compile traces a call without a graph break, with caches that are parameters."""
    torch._dynamo.reset()
    case = Decode(2, 4, 2, 16, 40, dtype=BF16, seed=14)

    def function(q, k_cache, v_cache, lens):
        o, lse = tdkernels.flash_decode(q * 1.0, k_cache, v_cache, lens, return_lse=True, config=SPLIT)
        return o * 1.0, lse * 1.0

    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for gradients in (False, True):
        case.require(OPERANDS if gradients else ())
        case.k_cache, case.v_cache = (torch.nn.Parameter(cache, gradients) for cache in (case.k_cache, case.v_cache))
        with runs(PORTABLE):
            o, lse = compiled(*case.operands())
        if gradients:
            torch.autograd.backward([o, lse], [case.do, case.dlse])
        case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})
