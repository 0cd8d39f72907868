"""Run operators under many seeded schedules and compare their results: ``make fuzz SEEDS=20 OPS="gemm_rs"``.

A failure is printed with the name of the variant and the seed. The same seed gives the same schedule again:

    python -m tests.fuzz --seeds 1 --first 17 --variants "gemm_rs forward"
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

os.environ["TDKERNELS_TEST_DEVICE"] = "cpu"
os.environ.setdefault("TDKERNELS_AUTOTUNE", "off")

from tdkernels.launch import RankError  # noqa: E402
from tdkernels.sanitizer import schedule  # noqa: E402
from tests.support import ranks  # noqa: E402
from tests.support.simulated_nodes import on_nodes  # noqa: E402
from tests.support.variants import VARIANTS  # noqa: E402

_AT_ONCE = 10  # schedules of a variant before the next variant runs


def fuzz(variant, seeds, calls=1):
    """Run a variant under each schedule and check its results; return the number of scheduling points of each.

    The first calls run without a schedule, so that the consensus checks have passed.
    """

    def run():
        variant.run_here(2)  # the second call has no first-call work left, such as a cached launch
        return scheduling_points(variant, seeds, calls)

    return run() if variant.local is None else on_nodes(variant.local, run)


def scheduling_points(variant, seeds, calls=1):
    """``fuzz`` for a variant that has been called in its group; the world is already on simulated nodes."""
    points = []
    for seed in seeds:
        with schedule(seed) as scheduled:
            variant.run_here(calls)
        points.append(len(scheduled.events))
    return points


def fuzz_variants(names, seeds_each, first, minutes, report):
    """Run rounds of a few seeds per variant; call ``report`` with the results after each."""
    results = {name: {"schedules": 0, "points": 0, "seconds": 0.0, "failures": []} for name in names}
    deadline = time.monotonic() + 60 * minutes
    for start in range(0, seeds_each, _AT_ONCE):
        for name in names:
            seeds = list(range(first + start, first + min(start + _AT_ONCE, seeds_each)))
            began = time.monotonic()
            if began > deadline:
                return results
            entry = results[name]
            try:
                points = ranks.on_ranks(VARIANTS[name].world_size, fuzz, VARIANTS[name], seeds)
                entry["points"] += sum(map(sum, points))
            except RankError as error:
                entry["failures"].append({"seeds": seeds, "error": str(error)})
                print(f"FAILED: {name}, one of the seeds {seeds}\n{error}", file=sys.stderr, flush=True)
            entry["schedules"] += len(seeds)
            entry["seconds"] = round(entry["seconds"] + time.monotonic() - began, 2)
            print(f"{name}: {entry['schedules']} schedules, {entry['points']} points", flush=True)
            report(results)
    return results


def _write(path, results, arguments):
    if path is None:
        return
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    total = sum(entry["schedules"] for entry in results.values())
    failures = sum(len(entry["failures"]) for entry in results.values())
    about = {"revision": revision, "python": platform.python_version(), "first seed": arguments.first}
    text = json.dumps(about | {"schedules": total, "failures": failures, "variants": results}, indent=1)
    Path(path).write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="schedules of each variant")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ops", default="", help="operators; all if empty")
    parser.add_argument("--variants", nargs="*", help="variants by name, in place of operators")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit in minutes")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    operators = arguments.ops.split()
    if unknown := set(operators) - {variant.operator for variant in VARIANTS.values()}:
        parser.error(f"no operator {', '.join(sorted(unknown))}")
    selected = [name for name, variant in VARIANTS.items() if not operators or variant.operator in operators]
    names = arguments.variants or selected
    results = fuzz_variants(
        names, arguments.seeds, arguments.first, arguments.minutes,
        lambda results: _write(arguments.json, results, arguments),
    )
    ranks.close_all()
    failures = sum(len(entry["failures"]) for entry in results.values())
    print(f"{sum(entry['schedules'] for entry in results.values())} schedules, {failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
