"""Host cost of calls: the number of Python calls and the host time."""

import pytest

from bench.core import call_path, host_time
from tests.support.ranks import DEVICE, on_ranks


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's calls")
def test_repeated_calls_run_less_code_and_kernels_are_not_counted():
    results = on_ranks(2, call_path.measure)[0]
    for name, (first, steady) in results.items():
        assert 0 < steady.calls <= first.calls and 0 < len(steady.files) <= len(first.files), name
        assert not [file for file in first.files if file.endswith("/lang/signals.py")], f"{name}: a kernel is counted"


@pytest.mark.skipif(DEVICE == "cuda", reason="skips kernels, which needs the interpreter")
def test_host_time_of_calls():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_time, "ROUNDS", 1)
        patch.setattr(host_time, "CALLS", 2)
        results = on_ranks(2, host_time.measure)[0]
    assert "tp_moe" in results and not results.keys() & set(host_time.WAITS)
    assert all(0 < us < 1e5 for us in results.values())
