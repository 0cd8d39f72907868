"""Where the commands print their tables."""

import sys


def console(stderr: bool = False, width: int = 100):
    """Return a rich Console that is as wide as the terminal, or ``width`` columns wide for a file or a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(width=None if stream.isatty() else width, stderr=stderr)
