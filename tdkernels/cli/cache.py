"""``python -m tdkernels cache``: look at tuned configs, and carry them from machine to machine."""

import sys
from pathlib import Path

from filelock import Timeout

from tdkernels.autotune import disk_cache, table


def add_arguments(parser):
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    show = actions.add_parser("show", help="list what was tuned on this machine")
    show.add_argument("operator", nargs="*", help="only these operators")
    show.add_argument("--shipped", action="store_true", help="list what came with the package instead")
    actions.add_parser("path", help="print the folder")
    export = actions.add_parser("export", help="copy the tables into a folder, adding to those that are there")
    export.add_argument("folder", type=Path)
    export.add_argument("operator", nargs="*", help="only these operators")
    export.add_argument(
        "--newest", action="store_true",
        help="leave one entry for each problem in those tables, the newest, instead of one for each version of the "
        "kernels: for tables that are to be shipped",
    )
    merge = actions.add_parser("merge", help="add tables from files or folders to the cache; theirs win")
    merge.add_argument("source", nargs="+", type=Path)
    clear = actions.add_parser("clear", help="delete the cache, or what it has of some operators")
    clear.add_argument("operator", nargs="*", help="only these operators")


def main(options):
    """Exit code 0, or 1 if something could not be read or written."""
    try:
        return _ACTIONS[options.action](options)
    except (OSError, Timeout, table.LaterFormat) as error:
        print(f"cache {options.action}: {error}", file=sys.stderr)
        return 1


def _path(options):
    print(disk_cache.folder())
    return 0


def _show(options):
    from rich.console import Console
    from rich.table import Table

    root = disk_cache.SHIPPED if options.shipped else None
    entries = [entry for file in disk_cache.files(root) for entry in disk_cache.load(file)]
    entries = [entry for entry in entries if not options.operator or entry.problem.operator in options.operator]
    view = Table(title=str(disk_cache.folder() if root is None else root), title_justify="left")
    for name in ("problem", "config", "ms", "x sequence", "versions", "when"):
        view.add_column(name, justify="right" if name in ("ms", "x sequence") else "left", overflow="fold")
    for entry in entries:
        speedup = f"{entry.plain_ms / entry.ms:.2f}" if entry.plain_ms else "?"
        versions = " ".join(f"{name} {version}" for name, version in entry.versions.items())
        view.add_row(str(entry.problem), _settings(entry.config), f"{entry.ms:.4f}", speedup, versions, entry.when)
    Console(width=None if sys.stdout.isatty() else 220).print(view if entries else "nothing was tuned yet")
    return 0


def _settings(config):
    parts = [f"{name}={_settings(value) if isinstance(value, dict) else value}" for name, value in config.items()]
    return " ".join(parts)


def _export(options):
    for file in disk_cache.files():
        entries = disk_cache.load(file)
        if entries and (not options.operator or file.stem in options.operator):
            target = options.folder / file.parent.name / file.name
            disk_cache.rewrite(target, entries, options.newest)
            print(f"{len(entries)} entries in {target}")
    return 0


def _merge(options):
    failed = False
    for source in options.source:
        for file in disk_cache.files(source) if source.is_dir() else [source]:
            try:
                entries, bad = table.from_json(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, table.TableError) as error:
                print(f"{file}: {error}", file=sys.stderr)
                failed = True
                continue
            if entries:
                disk_cache.add(disk_cache.path(*table.head(entries[0])), entries)
            print(f"{len(entries)} entries from {file}" + (f", {bad} were none" if bad else ""))
    return 1 if failed else 0


def _clear(options):
    for file in disk_cache.clear(options.operator or None):
        print(f"deleted {file}")
    return 0


_ACTIONS = {"show": _show, "path": _path, "export": _export, "merge": _merge, "clear": _clear}
