"""The count of what a call runs on the host."""

import pytest

from bench.core import call_path, host_time
from tests.support.ranks import DEVICE, on_ranks


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's calls")
def test_steady_calls_do_less_and_kernels_are_not_counted():
    found = on_ranks(2, call_path.measure)[0]
    for name, (first, steady) in found.items():
        assert 0 < steady.calls <= first.calls and 0 < len(steady.files) <= len(first.files), name
        assert not [file for file in first.files if file.endswith("/lang/signals.py")], f"{name}: a kernel is counted"


@pytest.mark.skipif(DEVICE == "cuda", reason="leaves kernels out, which only the interpreter allows")
def test_host_time_of_calls():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_time, "ROUNDS", 1)
        patch.setattr(host_time, "CALLS", 2)
        found = on_ranks(2, host_time.measure)[0]
    assert "tp_moe" in found and not found.keys() & set(host_time.WAITS)
    assert all(0 < us < 1e5 for us in found.values())
