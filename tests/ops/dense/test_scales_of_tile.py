"""Which scales the warp-specialized kernels load for a tile of fp8 operands: on the CPU, with stand-ins for Gluon."""

import ast
import inspect
import itertools
from types import SimpleNamespace

import pytest

from tdkernels.ops.dense.ag_gemm.specialized import multiply as of_ag_gemm
from tdkernels.ops.dense.direct_specialized import multiply as of_gemm_rs
from tdkernels.ops.experts.grouped_gemm.specialized import scales as of_group_gemm

BLOCK_M, HALF_M, BLOCK_N, HALF_N = 128, 64, 256, 128
ROWS, N, RANKS, ME = 200, 784, 3, 1  # of a shard, of the output
OWN, DATA, WEIGHT = 1 << 40, 2 << 40, 3 << 40  # addresses of scales: of x, of the gathered rows, of the weight
SLOT = 1 << 30  # bytes of the scales of a shard
STEPS = 7  # of K


class Address(int):
    """An address, or a pointer to fp32 values at it: sums count bytes in the first case, values in the second."""

    def to(self, dtype):
        return self

    def __add__(self, number):
        return Address(int(self) + number)


class Pointer(Address):
    def __add__(self, values):
        return Pointer(int(self) + 4 * values)


class Number(int):
    def to(self, dtype):
        return int(self)

    def __add__(self, other):
        return Number(int(self) + other)

    __radd__ = __add__


def function(module, name, change=("", "")):
    """Return a function of a module for integers of Python, with one change of its source or that of its helpers."""
    helpers = ["_scales_of_shard", "_scales_of_rows", "block_scale_pointers"]
    sources = [inspect.getsource(getattr(module, each).fn) for each in [*helpers, name] if hasattr(module, each)]
    gl = SimpleNamespace(
        constexpr=int, int64=None, float32=None, where=lambda condition, one, other: one if condition else other,
    )

    def load_columns(ptr, columns, step):
        return load_half_columns(ptr, columns, step), load_half_columns(ptr + HALF_N * step, columns - HALF_N, step)

    def load_half_columns(ptr, columns, step):
        return [int(ptr) + 4 * at * step for at in range(min(HALF_N, columns))]

    def load_block_scales(x_ptr, rows, left_ptr, right_ptr, blocks, step):
        of_rows = [int(x_ptr) + 4 * (row * blocks + step) for row in range(min(HALF_M, rows))]
        return of_rows, int(left_ptr) + 4 * step, int(right_ptr) + 4 * step

    names = {
        "gl": gl, "gluon": SimpleNamespace(jit=lambda fn: fn), "HALF_M": HALF_M, "HALF_N": HALF_N, "BLOCK_N": BLOCK_N,
        "load_rows": lambda ptr, rows, step: [int(ptr) + 4 * row * step for row in range(min(HALF_M, rows))],
        "load_columns": load_columns, "load_half_columns": load_half_columns, "load_block_scales": load_block_scales,
        "pointer_to": lambda address, dtype: Pointer(address),
    }
    exec(compile(ast.parse("\n".join(sources).replace(*change)), module.__file__, "exec"), names)
    return names[name]


def halves(base, col, end, step):
    """Return the addresses of the values of both halves of the columns of a tile."""
    return tuple(
        [base + 4 * at * step for at in range(first, min(first + HALF_N, end))] for first in (col, col + HALF_N)
    )


def check_equal(found, expected):
    """Compare addresses. pytest would take seconds to describe the difference, which most tests here provoke."""
    is_equal = found == expected
    assert is_equal


def check_ag_gemm(x_step, w_step, change=("", "")):
    """Check the addresses of all tiles of all shards, and of items that are the second half of a tile."""
    scales_of_tile = function(of_ag_gemm, "scales_of_tile", change)
    of_x = ME, Pointer(OWN), Address(DATA), ROWS, SLOT
    epilogue = (None, None, N, 0, 0), (None,), of_x, Pointer(WEIGHT), STEPS, x_step, w_step
    tiles = [(source, m, col) for source in range(RANKS) for m in range(2) for col in (0, BLOCK_N, 3 * BLOCK_N, HALF_N)]
    for source, m, col in tiles:
        base = OWN if source == ME else DATA + source * SLOT
        for which in range(2):
            rows = range(m * BLOCK_M + which * HALF_M, min(m * BLOCK_M + (which + 1) * HALF_M, ROWS))
            expected = [base + 4 * row * x_step for row in rows]
            columns = halves(WEIGHT, col, N, w_step)
            found = scales_of_tile((m * BLOCK_M, col, 4 * source), which, epilogue)
            check_equal(found[:2], (expected, columns))


def check_across(x_step, w_step, change=("", "")):
    """Check the addresses of tiles with rows of several shards."""
    scales_of_tile = function(of_ag_gemm, "scales_of_tile", change)
    of_x = ME - RANKS, Pointer(OWN), Address(DATA), RANKS * ROWS, SLOT
    epilogue = (None, None, N, 0, 0), (None,), of_x, Pointer(WEIGHT), STEPS, x_step, w_step
    for row, col, which in itertools.product(range(0, RANKS * ROWS, BLOCK_M), (0, 3 * BLOCK_N, HALF_N), range(2)):
        rows = range(row + which * HALF_M, min(row + (which + 1) * HALF_M, RANKS * ROWS))
        found = scales_of_tile((row, col, 0), which, epilogue)
        check_equal(found[:2], ([DATA + 4 * at * x_step for at in rows], halves(WEIGHT, col, N, w_step)))


def check_gemm_rs(x_step, w_step, change=("", "")):
    """Check the addresses of all tiles of x, which has the rows of all owners, and of pairs of halves of tiles."""
    scales_of_tile = function(of_gemm_rs, "scales_of_tile", change)
    epilogue = Pointer(OWN), RANKS * ROWS, Pointer(WEIGHT), N, STEPS, x_step, w_step
    for row, col in itertools.product(range(0, RANKS * ROWS, 8), range(0, N, BLOCK_N)):
        for first, second in ((row, row + HALF_M), (row, row + ROWS)):
            for which, begin in enumerate((first, second)):
                expected = [OWN + 4 * at * x_step for at in range(begin, min(begin + HALF_M, RANKS * ROWS))]
                columns = halves(WEIGHT, col, N, w_step)
                check_equal(scales_of_tile((first, col, second), which, epilogue), (expected, columns))


def check_group_gemm(x_step, w_step, change=("", ""), pair=False):
    """Check the addresses of tiles of several experts, whose weight has one scale, or one for each expert or row."""
    name = "scales_of_pair" if pair else "scales_of_tile"
    scales_of_tile = function(of_group_gemm, name, change)
    for expert_step in (0,) if w_step else (0, 1):
        epilogue = Pointer(OWN), ROWS, Pointer(WEIGHT), N, STEPS, x_step, w_step, expert_step
        for row, pid_n, expert in itertools.product(range(0, ROWS, 24), range(3), (0, 1, 5)):
            base = WEIGHT + 4 * expert * ((2 if pair else 1) * N * w_step + expert_step)
            if pair:
                first = pid_n * HALF_N
                columns = tuple(halves(base + 4 * N * plane * w_step, first, N, w_step)[0] for plane in range(2))
            else:
                columns = halves(base, pid_n * BLOCK_N, N, w_step)
            for which in range(2):
                at = range(row + which * HALF_M, min(row + (which + 1) * HALF_M, ROWS))
                expected = [OWN + 4 * one * x_step for one in at], columns
                check_equal(scales_of_tile((Number(row), pid_n, Number(expert)), which, epilogue), expected)


def check_pair(*args):
    check_group_gemm(*args, pair=True)


CHECKS = {
    "ag_gemm": check_ag_gemm, "across": check_across, "gemm_rs": check_gemm_rs, "group_gemm": check_group_gemm,
    "pair": check_pair,
}


@pytest.mark.parametrize("operator", CHECKS)
@pytest.mark.parametrize("x_step, w_step", [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_scales_of_every_tile(operator, x_step, w_step):
    CHECKS[operator](x_step, w_step)


MUTANTS = [
    ("ag_gemm", ("place[0] + WHICH * HALF_M", "place[0]")), ("ag_gemm", (" + source * scales_bytes", "")),
    ("ag_gemm", ("source == me", "source != me")), ("ag_gemm", ("place[2] // 4", "place[2]")),
    ("ag_gemm", (" + row * x_step", "")), ("ag_gemm", (" + col * w_step", "")),
    ("ag_gemm", ("weights[2] - col", "weights[2]")), ("ag_gemm", ("of_x[3] - row", "of_x[3]")),
    ("gemm_rs", ("place[2 * WHICH]", "place[0]")), ("across", ("source == me", "source == me + 2")),
    ("gemm_rs", ("rows - row", "rows")), ("gemm_rs", (" + row * x_step", "")), ("gemm_rs", (" + col * w_step", "")),
    ("gemm_rs", ("columns - col", "columns")), ("group_gemm", ("place[0] + WHICH * HALF_M", "place[0]")),
    ("group_gemm", ("rows - row", "rows")), ("group_gemm", ("place[1] * BLOCK_N", "place[1] * HALF_N")),
    ("group_gemm", ("(N * step + expert_step)", "N * step")), ("pair", ("2 * N * step", "N * step")),
    ("pair", ("w_ptr + N * step, N - col", "w_ptr, N - col")),
]


@pytest.mark.parametrize("operator, change", MUTANTS, ids=str)
def test_errors_are_found(operator, change):
    with pytest.raises(AssertionError):
        CHECKS[operator](1, 1, change)
        CHECKS[operator](1, 0, change)


# ---- block-wise scales ----


def check_blocks_of_ag_gemm(change=("", "")):
    scales_of_step = function(of_ag_gemm, "scales_of_step", change)
    of_x = ME, Pointer(OWN), Address(DATA), ROWS, SLOT
    epilogue = (None, None, N, 0, 0), (None,), of_x, Pointer(WEIGHT), STEPS, 0, 0
    for source, m, col, which in itertools.product(range(RANKS), range(2), (0, BLOCK_N, 3 * BLOCK_N, HALF_N), range(2)):
        base, first = OWN if source == ME else DATA + source * SLOT, m * BLOCK_M + which * HALF_M
        place = Number(m * BLOCK_M), col, 4 * source
        check_step(scales_of_step(place, 3, which, epilogue), base, first, ROWS, WEIGHT, col, N)


def check_blocks_of_gemm_rs(change=("", "")):
    scales_of_step = function(of_gemm_rs, "scales_of_step", change)
    epilogue = Pointer(OWN), RANKS * ROWS, Pointer(WEIGHT), N, STEPS, 0, 0
    for row, col, which in itertools.product(range(0, RANKS * ROWS, 8), range(0, N, BLOCK_N), range(2)):
        for second in (row + HALF_M, row + ROWS):
            found = scales_of_step((Number(row), col, Number(second)), 3, which, epilogue)
            check_step(found, OWN, second if which else row, RANKS * ROWS, WEIGHT, col, N)


def check_blocks_of_group_gemm(change=("", "")):
    scales_of_step = function(of_group_gemm, "scales_of_step", change)
    epilogue = Pointer(OWN), ROWS, Pointer(WEIGHT), N, STEPS, 0, 0, 0
    for row, pid_n, expert, which in itertools.product(range(0, ROWS, 24), range(4), (0, 1, 5), range(2)):
        found = scales_of_step((Number(row), pid_n, Number(expert)), 3, which, epilogue)
        weight = WEIGHT + 4 * expert * -(-N // HALF_N) * STEPS
        check_step(found, OWN, row + which * HALF_M, ROWS, weight, pid_n * BLOCK_N, N)


def check_blocks_of_pair(change=("", "")):
    scales_of_step = function(of_group_gemm, "scales_of_pair_step", change)
    columns = 3 * HALF_N
    epilogue = Pointer(OWN), ROWS, Pointer(WEIGHT), columns, STEPS, 0, 0, 0
    for row, pid_n, expert, which in itertools.product(range(0, ROWS, 24), range(3), (0, 1, 5), range(2)):
        of_rows, gate, up = scales_of_step((Number(row), pid_n, Number(expert)), 3, which, epilogue)
        at = range(row + which * HALF_M, min(row + (which + 1) * HALF_M, ROWS))
        check_equal(of_rows, [OWN + 4 * (one * STEPS + 3) for one in at])
        assert [gate, up] == [WEIGHT + 4 * ((6 * expert + 3 * plane + pid_n) * STEPS + 3) for plane in range(2)]


def check_step(found, base, first, rows, weight, col, columns):
    """Check the addresses for step 3. If the last half has no columns, its scale is any one that exists."""
    of_rows, left, right = found
    check_equal(of_rows, [base + 4 * (row * STEPS + 3) for row in range(first, min(first + HALF_M, rows))])
    expected = [weight + 4 * (block * STEPS + 3) for block in range(-(-columns // HALF_N))]
    assert left == expected[col // HALF_N]
    assert right == expected[col // HALF_N + 1] if col + HALF_N < columns else right in expected


BLOCKS = {
    "ag_gemm": check_blocks_of_ag_gemm, "gemm_rs": check_blocks_of_gemm_rs, "group_gemm": check_blocks_of_group_gemm,
    "pair": check_blocks_of_pair,
}


@pytest.mark.parametrize("operator", BLOCKS)
def test_block_scales_of_every_tile(operator):
    BLOCKS[operator]()


BLOCK_MUTANTS = [
    *[(operator, ("place[0] + WHICH * HALF_M", "place[0]")) for operator in BLOCKS if operator != "gemm_rs"],
    ("gemm_rs", ("place[2 * WHICH]", "place[0]")),
    *[(operator, ("place[1] * BLOCK_N", "place[1] * HALF_N")) for operator in ("group_gemm",)],
    *[(operator, ("col + HALF_N < columns", "True")) for operator in list(BLOCKS)[:3]],
    ("ag_gemm", ("place[2] // 4", "place[2]")), ("gemm_rs", ("col // HALF_N", "col // HALF_M")),
    ("group_gemm", ("(blocks_n * blocks)", "blocks")),
    ("pair", ("(2 * blocks_n)", "blocks_n")), ("pair", ("gate_ptr + blocks_n * blocks", "gate_ptr")),
]


@pytest.mark.parametrize("operator, change", BLOCK_MUTANTS, ids=str)
def test_errors_in_block_scales_are_found(operator, change):
    with pytest.raises(AssertionError):
        BLOCKS[operator](change)
