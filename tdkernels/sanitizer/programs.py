"""Interleave the programs of one interpreted launch: each has its own thread, and one thread runs at a time.

The programs start in the order of their ids, and only a limited number are alive at a time, as on a GPU. The
interpreter has one global program id, which is set to the id of the running program.
"""

import ctypes
import inspect
import threading
from collections.abc import Callable

from triton.runtime.interpreter import interpreter_builder


class _Abandoned(BaseException):
    """Raised in the threads of programs that are aborted."""


class Program:
    """A running program.

    Attributes:
        number: Number in the order of starting.
        index: Program id (x, y, z).
        awaits: (address, minimum value) of the 64-bit word that the program waits for, or None.
        error: The exception that ended the program, or None.
        is_over: Whether the program has ended.
    """

    def __init__(self, number: int, index: tuple[int, int, int], body: Callable[[], object]) -> None:
        self.number, self.index = number, index
        self.awaits = self.error = None
        self.is_over = False
        self._body = body
        self._turn, self._control = threading.Semaphore(0), threading.Semaphore(0)
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"program {index}", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Run the program until it stops at a scheduling point or ends."""
        interpreter_builder.grid_idx = self.index
        self._turn.release()
        self._control.acquire()

    def stop(self) -> None:
        """Return control to the scheduler. Call it in the program's thread."""
        self._control.release()
        self._turn.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """Abort the program and wait for the end of its thread."""
        if not self.is_over:
            self._is_abandoned = True
            self._turn.release()
        self._thread.join()

    def can_run(self) -> bool:
        """Return whether the program waits for nothing, or the value that it waits for is there."""
        return self.awaits is None or ctypes.c_int64.from_address(self.awaits[0]).value >= self.awaits[1]

    def _run(self):
        self._turn.acquire()
        try:
            if not self._is_abandoned:
                self._body()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._control.release()


class Collector:
    """Replacement for a kernel's function in Triton's loop over the grid.

    It collects the programs, and runs all of them when the loop reaches the last one.

    Args:
        fn: The kernel's function.
        run: Function that runs a list of (program id, function without arguments).
    """

    def __init__(self, fn, run):
        self._fn, self._run, self._programs = fn, run, []
        self.__globals__, self.__name__, self.__annotations__ = fn.__globals__, fn.__name__, fn.__annotations__
        self.__signature__ = inspect.signature(fn)

    def __call__(self, **args):
        index, dim = interpreter_builder.grid_idx, interpreter_builder.grid_dim
        self._programs.append((index, lambda: self._fn(**args)))
        if index == tuple(size - 1 for size in dim):
            self._run(self._programs)
