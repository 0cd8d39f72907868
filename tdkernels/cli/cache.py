"""``python -m tdkernels cache``: show tuned configs, and carry them from machine to machine."""

import json
import sys

from filelock import Timeout

from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.tunable import operators, plain_ms
from tdkernels.cli.output import console
from tdkernels.cli.suggest import check_known


def main(options):
    """Return the exit code: 0; 1 if something could not be read or written; 2 for an unknown operator."""
    try:
        check_known("operator", getattr(options, "operator", ()), operators())
        return _ACTIONS[options.action](options)
    except (OSError, Timeout, table.LaterFormat) as error:
        print(f"cache {options.action}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"cache {options.action}: {error}", file=sys.stderr)
        return 2


def _path(options):
    print(disk_cache.folder())
    return 0


def _show(options):
    from rich.table import Table

    root = disk_cache.SHIPPED if options.shipped else None
    entries = [entry for file in disk_cache.files(root) for entry in disk_cache.load(file)]
    entries = [entry for entry in entries if _is_wanted(entry.problem, options)]
    if options.json:
        print(json.dumps([as_dict(entry) for entry in entries], indent=2))
        return 0
    view = Table(title=str(disk_cache.folder() if root is None else root), title_justify="left")
    for name in ("problem", "config", "ms", "x unfused", "tuned on"):
        view.add_column(name, justify="right" if name in ("ms", "x unfused") else "left", overflow="fold")
    for entry in entries:
        plain = plain_ms(entry)
        speedup = f"{plain / entry.ms:.2f}" if plain else "?"
        view.add_row(str(entry.problem), _settings(entry.config), f"{entry.ms:.4f}", speedup, entry.when)
    console().print(view if entries else "nothing was tuned yet")
    return 0


def as_dict(entry):
    """An Entry of the cache, as JSON can hold it."""
    whole = json.loads(table.to_json([entry]))
    return {"operator": whole["operator"], "gpu": whole["gpu"], **whole["entries"][0]}


def _is_wanted(problem, options):
    if options.operator and problem.operator not in options.operator:
        return False
    return options.nproc is None or problem.world_size == options.nproc


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
