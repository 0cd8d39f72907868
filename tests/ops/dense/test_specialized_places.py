"""Where the work items of the warp-specialized kernels are, with the real order of tiles, for all of them."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from tdkernels.ops.common import gemm_tile
from tdkernels.ops.common.tile_config import SPECIALIZED_TILE
from tdkernels.ops.dense import segments
from tdkernels.ops.dense.ag_gemm import kernel as ag_gemm_kernel
from tdkernels.ops.dense.gemm_rs.config import num_tiles_in_pairs
from tdkernels.ops.dense.gemm_rs.specialized import places
from tdkernels.rounding import cdiv
from tests.ops.dense.specialized_protocol import functions_of

BLOCK_M, BLOCK_N = SPECIALIZED_TILE
_LANGUAGE = SimpleNamespace(
    maximum=max, minimum=min, where=lambda condition, one, other: one if condition else other,
    int32=None, constexpr=int,
)


def _code(*sources):
    """Return the functions of sources, run as Python. // and % are not used with negative numbers."""
    names = {"gl": _LANGUAGE, "tl": _LANGUAGE, "gluon": SimpleNamespace(jit=lambda function: function)}
    names |= {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "HALF_M": BLOCK_M // 2}
    for source in sources:
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        exec(compile(tree, "places", "exec"), names)
    return SimpleNamespace(**names)


CODE = _code(
    functions_of(gemm_tile, "swizzle"), functions_of(segments, "row_in_segments"),
    functions_of(ag_gemm_kernel, "tile_by_arrival"), Path(places.__file__).read_text(),
)


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("n", [16, 272, 4624])
def test_pairs_have_each_tile_of_each_rank_once(ranks, n):
    for rows in (1, 64, 129, 320, 1088):
        for group_m in (1, 3, 8, 16):
            for me in (0, ranks - 1):
                _check_pairs(rows, n, ranks, group_m, me)


def _check_pairs(rows, n, ranks, group_m, me):
    problem = rows, n, 1, group_m, rows  # one segment
    count = CODE.num_items_in_pairs(problem, ranks)
    assert count == num_tiles_in_pairs(rows, n, ranks)
    found = {}
    for item in range(count):
        code, first, second, col = CODE.place_of_pair(item, problem, me, ranks)
        number, is_pair = divmod(code, 2)
        tile, step = divmod(number, ranks)
        row, of_tile = CODE.place_of(tile, problem, ranks)
        owner = (me + 1 + step) % ranks
        assert (first, col) == (owner * rows + row, of_tile)
        found[owner, tile] = True
        if not is_pair:
            assert second == first + BLOCK_M // 2 and row + BLOCK_M <= rows
        elif step + 1 < ranks:
            owner = (owner + 1) % ranks
            assert second == owner * rows + row and (owner, tile) not in found
            found[owner, tile] = True
    assert len(found) == ranks * cdiv(rows, BLOCK_M) * cdiv(n, BLOCK_N)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [8, 40, 136, 264, 1000])
def test_tiles_across_shards_are_those_of_all_rows(ranks, rows):
    """With the arguments of ``ag_gemm_specialized_kernel``; those with rows of this rank come first."""
    tile_rows = cdiv(ranks * rows, BLOCK_M)
    for columns in (1, 3, 20):
        for me in range(ranks):
            own = me * rows // BLOCK_M
            tiles = [
                CODE.tile_by_arrival(tile, own, max(tile_rows, 2), 1, columns, 8, 1)
                for tile in range(tile_rows * columns)
            ]
            assert sorted(tiles) == [(row, 0, column) for row in range(tile_rows) for column in range(columns)]
            assert {row for row, _, _ in tiles[:columns]} == {own}
