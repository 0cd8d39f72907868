"""``schedule``: run the ranks and their programs in an order that follows from a seed.

A rank or program can be interrupted before each atomic and each store to a peer's memory. Between ranks one runs at a
time (``lockstep``); within a rank the programs of a launch are interleaved (``programs``), so that the work queue is
shared by several of them, which the interpreter alone never does. The emulated network delivers a message when the
schedule says so. The same seed gives the same order of all of this.
"""

import contextlib
import random
import tempfile

from triton.runtime.errors import InterpreterError

from tdkernels.sanitizer import hooks
from tdkernels.sanitizer.locations import PRIVATE, Locations
from tdkernels.sanitizer.lockstep import DeadlockError, Lockstep
from tdkernels.sanitizer.observer import Observer
from tdkernels.sanitizer.programs import Collector, Program
from tdkernels.sanitizer.session import Meeting, reject_gpus
from tdkernels.symm.backends import emulated_network
from tdkernels.symm.group import live_states, resolve_group

_CHANCES = (0.05, 0.2, 0.6)  # of a switch at a point: a schedule has one for ranks, and one for programs
_RESIDENT = (1, 2, 3, 5)  # programs of a launch at a time


@contextlib.contextmanager
def schedule(seed, group=None):
    """Run what the CPU ranks of a group do in the block in the order of a seed; collective.

    Make the calls once before the block: what the ranks do only in a first call, to agree and to allocate, is not
    scheduled. Timeouts still count real time, and a rank runs slowly here.

    Args:
        seed: Anything with a ``str``; the same on all ranks.
        group (ProcessGroup, DeviceMesh or None): The ranks; None means the world.

    Yields:
        Schedule: Its ``events`` are (step, program, kind) of this rank, the same each time.

    Raises:
        DeadlockError: If all ranks wait.
        RuntimeError: If the rank's device is a GPU.
    """
    reject_gpus()
    group = resolve_group(group)
    meeting = Meeting(group)
    with tempfile.TemporaryDirectory(prefix="tdkernels-schedule-") as folder:
        folder = meeting.texts("folder", folder)[0]
        lockstep = Lockstep(folder, meeting.rank, len(meeting.ranks), seed)
        meeting.texts("ready", "")
        running = Schedule(lockstep, seed)
        try:
            lockstep.begin()
            with hooks.observed(running), running.network_delivers():
                try:
                    yield running
                except DeadlockError as error:
                    raise DeadlockError(f"rank {meeting.rank}: {error or 'no program of this rank waits'}") from None
                finally:
                    running.deliver_all()
                    lockstep.leave()
            meeting.texts("over", "")
        finally:
            meeting.post("over", "")
            lockstep.close()


class Schedule(Observer):
    """This rank's part of a schedule."""

    def __init__(self, lockstep, seed):
        self._lockstep = lockstep
        self._random = random.Random(f"{seed}/{lockstep.rank}")
        both = random.Random(str(seed))
        self._between_ranks, self._between_programs = both.choice(_CHANCES), both.choice(_CHANCES)
        self._resident = both.choice(_RESIDENT)
        self._running = None  # the program that runs
        self._locations = Locations()
        self._own = set()
        self.events = []

    # ---- points ----

    def before(self, kind, addresses):
        if kind == "atomic" or self._is_for_a_peer(addresses):
            self._point(kind)

    def _is_for_a_peer(self, addresses):
        inodes = {self._locations.of(int(address))[0] for address in (addresses[0], addresses[-1])}
        return bool(inodes - self._own - {PRIVATE})

    def _point(self, kind):
        """Here another rank may run, or another program of this one."""
        self._lockstep.progress()
        running = self._running
        self.events.append((self._lockstep.step, running and running.number, kind))
        if self._random.random() < self._between_ranks:
            self._lockstep.switch()
        if running is not None and self._random.random() < self._between_programs:
            running.stop()

    @contextlib.contextmanager
    def device_function(self, name, args):
        if name != "_spin" or self._running is None:
            yield
            return
        program = self._running
        program.wanted = int(_scalar(args[1])), int(_scalar(args[2]))
        yield
        program.wanted = program.awaits = None

    def spins(self):
        program = self._running
        if program is None:
            return False
        program.awaits = program.wanted
        program.stop()
        program.awaits = None
        return True

    # ---- the programs of a launch ----

    def launch(self, kernel):
        self._own = {
            self._locations.of(workspace.buffer._tensors[workspace.rank].data_ptr())[0]
            for state in live_states() for workspace in state.workspaces.values() if workspace.buffer is not None
        }
        return contextlib.nullcontext()

    def buffers_changed(self):
        self._locations.refresh()

    def run_programs(self, executor, call):
        executor.fn = Collector(executor.fn, self._interleave)
        try:
            return call()
        except InterpreterError as error:
            if isinstance(error.__cause__, DeadlockError):
                raise error.__cause__ from None
            raise

    def _interleave(self, bodies):
        to_start, alive, number = list(reversed(bodies)), [], 0
        try:
            while to_start or alive:
                can = [program for program in alive if program.can_run()]
                choices = can + ["start"] * (len(alive) < self._resident and bool(to_start))
                choices += ["network"] * any(network._left for network in emulated_network._live)
                if not choices:
                    self._lockstep.switch(waits=True)
                    continue
                chosen = self._random.choice(choices)
                if chosen == "network":
                    self._deliver_one()
                    continue
                if chosen == "start":
                    chosen = Program(number, *to_start.pop())
                    alive.append(chosen)
                    number += 1
                self._resume(chosen, alive)
        except DeadlockError as error:
            raise DeadlockError(str(error) or self._waits(alive)) from None
        finally:
            self._running = None
            for program in alive:
                program.abandon()

    def _resume(self, program, alive):
        self._running = program
        program.resume()
        self._running = None
        if program.is_over:
            alive.remove(program)
            self._lockstep.progress()
            if program.error is not None:
                raise program.error

    def _waits(self, alive):
        self._locations.describe()
        texts = [
            f"program {program.index[0]} waits for {self._locations.name_of(program.awaits[0])} >= {program.awaits[1]}"
            for program in alive if program.awaits is not None
        ]
        return "deadlock: " + "; ".join(texts)

    # ---- the network and the host ----

    @contextlib.contextmanager
    def network_delivers(self):
        """Keep the networks' own threads asleep: what is put is delivered when the schedule says so."""
        networks = list(emulated_network._live)
        for network in networks:
            network._add = lambda peer, message, network=network: _add_quietly(network, peer, message)
            network.reseed(f"{self._lockstep._seed}/{self._lockstep.rank}")
        try:
            yield
        finally:
            for network in networks:
                del network._add

    def _deliver_one(self):
        network = self._random.choice([network for network in emulated_network._live if network._left])
        self.events.append((self._lockstep.step, None, "deliver"))
        with network._changed:
            network._deliver_one()
        self._lockstep.progress()
        if self._random.random() < self._between_ranks:
            self._lockstep.switch()

    def deliver_all(self):
        for network in emulated_network._live:
            self._deliver_from(network)

    def _deliver_from(self, network):
        with network._changed:
            while network._left:
                network._deliver_one()

    def quiets(self, network):
        self._point("quiet")
        self._deliver_from(network)

    @contextlib.contextmanager
    def blocks(self):
        self.deliver_all()
        self._lockstep.out()
        yield
        self._lockstep.back()

    def meets(self, key, ranks):
        return self.blocks()


def _add_quietly(network, peer, message):
    with network._changed:
        network._pending[peer][-1].append(message)
        network._left += 1


def _scalar(value):
    data = getattr(getattr(value, "handle", None), "data", value)
    return getattr(data, "item", lambda: data)()
