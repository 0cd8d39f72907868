"""The programs of one interpreted launch, each in a thread; one thread runs at a time.

They are started in the order of their ids, and so many are alive at a time: as on a GPU, where the rest finds no room.
The interpreter has one global program id, which is set to that of the program that runs.
"""

import ctypes
import inspect
import threading

from triton.runtime.interpreter import interpreter_builder


class _Abandoned(BaseException):
    """Raised in the threads of programs that are not to go on."""


class Program:
    """A program that has been started.

    Attributes: awaits, the (address, least value) of the 64-bit word that it waits for, or None.
    """

    def __init__(self, number, index, body):
        self.number, self.index = number, index
        self.awaits = self.error = None
        self.is_over = False
        self._body = body
        self._turn, self._control = threading.Semaphore(0), threading.Semaphore(0)
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"program {index}", daemon=True)
        self._thread.start()

    def resume(self):
        """Run it until it stops at a point, or is over."""
        interpreter_builder.grid_idx = self.index
        self._turn.release()
        self._control.acquire()

    def stop(self):
        """In its thread: let the scheduler choose another."""
        self._control.release()
        self._turn.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def abandon(self):
        if not self.is_over:
            self._is_abandoned = True
            self._turn.release()
        self._thread.join()

    def can_run(self):
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
    """Stands for the function of a kernel in Triton's loop over the grid, and runs the programs at its last one.

    Args:
        fn: the function
        run: called with a list of (program id, function without arguments)
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
