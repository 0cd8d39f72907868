"""The benchmarks of the operators, on the GPUs of this machine: `python -m tdkernels bench`, or this file.

Every measurement becomes a line of DIR/<gpu>x<number>/<op>.jsonl. With fewer than two GPUs this is a rehearsal on two
CPU ranks, whose times mean nothing and are not kept.
"""

import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.attention import ag_attention, flash_decode, ulysses  # noqa: E402
from bench.attention import shapes as sequence_shapes  # noqa: E402
from bench.collectives import cases as collectives  # noqa: E402
from bench.core import harness, measure  # noqa: E402
from bench.dense.operators import OPERATORS, Case  # noqa: E402
from bench.dense.peers import PEERS  # noqa: E402
from bench.dense.shapes import DEFAULT_GROUPS, GROUPS, Shape, select, takes_tokens  # noqa: E402
from bench.experts import dispatch, ep_moe, grouped_gemm, moe_shapes, tp_moe  # noqa: E402
from bench.report import main as report  # noqa: E402
from tdkernels.launch import RankError, RankPool  # noqa: E402

RESULTS = ROOT / "bench" / "results"
_LAYERS = [*tp_moe.OPERATORS, *ep_moe.OPERATORS]  # of experts
_SEQUENCES = [*ag_attention.OPERATORS, *ulysses.OPERATORS]  # divided between the ranks
_BURST_MS = 15.0
_REHEARSAL_SHAPE = Shape(256, 128, 128, "rehearsal")
_WARNING = "Rehearsal on {}, for want of GPUs: these times mean nothing, and nothing is written."
_REPLACED = "A rehearsal measures small sizes of its own instead of the sizes that were asked for."
_MAX_REHEARSAL_WORK = 1 << 23  # multiplications of a GEMM; the interpreter takes seconds for so many
_COLUMNS = {  # of the printed table: title, field, format
    "shape": ("shape", ""), "method": ("method", ""), "ms": ("ms", ".4f"), "host ms": ("host_ms", ".4f"),
    "TFLOP/s": ("tflops", ".0f"), "GB/s": ("wire_gbps", ".0f"), "speed-up": ("speedup", ".3f"),
    "floor ms": ("floor_ms", ".4f"), "efficiency": ("efficiency", ".3f"), "p99 ms": ("p99_ms", ".4f"),
}


def main(options):
    """Measure, or report; the exit code. ``options`` are those of ``tdkernels/cli/bench.py``."""
    began = time.monotonic()
    try:
        folder = _folder(options.out)
        operators, alone, experts, grouped, layers, decode, sequences = _operators(options.operators)
        peers = _peers(options.peers)
        parsed = grouped_gemm.parse_shapes if grouped else _shapes
        shapes = None if layers or decode or sequences else parsed(options.shapes)
        tp_shapes, ep_shapes = moe_shapes.parse(options.shapes, layers) if layers else ([], [])
        tokens = _tokens(options.tokens)
        caches = flash_decode.parse_shapes(options.shapes, tokens) if decode else []
        lengths = sequence_shapes.parse(options.shapes, tokens, sequences) if sequences else {}
        shardings = _some("--sharding", options.sharding, ag_attention.SHARDINGS)
        layer, payloads = dispatch.parse_layer(options.moe), _some("--payload", options.payload, dispatch.PAYLOADS)
        if options.routing not in dispatch.ROUTINGS:
            raise ValueError(f"--routing must be {' or '.join(dispatch.ROUTINGS)}, not {options.routing!r}")
        if options.seconds is not None and not options.seconds > 0:
            raise ValueError(f"--seconds must be more than 0, not {options.seconds:g}")
        if tokens and operators and not any(map(takes_tokens, shapes)):
            raise ValueError("--tokens is for the layers of a model: name one in --shapes, such as llama-70b")
        if tokens and layers == tp_moe.OPERATORS:
            raise ValueError("--tokens is not for tp_moe, whose shapes begin with theirs: name one in --shapes")
        if options.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, not {options.rounds}")
        least = 1 if grouped or decode or sequences == ag_attention.OPERATORS else 2
        rehearsal = torch.cuda.device_count() < least
        ranks = 1 if grouped else _num_ranks(options.nproc, rehearsal, least)
        sizes = collectives.parse(options.bytes) if options.bytes else collectives.SIZES
        selected = {operator: select(shapes, operator, tokens) for operator in operators}
        if operators and not any(selected.values()):
            raise ValueError(f"--shapes: {','.join(shapes)} has nothing for {', '.join(operators)}")
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.report:
        return report.main(folder, ROOT / "bench" if folder == RESULTS else folder)
    warning = _WARNING.format(f"{ranks} CPU rank{'s' * (ranks > 1)}")
    if rehearsal:
        print(warning, flush=True)
        asked = {operator: chosen for operator, chosen in selected.items() if chosen}
        selected = {operator: _rehearsed(chosen) for operator, chosen in asked.items()}
        if (options.shapes or options.tokens or options.bytes) and (not asked or selected != asked):
            print(_REPLACED, flush=True)
        sizes = collectives.REHEARSAL_SIZES
        layer, tokens = dispatch.REHEARSAL_LAYER, dispatch.REHEARSAL_TOKENS
        shapes = grouped_gemm.REHEARSAL_SHAPES if grouped else shapes
        tp_shapes, ep_shapes = moe_shapes.TP_REHEARSAL, moe_shapes.EP_REHEARSAL
        caches, lengths = flash_decode.REHEARSAL_SHAPES, sequence_shapes.REHEARSAL
    plan = measure.Plan(
        2 if rehearsal else options.rounds, 0 if rehearsal else _BURST_MS, peers, tuple(options.config),
        options.cuda_graph,
    )
    cases = [
        *_cases(selected, ranks, options.backward),
        *_possible(collectives.Case(operator, nbytes, ranks) for operator in alone for nbytes in sizes),
        *_possible(dispatch.cases(experts, tokens, ranks, layer, payloads, options.routing)),
        *grouped_gemm.cases(grouped, shapes, options.routing, options.backward),
        *_possible(tp_moe.cases(_among(layers, tp_moe), tp_shapes, ranks, options.routing, options.backward)),
        *_possible(ep_moe.cases(_among(layers, ep_moe), ep_shapes, tokens, ranks, options.routing, options.backward)),
        *_possible(flash_decode.cases(decode, caches, ranks)),
        *_possible(
            ag_attention.cases(
                _among(sequences, ag_attention), lengths.get("ag_attention"), shardings, ranks, options.backward
            )
        ),
        *_possible(ulysses.cases(_among(sequences, ulysses), lengths, ranks, options.backward)),
    ]
    deadline = None if options.seconds is None else began + options.seconds
    with RankPool(ranks, "cpu" if rehearsal else "cuda", timeout_s=min(300.0, options.seconds or 300.0)) as pool:
        rows, failures = _measure_all(pool, cases, plan, None if rehearsal else folder, deadline)
    _print_tables(rows, ranks)
    if rehearsal:
        print(warning)
    elif rows:
        print(f"rows are in {folder}; --report makes tables and plots of them")
    for failure in failures:
        print(f"failed: {failure.splitlines()[0]}", file=sys.stderr)
    return 1 if failures else 0


# ---- arguments ----


def _operators(names):
    """The operators with products, all if none is named; collectives; ways to experts; what is local; layers; decoding;
    sequences.

    Each is a list.
    """
    apart = grouped_gemm.OPERATORS, _LAYERS, flash_decode.OPERATORS, _SEQUENCES
    groups = OPERATORS, collectives.OPERATORS, dispatch.OPERATORS, *apart
    known = [name for group in groups for name in group]
    for name in names:
        if name not in known:
            raise ValueError(f"operator must be one of {', '.join(known)}, not {name!r}")
    names = list(dict.fromkeys(names)) or OPERATORS
    local = [name for name in names if name in grouped_gemm.OPERATORS]
    if local and len(local) < len(names):
        raise ValueError(f"{local[0]} is measured by itself, on one GPU")
    if len(names) > 1 and set(names) & set(flash_decode.OPERATORS):
        raise ValueError("flash_decode is measured by itself")
    for some in (_LAYERS, _SEQUENCES):
        if 0 < sum(name in some for name in names) < len(names):
            raise ValueError(f"{' and '.join(some)} are not measured beside others")
    return [[name for name in names if name in group] for group in groups]


def _rehearsed(shapes):
    """Return the shapes of a rehearsal: those that were asked for if all of them are small, else a shape of its own."""
    small = all(shape.m * shape.n * shape.k <= _MAX_REHEARSAL_WORK for shape in shapes)
    return shapes if small else [_REHEARSAL_SHAPE]


def _among(names, module):
    return [name for name in names if name in module.OPERATORS]


def _peers(text):
    known = (*PEERS, *collectives.PEERS, *dispatch.PEERS, *dict.fromkeys((*flash_decode.PEERS, *ag_attention.PEERS)))
    if text in ("all", "none"):
        return known if text == "all" else ()
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"--peers must be all, none, or some of {', '.join(known)}, not {name!r}")
    return names


def _shapes(text):
    if text is None:
        return DEFAULT_GROUPS
    names = text.split(",")
    for name in names:
        if name not in GROUPS and not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", name):
            raise ValueError(f"--shapes: {name!r} is neither MxNxK nor one of {', '.join(GROUPS)}")
    return names


def _tokens(text):
    if text is None:
        return None
    tokens = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d*", count) for count in tokens):
        raise ValueError(f"--tokens must be whole numbers with ',' between them, at least 1, not {text!r}")
    return [int(count) for count in tokens]


def _some(option, text, known):
    """Names of an option, all that are known if there is no text."""
    names = tuple(dict.fromkeys(text.split(","))) if text else known
    for name in names:
        if name not in known:
            raise ValueError(f"{option} must be some of {', '.join(known)}, not {name!r}")
    return names


def _num_ranks(nproc, rehearsal, least):
    gpus = torch.cuda.device_count()
    if nproc is not None and nproc < least:
        raise ValueError(f"--nproc must be at least {least} rank{'s' * (least > 1)}, not {nproc}")
    if rehearsal:
        return 2
    if nproc is not None and nproc > gpus:
        raise ValueError(f"--nproc: {nproc} ranks need as many GPUs, and torch sees {gpus}")
    return nproc or gpus


def _folder(out):
    if out is None:
        return RESULTS
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: {out} is not a folder")
    return out.resolve()


def _cases(selected, ranks, backward):
    for operator, shapes in selected.items():
        for direction in (False, True) if backward else (False,):
            yield from _possible(Case(operator, shape, ranks, direction) for shape in shapes)


def _possible(cases):
    """The cases that can be measured; the others are said and left out."""
    for case in cases:
        reason = case.why_not()
        if reason is None:
            yield case
        else:
            print(f"{case} is skipped: {reason}", flush=True)


# ---- measuring ----


def revision():
    """The commit, with a + if files differ from it."""

    def git(*command):
        run = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "tdkernels") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("TDKERNELS_GIT_REVISION", "unknown")


_APART = (collectives, dispatch, grouped_gemm, tp_moe, ep_moe, flash_decode, ag_attention, ulysses)
_MODULES = {Case: measure} | {module.Case: module for module in _APART}


def _measure_all(pool, cases, plan, folder, deadline=None):
    """The rows, and what went wrong; rows are written to the folder, if any, as soon as there are some.

    After the deadline, a time.monotonic(), no further case is begun.
    """
    machine = pool.run(harness.machine)[0]
    link_gbps = pool.run(harness.link_rate)[0]
    if link_gbps:
        print(f"{machine['num_gpus']} x {machine['gpu']}, best link rate {link_gbps:.0f} GB/s each way", flush=True)
    common = {**machine, "rounds": plan.rounds, "git": revision()}
    rows, failures = [], []
    for number, case in enumerate(cases):
        if deadline is not None and time.monotonic() > deadline:
            print(f"time is up: {len(cases) - number} of {len(cases)} cases are left out, from {case} on", flush=True)
            break
        module = _MODULES[type(case)]
        try:
            found = pool.run(module.measure, case, plan)[0]
        except RankError as err:
            failures.append(f"{case}: {err}")
            print(failures[-1], file=sys.stderr, flush=True)
            if not pool.usable:
                break
            continue
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        new = [{**row, **common, "date": date} for row in module.rows(case, found, link_gbps)]
        rows += new
        if folder is not None:
            _append(new, folder)
        print(f"{case}: {_in_a_line(new)} ms", flush=True)
    return rows, failures


def _append(rows, folder):
    slug = re.sub(r"[^a-z0-9]+", "-", rows[0]["gpu"].lower().removeprefix("nvidia ")).strip("-")
    path = folder / f"{slug}x{rows[0]['num_gpus']}" / f"{rows[0]['op']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# ---- what is printed ----


def _cell(value, spec):
    return "-" if value is None else format(value, spec)


def _in_a_line(rows):
    parts = {row["pass"]: [] for row in rows}
    for row in rows:
        parts[row["pass"]].append(f"{_method(row)} {_cell(row['ms'], '.4f')}")
    return "; ".join(f"{part}: " * (len(parts) > 1) + ", ".join(words) for part, words in parts.items())


def _method(row):
    return f"{row['method']} (graph)" if row["graph"] else row["method"]


def _print_tables(rows, ranks):
    for operator, direction in dict.fromkeys((row["op"], row["pass"]) for row in rows):
        chosen = [row for row in rows if (row["op"], row["pass"]) == (operator, direction)]
        _print_table(f"{operator} {direction}, {ranks} x {chosen[0]['gpu']}", chosen)


def _print_table(title, rows):
    lines = []
    for row in rows:
        shown = {**row, "shape": f"{row['shape']} {row['name']}".strip(), "method": _method(row)}
        if row["absent"]:
            shown["method"] += f" (absent: {row['absent']})"
        lines.append([_cell(shown.get(field), spec) for field, spec in _COLUMNS.values()])
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # where torch is installed and nothing else should be
        print("\n".join([title, "\t".join(_COLUMNS), *map("\t".join, lines)]))
        return
    table = Table(title=title)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("shape", "method") else "right")
    for line, following in zip(lines, [*lines[1:], None]):
        table.add_row(*map(Text, line), end_section=following is not None and following[0] != line[0])
    Console(width=None if sys.stdout.isatty() else 170).print(table)


if __name__ == "__main__":  # ranks import this file, too
    from tdkernels.__main__ import main as command_line

    sys.exit(command_line(["bench", *sys.argv[1:]]))
