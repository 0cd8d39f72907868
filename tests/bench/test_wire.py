"""The benchmark of wire compression: a rehearsal on CPU ranks."""

from bench.dense import wire
from tdkernels.launch import RankPool


def test_wire_compression_is_measured():
    """Every method is timed, and the error of the compressed call is that of fp8."""
    with RankPool(2, "cpu") as pool:
        tables = {name: pool.run(wire.measure, name, shapes[0], 1, False)[0] for name, shapes in wire.REHEARSAL.items()}
    for operator, (found, error) in tables.items():
        methods = {"two_shot", "wire"} if operator == "all_reduce" else {"pipelined", "wire 1", "wire 4", "gemm"}
        assert found.keys() >= {"tdkernels", *methods} and all(ms > 0 for ms in found.values())
        assert 0.01 < error < 0.04
        assert wire._line(operator, (8, 4, 2), found, error).startswith(f"{operator} 8x4x2: tdkernels ")
