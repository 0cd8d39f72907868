"""``schedule``: run the ranks and their programs in an order that is determined by a seed.

A rank or program can be interrupted before each atomic and each store to a peer's memory. One rank runs at a time
(``lockstep``). Within a rank, the programs of a launch are interleaved (``programs``), so that several of them share
the work queue; the interpreter alone runs one program after the other. The schedule also determines when the emulated
network delivers a message. The same seed gives the same order of all of these events.
"""

import contextlib
import random
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from triton.runtime.errors import InterpreterError

from tdkernels.sanitizer import hooks
from tdkernels.sanitizer.locations import PRIVATE, Locations
from tdkernels.sanitizer.lockstep import DeadlockError, Lockstep
from tdkernels.sanitizer.observer import Observer
from tdkernels.sanitizer.programs import Collector, Program
from tdkernels.sanitizer.session import Meeting, reject_gpus
from tdkernels.symm.backends import emulated_network
from tdkernels.symm.group import live_states, resolve_group

if TYPE_CHECKING:
    from tdkernels.symm.group import GroupLike

# Probabilities of a switch at a scheduling point. A schedule draws one for ranks and one for programs.
_CHANCES = (0.05, 0.2, 0.6)
_RESIDENT = (1, 2, 3, 5)  # concurrent programs of a launch; a schedule draws one of these numbers


@contextlib.contextmanager
def schedule(seed: Any, group: "GroupLike" = None) -> "Iterator[Schedule]":
    """Run the CPU ranks of a group within a ``with`` block in an order that is determined by a seed.

    Collective over ``group``. Make the calls once before the block, because the consensus checks and allocations of a
    first call are not scheduled. Timeouts still use real time, and ranks run slowly within the block.

    Args:
        seed: Any object; its ``str`` is the seed. It must be the same on all ranks.
        group: The ranks: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world.

    Yields:
        Schedule: Its attribute ``events`` lists (step, program, kind) of this rank. The list is the same in each run.

    Raises:
        DeadlockError: If all ranks wait.
        RuntimeError: If the rank's device is a GPU.

    Example:
        >>> with tdkernels.sanitizer.schedule(seed=7):
        ...     y = my_operator(x)
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
    """This rank's part of a schedule.

    Attributes:
        events: List of (step, number of the program or None, kind of the scheduling point).
    """

    def __init__(self, lockstep: Lockstep, seed: Any) -> None:
        self._lockstep = lockstep
        self._random = random.Random(f"{seed}/{lockstep.rank}")
        both = random.Random(str(seed))
        self._between_ranks, self._between_programs = both.choice(_CHANCES), both.choice(_CHANCES)
        self._resident = both.choice(_RESIDENT)
        self._running: Program | None = None  # the current program
        self._locations = Locations()
        self._own: set[int] = set()
        self.events: list[tuple] = []

    # ---- scheduling points ----

    def before(self, kind, addresses):
        if kind == "atomic" or self._is_for_a_peer(addresses):
            self._point(kind)

    def _is_for_a_peer(self, addresses):
        inodes = {self._locations.of(int(address))[0] for address in (addresses[0], addresses[-1])}
        return bool(inodes - self._own - {PRIVATE})

    def _point(self, kind):
        """Scheduling point: possibly switch to another rank, or to another program of this rank."""
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
        """Deliver messages of the emulated networks only when the schedule says so; their own threads stay idle."""
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

    def deliver_all(self) -> None:
        """Deliver all pending messages."""
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
