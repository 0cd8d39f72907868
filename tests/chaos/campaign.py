"""The fault campaign: pools of ranks that run cases, the counts of their outcomes, and the summary."""

import contextlib
import json
import queue
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import torch

from tdkernels import launch
from tdkernels.launch import RankError, RankPool
from tests.chaos.plan import plan_of
from tests.chaos.play import BAD, play, warm_all_shapes
from tests.chaos.problems import TABLE
from tests.support import forked_ranks
from tests.support.ranks import ASKED, _call, device

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "reliability"
# A rank that has not returned by then hangs. The waits, kernels and references of a case take a few seconds.
CASE_TIMEOUT_S = 180.0 if ASKED == "cpu" else 240.0
GRACE_S = 90.0  # for the other ranks after one was killed or has raised
WARM_UP_S = 400.0


@contextlib.contextmanager
def use_forkserver():
    """Fork the ranks of pools from a server process that has imported everything, unless a server runs already.

    A rank then starts in 0.1 s instead of 5 s, and a campaign kills many ranks.
    """
    with mock.patch.object(launch, "new_process", launch.new_process):  # restored at the end
        forked_ranks.install(["tests.chaos.play"])
        yield


def use_fastest_start(device_name):
    """Return ``use_forkserver()`` if forked ranks can use the device, otherwise a null context: ranks are spawned."""
    with use_forkserver():
        ranks = Ranks(2, device_name)
        try:
            works = all(error is None for _, error in ranks.run(_use_device, timeout_s=60.0))
        except Exception as error:
            print(f"ranks cannot be forked: {error}", flush=True)
            works = False
        ranks.close()
    return use_forkserver() if works else contextlib.nullcontext()


def _use_device():
    torch.ones(4, device=device()).sum().item()


class Ranks:
    """A pool of ranks that is recreated when it breaks."""

    def __init__(self, world_size, device_name):
        self._world_size, self._device, self._pool = world_size, device_name, None

    def run(self, function, *args, timeout_s=CASE_TIMEOUT_S):
        """Return [(result of a rank or None, its exception or None)]."""
        if self._pool is None or not self._pool.usable:
            self._pool = RankPool(self._world_size, self._device, timeout_s=timeout_s, grace_s=GRACE_S)
        self._pool.timeout_s = timeout_s
        try:
            return [(report, None) for report in self._pool.run(_call, function, *args)]
        except RankError as error:
            return list(zip(error.results, error.exceptions, strict=True))

    def close(self):
        if self._pool is not None:
            self._pool.close()


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
    """Cases of consecutive seeds, run by several threads."""

    def __init__(self, device_name, jobs):
        self.device, self.jobs, self.cases, self._lock = device_name, jobs, [], threading.Lock()

    def warm_up(self):
        """Compile all kernels, in several pools at a time."""
        work, problems = queue.Queue(), []

        def compile_some(world_size):
            ranks = Ranks(world_size, self.device)
            while True:
                try:
                    name = work.get_nowait()
                except queue.Empty:
                    break
                for _, error in ranks.run(warm_all_shapes, name, timeout_s=WARM_UP_S):
                    if error is not None:
                        problems.append(f"{name}: {str(error)[-500:]}")
            ranks.close()

        for world_size in (2, 3):  # kernels are specialized on the number of ranks
            for name in TABLE:
                work.put(name)
            _in_threads([lambda world_size=world_size: compile_some(world_size)] * 4)
        return problems

    def run(self, first_seed, cases, seconds, log=print, save=lambda: None):
        """Run ``cases`` cases, or until the time is over; call ``save`` after every 25."""
        deadline = None if seconds is None else time.monotonic() + seconds
        seeds = iter(range(first_seed, first_seed + (cases or 10**9)))

        def next_plan():
            if deadline is not None and time.monotonic() > deadline:
                return None
            with self._lock:
                seed = next(seeds, None)
            return None if seed is None else plan_of(seed, self.device)

        def play_some():
            pools = {world_size: Ranks(world_size, self.device) for world_size in (2, 3)}
            while (plan := next_plan()) is not None:
                case = play_case(pools[plan.world_size], plan)
                with self._lock:
                    self.cases.append(case)
                    count = len(self.cases)
                bad = bad_outcomes(case)
                if bad:
                    log(f"seed {plan.seed}: " + "; ".join(bad), flush=True)
                if count % 25 == 0:
                    log(f"{count} cases", flush=True)
                    with self._lock:
                        save()
            for ranks in pools.values():
                ranks.close()

        _in_threads([play_some] * self.jobs)
        return self.cases


def _in_threads(functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- outcomes ----


def bad_outcomes(case):
    return [
        f"rank {report['rank']} call {number}: {outcome}: {text}"
        for report in case["ranks"] for number, outcome, _, text in report["log"] if outcome in BAD
    ]


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
    for case in cases:
        plan = case["plan"]
        happened[plan.fault] += plan.fault == "none" or any(report["triggered"] for report in case["ranks"])
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

    def __init__(self, args):
        folder = Path(args.out) if args.out else RESULTS
        self.path, self._args, self._start = folder / f"chaos-{args.device}.json", args, time.monotonic()
        self._before = json.loads(self.path.read_text()) if args.add and self.path.exists() else None

    def write(self, cases):
        """Write the counts of ``cases`` and return them."""
        seed = self._args.seed
        summary = summarize(cases) | {"device": self._args.device, "seconds": round(time.monotonic() - self._start)}
        summary["seeds"] = [[seed, seed + len(cases)]]
        if self._before is not None:
            summary = merge(self._before, summary)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(summary, indent=1) + "\n")
        return summary


def run_and_report(args):
    """Run the campaign of the command line; return the exit status."""
    cases = args.cases or (None if args.seconds else 1000)
    with use_fastest_start(args.device):
        campaign = Campaign(args.device, args.jobs or (1 if args.device == "shared" or cases == 1 else 4))
        start = time.monotonic()
        if args.device != "cpu" and cases != 1:
            for problem in campaign.warm_up():
                print(f"not warmed up: {problem}", flush=True)
            print(f"kernels are compiled after {time.monotonic() - start:.0f} s", flush=True)
        saved = Summary(args)
        played = campaign.run(args.seed, cases, args.seconds, save=lambda: saved.write(campaign.cases))
    if cases == 1:
        print("\n".join(describe(played[0])))
        return int(any(bad_outcomes(case) for case in played))
    path, summary = saved.path, saved.write(played)
    print(table(summary))
    print(f"{summary['cases']} cases in {summary['seconds']} s; wrong results: {summary['wrong']}; "
          f"hangs: {summary['hangs']}; errors at most {summary['longest_error_beyond_the_timeout_s']} s after "
          f"the timeout; written to {path}")
    for one in summary["bad"]:
        print(f"seed {one['seed']} rank {one['rank']} call {one['call']}: {one['outcome']}: {one['text']}")
    return int(bool(summary["bad"]))


