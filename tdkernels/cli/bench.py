"""``python -m tdkernels bench``: run the benchmarks, which are in the folder ``bench`` of the repository."""

import importlib
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def main(options):
    """Return the exit code: 0; 1 if something failed; 2 for arguments that make no sense, or outside a clone."""
    if not all((_ROOT / file).is_file() for file in ("bench/run.py", "pyproject.toml")):
        print(
            "bench: the benchmarks are not part of the installed package; run this in a clone of the repository",
            file=sys.stderr,
        )
        return 2
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    return importlib.import_module("bench.run").main(options)
