"""``python -m tdkernels trace``: start ranks, record one launch of an operator, show what its programs did and when."""

import re
import sys

import torch

from tdkernels.cli.output import console
from tdkernels.cli.parser import TRACED
from tdkernels.cli.suggest import check_known
from tdkernels.cli.tune import DTYPES

_TIMEOUT_S = 600.0
_REPETITIONS = {"cuda": 7, "cpu": 3}
_MAX_RANKS = 128


def main(options):
    """Return the exit code: 0; 1 if something failed on the way; 2 for arguments that make no sense."""
    from tdkernels.launch import RankError

    try:
        if options.draw is not None:
            from tdkernels.trace.perfetto import load

            trace, path = load(options.draw), options.draw
        else:
            trace, path = _record(options)
    except (ValueError, OSError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    _print(trace)
    print(f"for https://ui.perfetto.dev or chrome://tracing: {path}")
    return 0 if options.no_picture else _draw(trace, path)


def _record(options):
    """Record as the options say: the Trace, and where it was saved."""
    from tdkernels.launch import RankError, RankPool
    from tdkernels.solo import enter_solo_mode
    from tdkernels.trace.perfetto import save
    from tdkernels.trace.recording import record_operator
    from tdkernels.trace.timeline import make_trace

    shape, ranks, device = _problem(options)
    options.out.mkdir(parents=True, exist_ok=True)
    if device == "cpu":
        print("CPU ranks interpret the kernels: the order of events is real, the times say nothing about a GPU.")
    repetitions = options.repetitions or _REPETITIONS[device]
    with RankPool(1 if options.solo else ranks, device, timeout_s=_TIMEOUT_S) as pool:
        try:
            if options.solo:
                pool.run(enter_solo_mode, ranks, options.link and options.link * 1e9)
            recordings = pool.run(
                record_operator, options.operator, shape, DTYPES[options.dtype], options.config, repetitions,
                options.layout,
            )
        except RankError as error:
            if isinstance(error.exceptions[error.rank], ValueError):  # what only a rank could find out
                raise error.exceptions[error.rank] from None
            raise
    trace = make_trace(recordings)
    path = options.out / f"{_file_name(trace)}.json"
    save(trace, path)
    return trace, path


def _problem(options):
    """(M, N and K, number of ranks, kind of device); ValueError where they make no sense."""
    from tdkernels.autotune.problem import Problem
    from tdkernels.autotune.tunable import tunable
    from tdkernels.launch import pick_device
    from tdkernels.solo import why_not_solo

    if options.operator is None:
        raise ValueError(f"no operator is named; give one of {', '.join(TRACED)}")
    check_known("operator", [options.operator], TRACED)
    tuned = tunable(options.operator)
    sizes = "x".join(name.upper() for name in tuned.sizes)
    if options.shape is None:
        raise ValueError(f"no shape is given; give --shape {sizes}")
    if not re.fullmatch(r"[1-9]\d*" + r"x[1-9]\d*" * (len(tuned.sizes) - 1), options.shape):
        raise ValueError(
            f"--shape must be {len(tuned.sizes)} positive whole numbers, {sizes}, not {options.shape!r}"
        )
    if options.repetitions is not None and options.repetitions < 1:
        raise ValueError(f"--repetitions must be at least 1, not {options.repetitions}")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out: {options.out} is not a folder")
    shape = tuple(map(int, options.shape.split("x")))
    if (reason := why_not_solo([options.operator], options.solo, options.link)) is not None:
        raise ValueError(reason)
    ranks = options.solo or _num_ranks(options)
    device = pick_device(options.device, 1 if options.solo else ranks)
    layout = options.layout or tuned.layouts[0]
    problem = Problem.on(torch.device("cpu"), options.operator, shape, DTYPES[options.dtype], layout, ranks, ranks)
    reason = tuned.why_not(problem)
    if reason is not None:
        raise ValueError(f"{options.operator} {options.shape}: {reason}")
    return shape, ranks, device


def _num_ranks(options):
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    text = options.world_size
    if text == "auto":
        return gpus if gpus > 1 else 2
    if not text.isdigit() or not 2 <= int(text) <= _MAX_RANKS:
        raise ValueError(f"--world-size must be auto or a number from 2 to {_MAX_RANKS}, not {text!r}")
    if int(text) > gpus > 1:
        raise ValueError(f"--world-size: {text} ranks need as many GPUs, and torch sees {gpus} (--device cpu: none)")
    return int(text)


def _file_name(trace):
    from tdkernels.autotune.problem import slug

    about = trace.about
    gpu = slug(about["gpu"].removeprefix("NVIDIA "))
    ranks = f"-one-of-{about['one_of']}" if "one_of" in about else f"x{about['world_size']}"
    return f"{about['operator']}-{about['shape']}-{about['dtype']}-{gpu}{ranks}"


def _print(trace):
    from tdkernels.trace.summary import headline, tables

    (title, columns, rows), waits = tables(trace)
    by_rank, *quantities = zip(columns, *rows, strict=True)  # a column for each rank: there are more quantities
    _print_table(title, by_rank, quantities)
    _print_table(*waits)
    print(headline(trace))
    print(f"config: {trace.about['config']}")


def _print_table(title, columns, rows):
    try:
        from rich.table import Table
    except ImportError:  # where torch is installed and nothing else should be
        print("\n".join([title, *("\t".join(line) for line in [columns, *rows])]))
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None]):
        table.add_row(*row, end_section=following is not None and following[0] != row[0] and "program" in columns)
    console().print(table)


def _draw(trace, path):
    from tdkernels.trace.plot import NoMatplotlib, draw

    picture = path.with_suffix(".png")
    try:
        draw(trace, picture)
    except NoMatplotlib as error:
        print(f"trace: {error}; then python -m tdkernels trace --draw {path}", file=sys.stderr)
        return 1
    print(f"picture: {picture}")
    return 0
