"""The count of what a call runs on the host."""

import pytest

from bench.core import call_path
from tests.support.ranks import DEVICE, on_ranks


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's calls")
def test_steady_calls_do_less_and_kernels_are_not_counted():
    found = on_ranks(2, call_path.measure)[0]
    for name, (first, steady) in found.items():
        assert 0 < steady.calls <= first.calls and 0 < len(steady.files) <= len(first.files), name
        assert not [file for file in first.files if file.endswith("/lang/signals.py")], f"{name}: a kernel is counted"
