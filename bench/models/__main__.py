"""Benchmark whole tensor-parallel Llama models in frameworks: ``python -m bench.models --nproc 4``.

The methods of a framework and phase run in turns, on the same weights and inputs. Each is checked against the complete
model before it is timed. Rows are appended to DIR/<gpu>x<number>/models.jsonl after each framework and phase. With
fewer than two GPUs the run is a rehearsal on two CPU ranks with tiny sizes, whose times are meaningless.
"""

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from unittest import mock

import torch

from bench.core import harness, progress
from bench.core.row_files import append
from bench.models import measure
from bench.models.cases import FRAMEWORKS, PHASES, cases
from bench.run import RESULTS, revision
from tdkernels.launch import RankError, RankPool

_BURST_MS = 15.0
_TIMEOUT_S, _COMPILE_TIMEOUT_S = 300.0, 900.0  # of a framework and phase, and with --compile
_REHEARSAL = dict(size="rehearsal", layers=1, tokens=32, sequences=2, batch=2, context=16, ranks=2, dtype=torch.float32)
_WARNING = "Rehearsal with tiny sizes on 2 CPU ranks, because there are too few GPUs: times are meaningless."


def main(arguments=None):
    """Run the benchmark. Return the exit code."""
    options = _parser().parse_args(arguments)
    rehearsal = torch.cuda.device_count() < 2
    try:
        runs = _runs(options, rehearsal)
    except ValueError as error:
        print(f"bench.models: {error}", file=sys.stderr)
        return 2
    if rehearsal:
        print(_WARNING, flush=True)
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    device, plan = ("cpu", measure.Plan(1, 0.0)) if rehearsal else ("cuda", measure.Plan(options.rounds, _BURST_MS))
    folder = options.out if rehearsal or options.out else RESULTS
    job = Job(device, plan, folder, deadline)
    for framework, chosen in runs.items():
        with _environment(framework):
            job.run(chosen)
    if job.rows and folder:
        print(f"Rows were written to {folder}. Use python -m tdkernels bench --report to make the tables.")
    return 0


def _environment(framework):
    """Return a context manager that sets the environment variables of the ranks of a framework."""
    if framework != "megatron":
        return contextlib.nullcontext()
    # Megatron relies on it to start collectives before GEMMs, and warns without it.
    return mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1")


# ---- arguments ----


def _parser():
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--nproc", type=int, help="number of ranks; default: all GPUs")
    add("--frameworks", default=",".join(FRAMEWORKS), help="some of %(default)s")
    add("--phases", default=",".join(PHASES), help="some of %(default)s")
    add("--layers", type=int, default=2)
    add("--size", default="8b", choices=["8b", "70b"])
    add("--tokens", type=int, default=8192, help="number of tokens in prefill and train")
    add("--sequences", type=int, default=1, help="number of sequences that these tokens are divided into")
    add("--megatron-tokens", type=int, default=4096, help="upper bound for Megatron, whose attention is not fused")
    add("--batch", type=int, default=64, help="number of sequences in decode")
    add("--context", type=int, default=2048, help="number of keys in decode, including the new one")
    add("--compile", action="store_true", help="measure DTensor under torch.compile, too")
    add("--rounds", type=int, default=7)
    add("--seconds", type=float, help="start no framework and phase after this time")
    add("--out", type=Path, help="folder of the rows; default: bench/results, or none in a rehearsal")
    return parser


def _runs(options, rehearsal):
    """Return {framework: [Case]} of the options."""
    frameworks = _names("--frameworks", options.frameworks, FRAMEWORKS)
    phases = _names("--phases", options.phases, PHASES)
    for name in ("layers", "tokens", "sequences", "megatron_tokens", "batch", "context", "rounds"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    runs = {}
    for framework in frameworks:
        sizes = _REHEARSAL if rehearsal else _sizes(options, framework)
        found = cases([framework], phases, compiled=options.compile, **sizes)
        for case in found:
            if (reason := case.why_not()) is not None:
                print(f"{case} is skipped: {reason}", flush=True)
        runs[framework] = [case for case in found if case.why_not() is None]
    return runs


def _sizes(options, framework):
    gpus = torch.cuda.device_count()
    ranks = options.nproc or gpus
    if not 2 <= ranks <= gpus:
        raise ValueError(f"--nproc must be from 2 to {gpus}, the number of GPUs, not {ranks}")
    tokens = min(options.tokens, options.megatron_tokens) if framework == "megatron" else options.tokens
    return dict(
        size=options.size, layers=options.layers, tokens=tokens, sequences=options.sequences, batch=options.batch,
        context=options.context, ranks=ranks,
    )


def _names(option, text, known):
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"{option} must be some of {', '.join(known)}, not {name!r}")
    return names


# ---- measuring ----


@dataclass
class Job:
    """Measures the cases of one framework after the other, and keeps their rows.

    device:     "cpu" or "cuda"
    plan:       the measure.Plan
    folder:     where rows are appended as soon as a case is measured, or None
    deadline:   value of time.monotonic() after which nothing is started, or None
    """

    device: str
    plan: measure.Plan
    folder: Path | None
    deadline: float | None
    rows: int = 0

    def run(self, chosen):
        """Measure the cases of a framework on ranks of its own. If the ranks are lost, start new ones."""
        left = progress.left(chosen)
        try:
            while left and not self._is_late(left):
                self._measure_all(left)
        except RankError as error:  # the ranks did not start
            print(f"skipped from {left[0]} on: {error}", file=sys.stderr, flush=True)

    def _measure_all(self, left):
        """Measure cases, and remove them from the list, while the ranks are usable."""
        timeout_s = _COMPILE_TIMEOUT_S if left[0].compiled else _TIMEOUT_S
        with RankPool(left[0].ranks, self.device, timeout_s=timeout_s) as pool:
            machine, link_gbps = pool.run(harness.machine)[0], pool.run(harness.link_rate)[0]
            while left and pool.usable and not self._is_late(left):
                self._measure(pool, left.pop(0), machine, link_gbps)

    def _is_late(self, left):
        late = self.deadline is not None and time.monotonic() > self.deadline
        if late:
            print(f"time limit reached: skipped from {left[0]} on", flush=True)
            progress.cut_off()
            left.clear()
        return late

    def _measure(self, pool, case, machine, link_gbps):
        began = time.monotonic()
        try:
            found = pool.run(measure.measure, case, self.plan)
            rows = measure.rows(case, measure.first_reasons(found), link_gbps)
        except RankError as error:
            print(error, file=sys.stderr, flush=True)
            rows = measure.absent_rows(case, _last_line(error), link_gbps)
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        stamp = {**machine, "rounds": self.plan.rounds, "git": revision(), "date": date}
        rows = [{**row, **stamp} for row in rows]
        if self.folder is not None:
            append(rows, self.folder, "models")
            progress.add(case)
        self.rows += len(rows)
        print(f"{case} ({time.monotonic() - began:.0f} s)", flush=True)
        for row in rows:
            print(f"    {_line(row)}", flush=True)


def _last_line(error):
    return str(error).strip().splitlines()[-1].strip()[:200]


def _line(row):
    name = row["method"] + " (graph)" * row["graph"]
    if row["absent"]:
        return f"{name}: absent: {row['absent']}"
    error = "unchecked" if row["error"] is None else f"error {row['error']:.1e}"
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
    return f"{name}: {row['ms']:.3f} ms, {row['host_ms']:.3f} ms on the host, {error}{peak}"


if __name__ == "__main__":  # ranks import this file, too
    sys.exit(main())
