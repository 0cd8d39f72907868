"""Run the benchmarks and fault campaigns for machines with several GPUs: ``python -m bench.multi_gpu --out DIR``.

Stages run one after the other, see ``stages.py``. Rows, logs and tuned configs go to DIR. If a run is cut off, the same
command goes on: finished stages are skipped, and a program skips the cases that it has measured. ``--dry-run`` prints
the commands.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.core import progress
from bench.multi_gpu.stages import stages

_ROOT = Path(__file__).parents[2]
# The rows say that multicast was off.
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_GRACE_S = 5.0  # between the request to end and the kill


def main(arguments=None):
    """Run the stages. Return the exit code: 0 if all programs succeeded."""
    options = _parser().parse_args(arguments)
    gpus = options.gpus or torch.cuda.device_count()
    known = stages(gpus) if gpus >= 2 else []
    try:
        chosen = _chosen(options, known, gpus)
    except ValueError as error:
        print(f"bench.multi_gpu: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        for stage in chosen:
            _print_stage(stage, options.out)
        return 0
    # Without a handler the process would end at once, and its programs would go on.
    before = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return Run(options.out.resolve(), options.seconds).all(chosen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number, _frame):
    sys.exit(128 + number)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m bench.multi_gpu", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the rows, logs and tuned configs")
    add("--stages", help="names, separated by commas, in the order in which they run; default: all")
    add("--seconds", type=float, help="time limit: a stage is not started if less than its own limit is left")
    add("--gpus", type=int, help="number of GPUs, for --dry-run; default: all of this machine")
    add("--dry-run", action="store_true", help="print the commands")
    return parser


def _chosen(options, known, gpus):
    if gpus < 2:
        raise ValueError(f"at least 2 GPUs are needed, torch finds {gpus}; --dry-run --gpus N prints the commands")
    if options.gpus and not options.dry_run:
        raise ValueError("--gpus can only be used with --dry-run")
    by_name = {stage.name: stage for stage in known}
    names = options.stages.split(",") if options.stages else list(by_name)
    for name in names:
        if name not in by_name:
            raise ValueError(f"--stages must be some of {', '.join(by_name)}, not {name!r}")
    return [by_name[name] for name in dict.fromkeys(names)]


def _print_stage(stage, folder):
    print(f"{stage.name}: at most {stage.seconds:g} s")
    for program in stage.programs:
        gpus = "" if program.gpus is None else f"CUDA_VISIBLE_DEVICES={','.join(map(str, program.gpus))} "
        print(f"    {gpus}{shlex.join(program.command(folder, stage.seconds))}")


class Run:
    """A run with the state of its stages in a file.

    Args:
        folder: The output folder.
        seconds: The time limit, or None.
    """

    def __init__(self, folder, seconds):
        self.folder, self._state_file = folder, folder / "stages.json"
        self._deadline = None if seconds is None else time.monotonic() + seconds
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.state = json.loads(self._state_file.read_text()) if self._state_file.exists() else {}

    def all(self, chosen):
        """Run the stages that are not finished. Return the exit code."""
        begun = time.monotonic()
        for stage in chosen:
            if self.state.get(stage.name, {}).get("finished"):
                print(f"{stage.name}: finished before", flush=True)
                continue
            if self._deadline is not None and time.monotonic() + stage.seconds > self._deadline:
                print(f"{stage.name}: not started, less than {stage.seconds:g} s are left", flush=True)
                continue
            codes, seconds = self._run(stage)
            cut = [program.name for program in stage.programs if progress.was_cut_off(self._progress(stage, program))]
            finished = not cut and None not in codes.values()  # a program that fails would fail again
            self.state[stage.name] = {"finished": finished, "codes": codes, "seconds": round(seconds, 1)}
            self._state_file.write_text(json.dumps(self.state, indent=1) + "\n")
            rest = f", cut off: {', '.join(cut)}" if cut else ""
            at = f"{time.monotonic() - begun:.0f} s"
            print(f"{at}: {stage.name} took {seconds:.0f} s, exits {codes}{rest}", flush=True)
        return int(any(code != 0 for stage in self.state.values() for code in stage["codes"].values()))

    def _run(self, stage):
        """Return ({name of a program: its exit code, or None if it was cut off}, seconds)."""
        begun = time.monotonic()
        running = {program.name: self._start(stage, program) for program in stage.programs}
        try:
            while any(process.poll() is None for process in running.values()):
                if time.monotonic() - begun > stage.seconds:
                    break
                time.sleep(0.1)
            codes = {name: process.poll() for name, process in running.items()}
        finally:
            _end(running.values())
        return codes, time.monotonic() - begun

    def _progress(self, stage, program):
        return self.folder / "logs" / f"{stage.name}-{program.name}.done"

    def _start(self, stage, program):
        progress.begin(self._progress(stage, program))
        variables = {
            **program.variables(), **_ENVIRONMENT, "PYTHONUNBUFFERED": "1",
            "TDKERNELS_CACHE_DIR": str(self.folder / "tuned"),
            progress.VARIABLE: str(self._progress(stage, program)),
        }
        with open(self.folder / "logs" / f"{stage.name}-{program.name}.log", "a") as log:
            return subprocess.Popen(
                program.command(self.folder, stage.seconds), cwd=_ROOT, env=variables, stdout=log, stderr=log,
                start_new_session=True,
            )


def _end(processes):
    """End processes and their children, at first by request."""
    for request in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None or request == signal.SIGKILL:
                try:
                    os.killpg(process.pid, request)
                except ProcessLookupError:
                    pass
        deadline = time.monotonic() + _GRACE_S
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
