"""Device functions of flash_decode that read a dense, paged or fp8 cache and multiply the tiles.

An fp8 cache may be read in *pairs*: two adjacent columns of a key as one 16-bit element. The even and the odd columns
are then separate operands: even columns of the keys are multiplied with even columns of the query, odd with odd, and
the softmax weights are multiplied with the even and the odd columns of the values.
"""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.attention.tile import accumulate
from tdkernels.ops.common.gemm_tile import add_product

# Formats of a cache: not fp8; e4m3 (as uint8) converted by the GPU; e4m3 (as uint8) converted with integer operations.
FP8_NONE, FP8_NATIVE, FP8_BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Maximum number of columns of fp32 operands whose products are added in one chain, see ``_add_scores_in_chains``.
_CHAIN = tl.constexpr(128)

# Convert a pair of columns of two keys to fp16: one register with the even column of both keys, one with the odd one.
# Tensor cores need the same column of two keys in one register. The instruction that loads operands from shared memory
# can transpose 16-bit elements but not bytes, so the bytes are separated in registers. One prmt does it here; the
# compiler would move each byte separately.
_SPLIT = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 even, odd;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {even, odd}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


class DecodeTile(NamedTuple):
    """Compile-time tile parameters of the flash_decode kernels, their argument ``TILE``.

    Attributes:
        queries: Query tokens per sequence, Tq.
        group: Query heads per head of the cache.
        d: Elements per head of the keys.
        d1: Columns of the first part of the keys, a power of two.
        d2: Columns of the second part, a power of two, or 0 if there is only one part.
        dv: Elements per head of the values.
        padded_dv: dv, padded to a power of two.
        rows: Query rows of a tile in memory.
        block_m: Query rows of a ``tl.dot``.
        block_n: Keys of a ``tl.dot``.
        soft_cap: Whether scores are capped.
        window: Whether attention is limited to a window.
        precision: ``input_precision`` of ``tl.dot`` for fp32 operands.
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
    """Compile-time format of the caches, argument ``CACHE`` of the flash_decode kernels.

    Attributes:
        page: Keys per page; 0 for a dense cache.
        fp8: FP8_NONE, FP8_NATIVE or FP8_BITS.
        pairs: Whether columns are read in pairs.
        value_is_key: Whether the values are the first columns of the keys.
        scales: Scales of an fp8 cache: 0 for none, 1 for one per tensor, 2 for one per head.
        rope: Whether the second part of the keys has a cache of its own, which is neither fp8 nor scaled.
    """

    page: int
    fp8: int
    pairs: bool
    value_is_key: bool
    scales: int
    rope: bool = False


# ---- loads ----


@td.jit
def _from_e4m3(x, FP8: tl.constexpr):
    """Convert the bits of e4m3 to fp16, exactly. With FP8_BITS, NaN becomes 480."""
    if FP8 == FP8_NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Both formats have the same fields, but the exponent bias of fp16 is larger by 8, hence the factor 2**8.
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@td.jit
def _columns(pairs, FP8: tl.constexpr):
    """Convert a tile of e4m3 read in pairs, and return (even columns, odd columns) in fp16."""
    if FP8 == FP8_NATIVE:
        return tl.inline_asm_elementwise(
            _SPLIT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return _from_e4m3((pairs & 0xFF).to(tl.uint8), FP8), _from_e4m3((pairs >> 8).to(tl.uint8), FP8)


@td.jit
def cache_rows(ptr, rows, there, WIDTH: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr, PAIRS: tl.constexpr):
    """Load [rows, PADDED] of a cache: WIDTH columns, and zeros elsewhere. With PAIRS the result is for ``_columns``.

    Rows are loaded where ``there`` is set.
    """
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
    """Return the number of keys of an entry, clamped to [0, capacity], as int32.

    A 64-bit length is clamped before it is truncated to 32 bits; otherwise 2**32 + 5 would become 5.
    """
    return tl.minimum(tl.maximum(tl.load(lens_ptr + entry, mask=there, other=0), 0), capacity).to(tl.int32)


@td.jit
def key_rows(table_ptr, keys, there, num_pages, stride_block, stride_key, PAGE: tl.constexpr):
    """Return (offsets of keys in a cache, whether each key can be read). The cache is paged if PAGE is not 0.

    A page number outside [0, num_pages) has no memory, so its keys are masked like keys beyond the length.
    """
    if PAGE:
        pages = tl.load(table_ptr + keys // PAGE, mask=there, other=0)
        rows = pages.to(tl.int64) * stride_block + (keys % PAGE).to(tl.int64) * stride_key
        return rows, there & (pages >= 0) & (pages < num_pages)
    else:
        return keys.to(tl.int64) * stride_key, there


@td.jit
def pages_exist(table_ptr, keys, there, num_pages, PAGE: tl.constexpr):
    """Return whether the page of each key is in the cache, to mask the scores.

    This repeats the load in ``key_rows``. The cache modifier keeps the compiler from merging the two loads: Triton's
    pipeliner would treat a merged load as an operand of the dot, and not as a load that the loads of keys and values
    depend on. It would then keep twice as many blocks of these in shared memory, and half as many programs would fit
    on an SM.
    """
    pages = tl.load(table_ptr + keys // PAGE, mask=there, other=0, cache_modifier=".ca")
    return (pages >= 0) & (pages < num_pages)


@td.jit
def load_query(q_ptr, rows, there, D: tl.constexpr, FIRST: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr):
    """Load PADDED columns of query rows starting at FIRST, zero beyond D, in the dtype of the loaded keys."""
    offs = FIRST + tl.arange(0, PADDED)
    mask = there[:, None] & (offs < D)[None, :]
    q = tl.load(q_ptr + rows[:, None] * D + offs[None, :], mask=mask, other=0.0)
    return td.to_float32(q).to(tl.float16) if FP8 else q


# ---- products ----


@td.jit
def query_columns(q, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Return (even columns, odd columns) of query rows with PAIRS, else (all columns, 0)."""
    if PAIRS:
        return tl.split(q.reshape(q.shape[0], WIDTH // 2, 2))
    else:
        return q, 0


@td.jit
def _add_scores_in_chains(scores, q, k, PRECISION: tl.constexpr):
    """Return scores + q @ k.T for fp32 operands, with one chain of additions for every _CHAIN columns.

    The rounding error of one chain grows with its length. Of 576 normal columns, o of 10 sequences with up to 100 keys
    has a relative error of 3.6e-7 with one chain (measured on H200, and the same in an emulation of the additions). In
    the emulation it is 1.4e-7 with chains of 128, 1.2e-7 with chains of 64, and 0.8e-7 with exact scores. Chains of 64
    would need more shared memory for heads of 128: 88 instead of 74 KiB on sm_90.

    ``tl.split`` divides the last dimension, so even and odd columns are separate chains.
    """
    if q.shape[1] > _CHAIN:
        q_even, q_odd = tl.split(q.reshape(q.shape[0], q.shape[1] // 2, 2))
        k_even, k_odd = tl.split(k.reshape(k.shape[0], k.shape[1] // 2, 2))
        scores = _add_scores_in_chains(scores, q_even, k_even, PRECISION)
        return _add_scores_in_chains(scores, q_odd, k_odd, PRECISION)
    else:
        return add_product(scores, q, tl.trans(k), PRECISION)


@td.jit
def add_scores(scores, q, q_odd, k, FP8: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """Return scores + q @ k.T."""
    if PAIRS:
        even, odd = _columns(k, FP8)
        scores = td.dot(q, tl.trans(even), scores, PRECISION)
        return td.dot(q_odd, tl.trans(odd), scores, PRECISION)
    elif k.dtype == tl.float32 and PRECISION == "ieee":
        return _add_scores_in_chains(scores, q, k, PRECISION)
    else:
        return td.dot(q, tl.trans(k), scores, PRECISION)


@td.jit
def add_values(acc, acc_odd, rescale, p, v, FP8: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """Return acc * rescale + p @ v, as (even columns, odd columns) with PAIRS, else (all columns, unused)."""
    if PAIRS:
        even, odd = _columns(v, FP8)
        p = p.to(tl.float16)
        acc_odd = td.dot(p, odd, acc_odd * rescale[:, None], PRECISION)
        return td.dot(p, even, acc * rescale[:, None], PRECISION), acc_odd
    else:
        return accumulate(acc * rescale[:, None], p, v, PRECISION), acc_odd
