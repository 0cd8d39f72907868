"""What the adapters share: install something for a ``with`` block."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def during_block(
    install: Callable[[], Any], uninstall: Callable[[], Any], is_installed: Callable[[], bool]
) -> Iterator[None]:
    """Install for a ``with`` block. If it is installed already, it stays so after the block."""
    was_installed = is_installed()
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()
