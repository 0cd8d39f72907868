"""``python -m tdkernels tune``: start ranks, tune, print what was found."""

import json
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.markup import escape

from tdkernels.cli import parser
from tdkernels.cli.output import console
from tdkernels.cli.suggest import check_known

DTYPES = {name: getattr(torch, dtype) for name, dtype in parser.DTYPES.items()}
_BEST = 5
_START_S, _SHAPE_S = 120.0, 300.0  # limits of the ranks


@dataclass(frozen=True)
class Job:
    """One problem to tune."""

    operator: str
    shape: tuple

    def __str__(self):
        return f"{self.operator} {'x'.join(map(str, self.shape))}"


def main(options):
    """Return the exit code: 0; 1 if a shape could not be tuned; 2 for arguments that make no sense."""
    from tdkernels.launch import RankPool, pick_device

    try:
        jobs = _jobs(options)
        _check_layout(jobs, options.layout)
        ranks = _num_ranks(options, jobs)
        device = pick_device(options.device, ranks)
        jobs = _possible(jobs, options, ranks, device)
    except ValueError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    if not jobs:
        print("[]" if options.json else "nothing to tune")
        return 0
    keeps = device != "cpu" or options.keep
    if device == "cpu":
        _say(
            "On CPU ranks an interpreter runs the kernels: this is a rehearsal, its times say nothing about a GPU.",
            options,
        )
    with RankPool(ranks, device, timeout_s=_START_S + _SHAPE_S * len(jobs)) as pool:
        failed, entries = pool.run(
            _tune_all, jobs, options.dtype, options.layout, options.budget, keeps, options.json
        )[0]
    from tdkernels.autotune import disk_cache

    if options.json:
        print(json.dumps(entries, indent=2))
    else:
        print(f"kept in {disk_cache.folder()}" if keeps else "nothing is kept: this was a rehearsal (--keep keeps it)")
    return 1 if failed else 0


def _say(text, options):
    """Print a remark, on stderr if stdout is for JSON."""
    print(text, file=sys.stderr if options.json else sys.stdout)


def _jobs(options):
    from tdkernels.autotune.tunable import operators
    from tdkernels.model_shapes import MODELS, problems

    if options.operator is not None:
        check_known("operator", [options.operator], operators())
    jobs = []
    for text in options.shape:
        if options.operator is None:
            raise ValueError(f"--shape needs the operator: one of {', '.join(operators())}")
        jobs.append(Job(options.operator, parse_sizes(text, "x", "--shape")))
    tokens = parse_sizes(options.tokens, ",", "--tokens")
    check_known("--model", options.model, MODELS)
    for name in options.model:
        jobs += [Job(*problem) for problem in problems(name, tokens) if options.operator in (None, problem[0])]
    if not options.shape and not options.model:
        raise ValueError(f"nothing to tune is named; give {_what_to_give(options.operator)}")
    return list(dict.fromkeys(jobs))


def _what_to_give(operator):
    if operator is None:
        return "an operator with --shape SIZES, such as MxNxK of a product, or --model NAME"
    from tdkernels.autotune.tunable import tunable
    from tdkernels.model_shapes import MODELS, problems

    names, layouts = tunable(operator).sizes, tunable(operator).layouts
    text = f"{operator} with --shape {'x'.join(name.upper() for name in names)}"
    if len(layouts) > 1:
        text += f", and --layout if not {layouts[0]!r}: {_listed(layouts[1:])}"
    is_a_layer = operator in {problem[0] for problem in problems(next(iter(MODELS)), [1])}
    return text + ("; or --model NAME" if is_a_layer else "")


def _listed(words):
    return ", ".join(map(repr, words))


def _check_layout(jobs, layout):
    from tdkernels.autotune.tunable import tunable

    for operator in dict.fromkeys(job.operator for job in jobs):
        layouts = tunable(operator).layouts
        if layout is not None and layout not in layouts:
            raise ValueError(f"--layout of {operator} must be one of {_listed(layouts)}, not {layout!r}")


def parse_sizes(text, separator, name):
    try:
        return tuple(int(size) for size in text.split(separator))
    except ValueError:
        raise ValueError(f"{name} must be whole numbers with {separator!r} between them, not {text!r}") from None


def _num_ranks(options, jobs):
    from tdkernels.autotune.tunable import tunable

    least = 1 if jobs and all(tunable(job.operator).alone for job in jobs) else 2
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    if options.nproc == "auto":
        return gpus if gpus >= least else 2
    if not options.nproc.isdigit() or int(options.nproc) < least:
        some = f"{least} rank{'s' * (least > 1)}"
        raise ValueError(f"--nproc must be auto or a number of at least {some}, not {options.nproc!r}")
    return int(options.nproc)


def _possible(jobs, options, ranks, device):
    """The jobs that can be done and are not yet. What --shape asks for must be possible, a model's layers need not."""
    from tdkernels.autotune import disk_cache
    from tdkernels.autotune.problem import Problem
    from tdkernels.autotune.tunable import tunable, versions

    device = torch.device(device, 0)
    asked = {parse_sizes(text, "x", "--shape") for text in options.shape}
    left = []
    for job in jobs:
        dtype = DTYPES[options.dtype]
        layout = options.layout or tunable(job.operator).default_layout(dtype)
        problem = Problem.on(device, job.operator, job.shape, dtype, layout, ranks, ranks)
        reason = tunable(job.operator).why_not(problem)
        if reason is not None and job.shape in asked:
            raise ValueError(f"{job}: {reason}")
        current = versions(tunable(job.operator))
        entries = disk_cache.user_entries(job.operator, problem.gpu)
        known = any(entry.problem == problem and entry.versions == current for entry in entries)
        if reason is not None:
            _say(f"{job} is left out: {reason}", options)
        elif known and not options.again:
            _say(f"{job} is in the cache (--again tunes it anew)", options)
        else:
            left.append(job)
    return left


# ---- on every rank ----


def _tune_all(jobs, dtype, layout, budget_s, keeps, as_json):
    """Tune one problem after the other; return (the jobs that failed, the entries as JSON can hold them)."""
    from tdkernels.autotune.tuner import TuningError, tune
    from tdkernels.cli.cache import as_dict
    from tdkernels.launch import rank_device

    first = dist.get_rank() == 0
    failed, entries = [], []
    with _Bar(len(jobs), as_json) if first else _Silent() as progress:
        for number, job in enumerate(jobs):
            progress.begin(number, job)
            try:
                result = tune(
                    job.operator, *job.shape, dtype=DTYPES[dtype], layout=layout, device=rank_device(),
                    budget_s=budget_s, on_progress=progress.step, keep=keeps,
                )
            except TuningError as error:  # on every rank alike
                failed.append(job)
                progress.show(f"[red]{escape(str(error))}" if first else "")
            else:
                entries.append(as_dict(result.entry))
                if first:
                    progress.show(_report(result))
    return failed, entries


class _Silent:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def begin(self, number, job):
        pass

    def step(self, stage, done, total):
        pass

    def show(self, what):
        pass


class _Bar(_Silent):
    """A progress bar on stderr, and the results on stdout, or on stderr if stdout is for JSON."""

    def __init__(self, jobs, as_json):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.jobs = jobs
        self.out = console(stderr=as_json)
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"), TimeElapsedColumn()
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self):
        self.bar.start()
        self.task = self.bar.add_task("", total=1, stage="")
        return self

    def __exit__(self, *exc):
        self.bar.stop()

    def begin(self, number, job):
        self.bar.reset(self.task, description=f"{number + 1}/{self.jobs} {job}", total=1, stage="candidates")

    def step(self, stage, done, total):
        self.bar.update(self.task, completed=done, total=total, stage=stage)

    def show(self, what):
        self.out.print(what)
        self.out.file.flush()


def _report(result):
    """Return a table of the best configs, next to the unfused baseline."""
    from rich.table import Table

    from tdkernels.autotune.explain import settings

    entry = result.entry
    floor = max(entry.local_ms, entry.wire_ms or 0.0)
    table = Table(title=f"{entry.problem}: {result.seconds:.1f} s", title_justify="left", title_style="bold")
    table.add_column("config")
    for column in ("ms", "x unfused", "efficiency"):
        table.add_column(column, justify="right")
    timed = [trial for trial in result.trials if trial.samples]
    plain = next((trial for trial in timed if trial.config.method == "torch"), None)
    for trial in timed[:_BEST] + ([plain] if plain is not None and plain not in timed[:_BEST] else []):
        speedup = f"{plain.ms / trial.ms:.2f}" if plain is not None else "?"
        words = settings(entry.problem.operator, trial.config)
        table.add_row(words, f"{trial.ms:.4f}", speedup, f"{floor / trial.ms:.2f}")
    failed = [trial for trial in result.trials if trial.reason is not None]
    wire = f", wire {entry.wire_ms:.4f} ms" if entry.wire_ms else ""
    out = f"; {len(failed)} failed, the first: {failed[0].reason}" if failed else ""
    table.caption = escape(f"floors: computation {entry.local_ms:.4f} ms{wire}; {result.log[0]}{out}")
    table.caption_justify = "left"
    return table
