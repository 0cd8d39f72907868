"""Methods of the benchmark of latent caches (MLA): shapes, operands, flash_decode's methods, their check, and floors.

The cache is [B, S, 1, dim] in bf16, and the values are its first dim_v columns. In fp8, these columns are e4m3 with one
scale, and the other ones are a cache of their own in bf16. All query heads read the same head of the cache, so a kernel
reads the cache once and multiplies it with all query rows.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tdkernels
from bench.attention.flash_decode_methods import rows_of_cache, sequence
from bench.core import harness
from tdkernels import FlashDecodeConfig
from tdkernels.launch import rank_device
from tdkernels.ops.attention.flash_decode.config import fused_config
from tdkernels.ops.attention.flash_decode.launch import shape_of

SPLIT, FUSED, WIDE, SELECTED = "split", "fused", "fused, 64 rows", "tdkernels"
COPY, GEMM = FLOORS = "copy", "gemm"
DTYPE, FP8 = torch.bfloat16, torch.float8_e4m3fn
_SPLIT_CONFIG = FlashDecodeConfig(method="split", block_n=32, num_warps=4, num_stages=2)
_WIDE_CONFIG = FlashDecodeConfig("fused", 64, 8, 2, tile_rows=64)
_WIDE_ROWS = 64  # query rows from which ``_WIDE_CONFIG`` is measured
_LEAST = {"cuda": 2048, "cpu": 64}  # smallest dimension of the GEMM


@dataclass(frozen=True)
class Shape:
    """q [batch, heads, dim], or [batch, queries, heads, dim] with several query tokens, and ``keys`` per rank.

    ``page`` is the number of keys in a block of a paged cache; 0 means a dense cache. ``fp8``: whether the first
    ``dim_v`` columns of the cache are fp8.
    """

    batch: int
    heads: int
    keys: int
    queries: int = 1
    page: int = 0
    dim: int = 576
    dim_v: int = 512
    fp8: bool = False

    def __str__(self):
        tokens = f"x{self.queries}" if self.queries > 1 else ""
        pages = f", pages of {self.page}" if self.page else ""
        return f"{self.batch}x{self.heads}x{self.keys}{tokens}{pages}{', fp8' * self.fp8}"

    @property
    def bytes(self):
        """Bytes of the keys of a rank."""
        return self.batch * self.keys * (self.dim * DTYPE.itemsize - self.dim_v * self.fp8)

    @property
    def flops(self):
        """Floating-point operations of both products on a rank; masked scores count."""
        return 2 * self.batch * self.queries * self.heads * self.keys * (self.dim + self.dim_v)


def parse_shape(text):
    """Parse a shape BxHxS, or BxHxSxTq with several query tokens."""
    if not re.fullmatch(r"([1-9]\d*x){2,3}[1-9]\d*", text):
        raise ValueError(f"{text!r} is not BxHxS or BxHxSxTq")
    return Shape(*map(int, text.split("x")))


# ---- operands ----


def inputs(shape, seed):
    """Return q, equal on all ranks, this rank's cache, its values, lengths, pages, and memory for half of the cache."""
    device, ranks = rank_device(), dist.get_world_size()
    own = torch.Generator(device).manual_seed(1000 + seed * ranks + dist.get_rank())
    shared = torch.Generator(device).manual_seed(seed)
    tokens = (shape.queries,) if shape.queries > 1 else ()
    q = torch.randn(shape.batch, *tokens, shape.heads, shape.dim, generator=shared, dtype=DTYPE, device=device)
    rows, table = rows_of_cache(shape, own)
    k, rope, scale = torch.randn(*rows, 1, shape.dim, generator=own, dtype=DTYPE, device=device), None, None
    if shape.fp8:
        k, rope = k[..., : shape.dim_v], k[..., shape.dim_v :].contiguous()
        scale = (k.abs().max() / torch.finfo(FP8).max).float()
        k = (k / scale).to(FP8)
    lens = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=device)
    # Every input set has its own target of the copy. One target would stay in the L2 cache.
    target = torch.empty(shape.bytes // 2, dtype=torch.uint8, device=device) if ranks == 1 else None
    v = k[..., : shape.dim_v]
    return SimpleNamespace(q=q, k=k, v=v, rope=rope, scale=scale, lens=lens, table=table, target=target)


# ---- the methods of flash_decode ----


def configs(shape, s):
    """Return {method: config}; the config of "tdkernels" is the one that a call without a config selects."""
    q = s.q.view(shape.batch, shape.queries, shape.heads, shape.dim)
    found = {SPLIT: _SPLIT_CONFIG, FUSED: fused_config(shape_of(q, s.k, s.v, s.table, s.rope), rank_device())}
    if dist.get_world_size() == 1 and shape.queries * shape.heads >= _WIDE_ROWS:
        found[WIDE] = _WIDE_CONFIG
    return found | {SELECTED: tdkernels.explain("flash_decode", s.q, s.k, s.v, s.lens, s.table, s.rope).config}


def calls(names, of_method):
    """Return {method: call on inputs} for methods with the configs ``of_method``."""
    return {name: _call(None if name == SELECTED else of_method[name]) for name in names}


def _call(config):
    return lambda s: tdkernels.flash_decode(
        s.q, s.k, s.v, s.lens, block_table=s.table, k_scale=s.scale, v_scale=s.scale, k_rope=s.rope, config=config
    )


# ---- the check ----


def attend(s, dtype):
    """Compute attention over this rank's keys in plain torch. Return (o, log-sum-exp in fp32), shaped as q is.

    One sequence is computed at a time, which bounds the memory for scores and converted keys.
    """
    parts = [_attend_one(s, number, dtype) for number in range(len(s.q))]
    o, lse = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return o, lse


def _attend_one(s, number, dtype):
    k = _rows(s.k, s, number).to(dtype)
    if s.rope is not None:
        k = torch.cat(((_rows(s.k, s, number).float() * s.scale).to(dtype), _rows(s.rope, s, number).to(dtype)), -1)
    q = s.q[number].to(dtype)
    scores = (q @ k.T).float() * q.shape[-1] ** -0.5
    if q.dim() == 3:  # [tokens, heads, dim]: the last tokens of the sequence, with a causal mask
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return scores.softmax(-1).to(dtype) @ k[:, : s.v.shape[-1]], scores.logsumexp(-1)


def _rows(cache, s, number):
    """Return the keys [S, columns] of a sequence in a cache."""
    rows = cache[number] if s.table is None else cache[s.table[number]]
    return rows.reshape(-1, cache.shape[-1])[: s.lens[number]]


def references(sets):
    """Return [(inputs, fp32 o for all ranks' keys, errors of plain torch in bf16)]."""
    found = []
    for s in sets:
        exact = _on_all_ranks(s, torch.float32)
        found.append((s, exact, harness.errors(_on_all_ranks(s, DTYPE), exact)))
    return found


def _on_all_ranks(s, dtype):
    if dist.get_world_size() == 1:
        return attend(s, dtype)[0]
    return sequence(lambda s: attend(s, dtype), s)


# ---- floors ----


def floors(shape):
    """Return ({floor: call on inputs}, (M, N, K) of the GEMM).

    The copy reads and writes together as many bytes as the cache has. The GEMM has as many floating-point operations as
    the call. It has more if its dimensions would otherwise be too small for cuBLAS's full rate.
    """
    sizes = m, n, k = gemm_sizes(shape, _LEAST[rank_device().type])
    generator = torch.Generator(rank_device()).manual_seed(0)
    a, b = (
        torch.randn(*size, generator=generator, dtype=DTYPE, device=rank_device()) for size in ((m, k), (n, k))
    )
    return {COPY: _copy_half, GEMM: lambda _: a @ b.T}, sizes


def gemm_sizes(shape, least):
    """Return (M, N, K) with M = N = ``least``, and K a multiple of 64 that is at least as large."""
    return least, least, max(least, 64 * round(shape.flops / (2 * least * least * 64)))


def _copy_half(s):
    return s.target.copy_(s.k.view(torch.uint8).flatten()[: len(s.target)])  # of fp8 caches s.k has 0.8 of the bytes
