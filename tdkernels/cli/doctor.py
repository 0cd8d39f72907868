"""``python -m tdkernels doctor``: check what works on a machine, and say what to do about the rest."""

import contextlib
import dataclasses
import json

import torch

import tdkernels
from tdkernels.cli.doctor_checks import (
    Check,
    check_cache,
    check_compiler,
    check_cpu_memory,
    check_gpu_memory,
    check_gpus,
    check_links,
    check_multicast,
    check_nodes,
    check_numpy,
    check_nvshmem,
    check_operators,
    check_python,
    check_timeout,
    check_torch,
    check_triton,
    check_tuning,
    describe,
)

LOOKS = (
    check_python, check_torch, check_triton, check_numpy, check_compiler, check_gpus, check_links, check_cpu_memory,
    check_gpu_memory, check_nodes, check_nvshmem, check_multicast, check_timeout, check_cache,
    check_tuning,
)


def examine(self_test=True):
    """Make all checks, one after the other."""
    for look in LOOKS:
        yield _guarded(look)
    if self_test:
        yield _guarded(check_operators, 2, "cpu")
        if torch.cuda.device_count() >= 2:
            yield _guarded(check_operators, torch.cuda.device_count(), "cuda")


def _guarded(check, *args):
    """The check, or a problem that says that it failed itself: the others still have to be made."""
    try:
        return check(*args)
    except Exception as error:
        return Check(check.__name__, "problem", f"this check failed: {describe(error)}", "Please report this.")


def main(options):
    """Make all checks and print them; return the exit code, 1 if there is a problem."""
    self_test = not options.no_self_test
    if options.json:
        checks = list(examine(self_test))
        report = {"tdkernels": tdkernels.__version__, "checks": [dataclasses.asdict(check) for check in checks]}
        print(json.dumps(report, indent=2))
    else:
        checks = _print_table(examine(self_test))
    return int(any(check.status == "problem" for check in checks))


def _print_table(checks):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, styles = Console(), {"ok": "green", "n/a": "dim", "warning": "yellow", "problem": "bold red"}
    table = Table("check", "status", "found")
    with console.status("Checking ...") if console.is_terminal else contextlib.nullcontext():
        checks = list(checks)
    for check in checks:
        # Text, not str: "[rank 0]" in a message is no markup.
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style="bold")
        table.add_row(check.name, Text(check.status, styles[check.status]), found)
    console.print(table)
    for check in checks:
        if check.details:
            console.print(Text(f"{check.name}:\n{check.details}\n"))
    counts = [f"{n} {s}{'s' * (n > 1)}" for s in ("problem", "warning") if (n := sum(c.status == s for c in checks))]
    console.print(", ".join(counts) or "All is well.")
    return checks
