"""Method "torch" of flash_decode: results on every path, selection of the path, and the arguments of the kernel."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tdkernels.ops.attention.flash_decode import torch_attention
from tdkernels.ops.attention.flash_decode.operands import Operands
from tdkernels.ops.attention.flash_decode.reference import flash_decode_ref
from tdkernels.ops.attention.flash_decode.torch_attention import FLASH, FLASH_COPIED, FLASH_PAGED, PLAIN, select_path
from tests.ops.attention.flash_decode import torch_cases
from tests.support.ranks import on_ranks

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
needs_pages = pytest.mark.skipif(not torch_attention._TAKES_PAGES, reason="this torch does not read pages in place")


# ---- results ----


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_path(world_size):
    on_ranks(world_size, torch_cases.computes_on_every_path, torch_cases.SPECS)


def test_ranks_may_take_different_paths():
    on_ranks(2, torch_cases.computes_on_different_paths)


# ---- selection of the path ----

GPU = dict(on_gpu=True)


@pytest.mark.parametrize("dtype, cache_dtype, d, dv, changes, path", [
    (BF16, BF16, 128, 128, {}, FLASH),
    (FP16, FP16, 256, 256, {}, FLASH),
    (BF16, BF16, 128, 128, dict(page=16), FLASH_COPIED),
    (BF16, BF16, 128, 128, dict(page=384), FLASH_COPIED),
    pytest.param(BF16, BF16, 128, 128, dict(page=512), FLASH_PAGED, marks=needs_pages),
    (BF16, BF16, 128, 128, dict(page=512, addressable=False), FLASH_COPIED),
    (BF16, BF16, 128, 128, dict(addressable=False), FLASH_COPIED),
    (BF16, BF16, 128, 128, dict(soft_cap=1.0), PLAIN),
    (BF16, BF16, 128, 128, dict(window=8), PLAIN),
    (BF16, BF16, 128, 128, dict(has_flash=False), PLAIN),
    (BF16, FP8, 128, 128, {}, PLAIN),
    (BF16, BF16, 576, 512, {}, PLAIN),
    (BF16, BF16, 264, 264, {}, PLAIN),
    (BF16, BF16, 100, 100, {}, PLAIN),
    (FP32, FP32, 128, 128, {}, PLAIN),
    (FP32, FP32, 128, 128, dict(on_gpu=False), PLAIN),
    (BF16, BF16, 100, 100, dict(on_gpu=False), FLASH),
    (BF16, BF16, 100, 64, dict(on_gpu=False), PLAIN),
])
def test_selection(dtype, cache_dtype, d, dv, changes, path):
    assert select_path(dtype, cache_dtype, d, dv, **{**GPU, **changes}) == path


@pytest.mark.parametrize("hip, capability, expected", [
    (None, (9, 0), True), (None, (8, 0), True), (None, (7, 5), False), ("6.4", (0, 0), False),
])
def test_devices_with_flash_attention(hip, capability, expected, monkeypatch):
    """torch for AMD GPUs has flash attention, but rejects lengths."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch_attention.vendor_attention, "_HAS_FLASH", True)
    monkeypatch.setattr(torch_attention.vendor_attention.gpu, "capability", lambda device: capability)
    assert torch_attention._has_flash.__wrapped__(torch.device("cuda", 0)) == expected
    assert torch_attention._has_flash.__wrapped__(torch.device("cpu")) == (not hip)


def test_addressable_caches():
    """The view by rows that the kernel gets has the same numbers as the cache."""
    x = torch.randn(3, 5, 2, 16, dtype=BF16)
    views = {
        "contiguous": x, "by head": x.transpose(1, 2).contiguous().transpose(1, 2),
        "side by side": torch.stack([x, -x], 2)[:, :, 0], "wider": torch.cat([x, x], -1)[..., :16],
        "one sequence": x[:1], "few keys": x[:, 1:3], "shared": x[:1].expand(3, -1, -1, -1),
    }
    for name, cache in views.items():
        assert torch_attention._is_addressable(cache, cache, None), name
        step = torch_attention._rows_of_sequence(cache)
        rows = torch_attention._as_rows(cache, step)
        for sequence in range(len(cache)):
            assert torch.equal(rows[sequence * step :][: cache.shape[1]], cache[sequence]), name
    odd = torch.cat([x, x[..., :1]], -1)[..., :16]
    assert not torch_attention._is_addressable(odd, odd, None), "rows of 34 bytes"
    shifted = x.flatten()[1:321].view(2, 5, 2, 16)
    assert not torch_attention._is_addressable(shifted, x[:2], None), "begins at 2 bytes"
    assert not torch_attention._is_addressable(views["contiguous"], views["by head"], None), "other rows"
    apart = x.new_zeros(3, 90, 16).as_strided((3, 5, 2, 16), (5 * 32 + 16, 32, 16, 1))
    assert not torch_attention._is_addressable(apart, apart, None), "5.5 rows"
    assert torch_attention._is_addressable(apart, apart, torch.zeros(3, 1)), "pages may be anywhere"


# ---- the kernel for GPUs ----


def fake_flash_attention(
    q, k, v, q_begins, begins, max_q, max_k, dropout, causal, debug_mask, *, scale, seqused_k, block_table=None
):
    """Do what torch's kernel for GPUs does for one query token per sequence; reject what it rejects or misreads."""
    pages = {} if block_table is None else {"block_table": block_table.to("meta")}
    found = torch.ops.aten._flash_attention_forward(  # checks the names of the arguments, and that shapes fit
        *(x.to("meta") for x in (q, k, v, q_begins, begins)), max_q, max_k, dropout, causal, debug_mask, scale=scale,
        seqused_k=seqused_k.to("meta"), **pages,
    )
    batch, heads, _ = q.shape
    kv_heads = k.shape[-2]
    assert max_q == 1 and not (dropout or causal or debug_mask) and heads > kv_heads, "would not split the keys"
    for x in (q_begins, begins, seqused_k, *pages.values()):
        assert x.dtype == torch.int32 and x.stride(-1) == 1
    assert q_begins.tolist() == list(range(batch + 1)) and len(begins) == batch + 1 and len(seqused_k) == batch
    o, lse = torch.zeros_like(q), torch.full((heads, batch), math.inf)  # of sequences without keys
    for entry, (begin, length) in enumerate(zip(begins.tolist(), seqused_k.tolist())):
        assert 0 <= length <= max_k
        if block_table is None:
            keys, values = (x[begin : begin + length].float() for x in (k, v))
        else:
            keys, values = (x[block_table[entry].long()].flatten(0, 1)[:length].float() for x in (k, v))
        if length:
            keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
            scores = torch.einsum("hd,nhd->hn", q[entry].float(), keys) * scale
            o[entry], lse[:, entry] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values), scores.logsumexp(-1)
    assert o.shape == found[0].shape and lse.shape == found[1].shape
    return o, lse, *found[2:]


def draw_call(tokens, heads, kv_heads, page):
    """Return (q, k, v, lens, block table) of five sequences with 0 to all keys, in fp16."""
    generator, capacity = torch.Generator().manual_seed(tokens + heads), 24 if page is None else 3 * page
    lens = torch.tensor([0, 1, 2, capacity, capacity - 5])
    shape = (5, capacity) if page is None else (16, page)
    q, *caches = (
        torch.randn(*sizes, 16, generator=generator).to(FP16)
        for sizes in ((5, tokens, heads), (*shape, kv_heads), (*shape, kv_heads))
    )
    table = None if page is None else torch.randperm(15, generator=generator).view(5, 3).int()
    for cache in caches:
        for sequence, length in enumerate(lens.tolist()):
            if table is None:
                cache[sequence, length:] = torch.nan
            for number, block in enumerate([] if table is None else table[sequence].tolist()):
                cache[block, max(length - number * page, 0) :] = torch.nan
    if table is not None:
        # Pages without keys, and pages outside the cache: one in the middle, and the one with the last keys.
        table[0], table[3, 1], table[4, (capacity - 6) // page] = 15, -1, 1 << 30
    return q, *caches, lens, table


@pytest.mark.parametrize("page", [None, 4, pytest.param(256, marks=needs_pages)])
@pytest.mark.parametrize("tokens, heads, kv_heads", [(1, 6, 2), (1, 3, 3), (4, 3, 3), (4, 4, 1)])
def test_arguments_of_the_kernel_for_gpus(tokens, heads, kv_heads, page, monkeypatch):
    q, k, v, lens, table = draw_call(tokens, heads, kv_heads, page)
    calls = []
    monkeypatch.setattr(torch_attention, "_aten", SimpleNamespace(
        _flash_attention_forward=lambda *args, **options: calls.append(1) or fake_flash_attention(*args, **options)
    ))
    monkeypatch.setattr(torch_attention, "_attend_on_cpu", torch_attention._attend_on_gpu)
    o, lse = torch_attention.attend(Operands(q, k, v, lens, table), (0.3, None, None), None)
    wide = q.double(), k.double(), v.double()
    exact, exact_lse = flash_decode_ref(*wide, lens, block_table=table, scale=0.3, return_lse=True)
    assert calls and o.is_contiguous() and lse.is_contiguous()
    assert torch.equal(lse.isinf(), exact_lse.isinf()) and (lse[0] == -math.inf).all() and not o[0].any()
    torch.testing.assert_close(lse, exact_lse, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(o.double(), exact, atol=2e-3, rtol=2e-3)  # twice the rounding to fp16


# ---- what must not be read, and where the host must not wait ----


@pytest.mark.parametrize("tokens, page", [(1, None), (4, None), (4, 4), (1, 256)])
def test_keys_beyond_the_lengths_are_not_read(tokens, page):
    """The bits of o and lse do not depend on them."""
    q, k, v, lens, table = draw_call(tokens, 6, 2, page)
    found = []
    for other in (math.nan, math.inf, 0.0, 1e4):
        caches = [cache.masked_fill(k.isnan(), other) for cache in (k, v)]
        found.append(torch_attention.attend(Operands(q, *caches, lens, table), (0.3, None, None), None))
    for o, lse in found:
        assert torch.equal(o, found[0][0]) and torch.equal(lse, found[0][1]) and o.isfinite().all()


class RejectsSynchronization(TorchDispatchMode):
    """Raise an error for operators that wait for the device, or whose shape depends on its data."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "item"), name
        assert name != "index" or not any(x is not None and x.dtype == torch.bool for x in args[1]), "index by a mask"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [(0.3, None, None), (0.3, 2.0, 5)], ids=["flash", "plain"])
@pytest.mark.parametrize("tokens, page", [(1, None), (4, None), (4, 4), (4, 256)])
def test_host_does_not_wait(tokens, page, options):
    q, k, v, lens, table = draw_call(tokens, 6, 2, page)
    with RejectsSynchronization():
        o, _ = torch_attention.attend(Operands(q, k, v, lens, table), options, None)
    assert o.isfinite().all()
