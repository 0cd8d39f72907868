"""The benchmarks of the dense operators, on the GPUs of this machine.

Every measurement becomes a line of DIR/<gpu>x<number>/<op>.jsonl. With fewer than two GPUs this is a rehearsal on two
CPU ranks, whose times mean nothing and are not kept.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench import dense, harness  # noqa: E402
from bench.shapes import GROUPS, Shape, select  # noqa: E402
from tdkernels.launch import RankError, RankPool  # noqa: E402

_BURST_MS = 15.0
_REHEARSAL_SHAPE = Shape(256, 128, 128, "rehearsal")
_COLUMNS = {  # of the printed table: title, field, format
    "shape": ("shape", ""), "method": ("method", ""), "ms": ("ms", ".4f"), "host ms": ("host_ms", ".4f"),
    "TFLOP/s": ("tflops", ".0f"), "GB/s": ("wire_gbps", ".0f"), "speed-up": ("speedup", ".3f"),
    "floor ms": ("floor_ms", ".4f"), "efficiency": ("efficiency", ".3f"),
}  # fmt: skip


def _arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    comma = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--ops", type=comma, default=",".join(dense.OPERATORS), help="operators, by commas")
    parser.add_argument("--shapes", type=comma, default=",".join(GROUPS), help="groups, or sizes as MxNxK, by commas")
    parser.add_argument("--nproc", type=int, default=None, help="number of GPUs; all of them if left out")
    parser.add_argument("--rounds", type=int, default=10, help="bursts of each method")
    parser.add_argument("--backward", action="store_true", help="measure the backward as well")
    parser.add_argument(
        "--config", type=json.loads, action="append", default=[], metavar="JSON",
        help='fields of the forward\'s config to change, as one more method: {"tiles": {"block_n": 128}}; repeatable',
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="where the rows go")
    arguments = parser.parse_args()
    for name in arguments.ops:
        if name not in dense.OPERATORS:
            parser.error(f"--ops: {name!r} is none of {', '.join(dense.OPERATORS)}")
    for name in arguments.shapes:
        if name not in GROUPS and not re.fullmatch(r"\d+x\d+x\d+", name):
            parser.error(f"--shapes: {name!r} is neither MxNxK nor one of {', '.join(GROUPS)}")
    return arguments


def _revision():
    """The commit, with a + if files differ from it."""

    def git(*command):
        run = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "tdkernels") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("TDKERNELS_GIT_REVISION", "unknown")


def _cases(arguments, ranks, rehearsal):
    for operator in arguments.ops:
        for backward in (False, True) if arguments.backward else (False,):
            for shape in [_REHEARSAL_SHAPE] if rehearsal else select(arguments.shapes, operator):
                yield dense.Case(operator, shape, ranks, backward)


def _measure_all(pool, cases, arguments, rehearsal):
    """The rows, and what went wrong; rows are written as soon as there are any."""
    machine = pool.run(harness.machine)[0]
    link_gbps = pool.run(harness.link_rate)[0]
    if link_gbps:
        print(f"{machine['num_gpus']} x {machine['gpu']}, best link rate {link_gbps:.0f} GB/s each way", flush=True)
    common = {**machine, "rounds": arguments.rounds, "git": _revision()}
    rounds, burst_ms = (2, 0) if rehearsal else (arguments.rounds, _BURST_MS)
    rows, failures = [], []
    for case in cases:
        overrides = [] if case.backward else arguments.config
        try:
            found = pool.run(dense.measure, case, overrides, rounds, burst_ms)[0]
        except RankError as err:
            failures.append(f"{case}: {err}")
            print(failures[-1], file=sys.stderr, flush=True)
            if not pool.usable:
                break
            continue
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        new = [{**row, **common, "date": date} for row in dense.rows(case, found, link_gbps)]
        rows += new
        if not rehearsal:
            _append(new, arguments.out)
        print(f"{case}: " + ", ".join(f"{row['method']} {_cell(row['ms'], '.4f')}" for row in new) + " ms", flush=True)
    return rows, failures


def _append(rows, folder):
    slug = re.sub(r"[^a-z0-9]+", "-", rows[0]["gpu"].lower().removeprefix("nvidia ")).strip("-")
    path = folder / f"{slug}x{rows[0]['num_gpus']}" / f"{rows[0]['op']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _cell(value, spec):
    return "-" if value is None else format(value, spec)


def _print_table(title, rows):
    lines = []
    for row in rows:
        shown = {**row, "shape": f"{row['shape']} {row['name']}".strip()}
        if row["absent"]:
            shown["method"] += f" (absent: {row['absent']})"
        lines.append([_cell(shown[field], spec) for field, spec in _COLUMNS.values()])
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print("\n".join([title, "\t".join(_COLUMNS), *map("\t".join, lines)]))
        return
    table = Table(title=title)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("shape", "method") else "right")
    for line, following in zip(lines, [*lines[1:], None]):
        table.add_row(*map(Text, line), end_section=following is not None and following[0] != line[0])
    Console(width=None if sys.stdout.isatty() else 170).print(table)


def main():
    arguments = _arguments()
    gpus = torch.cuda.device_count()
    rehearsal = gpus < 2
    ranks = 2 if rehearsal else arguments.nproc or gpus
    warning = "Rehearsal on 2 CPU ranks, for want of GPUs: these times mean nothing, and nothing is written."
    if rehearsal:
        print(warning, flush=True)
    elif ranks < 2:
        sys.exit("--nproc: at least 2 GPUs are needed")
    with RankPool(ranks, "cpu" if rehearsal else "cuda") as pool:
        rows, failures = _measure_all(pool, _cases(arguments, ranks, rehearsal), arguments, rehearsal)
    for operator, direction in dict.fromkeys((row["op"], row["pass"]) for row in rows):
        chosen = [row for row in rows if (row["op"], row["pass"]) == (operator, direction)]
        _print_table(f"{operator} {direction}, {ranks} x {chosen[0]['gpu']}", chosen)
    if rehearsal:
        print(warning)
    for failure in failures:
        print(f"failed: {failure.splitlines()[0]}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
