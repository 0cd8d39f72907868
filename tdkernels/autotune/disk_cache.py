"""Tuned configs on disk: the user's cache, which the tuner writes, and the tables shipped with the package.

    <folder>/<gpu>/<operator>.json

A file that cannot be read or written causes one warning and no error. If a file cannot be read, its entries are
missing. If it cannot be written, the process that tuned a config still uses it.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Container, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tdkernels.autotune import table
from tdkernels.autotune.problem import slug

_log = logging.getLogger("tdkernels")
SHIPPED = Path(__file__).parent / "configs"
_LOCK_S = 10.0

_tuned_here: list = []  # entries that this process tuned, in case the folder cannot be written
_read: dict = {}  # path -> (modification time, size and inode of the file, entries)
_reported: set = set()


def folder() -> Path:
    """Return the folder of the user's cache: ``TDKERNELS_CACHE_DIR``, or the platform's cache folder."""
    chosen = os.environ.get("TDKERNELS_CACHE_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs  # imported here because it is not needed if TDKERNELS_CACHE_DIR is set

    return platformdirs.user_cache_path("tdkernels")


def path(operator: str, gpu: str) -> Path:
    """Return the file of the user's cache for an operator on a GPU model."""
    return folder() / slug(gpu) / f"{operator}.json"


def user_entries(operator: str, gpu: str) -> list[table.Entry]:
    """Return the entries of the user's cache, and those that this process tuned."""
    here = [entry for entry in _tuned_here if table.head(entry) == (operator, gpu)]
    return table.merge(_entries_for(operator, gpu, path(operator, gpu)), here)


def shipped_entries(operator: str, gpu: str) -> list[table.Entry]:
    """Return the entries shipped with the package."""
    return _entries_for(operator, gpu, SHIPPED / slug(gpu) / f"{operator}.json")


def _entries_for(operator, gpu, file):
    """Return the entries of a file if they are for the operator and GPU. Two GPU names may have the same slug."""
    entries = load(file)
    if entries and table.head(entries[0]) != (operator, gpu):
        report(file, f"is ignored: it is for {' on '.join(table.head(entries[0]))}, not for {operator} on {gpu}")
        return []
    return entries


def files(root: str | os.PathLike | None = None) -> list[Path]:
    """Return the sorted table files below a folder, which defaults to the user's cache."""
    return sorted((folder() if root is None else Path(root)).glob("*/*.json"))


def load(file: str | os.PathLike) -> list[table.Entry]:
    """Return the entries of a file. If it does not exist, return an empty list; if it is unusable, also warn once."""
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
        report(file, f"has {bad} invalid entries; they are ignored")
    _read[file] = stamp, entries
    return entries


def store(entries: Sequence[table.Entry]) -> None:
    """Add entries to the user's cache. They replace older entries with the same problem and versions."""
    _tuned_here[:] = table.merge(_tuned_here, entries)
    by_file: dict[Path, list[table.Entry]] = {}
    for entry in entries:
        by_file.setdefault(path(entry.problem.operator, entry.problem.gpu), []).append(entry)
    for file, added in by_file.items():
        try:
            add(file, added)
        except (OSError, ValueError, Timeout) as error:  # such as table.LaterFormat
            report(file, f"cannot be written, so that later processes will not find the tuned configs: {error}")


def add(file: Path, entries: Sequence[table.Entry]) -> None:
    """Add entries of one operator and GPU to a file, which is created if it does not exist.

    Raises:
        OSError: If the file cannot be read or written.
        filelock.Timeout: If another process holds the lock for too long.
        table.LaterFormat: If the file was written by a later version of this library.
        ValueError: If the entries are for several operators or GPUs.
    """
    with _locked(file):
        rewrite(file, entries)


def forget() -> None:
    """Clear the in-memory state of this module. For tests."""
    _tuned_here.clear()
    _read.clear()
    _reported.clear()


def clear(operators: Container[str] | None = None) -> list[Path]:
    """Delete the tables of some operators in the user's cache, or all tables, and return the deleted files.

    Raises:
        OSError: If a file cannot be deleted.
        filelock.Timeout: If another process holds the lock for too long.
    """
    deleted = []
    for file in files():
        entries = load(file)
        if entries and (operators is None or table.head(entries[0])[0] in operators):
            with _locked(file):
                file.unlink(missing_ok=True)
            deleted.append(file)
    _tuned_here[:] = [e for e in _tuned_here if operators is not None and table.head(e)[0] not in operators]
    return deleted


def report(file: object, what: str) -> None:
    """Log a warning about a file, once for each text."""
    if (file, what) not in _reported:
        _reported.add((file, what))
        _log.warning("tuned configs: %s %s", file, what)


@contextmanager
def _locked(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock", timeout=_LOCK_S):
        yield


def rewrite(file: Path, added: Sequence[table.Entry], newest: bool = False) -> None:
    """Add entries to a file as ``add`` does, but without a lock, which would leave a lock file in the folder.

    Use it only if no other process writes to the folder. The file is replaced atomically: a reader sees either the old
    or the new content.

    Args:
        file: The file.
        added: Entries of one operator and GPU.
        newest: Whether to keep only the newest entries for each problem (``table.newest``), for any version of the
            kernels.
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
    """Return the entries of a file that are kept.

    If the file holds anything else, save a copy of it first. A file of a later version raises ``LaterFormat``.
    """
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
        report(file, f"holds entries that are invalid or not for {' on '.join(head)}; it is kept as {aside.name}")
        shutil.copy(file, aside)
    return [] if foreign else entries
