"""Compare compiled kernels before and after a change that must not alter them.

    TDKERNELS_KERNEL_DIGESTS=before.txt TRITON_DISABLE_LINE_INFO=1 python -m pytest -q tests/compiled   # old revision
    TDKERNELS_KERNEL_DIGESTS=after.txt TRITON_DISABLE_LINE_INFO=1 python -m pytest -q tests/compiled    # new revision
    python -m tests.support.kernel_digests before.txt after.txt

Each line of a file holds a kernel, a target and the SHA-256 of its PTX or AMD assembly. File names and line numbers are
removed from the hashed text.
"""

import collections
import hashlib
import os
import re
import sys
from pathlib import Path

_VARIABLE = "TDKERNELS_KERNEL_DIGESTS"


def is_recording():
    return _VARIABLE in os.environ


def record(kernel, arch, compiled):
    """Append the digest of a compiled kernel to the file named by the environment variable, if it is set."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        return
    language, comment = ("ptx", "//") if "ptx" in compiled.asm else ("amdgcn", ";")
    text = re.sub(f"{comment}.*", "", compiled.asm[language])
    text = re.sub(r"^\s*\.(?:file|loc|ident)\b.*\n", "", text, flags=re.MULTILINE)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with open(path, "a") as file:
        file.write(f"{kernel.__name__} {arch} {digest}\n")


def compare(before, after):
    """Return the lines that differ between two files, and a summary; each distinct line of a file counts once."""
    old, new = (set(Path(path).read_text().splitlines()) for path in (before, after))
    lines = [f"- {line}" for line in sorted(old - new)] + [f"+ {line}" for line in sorted(new - old)]
    kernels = collections.Counter(line.split()[1] for line in new)
    counts = ", ".join(f"{arch}: {count}" for arch, count in sorted(kernels.items()))
    return lines, f"{len(new)} compiled kernels ({counts}), {len(lines)} lines differ"


def main():
    lines, summary = compare(*sys.argv[1:])
    print(*lines, summary, sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
