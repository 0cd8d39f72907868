"""Methods as CUDA graphs: how products of few rows are run, since a launch takes the host longer than they take a GPU.

One graph holds several calls, as that of a model holds several layers: a replay has a cost of its own, which would
otherwise be taken for the method's.
"""

import gc

import torch

from bench.core import harness
from tdkernels.autotune.timing import synchronize
from tdkernels.launch import rank_device

_CALLS = 8  # in a graph, at least, unless one call is to be timed by itself


class Captured:
    """A graph of ``calls`` calls or more. Called with anything it replays them, on the sets of inputs they came with.

    ``outputs`` are those of the last call, which was on ``input_sets[0]``.
    """

    def __init__(self, call, input_sets, calls):
        order = list(reversed(input_sets)) * -(-calls // len(input_sets))
        self.calls = len(order)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of this process may call CUDA meanwhile, NCCL's watchdog for one.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for inputs in order:
                self.outputs = None  # so that the next call can have its memory
                self.outputs = call(inputs)

    def __call__(self, _):
        self._graph.replay()


def capture(call, input_sets, references, calls=_CALLS):
    """(Captured, None), or (None, why the method cannot be captured); the same on all ranks.

    Args:     references: as of ``harness.why_it_is_wrong``; the first is of ``input_sets[0]``
    """
    if rank_device().type != "cuda":
        return None, "CUDA graphs need a GPU"
    call(input_sets[0])  # what a first call does besides cannot be captured
    synchronize(rank_device())
    captured = []
    reason = harness.why_it_fails(lambda sets: captured.append(Captured(call, sets, calls)), input_sets)
    if reason is None:
        reason = harness.why_it_fails(captured[0], None)
    if reason is None and references is not None:
        reason = harness.why_it_is_wrong(lambda _: captured[0].outputs, references[:1])
    if reason is not None:
        captured.clear()
        gc.collect()  # what the failed capture holds
        return None, reason
    return captured[0], None


def capture_all(calls, input_sets, references, unchecked):
    """({name: Captured}, {name: why not}) of {name: call}; ``unchecked``: names that the references do not fit."""
    captured, reasons = {}, {}
    for name, call in calls.items():
        graph, reason = capture(call, input_sets, None if name in unchecked else references)
        if reason is None:
            captured[name] = graph
        else:
            reasons[name] = reason
    return captured, reasons
