"""Run the mutants of the race checker as compiled kernels on GPUs: does a stress test find the planted bugs?

    python -m tests.sanitizer.on_gpus --calls 1000 --jobs 2 --out results     # 8 GPUs: 4 for each job
    python -m tests.sanitizer.on_gpus --device cpu --calls 2 --only "A:"      # a rehearsal, interpreted

Each rank has its own GPU. For each mutant, the unchanged kernel (the control) runs first, then the mutant. The program
counts the calls with wrong results, and the batches of calls that ended with an error. See ``stress``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

_RANKS = 3  # of most variants
_BATCH = 50  # calls between two synchronizations of the host
_MAX_FAILED_BATCHES = 3  # after them a mutant counts as found
_BATCH_S = {"cpu": 240.0, "cuda": 60.0, "shared": 120.0}  # a batch that has not ended by then hangs
_PREPARE_S = 240.0  # to compile and to compute the expected results


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer.on_gpus", description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=200, help="calls of each mutant, and of its control")
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants with this text in their name")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no mutant after this time")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, on different GPUs")
    parser.add_argument("--device", default="cuda", choices=["cuda", "shared", "cpu"])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of mutants-DEVICE.json")
    parser.add_argument("--part", default="0/1", help="i/J: only every J-th mutant from the i-th on")
    args = parser.parse_args()
    # The ranks inherit these; see tests/conftest.py.
    os.environ["TDKERNELS_TEST_DEVICE"] = args.device
    os.environ["TDKERNELS_AUTOTUNE"] = "off"
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tdkernels-mutants-") as cache:
        os.environ["TDKERNELS_CACHE_DIR"] = cache
        return run_parts(args) if args.jobs > 1 else run_part(args)


# ---- several jobs ----


def run_parts(args):
    """Run a process for each job, on its share of the GPUs, and merge their results while they run."""
    folder = Path(os.environ["TDKERNELS_CACHE_DIR"])
    start, parts = time.monotonic(), [folder / f"part{number}" for number in range(args.jobs)]
    shares = _gpus_of_jobs(args.jobs) if args.device == "cuda" else [None] * args.jobs
    processes = []
    for number, (part, gpus) in enumerate(zip(parts, shares, strict=True)):
        command = [sys.executable, "-m", "tests.sanitizer.on_gpus", "--part", f"{number}/{args.jobs}", "--out", part]
        for option in ("calls", "only", "seconds", "device"):
            command += [f"--{option}", str(getattr(args, option))]
        environment = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        processes.append(subprocess.Popen(command, env=environment))
    while any(process.poll() is None for process in processes):
        time.sleep(0.5)
        _merge(parts, args)
    results = _merge(parts, args)
    _print_totals(results, time.monotonic() - start)
    return int(any(process.returncode for process in processes))


def _gpus_of_jobs(jobs):
    """Return the names of the GPUs of each job, for CUDA_VISIBLE_DEVICES."""
    import torch

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    number = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(gpu) for gpu in range(number)]
    each = number // jobs
    if each < _RANKS:
        raise SystemExit(f"{jobs} jobs need {jobs * _RANKS} GPUs, and torch sees {number}")
    return [names[job * each : (job + 1) * each] for job in range(jobs)]


def _merge(parts, args):
    """Write the results of all parts to one file; return them."""
    results = {"mutants": [], "not_run": []}
    for part in parts:
        path = _results_path(part, args.device)
        if path.exists():
            for name, entries in json.loads(path.read_text()).items():
                results[name] += entries
    _write(args.out, args.device, results)
    return results


# ---- one job ----


def run_part(args):
    """Run some of the mutants one after another; return 1 if a control failed."""
    from tests.sanitizer.mutants import MUTANTS  # reads the environment on import

    number, jobs = map(int, args.part.split("/"))
    names = [name for name in MUTANTS if args.only in name][number::jobs]
    start, about, pools = time.monotonic(), _about(args.device), {}
    results = {"mutants": [], "not_run": list(names)}
    for name in names:
        if time.monotonic() - start > args.seconds:
            break
        entry = run_mutant(name, pools, args) | about
        results["mutants"].append(entry)
        results["not_run"].remove(name)
        _write(args.out, args.device, results)
        print(f"{name}: {_summary(entry)}", flush=True)
    for ranks in pools.values():
        ranks.close()
    _write(args.out, args.device, results)
    if jobs == 1:
        _print_totals(results, time.monotonic() - start)
    return int(any(_has_error(entry["control"]) for entry in results["mutants"] if "not_planted" not in entry))


def run_mutant(name, pools, args):
    """Run the control and the mutant; return the entry of the results."""
    from tests.sanitizer.mutants import MUTANTS
    from tests.support.restarted_pool import RestartedPool
    from tests.support.variants import VARIANTS

    variant, start = VARIANTS[MUTANTS[name].variant], time.monotonic()
    ranks = pools.setdefault(variant.world_size, RestartedPool(variant.world_size, args.device))
    entry = {"name": name, "variant": MUTANTS[name].variant, "ranks": variant.world_size}
    control = run_phase(ranks, name, False, args)
    if control["calls"] == 0:
        mutant = {"calls": 0, "wrong": 0, "timeouts": 0, "other": 0}
        entry["not_planted"] = "the unchanged kernel does not run here: " + "; ".join(control["errors"])
    else:
        mutant = run_phase(ranks, name, True, args)
        if args.device != "cpu" and mutant["kernels"] == []:
            entry["not_planted"] = "no compiled kernel of the variant has other machine code"
    return entry | mutant | {"seconds": round(time.monotonic() - start, 1), "control": control}


def run_phase(ranks, name, is_planted, args):
    """Make the calls of the unchanged kernel or of the mutant; return the counts.

    ``calls`` are those with compared results, and ``wrong`` those with a wrong result on at least one rank.
    ``timeouts`` and ``other`` count the batches that ended with an error. The calls of such a batch are not compared,
    and the next batch begins with new workspaces. ``kernels`` are those whose machine code the bug has changed.
    """
    from tdkernels.launch import RankError
    from tests.sanitizer import stress

    counts = {"calls": 0, "wrong": 0, "timeouts": 0, "other": 0, "errors": [], "kernels": None}
    batch_s, start, first, is_begun = _BATCH_S[args.device], time.monotonic(), 0, False
    while first < args.calls and counts["timeouts"] + counts["other"] < _MAX_FAILED_BATCHES:
        count = min(_BATCH, args.calls - first)
        try:
            if not is_begun:
                ranks.run(stress.prepare, name, timeout_s=_PREPARE_S)
                count = min(stress.FIRST_CALLS, count)
                outcomes = ranks.run(stress.begin, is_planted, count, timeout_s=_PREPARE_S)
                is_begun = True
            else:
                outcomes = ranks.run(stress.play, first, count, timeout_s=batch_s)
        except RankError as error:
            first, is_begun = first + count, False
            hangs = all(isinstance(each, TimeoutError) for each in error.exceptions if each is not None)
            _count_error(counts, hangs, _last_line(error))
            continue
        first += count
        errors = [error for _, error in outcomes if error is not None]
        if errors:
            is_begun = False
            _count_error(counts, any(is_timeout for is_timeout, _ in errors), errors[0][1])
        else:
            counts["calls"] += count
            counts["wrong"] += len(set().union(*(wrong for wrong, _ in outcomes)))
    try:
        kernels = ranks.run(stress.end, timeout_s=batch_s)
        counts["kernels"] = sorted(set().union(*kernels))
    except RankError as error:
        _count_error(counts, False, "at the end: " + _last_line(error))
    return counts | {"seconds": round(time.monotonic() - start, 1)}


def _count_error(counts, is_timeout, text):
    counts["timeouts" if is_timeout else "other"] += 1
    counts["errors"].append(text)


def _last_line(error):
    """Return the last line of the message of a RankError, which names the exception of a rank."""
    return str(error).strip().rpartition("\n")[2][:300]


# ---- results ----


def _about(device_name):
    import torch
    import triton

    from bench.run import revision

    gpu = "none" if device_name == "cpu" else torch.cuda.get_device_properties(0).name
    return {
        "gpu": gpu, "num_gpus": torch.cuda.device_count(), "torch": torch.__version__, "triton": triton.__version__,
        "git": revision(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _results_path(folder, device_name):
    return folder / f"mutants-{device_name}.json"


def _write(folder, device_name, results):
    path = _results_path(folder, device_name)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)  # a reader never sees half a file


def _has_error(counts):
    return counts["wrong"] or counts["timeouts"] or counts["other"]


def _summary(entry):
    if "not_planted" in entry:
        return f"not planted: {entry['not_planted']}"
    texts = [
        f"{counts['wrong']} of {counts['calls']} calls wrong, {counts['timeouts']} timeouts, {counts['other']} others"
        for counts in (entry, entry["control"])
    ]
    return f"{texts[0]} (control: {texts[1]}), {entry['seconds']} s"


def _print_totals(results, seconds):
    """Print how many mutants were found."""
    entries = results["mutants"]
    ran = [entry for entry in entries if "not_planted" not in entry]
    found = sum(bool(_has_error(entry)) for entry in ran)
    failed = sum(bool(_has_error(entry["control"])) for entry in ran)
    print(
        f"{found} of {len(ran)} mutants found, {failed} controls failed, {len(entries) - len(ran)} not planted, "
        f"{len(results['not_run'])} not run, in {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
