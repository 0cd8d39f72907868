"""Work items of the warp-specialized kernel of ag_gemm, and its default config."""

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch

from tdkernels.ops.common.scaling import LAYOUTS
from tdkernels.ops.common.tile_config import LARGE, SPECIALIZED_TILE
from tdkernels.ops.dense.ag_gemm import config as ag_gemm_config
from tdkernels.ops.dense.ag_gemm.launch_specialized import whole_tiles
from tdkernels.ops.dense.ag_gemm.specialized import partitions
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

BLOCK_N = SPECIALIZED_TILE[1]


def place_of():
    """Return ``_place_of`` for integers of Python, with tiles in the order of their numbers."""
    functions = partitions.columns_of, partitions._place_of
    source = "\n".join(inspect.getsource(function.fn) for function in functions)
    for start in ("second", "third"):
        assert source.count(f"(pid_n >= {start}).to(gl.int32)") == 1
        source = source.replace(f"(pid_n >= {start}).to(gl.int32)", f"int(pid_n >= {start})")
    gl = SimpleNamespace(where=lambda condition, one, other: one if condition else other, minimum=min)
    names = {
        "gl": gl, "gluon": SimpleNamespace(jit=lambda function: function), "BLOCK_N": BLOCK_N, "HALF_N": BLOCK_N // 2,
        "tile_by_arrival": lambda tile, me, ranks, tiles_m, tiles_n, *_: (0, tile // tiles_n, tile % tiles_n),
    }
    exec(compile(ast.parse(source), partitions.__file__, "exec"), names)
    return names["_place_of"]


@pytest.mark.parametrize("sizes", [(1376,), (256, 128), (272, 784, 16), (128, 144, 1)], ids=str)
@pytest.mark.parametrize("num_whole", [0, 1, 7, 100])
def test_work_items_compute_each_column_once(sizes, num_whole):
    tiles_m, columns = 3, [cdiv(n, BLOCK_N) for n in sizes] + [0, 0]
    tiles = tiles_m * sum(columns)
    num_whole = min(num_whole, tiles)
    weights = (columns[0], columns[0] + columns[1], *sizes, *[0] * (3 - len(sizes)))
    order, of = (0, 1, tiles_m, sum(columns), 1, 1, num_whole), place_of()
    found = []
    for item in range(2 * tiles - num_whole):
        _, pid_m, which, n, col, is_whole = of(item, order, weights)
        assert n == sizes[which] and (not is_whole or item < num_whole)
        width = BLOCK_N if is_whole else BLOCK_N // 2
        found += [(pid_m, which, column) for column in range(col, min(col + width, n))]
        assert not is_whole or col + BLOCK_N // 2 < n, "the second half has no columns"
    every = [(m, which, column) for m in range(tiles_m) for which, n in enumerate(sizes) for column in range(n)]
    assert sorted(found) == every


@pytest.mark.parametrize("tiles, bound_by_link, whole", [
    (396, False, 396), (396 + 50, False, 396), (396 + 66, False, 396), (396 + 67, False, 396 + 67),
    (396 + 67, True, 396 + 1), (396 + 50, True, 396 - 16), (30, False, 0), (100, False, 100), (3, True, 0),
    (66, True, 0), (67, True, 67), (132, True, 132), (133, True, 67),
])
def test_number_of_whole_tiles(tiles, bound_by_link, whole):
    assert whole_tiles(tiles, 132, bound_by_link) == whole


@pytest.mark.parametrize("world_size, n, dtype, num_comm", [
    (8, 3584, torch.bfloat16, 64), (8, 1280, torch.float16, 64), (4, 1536, torch.bfloat16, 64),
    (2, 768, torch.bfloat16, 64), (8, 3592, torch.bfloat16, None), (8, 3584, torch.float32, None),
])
def test_default_config_on_hopper(monkeypatch, world_size, n, dtype, num_comm):
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    config = ag_gemm_config.default_config(8192 // world_size, n, 4096, dtype, device, world_size)
    assert config.warp_specialize == (num_comm is not None) and config.transport == "push"
    if num_comm is not None:
        assert (config.tiles, config.num_comm_sms) == (LARGE, num_comm)
    # All tiles run at the same time: one chunk.
    config = ag_gemm_config.default_config(512, 1536, 4096, torch.bfloat16, device, 4)
    assert config.chunk_tiles == 4 and ag_gemm_config.default_config(
        512, 4608, 4096, torch.bfloat16, device, 4
    ).chunk_tiles == 2
    of_fp8 = [
        ag_gemm_config.default_config(512, 1536, 4096, torch.float8_e4m3fn, device, 4, layout=layout)
        for layout in LAYOUTS
    ]
    chunk_tiles = {layout: one.chunk_tiles for layout, one in zip(LAYOUTS, of_fp8, strict=True)}
    assert chunk_tiles == {"scaled": 4, "scaled fast": 4, "scaled by block": 2}
    several_nodes = ag_gemm_config.default_config(8192 // world_size, n, 4096, dtype, device, world_size, num_nodes=2)
    assert not several_nodes.warp_specialize
