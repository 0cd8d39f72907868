"""The base classes of the problems of a fault campaign, and the comparison with exact results."""

import torch

import tdkernels
from tests.support.ranks import DEVICE

BF16, FP32 = torch.bfloat16, torch.float32
EXACT_DTYPES = (BF16,) if DEVICE == "cuda" else (BF16, FP32)  # on a GPU each dtype is compiled
TOLERANCE = 2e-2 if DEVICE == "cuda" else 1e-3  # TF32, fp32; wrong data is off by about 1


def assert_near(name, got, exact, tolerance=TOLERANCE):
    """Raise AssertionError unless each element of ``got`` is within the tolerance of ``exact``, which is in fp64."""
    got, exact = got.detach().cpu().double(), exact.detach().cpu().double()
    assert got.shape == exact.shape, f"{name}: shape {list(got.shape)}, not {list(exact.shape)}"
    infinite = exact.isinf()
    assert torch.equal(got[infinite], exact[infinite]), f"{name}: finite elements where infinity is expected"
    got, exact = got[~infinite], exact[~infinite]
    if exact.numel():
        bound = tolerance * (exact.abs() + exact.square().mean().sqrt()) + 1e-6
        wrong = ~((got - exact).abs() <= bound)  # a NaN is wrong, too
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong"


class Problem:
    """One call on every rank of the group.

    Attributes:
        options: further arguments of the first public call; a fault may change them.
        results: by name, available after ``steps``.
    """

    bounded = True  # whether no step waits for its device, so that the host can run ahead

    def corrupt_ids(self):
        """Put an out-of-range id or split into this rank's operands."""
        raise NotImplementedError

    @classmethod
    def has_ids(cls):
        return cls.corrupt_ids is not Problem.corrupt_ids


class ExactCase(Problem):
    """A problem with one output and a case that checks all results; subclasses define its call."""

    def steps(self, backward):
        output = self._call()
        self.results = {"output": output.detach()}
        yield
        if backward:
            output.backward(self.case.dy)
            self.results |= self.case.gradients()
            yield

    def check(self):
        self.case.check(self.results)


class NamedResults(Problem):
    """A problem whose results and fp64 references are dictionaries; subclasses define its calls."""

    tolerance = TOLERANCE

    def steps(self, backward):
        self.case.group = self.group
        outputs, gradients = self._call()
        self.results = {name: output.detach() for name, output in outputs.items()}
        yield
        if backward:
            torch.autograd.backward(list(outputs.values()), gradients)
            self.results |= self._gradients()
            yield

    def check(self):
        tdkernels.synchronize()
        expected = self._expected()
        for name, got in self.results.items():
            assert_near(name, got, expected[name], self.tolerance)
