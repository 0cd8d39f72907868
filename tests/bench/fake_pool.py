"""Stand-in for the ranks of a benchmark program."""

from bench.core import harness


class FakePool:
    """A RankPool that measures nothing. It takes the place of the class, and records the requested measurements.

    measure: function of a measurement's arguments that returns the result of a rank.
    machine: the description of the machine; by default it has as many GPUs as there are ranks.
    """

    usable = True

    def __init__(self, measure, machine=None):
        self._measure, self._machine = measure, machine
        self.ranks, self.calls = None, []

    def __call__(self, ranks, device, timeout_s=None):
        self.ranks, self.calls = ranks, []
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def cases(self):
        """The first argument of each measurement."""
        return [arguments[0] for arguments in self.calls]

    def run(self, fn, *arguments):
        if fn is harness.link_rate:
            return [None]
        if fn is harness.machine:
            return [self._machine or {"gpu": "NVIDIA Testing", "num_gpus": self.ranks}]
        self.calls.append(arguments)
        return [self._measure(*arguments)]
