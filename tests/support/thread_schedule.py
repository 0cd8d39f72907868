"""Run threads one at a time, in an order that depends on a seed: for tests of protocols between partitions of warps."""

import random
import threading


class Stuck(AssertionError):
    """All threads wait."""


class Schedule:
    """Run threads one at a time, in an order that depends on a seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.turn = threading.Condition()
        self.waiting, self.running, self.errors, self.speeds = {}, None, [], {}

    def start(self, functions):
        """Run functions to their end. Raise the first error, or Stuck."""
        threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in functions.items()]
        self.waiting = {name: lambda: True for name in functions}
        # Some threads are slow: threads of equal speed would hardly ever overtake each other.
        self.speeds = {name: self.random.choice([1, 0.1, 0.01]) for name in functions}
        for thread in threads:
            thread.start()
        with self.turn:
            self._next()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def until(self, condition=lambda: True):
        """Let other threads run. Return when it is this thread's turn and ``condition()`` is true."""
        name = threading.current_thread().name
        with self.turn:
            self.waiting[name] = condition
            self._next()
            self._await(name)

    def _run(self, name, function):
        threading.current_thread().name = name
        try:
            with self.turn:
                self._await(name)
            function()
        except BaseException as error:
            self.errors.append(error)
        with self.turn:
            self._next()

    def _await(self, name):
        self.turn.wait_for(lambda: self.running == name or self.errors)
        if self.errors:
            raise Stuck("another thread failed")
        del self.waiting[name]

    def _next(self):
        ready = [name for name, condition in self.waiting.items() if condition()]
        self.running = self.random.choices(ready, [self.speeds[name] for name in ready])[0] if ready else None
        if self.waiting and not ready:
            self.errors.append(Stuck(f"all wait: {sorted(self.waiting)}"))
        if not ready or self.errors:
            self.running = None
        self.turn.notify_all()
