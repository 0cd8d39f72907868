"""Observer interface: the events of interpreted kernels and of the host code around them. ``hooks`` makes the calls."""

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np

    from tdkernels.lang.kernel import Kernel
    from tdkernels.symm.backends.emulated_network import EmulatedNetwork


class Observer:
    """Callbacks for observed events. Each does nothing by default. ``addresses`` are flat uint64 arrays."""

    def launch(self, kernel: "Kernel") -> "AbstractContextManager":
        """Return a context manager around one launch of a kernel."""
        return contextlib.nullcontext()

    def before(self, kind: str, addresses: "np.ndarray") -> None:
        """Run before a "store", an "atomic", or a "copy" by the host."""

    def accessed(self, kind: str, addresses: "np.ndarray", itemsize: int) -> None:
        """Run after a "read" or "write" by an interpreted kernel."""

    def atomic(
        self, op: str, addresses: "np.ndarray", operands: "Sequence", olds: "np.ndarray", sem: Any, scope: Any,
    ) -> None:
        """Run after an atomic. ``op`` is Triton's name of the operation, or "CAS"."""

    def device_function(self, name: str, args: tuple) -> "AbstractContextManager":
        """Return a context manager around a call of one of ``DEVICE_FUNCTIONS``."""
        return contextlib.nullcontext()

    def device_function_returned(self, name: str, result: Any) -> None:
        """Run after a call of one of ``DEVICE_FUNCTIONS``."""

    def host_access(self, kind: str, start: int, stop: int) -> None:
        """Run when the host reads or writes the addresses from ``start`` to ``stop`` outside a kernel."""

    def on_side_stream(self) -> "AbstractContextManager":
        """Return a context manager around host code that enqueues work on the side stream."""
        return contextlib.nullcontext()

    def joins_side_stream(self) -> None:
        """Run when the main stream waits for the side stream."""

    def meets(self, key: str, ranks: "Sequence[int]") -> "AbstractContextManager":
        """Return a context manager around a collective of the host (``GroupState.exchange``, ``dist.barrier``)."""
        return contextlib.nullcontext()

    def puts(
        self, network: "EmulatedNetwork", dst: int, src: int, num_bytes: int, peer: int, signal: int | None, value: int,
    ) -> None:
        """Run when a program passes a put, or a signal (``num_bytes`` is 0), to the emulated network."""

    def fences(self, network: "EmulatedNetwork") -> None:
        """Run when a program orders its later puts after its earlier ones."""

    def quiets(self, network: "EmulatedNetwork") -> None:
        """Run when a program waits for the completion of its puts."""

    def blocks(self) -> "AbstractContextManager":
        """Return a context manager around other collectives of the host, which wait for other ranks."""
        return contextlib.nullcontext()

    def spins(self) -> bool:
        """Run in each iteration of an unfinished wait.

        Return True if the observer has let other programs or ranks run; otherwise the interpreter sleeps.
        """
        return False

    def buffers_changed(self) -> None:
        """Run after a symmetric buffer was allocated or closed."""

    def run_programs(self, executor: Any, call: "Callable[[], Any]") -> Any:
        """Execute the programs of a launch. ``call()`` runs them one after the other."""
        return call()
