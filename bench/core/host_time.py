"""Time the host's part of a steady call of each operator: ``python -m bench.core.host_time``.

The calls are those of ``call_path``: without gradients, and some with a backward pass. On the CPU the time in kernels,
which the interpreter runs, is subtracted. On ranks that share a GPU (``--device shared``) it is the time until all
calls of a round are launched.
"""

import argparse
import contextlib
import json
import time

import torch

import tdkernels
from bench.core.call_path import calls, training_calls
from tdkernels.lang.kernel import Kernel
from tdkernels.launch import rank_device, run_ranks

CALLS, WARM_UP, ROUNDS = 4, 3, 12


class KernelTime:
    """Sums up the seconds that the interpreter takes for kernels, while it is installed."""

    def __init__(self):
        self.seconds = 0.0

    @contextlib.contextmanager
    def installed(self):
        run = Kernel.run

        def timed(kernel, *args, **options):
            begin = time.perf_counter()
            try:
                return run(kernel, *args, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        Kernel.run = timed
        try:
            yield
        finally:
            Kernel.run = run


def measure():
    """In a rank: {operator: microseconds of a call, the least mean of all rounds}."""
    device, kernels = rank_device(), KernelTime()
    found = {}
    timing = kernels.installed() if device.type == "cpu" else contextlib.nullcontext()
    with timing, tdkernels.autotune.mode("off"):
        with torch.no_grad():
            for name, call in calls(device).items():
                found[name] = _time(call, kernels)
        for name, call in training_calls(device).items():
            found[name] = _time(call, kernels)
    return found


def _time(call, kernels):
    for _ in range(WARM_UP):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        tdkernels.synchronize()
        begin, of_kernels = time.perf_counter(), kernels.seconds
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begin - (kernels.seconds - of_kernels))
    tdkernels.synchronize()
    return round(best / CALLS * 1e6, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "shared"])
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    options = parser.parse_args()
    found = run_ranks(2, measure, device=options.device)[0]
    if options.json:
        print(json.dumps(found))
        return
    print("| operator | us |\n|---|---|")
    for name, us in found.items():
        print(f"| {name} | {us} |")


if __name__ == "__main__":
    main()
