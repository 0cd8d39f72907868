"""The hash of a tuned entry covers all that is timed."""

from tdkernels.autotune.sources import kernel_sources


def names(package):
    return {str(file).partition("/tdkernels/")[2] for file in kernel_sources(f"tdkernels.ops.{package}")}


def test_launchers_and_what_they_import_are_covered():
    found = names("experts.tp_moe")
    for file in ("experts/tp_moe/kernel_ag_gemm.py", "experts/tp_moe/steps.py", "experts/grouped_gemm/tile.py",
                 "collectives/kernel_async_all_gather.py"):
        assert f"ops/{file}" in found
    assert "lang/signals.py" in names("experts.grouped_gemm")
    assert "ops/experts/dispatch/low_latency.py" in names("experts.dispatch")
    assert "ops/experts/ep_moe/fused.py" in names("experts.ep_moe")


def test_what_is_not_timed_is_left_out():
    assert not [file for file in names("dense.ag_gemm") if file.endswith(("/validation.py", "/tuning.py"))]
