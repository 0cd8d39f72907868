"""Add the rows of tokens, and the sums of all ranks, with the warps of a partition of moe_gemm_rs.

Columns are loaded, kept and stored in pairs, as int32, and separated in assembly when they are added. Triton 3.8
separates tensors of 16-bit numbers where they are loaded. Rows that wait for their addition would then take twice as
many registers, more than there are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.memory import pointer_to

_PASSES_HELD = gl.constexpr(32)  # by the lanes of a warp
# One row of 512 columns takes 8 registers of each thread of a warp.
_ROWS_IN_FLIGHT, _MOST_PASSES = gl.constexpr(8), gl.constexpr(4)


@gluon.constexpr_function
def passes_in_flight(rows, few_registers):
    """Return the number of passes whose rows a warp loads at the same time, if a token has ``rows`` rows."""
    in_flight = _ROWS_IN_FLIGHT.value // (2 if few_registers else 1)
    return min(max(in_flight // rows, 1), _MOST_PASSES.value)


@gluon.constexpr_function
def tokens_of_pass(rows, warps, few_registers, columns):
    """Return the number of tokens that warps add in a pass, if each has ``rows`` rows.

    Two warps share a token if its rows would take too many registers otherwise. With at most 256 columns they do not,
    since each of the 32 threads of a warp takes 8 columns.
    """
    return warps // 2 if columns > 256 and (few_registers or rows > 10) else warps


@gluon.constexpr_function
def _columns_of_step(columns, rows, few_registers):
    """Return the number of columns that a warp adds at a time for a token of this rank, which has ``rows`` rows.

    A row of 256 columns takes 4 registers of each thread.
    """
    return min(columns, 256 if 4 * rows <= (32 if few_registers else 72) else 128)


@gluon.constexpr_function
def _layout(tokens, warps, columns):
    """Return the layout of pairs of ``columns`` columns of several tokens. A thread has at most 4 adjacent pairs."""
    pairs = min(max(columns // 64, 1), 4)
    return gl.BlockedLayout([1, pairs], [1, 32], [tokens, warps // tokens], [1, 0])


@gluon.jit
def _hold_assignments(
    tensors, owner, token, end, M_shard, N, CHOICES: gl.constexpr, WARPS: gl.constexpr, AT_ONCE: gl.constexpr,
):
    """Return (places, weights) of the assignments of the next PASSES_HELD passes, in tuples of [AT_ONCE, PASSES_HELD].

    The passes begin with token ``token`` of rank ``owner``. The place of a row is its offset in units of 8 columns. It
    is -1 for an assignment without a row, and for tokens from ``end`` on. Such an assignment has weight 0. There are no
    weights if all are 1.

    A lane holds those of one pass for its warp, so a pass gets them by shuffles. If it loaded them, it would wait,
    because the compiler moves numbers that are the same for all lanes to uniform registers.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [AT_ONCE, WARPS // AT_ONCE], [1, 0])
    within = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
    passes = gl.arange(0, _PASSES_HELD, layout=gl.SliceLayout(0, layout))
    tokens = token + within[:, None] + passes[None, :] * AT_ONCE
    first = (owner * M_shard + tokens).to(gl.int64) * CHOICES
    places: gl.tuple = ()
    weights: gl.tuple = ()
    for j in gl.static_range(CHOICES):
        row = gl.load(tensors[2] + first + j, mask=tokens < end, other=-1)
        if tensors[3] is not None:
            weight = gl.load(tensors[3] + first + j, mask=tokens < end, other=0.0)
            weights += (gl.where(row >= 0, weight, 0.0),)
        places += (gl.where(row >= 0, row * (N // 8), -1),)
    return places, weights


@gluon.jit
def _of_pass(held, number, LAYOUT: gl.constexpr):
    """Return the values [AT_ONCE, 1] of pass ``number`` for each tensor of a tuple."""
    values: gl.tuple = ()
    for j in gl.static_range(len(held)):
        place = gl.full([held[j].shape[0], 1], number, gl.int32, LAYOUT)
        values += (gl.gather(held[j], place, 1),)
    return values


@gluon.jit
def _load_rows(tensors, places, number, pairs, N, LAYOUT: gl.constexpr):
    """Load some pairs of columns of the rows of pass ``number``, in a tuple. There are none after the passes held."""
    of_pass = _of_pass(places, gl.minimum(number, _PASSES_HELD - 1), LAYOUT)
    first = tensors[0].to(gl.pointer_type(gl.int32), bitcast=True) + pairs[None, :]
    inside = (number < _PASSES_HELD) & (pairs < N // 2)[None, :]
    parts: gl.tuple = ()
    for j in gl.static_range(len(places)):
        at = first + of_pass[j].to(gl.int64) * 4
        parts += (gl.load(at, mask=(of_pass[j] >= 0) & inside, other=0),)
    return parts


@gluon.constexpr_function
def _name(dtype):
    """Return the name of a type in PTX."""
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.constexpr_function
def _split_code(dtype):
    """Return the assembly of ``_split``. A bf16 number is the upper half of an fp32 number."""
    if dtype == gl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"


@gluon.jit
def _split(pairs, dtype: gl.constexpr):
    """Return the first and the second number of each pair, in fp32."""
    return gl.inline_asm_elementwise(
        _split_code(dtype), "=f,=f,r", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )


@gluon.jit
def _join(halves, dtype: gl.constexpr):
    """Return pairs of the numbers of two fp32 tensors, rounded to ``dtype``."""
    return gl.inline_asm_elementwise(
        "cvt.rn." + _name(dtype) + "x2.f32 $0, $2, $1;", "=r,f,f", [halves[0], halves[1]], dtype=gl.int32,
        is_pure=True, pack=1,
    )


@gluon.jit
def _weighted_sum(parts, weights, dtype: gl.constexpr):
    """Return the weighted sums of each token's rows in fp32, (of the first columns of all pairs, of the second).

    Assignments without a row add nothing.
    """
    first = gl.zeros_like(parts[0]).to(gl.float32)
    second = first
    for j in gl.static_range(len(parts)):
        a, b = _split(parts[j], dtype)
        if len(weights) > 0:
            a, b = a * weights[j], b * weights[j]
        first, second = first + a, second + b
    return first, second


@gluon.jit
def _place_of(tokens, pairs, end, N):
    """Return (offsets, mask) of pairs of columns of tokens before ``end``, in a tensor [M_shard, N]."""
    offs = tokens[:, None].to(gl.int64) * (N // 2) + pairs[None, :]
    return offs, (tokens < end)[:, None] & (pairs < N // 2)[None, :]


@gluon.jit
def add_for_peer(
    tensors, to, owner, token, end, column, M_shard, N, COLUMNS: gl.constexpr, CHOICES: gl.constexpr,
    WARPS: gl.constexpr, AT_ONCE: gl.constexpr, PASSES: gl.constexpr,
):
    """Sum the rows of the tokens ``token`` to ``end`` - 1 of rank ``owner``, and store COLUMNS columns at ``to``.

    to: address of the sums [M_shard, N]
    AT_ONCE: tokens of a pass
    PASSES: passes whose rows are loaded while the rows of as many passes before are added
    """
    layout: gl.constexpr = _layout(AT_ONCE, WARPS, COLUMNS)
    dtype: gl.constexpr = tensors[1].dtype.element_ty
    tokens = token + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
    pairs = column // 2 + gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, layout))
    for first in range(token, end, _PASSES_HELD * AT_ONCE):
        places, weights = _hold_assignments(tensors, owner, first, end, M_shard, N, CHOICES, WARPS, AT_ONCE)
        parts: gl.tuple = ()
        for i in gl.static_range(PASSES):
            parts += (_load_rows(tensors, places, i, pairs, N, layout),)
        passes = gl.minimum((end - first + AT_ONCE - 1) // AT_ONCE, _PASSES_HELD)
        for number in range(0, passes, PASSES):
            next_parts: gl.tuple = ()
            for i in gl.static_range(PASSES):
                total = _join(_weighted_sum(parts[i], _of_pass(weights, number + i, layout), dtype), dtype)
                next_parts += (_load_rows(tensors, places, number + PASSES + i, pairs, N, layout),)
                offs, mask = _place_of(tokens + i * AT_ONCE, pairs, end, N)
                gl.store(pointer_to(to, gl.int32) + offs, total, mask=mask)
            tokens += PASSES * AT_ONCE
            parts = next_parts


@gluon.jit
def _mask_of(condition):
    """Return -1 if ``condition`` is true, otherwise 0.

    In assembly, so that the compiler does not know it: it would select by the condition again, for each number.
    """
    return gl.inline_asm_elementwise(
        "neg.s32 $0, $1;", "=r,r", [condition.to(gl.int32)], dtype=gl.int32, is_pure=True, pack=1,
    )


@gluon.jit
def _either(part, own, mask):
    """Return ``own`` if the bits of ``mask`` are set, otherwise ``part``, which is 0 in the first case."""
    bits = part.to(gl.int32, bitcast=True) | (own.to(gl.int32, bitcast=True) & mask)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _place_of_step(
    step, token, column, COLUMNS: gl.constexpr, PIECE: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Return (pass, tokens, pairs of columns) of a step of ``add_own``: PIECE columns of one token for each warp."""
    STEPS: gl.constexpr = COLUMNS // PIECE  # of a pass
    number, first = step // STEPS, step % STEPS * (PIECE // 2)
    tokens = token + number * WARPS + gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    pairs = column // 2 + first + gl.arange(0, PIECE // 2, layout=gl.SliceLayout(0, LAYOUT))
    return number, tokens, pairs


@gluon.jit
def _load_step(tensors, parts_at, part_bytes, places, place, end, N, me, RANKS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the rows and the peers' sums of a step of ``add_own``, in two tuples. This rank's own sum is 0."""
    number, tokens, pairs = place
    rows = _load_rows(tensors, places, number, pairs, N, LAYOUT)
    offs, mask = _place_of(tokens, pairs, end, N)
    sums: gl.tuple = ()
    for source in gl.static_range(RANKS):
        at = pointer_to(parts_at + source * part_bytes, gl.int32) + offs
        sums += (gl.load(at, mask=mask & (me != source), other=0),)
    return rows, sums


@gluon.jit
def add_own(
    tensors, parts_at, part_bytes, token, end, column, M_shard, N, me, COLUMNS: gl.constexpr, CHOICES: gl.constexpr,
    RANKS: gl.constexpr, ROUND_OWN: gl.constexpr, WARPS: gl.constexpr, FEW_REGISTERS: gl.constexpr,
):
    """Store COLUMNS columns of z for the tokens ``token`` to ``end`` - 1 of this rank: its own sums plus the peers'.

    parts_at, part_bytes: address of the sums of rank 0, and distance to those of the next rank. They are added in fp32,
        in rank order.

    There are at most _PASSES_HELD passes, because ``end`` - ``token`` is at most the tokens of a signal.
    """
    dtype: gl.constexpr = tensors[1].dtype.element_ty
    PIECE: gl.constexpr = _columns_of_step(COLUMNS, CHOICES + RANKS - 1, FEW_REGISTERS)
    layout: gl.constexpr = _layout(WARPS, WARPS, PIECE)
    z = tensors[1].to(gl.pointer_type(gl.int32), bitcast=True)
    places, weights = _hold_assignments(tensors, me, token, end, M_shard, N, CHOICES, WARPS, WARPS)
    place = _place_of_step(0, token, column, COLUMNS, PIECE, WARPS, layout)
    parts = _load_step(tensors, parts_at, part_bytes, places, place, end, N, me, RANKS, layout)
    for step in range((end - token + WARPS - 1) // WARPS * (COLUMNS // PIECE)):
        place = _place_of_step(step, token, column, COLUMNS, PIECE, WARPS, layout)
        own = _weighted_sum(parts[0], _of_pass(weights, place[0], layout), dtype)
        if ROUND_OWN:
            own = _split(_join(own, dtype), dtype)
        first, second = gl.zeros_like(own[0]), gl.zeros_like(own[0])
        for source in gl.static_range(RANKS):
            part = _split(parts[1][source], dtype)
            mine = _mask_of(me == source)
            first, second = first + _either(part[0], own[0], mine), second + _either(part[1], own[1], mine)
        offs, mask = _place_of(place[1], place[2], end, N)
        # Not earlier: the registers of this step are free now. With others the end of the loop would wait for loads.
        coming = _place_of_step(step + 1, token, column, COLUMNS, PIECE, WARPS, layout)
        parts = _load_step(tensors, parts_at, part_bytes, places, coming, end, N, me, RANKS, layout)
        gl.store(z + offs, _join((first, second), dtype), mask=mask)
