"""Tensor parallelism for models that use torch's ``parallelize_module``.

    styles    ColwiseParallel and RowwiseParallel for torch.nn.Linear, which run the fused operators
    norms     SequenceParallel for norms, which compute with local tensors
    plan      parallelize: apply a plan of torch's styles with the fused operators
    report    which operator each linear layer of a model runs, and why others run torch
"""

from tdkernels.nn.parallel.norms import SequenceParallel
from tdkernels.nn.parallel.plan import parallelize
from tdkernels.nn.parallel.report import Entry, Report, report
from tdkernels.nn.parallel.styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel", "Entry", "Report", "RowwiseParallel", "SequenceParallel", "parallelize", "report",
]
