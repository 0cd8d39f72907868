"""Versions of Triton on whose internals the library relies. With other versions it uses slower paths."""

import functools
import logging

import triton

_log = logging.getLogger(__name__)
# Cached launches depend on internals of Triton. tests/runtime/test_triton_launcher.py compares them with the installed
# launcher. The test has passed with these versions (make test, make test-newest).
TESTED_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
_reported_slow_launches = False


@functools.cache
def triton_is_tested() -> bool:
    """Return whether the installed version of Triton is one of ``TESTED_VERSIONS``."""
    return ".".join(triton.__version__.split(".")[:2]) in TESTED_VERSIONS


def may_keep_launches() -> bool:
    """Return whether launches may be cached. If not, log a warning, because launches then take more host time."""
    if triton_is_tested():
        return True
    report_slow_launches(f"it was tested with triton {', '.join(TESTED_VERSIONS)}")
    return False


def report_slow_launches(why: str) -> None:
    """Log a warning about slow launches, once per process."""
    global _reported_slow_launches
    if not _reported_slow_launches:
        _reported_slow_launches = True
        _log.warning(
            "tdkernels leaves kernel launches to triton %s, which takes the host longer: %s", triton.__version__, why
        )
