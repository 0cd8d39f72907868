"""The command line: ``python -m tdkernels``, or ``tdkernels``."""

import importlib
import sys

import tdkernels
from tdkernels.cli.parser import parse


def main(argv: list[str] | None = None) -> int:
    """Run a command of the command line, and return its exit code."""
    options = parse(argv, tdkernels.__version__)
    if options is None:
        return 0
    return importlib.import_module(f"tdkernels.cli.{options.command}").main(options)  # imports torch


if __name__ == "__main__":  # the ranks that a command starts import this file, too
    sys.exit(main())
