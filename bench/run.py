"""Run the operator benchmarks on the GPUs of this machine: `python -m tdkernels bench`, or this file.

Each measurement is appended as a row to DIR/<gpu>x<number>/<op>.jsonl. With too few GPUs the run is a rehearsal on two
CPU ranks, whose times are meaningless and are not written.
"""

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
from bench.collectives import norm  # noqa: E402
from bench.core import harness, measure  # noqa: E402
from bench.core.each_case import measure_all  # noqa: E402
from bench.core.row_files import append  # noqa: E402
from bench.dense import solo  # noqa: E402
from bench.dense.operators import OPERATORS, Case  # noqa: E402
from bench.dense.peers import PEERS  # noqa: E402
from bench.dense.shapes import DEFAULT_GROUPS, GROUPS, Shape, select, takes_tokens  # noqa: E402
from bench.experts import dispatch, ep_moe, grouped_gemm, moe_shapes, scaled_grouped_gemm, tp_moe  # noqa: E402
from bench.report import main as report  # noqa: E402
from tdkernels.cli.output import console  # noqa: E402
from tdkernels.launch import RankPool  # noqa: E402
from tdkernels.solo import why_not_solo  # noqa: E402

RESULTS = ROOT / "bench" / "results"
_MOE_LAYERS = [*tp_moe.OPERATORS, *ep_moe.OPERATORS]
_SEQUENCE_PARALLEL = [*ag_attention.OPERATORS, *ulysses.OPERATORS]
_BURST_MS = 15.0
_REHEARSAL_SHAPE = Shape(256, 128, 128, "rehearsal")
_WARNING = "Rehearsal on {}, because there are too few GPUs: times are meaningless and nothing is written."
_REPLACED = "A rehearsal measures small sizes instead of the requested sizes."
_MAX_REHEARSAL_WORK = 1 << 23  # multiplications of a GEMM; the interpreter takes seconds for this many
_COLUMNS = {  # {title in the printed table: (field, format)}; columns without any value are not printed
    "shape": ("shape", ""), "method": ("method", ""), "ms": ("ms", ".4f"), "p99 ms": ("p99_ms", ".4f"),
    "host ms": ("host_ms", ".4f"), "TFLOP/s": ("tflops", ".0f"), "GB/s": ("wire_gbps", ".0f"),
    "speedup": ("speedup", ".3f"), "efficiency": ("efficiency", ".3f"),
}


def main(options):
    """Measure or report. Return the exit code. ``tdkernels/cli/bench.py`` defines ``options``."""
    began = time.monotonic()
    try:
        folder = _folder(options.out)
        operators, alone, experts, grouped, layers, decode, sequences, norms = _operators_by_family(options.operators)
        others = [*alone, *experts, *grouped, *layers, *decode, *sequences, *norms]
        peers = _peers(options.peers)
        parse_shapes = grouped_gemm.parse_shapes if grouped else _shapes
        shapes = None if layers or decode or sequences or norms else parse_shapes(options.shapes)
        tp_shapes, ep_shapes = moe_shapes.parse(options.shapes, layers) if layers else ([], [])
        tokens = _tokens(options.tokens)
        caches = flash_decode.parse_shapes(options.shapes, tokens) if decode else []
        matrices = norm.parse_shapes(options.shapes) if norms else []
        lengths = sequence_shapes.parse(options.shapes, tokens, sequences) if sequences else {}
        shardings = _names("--sharding", options.sharding, ag_attention.SHARDINGS)
        layer, payloads = dispatch.parse_layer(options.moe), _names("--payload", options.payload, dispatch.PAYLOADS)
        if options.routing not in dispatch.ROUTINGS:
            raise ValueError(f"--routing must be {' or '.join(dispatch.ROUTINGS)}, not {options.routing!r}")
        if options.seconds is not None and not options.seconds > 0:
            raise ValueError(f"--seconds must be more than 0, not {options.seconds:g}")
        if tokens and operators and not any(map(takes_tokens, shapes)):
            raise ValueError("--tokens needs a model in --shapes, such as llama-70b")
        if tokens and layers == tp_moe.OPERATORS:
            raise ValueError("--tokens does not apply to tp_moe: its shapes begin with the number of tokens")
        if (reason := why_not_solo([*operators, *others], options.solo, options.link)) is not None:
            raise ValueError(reason)
        if options.eager and options.solo is None:
            raise ValueError("--eager is for --solo; without --solo, eager calls are always measured")
        if options.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, not {options.rounds}")
        min_ranks = 1 if grouped or decode or sequences == ag_attention.OPERATORS else 2
        rehearsal = torch.cuda.device_count() < (1 if options.solo else min_ranks)
        ranks = 1 if grouped else options.solo or _num_ranks(options.nproc, rehearsal, min_ranks)
        sizes = collectives.parse(options.bytes) if options.bytes else collectives.SIZES
        selected = {operator: select(shapes, operator, tokens) for operator in operators}
        if operators and not any(selected.values()):
            raise ValueError(f"--shapes: {','.join(shapes)} has no shapes for {', '.join(operators)}")
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.report:
        return report.main(folder, ROOT / "bench" if folder == RESULTS else folder)
    warning = _WARNING.format(f"{ranks} CPU rank{'s' * (ranks > 1)}")
    if rehearsal:
        print(warning, flush=True)
        requested = {operator: chosen for operator, chosen in selected.items() if chosen}
        selected = {operator: _rehearsal_shapes(chosen) for operator, chosen in requested.items()}
        if (options.shapes or options.tokens or options.bytes) and (not requested or selected != requested):
            print(_REPLACED, flush=True)
        sizes, matrices = collectives.REHEARSAL_SIZES, norm.REHEARSAL_SHAPES
        layer, tokens = dispatch.REHEARSAL_LAYER, dispatch.REHEARSAL_TOKENS
        shapes = grouped_gemm.rehearsal(shapes) if grouped else shapes
        tp_shapes, ep_shapes = moe_shapes.TP_REHEARSAL, moe_shapes.EP_REHEARSAL
        caches, lengths = flash_decode.REHEARSAL_SHAPES, sequence_shapes.REHEARSAL
    plan = measure.Plan(
        2 if rehearsal else options.rounds, 0 if rehearsal else _BURST_MS, peers, tuple(options.config),
        options.cuda_graph, options.eager,
    )
    cases = [
        *_cases(selected, ranks, options.backward),
        *_supported(collectives.Case(operator, nbytes, ranks) for operator in alone for nbytes in sizes),
        *norm.cases(norms, matrices, ranks),
        *_supported(dispatch.cases(experts, tokens, ranks, layer, payloads, options.routing)),
        *grouped_gemm.cases(grouped, shapes, options.routing, options.backward),
        *scaled_grouped_gemm.cases(grouped, shapes, options.routing),
        *_supported(tp_moe.cases(_of_module(layers, tp_moe), tp_shapes, ranks, options.routing, options.backward)),
        *_supported(
            ep_moe.cases(_of_module(layers, ep_moe), ep_shapes, tokens, ranks, options.routing, options.backward)
        ),
        *_supported(flash_decode.cases(decode, caches, ranks)),
        *_supported(
            ag_attention.cases(
                _of_module(sequences, ag_attention), lengths.get("ag_attention"), shardings, ranks, options.backward
            )
        ),
        *_supported(ulysses.cases(_of_module(sequences, ulysses), lengths, ranks, options.backward)),
    ]
    deadline = None if options.seconds is None else began + options.seconds
    if options.solo is not None:
        return _solo(options, cases, plan, None if rehearsal else folder, deadline)
    with RankPool(ranks, "cpu" if rehearsal else "cuda", timeout_s=min(300.0, options.seconds or 300.0)) as pool:
        rows, failures = _measure_all(pool, cases, plan, None if rehearsal else folder, deadline)
    _print_tables(rows, ranks)
    if rehearsal:
        print(warning)
    elif rows:
        print(f"Rows were written to {folder}. Use --report to generate tables and plots.")
    for failure in failures:
        print(f"failed: {failure.splitlines()[0]}", file=sys.stderr)
    return 1 if failures else 0


def _solo(options, cases, plan, folder, deadline):
    """Measure in solo mode. Return the exit code."""
    common = {"rounds": plan.rounds, "git": revision(), "num_gpus": 1}
    keep = None if folder is None else lambda rows: append(rows, folder, "solo")
    rows, failures = solo.main(cases, options.solo, options.link, plan, keep, common, deadline)
    print("Solo mode: one GPU acted as one of the ranks. No byte crossed a link.")
    if folder is None:
        print(_WARNING.format("a CPU rank"))
    elif rows:
        print(f"Rows were written to {folder}. Use --report to generate tables and plots.")
    return 1 if failures else 0


# ---- arguments ----


def _operators_by_family(names):
    """Return the named operators as lists, one per family; without names all dense operators.

    The families are dense, collectives, dispatch, grouped GEMM, MoE layers, flash_decode, sequence parallel, and norms
    after a collective.
    """
    exclusive = grouped_gemm.OPERATORS, _MOE_LAYERS, flash_decode.OPERATORS, _SEQUENCE_PARALLEL, norm.OPERATORS
    families = OPERATORS, collectives.OPERATORS, dispatch.OPERATORS, *exclusive
    known = [name for family in families for name in family]
    for name in names:
        if name not in known:
            raise ValueError(f"operator must be one of {', '.join(known)}, not {name!r}")
    names = list(dict.fromkeys(names)) or OPERATORS
    local = [name for name in names if name in grouped_gemm.OPERATORS]
    if local and len(local) < len(names):
        raise ValueError(f"{local[0]} runs on one GPU and cannot be combined with other operators")
    if len(names) > 1 and set(names) & set(flash_decode.OPERATORS):
        raise ValueError("flash_decode cannot be combined with other operators")
    for family in (_MOE_LAYERS, _SEQUENCE_PARALLEL, norm.OPERATORS):
        if 0 < sum(name in family for name in names) < len(names):
            raise ValueError(f"{' and '.join(family)} cannot be combined with other operators")
    return [[name for name in names if name in family] for family in families]


def _rehearsal_shapes(shapes):
    """Return the requested shapes if all are small enough for a rehearsal, else the rehearsal shape."""
    small = all(shape.m * shape.n * shape.k <= _MAX_REHEARSAL_WORK for shape in shapes)
    return shapes if small else [_REHEARSAL_SHAPE]


def _of_module(names, module):
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
        raise ValueError(f"--tokens must be whole numbers of at least 1, separated by commas, not {text!r}")
    return [int(count) for count in tokens]


def _names(option, text, known):
    """Parse the comma-separated names of an option; without text return all known names."""
    names = tuple(dict.fromkeys(text.split(","))) if text else known
    for name in names:
        if name not in known:
            raise ValueError(f"{option} must be some of {', '.join(known)}, not {name!r}")
    return names


def _num_ranks(nproc, rehearsal, min_ranks):
    gpus = torch.cuda.device_count()
    if nproc is not None and nproc < min_ranks:
        raise ValueError(f"--nproc must be at least {min_ranks} rank{'s' * (min_ranks > 1)}, not {nproc}")
    if rehearsal:
        return 2
    if nproc is not None and nproc > gpus:
        raise ValueError(f"--nproc: {nproc} ranks need {nproc} GPUs, but torch finds {gpus}")
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
            yield from _supported(Case(operator, shape, ranks, direction) for shape in shapes)


def _supported(cases):
    """Yield the cases that can be measured; print the reason for the others."""
    for case in cases:
        reason = case.why_not()
        if reason is None:
            yield case
        else:
            print(f"{case} is skipped: {reason}", flush=True)


# ---- measuring ----


def revision():
    """Return the commit, with a + if the working tree differs from it."""

    def git(*command):
        run = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "tdkernels") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("TDKERNELS_GIT_REVISION", "unknown")


_CASE_MODULES = (
    collectives, norm, dispatch, grouped_gemm, scaled_grouped_gemm, tp_moe, ep_moe, flash_decode, ag_attention, ulysses,
)
_MODULES = {Case: measure} | {module.Case: module for module in _CASE_MODULES}


def _measure_all(pool, cases, plan, folder, deadline=None):
    """Measure the cases. Return (rows, failures).

    Args:
        folder: where the rows of each case are appended as soon as it is measured, or None.
        deadline: value of time.monotonic() after which no further case is started, or None.
    """
    machine = pool.run(harness.machine)[0]
    link_gbps = pool.run(harness.link_rate)[0]
    if link_gbps:
        print(f"{machine['num_gpus']} x {machine['gpu']}, link rate {link_gbps:.0f} GB/s per direction", flush=True)

    def rows_of(case):
        module = _MODULES[type(case)]
        return module.rows(case, pool.run(module.measure, case, plan)[0], link_gbps)

    common = {**machine, "rounds": plan.rounds, "git": revision()}
    keep = None if folder is None else lambda rows: append(rows, folder)
    return measure_all(pool, cases, rows_of, common, keep, lambda rows: f"{_summary(rows)} ms", deadline)


# ---- output ----


def _cell(value, spec):
    return "-" if value is None else format(value, spec)


def _summary(rows):
    """Return the times of the measured methods in one line."""
    parts = {row["pass"]: [] for row in rows}
    for row in rows:
        if row["ms"] is not None:
            parts[row["pass"]].append(f"{_method(row)} {_cell(row['ms'], '.4f')}")
    return "; ".join(f"{part}: " * (len(parts) > 1) + ", ".join(times) for part, times in parts.items())


def _method(row):
    return f"{row['method']} (graph)" if row["graph"] else row["method"]


def _print_tables(rows, ranks):
    for operator, direction in dict.fromkeys((row["op"], row["pass"]) for row in rows):
        chosen = [row for row in rows if (row["op"], row["pass"]) == (operator, direction)]
        _print_table(f"{operator} {direction}, {ranks} x {chosen[0]['gpu']}", chosen)


def _print_table(title, rows):
    """Print the measured methods as a table, followed by the absent ones with their reasons."""
    measured = [row for row in rows if not row["absent"]]
    columns = {
        name: (field, spec) for name, (field, spec) in _COLUMNS.items()
        if name in ("shape", "method", "ms") or any(row.get(field) is not None for row in measured)
    }
    lines = []
    for row in measured:
        shown = {**row, "shape": _shape(row), "method": _method(row)}
        lines.append([_cell(shown.get(field), spec) for field, spec in columns.values()])
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # rich is optional
        print("\n".join([title, "\t".join(columns), *map("\t".join, lines)]))
    else:
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="left" if column in ("shape", "method") else "right")
        for line, following in zip(lines, [*lines[1:], None]):
            table.add_row(*map(Text, line), end_section=following is not None and following[0] != line[0])
        console(width=170).print(table)  # named layers and CUDA graphs need more than 100 columns
    for row in rows:
        if row["absent"]:
            print(f"{_shape(row)}: {_method(row)} (absent: {row['absent']})")


def _shape(row):
    return f"{row['shape']} {row['name']}".strip()


if __name__ == "__main__":  # ranks import this file, too
    from tdkernels.__main__ import main as command_line

    sys.exit(command_line(["bench", *sys.argv[1:]]))
