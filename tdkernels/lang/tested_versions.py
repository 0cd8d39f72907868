"""The versions of Triton on whose internals the library relies, and what it does with another one."""

import functools
import logging

import triton

_log = logging.getLogger(__name__)
# What is kept from launch to launch depends on internals of Triton. tests/runtime/test_triton_launcher.py compares it
# with what the launcher of the installed version does; these are the versions with which it has passed (make test, make
# test-newest).
TESTED_VERSIONS = ("3.6", "3.7", "3.8")
_reported_slow_launches = False


@functools.cache
def triton_is_tested():
    """Whether the version of Triton that is installed is one of TESTED_VERSIONS."""
    return ".".join(triton.__version__.split(".")[:2]) in TESTED_VERSIONS


def may_keep_launches():
    """Whether what one launch has found out may serve the next; if not, say so, since launches take the host longer."""
    if triton_is_tested():
        return True
    report_slow_launches(f"it was tested with triton {', '.join(TESTED_VERSIONS)}")
    return False


def report_slow_launches(why):
    """Log a warning, once a process."""
    global _reported_slow_launches
    if not _reported_slow_launches:
        _reported_slow_launches = True
        _log.warning(
            "tdkernels leaves kernel launches to triton %s, which takes the host longer: %s", triton.__version__, why
        )
