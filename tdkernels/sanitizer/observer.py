"""What can be observed of an interpreted kernel and of the host code around it; ``hooks`` makes the calls."""

import contextlib


class Observer:
    """Calls that an observer may want; each does nothing by default. ``addresses`` are flat uint64 arrays."""

    def launch(self, kernel):
        """Return a context manager around one launch of a kernel."""
        return contextlib.nullcontext()

    def before(self, kind, addresses):
        """Run before a "store" or "atomic"."""

    def accessed(self, kind, addresses, itemsize):
        """Run after a "read" or "write" by an interpreted kernel."""

    def atomic(self, op, addresses, operands, olds, sem, scope):
        """Run after an atomic; ``op`` as Triton names it, or "CAS"."""

    def device_function(self, name, args):
        """Return a context manager around a call of one of ``DEVICE_FUNCTIONS``."""
        return contextlib.nullcontext()

    def device_function_returned(self, name, result):
        pass

    def host_access(self, kind, start, stop):
        """Run when the host reads or writes symmetric memory outside a kernel."""

    def on_side_stream(self):
        return contextlib.nullcontext()

    def joins_side_stream(self):
        pass

    def meets(self, key, ranks):
        """Return a context manager around a collective of the host (``GroupState.exchange``, ``dist.barrier``)."""
        return contextlib.nullcontext()

    def puts(self, network, dst, src, num_bytes, peer, signal, value):
        """Run when a program hands a put or a signal (``num_bytes`` 0) to the emulated network."""

    def fences(self, network):
        pass

    def quiets(self, network):
        pass

    def blocks(self):
        """Return a context manager around other collectives of the host, which wait for other ranks."""
        return contextlib.nullcontext()

    def spins(self):
        """Return whether the observer has let time pass in a wait that has not ended; else the interpreter sleeps."""
        return False

    def buffers_changed(self):
        """Run after a symmetric buffer was made or closed."""

    def run_programs(self, executor, call):
        """Execute the programs of a launch; ``call()`` runs them one after the other."""
        return call()
