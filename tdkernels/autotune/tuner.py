"""The tuner: all ranks of a group try the same candidates in the same order, in synchronized steps.

1. Candidates. Take the operator's search space without configs that cannot run, and without those that the cost model
   estimates to be far slower than the best. The default config, the torch baseline, if it exists, and the best estimate
   of each method and transport always stay.
2. Compile. Each rank of a node compiles its share of the distinct kernels, several at a time. Then every rank loads all
   of them from Triton's cache on disk.
3. Check. Call each candidate once on poisoned memory, and compare with the operator's reference in a wider dtype.
4. Time. Candidates run in bursts, in turn. Each round eliminates slow ones, so later rounds can be longer. The best
   two, the baseline and the default take part in the last. The slowest rank's time counts. If the host takes about as
   long as the GPU, a CUDA graph replays the calls: programs that care about such small calls capture them. If they
   cannot be captured, small differences say nothing, and the default is kept. The winner is checked again at the end.

A candidate that fails, gives a wrong result or times out on any rank is rejected on all ranks (``group_step``). This
does not cover torch's collectives (baseline and reference): peers of a rank that dies there wait for torch's timeout.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import date
from typing import TYPE_CHECKING

import torch

from tdkernels.autotune import disk_cache
from tdkernels.autotune.accuracy import Reference, poison
from tdkernels.autotune.candidate import Result, Trial, first_of_each_kind
from tdkernels.autotune.group_step import GroupStep, TuningError, one_line
from tdkernels.autotune.hardware import hardware
from tdkernels.autotune.invariance import batch_invariant
from tdkernels.autotune.modes import get_mode, mode
from tdkernels.autotune.order import balanced_orders
from tdkernels.autotune.problem import Problem, device_of, with_index
from tdkernels.autotune.rounds import FINAL, HAS_GRAPHS, HOST_BOUND, HOST_COUNTS, NOISE, ROUNDS, calls_of
from tdkernels.autotune.selection import forget
from tdkernels.autotune.table import Entry
from tdkernels.autotune.timing import burst, burst_in_graph, lead_calls, slowest_link, synchronize
from tdkernels.autotune.tunable import tunable as tunable_by_name
from tdkernels.autotune.tunable import versions
from tdkernels.rounding import cdiv
from tdkernels.symm import resolve_group
from tdkernels.symm.group import group_state
from tdkernels.symm.timeout import get_timeout

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.tunable import Tunable
    from tdkernels.symm.group import GroupLike

_log = logging.getLogger("tdkernels")

_PRUNE = 2.0  # candidates whose estimate is more than this many times the best estimate are not tried
_MAX_CANDIDATES = 32
_CALL_LIMIT_S = 10.0  # limit for each wait of a candidate for a peer
_COLD_BYTES = 256 << 20  # total size of the operand sets that calls cycle through: several times any L2 cache
_MAX_SETS = 8


def tune(
    operator: str, *sizes: int, dtype: torch.dtype = torch.bfloat16, layout: str | None = None,
    group: "GroupLike" = None, device: torch.device | str | None = None, budget_s: float = 20.0,
    on_progress: Callable[[str, int, int], None] | None = None, keep: bool = True,
) -> Result:
    """Find the best config for a problem and store it in the user's cache. Collective over ``group``.

    Args:
        operator: Name of the operator, such as "ag_gemm".
        sizes: Sizes of the whole problem, such as M, N, K. ``python -m tdkernels tune OPERATOR`` lists their names.
        dtype: Dtype of the operands.
        layout: Layout of the operands; None for the operator's default.
        group: The group of ranks: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world. No operator of
            this group may be in flight.
        device: Device of this rank. None means its GPU if the group's backend is NCCL, else the CPU.
        budget_s: Seconds after which the elimination ends with the measurements so far.
        on_progress: Function that is called with (stage, done, total) on rank 0.
        keep: Whether to write the result to the user's cache. If not, later calls do not find it.

    Returns:
        The Result: the best config with its measurements, all candidates and a log.

    Raises:
        ValueError: If the problem is invalid, for example because the ranks do not divide a size.
        TuningError: If no candidate works.
        PeerTimeoutError: If a rank does not take part in time.
    """
    tunable = tunable_by_name(operator)
    group = resolve_group(group)
    state = group_state(group)
    device = with_index(device_of(group) if device is None else torch.device(device))
    layout = layout or tunable.default_layout(dtype)
    problem = Problem.on(device, operator, sizes, dtype, layout, state.world_size, state.local_world_size)
    reason = tunable.why_not(problem)
    if reason is not None:
        raise ValueError(f"{operator}: {reason}")
    return tune_problem(tunable, problem, device, group, budget_s=budget_s, on_progress=on_progress, keep=keep)


def tune_problem(
    tunable: "Tunable", problem: Problem, device: torch.device, group: "dist.ProcessGroup", *, budget_s: float = 20.0,
    on_progress: Callable[[str, int, int], None] | None = None, keep: bool = True,
) -> Result:
    """Tune a Problem, as ``tune`` does. Collective."""
    # Operators that a candidate calls look up their config. They must not be tuned while the candidate is timed.
    looking_up = mode("cached" if get_mode() == "on" else get_mode())
    # The caller may be inside a model. Disable autocast, which would make the reference inaccurate.
    with torch.no_grad(), torch.autocast(device.type, enabled=False), looking_up, batch_invariant(False):
        with GroupStep(problem, group, device) as ranks:
            return _Tuner(tunable, problem, ranks, budget_s, on_progress, keep).tune()


class _Tuner:
    def __init__(self, tunable, problem, ranks, budget_s, on_progress, keep):
        self.tunable, self.problem, self.ranks = tunable, problem, ranks
        self.device, self.group, self.state = ranks.device, ranks.group, ranks.state
        self.rates = hardware(self.device, problem.torch_dtype)
        self._burst_of, self._keep = burst, keep
        self.budget_s, self.begin = budget_s, time.monotonic()
        self._callback = on_progress if self.state.rank == 0 else None
        self.log = []

    def tune(self):
        trials = self._candidates()
        self.ranks.renew_scratch()
        self.ranks.must("operands", self._make_operands)
        self.ranks.must("memory for the reference", self._try_memory)
        self.ranks.must("reference", self._make_reference)
        self._compile(trials)
        self._check(trials)
        finalists = self._eliminate(trials)
        entry = self._final(trials, finalists)
        self.ranks.settle()
        if self.state.rank == 0 and self._keep:
            disk_cache.store([entry])
        forget(self.tunable, self.problem, self.state.choices)
        self.state.barrier("tune")  # no rank looks up the entry before it is stored
        # Times of different rounds are not comparable: later rounds are longer, and GPU clocks change.
        timed = sorted((t for t in trials if t.reason is None and t.samples), key=lambda t: (-t.last_round, t.ms))
        failed = [t for t in trials if t.reason is not None]
        return Result(entry, timed + failed, self.log, time.monotonic() - self.begin)

    def _candidates(self):
        space = list(dict.fromkeys(self.tunable.space(self.problem, self.device)))
        legal = [config for config in space if self.tunable.illegal(config, self.problem, self.device) is None]
        estimates = {config: self.tunable.estimate_ms(config, self.problem, self.rates) for config in legal}
        ranked = sorted(legal, key=estimates.get)
        near = [config for config in ranked if estimates[config] <= _PRUNE * estimates[ranked[0]]]  # may be empty
        always = [self.tunable.default(self.problem, self.device), *self._plain(), *first_of_each_kind(ranked)]
        kept = list(dict.fromkeys(always + near[:_MAX_CANDIDATES]))
        beyond, pruned = max(len(near) - _MAX_CANDIDATES, 0), len(legal) - len(near)
        plain = ", the unfused baseline" if self._plain() else ""
        self._say(
            f"{len(space)} candidates: {len(space) - len(legal)} cannot run, {pruned} are beyond {_PRUNE:g} x the best "
            f"estimate, {beyond} beyond the first {_MAX_CANDIDATES}; {len(kept)} are tried, among them the "
            f"default{plain} and the best estimate of each method and transport"
        )
        fields = {**asdict(self.problem), "candidates": [str(config) for config in kept]}
        self.state.check_consensus(f"tune {self.problem.operator}", fields)
        return [Trial(config) for config in kept]

    def _plain(self):
        """Return a list with the config of the torch baseline, or an empty list if it does not exist or cannot run."""
        plain = self.tunable.plain()
        possible = plain is not None and self.tunable.illegal(plain, self.problem, self.device) is None
        return [plain] if possible else []

    def _make_operands(self):
        seed = 1 + self.state.rank
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw():
            return self.tunable.operands(self.problem, self.device, generator)

        first = draw()
        nbytes = sum(tensor.nbytes for tensor in first)
        sets = 2 if self.device.type == "cpu" else max(2, min(_MAX_SETS, cdiv(_COLD_BYTES, nbytes)))
        self.operands = [first] + [draw() for _ in range(sets - 1)]

    def _try_memory(self):
        """Allocate as much memory as the reference needs, so that a rank with too little fails before a collective."""
        torch.empty(self.tunable.reference_bytes(self.problem), dtype=torch.uint8, device=self.device)

    def _make_reference(self):
        self.reference = Reference(self.tunable, self.problem, self.operands[0], self.group)

    def _compile(self, trials):
        by_kernel = {}
        for trial in trials:
            kernel = self.tunable.compiled(trial.config)
            if kernel is not None and self.device.type == "cuda":
                by_kernel.setdefault(kernel, []).append(trial)
        kernels = list(by_kernel)
        if kernels and self.problem.num_nodes > 1:
            self.ranks.must("network", self._init_network)
        topology = self.state.topology
        mine = kernels[topology.local_rank :: topology.local_world_size]
        failures = {}
        for share in (mine, kernels):
            own = self._compile_all({kernel: by_kernel[kernel][0].config for kernel in share})
            own = {kernels.index(kernel): reason for kernel, reason in own.items()}
            for rank, reasons in enumerate(self.ranks.all_say("compile", own)):
                for index, reason in reasons.items():
                    failures.setdefault(int(index), f"does not compile on rank {rank}: {reason}")
            if kernels:
                self._progress("compile", len(share), len(kernels))
        for index, reason in failures.items():
            for trial in by_kernel[kernels[index]]:
                self._reject(trial, reason)

    def _init_network(self):
        """Initialize the network library, which multi-node kernels are linked with."""
        from tdkernels.symm.backends.shmem_heap import heap_for
        heap_for(self.device)

    def _compile_all(self, configs):
        """Compile for each config, several at a time. Return {kernel: reason} for those that do not compile."""
        if not configs:
            return {}

        def compile_one(config):
            torch.cuda.set_device(self.device)  # the current device is a property of the thread
            try:
                self.tunable.compile(self.operands[0], self.problem, config)
            except Exception as error:
                return one_line(error)
            return None

        threads = max(1, min(8, (os.cpu_count() or 1) // self.state.local_world_size, len(configs)))
        with ThreadPoolExecutor(threads) as pool:
            reasons = dict(zip(configs, pool.map(compile_one, configs.values()), strict=True))
        return {kernel: reason for kernel, reason in reasons.items() if reason is not None}

    def _check(self, trials):
        for done, trial in enumerate(trials):
            if trial.reason is None:
                self._try_candidate(trial)
            self._progress("check", done + 1, len(trials))

    def _try_candidate(self, trial):
        """Check one call of a candidate. Return False if the candidate is rejected."""
        if self._attempt(trial, lambda: self._check_call(trial.config)) is None:
            return False
        # The call has ended on all ranks; until then the network might still read from this memory. All ranks poison it
        # before any rank continues, because peers write to it.
        self.ranks.must("poison", self._poison)
        return True

    def _check_call(self, config):
        """Run one call and raise an error if its output is wrong."""
        operands = self.tunable.prepared(self.operands[0], self.problem, self.group, config)
        raw_output = self.tunable.run(operands, self.problem, self.group, config)
        synchronize(self.device)
        self.ranks.scratch.check()
        output = self.tunable.comparable(raw_output, self.problem)
        try:
            self.reference.check(output)
        finally:
            poison((raw_output, output))

    def _poison(self):
        """Overwrite the workspaces, so that the next candidate cannot pass the check with old data."""
        for workspace in self.ranks.scratch.workspaces.values():
            if workspace.buffer is not None:
                workspace.buffer.tensor(workspace.rank)[workspace.data_offset :].fill_(0xFF)
        synchronize(self.device)

    def _eliminate(self, trials):
        """Run the rounds and return the remaining trials, the fastest first."""
        left = [trial for trial in trials if trial.reason is None]
        for number, round_ in enumerate(ROUNDS[self.device.type]):
            completed = self._run_round(left, round_, number, f"round {number + 1}", self.budget_s)
            if number == 0 and completed and self._should_use_graphs(left):
                self._burst_of = burst_in_graph
                self._say("the host takes about as long as the GPU: a CUDA graph replays the calls")
                completed = self._run_round(left, round_, number, f"round {number + 1}", self.budget_s)
            left = sorted((trial for trial in left if trial.reason is None and trial.samples), key=lambda t: t.ms)
            if not left:
                raise TuningError(f"{self.problem}: no candidate runs: {trials[0].reason}")
            left = [trial for trial in left if trial.ms <= round_.tolerance * left[0].ms][: round_.keep]
            if not completed:
                self._say(f"the budget of {self.budget_s:g} s ended the elimination in round {number + 1}")
                break
        return left

    def _should_use_graphs(self, trials):
        """Return whether the fastest call can be captured and takes the host about as long as the GPU."""
        timed = [trial for trial in trials if trial.reason is None and trial.samples]
        best = min(timed, key=lambda t: t.ms, default=None)
        can = self.tunable.goes_in_graphs(self.problem) and HAS_GRAPHS[self.device.type]
        return can and best is not None and best.host_ms >= HOST_COUNTS[self.device.type] * best.ms

    def _run_round(self, trials, round_, number, stage, budget_s=float("inf")):
        """Time bursts of each trial in the orders of ``order``. Return False if the budget ended the round."""
        before = {id(trial): trial.ms for trial in trials}
        for trial in trials:
            trial.samples, trial.host_samples = [], []
            trial.last_round = number
        # The given order comes first: if the budget ends the round, the first trials count most.
        orders = [trials, *balanced_orders(trials, round_.repeats - 1)]
        for repeat, order in enumerate(orders):
            for done, trial in enumerate(order):
                if trial.reason is None:
                    calls = calls_of(round_.ms, before[id(trial)] or trial.ms)
                    values = self._attempt(trial, lambda t=trial, n=calls: self._burst(t, n))
                    if values is not None:
                        slowest = max(values)
                        trial.samples.append(slowest[0])
                        trial.host_samples.append(slowest[1])
                        if values[0][2] > budget_s:  # all ranks use the time of rank 0
                            return False
                self._progress(stage, repeat * len(trials) + done + 1, round_.repeats * len(trials))
        return True

    def _burst(self, trial, calls):
        """Run a burst: (ms of a call, ms until the host has launched it, seconds since the start of tuning)."""
        used = self.operands[: lead_calls(self.device) + calls]
        sets = [self.tunable.prepared(each, self.problem, self.group, trial.config) for each in used]
        ms, host_ms = self._burst_of(
            lambda operands: self.tunable.run(operands, self.problem, self.group, trial.config), sets, calls,
            self.device, self.group,
        )
        self.ranks.scratch.check()
        return ms, host_ms, time.monotonic() - self.begin

    def _final(self, trials, left):
        """Time the best two, the default, the baseline and the computation alone once more. Return the Entry."""
        default, round_ = trials[0], FINAL[self.device.type]
        plain = next((trial for trial in trials if [trial.config] == self._plain()), None)
        always = [default] if plain in (None, default) else [default, plain]
        finalists = left[:2] + [trial for trial in always if trial.reason is None and trial not in left[:2]]
        self.ranks.must("computation alone", self._make_local)
        local = self.ranks.must("computation alone", lambda: self._local_ms(round_))
        self._run_round(finalists, round_, len(ROUNDS[self.device.type]), "final")
        best = self._best_that_is_right(finalists, default)
        plain_ms = None if plain is None else plain.ms
        self._say(f"best {best.ms:.4f} ms, plain {plain_ms} ms, default {default.ms} ms")
        rate = slowest_link(self.device, self.group)
        wire_ms = None if rate is None else self.tunable.floors(self.problem).wire_bytes / rate * 1e3
        return Entry(
            self.problem, versions(self.tunable), self.tunable.config_to_dict(best.config), best.ms, plain_ms,
            default.ms, max(local), wire_ms or None, date.today().isoformat(), self._burst_of is burst_in_graph,
            baseline=self.tunable.baseline,
        )

    def _best_that_is_right(self, finalists, default):
        """Return the fastest finalist that still passes the check after all these calls."""
        for trial in self._in_order([t for t in finalists if t.reason is None], default):
            if self._try_candidate(trial):
                return trial
        raise TuningError(f"{self.problem}: no candidate survived the final: {finalists[0].reason}")

    def _in_order(self, finalists, default):
        """Sort by time, but put the default first if the best is host-bound and hardly faster."""
        ranked = sorted(finalists, key=lambda t: t.ms)
        if default not in ranked:
            return ranked
        best = ranked[0]
        hardly = default.ms <= NOISE * best.ms and [best.config] != self._plain()
        if best is default or not hardly or best.host_ms < HOST_BOUND[self.device.type] * best.ms:
            return ranked
        self._say(f"the host takes as long as the calls: {best.config} is no better than the default")
        return [default, *(trial for trial in ranked if trial is not default)]

    def _make_local(self):
        self.local = [self.tunable.local(operands, self.problem) for operands in self.operands[:2]]

    def _local_ms(self, round_):
        calls = calls_of(round_.ms, self.tunable.floors(self.problem).computation_ms(self.rates))
        run = self._burst_of
        bursts = [run(lambda call: call(), self.local, calls, self.device, self.group) for _ in range(round_.repeats)]
        return statistics.median(ms for ms, _ in bursts)

    def _attempt(self, trial, do):
        """Call ``do`` for a candidate on all ranks. Return their values, or None if it fails on any rank."""
        values, failure = self.ranks.attempt(do, min(_CALL_LIMIT_S, get_timeout() / 4))
        if failure is not None:
            self._reject(trial, failure)
        return values

    def _reject(self, trial, reason):
        trial.reason = trial.reason or reason
        trial.samples, trial.host_samples = [], []
        self._say(f"rejected: {trial.config}: {reason}")

    def _progress(self, stage, done, total):
        """Call ``on_progress``. If it raises, do not call it again: the other ranks have continued meanwhile."""
        if self._callback is not None:
            try:
                self._callback(stage, done, total)
            except Exception:
                self._callback = None
                _log.exception("tune %s: on_progress failed and is not called any more", self.problem)

    def _say(self, text):
        self.log.append(text)
        if self.state.rank == 0:
            _log.info("tune %s: %s", self.problem, text)
