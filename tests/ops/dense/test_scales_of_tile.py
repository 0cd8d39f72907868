"""Which scales the warp-specialized kernels load for a tile of fp8 operands: on the CPU, with stand-ins for Gluon."""

import ast
import inspect
from types import SimpleNamespace

import pytest

from tdkernels.ops.dense.ag_gemm.specialized import partitions as of_ag_gemm
from tdkernels.ops.dense.gemm_rs.specialized import partitions as of_gemm_rs

BLOCK_M, HALF_M, BLOCK_N, HALF_N = 128, 64, 256, 128
ROWS, N, RANKS, ME = 200, 784, 3, 1  # of a shard, of the output
OWN, DATA, WEIGHT = 1 << 40, 2 << 40, 3 << 40  # addresses: scales of x, symmetric memory, scales of the weight
SLOT, OFFSET = 1 << 30, 1 << 20  # bytes of a slot, offset of the scales in it


class Address(int):
    """An address, or a pointer to fp32 values at it: sums count bytes in the first case, values in the second."""

    def to(self, dtype):
        return self

    def __add__(self, number):
        return Address(int(self) + number)


class Pointer(Address):
    def __add__(self, values):
        return Pointer(int(self) + 4 * values)


def function(module, name, change=("", ""), **names):
    """Return a function of the partitions for integers of Python, with one change of its source."""
    source = inspect.getsource(getattr(module, name).fn)
    assert change[0] in source
    source = source.replace(*change) if change[0] else source
    gl = SimpleNamespace(
        constexpr=int, int64=None, float32=None, where=lambda condition, one, other: one if condition else other,
    )
    names |= {"gl": gl, "gluon": SimpleNamespace(jit=lambda fn: fn), "BLOCK_M": BLOCK_M, "HALF_M": HALF_M}
    names |= {
        "load_scales": lambda x_ptr, rows, w_ptr, columns, x_step, w_step: (
            [int(x_ptr) + 4 * row * x_step for row in range(min(HALF_M, rows))],
            [int(w_ptr) + 4 * column * w_step for column in range(min(BLOCK_N, columns))],
        ),
        "data_at": lambda ctx, half, rank: Address(DATA + half), "pointer_to": lambda address, dtype: Pointer(address),
    }
    exec(compile(ast.parse(source), module.__file__, "exec"), names)
    return names[name]


def check_ag_gemm(x_step, w_step, change=("", "")):
    """Check the addresses of all tiles of all shards, and of items that are the second half of a tile."""
    tiles = [(source, m, col) for source in range(RANKS) for m in range(2) for col in (0, BLOCK_N, 3 * BLOCK_N, HALF_N)]
    place = lambda item, order, weights: (*tiles[item][:2], 0, N, tiles[item][2], True)  # noqa: E731
    scales_of_tile = function(of_ag_gemm, "scales_of_tile", change, _place_of=place)
    of_x = None, 7, Pointer(OWN), ROWS, SLOT, OFFSET
    epilogue = (ME,), None, (None,), of_x, Pointer(WEIGHT), x_step, w_step
    for item, (source, m, col) in enumerate(tiles):
        base = OWN if source == ME else DATA + 7 + source * SLOT + OFFSET
        for which in range(2):
            rows = range(m * BLOCK_M + which * HALF_M, min(m * BLOCK_M + (which + 1) * HALF_M, ROWS))
            expected = [base + 4 * row * x_step for row in rows]
            columns = [WEIGHT + 4 * column * w_step for column in range(col, min(col + BLOCK_N, N))]
            assert scales_of_tile(2 * item, which, epilogue) == (expected, columns), (source, m, col, which)


def check_gemm_rs(x_step, w_step, change=("", "")):
    """Check the addresses of all tiles of all owners, each of which has a segment of the rows."""
    row_of = lambda row, owner: owner * ROWS + row  # noqa: E731
    places = [(m * BLOCK_M, col) for m in range(2) for col in range(0, N, BLOCK_N)]
    item_place = function(
        of_gemm_rs, "_place_of_item", place_of=lambda tile, *_: places[tile],
        row_in_segments=lambda row, owner, ranks, segment: row_of(row, owner),
    )
    scales_of_tile = function(of_gemm_rs, "scales_of_tile", change, _place_of_item=item_place)
    problem = ROWS, N, 5, 8, ROWS
    epilogue = problem, RANKS, ME, Pointer(OWN), RANKS * ROWS, Pointer(WEIGHT), x_step, w_step
    for item in range(len(places) * RANKS):
        (row, col), owner = places[item // RANKS], (ME + 1 + item % RANKS) % RANKS
        for which in range(2):
            first = row_of(row, owner) + which * HALF_M
            expected = [OWN + 4 * at * x_step for at in range(first, min(first + HALF_M, RANKS * ROWS))]
            columns = [WEIGHT + 4 * column * w_step for column in range(col, min(col + BLOCK_N, N))]
            assert scales_of_tile(item, which, epilogue) == (expected, columns), (item, which)


CHECKS = {"ag_gemm": check_ag_gemm, "gemm_rs": check_gemm_rs}


@pytest.mark.parametrize("operator", CHECKS)
@pytest.mark.parametrize("x_step, w_step", [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_scales_of_every_tile(operator, x_step, w_step):
    CHECKS[operator](x_step, w_step)


MUTANTS = [
    ("ag_gemm", (" + WHICH * HALF_M", "")), ("ag_gemm", (" + source * slot_bytes", "")), ("ag_gemm", (" + offset", "")),
    ("ag_gemm", ("source == order[0]", "source != order[0]")), ("ag_gemm", (" + col * epilogue[6]", "")),
    ("ag_gemm", ("n - col", "n")), ("gemm_rs", ("row += WHICH * HALF_M", "pass")), ("gemm_rs", ("rows - row", "rows")),
    ("gemm_rs", (" + row * epilogue[6]", "")), ("gemm_rs", ("problem[1] - col", "problem[1]")),
]


@pytest.mark.parametrize("operator, change", MUTANTS, ids=str)
def test_errors_are_found(operator, change):
    with pytest.raises(AssertionError):
        CHECKS[operator](1, 1, change)
