"""The benchmark of gemm_ar_rms_norm: a rehearsal on CPU ranks, and its rows."""

import json

import pytest

from bench.core import points
from bench.dense import norm
from tdkernels.launch import RankPool


def test_methods_are_checked_and_timed(tmp_path):
    with RankPool(2, "cpu") as pool:
        tables = {shape: norm.rows(shape, *pool.run(norm.measure, shape, 1)[0]) for shape in norm.REHEARSAL}
    for shape, table in tables.items():
        expected = {"torch", "gemm_ar", "fused", "fused, 8 warps", "separate", "tdkernels", *norm.FLOORS}
        assert {row["method"] for row in table} == expected and all(row["ms"] > 0 for row in table)
        assert all((row["speedup"] is None) == (row["method"] in norm.FLOORS) for row in table)
        assert {(row["m"], row["n"], row["k"]) for row in table} == {shape}
        assert norm.line(shape, table, False).startswith(f"{'x'.join(map(str, shape))}: torch ")
        assert norm.line(shape, table, True) == ""
    folder = tmp_path / "testx2"
    folder.mkdir()
    (folder / "gemm_ar_norm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    assert points.read(tmp_path) == []  # they are not rows of a dense operator with GEMM and collective


def test_rows_of_graphs():
    times = {"ms": 0.02, "host_ms": 0.01}
    found = [("torch", False, times), ("torch", True, times), ("fused", True, {"ms": 0.01, "host_ms": 0.01})]
    table = norm.rows((4, 8192, 28672), found, {"separate": "not captured"})
    assert {row["name"] for row in table} == {"llama-70b down"} and table[2]["speedup"] == pytest.approx(2.0)
    assert table[3]["absent"] == "not captured" and table[3]["ms"] is None
    text = norm.line((4, 8192, 28672), table, True)
    assert text == "4x8192x28672, in CUDA graphs: torch 20.0, fused 10.0, separate – us"


def test_wrong_results_are_not_timed():
    """A method that omits the residual is an error, not a time."""
    with RankPool(2, "cpu") as pool, pytest.raises(Exception, match="fused: wrong"):
        pool.run(measure_without_residual)


def measure_without_residual():
    with pytest.MonkeyPatch.context() as patch:
        made = norm.methods
        patch.setattr(
            norm, "methods",
            lambda shape: made(shape) | {"fused": lambda s: made(shape)["fused"](_without_residual(s))},
        )
        norm.measure((2, 32, 32), 1)


def _without_residual(s):
    return norm.SimpleNamespace(**vars(s) | {"residual": None})
