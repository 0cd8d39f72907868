"""Capture benchmark methods in CUDA graphs. Small-M GEMMs run this way: their launch takes longer than the kernel.

One graph holds several calls, as the graph of a model holds several layers. The cost of a replay is then spread over
these calls and not attributed to the method.
"""

import gc

import torch

from bench.core import harness
from tdkernels.autotune.timing import synchronize
from tdkernels.launch import rank_device

_CALLS = 8  # minimum number of calls in a graph, unless single calls are timed


class Captured:
    """A CUDA graph of at least ``calls`` calls. Calling it replays them on the captured input sets.

    ``outputs`` holds the outputs of the last call, whose inputs are ``input_sets[0]``.
    """

    def __init__(self, call, input_sets, calls):
        order = list(reversed(input_sets)) * -(-calls // len(input_sets))
        self.calls = len(order)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of this process, such as NCCL's watchdog, may call CUDA during the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for inputs in order:
                self.outputs = None  # free the memory for the next call
                self.outputs = call(inputs)

    def __call__(self, _):
        self._graph.replay()


def capture(call, input_sets, references, calls=_CALLS):
    """Capture a method. Return (Captured, None) or (None, reason); all ranks return the same kind of result.

    Args:
        references: as for ``harness.mismatch_reason``; the first entry belongs to ``input_sets[0]``. None disables
            the check.
    """
    if rank_device().type != "cuda":
        return None, "CUDA graphs need a GPU"
    call(input_sets[0])  # the one-time work of a first call cannot be captured
    synchronize(rank_device())
    captured = []
    reason = harness.failure_reason(lambda sets: captured.append(Captured(call, sets, calls)), input_sets)
    if reason is None:
        reason = harness.failure_reason(captured[0], None)
    if reason is None and references is not None:
        reason = harness.mismatch_reason(lambda _: captured[0].outputs, references[:1])
    if reason is not None:
        captured.clear()
        gc.collect()  # free the memory held by the failed capture
        return None, reason
    return captured[0], None


def capture_all(calls, input_sets, references, unchecked, calls_per_graph=_CALLS):
    """Capture each of ``calls``. Return ({name: Captured}, {name: reason}). Names in ``unchecked`` are not checked."""
    captured, reasons = {}, {}
    for name, call in calls.items():
        graph, reason = capture(call, input_sets, None if name in unchecked else references, calls_per_graph)
        if reason is None:
            captured[name] = graph
        else:
            reasons[name] = reason
    return captured, reasons
