"""Programs that a test runs from outside the repository, as a reader would."""

import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from tests.support import forked_ranks, ranks

ROOT = Path(__file__).parents[2]


def environment():
    """Return an environment in which tdkernels can be imported, without GPUs if the tests run on CPU ranks."""
    without_gpus = {"CUDA_VISIBLE_DEVICES": ""} if ranks.DEVICE == "cpu" else {}
    return {**os.environ, "PYTHONPATH": str(ROOT), **without_gpus}


def run_program(file, *arguments, cwd=None):
    """Run a Python program and return its exit code, standard output and standard error.

    The program runs in this process if its ranks can be forked. Otherwise the program and each of its ranks import
    torch, which takes 5 s of CPU time for two ranks. At least one program of each kind should run with ``subprocess``
    instead, as its users start it. A forked rank imports the file before it gets the environment variables of this
    process.

    Args:
        file: The path of the program.
        *arguments: Arguments of the command line.
        cwd: The working directory, or None for that of this process.
    """
    if not forked_ranks.is_installed():
        run = subprocess.run([sys.executable, file, *arguments], capture_output=True, text=True, timeout=240,
                             env=environment(), cwd=cwd)
        return run.returncode, run.stdout, run.stderr
    return run_here(_run_file, str(file), [str(argument) for argument in arguments], cwd=cwd)


def _run_file(file, arguments):
    with mock.patch.object(sys, "argv", [file, *arguments]):
        runpy.run_path(file, run_name="__main__")


def run_here(function, *args, cwd=None):
    """Call a function that may start ranks; return its exit code, standard output and standard error."""
    code = None
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(2)]
        if cwd is not None:
            stack.callback(os.chdir, os.getcwd())
            os.chdir(cwd)
        for number, file in zip((1, 2), files, strict=True):
            stack.enter_context(_redirected(number, file))
        try:
            code = function(*args)
        except SystemExit as exit:
            code = exit.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
    return (code or 0, *texts)


@contextlib.contextmanager
def _redirected(number, file):
    """Redirect standard output (1) or standard error (2) of this process, and of those that it starts, to a file."""
    redirect = contextlib.redirect_stdout if number == 1 else contextlib.redirect_stderr
    kept = os.dup(number)
    try:
        os.dup2(file.fileno(), number)
        with open(os.dup(number), "w", buffering=1, encoding="utf-8") as stream, redirect(stream):
            yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def run_without_gpus(function, *args, cwd=None):
    """As ``run_here``, for a function that has torch count the GPUs: there are none."""
    with mock.patch("torch.cuda.device_count", lambda: 0):
        return run_here(function, *args, cwd=cwd)
