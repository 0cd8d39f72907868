"""Tuned configs on disk: the user's cache, which the tuner writes, and the tables that come with the package.

    <folder>/<gpu>/<operator>.json

A file that cannot be read or written is reported once and never stops a program: what it would have said is then not
known, and what was tuned is still used by the process that tuned it.
"""

import logging
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tdkernels.autotune import table
from tdkernels.autotune.problem import slug

_log = logging.getLogger("tdkernels")
SHIPPED = Path(__file__).parent / "configs"
_LOCK_S = 10.0

_tuned_here: list = []  # entries of this process, in case the folder cannot be written
_read: dict = {}  # path -> (stamp of the file, entries)
_reported: set = set()


def folder():
    """Where the user's cache is: ``TDKERNELS_CACHE_DIR``, or the platform's place for caches."""
    chosen = os.environ.get("TDKERNELS_CACHE_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs  # here: whoever names a folder does not need it

    return platformdirs.user_cache_path("tdkernels")


def path(operator, gpu):
    """The file of the user's cache for an operator on a kind of GPU."""
    return folder() / slug(gpu) / f"{operator}.json"


def user_entries(operator, gpu):
    """What this user, or this process, has tuned."""
    here = [entry for entry in _tuned_here if table.head(entry) == (operator, gpu)]
    return table.merge(_of(operator, gpu, path(operator, gpu)), here)


def shipped_entries(operator, gpu):
    """What came with the package."""
    return _of(operator, gpu, SHIPPED / slug(gpu) / f"{operator}.json")


def _of(operator, gpu, file):
    """The entries of a file, if they are for the operator and GPU: two names may have the same slug."""
    entries = load(file)
    if entries and table.head(entries[0]) != (operator, gpu):
        report(file, f"is ignored: it is for {' on '.join(table.head(entries[0]))}, not for {operator} on {gpu}")
        return []
    return entries


def files(root=None):
    """The table files below a folder, by default the user's cache."""
    return sorted((folder() if root is None else Path(root)).glob("*/*.json"))


def load(file):
    """The entries of a file; none if there is no such file or it cannot be used, which is reported once."""
    try:
        status = os.stat(file)
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if file in _read and _read[file][0] == stamp:
            return _read[file][1]
        entries, bad = table.from_json(Path(file).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError, table.TableError) as error:
        report(file, f"is ignored: {error}")
        return []
    if bad:
        report(file, f"has {bad} entries that are none; they are ignored")
    _read[file] = stamp, entries
    return entries


def store(entries):
    """Add entries to the user's cache; they win over older ones of the same problem and versions."""
    _tuned_here[:] = table.merge(_tuned_here, entries)
    by_file = {}
    for entry in entries:
        by_file.setdefault(path(entry.problem.operator, entry.problem.gpu), []).append(entry)
    for file, added in by_file.items():
        try:
            add(file, added)
        except (OSError, ValueError, Timeout) as error:  # of a later format, say
            report(file, f"cannot be written, so that later processes will not find what was tuned: {error}")


def add(file, entries):
    """Add entries, of one operator and GPU, to a file, which need not be there.

    Raises:
        OSError: filelock.Timeout, table.LaterFormat, ValueError for entries of several operators or GPUs
    """
    with _locked(file):
        rewrite(file, entries)


def forget():
    """Drop what this process remembers besides the files; for tests."""
    _tuned_here.clear()
    _read.clear()
    _reported.clear()


def clear(operators=None):
    """Delete the tables in the user's cache, or those of some operators; returns the files that are gone.

    Raises:
        OSError: filelock.Timeout
    """
    gone = []
    for file in files():
        entries = load(file)
        if entries and (operators is None or table.head(entries[0])[0] in operators):
            with _locked(file):
                file.unlink(missing_ok=True)
            gone.append(file)
    _tuned_here[:] = [e for e in _tuned_here if operators is not None and table.head(e)[0] not in operators]
    return gone


def report(file, what):
    """Warn about a file, once for each thing that is wrong with it."""
    if (file, what) not in _reported:
        _reported.add((file, what))
        _log.warning("tuned configs: %s %s", file, what)


@contextmanager
def _locked(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock", timeout=_LOCK_S):
        yield


def rewrite(file, added, newest=False):
    """``add`` for a folder that nobody else writes to, without a lock, which would stay there as a file.

    ``newest``: leave one entry for each problem, whatever versions of the kernels there were. Whoever reads the file
    sees the old one or the new one, never half of it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = table.merge(_kept(file, table.head(added[0])), added)
    text = table.to_json(table.newest(entries) if newest else entries)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def _kept(file, head):
    """The entries that stay. What is not ours is put aside; a file of a later version must not be touched."""
    aside = file.with_suffix(".json.bad")
    try:
        entries, bad = table.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except table.LaterFormat:
        raise
    except (UnicodeDecodeError, table.TableError) as error:
        report(file, f"cannot be read ({error}) and is kept as {aside.name}")
        os.replace(file, aside)
        return []
    foreign = bool(entries) and table.head(entries[0]) != head
    if foreign or bad:
        report(file, f"holds what is not for {' on '.join(head)}; it is kept as {aside.name}")
        shutil.copy(file, aside)
    return [] if foreign else entries
