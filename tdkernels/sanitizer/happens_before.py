"""Find races in the logs of all ranks: two accesses to one byte, one of them a write, that no signal orders.

The happens-before order does not depend on the times of the accesses. It follows from edges that hold in every
execution with the same communication: program order, the order of launches on a stream, an acquire after the release
whose value it reads, the ordering rules of the network, and collectives of the host. So a race is found even if the
values were right in this run.
"""

import heapq
from collections import defaultdict
from itertools import count

import numpy as np

from tdkernels.sanitizer.clocks import Access, Release, Thread, join
from tdkernels.sanitizer.events import MAIN, SIDE
from tdkernels.sanitizer.locations import PRIVATE
from tdkernels.sanitizer.report import Race
from tdkernels.sanitizer.shadow import Shadow

_HOST = "host"
_FOREVER = 1 << 60


class Analysis:
    """One pass over the logs of all ranks. It finds at most one Race for each pair of source lines.

    Args:
        logs: {rank: result of ``Recorder.log``}.
    """

    def __init__(self, logs):
        self.logs = logs
        self.names = {}
        for log in logs.values():
            for inode, layout in log["names"].items():
                self.names.setdefault(inode, layout)
        self._found = {}  # source lines of two accesses -> (number of races, the earliest race)
        self._numbers, self._launch_of = count(1), {}
        self._accesses = [None]
        self._shadows = defaultdict(Shadow)  # by inode
        self._values = defaultdict(dict)  # (inode or rank, offset) -> {value: [Release, …]}
        self._ranks = {rank: _Rank(self, rank, log) for rank, log in logs.items()}
        self._met = defaultdict(dict)  # key of a collective -> {rank: clock}
        self._expected_values = self._written_values()

    def run(self):
        """Process the events of all ranks, causes before effects, and return the list of races."""
        queue = [(rank.time(), number) for number, rank in self._ranks.items() if not rank.is_over()]
        heapq.heapify(queue)
        waiting = []  # ranks whose next event depends on an event of another rank
        while queue or waiting:
            if not queue:  # the cause of the next event was not recorded
                (_, number), *queue = waiting
                waiting = []
                self._ranks[number].step()
            else:
                time, number = heapq.heappop(queue)
                if self._ranks[number].must_wait():
                    waiting.append((time, number))
                    continue
                self._ranks[number].step()
            queue += waiting
            waiting = []
            if not self._ranks[number].is_over():
                queue.append((self._ranks[number].time(), number))
            heapq.heapify(queue)
        ordered = sorted(self._found.values(), key=lambda found: found[1][0])
        return [Race.of(self, *pair, inode, offset, times) for times, (_, pair, inode, offset) in ordered]

    def _written_values(self):
        """Return {word: values written to it in the logs}. An acquire of such a value waits for the event with it."""
        written = defaultdict(set)
        for log in self.logs.values():
            for kind, *_rest in log["events"]:
                if kind == "atomic":
                    for inode, offset, _, new in _rest[3]:
                        if new is not None and inode != PRIVATE:
                            written[inode, offset].add(new)
                elif kind == "put" and _rest[5] is not None:
                    inode, offset, value = _rest[5]
                    written[inode, offset].add(value)
        return written

    def is_to_come(self, inode: int, offset: int, value: int) -> bool:
        """Return whether an event that was not processed yet writes this value to a word."""
        if inode == PRIVATE or value in self._values[inode, offset]:
            return False
        return value in self._expected_values.get((inode, offset), ())

    # ---- memory ----

    def access(self, thread, kind, pieces, site):
        """Record an access of a thread to pieces of memory, and report the races that it completes."""
        access = Access(thread, thread.now, kind, site)
        number = len(self._accesses)
        self._accesses.append(access)
        covered = lambda other: self._accesses[other].is_before(thread)  # noqa: E731
        for inode, starts, stops in pieces:
            shadow = self._shadows[inode] if inode != PRIVATE else self._ranks[thread.rank].shadow
            enter = shadow.write if kind == "write" else shadow.read
            for other, offset in enter(starts, stops, number, covered):
                self._report(self._accesses[other], access, inode, offset)

    def _report(self, first, second, inode, offset):
        """Add a race. Keep the earliest for each pair of lines, so that the report does not depend on the timing."""
        pair = sorted((first, second), key=self._order)
        lines = tuple((self.site(access), access.kind) for access in pair)
        one_rank = first.thread.rank == second.thread.rank  # prefer races between ranks, which are more informative
        entry = [one_rank, *map(self._order, pair), offset], pair, inode, offset
        times, earliest = self._found.get(lines, (0, entry))
        self._found[lines] = times + 1, min(earliest, entry, key=lambda one: one[0])

    def _order(self, access):
        """Return a sort key for two unordered accesses: the earlier launch comes first, then the write."""
        thread = access.thread
        host = thread.program is None
        launch = -1 if type(thread.launch) is not int or thread.stream == "network" else thread.launch
        return launch, access.kind == "read", thread.rank, host, thread.program or (), str(thread.item), access.time

    def site(self, access):
        return self.site_of(access.thread.rank, access.site)

    def site_of(self, rank, number):
        return tuple(self.logs[rank]["sites"][number])

    # ---- signals ----

    def word(self, rank, inode, offset):
        return inode or ("private", rank), offset

    def release(self, word, value, releases, old=None):
        """Write a value with releases to a word. If ``old`` is given, also keep the releases of that value."""
        carried = self._values[word].get(old, []) if old is not None else []
        self._values[word][value] = [*carried, *releases]

    def acquire(self, word, seen, lowest):
        """Return (value, releases) that an acquire synchronizes with.

        This is the first value that ends its wait (at least ``lowest``), even if the acquire read a later one.
        """
        values = self._values[word]
        if lowest is not None and seen in values:
            enough = [value for value in values if lowest <= value <= seen]
            seen = min(enough, default=seen)
        return seen, values.get(seen, [])

    # ---- collectives of the host ----

    def meet(self, key, rank, clock):
        """Record the clock with which a rank begins a collective."""
        self._met[key][rank] = clock

    def missing(self, key, ranks):
        """Return the recorded ranks that have not begun a collective yet."""
        return [rank for rank in ranks if rank in self._ranks and rank not in self._met[key]]

    def met(self, key):
        """Return the clocks with which the ranks began a collective."""
        return self._met[key].values()

    # ---- threads ----

    def new_thread(self, rank, stream, launch, kernel, program, item, clock):
        """Create a Thread with a new number."""
        thread = Thread(next(self._numbers), rank, stream, launch, kernel, program, item, clock)
        self._launch_of[thread.number] = (rank, stream), launch
        return thread

    def forget_covered(self, clock):
        """Remove the entries of threads whose launch is covered as a whole by another entry of the clock."""
        for key in [key for key in clock if type(key) is int]:
            stream, launch = self._launch_of[key]
            if clock.get(stream, -1) >= launch:
                del clock[key]


class _Rank:
    """Position of the analysis in the log of one rank."""

    def __init__(self, analysis, number, log):
        self._analysis, self._number = analysis, number
        self._events, self._at = log["events"], 0
        self.shadow = Shadow()  # shadow of the private memory, for one launch
        self._bases = {MAIN: {}, SIDE: {}}  # clock with which the next launch of a stream starts
        self._launches = {MAIN: 0, SIDE: 0}
        self._running = None
        self._written = self._pages_written()
        self._members = {}

    def is_over(self):
        return self._at >= len(self._events)

    def time(self):
        return self._events[self._at][1]

    def must_wait(self):
        """Return whether the next event is an effect of an event that was not processed yet."""
        kind, _, _, _, *more = self._events[self._at]
        if kind == "back":
            return bool(self._analysis.missing(more[0], self._members.get(more[0], ())))
        if kind == "atomic" and (more[1] != "XCHG" or "ACQUIRE" in more[2]):
            return any(self._analysis.is_to_come(inode, offset, old) for inode, offset, old, _ in more[0])
        return False

    def step(self):
        """Process the next event with the method named after its kind."""
        kind, _, program, site, *more = self._events[self._at]
        getattr(self, f"_{kind}")(program, site, *more)
        self._at += 1

    def _pages_written(self):
        """Return for each launch the pages of private memory that it writes. Only reads of these can be in a race."""
        pages, current = [], set()
        for kind, _, _, _, *more in self._events:
            if kind == "launch":
                current = set()
                pages.append(current)
            elif kind == "write":
                for inode, starts, stops in more[0]:
                    if inode == PRIVATE:
                        for start, stop in zip(starts.tolist(), stops.tolist()):
                            current.update(range(start >> 12, (stop - 1 >> 12) + 1))
        return iter(pages)

    # ---- launches ----

    def _launch(self, program, site, kernel, stream, program_keeps):
        self.shadow = Shadow()
        self._launches[stream] += 1
        self._running = _Launch(
            self._analysis, self._number, stream, self._launches[stream], kernel, self._bases[stream], program_keeps
        )
        self._pages = next(self._written)

    def _end(self, program, site):
        running, self._running = self._running, None
        base = self._bases[running.stream]
        for thread in running.threads:
            join(base, thread.clock)
        base[self._number, running.stream] = running.number
        self._analysis.forget_covered(base)

    def _item(self, program, site, number):
        self._running.begin_item(program, number)

    def _finish(self, program, site):
        self._running.finish(program)

    def _side(self, program, site):
        join(self._bases[SIDE], self._bases[MAIN])

    def _join(self, program, site):
        join(self._bases[MAIN], self._bases[SIDE])

    # ---- memory ----

    def _read(self, program, site, pieces):
        self._analysis.access(self._running.thread(program), "read", [*map(self._racy, pieces)], site)

    def _racy(self, piece):
        inode, starts, stops = piece
        if inode != PRIVATE:
            return piece
        pages = zip((starts >> 12).tolist(), ((stops - 1) >> 12).tolist())
        keep = np.array([not self._pages.isdisjoint(range(first, last + 1)) for first, last in pages], dtype=bool)
        return inode, starts[keep], stops[keep]

    def _write(self, program, site, pieces):
        self._analysis.access(self._running.thread(program), "write", pieces, site)

    def _host(self, program, site, kind, pieces, stream):
        """Process an access by the host as a launch of one program with this one access."""
        self._launches[stream] += 1
        launch = self._launches[stream]
        thread = self._analysis.new_thread(
            self._number, stream, launch, _HOST, None, None, dict(self._bases[stream])
        )
        self._analysis.access(thread, kind, pieces, site)
        self._bases[stream][self._number, stream] = launch

    def _atomic(self, program, site, words, op, sem, scope, lowest, by_network):
        analysis, thread = self._analysis, self._running.thread(program)
        releases, snapshot = "RELEASE" in sem, None
        if "ACQUIRE" in sem:
            for inode, offset, old, _ in words:
                value, found = analysis.acquire(analysis.word(self._number, inode, offset), old, lowest)
                for release in found:
                    if release.reaches(self._number, scope, by_network):
                        self._running.learn(thread, program, release.clock)
                        thread.acquired[release.rank] = inode, offset, value, site
        for inode, offset, old, new in words:
            if new is None:
                continue
            word, carried = analysis.word(self._number, inode, offset), []
            if releases:
                snapshot = snapshot or thread.snapshot()
                thread.released.append((thread.now - 1, inode, offset, new, site))
                carried = [Release(snapshot, self._number, scope, False, site)]
            # An exchange is a plain release store on a GPU. Other atomics also keep the releases of the old value.
            analysis.release(word, new, carried, None if op == "XCHG" else old)

    # ---- the network ----

    def _put(self, program, site, reads, writes, signal, peer):
        analysis, running = self._analysis, self._running
        sender = running.thread(program)
        clock = sender.snapshot()
        message = analysis.new_thread(self._number, "network", _FOREVER, sender.kernel, program, "put", clock)
        if reads or writes:
            analysis.access(message, "read", reads, site)
            analysis.access(message, "write", writes, site)
        if signal is not None:
            inode, offset, value = signal
            known = join(message.snapshot(), running.fenced.get((sender.number, peer), {}))
            analysis.release((inode, offset), value, [Release(known, self._number, "SYSTEM", True, site)])
            message.released.append((1, inode, offset, value, site))
        join(running.sent.setdefault((sender.number, peer), {}), message.snapshot())

    def _fence(self, program, site):
        thread = self._running.thread(program)
        for key, clock in self._running.sent.items():
            if key[0] == thread.number:
                join(self._running.fenced.setdefault(key, {}), clock)

    def _quiet(self, program, site):
        thread = self._running.thread(program)
        for key, clock in self._running.sent.items():
            if key[0] == thread.number:
                self._running.learn(thread, program, clock)

    # ---- collectives of the host ----

    def _out(self, program, site, key, ranks):
        self._members[key] = ranks
        self._analysis.meet(key, self._number, join(dict(self._bases[MAIN]), self._bases[SIDE]))

    def _back(self, program, site, key):
        for clock in self._analysis.met(key):
            join(self._bases[MAIN], clock)


class _Launch:
    """The threads of a launch that is being processed."""

    def __init__(self, analysis, rank, stream, number, kernel, base, program_keeps):
        self._analysis, self._rank, self._kernel, self._base = analysis, rank, kernel, base
        self.stream, self.number = stream, number
        self.threads = []
        self._current = {}  # program -> its current thread
        self._acquired_clocks = {}  # program -> clock that its waits have acquired
        self._program_keeps = program_keeps
        self.sent, self.fenced = {}, {}  # (thread, peer) -> clock

    def thread(self, program):
        """Return the current thread of a program."""
        thread = self._current.get(program)
        return self._begin(program, None, self._base) if thread is None else thread

    def begin_item(self, program, number):
        """Begin a work item with the clock of the launch: on a GPU any program may fetch any item.

        In some kernels a work item relies on earlier items of the same program. Such a kernel has the attribute
        ``program_keeps``. It is "waits" if an item reads data that an earlier item has waited for, and "stores" if an
        item signals data that an earlier item has stored.
        """
        base, before = dict(self._base), self._current.get(program)
        if self._program_keeps == "waits":
            join(base, self._acquired_clocks.get(program, {}))
        elif self._program_keeps == "stores" and before is not None:
            join(base, before.snapshot())
        self._begin(program, number, base)

    def finish(self, program):
        """Begin the end of a program, which is ordered after all of its items."""
        thread = self._begin(program, "end", self._base)
        for other in self.threads:
            if other.program == program and other is not thread:
                join(thread.clock, {**other.clock, other.number: other.now})

    def learn(self, thread, program, clock):
        """Add an acquired clock to a thread, and for later items of the program if ``program_keeps`` is "waits"."""
        join(thread.clock, clock)
        if self._program_keeps == "waits":
            join(self._acquired_clocks.setdefault(program, {}), clock)

    def _begin(self, program, item, base):
        thread = self._analysis.new_thread(
            self._rank, self.stream, self.number, self._kernel, program, item, dict(base)
        )
        self._current[program] = thread
        self.threads.append(thread)
        return thread
