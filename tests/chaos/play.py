"""Run a case of the fault campaign on one rank: make the calls, inject the fault, judge the outcomes."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from triton.runtime import interpreter

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError
from tdkernels.lang.gluon_kernel import GluonKernel
from tdkernels.lang.kernel import Kernel
from tdkernels.symm.group import number_of_launches
from tdkernels.symm.workspace import Workspace
from tests.chaos import problems
from tests.chaos.plan import CONTROL_TIMEOUT_S
from tests.support import host_collectives
from tests.support.ranks import ASKED, a_group, device

# Outcomes of a call. Those in BAD fail the campaign.
CORRECT, INJECTED, NOT_REPORTED = "correct", "injected", "not reported"
WRONG, UNNAMED, LATE, SILENT, SPURIOUS = "WRONG", "UNNAMED", "LATE", "SILENT", "SPURIOUS"
BAD = {WRONG, UNNAMED, LATE, SILENT, SPURIOUS, "HANG", "BROKEN"}
NAMED = {"PeerTimeoutError", "PeerFailedError", "PlanMismatchError", "ValueError", "RuntimeError"}
WARM_TIMEOUT_S = 120.0
# ncclCommDestroy is collective among the ranks of a host (NCCL user guide). After a rank was killed, the others could
# hang in it instead of returning their reports. So the groups of cases use gloo; the world of a pool keeps NCCL.
GROUP_BACKEND = "gloo" if ASKED == "cuda" else None


class Interrupt(Exception):
    """The exception that a fault raises in the middle of a call."""


class Moments:
    """Count the launches and, on CPU ranks, the stores of kernels; call ``act`` at one of them.

    Attributes:
        after_launch: call ``act`` after the launch with the number ``at_launch``, not before it.
        at_end: call ``act`` at the end of the call if the call has fewer launches.
    """

    def __init__(self):
        self.launches = self.stores = 0
        self.at_launch = self.at_store = self.act = None
        self.after_launch = self.at_end = False

    def _launch(self, original, *args, **kwargs):
        self.launches += 1
        is_chosen = self.launches == self.at_launch
        if is_chosen and not self.after_launch:
            self._act()
        result = original(*args, **kwargs)
        if is_chosen and self.after_launch:
            self._act()
        return result

    def _store(self, original, *args, **kwargs):
        self.stores += 1
        if self.stores == self.at_store:
            self._act()
        return original(*args, **kwargs)

    def _act(self):
        act, self.act = self.act, None
        if act is not None:
            act()

    def end_call(self):
        if self.at_end:
            self._act()

    @contextlib.contextmanager
    def counted(self):
        self.launches = self.stores = 0
        kinds = {kind: kind.launch_bound for kind in (Kernel, GluonKernel)}
        builder = interpreter.interpreter_builder
        names = ("create_masked_store", "create_atomic_rmw", "create_atomic_cas")
        for kind, original in kinds.items():
            kind.launch_bound = lambda *args, original=original, **kwargs: self._launch(original, *args, **kwargs)
        for name in names:
            original = getattr(builder, name)
            setattr(builder, name, lambda *args, original=original, **kwargs: self._store(original, *args, **kwargs))
        try:
            yield
        finally:
            for kind, original in kinds.items():
                kind.launch_bound = original
            for name in names:
                delattr(builder, name)


class Player:
    def __init__(self, plan, group):
        self.plan, self.group, self.rank = plan, group, dist.get_rank()
        self.timeout, self.pause = plan.timeouts[self.rank], plan.pause
        self.is_faulty = self.rank == plan.faulty and plan.fault != "none"
        self.on_cpu = device().type == "cpu"
        # On GPUs the hosts of all ranks run ahead. On CPU ranks one host does, because it does not check for errors.
        self.ahead = plan.ahead is not None and (not self.on_cpu or plan.ahead == self.rank)
        self.moments, self.helpers = Moments(), []
        self.warm_s, self.longest_warm, self.warm_launches, self.warm_stores = 0.0, 0.0, 4, 20
        self.log, self.waiting = [], []  # outcomes; calls whose results are checked at the end
        self.triggered = False
        self.stop_time, self.end_time = None, 0.0  # of a stop of this rank; of its last call

    # ---- calls ----

    def warm_up(self):
        """Cache the shapes, and measure the duration of a call."""
        tdkernels.set_timeout(WARM_TIMEOUT_S)
        for turn in range(2):
            for shape in self.plan.cached_shapes:
                problem = self._problem(shape, 90 + turn)
                start = time.monotonic()
                with self.moments.counted():
                    for _ in problem.steps(self.plan.backward):
                        pass
                    tdkernels.synchronize()
                if shape == self.plan.shape:
                    self.warm_s = time.monotonic() - start  # the first call also loads or compiles the kernels
                    self.longest_warm = max(self.longest_warm, self.warm_s)
                    self.warm_launches, self.warm_stores = self.moments.launches, self.moments.stores
                problem.check()

    def _problem(self, shape, call):
        return problems.make_problem(self.plan.name, shape, 100 * self.plan.seed + call, self.group)

    def play(self):
        plan = self.plan
        self.warm_up()
        calls = [self._problem(plan.shape, number) for number in range(plan.calls + 1)]
        if self.is_faulty:
            self._prepare_fault(calls)
        self._scale_times()
        tdkernels.set_timeout(self.timeout)
        with contextlib.ExitStack() as stack:
            if self.ahead and self.on_cpu:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(Workspace, "check", lambda workspace, in_call=True: None)
            ended = self._make_calls(calls)
        if self.ahead:
            self._check_at_end(ended)
        for helper in self.helpers:
            printed, _ = helper.communicate()
            if printed:
                self.stop_time = float(printed)
        self.waiting.clear()

    def _scale_times(self):
        """Make the timeout at least twice the duration of a call on any rank; collective."""
        times = torch.tensor([self.warm_s, self.longest_warm], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        usual, longest = times.tolist()
        scale = max(1.0, 2 * usual / min(self.plan.timeouts))
        self.timeout, self.pause = self.timeout * scale, self.plan.pause * scale
        # Additional time that a call may take: the machine is busy, and the interpreter is slow.
        self.allowance = (1.0 if self.on_cpu else 3.0) + 3 * max(longest, 0.5)

    def _make_calls(self, calls):
        """Call until an error, and once more; return the number of the call with the error, or None."""
        for number, problem in enumerate(calls[:-1]):
            error, seconds, launched = self._call(number, problem)
            if error is None and self.ahead:
                self.waiting.append((number, problem))
                continue
            self._record(number, seconds, *self._judge(problem, error, seconds))
            raised_by_all = getattr(error, "in_step", False) and (not self.ahead or number == self.plan.at)
            if error is None or raised_by_all:
                continue  # the ids of this call were wrong
            may_continue = isinstance(error, TypeError) or (_is_injected(error) and not launched)
            if not may_continue:  # the rank has skipped a collective and must not make further calls
                self._must_raise(number + 1, calls[number + 1])
            return number
        return None

    def _call(self, number, problem):
        """Make a call; return (the error or None, seconds, whether the step that failed had launched a kernel)."""
        has_fault = self.is_faulty and number == self.plan.at
        before = number_of_launches()
        with self.moments.counted():
            if has_fault:
                self._begin_fault()
            start = time.monotonic()
            try:
                for _ in problem.steps(self.plan.backward):
                    before = number_of_launches()
                self.moments.end_call()
                if not self.ahead:
                    tdkernels.synchronize()
                error = None
            except Exception as raised:
                error = _without_frames(raised)
            seconds = time.monotonic() - start
            self.end_time, self.moments.act = time.time(), None
        return error, seconds, number_of_launches() > before

    def _must_raise(self, number, problem):
        error, seconds, _ = self._call(number, problem)
        try:
            if error is None and self.ahead:
                tdkernels.synchronize()
        except Exception as raised:
            error = _without_frames(raised)
        if error is None:
            self._record(number, seconds, SILENT, "a call after an error raised nothing")
        else:
            outcome, text = self._judge(problem, error, seconds)
            if outcome in BAD:
                self._record(number, seconds, outcome, text)

    def _check_at_end(self, ended):
        """Check the results of calls that the host did not wait for; they count only if there is no error."""
        start, error = time.monotonic(), None
        try:
            tdkernels.synchronize()
        except Exception as raised:
            error = _without_frames(raised)
        self.end_time = time.time()
        for number, problem in self.waiting:
            if error is None and ended is None:
                self._record(number, 0.0, *self._judge(problem, None, 0.0))
            else:
                self._record(number, 0.0, NOT_REPORTED, "")
        if error is not None and ended is None:
            seconds = time.monotonic() - start
            self._record(self.plan.calls, seconds, *self._judge(None, error, seconds))

    # ---- outcomes ----

    def _judge(self, problem, error, seconds):
        """Return (outcome, text) of a call."""
        plan = self.plan
        if error is None:
            try:
                problem.check()
            except AssertionError as wrong:
                return WRONG, str(wrong)
            return CORRECT, ""
        text = f"{type(error).__name__}: {error}"
        if self.is_faulty and (_is_injected(error) or (plan.fault == "type" and isinstance(error, TypeError))):
            return INJECTED, text
        if plan.fault == "none":
            return SPURIOUS, text
        if not _names_its_call(error, self.rank):
            return UNNAMED, text
        if seconds > 2 * self.timeout + self.allowance and not self.is_faulty:
            return LATE, text
        return type(error).__name__, text

    def _record(self, number, seconds, outcome, text):
        self.log.append((number, outcome, round(seconds, 3), text[:600]))

    # ---- faults ----

    def _prepare_fault(self, calls):
        plan, problem = self.plan, calls[self.plan.at]
        if plan.fault in ("known shape", "new shape"):
            calls[plan.at] = self._problem(plan.other, plan.at)
        elif plan.fault == "ids":
            problem.corrupt_ids()
        elif plan.fault == "type":
            problem.options["config"] = "not a config"

    def _begin_fault(self):
        plan, moments = self.plan, self.moments
        self.triggered = plan.fault not in ("raise", "between")
        if plan.fault == "delay":
            time.sleep(self.pause)
        elif plan.fault == "raise":
            self._at_a_store(_raise, self._trigger)
        elif plan.fault == "between":
            moments.at_launch = 1 + int(plan.moment * self.warm_launches)
            moments.act = lambda: (self._trigger(), _raise())
        elif plan.fault in ("kill", "stop") and plan.counted_in == "stores":
            self._at_a_store(self._kill if plan.fault == "kill" else self._stop)
        elif plan.fault in ("kill", "stop") and plan.counted_in == "launches":
            self._at_a_launch(self._kill if plan.fault == "kill" else self._stop)
        elif plan.fault in ("kill", "stop"):
            signals = "-KILL" if plan.fault == "kill" else "-STOP"
            after = plan.moment * max(self.warm_s, 0.05)
            resume = f"; sleep {self.pause:.3f}; kill -CONT {os.getpid()}" if plan.fault == "stop" else ""
            self._run_in_background(f"sleep {after:.3f}; date +%s.%N; kill {signals} {os.getpid()}{resume}")

    def _at_a_store(self, *acts):
        self.moments.at_store = 1 + int(self.plan.moment * self.warm_stores)
        self.moments.act = lambda: [act() for act in reversed(acts)]

    def _at_a_launch(self, act):
        """Act before or after a launch; on a GPU the kernel may still run after it."""
        position, moments = self.plan.moment * self.warm_launches, self.moments
        moments.at_launch, moments.after_launch = 1 + int(position), position % 1 >= 0.5
        moments.act, moments.at_end = act, True

    def _trigger(self):
        self.triggered = True

    def _kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self):
        self._run_in_background(f"sleep {self.pause:.3f}; kill -CONT {os.getpid()}")
        self.stop_time = time.time()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _run_in_background(self, command):
        """Run a shell command in the background: a stopped rank cannot continue itself. It may print the stop time."""
        helper = subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.helpers.append(helper)


def _raise():
    raise Interrupt("injected by the campaign")


def _is_injected(error):
    if "in the middle of a call" in str(error):  # the library's error in a later call
        return False
    return "injected by the campaign" in f"{error!r} {error.__cause__!r}"


def _without_frames(error):
    """Return the error without the frames that keep the group's tensors alive."""
    chain = error
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
    return error


def _names_its_call(error, rank):
    """Return whether an error is of a type of the library and names an operator or a rank."""
    if isinstance(error, PeerTimeoutError):
        return bool(error.operator) and error.rank == rank and error.peer != rank
    if not isinstance(error, RuntimeError | ValueError) or isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    text = str(error)
    if any(name in text for name in problems.OPERATORS):
        return True
    return not isinstance(error, PlanMismatchError) and bool(re.search(r"rank \d", text))


def _group():
    """Return a context manager for the group of a case."""
    if GROUP_BACKEND is not None:
        _move_collectives_to_host()
    return a_group(backend=GROUP_BACKEND)


@functools.cache
def _move_collectives_to_host():
    host_collectives.install()  # gloo supports few collectives of GPU tensors


def play(plan):
    """Run a case on this rank; return a report of plain types."""
    with _group() as group:
        player = Player(plan, group)
        try:
            player.play()
            broken = ""
        except Exception as error:
            broken = f"{type(error).__name__}: {error}"
            _without_frames(error)
        finally:
            tdkernels.set_timeout(CONTROL_TIMEOUT_S)
        report = {
            "rank": player.rank, "log": player.log, "triggered": player.triggered, "warm": player.longest_warm,
            "timeout": player.timeout, "faulty": player.is_faulty, "ahead": player.ahead, "broken": broken,
            "allowance": getattr(player, "allowance", 0.0), "stop_time": player.stop_time, "end_time": player.end_time,
            "gpu": torch.cuda.get_device_name(device()) if device().type == "cuda" else None,
        }
        del group, player
    if device().type == "cuda":
        torch.cuda.empty_cache()
    return report


def warm_all_shapes(name):
    """Compile the kernels of a key of ``problems.TABLE`` for every shape, on this rank."""
    tdkernels.set_timeout(4 * WARM_TIMEOUT_S)
    with _group() as group:
        for shape in range(4):
            problem = problems.make_problem(name, shape, shape, group)
            for _ in problem.steps("halves" not in name):
                pass
            problem.check()
        del problem, group
    tdkernels.set_timeout(CONTROL_TIMEOUT_S)


def use_device():
    """Run a kernel of torch on this rank."""
    torch.ones(4, device=device()).sum().item()
