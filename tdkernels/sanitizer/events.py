"""Record the memory accesses of a rank's programs as a list of events for ``happens_before``.

An event is a tuple. Its first four items are (kind, time in ns, program, site). ``site`` is an index into ``sites``. It
is the innermost Python frame outside of Triton and ``tdkernels.lang``, which is a line of the operator. The kinds and
their further items are:

    launch     kernel, stream, attribute ``program_keeps`` of the kernel
    end        none: the launch has ended
    read       pieces
    write      pieces
    atomic     [(inode, offset, old, new or None)], operation, semantics, scope, value waited for, whether by await_put
    item       number of the work item that the program begins
    finish     none: the program has called ``finish``
    host       "read" or "write", pieces, stream
    put        pieces read, pieces written, signal (inode, offset, value) or None, peer
    fence      none: later puts of the program are ordered after its earlier puts
    quiet      none: the program has waited for the completion of its puts
    side       none: the side stream waits for the main stream
    join       none: the main stream waits for the side stream
    out        key, ranks: a collective of the host begins
    back       key: it ends

Pieces are lists of (inode, starts, stops), as in ``locations``.
"""

import contextlib
import sys
import time
from pathlib import Path

import numpy as np
import triton

from tdkernels.sanitizer.hooks import program
from tdkernels.sanitizer.locations import Locations
from tdkernels.sanitizer.observer import Observer

MAIN, SIDE = 0, 1
_HERE = Path(__file__).resolve().parent
_SKIPPED = (str(_HERE), str(_HERE.parent / "lang"), str(Path(triton.__file__).parent), contextlib.__file__, "<")


class Recorder(Observer):
    """Observer that records the events of this rank, in order."""

    def __init__(self):
        self.events, self.sites, self._site_numbers = [], [], {}
        self.locations = Locations()
        self._is_skipped = {}
        self._stream = MAIN
        # For programs that are in a wait: the value waited for, and the programs that wait in await_put.
        self._expected, self._by_network = {}, set()

    def log(self) -> dict:
        """Return the recording in a form that can be pickled."""
        self.locations.describe()
        return {"events": self.events, "sites": self.sites, "names": self.locations.names}

    def _add(self, kind, *more, at=None):
        self.events.append((kind, time.monotonic_ns() if at is None else at, program(), self._site(), *more))

    def _site(self):
        """Return the index in ``sites`` of the line that is being executed."""
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            skip = self._is_skipped.get(code)
            if skip is None:
                skip = self._is_skipped[code] = code.co_filename.startswith(_SKIPPED)
            if not skip:
                break
            frame = frame.f_back
        key = (None, 0, "") if frame is None else (code.co_filename, frame.f_lineno, code.co_name)
        number = self._site_numbers.get(key)
        if number is None:
            number = self._site_numbers[key] = len(self.sites)
            self.sites.append(key)
        return number

    # ---- launches ----

    @contextlib.contextmanager
    def launch(self, kernel):
        self.locations.describe()
        self._add("launch", kernel.fn.__name__, self._stream, getattr(kernel, "program_keeps", None))
        self._expected.clear()
        self._by_network.clear()
        try:
            yield
        finally:
            self._add("end")

    @contextlib.contextmanager
    def device_function(self, name, args):
        me = program()
        if name == "_spin":
            self._expected[me] = int(np.min(_value(args[2])))
        elif name == "await_put":
            self._by_network.add(me)
        elif name == "finish":
            self._add("finish")  # before the atomic in ``finish``, which releases all items of the program
        try:
            yield
        finally:
            if name == "_spin":
                self._expected.pop(me, None)
            elif name == "await_put":
                self._by_network.discard(me)

    def device_function_returned(self, name, result):
        if name == "await_work_item":
            self._add("item", int(_value(result)))

    # ---- memory ----

    def accessed(self, kind, addresses, itemsize):
        self._add(kind, self.locations.pieces(addresses, itemsize))

    def before(self, kind, addresses):
        # A release gets the time before its value becomes visible, and an acquire the time after it has read the value.
        # So causes come before effects when the logs are merged by time.
        self._began = time.monotonic_ns()

    def atomic(self, op, addresses, operands, olds, sem, scope):
        words = []
        for address, operand, old in zip(addresses, operands, olds):
            words.append((*self.locations.of(int(address)), int(old), _written(op, operand, int(old))))
        reads_only = all(new is None for *_, new in words)
        me = program()
        self._add(
            "atomic", words, op, sem.name, scope.name, self._expected.get(me), me in self._by_network,
            at=None if reads_only else self._began,
        )

    def host_access(self, kind, start, stop):
        if stop > start:
            pieces = self.locations.pieces(np.array([start]), stop - start)
            if pieces[0][0]:  # skip private memory, which is not checked across launches
                self._add("host", kind, pieces, self._stream)

    # ---- the host and the network ----

    @contextlib.contextmanager
    def on_side_stream(self):
        self._add("side")
        before, self._stream = self._stream, SIDE
        try:
            yield
        finally:
            self._stream = before

    def joins_side_stream(self):
        self._add("join")

    @contextlib.contextmanager
    def meets(self, key, ranks):
        self._add("out", key, list(ranks))
        yield
        self._add("back", key)

    def puts(self, network, dst, src, num_bytes, peer, signal, value):
        offset = network._bases[peer] - network._bases[network.rank]
        reads = writes = []
        if num_bytes:
            reads = self.locations.pieces(np.array([src]), num_bytes)
            writes = self.locations.pieces(np.array([dst + offset]), num_bytes)
        raised = None if signal is None else (*self.locations.of(signal + offset), value)
        self._add("put", reads, writes, raised, peer)

    def fences(self, network):
        self._add("fence")

    def quiets(self, network):
        self._add("quiet")

    def buffers_changed(self):
        self.locations.refresh()


def _value(handle):
    """Return the value of an interpreter tensor or of a plain number."""
    data = getattr(getattr(handle, "handle", None), "data", handle)
    data = getattr(data, "value", data)
    return np.asarray(data).reshape(-1)[0] if np.size(data) == 1 else np.asarray(data)


def _written(op, operand, old):
    """Return the value of the word after an atomic; None if the atomic does not change it."""
    if op == "XCHG":
        return int(operand)
    if op == "CAS":
        compared, new = map(int, operand)
        return new if old == compared else None
    if op == "ADD":
        return old + int(operand) if int(operand) else None
    if op in ("MAX", "MIN"):
        return {"MAX": max, "MIN": min}[op](old, int(operand))
    return old  # other operations are not used for signals
