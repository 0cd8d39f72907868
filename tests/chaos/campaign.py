"""The fault campaign: pools of ranks that run cases, the counts of their outcomes, and the summary."""

import contextlib
import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from bench.run import revision
from tdkernels import launch
from tdkernels.launch import RankError
from tests.chaos.plan import names_of, plan_of
from tests.chaos.play import BAD, CORRECT, play, use_device, warm_all_shapes
from tests.support import forked_ranks
from tests.support.ranks import ASKED, _call
from tests.support.restarted_pool import RestartedPool

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "reliability"
# A rank that has not returned by then hangs. The waits, kernels and references of a case take a few seconds.
CASE_TIMEOUT_S = {"shared": 240.0, "cuda": 120.0}.get(ASKED, 180.0)
GRACE_S = 45.0 if ASKED == "cuda" else 90.0  # for the other ranks after one was killed or has raised
OVERRUN_S = 30.0  # for the variants that are being compiled when the time for the warm-up is over
WARM_UP_S = 120.0 if ASKED == "cuda" else 400.0  # for a key of TABLE
SAVE_EVERY = 1 if ASKED == "cuda" else 25  # cases
CASES = 1000


@contextlib.contextmanager
def use_forkserver():
    """Fork the ranks of pools from a server process that has imported everything, unless a server runs already.

    A rank then starts in 0.1 s instead of 5 s, and a campaign kills many ranks.
    """
    with mock.patch.object(launch, "new_process", launch.new_process):  # restored at the end
        forked_ranks.install(["tests.chaos.play"])
        yield


def use_fastest_start(device_name):
    """Return ``use_forkserver()`` if forked ranks can use the device, otherwise a null context: ranks are spawned.

    CUDA cannot be used in a fork of a process that has initialized it. The server counts GPUs when it imports the
    tests, which does not initialize CUDA if NVML can count them.
    """
    with use_forkserver():
        ranks = Ranks(2, device_name)
        try:
            errors = [error for _, error in ranks.run(use_device, timeout_s=60.0) if error is not None]
        except Exception as error:
            errors = [error]
        ranks.close()
    if errors:
        print(f"ranks are spawned, because they cannot be forked: {errors[0]}", flush=True)
        return contextlib.nullcontext()
    return use_forkserver()


class Ranks(RestartedPool):
    """Ranks that may fail one by one."""

    def __init__(self, world_size, device_name):
        super().__init__(world_size, device_name, GRACE_S)

    def run(self, function, *args, timeout_s=CASE_TIMEOUT_S):
        """Return [(result of a rank or None, its exception or None)]."""
        try:
            return [(report, None) for report in super().run(_call, function, *args, timeout_s=timeout_s)]
        except RankError as error:
            return list(zip(error.results, error.exceptions, strict=True))


def play_case(ranks, plan, function=play, timeout_s=CASE_TIMEOUT_S):
    """Run a case with ``function``; return {"plan", "ranks": a report of each rank, "seconds"}."""
    start = time.monotonic()
    reports = []
    for rank, (report, error) in enumerate(ranks.run(function, plan, timeout_s=timeout_s)):
        if report is None:
            report = {"rank": rank, "log": [], "faulty": rank == plan.faulty, "ahead": rank == plan.ahead, "broken": ""}
            was_killed = plan.fault == "kill" and rank == plan.faulty and isinstance(error, ChildProcessError)
            outcome = "killed" if was_killed else "HANG" if isinstance(error, TimeoutError) else "BROKEN"
            report["log"] = [(plan.at, outcome, 0.0, str(error)[:2000])]
            report["triggered"] = was_killed
        elif report["broken"]:
            report["log"].append((-1, "BROKEN", 0.0, report["broken"]))
        reports.append(report)
    return {"plan": plan, "ranks": reports, "seconds": time.monotonic() - start}


class Campaign:
    """Cases of consecutive seeds, run by several threads.

    Attributes:
        cases: the reports of the cases that have ended.
        errors: texts of the errors of ``warm_up``.
        skipped: the number of cases that were left out, because their kernels were not compiled in time.
        run_start: the time of the start of ``run``.
        pools: {world size: Ranks} that compiled kernels and will run cases. A GPU may belong to ranks of several pools:
            idle ranks launch nothing, so they do not slow down the ranks of a case.
    """

    def __init__(self, device_name, world_sizes, operators=(), jobs=1):
        self.device, self.world_sizes, self.operators, self.jobs = device_name, world_sizes, operators, jobs
        self.cases, self.errors, self.skipped, self.pools = [], [], 0, {}
        self._not_compiled, self._lock = set(), threading.Lock()
        self._start = self.run_start = time.monotonic()

    def plan(self, seed):
        return plan_of(seed, self.device, self.world_sizes, self.operators)

    def log(self, text):
        print(f"{time.monotonic() - self._start:5.0f} s  {text}", flush=True)

    def warm_up(self, first_seed, cases, jobs=None, seconds=None):
        """Compile the kernels of ``cases`` cases, in the order of their first use.

        Args:
            first_seed, cases: the cases.
            jobs: the number of pools that compile concurrently; by default 4, or 2 if a pool has more than 4 ranks.
            seconds: start to compile no variant after this time; each world size gets an equal share of it.
        """
        plans = [self.plan(seed) for seed in range(first_seed, first_seed + cases)]
        end = None if seconds is None else time.monotonic() + seconds
        for number, world_size in enumerate(self.world_sizes):  # kernels are specialized on the number of ranks
            names = list(dict.fromkeys(plan.name for plan in plans if plan.world_size == world_size))
            now = time.monotonic()
            deadline = None if end is None else now + (end - now) / (len(self.world_sizes) - number)
            pools = [Ranks(world_size, self.device) for _ in range(jobs or (4 if world_size <= 4 else 2))]
            left = self._compile_with(pools, names, deadline)
            self._not_compiled |= {(world_size, name) for name in left}
            self.pools[world_size] = pools[0]
            for ranks in pools[1:]:
                ranks.close()
            self.log(f"{len(names) - len(left)} of {len(names)} variants are compiled for {world_size} ranks")

    def _compile_with(self, pools, names, deadline):
        """Compile variants until the deadline; return the names of the others."""
        left = iter(names)
        _in_threads([lambda ranks=ranks: self._compile(ranks, left, deadline) for ranks in pools])
        return list(left)

    def _compile(self, ranks, names, deadline):
        while deadline is None or time.monotonic() < deadline:
            with self._lock:
                name = next(names, None)
            if name is None:
                return
            timeout_s = WARM_UP_S
            if deadline is not None:
                timeout_s = min(timeout_s, deadline + OVERRUN_S - time.monotonic())
            errors = [error for _, error in ranks.run(warm_all_shapes, name, timeout_s=timeout_s)]
            if timeout_s < WARM_UP_S and any(isinstance(error, TimeoutError) for error in errors):
                self._not_compiled.add((ranks.world_size, name))
                self.log(f"{name}: not compiled in time")
                continue
            for rank, error in enumerate(errors):
                if error is not None:
                    self.errors.append(f"{name}: rank {rank} raised in the warm-up: {str(error)[-500:]}")
                    self.log(self.errors[-1])

    def run(self, first_seed, cases, seconds, save=lambda: None):
        """Run ``cases`` cases, or until the time is over; call ``save`` after every few cases."""
        self.run_start = time.monotonic()
        deadline = None if seconds is None else self.run_start + seconds
        seeds = iter(range(first_seed, first_seed + (cases or 10**9)))
        _in_threads([lambda: self._play_some(seeds, deadline, save)] * self.jobs)
        return self.cases

    def _play_some(self, seeds, deadline, save):
        with self._lock:
            pools, self.pools = self.pools, {}  # the first thread uses the pools of the warm-up
        while (plan := self._next_plan(seeds, deadline)) is not None:
            if plan.world_size not in pools:
                pools[plan.world_size] = Ranks(plan.world_size, self.device)
            case = play_case(pools[plan.world_size], plan)
            bad = bad_outcomes(case)
            if bad:
                self.log(f"seed {plan.seed}: " + "; ".join(bad))
            with self._lock:
                self.cases.append(case)
                if len(self.cases) % SAVE_EVERY == 0:
                    self.log(f"{len(self.cases)} cases, the last one with seed {plan.seed}: {plan.name}, {plan.fault}, "
                             f"{plan.world_size} ranks, {case['seconds']:.1f} s")
                    save()
        for ranks in pools.values():
            ranks.close()

    def _next_plan(self, seeds, deadline):
        while deadline is None or time.monotonic() < deadline:
            with self._lock:
                seed = next(seeds, None)
                if seed is None:
                    return None
                plan = self.plan(seed)
                if (plan.world_size, plan.name) not in self._not_compiled:
                    return plan
                self.skipped += 1
        return None


def _in_threads(functions):
    """Run functions concurrently; raise the first exception when all have ended."""
    with ThreadPoolExecutor(len(functions)) as executor:
        futures = [executor.submit(function) for function in functions]
    for future in futures:
        future.result()


# ---- outcomes ----


def bad_outcomes(case):
    return [
        f"rank {report['rank']} call {number}: {outcome}: {text}"
        for report in case["ranks"] for number, outcome, _, text in report["log"] if outcome in BAD
    ]


def fault_happened(case):
    """Return whether the fault of a case happened; a kill or a stop, while a healthy rank still had calls to make."""
    fault = case["plan"].fault
    if fault not in ("kill", "stop"):
        return fault == "none" or any(report["triggered"] for report in case["ranks"])
    healthy = [report for report in case["ranks"] if not report["faulty"]]
    if any(outcome != CORRECT for report in healthy for _, outcome, _, _ in report["log"]):
        return True
    # Every call after a kill needs the dead rank. Calls after a stop may succeed, so their times decide.
    stops = [report["stop_time"] for report in case["ranks"] if report.get("stop_time") is not None]
    return fault == "stop" and any(stop < report.get("end_time", 0.0) for stop in stops for report in healthy)


def describe(case):
    """Return lines of text that describe the outcome on each rank."""
    plan = case["plan"]
    lines = [str(plan)]
    for report in case["ranks"]:
        kinds = [word for word in ("faulty", "ahead") if report[word]]
        lines.append(f"rank {report['rank']}{' (' + ', '.join(kinds) + ')' if kinds else ''}:")
        for number, outcome, seconds, text in report["log"]:
            lines.append(f"  call {number}: {outcome}, {seconds:.2f} s{': ' if text else ''}{text}")
    return lines


def summarize(cases):
    """Return the counts as a JSON-compatible dictionary."""
    by_fault, by_operator, bad = {}, {}, []
    happened, over, ratio, allowance, slow = Counter(), [0.0], [0.0], [0.0], []
    by_world_size = Counter(case["plan"].world_size for case in cases)
    for case in cases:
        plan = case["plan"]
        happened[plan.fault] += fault_happened(case)
        for report in case["ranks"]:
            kind = "faulty rank" if report["faulty"] else "healthy ranks"
            for number, outcome, seconds, text in report["log"]:
                by_fault.setdefault(f"{plan.fault}, {kind}", Counter())[outcome] += 1
                by_operator.setdefault(plan.operator, Counter())[outcome] += 1
                if outcome in BAD:
                    bad.append({"seed": plan.seed, "rank": report["rank"], "call": number, "outcome": outcome,
                                "seconds": seconds, "timeout": round(report.get("timeout", 0.0), 2),
                                "allowance": round(report.get("allowance", 0.0), 2), "text": text[:600]})
                elif outcome.endswith("Error") and not report["faulty"]:
                    over.append(seconds - report["timeout"])
                    slow.append({"seed": plan.seed, "rank": report["rank"], "call": number, "seconds": seconds,
                                 "timeout": round(report["timeout"], 2),
                                 "allowance": round(report["allowance"], 2)})
                    ratio.append(seconds / report["timeout"])
                    allowance.append(report["allowance"])
    return {
        "cases": len(cases),
        "cases_by_world_size": {str(size): count for size, count in sorted(by_world_size.items())},
        "cases_by_fault": dict(Counter(case["plan"].fault for case in cases)),
        "cases_in_which_the_fault_happened": dict(happened),
        "cases_with_a_host_that_runs_ahead": sum(case["plan"].ahead is not None for case in cases),
        "calls_by_fault": {key: dict(counts) for key, counts in sorted(by_fault.items())},
        "calls_by_operator": {key: dict(counts) for key, counts in sorted(by_operator.items())},
        "longest_error_beyond_the_timeout_s": round(max(over), 2),
        "longest_error_over_the_timeout": round(max(ratio), 2),
        "largest_allowance_s": round(max(allowance), 2),
        "slowest_errors": _slowest(slow),
        "wrong": sum(one["outcome"] == "WRONG" for one in bad),
        "hangs": sum(one["outcome"] in ("HANG", "LATE") for one in bad),
        "bad": bad,
        "gpus": sorted({report["gpu"] for case in cases for report in case["ranks"] if report.get("gpu")}),
    }


def add_up(one, other):
    """Return the sum of two summaries."""
    if isinstance(one, dict):
        return {key: add_up(one[key], other[key]) if key in one and key in other else one.get(key, other.get(key))
                for key in {**one, **other}}
    return one + other


def merge(one, other):
    total = add_up(one, other)
    for name in one:
        if name.startswith(("longest_", "largest_")):
            total[name] = max(one[name], other[name])
    total["slowest_errors"] = _slowest(total.get("slowest_errors", []))
    for name in ("gpus", "revisions"):
        total[name] = sorted(set(total[name]))
    return total | {"device": one["device"], "seeds": one["seeds"] + other["seeds"]}


def _slowest(errors):
    return sorted(errors, key=lambda one: one["timeout"] - one["seconds"])[:5]


def table(summary):
    """Return the number of calls by fault and outcome, as a markdown table."""
    counts = summary["calls_by_fault"]
    outcomes = sorted({outcome for row in counts.values() for outcome in row}, key=lambda name: (name in BAD, name))
    lines = [f"| fault | {' | '.join(outcomes)} |", "|---" * (len(outcomes) + 1) + "|"]
    for fault in counts:
        lines.append(f"| {fault} | {' | '.join(str(counts[fault].get(outcome, 0)) for outcome in outcomes)} |")
    return "\n".join(lines)


class Summary:
    """The file for the counts of a campaign; with ``--add`` they are added to the counts in the existing file."""

    def __init__(self, args, campaign):
        folder = Path(args.out) if args.out else RESULTS
        self.path, self._args, self._campaign = folder / f"chaos-{args.device}.json", args, campaign
        self._revision = revision()
        self._before = json.loads(self.path.read_text()) if args.add and self.path.exists() else None

    def write(self):
        """Write the counts of the campaign so far and return them."""
        campaign, seed = self._campaign, self._args.seed
        summary = summarize(campaign.cases) | {"device": self._args.device}
        summary["seconds"] = round(time.monotonic() - campaign.run_start)
        summary["revisions"] = [self._revision]
        summary["seeds"] = [[seed, seed + len(campaign.cases) + campaign.skipped]]
        summary["skipped"], summary["errors_of_the_warm_up"] = campaign.skipped, campaign.errors
        if self._before is not None:
            summary = merge(self._before, summary)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(summary, indent=1) + "\n")
        return summary


def run_and_report(args):
    """Run the campaign of the command line; return the exit status."""
    try:
        launch.pick_device(args.device, max(args.ranks))
        names_of(args.ops)
    except ValueError as error:  # too few GPUs, or an unknown operator
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    cases = args.cases or (None if args.seconds else CASES)
    jobs = args.jobs or (4 if args.device == "cpu" and cases != 1 else 1)
    campaign = Campaign(args.device, args.ranks, args.ops, jobs)
    saved = Summary(args, campaign)
    with contextlib.nullcontext() if args.spawn else use_fastest_start(args.device):
        campaign.log("ranks can be started")
        if args.device != "cpu" and cases != 1:
            campaign.warm_up(args.seed, cases or CASES, args.warm_up_jobs, args.warm_up_seconds)
        played = campaign.run(args.seed, cases, args.seconds, save=saved.write)
    if cases == 1:
        print("\n".join(describe(played[0])))
        return int(any(bad_outcomes(case) for case in played))
    path, summary = saved.path, saved.write()
    print(table(summary))
    print(f"{summary['cases']} cases in {summary['seconds']} s; wrong results: {summary['wrong']}; "
          f"hangs: {summary['hangs']}; errors at most {summary['longest_error_beyond_the_timeout_s']} s after "
          f"the timeout; skipped: {summary['skipped']}; written to {path}")
    for one in summary["bad"]:
        print(f"seed {one['seed']} rank {one['rank']} call {one['call']}: {one['outcome']}: {one['text']}")
    return int(bool(summary["bad"] or campaign.errors) or not played)
