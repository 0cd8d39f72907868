"""How kernels of flash_decode read a cache, paged or of float8, and multiply what they have read.

An fp8 cache may be read in *pairs*, two columns of a key as 16 bits. Even and odd columns are then multiplied apart,
those of keys with the query's, and the weights with those of values.
"""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td

# What uint8 stands for in a cache: nothing, e4m3 that the GPU converts, e4m3 that is converted by integers.
FP8_NONE, FP8_NATIVE, FP8_BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# fp16 of the even column of two keys, and of the odd one. Tensor cores want a column of two keys in one register, and
# what reads shared memory in that order turns elements of 16 bits, but not bytes. So bytes are parted in registers
# only, by one instruction here, while the compiler would move each of them by itself.
_SPLIT = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 even, odd;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {even, odd}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


class DecodeTile(NamedTuple):
    """What a kernel of flash_decode is compiled for, of a tile; its argument ``TILE``.

    Args:
        queries: of a sequence, Tq
        group: query heads of a cache's head
        d: elements of a head of keys, in two parts of d1 and d2
        dv: of values, in padded_dv
        rows: of a tile in memory
        block_m, block_n: query rows and keys of a product
        soft_cap, window: whether there is one
        precision: of a product of fp32 operands, as of ``tl.dot``
    """

    queries: int
    group: int
    d: int
    d1: int
    d2: int
    dv: int
    padded_dv: int
    rows: int
    block_m: int
    block_n: int
    soft_cap: bool
    window: bool
    precision: str


class CacheForm(NamedTuple):
    """How a kernel of flash_decode reads a cache; its argument ``CACHE``.

    Args:
        page: keys of a page, 0 for a cache without pages
        fp8: FP8_NONE, FP8_NATIVE or FP8_BITS
        pairs: columns are read two at a time
        value_is_key: values are the first columns of the keys
        scales: of an fp8 cache: 0 for none, 1 for a tensor's, 2 for a head's
    """

    page: int
    fp8: int
    pairs: bool
    value_is_key: bool
    scales: int


# ---- reading ----


@td.jit
def _from_e4m3(x, FP8: tl.constexpr):
    """fp16 of the bits of e4m3, exact; NaN becomes 480 where it is done by integers."""
    if FP8 == FP8_NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # The same fields, but for a bias that is larger by 8: multiplied by 2**8 at the end.
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@td.jit
def _columns(pairs, FP8: tl.constexpr):
    """(even columns, odd columns) in fp16, of e4m3 that was read two columns at a time."""
    if FP8 == FP8_NATIVE:
        return tl.inline_asm_elementwise(
            _SPLIT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return _from_e4m3((pairs & 0xFF).to(tl.uint8), FP8), _from_e4m3((pairs >> 8).to(tl.uint8), FP8)


@td.jit
def cache_rows(ptr, rows, there, WIDTH: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr, PAIRS: tl.constexpr):
    """[rows, PADDED] of a cache, of which WIDTH columns are there; zeros elsewhere. For ``_columns`` if in PAIRS."""
    STEP: tl.constexpr = 2 if PAIRS else 1
    rows_ptr = ptr + rows
    if PAIRS:
        rows_ptr = rows_ptr.to(tl.pointer_type(tl.uint16))
    offs = tl.arange(0, PADDED // STEP)
    mask = there[:, None]
    if WIDTH != PADDED:
        mask &= (offs < WIDTH // STEP)[None, :]
    tile = tl.load(rows_ptr[:, None] + offs[None, :], mask=mask, other=0)
    return _from_e4m3(tile, FP8) if FP8 and not PAIRS else tile


@td.jit
def num_keys(lens_ptr, entry, there, capacity):
    """Number of keys of an entry, from 0 to ``capacity``, as int32.

    A length of 64 bits is clamped before it is cut to 32, or 2**32 + 5 would count as 5.
    """
    return tl.minimum(tl.maximum(tl.load(lens_ptr + entry, mask=there, other=0), 0), capacity).to(tl.int32)


@td.jit
def key_rows(table_ptr, keys, there, num_pages, stride_block, stride_key, PAGE: tl.constexpr):
    """(offsets of keys in a cache, whether each key can be read); the cache is paged if PAGE is not 0.

    A page outside [0, num_pages) has no memory in the cache, so a key in one is masked like a key beyond the length.
    """
    if PAGE:
        pages = tl.load(table_ptr + keys // PAGE, mask=there, other=0)
        rows = pages.to(tl.int64) * stride_block + (keys % PAGE).to(tl.int64) * stride_key
        return rows, there & (pages >= 0) & (pages < num_pages)
    else:
        return keys.to(tl.int64) * stride_key, there


@td.jit
def pages_exist(table_ptr, keys, there, num_pages, PAGE: tl.constexpr):
    """Whether the page of each key is in the cache, for masking its scores.

    Another load than that of ``key_rows``, told apart from it by its cache modifier. If one load served both, Triton's
    pipeliner would take it for an operand of the product, and not for one that the loads of keys and values wait for:
    it then keeps twice as many blocks of these in shared memory, and half as many programs fit an SM.
    """
    pages = tl.load(table_ptr + keys // PAGE, mask=there, other=0, cache_modifier=".ca")
    return (pages >= 0) & (pages < num_pages)


@td.jit
def load_query(q_ptr, rows, there, D: tl.constexpr, FIRST: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr):
    """PADDED columns of query rows from FIRST on, as far as they go, in the type that the cache is read as."""
    offs = FIRST + tl.arange(0, PADDED)
    mask = there[:, None] & (offs < D)[None, :]
    q = tl.load(q_ptr + rows[:, None] * D + offs[None, :], mask=mask, other=0.0)
    return td.to_float32(q).to(tl.float16) if FP8 else q


# ---- multiplying ----


@td.jit
def query_columns(q, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """(even columns, odd columns) of query rows, for keys in PAIRS; else (all, nothing)."""
    if PAIRS:
        return tl.split(q.reshape(q.shape[0], WIDTH // 2, 2))
    else:
        return q, 0


@td.jit
def add_scores(scores, q, q_odd, k, FP8: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """scores + q @ k.T"""
    if PAIRS:
        even, odd = _columns(k, FP8)
        scores = td.dot(q, tl.trans(even), scores, PRECISION)
        return td.dot(q_odd, tl.trans(odd), scores, PRECISION)
    else:
        return td.dot(q, tl.trans(k), scores, PRECISION)


@td.jit
def add_values(acc, acc_odd, shrink, p, v, FP8: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """acc * shrink + p @ v; its (even columns, odd columns) if in PAIRS, else (all, nothing)."""
    if PAIRS:
        even, odd = _columns(v, FP8)
        p = p.to(tl.float16)
        acc_odd = td.dot(p, odd, acc_odd * shrink[:, None], PRECISION)
        return td.dot(p, even, acc * shrink[:, None], PRECISION), acc_odd
    else:
        return td.dot(td.from_float32(p, v.dtype), v, acc * shrink[:, None], PRECISION), acc_odd
