"""Which scales the warp-specialized kernels load for a tile of fp8 operands: on the CPU, with stand-ins for Gluon."""

import ast
import inspect
import itertools
from types import SimpleNamespace

import pytest

from tdkernels.ops.dense.ag_gemm.specialized import partitions as of_ag_gemm
from tdkernels.ops.dense.gemm_rs.specialized import partitions as of_gemm_rs

BLOCK_M, HALF_M, BLOCK_N, HALF_N = 128, 64, 256, 128
ROWS, N, RANKS, ME = 200, 784, 3, 1  # of a shard, of the output
OWN, DATA, WEIGHT = 1 << 40, 2 << 40, 3 << 40  # addresses of scales: of x, of the first slot, of the weight
SLOT = 1 << 30  # bytes of a slot


class Address(int):
    """An address, or a pointer to fp32 values at it: sums count bytes in the first case, values in the second."""

    def to(self, dtype):
        return self

    def __add__(self, number):
        return Address(int(self) + number)


class Pointer(Address):
    def __add__(self, values):
        return Pointer(int(self) + 4 * values)


def function(module, change=("", "")):
    """Return ``scales_of_tile`` for integers of Python, with one change of its source."""
    source = inspect.getsource(module.scales_of_tile.fn).replace(*change)
    gl = SimpleNamespace(
        constexpr=int, int64=None, float32=None, where=lambda condition, one, other: one if condition else other,
    )
    names = {
        "gl": gl, "gluon": SimpleNamespace(jit=lambda fn: fn), "HALF_M": HALF_M,
        "load_rows": lambda ptr, rows, step: [int(ptr) + 4 * row * step for row in range(min(HALF_M, rows))],
        "load_columns": lambda ptr, columns, step: [int(ptr) + 4 * at * step for at in range(min(BLOCK_N, columns))],
        "pointer_to": lambda address, dtype: Pointer(address),
    }
    exec(compile(ast.parse(source), module.__file__, "exec"), names)
    return names["scales_of_tile"]


def check_ag_gemm(x_step, w_step, change=("", "")):
    """Check the addresses of all tiles of all shards, and of items that are the second half of a tile."""
    scales_of_tile = function(of_ag_gemm, change)
    of_x = ME, Pointer(OWN), Address(DATA), ROWS, SLOT
    epilogue = (None, None, N, 0, 0), (None,), of_x, Pointer(WEIGHT), x_step, w_step
    tiles = [(source, m, col) for source in range(RANKS) for m in range(2) for col in (0, BLOCK_N, 3 * BLOCK_N, HALF_N)]
    for source, m, col in tiles:
        base = OWN if source == ME else DATA + source * SLOT
        for which in range(2):
            rows = range(m * BLOCK_M + which * HALF_M, min(m * BLOCK_M + (which + 1) * HALF_M, ROWS))
            expected = [base + 4 * row * x_step for row in rows]
            columns = [WEIGHT + 4 * column * w_step for column in range(col, min(col + BLOCK_N, N))]
            found = scales_of_tile((m * BLOCK_M, col, 4 * source), which, epilogue)
            assert found[:2] == (expected, columns), (source, m, col, which)


def check_gemm_rs(x_step, w_step, change=("", "")):
    """Check the addresses of all tiles of x, which has the rows of all owners."""
    scales_of_tile = function(of_gemm_rs, change)
    epilogue = Pointer(OWN), RANKS * ROWS, Pointer(WEIGHT), N, x_step, w_step
    for row, col in itertools.product(range(0, RANKS * ROWS, 8), range(0, N, BLOCK_N)):
        for which in range(2):
            first = row + which * HALF_M
            expected = [OWN + 4 * at * x_step for at in range(first, min(first + HALF_M, RANKS * ROWS))]
            columns = [WEIGHT + 4 * column * w_step for column in range(col, min(col + BLOCK_N, N))]
            assert scales_of_tile((row, col, 0), which, epilogue) == (expected, columns), (row, col, which)


CHECKS = {"ag_gemm": check_ag_gemm, "gemm_rs": check_gemm_rs}


@pytest.mark.parametrize("operator", CHECKS)
@pytest.mark.parametrize("x_step, w_step", [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_scales_of_every_tile(operator, x_step, w_step):
    CHECKS[operator](x_step, w_step)


MUTANTS = [
    ("ag_gemm", ("place[0] + WHICH * HALF_M", "place[0]")), ("ag_gemm", (" + source * slot_bytes", "")),
    ("ag_gemm", ("source == me", "source != me")), ("ag_gemm", ("place[2] // 4", "place[2]")),
    ("ag_gemm", (" + row * x_step", "")), ("ag_gemm", (" + col * w_step", "")),
    ("ag_gemm", ("weights[2] - col", "weights[2]")), ("gemm_rs", ("place[0] + WHICH * HALF_M", "place[0]")),
    ("gemm_rs", ("rows - row", "rows")), ("gemm_rs", (" + row * x_step", "")), ("gemm_rs", (" + col * w_step", "")),
    ("gemm_rs", ("columns - col", "columns")),
]


@pytest.mark.parametrize("operator, change", MUTANTS, ids=str)
def test_errors_are_found(operator, change):
    module = {"ag_gemm": of_ag_gemm, "gemm_rs": of_gemm_rs}[operator]
    assert inspect.getsource(module.scales_of_tile.fn).count(change[0]) == 1
    with pytest.raises(AssertionError):
        CHECKS[operator](1, 1, change)
