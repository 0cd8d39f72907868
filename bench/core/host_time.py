"""Time the host part of a steady-state call of each operator: ``python -m bench.core.host_time``.

The calls are defined in ``call_path``. On the CPU the kernels are skipped; calls that read a kernel's result on the
host, and backward passes, are not timed there. On GPUs (``--device cuda``: one per rank, ``--device shared``: one for
both ranks) the time of a round ends when all its calls are launched.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist

import tdkernels
from bench.core.call_path import calls, training_calls
from tdkernels.lang.kernel import Kernel
from tdkernels.launch import rank_device, run_ranks

CALLS, WARM_UP, ROUNDS = 40, 4, 40
WAITS = ("ep_dispatch, exact", "ep_moe")  # the host waits for the number of received rows


def measure():
    """Return {operator: microseconds per call, the minimum over the rounds of the mean} on this rank."""
    device = rank_device()
    with tdkernels.autotune.mode("off"):
        if device.type != "cpu":
            with torch.no_grad():
                found = {name: _time(call) for name, call in calls(device).items()}
            return found | {name: _time(call) for name, call in training_calls(device).items()}
        with torch.no_grad():
            timed = {name: call for name, call in calls(device).items() if name not in WAITS}
            for call in timed.values():
                for _ in range(WARM_UP):
                    call()
            return _without_kernels(lambda: {name: _time(call) for name, call in timed.items()})


def _without_kernels(function):
    run = Kernel.run
    Kernel.run = lambda self, *args, **options: None
    try:
        return function()
    finally:
        Kernel.run = run


def _time(call):
    for _ in range(WARM_UP):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        tdkernels.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begin)
    tdkernels.synchronize()
    return round(best / CALLS * 1e6, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "shared"])
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
